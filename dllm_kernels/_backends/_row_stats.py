r"""The row primitives of the row statistics: what a backend must offer, and what is common to all of them.

With d_v = z_v - M for the transformed logits z of a row and M its maximum, S = sum e^{d_v}, p_v = e^{d_v} / S:

    log p_k = d_k - log S,        lse = M + log S,        H = log S - sum_v e^{d_v} d_v / S,
    F = sum_v log(a + b p_v),     W = sum_v q_v,          q_v = b p_v / (a + b p_v) = e^{d_v} / (e^{d_v} + a S / b),

and, for upstream gradients g of each output, with log p_v = d_v - log S,

    dL/dz_v = sum_k g_k [v = id_k] + p_v (A + B log p_v) + g_F q_v,
    A = g_lse - sum_k g_k - g_H H - g_F W,        B = -g_H.

Everything that belongs to a row but needs no column is in A, B and g_F, so that one pass serves any set of outputs.
Where a is 0, q_v = 1 and F = sum_v (d_v + log(b / S)): no p_v that float32 rounds to 0 gets into a logarithm or a
quotient. e^{d_v} is 0 long before d_v reaches ``FARTHEST``, which stands in its place in a product: -inf would make it
NaN.

``logits`` are ``[B, L, V]`` as in ``_backends/_rows.py``, ``out`` likewise. A row that is off is never read.

``forward(logits, request)``
    The fields of :class:`StatsResult` of each row; 0 / False where it is off.

``mix(logits, request, row_max, log_sum)``
    (F, W) of these columns alone, in rows whose (M, log S) is known already.

``backward(logits, request, coefficients, row_max, log_sum, out)``
    Writes the gradient in the logits to ``out``, which may be the logits themselves; zeros where a row is off. In the
    transformed logits where ``request.through`` is False: that of lse is then p itself, whatever the transform.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dllm_kernels._backends._rows import NLL, SKIP, StatsPrimitives
from dllm_kernels._utils._transform import NO_TRANSFORM, Transform

FARTHEST = -1e4


class StatsRequest(NamedTuple):
    """Request for statistics of N rows, contiguous.

    Attributes:
        ids: int64 ``[N, K]``; ``SKIP``: none, one that no column has: NaN.
        active: int64 ``[N]``, ``SKIP`` where a row is off.
        a, b: of the mixture, ``[N]`` in the dtype of sums, or None.
        transform: of the logits.
        entropy, correct: whether these are asked for.
        gradients: whether W is.
        whole: whether these are all columns of a row, so that what is found of them is M and S; else a part.
        lse: whether (M, log S) are asked for. Without, a backend whose backward pass does not need them leaves them
            out.
        through: whether the gradient is that in the logits as they are, through the transform.
    """

    ids: torch.Tensor
    active: torch.Tensor
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    transform: Transform = NO_TRANSFORM
    entropy: bool = False
    correct: bool = False
    gradients: bool = False
    whole: bool = True
    lse: bool = True
    through: bool = True


class StatsResult(NamedTuple):
    """Statistics of N rows: ``log_probs [N, K]``, all others ``[N]``; in the accumulation dtype, ``correct`` bool.

    ``row_max`` and ``log_sum`` are tensors wherever they are asked for.
    """

    log_probs: torch.Tensor
    row_max: Any
    log_sum: Any
    entropy: torch.Tensor | None = None
    mix: torch.Tensor | None = None
    mix_weight: torch.Tensor | None = None
    correct: torch.Tensor | None = None


class Upstream(NamedTuple):
    """The gradients of the differentiable outputs, ``[N, K]`` and ``[N]``, None where there is none."""

    log_probs: torch.Tensor | None
    lse: torch.Tensor | None
    entropy: torch.Tensor | None
    mix: torch.Tensor | None


class Coefficients(NamedTuple):
    """Per-row coefficients of the gradient: ``of_ids [N, K]``, ``plain``, ``of_log`` and ``of_mix [N]``: g_k, A, B, g_F."""

    of_ids: torch.Tensor
    plain: torch.Tensor
    of_log: torch.Tensor | None
    of_mix: torch.Tensor | None

    @classmethod
    def of(cls, upstream: Upstream, request: StatsRequest, found: StatsResult) -> Coefficients:
        """Compute them; an id with a NaN log-probability and a nonzero upstream gradient makes its row's gradient NaN."""
        of_ids = torch.zeros_like(found.log_probs)
        if upstream.log_probs is not None:
            lost = found.log_probs.isnan() & (upstream.log_probs != 0)
            of_ids = upstream.log_probs.masked_fill(request.ids == SKIP, 0).masked_fill(lost, math.nan)
        plain = -of_ids.sum(1)
        if upstream.lse is not None:
            plain += upstream.lse
        if upstream.entropy is not None:
            plain -= _times(upstream.entropy, found.entropy)
        if upstream.mix is not None:
            plain -= _times(upstream.mix, found.mix_weight)
        return cls(of_ids, plain, None if upstream.entropy is None else -upstream.entropy, upstream.mix)

    def size(self, upstream: Upstream) -> torch.Tensor:
        """``[N]``: per-row upper bound on the gradient terms; 0 for rows without a gradient."""
        size = self.of_ids.abs().sum(1) + self.plain.abs()
        for part in (upstream.lse, upstream.entropy, upstream.mix):
            if part is not None:
                size = size + part.abs()
        return size

    def over(self, size: torch.Tensor) -> Coefficients:
        """Divided by a number a row."""
        of_ids, *others = self
        return Coefficients(of_ids / size.unsqueeze(1), *(None if t is None else t / size for t in others))  # type: ignore[arg-type]


def _times(grad: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
    """Their product; 0 where the gradient is, whatever the value."""
    assert value is not None
    return torch.where(grad != 0, grad * value, 0.0)


def nll_of_stats(
    stats: StatsPrimitives, V: int | None = None
) -> tuple[Callable[..., NLL], Callable[..., tuple[Any, ...]], Callable[..., None]]:
    """``nll``, ``weighted_nll`` and ``nll_grad`` of a backend from its row statistics: the same numbers, to the bit.

    ``V``: columns of a whole row, where a backend works on a part of each.
    """

    def nll(
        logits: torch.Tensor, targets: torch.Tensor, *, with_correct: bool, transform: Transform = NO_TRANSFORM,
        with_lse: bool = True,
    ) -> NLL:  # fmt: skip
        request = StatsRequest(targets.unsqueeze(1), targets, transform=transform, correct=with_correct, lse=with_lse)
        found = stats.forward(logits, request)
        return 0 - found.log_probs.squeeze(1), found.row_max, found.log_sum, found.correct

    def weighted_nll(
        logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, *, with_correct: bool,
        transform: Transform = NO_TRANSFORM, with_lse: bool = True,
    ) -> tuple[Any, ...]:  # fmt: skip
        targets = targets.masked_fill(weights == 0, SKIP)
        found = nll(logits, targets, with_correct=with_correct, transform=transform, with_lse=with_lse)
        return found[0] * weights, *found

    def nll_grad(
        logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, row_max: Any, log_sum: Any,
        out: torch.Tensor, *, factor: torch.Tensor | None = None, transform: Transform = NO_TRANSFORM,
    ) -> None:  # fmt: skip
        if factor is not None:
            scale = torch.where(scale != 0, scale * factor, 0.0)  # a factor that is NaN is none of the other rows
        inside = (targets >= 0) & (targets < (logits.shape[-1] if V is None else V))
        active = targets.masked_fill(scale == 0, SKIP)
        plain = torch.where(inside, scale, math.nan)
        c = Coefficients(-plain.unsqueeze(1), plain, None, None)
        stats.backward(
            logits, StatsRequest(targets.unsqueeze(1), active, transform=transform), c, row_max, log_sum, out
        )

    return nll, weighted_nll, nll_grad
