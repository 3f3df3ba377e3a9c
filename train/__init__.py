"""How it is learned: `accelerate launch -m draftsmith.train RECIPE [a.b=c ...]`."""
