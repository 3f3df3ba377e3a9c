"""Making a draft: which layers, how wide, from which checkpoint, with which vocabulary."""
