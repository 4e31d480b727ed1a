"""Weighted divergence of student rows to a teacher that is known at K ids per row."""

from __future__ import annotations

import math

import torch

from reference.divergence import Divergence, row_divergence
from reference.linear_nll import linear_logits
from reference.token_nll import IGNORE_INDEX
from reference.transform import transformed

Tensor = torch.Tensor


def topk_divergence(
    logits: Tensor,
    top_ids: Tensor,
    top_log_probs: Tensor,
    weights: Tensor | None = None,
    *,
    kind: str = "kl",
    tail: bool = True,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "sum",
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
) -> Divergence:
    """Compute ``sum_n weights[n] value[n]``, with ``value[n] = T^2 D(p_n, q_n)`` over K + 1 buckets.

    The buckets of a row are its K ids, and all other columns together. A bucket of all other columns that has no
    column, or none of a finite logit, does not exist. A row of weight 0, or with no id, gives 0 and False, and gradient
    0, for any content. An id out of range, ``skip_id`` or a repeated id gives NaN in its row.

    Args:
        logits: the student's ``[..., V]``.
        top_ids: ``[..., K]``; -100: no entry.
        top_log_probs: the teacher's log-probabilities of the ids ``[..., K]``, constants.
        weights: ``[...]``, constants; None: ones.
        kind: ``kl``, ``rkl`` or ``jsd``, see :func:`reference.divergence.row_divergence`.
        tail: False renormalises both over the K ids; there is no further bucket.
        beta: option of ``jsd``.
        temperature: T, divisor of the student's logits.
        reduction: ``sum`` or ``none``.
        softcap: cap of the logits.
        scale: scale of the logits.
        skip_id: column that is never predicted.

    Returns:
        ``Divergence``, in float32 (float64 for float64 logits), in nats. The acceptance rate is that of the buckets;
        ``agree`` is True if the student's argmax is the first of the teacher's most likely ids.

    Source: the definition; the last bucket of the teacher has the mass ``1 - sum exp(top_log_probs)``, or 0 if that is
    less than the rounding of ``top_log_probs``, or negative.
    """
    V, ids = logits.shape[-1], top_ids.long()
    missing = ids == IGNORE_INDEX
    weights = logits.new_ones(logits.shape[:-1]) if weights is None else weights.detach()
    on = (weights != 0) & ~missing.all(-1)
    z = transformed(torch.where(on[..., None], logits, 0.0), softcap, scale, skip_id) / temperature
    weights = weights.to(z.dtype)
    there = (ids >= 0) & (ids < V) & (ids != (IGNORE_INDEX if skip_id is None else skip_id))
    held = (torch.where(there, ids, -1)[..., None] == torch.arange(V, device=z.device)).sum(-2)  # [..., V]
    bad = (~there & ~missing).any(-1) | (held > 1).any(-1)
    log_p = torch.log_softmax(z, -1)
    picked = torch.where(there, log_p.gather(-1, torch.where(there, ids, 0)), -math.inf)
    q = torch.where(missing, -math.inf, top_log_probs.detach().double())
    best = torch.where(torch.arange(ids.shape[-1], device=z.device) == q.argmax(-1, keepdim=True), ids, -1).amax(-1)
    if tail:
        others = torch.where(held > 0, -math.inf, log_p)
        empty = (others == -math.inf).all(-1, keepdim=True)
        rest = torch.logsumexp(torch.where(empty, 0.0, others), -1, keepdim=True)
        picked = torch.cat([picked, torch.where(empty, -math.inf, rest)], -1)
        total, rounding = q.exp().sum(-1, keepdim=True), torch.special.entr(q.exp()).sum(-1, keepdim=True)
        unit = torch.finfo(torch.promote_types(top_log_probs.dtype, torch.float32)).eps / 2
        known = 1 - total > unit * rounding + torch.finfo(torch.float64).eps
        mass = torch.log1p(-torch.where(known, total, 1.0))
        q = torch.cat([q, torch.where(empty, -math.inf, mass)], -1)
    else:
        picked, q = picked - torch.logsumexp(picked, -1, keepdim=True), torch.log_softmax(q, -1)
    q = q.to(z.dtype)
    value = row_divergence(kind, picked, q, beta=beta)
    a = torch.minimum(picked, q).exp().sum(-1).detach()
    nan = torch.where(bad, math.nan, 1.0)
    value, a = (torch.where(on, t * nan, 0.0) for t in (value * temperature**2, a))
    loss = torch.where(on, weights * value, 0.0)
    is_best = z == z.amax(-1, keepdim=True)
    argmax = torch.where(is_best, torch.arange(V, device=z.device), V).amin(-1)
    agree = on & ~a.isnan() & (argmax == best)
    return Divergence(loss.sum() if reduction == "sum" else loss, value, a, agree)


def linear_topk_divergence(
    hidden: Tensor,
    weight: Tensor,
    top_ids: Tensor,
    top_log_probs: Tensor,
    weights: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    extra: tuple[Tensor, Tensor] | None = None,
    **options: object,
) -> Divergence:
    """Compute :func:`topk_divergence` of the logits of an LM head, from hidden states.

    Args:
        hidden: the student's ``[..., D]``.
        weight: the LM head ``[V, D]``.
        top_ids: as in :func:`topk_divergence`.
        top_log_probs: as in :func:`topk_divergence`.
        weights: ``[...]``; None: ones.
        bias: bias of the head, ``[V]``.
        extra: low-rank second part of the head.
        options: as in :func:`topk_divergence`.

    Returns:
        ``Divergence``, differentiable in ``hidden``, ``weight``, ``bias`` and ``extra``.

    Source: :func:`topk_divergence` of the projected states.
    """
    on = None if weights is None else weights != 0
    logits = linear_logits(hidden, weight, bias, on, extra)
    return topk_divergence(logits, top_ids, top_log_probs, weights, **options)  # type: ignore[arg-type]
