"""What a draft is worth: drafters measured beside plain decoding on the same prompts."""

from draftsmith.eval.bench import Bench, measure
from draftsmith.eval.measurement import Arm, Measurement

__all__ = ["Arm", "Bench", "Measurement", "measure"]
