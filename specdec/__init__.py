"""The bottom floor: a lossless speculative decoder, given a target and a drafter."""

from draftsmith.specdec.decode import Generation, generate
from draftsmith.specdec.drafters import DRAFTERS, EarlyExitDrafter, ModelDrafter, NgramDrafter, load_drafter
from draftsmith.specdec.drafters.base import Drafter, Outcome, Proposal
from draftsmith.specdec.models import compatible, load
from draftsmith.specdec.sampling import Sampling, to_probs
from draftsmith.specdec.verify import Verdict, verify, verify_block

__all__ = [
    "DRAFTERS", "Drafter", "EarlyExitDrafter", "Generation", "ModelDrafter", "NgramDrafter", "Outcome", "Proposal", "Sampling",
    "Verdict", "compatible", "generate", "load", "load_drafter", "to_probs", "verify", "verify_block",
]  # fmt: skip
