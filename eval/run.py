"""`draftsmith eval`: measure a recipe's candidates and write report.json and report.md into the run folder."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import torch

from draftsmith.eval import page, report
from draftsmith.eval.advice import advice, advice_of, setting
from draftsmith.eval.bench import Bench
from draftsmith.eval.candidates import folder_of, kind_of, place_of, prepare_all, read_bytes, refuse_another_target
from draftsmith.eval.guards import guards
from draftsmith.eval.kept import Kept, Part, fingerprint_of, read_kept
from draftsmith.eval.machine import device_name
from draftsmith.eval.measurement import Arm
from draftsmith.eval.measuring import at, measure_left, with_plain_again
from draftsmith.eval.parts import examples_of, figures_of, lines
from draftsmith.eval.prompts import sample, text_digest, together
from draftsmith.eval.tables import print_table
from draftsmith.recipes import Prompt, Recipe, read_prompts, runs
from draftsmith.recipes.files import writable, write_whole
from draftsmith.recipes.seen import trained_in
from draftsmith.specdec import Sampling, load, load_drafter
from draftsmith.specdec.drafters import exit_of
from draftsmith.specdec.places import revision

VERSIONS = ("draftsmith", "torch", "transformers")


def run_eval(recipe: Recipe, show: bool = True) -> dict[str, Any]:
    """The report; it is printed, and written to the run folder as report.json, report.md and report.html. What was measured so before, by a call
    that was killed or one that is repeated, is kept (measurements.jsonl)."""
    settings, folder = recipe.eval, recipe.folder
    every = {name: read_prompts(name) for name in settings.files}
    temperatures = settings.temperatures or [settings.sampling.temperature]
    parts = [Part(*one) for one in product(settings.files, temperatures, settings.batches)]
    groups = {part: together(sample(every[part.prompts], settings.per_kind), part.batch) for part in parts}
    places = {arm.name: place_of(folder, arm.drafter) for arm in settings.arms}
    name = revision(recipe.target.model)
    for place in places.values():
        draft = place if Path(place).exists() else place.rpartition("+")[2]
        refuse_another_target(Path((exit_of(draft) or (draft, 0))[0]), name)
    torch.set_num_threads(settings.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = read_kept(folder / "measurements.jsonl", fingerprint_of(_identity(recipe, places, name, device)))
    wanted = [(part, group, turn) for part, some in groups.items() for group in some for turn in range(len(group[0].turns))]
    if any(kept.find(*one) is None for one in wanted):
        _measure(recipe, parts, groups, places, kept, device)
    else:
        print(f"all answers were measured before; remove {kept.path} to measure them anew", file=sys.stderr)
    began = time.perf_counter()
    whole = _report(recipe, parts, groups, places, kept, name, device, {one: len(some) for one, some in every.items()})
    whole["how"]["time"] = _time(
        [one for part in parts for one in lines(part, groups[part], kept)], kept, parts, time.perf_counter() - began
    )
    drafts = [Path(one) for one in map(folder_of, places.values()) if Path(one).is_dir()]
    whole["guards"] = guards(whole, every, *dict.fromkeys([folder.resolve(), *filter(None, map(trained_in, drafts))]))
    write_whole(folder / "eval.yaml", recipe.dump())
    write_whole(folder / "report.json", json.dumps(whole, indent=1) + "\n")
    write_whole(folder / "report.md", report.markdown(whole))
    page.write(whole, folder / "report.html")
    if show:
        _show(whole, folder)
    return whole


def _measure(
    recipe: Recipe, parts: Sequence[Part], groups: Mapping[Part, Sequence[list[Prompt]]], places: Mapping[str, str], kept: Kept,
    device: torch.device,
) -> None:  # fmt: skip
    settings = recipe.eval
    writable(recipe.folder)
    target, tokenizer = load(recipe.target.model, recipe.target.dtype, device)
    loaded = {place: load_drafter(place, target, tokenizer) for place in dict.fromkeys(places.values())}
    arms = [Arm(arm.name, loaded[places[arm.name]], arm.k) for arm in settings.arms]
    weights = read_bytes(target)
    drafts = {arm.name: read_bytes(getattr(arm.drafter, "model", None)) for arm in arms}
    about = {
        name: {"kind": kind_of(loaded[place]), "bytes": drafts[name], "bytes_share": drafts[name] / weights}
        for name, place in places.items()
    }
    prepared = prepare_all(target, arms) if settings.decoding == "prepared" else ""
    kept.know({"prepared": prepared, "arms": about})
    how = Sampling(**settings.sampling.model_dump())
    bench = Bench(target, tokenizer, with_plain_again(arms), how, settings.max_new_tokens, settings.seed)
    measure_left({part: at(bench, part) for part in parts}, groups, kept, places)


def _identity(recipe: Recipe, places: Mapping[str, str], name: str, device: torch.device) -> dict[str, Any]:
    """All that a measurement hangs on beside its prompts, temperature and batch; two that differ here are not mixed."""
    settings = recipe.eval
    files = {folder_of(place) for place in places.values()}
    return {
        "target": name, "dtype": recipe.target.dtype, "device": device_name(device), "threads": settings.threads, "decoding": settings.decoding,
        "arms": [[arm.name, places[arm.name], arm.k] for arm in settings.arms],
        "drafts": {one: revision(one) for one in sorted(files) if Path(one).exists() or "/" in one},
        "sampling": [settings.sampling.top_k, settings.sampling.top_p], "max_new_tokens": settings.max_new_tokens, "seed": settings.seed,
        "versions": {one: metadata.version(one) for one in VERSIONS},
    }  # fmt: skip


def _report(
    recipe: Recipe, parts: Sequence[Part], groups: Mapping[Part, Sequence[list[Prompt]]], places: Mapping[str, str], kept: Kept, name: str,
    device: torch.device, in_file: Mapping[str, int],
) -> dict[str, Any]:  # fmt: skip
    settings = recipe.eval
    done = {part: lines(part, groups[part], kept) for part in parts}
    found = [
        figures_of(part, done[part], settings.arms, places, kept, settings, in_file[part.prompts])
        | {"texts": {one.id: text_digest(one) for group in groups[part] for one in group}}
        for part in parts
    ]
    found = [part | {"advice": advice_of(part)} for part in found]
    asked = {one.id: one.turns[0] for group in groups[parts[0]] for one in group}
    return {
        "schema": 2, "name": recipe.name,
        "how": {
            "target": recipe.target.model, "target_revision": name, "dtype": recipe.target.dtype, "device": device_name(device),
            "threads": settings.threads, "sampling": settings.sampling.model_dump(exclude={"temperature"}), "max_new_tokens": settings.max_new_tokens,
            "seed": settings.seed, "prepared": kept.about["prepared"], "prompts": ", ".join(settings.files), "bootstrap": settings.bootstrap,
            "prompts_in_file": sum(in_file.values()), "sittings": len({one.sitting for some in done.values() for one in some}),
            "all_prompts_command": f"{_program()} eval {recipe.folder / 'eval.yaml'} eval.per_kind=0",
            "versions": {name: metadata.version(name) for name in VERSIONS},
        },
        "definitions": report.DEFINITIONS, "parts": found, "advice": advice(found), "guards": [],
        "examples": [one | {"asked": asked[one["prompt"]]} for one in examples_of(done[parts[0]], found[0])], "training": runs.passed_over(recipe.folder),
        "measurements": [m.__dict__ for some in done.values() for one in some for m in one.measured],
    }  # fmt: skip


def _time(done: Sequence[Any], kept: Kept, parts: Sequence[Part], reporting: float) -> dict[str, Any]:
    """Where the seconds of an evaluation went, and the share that was not decoding; loading the models is left out."""
    spent = {what: sum(one.seconds[what] for one in done) for what in ("decoding", "teacher_forced", "all")}
    clocks = sum(kept.clocks[part][1] for part in parts)
    whole = spent["all"] + clocks + reporting
    rest = whole - spent["decoding"] - spent["teacher_forced"] - clocks
    share = 1 - spent["decoding"] / whole
    sittings = len({one.sitting for one in done})
    again = (
        f" It was measured in {sittings} sittings, after interruptions: clocks of two sittings may differ, but an answer's runs all lie in one."
        if sittings > 1
        else ""
    )
    return {
        "decoding": spent["decoding"], "teacher_forced": spent["teacher_forced"], "clocks": clocks, "rest": rest, "not_decoding": share,
        "said": f"Of {whole:.0f} seconds, the loading of models aside, {share:.1%} were not decoding: clocks {clocks:.1f} s, teacher-forced "
        f"passes {spent['teacher_forced']:.1f} s, all else {rest:.1f} s.{again}",
    }  # fmt: skip


def _show(whole: dict[str, Any], folder: Path) -> None:
    for part in whole["parts"]:
        where = f" ({setting(part)})" if len(whole["parts"]) > 1 else ""
        print_table(f"What the drafts are worth{where}", report.rows(part))
        print_table(f"Tokens per call (speed-up) by kind{where}", report.kinds(part))
        print_table(f"What a round costs, and the speed-up that follows{where}", report.predictions(part))
    for sentence in [*whole["advice"], *whole["guards"]]:
        print(sentence)
    first = whole["parts"][0]
    if first["prompts"] < first["prompts_in_file"]:
        print(f"{first['prompts']} of {first['prompts_in_file']} prompts; for all of them: {whole['how']['all_prompts_command']}")
    print(whole["how"]["time"]["said"])
    print(f"report: {folder / 'report.md'}, {folder / 'report.html'}")


def _program() -> str:
    """How the reader called this program, so that what is printed can be pasted."""
    return sys.argv[0] if Path(sys.argv[0]).name == "draftsmith" else "draftsmith"
