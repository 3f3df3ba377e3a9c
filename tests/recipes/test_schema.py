"""Recipes: all errors at once with their paths, YAML's traps closed, overrides, and what ships loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from draftsmith.recipes import load_recipe
from draftsmith.recipes.paths import HERE, find, find_recipe
from runs import draftsmith, write_run


def test_every_recipe_that_ships_loads_and_survives_its_own_dump(tmp_path: Path) -> None:
    shipped = sorted(HERE.glob("*.yaml"))
    assert shipped
    for path in shipped:
        recipe = load_recipe(path.stem)
        assert path.read_text().startswith("#"), "the header holds the exact commands"
        (tmp_path / "again.yaml").write_text(recipe.dump())
        assert load_recipe(tmp_path / "again.yaml") == recipe
        find(recipe.data.prompts)
        find(recipe.eval.prompts)


def test_all_errors_at_once_with_paths_and_the_nearest_name(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    with pytest.raises(ValueError, match="6 problems") as error:
        load_recipe(
            path,
            [
                "train.learning_rte=1",
                "train.batch_size=0",
                "train.precision=fp8",
                "draft.layers=[-1]",
                "eval.candidates=[{k: 2}]",
                "nonsense",
            ],
        )
    text = str(error.value)
    for wanted in (
        "train.learning_rte: no such key; did you mean learning_rate?",
        "train.batch_size: input should be greater than 0, found 0",
        "train.precision: ",
        "draft.layers.0: ",
        "eval.candidates.0.drafter: is needed",
        "'nonsense' is not an override",
    ):
        assert wanted in text, text


def test_yaml_traps(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    text = yaml.safe_dump(yaml.safe_load(path.read_text()))
    path.write_text(text.replace("learning_rate: 0.001", "learning_rate: 1e-4\n  precision: no"))
    recipe = load_recipe(path)
    assert recipe.train.learning_rate == 1e-4
    assert recipe.train.precision == "no"
    assert load_recipe(path, ["train.learning_rate=2e-5", "train.precision=no"]).train.learning_rate == 2e-5
    for trap, problem in {
        "train.learning_rate=true": "a number or a text is needed, found True",
        "seed=1:30": "valid integer",
        "train.learning_rate=.inf": "finite number",
        "train={{x}}": "a key must be plain text",
        "draft.layers=[1, 1]": "draft.layers: value error, each at most once",
        "eval.candidates=[{drafter: exit:x}]": "exit takes a whole number",
    }.items():
        with pytest.raises(ValueError, match=problem):
            load_recipe(path, [trap])
    assert load_recipe(path, ["seed=010"]).seed == 10, "not octal"
    path.write_text(text + "seed: 4\n")
    with pytest.raises(ValueError, match="'seed' is given twice"):
        load_recipe(path)
    path.write_text("- a list\n")
    with pytest.raises(ValueError, match="mapping of sections, found list"):
        load_recipe(path)
    path.write_text("a: [")
    with pytest.raises(ValueError, match=r"small\.yaml"):
        load_recipe(path)


def test_the_schema_knows_the_losses(tmp_path: Path) -> None:
    from draftsmith.distill.losses import LOSSES, PARAMETERS, loss_named
    from draftsmith.recipes import schema

    assert {name: PARAMETERS.get(name) for name in LOSSES} == schema.LOSSES
    path = write_run(tmp_path)
    asked = "train.loss={lk_lambda:10: 1.0, jsd:0.1: 0.5, hass:5: 1, ce_argmax: 0.1}"
    assert load_recipe(path, [asked]).train.loss == {"lk_lambda:10": 1.0, "jsd:0.1": 0.5, "hass:5": 1.0, "ce_argmax": 0.1}
    for wrong, problem in {
        "forward_lk": "no such loss; did you mean forward_kl\\?",
        "huber": "no such loss; known are forward_kl, reverse_kl",
        "tvd_pp:2": "tvd_pp takes no parameter; those that do are jsd, lk_lambda, hass",
        "jsd:1": "beta must be a number above 0 and below 1, found 'jsd:1'",
        "lk_lambda:x": "eta must be a number above 0, found",
        "lk_lambda:inf": "eta must be a number above 0, found",
        "hass:0": "k must be a whole number above 0, found",
        "hass:1.5": "k must be a whole number above 0, found",
    }.items():
        with pytest.raises(ValueError, match=problem):
            load_recipe(path, [f"train.loss={{{wrong}: 1}}"])
        with pytest.raises(ValueError, match="loss"):
            loss_named(wrong)


def test_overrides_reach_whatever_the_recipe_has(tmp_path: Path) -> None:
    recipe = load_recipe(
        write_run(tmp_path), ["draft.layers=[0, 2]", "train.loss={forward_kl: 0.5, total_variation: 1}", "--name=other"]
    )
    assert recipe.draft.layers == [0, 2]
    assert recipe.train.loss == {"forward_kl": 0.5, "total_variation": 1.0}
    assert recipe.folder.name == "other"


def test_what_is_not_there_is_named_with_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no recipe nothing.*quickstart"):
        find_recipe("nothing")
    with pytest.raises(FileNotFoundError, match="looked in"):
        find(tmp_path / "gone.jsonl")


def test_errors_come_fast_and_without_torch() -> None:
    import subprocess
    import sys

    code = "import sys, draftsmith.cli as c; c.main(['validate', 'quickstart', 'train.x=1']); sys.exit(int('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, "validate must not import torch"
    assert "train.x: no such key" in done.stderr


def test_validate_prints_the_resolved_recipe(tmp_path: Path) -> None:
    done = draftsmith("validate", write_run(tmp_path), "train.epochs=9")
    assert done.returncode == 0
    assert yaml.safe_load(done.stdout)["train"]["epochs"] == 9
