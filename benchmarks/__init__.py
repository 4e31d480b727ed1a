"""Measurements and the training demo; ``python -m benchmarks`` lists them. Not part of the wheel."""
