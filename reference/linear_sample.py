"""Sampling of one token per row from hidden states and the LM head, with log-probability, entropy and top-k."""

from __future__ import annotations

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
    top_k: int = 1,
    active: torch.Tensor | None = None,
    *,
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
        top_k: number of most likely tokens to return.
        active: optional mask ``[...]``; nonzero is True.
        extra: low-rank second part of the head, as in :func:`reference.linear_nll.linear_logits`.
        softcap: as in :func:`reference.transform.transformed`.
        scale: as in :func:`reference.transform.transformed`.
        skip_id: as in :func:`reference.transform.transformed`.

    Returns:
        (ids, log_probs, entropy) ``[...]``, (top_ids, top_log_probs) ``[..., top_k]``; the lowest id wins a tie.
        Inactive rows have ids of -100, and all their other results are 0. If the softmax of a row is NaN, its ids are
        the lowest id other than ``skip_id``.

    Source: Gumbel 1954; Maddison, Tarlow, Minka 2014, arXiv 1411.0030, section 2.
    """
    scale = scale if temperature == 0 else (1.0 if scale is None else scale) / temperature
    x = transformed(linear_logits(hidden, head, bias, active, extra), softcap, scale, skip_id)
    log_p = torch.log_softmax(x, -1)
    p = log_p.exp()
    score = x if temperature == 0 or uniform is None else x.double() - torch.log(-torch.log(uniform.to(x.device)))
    ids = score.argmax(-1, keepdim=True)
    top = torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :top_k]
    entropy = -torch.where(p == 0, 0.0, p * log_p).sum(-1)
    on = torch.ones_like(entropy, dtype=torch.bool) if active is None else active.bool()
    lost, off = log_p.isnan().any(-1, keepdim=True), ~on[..., None]
    values = [torch.where(off, 0.0, log_p.gather(-1, i)) for i in (ids, top)]
    found = [i.masked_fill(lost, int(skip_id == 0)).masked_fill(off, IGNORE_INDEX) for i in (ids, top)]
    return found[0][..., 0], values[0][..., 0], torch.where(on, entropy, 0.0), found[1], values[1]
