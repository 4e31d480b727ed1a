"""Dtypes of sums over logits, of the parts of an LM head, and of its products."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from dllm_kernels._graph._plain import autocasts

Part = TypeVar("Part", Tensor, Tensor | None)


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, otherwise float32: ``promote_types(dtype, torch.float32)`` without a dispatch."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def in_dtype_of(hidden: Tensor, t: Part) -> Part:
    """Cast a gathered part of the head, or None, from its storage dtype to the compute dtype, unless autocast does."""
    return t if t is None or autocasts(hidden) else t.to(hidden.dtype)


def dtype_of_products(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype that ``F.linear`` would compute in, autocast included."""
    if autocasts(hidden) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype
