"""What a draft is worth: drafters measured beside plain decoding on the same prompts."""

from draftsmith.eval.bench import Measurement, measure

__all__ = ["Measurement", "measure"]
