"""What a process holds while a draft learns, by how it is spread over processes; sums of weights, gradients, moments and activations, which
an allocator's own and a network's buffers come on top of."""

from __future__ import annotations

from typing import NamedTuple

from draftsmith.eval.plan.roofline import Pair

CHUNK = 128  # positions whose logits exist at a time (train.chunk)
COPIES = 13  # tensors of a chunk's logits that are alive at the height of a loss
BUCKET = 500_000_000  # numbers that DeepSpeed reduces or gathers at a time, its default
FP32, HALF = 4, 2


class Held(NamedTuple):
    """Bytes of one process."""

    scheme: str
    precision: str
    teacher: str  # live: the whole target reads along; sharded: the same, its blocks in parts; stored: what it said is on disk
    target: float
    states: float  # weights that are trained, their gradients, moments, and copies that a scheme makes of them
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return sum(self[3:])


def training(pair: Pair, processes: int, tokens: int) -> list[Held]:
    """For each scheme, a micro-batch of `tokens` tokens a process; AdamW; empty where there is nothing to train.

    The frozen target is whole on every process; sharded, its embedding and head are, and two blocks at a time. Stored, its embedding and
    head are what must stay of it.
    """
    size, draft = pair.target, pair.draft
    if not draft.trained or draft.size is None:
        return []
    frozen = draft.trained < draft.size.layers  # an exit's trunk: nothing of it is kept for a backward
    largest = 0 if frozen else max(one.dense + one.experts for one in draft.size.blocks)
    found, outer = [], size.parameters - size.layers
    gathered = 2 * max(one.dense + one.experts for one in size.blocks)
    for scheme, held in SCHEMES.items():
        for half in (False, True):
            stream, products = (0 if frozen else sum(one.kept[at] for one in draft.size.blocks) for at in (0, 1))
            # Under autocast norms keep fp32, and each of their results is cast once more for the products behind it.
            kept = tokens * (FP32 * stream + (HALF * stream / 3 + HALF * products if half else FP32 * products))
            logits = CHUNK * COPIES * FP32 * max(size.vocabulary, draft.size.vocabulary)
            number = 1 if scheme == "one process" else processes
            states = held(draft.trained, largest, number, half)
            targets = {
                "live": (outer, size.layers),
                "sharded": (outer, size.layers / number),
                "stored": (size.embedding + size.head, 0),
            }
            for teacher, parts in targets.items():
                if teacher == "sharded" and number == 1:
                    continue
                passing = 0 if teacher == "stored" else tokens * max(sum(one.kept) for one in size.blocks) * pair.dtype.cached
                passing += pair.dtype.bytes(0, gathered) if teacher == "sharded" else 0
                # The teacher's forward is over before the draft's begins.
                held_target = pair.dtype.bytes(*parts)
                found.append(Held(scheme, "bf16" if half else "fp32", teacher, held_target, states, max(kept, passing), logits))
    return found


def _alone(trained: int, largest: int, processes: int, half: bool) -> float:
    return trained * (FP32 + FP32 + 2 * FP32 + (HALF if half else 0))  # autocast keeps a copy of each weight until the step


def _ddp(trained: int, largest: int, processes: int, half: bool) -> float:
    return _alone(trained, largest, processes, half) + FP32 * trained  # buckets that gradients are reduced in


def _fsdp2(trained: int, largest: int, processes: int, half: bool) -> float:
    # Two blocks are whole at a time: one in work, the next on its way; and one block's gradients.
    return 4 * FP32 * trained / processes + (HALF if half else FP32) * 3 * largest


def _zero2(trained: int, largest: int, processes: int, half: bool) -> float:
    whole = HALF if half else FP32
    return whole * trained + (whole + FP32 + 2 * FP32) * trained / processes + whole * min(BUCKET, trained)


def _zero3(trained: int, largest: int, processes: int, half: bool) -> float:
    whole = HALF if half else FP32
    return (2 * whole + FP32 + 2 * FP32) * trained / processes + whole * (min(BUCKET, trained) + min(2 * BUCKET, trained))


SCHEMES = {"one process": _alone, "DDP": _ddp, "FSDP2": _fsdp2, "ZeRO-2": _zero2, "ZeRO-3": _zero3}
