"""A .gguf of the draft (and of the target, if asked) for llama.cpp, whose own converter is in no package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel

from draftsmith.recipes import Recipe
from draftsmith.recipes.files import whole_folder
from draftsmith.specdec.models import load_model
from draftsmith.specdec.places import locate, quiet, resolve
from draftsmith.train.export import cost, int8, proof
from draftsmith.train.export.card import card, licence
from draftsmith.train.export.conditions import Fit, fit, shared_positions
from draftsmith.train.export.gguf_family import with_numbers
from draftsmith.train.export.gguf_file import read_tensors, write_gguf
from draftsmith.train.export.gguf_tokenizer import Vocabulary, copied, vocabulary
from draftsmith.train.export.proof import free_place, safe
from draftsmith.train.export.serve import llama_cpp, write_script
from draftsmith.train.export.transformers_folder import bytes_of


def export(recipe: Recipe, force: bool = False) -> Path:
    """Write runs/NAME/export/gguf-FORM/draft.gguf, every tensor of which a fresh process finds as it must be."""
    how = recipe.export
    int8.asked(recipe, "gguf")
    place = free_place(recipe, force, f"gguf-{how.quantization}")
    given = locate(recipe.target.model)
    if how.models == "both" and given is not None and given.suffix == ".gguf":
        raise ValueError(f"export.models: both, but the target is a .gguf already: serve {given}, whose tokenizer the draft gets")
    pair = fit(recipe)
    rows = int(pair.target.vocab_size)
    words = copied(given, rows) if given is not None and given.suffix == ".gguf" else _words(recipe, pair, rows)
    with whole_folder(place, bytes_of(pair) * (1 if pair.exit is None else 2)) as folder:
        name = f"{recipe.name}, a draft for {Path(recipe.target.model).name}"
        with _source(pair, folder) as source:
            said = [_write(recipe, folder / "draft.gguf", pair.draft, words, str(source), name)]
        lost = _lost(recipe, pair, folder / "draft.gguf")
        if how.models == "both":
            target = load_model(recipe.target.model)
            said.append(
                _write(recipe, folder / "target.gguf", target, words, resolve(recipe.target.model), Path(recipe.target.model).name)
            )
        served = "target.gguf" if how.models == "both" else str(given.resolve()) if given is not None and given.is_file() else None
        write_script(folder, llama_cpp(served, recipe.train.k, shared_positions(pair.draft.config, pair.target)))
        use, notes = "sh serve.sh" + ("" if served else " TARGET.gguf"), [*pair.notes, *words.notes]
        (folder / "README.md").write_text(card(recipe, "; ".join(said), use, notes, "gguf", pair.layer, lost), encoding="utf-8")
        safe(folder)
    print(f"exported {place}: " + "; ".join(said))
    for note in filter(None, (lost, *notes, f"use it: {use}")):
        print(note)
    return place


@contextmanager
def _source(pair: Fit, folder: Path) -> Iterator[Path]:
    """The draft as a folder that a fresh process can load. An exit is a model in memory only, so it is written for as long as it is looked at."""
    if pair.exit is None:
        yield pair.source
        return
    with TemporaryDirectory(dir=folder) as place:
        with quiet():
            pair.draft.save_pretrained(place)
        yield Path(place)


def _words(recipe: Recipe, pair: Fit, rows: int) -> Vocabulary:
    return vocabulary(pair.tokenizer, rows, pair.draft.config.bos_token_id, recipe.export.split)


def _write(recipe: Recipe, path: Path, model: PreTrainedModel, words: Vocabulary, source: str, name: str) -> str:
    """Write one file and prove it -> what to say of it."""
    about = {"name": name, "description": "made with Draftsmith"} | ({"license": theirs} if (theirs := licence(recipe)) else {})
    written = write_gguf(path, model, words, recipe.export.quantization, about)
    found = proof.in_a_fresh_process("prove_gguf", str(path), source, recipe.target.model, recipe.export.quantization)
    spared = f", {len(written.spared)} of them f16, for their rows are no whole blocks" if written.spared else ""
    exact = "equal to the source's" if not found["largest"] else f"at most {found['largest']:.2g} from the source's"
    return f"{path.name}: {written.tensors} tensors{spared}, read back in a fresh process, {exact}; {_ran(found['llama_cpp'])}"


def _lost(recipe: Recipe, pair: Fit, path: Path) -> str:
    """What the quantisation costs, by the numbers of the file; "" where it is no quantisation."""
    if recipe.export.quantization not in ("q8_0", "q4_0"):
        return ""
    as_kept = with_numbers(pair.draft, {name: one.values for name, one in read_tensors(path)})
    return cost.told(recipe, pair.tokenizer, pair.draft, as_kept)


def _ran(answer: dict[str, Any] | None) -> str:
    if answer is None:
        return "not run in llama.cpp here (pip install llama-cpp-python, and export again)"
    return (
        f"in llama.cpp {answer['same_tokens']} of {answer['texts']} texts have the same tokens, {answer['equal']} of {answer['compared']} greedy "
        f"tokens are equal, logits differ by {answer['logits']:.2g} at most"
    )
