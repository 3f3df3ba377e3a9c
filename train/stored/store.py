"""The stored teacher: a target listened to once, its k likeliest ids a position, in parquet shards that any process can go on with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from datasets import Dataset
from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from torch import Tensor

from draftsmith.distill import collate
from draftsmith.distill.batch import Example
from draftsmith.distill.top_k import Listened
from draftsmith.recipes.checksums import sha256
from draftsmith.recipes.files import room_for, whole_file, write_whole
from draftsmith.recipes.progress import Progress
from draftsmith.train.data.prepare import identity
from draftsmith.train.stored.columns import ROUNDED, About, bytes_a_position, checked, to_table
from draftsmith.train.stored.shards import fingerprint, places, shards

FORMAT = 1
ROWS_A_SHARD = 128  # a kill loses what was heard of these at most
Ask = Callable[[list[Example]], list[Listened]]  # what a target says at the scored positions of each row


def about_store(
    target: str, revision: str, tokenizer: Any, target_dtype: str, vocabulary: int, k: int, temperature: float = 1.0,
    support: Tensor | None = None,
) -> About:  # fmt: skip
    """What a store hangs on beside its rows; each of these is in its manifest, and another one is refused."""
    words = [sorted(tokenizer.get_vocab().items()), tokenizer.eos_token_id]
    return identity(revision, tokenizer) | {
        "format": FORMAT, "target": target, "target_dtype": target_dtype, "tokenizer": fingerprint(words), "vocabulary": vocabulary,
        "k": k, "temperature": float(temperature), "support": None if support is None else fingerprint(support.tolist()),
        "dtype": ROUNDED,
    }  # fmt: skip


def write_store(
    folder: Path, rows: list[Example], ask: Ask, about: About, accelerator: Accelerator, rows_a_shard: int = ROWS_A_SHARD,
    together: AbstractContextManager[Any] = nullcontext(),
) -> None:  # fmt: skip
    """Ask about every row that `folder` does not hold yet, and end with the same bytes however often this was interrupted.

    Processes share the shards, `together` around the asking where they cannot ask alone. A shard takes its name after its checksum stands beside it; the checksums end in the manifest.
    """
    distinct = {place.key: row for row in rows for place in places(collate([row]))}
    plan = shards(list(distinct.values()), rows_a_shard)
    if not plan:
        raise ValueError(f"none of {len(rows)} rows has a position to score, so there is nothing to ask a target about")
    positions = sum(place.scored for shard in plan for place in places(collate(shard)))
    terms = about | {"rows": fingerprint(plan), "rows_a_shard": rows_a_shard, "positions": positions}
    found = _manifest(folder)
    if found is not None:
        _same(folder, found, terms)
    sums: dict[str, str] = (found or {}).get("shards") or {}
    paths = [folder / f"said-{number:05}.parquet" for number in range(len(plan))]
    missing = [number for number, path in enumerate(paths) if not path.is_file()]
    done = sums and not missing and not any(folder.glob("*.sha256"))
    accelerator.wait_for_everyone()  # every process has seen the folder as it was
    if done:
        return
    if accelerator.is_main_process and missing:
        _make_room(folder, [plan[number] for number in missing], about)
    if accelerator.is_main_process and found is None:
        write_whole(folder / "manifest.json", _written(terms, None))
    accelerator.wait_for_everyone()
    progress = Progress("listening to the target", len(plan), unit="shards", quiet=not accelerator.is_main_process)
    with together:
        for number, (path, shard) in enumerate(zip(paths, plan, strict=True)):
            if number % accelerator.num_processes == accelerator.process_index:
                if path.is_file():
                    _check(path, _sum_beside(path) or sums.get(path.name))
                else:
                    _make(path, shard, ask, about)
                progress.at(number + 1)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_whole(folder / "manifest.json", _written(terms, {path.name: _sum_beside(path) or sums[path.name] for path in paths}))
        for path in paths:
            path.with_suffix(".sha256").unlink(missing_ok=True)
        size = sum(path.stat().st_size for path in paths)
        progress.done(f"{positions} positions, {size / 1e6:.1f} MB in {folder}, {size / max(1, positions):.0f} bytes each")
    accelerator.wait_for_everyone()


def opened(folder: Path, about: About) -> list[Path]:
    """The shards of a finished store, after their checksums; refused where its terms are not `about`."""
    found = _manifest(folder)
    if found is None:
        raise FileNotFoundError(f"{folder} holds no stored teacher: there is no manifest.json in it")
    _same(folder, found, about)
    if found["shards"] is None:
        raise ValueError(f"{folder} is not finished: the making of it was interrupted; the command that made it goes on")
    for name, checksum in found["shards"].items():
        _check(folder / name, checksum)
    return [folder / name for name in found["shards"]]


def _make(path: Path, shard: list[Example], ask: Ask, about: About) -> None:
    found, said = places(collate(shard)), ask(shard)
    if len(said) != len(shard):
        raise ValueError(f"asked about {len(shard)} rows; the target's answer is of {len(said)}")
    said = [checked(one, place.scored, about) for one, place in zip(said, found, strict=True)]
    with whole_file(path) as beside, no_bars():
        Dataset(to_table([place.key.hex() for place in found], said, about)).to_parquet(beside)
        write_whole(path.with_suffix(".sha256"), sha256(beside))


def _make_room(folder: Path, missing: list[list[Example]], about: About) -> None:
    """Say how large it will be, and refuse a disk that is smaller, with the copy that is read counted too."""
    shutil.rmtree(folder / "read", ignore_errors=True)  # a copy of shards that will be others
    positions = sum(place.scored for shard in missing for place in places(collate(shard)))
    kept, mapped = bytes_a_position(about)
    print(
        f"{about['k']} ids at each of {positions} positions, about {kept} bytes: {positions * kept / 1e6:.1f} MB in {folder}, "
        f"and {positions * mapped / 1e6:.1f} MB for the copy that is read"
    )
    room_for(folder, positions * (kept + mapped), folder)


def _manifest(folder: Path) -> About | None:
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); remove {folder}, and the same command makes it anew") from error


def _written(terms: About, sums: dict[str, str] | None) -> str:
    return json.dumps(terms | {"shards": sums}, indent=1) + "\n"


def _same(folder: Path, found: About, asked: About) -> None:
    changed = [f"{name} is {found.get(name)} there and {value} here" for name, value in asked.items() if found.get(name) != value]
    if changed:
        raise ValueError(
            f"{folder} holds what was said under other terms: {'; '.join(changed)}. Set them back, or remove the folder to ask anew"
        )


def _sum_beside(path: Path) -> str | None:
    beside = path.with_suffix(".sha256")
    return beside.read_text() if beside.is_file() else None


def _check(path: Path, checksum: str | None) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; the command that made it makes it anew")
    if sha256(path) != checksum:
        raise ValueError(
            f"{path} is damaged or was changed (its sha256 is not the one it was written with); "
            "remove it, and the command that made it makes it anew"
        )


@contextmanager
def no_bars() -> Iterator[None]:
    """datasets' own bars off, for ours is enough."""
    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()
