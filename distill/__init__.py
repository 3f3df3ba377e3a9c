"""What is to be learned: losses, teachers, and how a draft is made from its target."""

from draftsmith.distill.batch import Batch, collate
from draftsmith.distill.draft import DistillDraft
from draftsmith.distill.early_exit import DistillExits
from draftsmith.distill.held import measured
from draftsmith.distill.losses import DIVERGENCES, LOSSES, acceptance, loss_named
from draftsmith.distill.making.cut import cut
from draftsmith.distill.making.drafts import CutDraft, WholeDraft
from draftsmith.distill.memory import Memory, predict
from draftsmith.distill.objective import Loss, Objective
from draftsmith.distill.signal import Dense, Signal
from draftsmith.distill.teacher import LiveTeacher
from draftsmith.distill.top_k import Listened, TopK, top_k

__all__ = [
    "DIVERGENCES",
    "LOSSES",
    "Batch",
    "CutDraft",
    "Dense",
    "DistillDraft",
    "DistillExits",
    "Listened",
    "LiveTeacher",
    "Loss",
    "Memory",
    "Objective",
    "Signal",
    "TopK",
    "WholeDraft",
    "acceptance",
    "collate",
    "cut",
    "loss_named",
    "measured",
    "predict",
    "top_k",
]
