"""What a draft will be worth, before it is decoded with: chances from one pass along a text, costs from a few rounds."""
