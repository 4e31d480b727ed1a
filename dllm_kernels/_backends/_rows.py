"""The row primitives: what a backend must offer, and the layout they take.

``logits`` is ``[B, L, V]`` with any batch and position strides and columns side by side; everything else has one entry
a row, ``N = B * L`` of them, contiguous. ``acc`` is float32, or float64 for float64 logits. A row whose target, int64,
is ``IGNORE`` is inactive: it is never read. Any other target outside of the columns gives NaN.

All take ``transform`` (``_utils/_transform.py``): it is the transformed logits whose statistics and softmax these are,
and the gradient is that in the logits as they were given. No target is its ``skip_id``: callers replace such targets by
-1.

``stats``
    The row statistics, their forward and backward pass (``_backends/_row_stats.py``). A backend without kernels of its
    own for the NLL, which is minus the log-probability of one id, gets the next three from these: :func:`nll_of_stats`.

``nll(logits, targets, *, with_correct)``
    Reads each active row once. Returns (nll, row_max, log_sum, correct): ``[N]`` of dtype acc, and a bool ``[N]`` or
    None. ``log_sum`` is log(sum(exp(row - row_max))). All are 0 / False for inactive rows. A backend whose ``nll_grad``
    of whole rows reads neither row_max nor log_sum takes ``with_lse=False`` too, and then they are None.

``weighted_nll(logits, targets, weights, *, with_correct)``
    The same with a weight a row, in acc: a row of weight 0 is inactive too. Returns (weights * nll, nll, row_max,
    log_sum, correct).

``nll_grad(logits, targets, scale, row_max, log_sum, out, *, factor=None)``
    Writes ``scale * (exp(logits - row_max - log_sum) - onehot)`` to ``out`` (same shape as the logits, its own strides,
    may be the logits themselves), zeros for inactive rows and those of scale 0. With a factor, 0-d on the device of the
    logits, the scale of every other row is multiplied by it.

``nll_and_grad_(logits [C, V], targets, scale, *, with_correct)``
    Both at once, the gradient over the logits.

``divergence(...)``, ``divergence_grad(...)``
    Of rows to a teacher's: ``_backends/_divergence.py``.

``sample(logits [C, V], transform, noise)``
    (score float64 ``[C]``, column int64 ``[C]``) of the largest ``x_v - ln(-ln u_v)`` of each row, x the transformed
    logits and u the uniforms of the ``_noise.Noise``, or of the largest x if there is none; the lowest column
    wins a tie. Every operation of a score is exact or rounded by itself, so that equal logits give the same token on
    every device. What it returns for a row that holds a NaN is not defined.

``largest(logits [C, V], k, transform)``
    (values ``[C, k]`` in acc, columns int64 ``[C, k]``), the k largest transformed logits of each row in descending
    order; the lowest column first among equals.

``add_parts(t)``
    ``t`` with the sum over all parts of a split row in the place of this part's share of it; None where a row is whole.

``local_ids(ids)``
    Ids of whole rows as columns of this part, ``IGNORE`` where another part has them; None where a row is whole.

``scale_(t, factor)``
    ``t *= factor`` for a 0-d factor on the device of t, without a host sync; costs nothing when the factor is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dllm_kernels._backends._divergence import Divergences

IGNORE = -100
NLL = tuple[Tensor, Any, Any, Tensor | None]


class StatsPrimitives(NamedTuple):
    """One backend's primitives of the row statistics."""

    forward: Callable[..., Any]
    mix: Callable[..., tuple[Tensor, Tensor | None]]
    backward: Callable[..., None]


class RowPrimitives(NamedTuple):
    """One backend's row primitives."""

    stats: StatsPrimitives
    nll: Callable[..., NLL]
    weighted_nll: Callable[..., tuple[Any, ...]]
    nll_grad: Callable[..., None]
    nll_and_grad_: Callable[..., NLL]
    scale_: Callable[[Tensor, Tensor], None]
    divergence: Divergences
    divergence_grad: Callable[..., None]
    sample: Callable[..., tuple[Tensor, Tensor]]
    largest: Callable[..., tuple[Tensor, Tensor]]
    add_parts: Callable[[Tensor], Tensor] | None = None
    local_ids: Callable[[Tensor], Tensor] | None = None


def column_of(y: Tensor, V: int) -> tuple[Tensor, Tensor | None]:
    """For each id a column to read, and a mask of the ids that no column has.

    The mask is None if every id has a column. That is known on a CPU only: elsewhere it would be a host sync. As
    unsigned integers, negative ids are larger than any column.
    """
    if y.is_cpu and V and (not y.numel() or int(np.maximum.reduce(y.numpy().view(np.uint64), axis=None)) < V):
        return y, None
    column = y.clamp(0, max(V - 1, 0))
    return column, column != y if V else torch.ones_like(y, dtype=torch.bool)


def as_blv(logits: Tensor) -> Tensor:
    """View ``[..., V]`` logits as ``[B, L, V]`` with columns side by side; copies only where no view can."""
    V = logits.shape[-1]
    if logits.stride(-1) != 1 and V > 1:
        logits = logits.contiguous()
    if logits.dim() == 3:
        return logits
    if logits.dim() < 3:
        return logits.view(1, 1, V) if logits.dim() == 1 else logits.unsqueeze(0)
    return logits.reshape(math.prod(logits.shape[:-2]), logits.shape[-2], V)
