"""How many times as fast as plain decoding, on the same prompts, with an interval over prompts."""

import datasets
import evaluate
import numpy as np

WHAT = """
Tokens a second over plain decoding's, each pooled over all prompts (a ratio of sums: a mean of the prompts' ratios would let short
answers count as much as long ones). The interval is a bootstrap with the prompt as its unit, both arms of a prompt drawn together.
"""
INPUTS = """
One row a prompt, sums over its answers: new_tokens and seconds with a draft; baseline_new_tokens and baseline_seconds by plain decoding.
The same clock for both, prefill included, warm-up left out.
resamples: of the bootstrap, 2000. confidence: of the interval, 0.95. seed: 0.

Returns speedup, low and high (None from fewer than 3 prompts), and prompts.
"""


class Speedup(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        columns = ("new_tokens", "seconds", "baseline_new_tokens", "baseline_seconds")
        return evaluate.MetricInfo(
            description=WHAT,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({one: datasets.Value("float64") for one in columns}),
        )

    def _compute(
        self,
        new_tokens: list[float],
        seconds: list[float],
        baseline_new_tokens: list[float],
        baseline_seconds: list[float],
        resamples: int = 2000,
        confidence: float = 0.95,
        seed: int = 0,
    ) -> dict[str, object]:
        table = np.array([new_tokens, seconds, baseline_new_tokens, baseline_seconds], dtype=float)
        if not (table > 0).all():
            raise ValueError("a prompt without tokens or without seconds has no speed; leave it out on both sides, and say so")
        prompts = table.shape[1]
        low = high = None
        if prompts >= 3:
            drawn = np.random.default_rng(seed).integers(prompts, size=(resamples, prompts))
            tail = (1 - confidence) / 2
            low, high = (float(one) for one in np.quantile(_ratio(table[:, drawn].sum(-1)), [tail, 1 - tail]))
        return {"speedup": float(_ratio(table.sum(-1))), "low": low, "high": high, "prompts": prompts}


def _ratio(sums: np.ndarray) -> np.ndarray:
    return (sums[0] / sums[1]) / (sums[2] / sums[3])
