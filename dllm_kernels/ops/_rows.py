"""The row primitives: what a backend must offer, and the layout they take.

Both backends (``ops/_torch_rows.py``, ``kernels/token_nll.py`` with ``kernels/linear_nll.py``) have these functions.
``logits`` is ``[B, L, V]`` with any batch and position strides and columns side by side; everything else has one entry
a row, ``N = B * L`` of them, contiguous. ``acc`` is float32, or float64 for float64 logits. A row whose target, int64, is
``SKIP`` is inactive: it is never read. Any other target outside of the columns gives NaN.

All take ``transform`` (``ops/_transform.py``): it is the transformed logits whose statistics and softmax these are, and the
gradient is that in the logits as they were given. No target is its ``skip_id``: who makes the job has taken such targets
out of the columns.

``row_stats(logits, targets, *, with_correct)``
    Reads each active row once. Returns (nll, row_max, log_sum, target_logit, correct): ``[N]`` of dtype acc, and a bool
    ``[N]`` or None. ``log_sum`` is log(sum(exp(row - row_max))). All are 0 / False for inactive rows.

``row_grad(logits, targets, scale, row_max, log_sum, out, *, whole_row=True)``
    Writes ``scale * (exp(logits - row_max - log_sum) - onehot)`` to ``out`` (same shape as the logits, its own strides,
    may be the logits themselves), zeros for inactive rows. With ``whole_row=False`` the columns are one shard of a
    longer row, and a target outside of them only means that the one-hot lies in another shard.

``row_nll_grad_(logits [C, V], targets, scale, *, with_correct)``
    ``row_stats`` and ``row_grad`` at once, the gradient over the logits.

``row_nll_factored_(logits [C, V], targets, scale, *, with_correct)``, float32 and bfloat16, or None where a backend has none
    ``row_stats`` and a factor a row, in one pass: the gradient is the factor times what then stands where the logits were.
    Alone without a transform.

``scale_(t, factor)``
    ``t *= factor`` for a 0-d factor on the device of t, without a host sync; costs nothing when the factor is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

SKIP = -100
Stats = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


class RowPrimitives(NamedTuple):
    """One backend's row primitives."""

    row_stats: Callable[..., Stats]
    row_grad: Callable[..., None]
    row_nll_grad_: Callable[..., Stats]
    scale_: Callable[[torch.Tensor, torch.Tensor], None]
    row_nll_factored_: Callable[..., tuple[Stats, torch.Tensor]] | None = None


def as_blv(logits: torch.Tensor) -> torch.Tensor:
    """View ``[..., V]`` logits as ``[B, L, V]`` with columns side by side; copies only where no view can."""
    V = logits.shape[-1]
    if logits.stride(-1) != 1 and V > 1:
        logits = logits.contiguous()
    if logits.dim() == 3:
        return logits
    if logits.dim() < 3:
        return logits.view(1, 1, V) if logits.dim() == 1 else logits.unsqueeze(0)
    B, L = math.prod(logits.shape[:-2]), logits.shape[-2]
    try:
        return logits.view(B, L, V)
    except RuntimeError:
        return logits.reshape(B, L, V)
