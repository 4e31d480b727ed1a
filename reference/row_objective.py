"""Sum over rows of a function of the softmax statistics of each row."""

from __future__ import annotations

from collections.abc import Callable

import torch

from reference.linear_nll import Extra, linear_logits
from reference.row_stats import RowStats, row_stats

Fn = Callable[..., torch.Tensor]


def row_objective(
    logits: torch.Tensor,
    ids: torch.Tensor,
    fn: Fn,
    *aux: torch.Tensor,
    active: torch.Tensor | None = None,
    **transform: float | int | None,
) -> torch.Tensor:
    """Compute ``sum_n fn(stats_n, *aux_n)`` over the active rows n, with the statistics of :func:`row_stats`.

    Args:
        logits: ``[..., V]``, floating.
        ids: ``[...]`` or ``[..., K]``, integer.
        fn: takes a :class:`RowStats` of R rows and the rows of each aux tensor, returns ``[R]``.
        aux: tensors ``[..., *]`` with one entry per row.
        active: optional mask ``[...]``; nonzero is True.
        transform: ``softcap``, ``scale``, ``skip_id``.

    Returns:
        0-d, in float32 (float64 for float64 logits).

    Source: the definition.
    """
    rows = logits.new_ones(logits.shape[:-1], dtype=torch.bool) if active is None else active.bool()
    stats = row_stats(logits, ids, None, active, **transform)  # type: ignore[arg-type]
    chosen = RowStats(*(None if t is None else t[rows] for t in stats))  # type: ignore[arg-type]
    return fn(chosen, *(t[rows] for t in aux)).sum()


def linear_row_objective(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    fn: Fn,
    *aux: torch.Tensor,
    bias: torch.Tensor | None = None,
    extra: Extra | None = None,
    active: torch.Tensor | None = None,
    **transform: float | int | None,
) -> torch.Tensor:
    """Compute :func:`row_objective` of the logits of an LM head, from hidden states.

    Args:
        hidden: ``[..., D]``, floating.
        weight: the LM head ``[V, D]``.
        ids: ``[...]`` or ``[..., K]``, integer.
        fn: as in :func:`row_objective`.
        aux: tensors ``[..., *]`` with one entry per row.
        bias: optional ``[V]``.
        extra: low-rank second part of the head, as in :func:`reference.linear_nll.linear_logits`.
        active: optional mask ``[...]``; nonzero is True.
        transform: ``softcap``, ``scale``, ``skip_id``.

    Returns:
        0-d, differentiable with respect to ``hidden``, ``weight``, ``bias`` and ``extra``.

    Source: :func:`row_objective` of :func:`reference.linear_nll.linear_logits`.
    """
    logits = linear_logits(hidden, weight, bias, active, extra)
    return row_objective(logits, ids, fn, *aux, active=active, **transform)
