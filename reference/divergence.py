"""Weighted divergences of student rows to teacher rows, and the acceptance rate of speculative decoding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from reference.linear_nll import linear_logits
from reference.token_nll import IGNORE_INDEX
from reference.transform import transformed

Tensor = torch.Tensor


class Divergence(NamedTuple):
    """``loss`` 0-d, ``[...]`` with ``reduction="none"``; the rest ``[...]``. ``loss`` and ``value`` have gradients."""

    loss: Tensor
    value: Tensor
    acceptance_rate: Tensor
    agree: Tensor


def _times(e: Tensor, x: Tensor) -> Tensor:
    """Compute ``e x``, 0 if the probability e is 0."""
    return torch.where(e == 0, 0.0, e * torch.where(e == 0, 0.0, x))


def _overlap(p: Tensor, q: Tensor) -> Tensor:
    """Compute ``sum_v min(p_v, q_v)``; the gradient is 1 if ``p <= q`` up to rounding, 2^-18, and 0 otherwise."""
    below = torch.where(p <= q * (1 + 2.0**-18), p, 0.0).sum(-1)
    return torch.minimum(p, q).sum(-1).detach() + (below - below.detach())


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``sum_v q_v (log q_v - log p_v)``."""
    return _times(log_q.exp(), log_q - log_p).sum(-1)


def _jsd(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """``beta KL(q||m) + (1 - beta) KL(p||m)``, ``m = beta q + (1 - beta) p``."""
    m = beta * log_q.exp() + (1 - beta) * log_p.exp()
    log_m = torch.where(m == 0, 1.0, m).log()
    return beta * _kl(log_m, log_q) + (1 - beta) * _kl(log_m, log_p)


def _at(log_p: Tensor, index: Tensor) -> Tensor:
    """Compute ``-log p[index]``; 0 at -100, NaN for any other index out of range."""
    valid, nothing = (index >= 0) & (index < log_p.shape[-1]), index == IGNORE_INDEX
    picked = log_p.gather(-1, torch.where(valid, index, 0)[..., None])[..., 0]
    return torch.where(nothing, 0.0, -picked * torch.where(valid | nothing, 1.0, math.nan))


def row_divergence(
    kind: str, log_p: Tensor, log_q: Tensor, targets: Tensor | None = None, lam_rate: Tensor | None = None,
    best: Tensor | None = None, *, beta: float = 0.5, floor: float = 1e-5, eta: float = 3.0, kl_scale: float = 1.0,
    base: str = "kl",
) -> Tensor:  # fmt: skip
    """Compute one kind of divergence per row of log-probabilities, differentiable in the student's.

    The teacher's probabilities may sum to a mass below 1, if the others are of tokens that the student does not have.
    The student's probability of these tokens is 0. Terms that would be infinite are omitted from ``kl`` and
    ``soft_ce``, and so is the constant ``mass log mass`` of ``kl``, which is then the mass times a divergence.

    Args:
        kind: ``kl``, ``rkl``, ``jsd``, ``tv``, ``l1``, ``nla``, ``lk``, ``soft_ce``, ``teacher_ce`` or ``ce``.
        log_p: the student's ``[..., V]``.
        log_q: the teacher's ``[..., V]``, constants.
        targets: ``[...]``, for ``ce``.
        best: ``[...]``, the teacher's argmax, -100 if it is a token that the student does not have; None: the argmax of
            ``log_q``.
        lam_rate: acceptance rate from which lam of ``lk`` is computed; None: the acceptance rate of the row.
        beta: option of ``jsd``.
        floor: option of ``nla``.
        eta: option of ``lk``.
        kl_scale: option of ``lk``.
        base: option of ``lk``, ``kl`` or ``soft_ce``.

    Returns:
        ``[...]``.

    Source: Agarwal et al. 2024, "On-Policy Distillation of Language Models", arXiv:2306.13649, for the generalised JSD;
    arXiv:2602.23881 for ``tv``, ``nla`` and ``lk``.
    """
    p, q = log_p.exp(), log_q.exp()
    a = _overlap(p, q)
    mass = torch.ones_like(a) if best is None else q.sum(-1)
    kl = _kl(log_p, log_q) - _times(mass, mass.log())
    if kind == "kl":
        return kl
    if kind == "rkl":
        return _kl(log_q, log_p)
    if kind == "jsd":
        if beta in (0, 1):
            return kl if beta == 0 else _kl(log_q, log_p)
        return _jsd(log_p, log_q, beta) - beta * (1 - mass) * math.log(beta)
    if kind in ("tv", "l1"):
        return (1 - a) * (1 if kind == "tv" else 2)
    if kind == "nla":
        return torch.where(a < floor, -math.log(floor), -torch.where(a < floor, 1.0, a).log())
    if kind == "soft_ce":
        return -_times(q, log_p).sum(-1)
    if kind == "teacher_ce":
        return _at(log_p, log_q.argmax(-1) if best is None else best)
    if kind == "ce":
        assert targets is not None
        return _at(log_p, targets)
    assert kind == "lk"
    lam = kl_scale * torch.exp(-eta * (a if lam_rate is None else lam_rate).detach())
    of_base = kl if base == "kl" else -_times(q, log_p).sum(-1)
    return lam * of_base + (1 - lam) * (1 - a)


def divergence(
    logits: Tensor,
    teacher_logits: Tensor,
    weights: Tensor | None = None,
    *,
    kind: str | Mapping[str, float] = "kl",
    targets: Tensor | None = None,
    teacher_rows: Tensor | None = None,
    draft_to_target: Tensor | None = None,
    teacher: str = "draft",
    temperature: float = 1.0,
    reduction: str = "sum",
    alpha: str = "row",
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
    teacher_transform: Mapping[str, Any] | None = None,
    **options: Any,
) -> Divergence:
    """Compute ``sum_n weights[n] value[n]``, with ``value[n] = T^2 sum_k coefficient_k D_k(p_n, q_n)``.

    p and q are the softmax of the transformed logits divided by the temperature T; q is a constant. A row of weight 0
    gives 0 and False, and gradient 0, for any content of either model.

    Args:
        logits: the student's ``[..., V]``.
        teacher_logits: the teacher's logits, of the shape of ``logits``; with ``teacher_rows``, ``[..., V]`` with any
            number of rows.
        weights: ``[...]``, constants; None: ones.
        kind: a kind of :func:`row_divergence`, or a dict of kinds and coefficients.
        targets: ``[...]``, for ``ce``; -100: no target.
        teacher_rows: ``[...]``, index of the teacher row of each student row; an index out of range gives NaN.
        draft_to_target: ``[V]``, for each student token the teacher's column. The acceptance rate and ``agree`` cover
            all columns of the teacher, as speculative sampling does: a is ``sum_v min(p_v, q_full[d_v])``, d the
            argument.
        teacher: q of the loss with ``draft_to_target``: ``draft``, the teacher's softmax over the student's tokens, or
            ``full``, the probabilities of these tokens in its softmax over all columns. a in a kind is that of this q.
        temperature: T.
        reduction: ``sum`` or ``none``.
        alpha: option of ``lk``: ``row`` computes lam from the acceptance rate of the row, ``mean`` from the weighted
            mean.
        softcap: cap of the student's logits.
        scale: scale of the student's logits.
        skip_id: student column that is never predicted.
        teacher_transform: ``softcap``, ``scale`` and ``skip_id`` of the teacher; None: the student's values.
        options: options of the kinds, as in :func:`row_divergence`.

    Returns:
        :class:`Divergence`, in float32 (float64 for float64 logits), in nats.

    Source: :func:`row_divergence`; Hinton et al. 2015, arXiv:1503.02531, section 2, for T^2. The acceptance rate
    ``sum_v min(p_v, q_v)``: Leviathan et al. 2023, arXiv:2211.17192, section 3.2.
    """
    rows, V = logits.shape[:-1], logits.shape[-1]
    weights = logits.new_ones(rows) if weights is None else weights.detach()
    on = weights != 0
    weights = weights.to(torch.promote_types(logits.dtype, torch.float32))
    t = teacher_logits.detach()
    columns = torch.arange(V, device=t.device) if draft_to_target is None else draft_to_target
    if teacher_rows is not None:
        flat = t.reshape(-1, t.shape[-1])
        valid = (teacher_rows >= 0) & (teacher_rows < flat.shape[0])
        t = torch.where(valid[..., None], flat[torch.where(valid, teacher_rows, 0)], math.nan)
    student_options = {"softcap": softcap, "scale": scale, "skip_id": skip_id}
    teacher_options = dict(student_options if teacher_transform is None else teacher_transform)
    if teacher_options.get("skip_id") is not None:  # a column of the student
        teacher_options["skip_id"] = int(columns[teacher_options["skip_id"]])
    z = transformed(torch.where(on[..., None], logits, 0.0), **student_options) / temperature  # type: ignore[arg-type]
    t = transformed(torch.where(on[..., None], t, 0.0), **teacher_options) / temperature
    log_p, log_full = torch.log_softmax(z, -1), torch.log_softmax(t, -1)[..., columns]
    full = teacher == "full" and draft_to_target is not None
    log_q, best = log_full if full else torch.log_softmax(t[..., columns], -1), None
    student_argmax, teacher_argmax = _first_argmax(z), _first_argmax(t)
    if full:
        best = _column_of(teacher_argmax, columns)
    y = None if targets is None else targets.long()
    if y is not None and skip_id is not None:
        y = torch.where(y == skip_id, -1, y)
    a, a_of_loss = (
        torch.where(on, torch.minimum(log_p.exp(), log.exp()).sum(-1).detach(), 0.0) for log in (log_full, log_q)
    )
    mean = torch.where(on, weights * a_of_loss, 0.0).sum() / weights.sum()
    parts = {kind: 1.0} if isinstance(kind, str) else kind
    value = torch.zeros_like(a)
    for name, coefficient in parts.items():
        given_options = {k: v for k, v in options.items() if v is not None}
        value = value + coefficient * row_divergence(
            name, log_p, log_q, y, mean if alpha == "mean" else None, best, **given_options
        )
    valid = torch.where(a_of_loss.isnan(), math.nan, 1.0)  # NaN if a row of either model has no distribution
    value = torch.where(on, value * valid * temperature**2, 0.0)
    loss = torch.where(on, weights * value, 0.0)
    agree = on & ~a.isnan() & (columns[student_argmax.clamp(max=V - 1)] == teacher_argmax)
    return Divergence(loss.sum() if reduction == "sum" else loss, value, a, agree)


def _column_of(ids: Tensor, columns: Tensor) -> Tensor:
    """Return for each id the index at which ``columns`` holds it; -100 if it does not hold it."""
    held = ids[..., None] == columns
    return torch.where(held.any(-1), held.to(torch.int64).argmax(-1), IGNORE_INDEX)


def _first_argmax(z: Tensor) -> Tensor:
    V = z.shape[-1]
    best = z == z.amax(-1, keepdim=True)
    return torch.where(best, torch.arange(V, device=z.device), V).amin(-1)


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    weights: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    extra: tuple[Tensor, Tensor] | None = None,
    teacher_weight: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    teacher_extra: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> Divergence:
    """Compute :func:`divergence` of the logits of LM heads, from hidden states.

    Args:
        hidden: the student's ``[..., D]``.
        weight: the student's LM head ``[V, D]``.
        teacher_hidden: the teacher's ``[..., D']``.
        weights: ``[...]``; None: ones.
        bias: bias of the student's head, ``[V]``.
        extra: low-rank second part of the student's head, (u ``[..., r]``, U ``[V, r]``).
        teacher_weight: the teacher's LM head; None: the student's head and bias.
        teacher_bias: bias of ``teacher_weight``.
        teacher_extra: low-rank second part of the teacher's head.
        options: as in :func:`divergence`.

    Returns:
        :class:`Divergence`, differentiable in ``hidden``, ``weight``, ``bias`` and ``extra``.

    Source: :func:`divergence` of the projected states.
    """
    on = None if weights is None else weights != 0
    head = (weight, bias) if teacher_weight is None else (teacher_weight, teacher_bias)
    teacher = linear_logits(teacher_hidden, *head, extra=teacher_extra).detach()
    return divergence(linear_logits(hidden, weight, bias, on, extra), teacher, weights, **options)
