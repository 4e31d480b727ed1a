"""Accumulation dtype of sums over logits."""

import torch


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, otherwise float32: ``promote_types(dtype, torch.float32)`` without a dispatch."""
    return torch.float64 if dtype == torch.float64 else torch.float32
