"""Mathematics of rows of logits, stored or computed by an LM head, and what a backend must offer; nothing public."""
