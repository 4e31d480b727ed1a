"""What the ops return, and how it is put together from numbers a row."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dllm_kernels.ops._plan import Plan
from dllm_kernels.ops._rows import SKIP


class TokenNLL(NamedTuple):
    """Per-row results, each of the shape of the targets.

    Attributes:
        nll: negative log-likelihood in nats, float32 (float64 for float64 logits), differentiable. 0 for inactive rows.
        lse: logsumexp of the row, detached, or None when not asked for. 0 for inactive rows.
        correct: whether the target is the argmax of its row (the lowest index wins a tie), bool, or None when not asked
            for. False for inactive rows and for rows whose NLL is NaN.
    """

    nll: torch.Tensor
    lse: torch.Tensor | None = None
    correct: torch.Tensor | None = None

    @classmethod
    def of(cls, plan: Plan, shape: torch.Size, *rows: torch.Tensor) -> TokenNLL:
        """From ``(nll, row_max, log_sum, correct)``, each ``[N]``, in the shape of the targets."""
        nll, row_max, log_sum, correct = rows
        lse = (row_max + log_sum).detach().view(shape) if plan.with_lse else None
        return cls(nll.view(shape), lse, correct.view(shape) if plan.with_correct else None)


class WeightedNLL(NamedTuple):
    """A weighted sum and what it was made of.

    Attributes:
        loss: sum of weights * nll, 0-d, float32 (float64 for float64 logits), differentiable.
        nll: per-row NLL, detached; else as in :class:`TokenNLL`.
        lse: as in :class:`TokenNLL`.
        correct: as in :class:`TokenNLL`.
    """

    loss: torch.Tensor
    nll: torch.Tensor
    lse: torch.Tensor | None = None
    correct: torch.Tensor | None = None

    @classmethod
    def of(cls, plan: Plan, rows: TokenNLL, weights: torch.Tensor) -> WeightedNLL:
        """From rows that are differentiable."""
        nll = rounded(rows.nll, plan)
        return cls(weighted_sum(nll, weights, plan), nll.detach(), rows.lse, rows.correct)


def rounded(nll: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The NLL as a cross-entropy computed in the dtype of the logits would return it, where the plan says so."""
    return nll.to(plan.dtype).to(nll.dtype) if plan.round_nll else nll


def weighted_sum(nll: torch.Tensor, weights: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Sum of weights * nll; where rows of weight 0 were read too, their NaN is kept out."""
    product = nll * weights
    return (torch.where(weights != 0, product, 0.0) if plan.read_beyond else product).sum()


def row_targets(targets: torch.Tensor, active: torch.Tensor | None, plan: Plan) -> torch.Tensor:
    """Targets as the row primitives take them: contiguous int64 ``[N]``, ``SKIP`` in rows that do not count.

    A target that the plan's transform skips is one that no column has.
    """
    y = targets.detach().reshape(-1).to(torch.int64)
    off = None if active is None else active.detach().reshape(-1) == 0
    if plan.ignore_index != SKIP:
        ignored = y == plan.ignore_index
        y = y.masked_fill(y == SKIP, -1)  # a target like any other that no column has
        off = ignored if off is None else off | ignored
    if plan.transform.skip_id is not None:
        y = y.masked_fill(y == plan.transform.skip_id, -1)
    return y.contiguous() if off is None else y.masked_fill(off, SKIP)
