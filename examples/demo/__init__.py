"""A small diffusion LM trained twice, by the reference's losses and by ours: ``python -m benchmarks train``."""
