"""What is to be done: recipes and prompts, read and checked before any model is touched. No torch here."""

from draftsmith.recipes.load import load_recipe
from draftsmith.recipes.prompts import Prompt, read_prompts
from draftsmith.recipes.schema import Recipe

__all__ = ["Prompt", "Recipe", "load_recipe", "read_prompts"]
