"""Where a recipe's names point: a path from here, or from Draftsmith's own files, so `recipes/quickstart.yaml` works anywhere."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent


def find(name: str | Path) -> Path:
    """The existing file behind `name`; a relative one that is not here is looked for among the files that ship with Draftsmith."""
    path = Path(name).expanduser()
    ours = HERE.parent / path
    for place in (path, ours):
        if place.exists():
            return place
    where = str(path.parent.resolve()) + ("" if path.is_absolute() else f", then {ours.parent}")
    raise FileNotFoundError(f"{name} does not exist (looked in {where})")


def find_recipe(name: str | Path) -> Path:
    """A recipe by path, or one of ours by its bare name."""
    for place in (Path(name), HERE.parent / name, HERE / f"{name}.yaml"):
        if place.is_file():
            return place
    shipped = ", ".join(sorted(one.stem for one in HERE.glob("*.yaml")))
    raise FileNotFoundError(f"no recipe {name} (looked in {Path(name).parent.resolve()}; shipped with Draftsmith: {shipped})")
