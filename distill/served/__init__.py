"""A target behind a completions endpoint."""
