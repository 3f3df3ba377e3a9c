"""How many tokens a call of the target gives: with its own token, without it, over the rounds that drafted and over all calls."""

import datasets
import evaluate

WHAT = """
Tokens per call of the target, pooled over calls. Three figures go by this name, and here each has its own: mean_acceptance_length is
vLLM's 1 + accepted / drafts, over the calls that verified a draft; accepted_length is the same without the target's own token; and
block_efficiency counts plain calls too (a pace that does not always draft), so it is what calls are saved by.
"""
INPUTS = """
drafted: for each call of the target, how many drafted tokens it verified, 0 for a plain one.
accepted: how many of them it accepted, the target's own token not among them.

Returns block_efficiency, mean_acceptance_length and accepted_length (both None where nothing was drafted), num_calls, num_drafts, and
histogram: of the calls that verified a draft, how many accepted 0, 1, 2 ... tokens.
"""


class BlockEfficiency(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=WHAT,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"drafted": datasets.Value("int64"), "accepted": datasets.Value("int64")}),
            reference_urls=["https://arxiv.org/abs/2211.17192", "https://docs.vllm.ai/en/latest/usage/metrics.html"],
        )

    def _compute(self, drafted: list[int], accepted: list[int]) -> dict[str, object]:
        for drafts, passed in zip(drafted, accepted, strict=True):
            if not 0 <= passed <= drafts:
                raise ValueError(
                    f"a call with {drafts} drafted and {passed} accepted tokens: leave the target's own token out of `accepted`"
                )
        kept = [passed for drafts, passed in zip(drafted, accepted, strict=True) if drafts]
        length = sum(kept) / len(kept) if kept else None
        return {
            "block_efficiency": 1 + sum(kept) / len(drafted),
            "mean_acceptance_length": None if length is None else 1 + length,
            "accepted_length": length,
            "num_calls": len(drafted),
            "num_drafts": len(kept),
            "histogram": [kept.count(length) for length in range(max(kept, default=-1) + 1)],
        }
