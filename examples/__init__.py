"""Example scripts, and the training code of the demo. Not part of the wheel."""
