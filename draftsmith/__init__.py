"""Draftsmith makes a small draft for a large target language model, and says, honestly, what it is worth."""

__version__ = "0.1.0"
