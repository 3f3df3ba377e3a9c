"""What is to be done: recipes and prompts, read and checked before any model is touched. No torch here."""

from draftsmith.recipes.load import load_recipe
from draftsmith.recipes.prompts import Prompt, read_prompts
from draftsmith.recipes.schema import CheckpointDraft, Data, Eval, LayersDraft, Recipe, Server, Target, Train, WidthDraft

__all__ = [
    "CheckpointDraft", "Data", "Eval", "LayersDraft", "Prompt", "Recipe", "Server", "Target", "Train", "WidthDraft", "load_recipe",
    "read_prompts",
]  # fmt: skip
