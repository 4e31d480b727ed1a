"""Triton kernels and their launchers: the only place that imports Triton. Imported lazily by ``ops``."""
