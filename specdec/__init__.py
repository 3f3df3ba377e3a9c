"""The bottom floor: a lossless speculative decoder, given a target and a drafter."""

from draftsmith.specdec.audit import audit
from draftsmith.specdec.decode import Generation, Written, generate
from draftsmith.specdec.drafters import DRAFTERS, CombinedDrafter, EarlyExitDrafter, ModelDrafter, NgramDrafter, load_drafter
from draftsmith.specdec.drafters.base import Drafter, Outcome, Proposal
from draftsmith.specdec.models import compatible, load
from draftsmith.specdec.pace import Adaptive, Fixed
from draftsmith.specdec.prepare import prepare_for_decoding
from draftsmith.specdec.sampling import Sampling, to_probs
from draftsmith.specdec.verify import Verdict, verify, verify_block

__all__ = [
    "DRAFTERS", "Adaptive", "CombinedDrafter", "Drafter", "EarlyExitDrafter", "Fixed", "Generation", "ModelDrafter", "NgramDrafter", "Outcome", "Proposal", "Sampling", "Verdict", "Written", "audit", "compatible", "generate", "load", "load_drafter", "prepare_for_decoding", "to_probs", "verify", "verify_block",
]  # fmt: skip
