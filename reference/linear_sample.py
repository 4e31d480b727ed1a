"""Sampling of one token per row from hidden states and the LM head, with log-probability, entropy and top-k."""

from __future__ import annotations

import math

import torch

from reference.linear_nll import Extra, linear_logits
from reference.token_nll import IGNORE_INDEX
from reference.transform import transformed


def linear_sample(
    hidden: torch.Tensor,
    head: torch.Tensor,
    uniform: torch.Tensor | None = None,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
    return_top: int = 1,
    active: torch.Tensor | None = None,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    untruncated_log_probs: bool = False,
    extra: Extra | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``argmax_v x_v - ln(-ln u_v)`` with ``x = transform(logits) / temperature``; at temperature 0 the argmax of x.

    Args:
        hidden: ``[..., D]``, floating.
        head: the LM head ``[V, D]``.
        uniform: ``[..., V]`` in (0, 1); not read at temperature 0.
        temperature: T >= 0; at 0 x is not divided.
        bias: optional ``[V]``.
        return_top: number of most likely tokens to return.
        active: optional mask ``[...]``; nonzero is True.
        top_k: as in :func:`truncated`.
        top_p: as in :func:`truncated`.
        min_p: as in :func:`truncated`.
        untruncated_log_probs: log-probabilities and entropy are those of softmax(x), not of the truncated distribution.
        extra: low-rank second part of the head, as in :func:`reference.linear_nll.linear_logits`.
        softcap: as in :func:`reference.transform.transformed`.
        scale: as in :func:`reference.transform.transformed`.
        skip_id: as in :func:`reference.transform.transformed`.

    Returns:
        (ids, log_probs, entropy) ``[...]``, (top_ids, top_log_probs) ``[..., return_top]``; the lowest id wins a tie.
        Inactive rows have ids of -100, and all their other results are 0. If the softmax of a row is NaN, its ids are
        the lowest id other than ``skip_id``.

    Source: Gumbel 1954; Maddison, Tarlow, Minka 2014, arXiv 1411.0030, section 2.
    """
    scale = scale if temperature == 0 else (1.0 if scale is None else scale) / temperature
    x = transformed(linear_logits(hidden, head, bias, active, extra), softcap, scale, skip_id)
    top = torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :return_top]
    kept = truncated(x, top_k, top_p, min_p)
    log_p = torch.log_softmax(x if untruncated_log_probs else kept, -1)
    p = log_p.exp()
    noise = 0 if temperature == 0 or uniform is None else torch.log(-torch.log(uniform.to(x.device)))
    ids = (kept.double() - noise).argmax(-1, keepdim=True)
    entropy = -torch.where(p == 0, 0.0, p * log_p).sum(-1)
    on = torch.ones_like(entropy, dtype=torch.bool) if active is None else active.bool()
    lost, off = log_p.isnan().any(-1, keepdim=True), ~on[..., None]
    values = [torch.where(off, 0.0, log_p.gather(-1, i)) for i in (ids, top)]
    found = [i.masked_fill(lost, int(skip_id == 0)).masked_fill(off, IGNORE_INDEX) for i in (ids, top)]
    return found[0][..., 0], values[0][..., 0], torch.where(on, entropy, 0.0), found[1], values[1]


def truncated(
    x: torch.Tensor, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> torch.Tensor:
    """Set the columns outside the support to -inf, one truncation after the other.

    Args:
        x: logits ``[..., V]``, after temperature and transform.
        top_k: keep the k largest columns, of equal ones the lowest; 0: all.
        top_p: then keep the fewest of the largest columns whose probability, of the softmax over the columns kept so
            far, is at least ``top_p``; of equal ones the lowest. 1: all.
        min_p: then keep the columns whose probability is at least ``min_p`` times the largest.

    Returns:
        ``[..., V]``. Rows whose softmax is NaN keep it.

    Source: the order of transformers, ``GenerationMixin._get_logits_processor``: Fan, Lewis, Dauphin 2018, arXiv
    1805.04833 (top-k); Holtzman et al. 2020, arXiv 1904.09751, eq. 2 and 3 (top-p); Nguyen et al. 2024, arXiv
    2407.01082, section 3 (min-p).
    """
    values, order = torch.sort(x, dim=-1, descending=True, stable=True)
    rank = torch.arange(x.shape[-1], device=x.device)
    if top_k:
        values = values.masked_fill(rank >= top_k, -math.inf)
    if top_p is not None and top_p < 1:
        p = torch.softmax(values.double(), -1)
        values = values.masked_fill(p.cumsum(-1) - p >= top_p, -math.inf)
    if min_p is not None:
        p = torch.softmax(values.double(), -1)
        values = values.masked_fill(p < min_p * p[..., :1], -math.inf)
    lost = torch.softmax(x, -1).isnan().any(-1, keepdim=True)
    return torch.where(lost, math.nan, torch.empty_like(x).scatter_(-1, order, values))
