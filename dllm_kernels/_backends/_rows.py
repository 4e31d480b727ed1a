"""Row primitives: the interface of a backend, and the layout of its arguments.

``logits`` is ``[B, L, V]`` with any batch and position strides; columns are adjacent. All other tensors are contiguous
``[N]``, one entry per row, N = B * L. ``acc`` is float32, or float64 for float64 logits. A row whose int64 target is
``IGNORE`` is inactive, and its logits are never read. Any other out-of-range target gives NaN.

All that read logits take their transform (``_utils/_transform.py``). Statistics and softmax are those of the
transformed logits; gradients are with respect to the logits as given. No target equals ``skip_id``, because callers
replace such targets by -1.

``stats``
    The row statistics, forward and backward (``_backends/_row_stats.py``). The NLL is minus the log-probability of one
    id. A backend without kernels for the NLL derives the next three primitives from these, by ``nll_of_stats``.

``nll(logits, targets, *, with_correct)``
    Reads each active row once. Returns (nll, row_max, log_sum, correct): ``[N]`` of dtype acc, and a bool ``[N]`` or
    None. ``log_sum`` is log(sum(exp(row - row_max))). Inactive rows are 0 or False. A backend may also accept
    ``with_lse=False`` and return None for row_max and log_sum, if its ``nll_grad`` of whole rows does not read them.

``weighted_nll(logits, targets, weights, *, with_correct)``
    Like ``nll``, with one weight per row, in acc. Rows of weight 0 are inactive too. Returns (weights * nll, nll,
    row_max, log_sum, correct).

``nll_grad(logits, targets, scale, row_max, log_sum, out, *, factor=None)``
    Writes ``scale * (exp(logits - row_max - log_sum) - onehot)`` to ``out``, and zeros for inactive rows and rows of
    scale 0. ``out`` has the shape of the logits and any strides, and may be the logits. With a factor, 0-d on the
    device of the logits, the scale of every row other than these is multiplied by it.

``nll_and_grad_(logits [C, V], targets, scale, *, with_correct)``
    ``nll`` and ``nll_grad`` in one call; the gradient overwrites the logits.

``divergence(...)``, ``divergence_grad(...)``, ``row_norms(...)``
    Divergence of rows to a teacher's rows: ``_backends/_divergence.py``.

``sample(logits [C, V], transform, noise)``
    Returns (score float64 ``[C]``, column int64 ``[C]``) of the largest ``x_v - ln(-ln u_v)`` of each row, with x the
    transformed logits and u the uniforms of ``_noise.Noise``. Without noise the score is x. The lowest column wins a
    tie. Every operation of a score is exact or rounded separately, so that equal logits give the same token on every
    device. The result for a row with NaN is undefined.

``largest(logits [C, V], k, transform)``
    Returns (values ``[C, k]`` in acc, columns int64 ``[C, k]``) of the k largest transformed logits of each row, in
    descending order, the lowest column first among equals.

``truncated(logits [C, V], transform, truncation)``
    Returns the transformed logits ``[C, V]`` in acc, with -inf in the columns that a ``_utils._truncation.Truncation``
    excludes. The softmax of a row with NaN stays NaN.

``add_parts(t)``
    Returns the sum of ``t`` over all parts of a split row; may work in place. None if rows are whole.

``part_of(V)``
    Returns (start, length) of the columns of a row of V that ``row_norms`` reads here. None if rows are whole.

``local_ids(ids)``
    Converts ids of whole rows to columns of this part, ``IGNORE`` for columns of other parts. None if rows are whole.

``mdlm_weights(p_mask, noise_mask, loss_mask, factor, count, dtype)``
    Returns (w, w / max(count, 1)) of ``dtype``, in the shape of the masks, with
    ``w = factor * (noise_mask & loss_mask) / max(p_mask, P_MASK_MIN)``, and 0 outside the masks even if ``p_mask`` is
    NaN. ``factor`` and ``count`` are numbers, tensors of one element, or None for 1. None if the caller computes it in
    plain torch (``losses/_base.py``), which a compiler fuses.

``scale_(t, factor)``
    ``t *= factor`` for a 0-d factor on the device of t, without a host sync; costs nothing if the factor is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels._backends._divergence import Divergences

IGNORE = -100
P_MASK_MIN = 1e-8
NLL = tuple[Tensor, Any, Any, Tensor | None]


class StatsPrimitives(NamedTuple):
    """Primitives of the row statistics of one backend."""

    forward: Callable[..., Any]
    mix: Callable[..., tuple[Tensor, Tensor | None]]
    coefficients: Callable[..., tuple[Any, Tensor, Tensor]]
    backward: Callable[..., None]


class RowPrimitives(NamedTuple):
    """Row primitives of one backend."""

    stats: StatsPrimitives
    nll: Callable[..., NLL]
    weighted_nll: Callable[..., tuple[Any, ...]]
    nll_grad: Callable[..., None]
    nll_and_grad_: Callable[..., NLL]
    scale_: Callable[[Tensor, Tensor], None]
    divergence: Divergences
    divergence_grad: Callable[..., None]
    row_norms: Callable[..., tuple[Tensor, Tensor]]
    sample: Callable[..., tuple[Tensor, Tensor]]
    largest: Callable[..., tuple[Tensor, Tensor]]
    truncated: Callable[..., Tensor]
    add_parts: Callable[[Tensor], Tensor] | None = None
    local_ids: Callable[[Tensor], Tensor] | None = None
    part_of: Callable[[int], tuple[int, int]] | None = None
    mdlm_weights: Callable[..., tuple[Tensor, Tensor]] | None = None


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
