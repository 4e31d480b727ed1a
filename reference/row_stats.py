"""Per-row softmax statistics: log p at given ids, logsumexp, entropy, a sum of log-mixtures, argmax-match."""

from __future__ import annotations

from typing import NamedTuple

import torch

from reference.linear_nll import Extra, linear_logits
from reference.token_nll import IGNORE_INDEX, predicted_ids
from reference.transform import transformed

Mix = tuple[torch.Tensor, torch.Tensor]


class RowStats(NamedTuple):
    """Statistics per row; ``log_probs`` per id."""

    log_probs: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor
    mix: torch.Tensor | None
    correct: torch.Tensor
    ids: torch.Tensor


def row_stats(
    logits: torch.Tensor,
    ids: torch.Tensor,
    mix: Mix | None = None,
    active: torch.Tensor | None = None,
    *,
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
) -> RowStats:
    """Compute statistics of the softmax p of every row of transformed logits z.

    ``log_probs = log p[ids]``, ``lse = log sum_v exp(z_v)``, ``entropy = -sum_v p_v log p_v`` with ``0 log 0 = 0``,
    ``mix = sum_v log(a + b p_v)`` over all columns except ``skip_id``. ``ids`` is the lowest argmax, and
    ``correct`` is True if it is the first id.

    An inactive row gives 0, False and the id -100, and gradient 0, for any content. An id of -100 gives 0. Any other
    id out of range, or ``skip_id``, gives NaN.

    Args:
        logits: ``[..., V]``, floating; ``-inf`` means probability 0.
        ids: ``[...]`` or ``[..., K]``, integer.
        mix: (a, b), each ``[...]``, constants; None: ``mix`` is not computed.
        active: optional mask ``[...]``; nonzero is True.
        softcap: c of ``z = c tanh(x / c)``.
        scale: factor of the logits after the cap.
        skip_id: column with probability 0.

    Returns:
        Each ``[...]``, ``log_probs`` of the shape of ids, in float32 (float64 for float64 logits), in nats.

    Source: the definitions; the bound of self-correcting discrete diffusion (SCDD) uses sums of log-mixtures.
    """
    V = logits.shape[-1]
    rows = logits.new_ones(logits.shape[:-1], dtype=torch.bool) if active is None else active.bool()
    z = transformed(torch.where(rows[..., None], logits, 0.0), softcap, scale, skip_id)
    log_p = torch.log_softmax(z, dim=-1)
    index = ids.long() if ids.dim() > rows.dim() else ids.long()[..., None]
    asked = rows[..., None] & (index != IGNORE_INDEX)
    there = (index >= 0) & (index < V) & (index != (IGNORE_INDEX if skip_id is None else skip_id))
    picked = log_p.gather(-1, torch.where(there, index, 0))
    picked = picked * torch.where(there | ~asked, 1.0, torch.nan)  # a product, so that the gradient is NaN as well
    log_probs = torch.where(asked, picked, 0.0)
    lse = torch.where(rows, torch.logsumexp(z, dim=-1), 0.0)
    p = log_p.exp()
    entropy = -(p * torch.where(p == 0, 0.0, log_p)).sum(-1)
    F = None if mix is None else torch.where(rows, _sum_of_logs(log_p, mix, skip_id), 0.0)
    best = predicted_ids(z, rows, skip_id)
    correct = rows & (best == index[..., 0]) & there[..., 0] & ~picked[..., 0].isnan()
    return RowStats(log_probs.view(ids.shape), lse, torch.where(rows, entropy, 0.0), F, correct, best)


def _sum_of_logs(log_p: torch.Tensor, mix: Mix, skip_id: int | None) -> torch.Tensor:
    """Compute ``sum_v log(a + b p_v)`` from log a and log b + log p, so that a p_v that underflows counts if a is 0."""
    a, b = (t.detach().to(log_p.dtype)[..., None] for t in mix)
    if skip_id is not None:
        log_p = log_p[..., torch.arange(log_p.shape[-1], device=log_p.device) != skip_id]
    without_p = a.log().expand(log_p.shape)
    return torch.where(b == 0, without_p, torch.logaddexp(without_p, b.log() + log_p)).sum(-1)


def linear_row_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor | None = None,
    mix: Mix | None = None,
    active: torch.Tensor | None = None,
    *,
    extra: Extra | None = None,
    **transform: float | int | None,
) -> RowStats:
    """Compute :func:`row_stats` of the logits of an LM head, from hidden states.

    Args:
        hidden: ``[..., D]``, floating.
        weight: the LM head ``[V, D]``.
        ids: ``[...]`` or ``[..., K]``, integer.
        bias: optional ``[V]``.
        mix: (a, b), each ``[...]``.
        active: optional mask ``[...]``; nonzero is True.
        extra: low-rank second part of the head, as in :func:`reference.linear_nll.linear_logits`.
        transform: ``softcap``, ``scale``, ``skip_id``.

    Returns:
        See :func:`row_stats`; differentiable with respect to ``hidden``, ``weight``, ``bias`` and ``extra``.

    Source: :func:`row_stats` of :func:`reference.linear_nll.linear_logits`.
    """
    logits = linear_logits(hidden, weight, bias, active, extra)
    return row_stats(logits, ids, mix, active, **transform)  # type: ignore[arg-type]
