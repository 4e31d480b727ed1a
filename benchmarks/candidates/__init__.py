"""Kernels that may replace those of the package once a GPU has shown them to be faster; see ``variants``."""
