"""Another default dtype for a while."""

import contextlib

import torch


@contextlib.contextmanager
def default_dtype(dtype):
    """Set torch's default dtype within the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
