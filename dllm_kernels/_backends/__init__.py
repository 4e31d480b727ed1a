"""Backends of the row primitives: interface, plain torch, Triton kernels."""
