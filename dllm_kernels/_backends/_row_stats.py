r"""Row primitives of the row statistics: the interface of a backend, and the parts that all backends share.

With d_v = z_v - M for the transformed logits z of a row and M its maximum, S = sum e^{d_v}, p_v = e^{d_v} / S:

    log p_k = d_k - log S,        lse = M + log S,        H = log S - sum_v e^{d_v} d_v / S,
    F = sum_v log(a + b p_v),     W = sum_v q_v,          q_v = b p_v / (a + b p_v) = e^{d_v} / (e^{d_v} + a S / b),

and, for upstream gradients g of each output, with log p_v = d_v - log S,

    dL/dz_v = sum_k g_k [v = id_k] + p_v (A + B log p_v) + g_F q_v,
    A = g_lse - sum_k g_k - g_H H - g_F W,        B = -g_H.

A, B and g_F hold all per-row terms, so that one pass computes the gradient of any set of outputs. If a is 0, q_v = 1
and F = sum_v (d_v + log(b / S)): a p_v that float32 rounds to 0 enters neither a logarithm nor a quotient. In a product
d_v is clamped to ``FARTHEST``, far below any d_v with e^{d_v} > 0, because the product of 0 and -inf would be NaN.

``logits`` and ``out`` are ``[B, L, V]`` as in ``_backends/_rows.py``. Inactive rows are never read.

``forward(logits, request)``
    Returns the fields of :class:`StatsResult`; 0 / False in inactive rows.

``mix(logits, request, row_max, log_sum)``
    Returns the shares of F and W of these columns, for rows whose (M, log S) is known.

``coefficients(request, result, upstream)``
    Returns :class:`Coefficients`, their size, and the targets of the rows with a gradient. :func:`coefficients` is the
    implementation in plain torch.

``backward(logits, request, coefficients, row_max, log_sum, out)``
    Writes the gradient with respect to the logits to ``out``, which may be the logits themselves; zeros in inactive
    rows. If ``request.through`` is False, the gradient is with respect to the transformed logits, and that of lse is p.
    If ``request.weights`` is given, an out-of-range id makes the gradient of its row NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels._backends._rows import IGNORE, NLL, StatsPrimitives, column_of
from dllm_kernels._utils._transform import NO_TRANSFORM, Transform

FARTHEST = -1e4


class StatsRequest(NamedTuple):
    """Request for statistics of N rows; all tensors are contiguous.

    Attributes:
        ids: int64 ``[N, K]``. ``IGNORE`` marks a missing id. Any other out-of-range id gives NaN.
        targets: int64 ``[N]``, ``IGNORE`` in inactive rows; other values are not read.
        a: coefficient of the mixture, ``[N]`` in the accumulation dtype, or None.
        b: see ``a``.
        transform: transform of the logits.
        entropy: True if the entropy is requested.
        correct: True if the argmax-match is requested.
        gradients: True if W is requested.
        whole: True if the columns are all columns of a row, False if they are a part of a split row.
        lse: True if (M, log S) are requested. Otherwise a backend may omit them if its backward pass does not read
            them.
        through: True if the gradient is with respect to the logits as given, False for the transformed logits.
        weights: ``[N]`` or None. Rows of weight 0 are inactive too. Only :func:`nll_of_stats` sets it, for whole rows.
    """

    ids: Tensor
    targets: Tensor
    a: Tensor | None = None
    b: Tensor | None = None
    transform: Transform = NO_TRANSFORM
    entropy: bool = False
    correct: bool = False
    gradients: bool = False
    whole: bool = True
    lse: bool = True
    through: bool = True
    weights: Tensor | None = None


class StatsResult(NamedTuple):
    """Statistics of N rows: ``log_probs [N, K]``, all others ``[N]``; in the accumulation dtype, ``correct`` bool.

    ``row_max`` and ``log_sum`` are tensors if requested. The last three fields are filled by ``_core/_rest.py``.
    """

    log_probs: Tensor
    row_max: Any
    log_sum: Any
    entropy: Tensor | None = None
    mix: Tensor | None = None
    mix_weight: Tensor | None = None
    correct: Tensor | None = None
    rest: Tensor | None = None
    rest_max: Any = None
    rest_sum: Any = None


class Upstream(NamedTuple):
    """Upstream gradients of the differentiable outputs, ``[N, K]`` and ``[N]``; None for outputs without a gradient."""

    log_probs: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    mix: Tensor | None
    rest: Tensor | None = None


class Coefficients(NamedTuple):
    """Per-row terms of the gradient: ``of_ids [N, K]``, ``plain``, ``of_log``, ``of_mix [N]`` are g_k, A, B, g_F."""

    of_ids: Tensor
    plain: Tensor
    of_log: Tensor | None
    of_mix: Tensor | None

    @classmethod
    def of(cls, upstream: Upstream, request: StatsRequest, result: StatsResult) -> Coefficients:
        """Combine the upstream gradients."""
        if upstream.log_probs is None:
            of_ids = torch.zeros_like(result.log_probs)
        else:
            out_of_range = result.log_probs.isnan() & (upstream.log_probs != 0)
            of_ids = upstream.log_probs.masked_fill(request.ids == IGNORE, 0).masked_fill(out_of_range, math.nan)
        plain = -of_ids.sum(1)
        if upstream.lse is not None:
            plain += upstream.lse
        if upstream.entropy is not None:
            plain -= _times(upstream.entropy, result.entropy)
        if upstream.mix is not None:
            plain -= _times(upstream.mix, result.mix_weight)
        return cls(of_ids, plain, None if upstream.entropy is None else -upstream.entropy, upstream.mix)

    def size(self, upstream: Upstream) -> Tensor:
        """Upper bound on the gradient terms of each row, ``[N]``; 0 if all upstream gradients of the row are 0."""
        size = self.of_ids.abs().sum(1) + self.plain.abs()
        for part in (upstream.lse, upstream.entropy, upstream.mix, upstream.rest):
            if part is not None:
                size = size + part.abs()
        return size

    def over(self, size: Tensor) -> Coefficients:
        """Divide all terms of a row by its entry of ``size``."""
        of_ids, *others = self
        return Coefficients._make((of_ids / size.unsqueeze(1), *(None if t is None else t / size for t in others)))


def coefficients(request: StatsRequest, result: StatsResult, upstream: Upstream) -> tuple[Coefficients, Tensor, Tensor]:
    """Combine the upstream gradients of each row.

    If an id has a NaN log-probability and a nonzero upstream gradient, the gradient of its whole row is NaN.

    Returns:
        The coefficients. Their size ``[N]``, an upper bound on the gradient terms of each row, 0 for rows without a
        gradient. The targets, ``IGNORE`` also in rows without a gradient, so that their gradient is 0 even if the row
        has NaN.
    """
    c = Coefficients.of(upstream, request, result)
    size = c.size(upstream).masked_fill(request.targets == IGNORE, 0)
    return c, size, request.targets.masked_fill(size == 0, IGNORE)


def _times(grad: Tensor, value: Any) -> Tensor:
    """Multiply a gradient and a value; 0 if the gradient is 0, even if the value is NaN."""
    return torch.where(grad != 0, grad * value, 0.0)


def nll_of_stats(
    stats: StatsPrimitives, V: int | None = None
) -> tuple[Callable[..., NLL], Callable[..., tuple[Any, ...]], Callable[..., None]]:
    """Derive the primitives ``nll``, ``weighted_nll`` and ``nll_grad`` from row statistics: the NLL is ``-log p``.

    ``V``: number of columns of a whole row, if the primitives work on a part of each row.
    """

    def requested(targets: Tensor, weights: Tensor | None, **options: Any) -> StatsRequest:
        ids = targets.unsqueeze(1)
        if V is not None and weights is not None:
            targets = targets.masked_fill(weights == 0, IGNORE)
        return StatsRequest(ids, targets, weights=weights if V is None else None, **options)

    def nll(
        logits: Tensor, targets: Tensor, *, with_correct: bool, transform: Transform = NO_TRANSFORM,
        with_lse: bool = True, weights: Tensor | None = None,
    ) -> NLL:  # fmt: skip
        request = requested(targets, weights, transform=transform, correct=with_correct, lse=with_lse)
        result = stats.forward(logits, request)
        # log p is at most 0, and the negative of 0 would be -0.
        return result.log_probs.squeeze(1).abs(), result.row_max, result.log_sum, result.correct

    def weighted_nll(logits: Tensor, targets: Tensor, weights: Tensor, **options: Any) -> tuple[Any, ...]:
        result = nll(logits, targets, weights=weights, **options)
        return result[0] * weights, *result

    def nll_grad(
        logits: Tensor, targets: Tensor, scale: Tensor, row_max: Any, log_sum: Any,
        out: Tensor, *, factor: Tensor | None = None, transform: Transform = NO_TRANSFORM,
    ) -> None:  # fmt: skip
        if factor is not None and not (factor.is_cpu and factor.item() == 1):
            scale = torch.where(scale != 0, scale * factor, 0.0)  # rows of scale 0 stay inactive if the factor is NaN
        out_of_range = None if V is None else column_of(targets, V)[1]
        plain = scale if out_of_range is None else scale.masked_fill(out_of_range, math.nan)
        c = Coefficients(-plain.unsqueeze(1), plain, None, None)
        request = requested(targets, scale, transform=transform)
        stats.backward(logits, request, c, row_max, log_sum, out)

    return nll, weighted_nll, nll_grad
