"""Random bits, and the arithmetic of what is drawn from them."""
