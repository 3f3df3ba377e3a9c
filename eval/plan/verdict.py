"""One sentence that a person can act on, from the facts of a plan."""

from __future__ import annotations

from typing import Any

CLEAR = 1.15  # the planner was within this of what was published, so less than it is too close to call


def verdict(found: dict[str, Any]) -> str:
    """What to do, at the middle one of the alphas."""
    asked, room = found["asked"], found["serving"]
    context, batch = asked["context"], asked["batch"]
    if room["total"] > room["has"]:
        return (
            f"Does not fit: batch {batch} at context {context} needs {room['total'] / 1e9:.0f} GB, {asked['device']} has {room['has'] / 1e9:.0f}; "
            + _instead(found)
        )
    ours = found["by_alpha"][len(found["by_alpha"]) // 2]
    alpha = " ".join(f"{one:g}" for one in ours["alpha"])
    what = f"at acceptance {alpha} and context {context}"
    least = found["needed"][batch][1.0]
    if ours["speed_up"] <= 1:
        later = [low for low, _ in ours["pays"][context] if batch < low <= found["most_batch"][context]]
        needs = [*([] if least is None else [f"an acceptance of {least:.2f}"]), *(f"a batch of {low}" for low in later[:1])]
        would = f"it would need {' or '.join(needs)}." if needs else "no acceptance would do."
        slower = 1 / ours["speed_up"]
        return (
            f"Do not speculate {what}: the best block takes {slower:.2f} times as long as plain decoding at batch {batch}; {would}"
        )
    gain = f"{ours['speed_up']:.2f}x with k = {ours['k']} at batch {batch}"
    if ours["speed_up"] < CLEAR:
        return f"Too close to call {what}: {gain}, which is within what this planner errs by; measure."
    return f"Speculate {what}: {gain}; {_until(found, ours, context)}."


def _until(found: dict[str, Any], ours: dict[str, Any], context: int) -> str:
    (_, last), fits = ours["pays"][context][-1], found["most_batch"][context]
    if last >= fits:
        return f"it pays up to the largest batch that fits, {fits}"
    if last == found["largest_batch"]:
        return f"it pays up to batch {last} at least"
    return f"do not speculate above batch {last}"


def _instead(found: dict[str, Any]) -> str:
    asked = found["asked"]
    if found["most_context"]:
        return f"the longest context for that batch is {found['most_context']}."
    if found["most_batch"][asked["context"]]:
        return f"the largest batch at that context is {found['most_batch'][asked['context']]}."
    return "not even one token fits beside the weights: take fewer bits (--dtype fp8, int4) or a smaller target."
