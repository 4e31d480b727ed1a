"""Row primitives that follow from the row statistics by the chain rule, in plain torch, for all backends."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dllm_kernels.rows._interface import IGNORE, NLL, column_of
from dllm_kernels.rows._stats_interface import (
    Coefficients,
    Combined,
    StatsPrimitives,
    StatsRequest,
    StatsResult,
    Upstream,
)
from dllm_kernels.rows._transform import NO_TRANSFORM, Transform


def coefficients(request: StatsRequest, result: StatsResult, upstream: Upstream) -> Combined:
    """Combine the upstream gradients of each row.

    If an id has a NaN log-probability and a nonzero upstream gradient, the gradient of its whole row is NaN.

    Returns:
        The coefficients. Their size ``[N]``, an upper bound on the gradient terms of each row, 0 for rows without a
        gradient. The targets, ``IGNORE`` also in rows without a gradient, so that their gradient is 0 even if the row
        has NaN.
    """
    c = _combined(request, result, upstream)
    size = c.grad_ids.abs().sum(1) + c.p_coef.abs()
    for part in upstream._replace(log_probs=None):
        if part is not None:
            size = size + part.abs()
    size = size.masked_fill(request.targets == IGNORE, 0)
    return c, size, request.targets.masked_fill(size == 0, IGNORE)


def _combined(request: StatsRequest, result: StatsResult, upstream: Upstream) -> Coefficients:
    if upstream.log_probs is None:
        grad_ids = torch.zeros_like(result.log_probs)
    else:
        out_of_range = result.log_probs.isnan() & (upstream.log_probs != 0)
        grad_ids = upstream.log_probs.masked_fill(request.ids == IGNORE, 0).masked_fill(out_of_range, math.nan)
    p_coef = -grad_ids.sum(1)
    if upstream.lse is not None:
        p_coef += upstream.lse
    if upstream.entropy is not None:
        p_coef -= _times(upstream.entropy, result.entropy)
    if upstream.mix is not None:
        p_coef -= _times(upstream.mix, result.mix_weight)
    p_logp_coef = None if upstream.entropy is None else -upstream.entropy
    return Coefficients(grad_ids, p_coef, p_logp_coef=p_logp_coef, mix_coef=upstream.mix, rest_coef=upstream.rest)


def _times(grad: Tensor, value: Any) -> Tensor:
    """Multiply a gradient and a value; 0 if the gradient is 0, even if the value is NaN."""
    return torch.where(grad != 0, grad * value, 0.0)


class NLLOfStats:
    """The primitives ``nll``, ``weighted_nll`` and ``nll_grad``, derived from row statistics: the NLL is ``-log p``.

    Attributes:
        stats: the row statistics.
        total: number of columns of a whole row, if the primitives work on a part of each row, or None.
    """

    stats: StatsPrimitives
    total: int | None = None

    def _request(self, targets: Tensor, weights: Tensor | None, **options: Any) -> StatsRequest:
        ids = targets.unsqueeze(1)
        if self.total is not None and weights is not None:
            targets = targets.masked_fill(weights == 0, IGNORE)
        return StatsRequest(ids, targets, weights=weights if self.total is None else None, **options)

    def nll(
        self, logits: Tensor, targets: Tensor, *, with_correct: bool, with_ids: bool = False,
        transform: Transform = NO_TRANSFORM, with_lse: bool = True, weights: Tensor | None = None,
    ) -> NLL:  # fmt: skip
        """See ``rows/_primitives.py``; with weights, rows of weight 0 are inactive too."""
        request = self._request(
            targets, weights, transform=transform, correct=with_correct, best=with_ids, lse=with_lse
        )
        result = self.stats.forward(logits, request)
        # log p is at most 0, and the negative of 0 would be -0.
        return result.log_probs.squeeze(1).abs(), result.row_max, result.log_sum, result.correct, result.best

    def weighted_nll(self, logits: Tensor, targets: Tensor, weights: Tensor, **options: Any) -> tuple[Any, ...]:
        """See ``rows/_primitives.py``."""
        result = self.nll(logits, targets, weights=weights, **options)
        return result[0] * weights, *result

    def nll_grad(
        self, logits: Tensor, targets: Tensor, scale: Tensor, row_max: Any, log_sum: Any, out: Tensor, *,
        factor: Tensor | None = None, transform: Transform = NO_TRANSFORM,
    ) -> None:  # fmt: skip
        """See ``rows/_primitives.py``."""
        if factor is not None and not (factor.is_cpu and factor.item() == 1):
            scale = torch.where(scale != 0, scale * factor, 0.0)  # rows of scale 0 stay inactive if the factor is NaN
        out_of_range = None if self.total is None else column_of(targets, self.total)[1]
        p_coef = scale if out_of_range is None else scale.masked_fill(out_of_range, math.nan)
        c = Coefficients(-p_coef.unsqueeze(1), p_coef)
        self.stats.backward(logits, self._request(targets, scale, transform=transform), c, (row_max, log_sum), out)
