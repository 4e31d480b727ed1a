"""Internal utilities: argument validation, DTensor helpers, logits transforms, checks of LM heads."""
