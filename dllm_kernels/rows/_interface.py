"""Constants, types and helpers that the backends and the code above them share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

IGNORE = -100
P_MASK_MIN = 1e-8
NLL = tuple[Tensor, Any, Any, Tensor | None, Tensor | None]


def column_of(y: Tensor, V: int) -> tuple[Tensor, Tensor | None]:
    """Return a column to read for each id, and a mask of the out-of-range ids.

    The mask is None if every id is in range, which is tested on a CPU only, because elsewhere it would be a host sync.
    """
    if y.is_cpu and V and y.numel():
        least, most = torch.aminmax(y)
        if least.item() >= 0 and most.item() < V:
            return y, None
    column = y.clamp(0, max(V - 1, 0))
    return column, column != y if V else torch.ones_like(y, dtype=torch.bool)


def as_blv(logits: Tensor) -> Tensor:
    """View logits ``[..., V]`` as ``[B, L, V]`` with adjacent columns; copies only if a view is impossible."""
    V = logits.shape[-1]
    if logits.stride(-1) != 1 and V > 1:
        logits = logits.contiguous()
    if logits.dim() == 3:
        return logits
    if logits.dim() < 3:
        return logits.view(1, 1, V) if logits.dim() == 1 else logits.unsqueeze(0)
    return logits.reshape(math.prod(logits.shape[:-2]), logits.shape[-2], V)
