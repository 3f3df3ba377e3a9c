"""Of the tokens that were drafted, how many were accepted: the rate, its counters under vLLM's names, and the rate by position."""

import datasets
import evaluate

WHAT = """
Accepted over drafted tokens, pooled over all rounds. It is neither the acceptance of a token given that all before it were accepted (that
is `conditional_acceptance`, by position) nor an overlap of two laws, and it falls as more is drafted at a time.
"""
INPUTS = """
drafted: for each call of the target, how many drafted tokens it verified (0: plain, which counts nowhere, as in vLLM).
accepted: how many of them it accepted, the target's own token not among them.

Returns acceptance_rate (None where nothing was drafted), num_drafts, num_draft_tokens, num_accepted_tokens, num_accepted_tokens_per_pos,
acceptance_rate_per_pos (over all drafts, as vLLM logs it) and conditional_acceptance (over the drafts that got there).
"""


class AcceptanceRate(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=WHAT,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"drafted": datasets.Value("int64"), "accepted": datasets.Value("int64")}),
            reference_urls=["https://docs.vllm.ai/en/latest/usage/metrics.html"],
        )

    def _compute(self, drafted: list[int], accepted: list[int]) -> dict[str, object]:
        rounds = [(drafts, passed) for drafts, passed in zip(drafted, accepted, strict=True) if drafts or passed]
        for drafts, passed in rounds:
            if not 0 <= passed <= drafts:
                raise ValueError(
                    f"a round of {drafts} drafted and {passed} accepted tokens: leave the target's own token out of `accepted`"
                )
        tokens, kept = sum(drafts for drafts, _ in rounds), sum(passed for _, passed in rounds)
        places = range(max((drafts for drafts, _ in rounds), default=0))
        by_place = [sum(passed > place for _, passed in rounds) for place in places]
        tried = [sum(drafts > place and passed >= place for drafts, passed in rounds) for place in places]
        return {
            "acceptance_rate": kept / tokens if tokens else None,
            "num_drafts": len(rounds),
            "num_draft_tokens": tokens,
            "num_accepted_tokens": kept,
            "num_accepted_tokens_per_pos": by_place,
            "acceptance_rate_per_pos": [one / len(rounds) for one in by_place],
            "conditional_acceptance": [one / of if of else None for one, of in zip(by_place, tried, strict=True)],
        }
