"""The house: who may import whom, the list of packages, and a wheel that works in a folder full of traps."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest on 3.10

ROOT = Path(__file__).parent.parent
FOLDERS = ("recipes", "specdec", "distill", "train", "eval")
MAY_IMPORT = {
    "recipes": set(), "specdec": set(), "distill": {"specdec"}, "train": {"distill", "specdec", "recipes"}, "eval": {"specdec", "recipes"},
}  # fmt: skip


def imported(path: Path) -> set[str]:
    """The names of our sub-packages (and `cli`) that a file imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: always import draftsmith.x"
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            assert name.split(".")[0] not in FOLDERS, f"{path} imports {name}: always import draftsmith.x"
            if name.startswith("draftsmith.") and (ROOT / name.split(".")[1]).is_dir():
                found.add(name.split(".")[1])
            if name == "draftsmith.cli":
                found.add("cli")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_who_imports_whom(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        allowed = MAY_IMPORT[folder] | {folder} | ({"cli"} if path.name == "__main__.py" else set())
        assert imported(path) <= allowed, path


def test_the_import_rule_can_fail(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("def f():\n    from draftsmith.eval import bench\n")
    assert imported(tmp_path / "x.py") == {"eval"}


def test_every_package_is_listed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {one.parent.relative_to(ROOT) for top in ("draftsmith", *FOLDERS) for one in (ROOT / top).rglob("__init__.py")}
    wanted = {".".join(folder.parts if folder.parts[0] == "draftsmith" else ("draftsmith", *folder.parts)) for folder in folders}
    assert set(settings["packages"]) == wanted
    assert all((ROOT / folder / "py.typed").is_file() for folder in folders)


def test_each_trap_has_its_line_and_every_test_named_there_exists() -> None:
    lines = [line for line in (ROOT / "docs" / "traps.md").read_text(encoding="utf-8").splitlines() if line.startswith("| D")]
    assert [line.split("|")[1].strip() for line in lines] == [f"D{number}" for number in range(1, 39)]
    there = {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    for line in lines:
        named = set(re.findall(r"`(test_\w+)`", line.split("|")[4]))
        assert named, f"{line} names no test"
        assert named <= there, f"no such test: {', '.join(sorted(named - there))}"


def test_the_wheel_is_complete_and_runs_among_a_users_own_train_and_eval(tmp_path: Path) -> None:
    source = tmp_path / "source"
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in files:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("draftsmith-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        inside = {name for name in packed.namelist() if ".dist-info/" not in name}
    kept = {".py", ".yaml", ".jsonl", ".json", ".css", ".typed"}
    wanted = {
        name if name.startswith("draftsmith/") else f"draftsmith/{name}"
        for name in files
        if name.split("/")[0] in ("draftsmith", *FOLDERS) and Path(name).suffix in kept and (ROOT / name).is_file()
    }
    assert inside == wanted
    home, trap = tmp_path / "home", tmp_path / "trap"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(home), str(wheel)], check=True)
    (trap / "eval").mkdir(parents=True)
    for name in ("train", "recipes", "specdec"):
        (trap / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    env = {**os.environ, "PYTHONPATH": str(home)}
    for command in ([str(home / "bin" / "draftsmith"), "validate"], ["-m", "draftsmith.train"], ["-m", "draftsmith.eval"]):
        done = subprocess.run(
            [sys.executable, *command, "recipes/quickstart.yaml", "seed=x"], cwd=trap, env=env, capture_output=True, text=True
        )
        assert done.returncode == 2
        assert "seed: input should be a valid integer" in done.stderr
    where = subprocess.run(
        [sys.executable, "-c", "import draftsmith.eval.metrics as m; print(m.__file__)"],
        cwd=trap,
        env=env,
        capture_output=True,
        text=True,
    )
    assert where.stdout.startswith(str(home)), where.stderr
