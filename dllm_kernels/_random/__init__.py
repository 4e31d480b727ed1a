"""Random bits, and what is drawn from them: levels, masks, tokens."""
