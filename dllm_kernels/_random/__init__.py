"""Random bits, and the arithmetic that converts them to levels, masks, tokens and scores."""
