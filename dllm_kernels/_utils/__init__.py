"""The ground floor: checks, tensors as they come, transforms of logits, and what a backend must offer."""
