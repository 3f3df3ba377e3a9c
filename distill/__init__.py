"""What is to be learned: losses, teachers, and how a draft is made from its target."""

from draftsmith.distill.batch import Batch, collate
from draftsmith.distill.draft import CutDraft, DistillDraft, WholeDraft, cut
from draftsmith.distill.losses import LOSSES, acceptance
from draftsmith.distill.objective import Loss, Objective
from draftsmith.distill.signal import Dense, Signal
from draftsmith.distill.teacher import LiveTeacher

__all__ = [
    "LOSSES",
    "Batch",
    "CutDraft",
    "Dense",
    "DistillDraft",
    "LiveTeacher",
    "Loss",
    "Objective",
    "Signal",
    "WholeDraft",
    "acceptance",
    "collate",
    "cut",
]
