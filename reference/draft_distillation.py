"""Distillation of a block draft model: divergence to the target model with the weights of DFlash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from reference.dflash import decay_weights
from reference.divergence import divergence
from reference.dpace_weights import dpace_weights
from reference.token_nll import Count, compute_dtype, token_nll
from reference.transform import transformed

# Options of the divergence that define the two models, and not how they are compared.
OF_MODELS = ("teacher_rows", "draft_to_target", "softcap", "scale", "skip_id", "teacher_transform")


def position_weights_of(
    mask: torch.Tensor,
    rows: int,
    q: torch.Tensor,
    *,
    gamma: float | None,
    decay_from: int,
    variant: str,
    alpha: float,
    anchor_row: bool = False,
) -> torch.Tensor:
    """Compute ``w m`` of each row ``[B, T]``, with w from D-PACE, or from a decay that begins at row ``decay_from``.

    In the decay, row k of a block has ``w_k = exp(-(k - decay_from) / gamma)``, 0 before ``decay_from``.

    Args:
        mask: ``[B, T]``.
        rows: rows per block.
        q: the confidence ``[B, T]``, for D-PACE.
        gamma: decay length in rows; None: all weights are 1.
        decay_from: first row of a block with a nonzero weight in the decay.
        variant: ``"decay"`` or a variant of ``dpace_weights``.
        alpha: alpha of ``dpace_weights``.
        anchor_row: True if each block includes the row of its anchor.

    Returns:
        ``[B, T]``.

    Source: the DFlash paper, Eq. 4; D-PACE, arXiv:2605.18810.
    """
    B, T = mask.shape
    if variant != "decay":
        blocks = (B, T // rows, rows)
        return dpace_weights(q.reshape(blocks), mask.reshape(blocks), alpha, variant, anchor_row).reshape(B, T)
    w = torch.zeros(T, dtype=mask.dtype, device=mask.device)
    late = [t for t in range(T) if t % rows >= decay_from]
    per_block = decay_weights(rows, None, gamma, mask.dtype, mask.device)
    for t in late:
        w[t] = per_block[t % rows - decay_from]
    return w * mask


def denominator(
    weights: torch.Tensor,
    mask: torch.Tensor,
    rows: int,
    normalize: str,
    *,
    num_tokens: Count | None = None,
    num_blocks: Count | None = None,
    num_sequences: Count | None = None,
    total_weight: Count | None = None,
) -> torch.Tensor:
    """Return the divisor of each row's ``weight * value``, ``[B, 1]``.

    Args:
        weights: row weights ``[B, T]``.
        mask: valid rows ``[B, T]``.
        rows: rows per block.
        normalize: ``"tokens"``, ``"rows"``, ``"mean"``, ``"blocks"``, ``"sequences"`` or ``"sequence_blocks"``.
        num_tokens: count of the whole step; None: counted from this call.
        num_blocks: count of the whole step, ``[B]`` with ``"sequence_blocks"``; None: counted from this call.
        num_sequences: count of the whole step; None: counted from this call.
        total_weight: sum of the weights of the whole step; None: of this call.

    Returns:
        ``[B, 1]``.

    Source: the denominators of DFlash, SpecForge and speculators.
    """
    B, T = mask.shape
    ones = torch.ones(B, 1, dtype=weights.dtype, device=weights.device)
    valid = (mask != 0).reshape(B, T // rows, rows).any(-1)

    def given(count: Count | None, here: torch.Tensor | float) -> torch.Tensor:
        number = torch.as_tensor(here if count is None else count, device=weights.device)
        return number.to(weights.dtype).clamp(min=1)

    if normalize == "mean":
        return ones * (weights.sum() + 1e-6 if total_weight is None else total_weight)
    if normalize in ("tokens", "rows"):
        return ones * given(num_tokens, 1.0 if normalize == "tokens" else mask.sum())
    if normalize == "blocks":
        return ones * given(num_blocks, valid.sum())
    sequences = given(num_sequences, valid.any(1).sum())
    if normalize == "sequence_blocks":
        return given(num_blocks, valid.sum(1))[:, None] * sequences
    return ones * sequences


def draft_distillation_loss(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    target_ids: torch.Tensor | None,
    block_mask: torch.Tensor,
    num_tokens: Count | None = None,
    block_size: int | None = None,
    *,
    kind: str | Mapping[str, float] = "kl",
    loss_gamma: float | None = 7.0,
    normalize: str = "tokens",
    position_weights: str = "decay",
    dpace_alpha: float = 0.5,
    confidence: str = "target",
    anchor_row: bool = False,
    decay_from: int = 0,
    confidence_logits: torch.Tensor | None = None,
    confidence_weight: float = 1.0,
    num_blocks: Count | None = None,
    num_sequences: Count | None = None,
    total_weight: Count | None = None,
    reduction: str = "total",
    **options: Any,
) -> torch.Tensor:
    """``loss = 1 / N sum_i w_i m_i (D(p_i, q_i) + c BCE(sigmoid(s_i), a_i))``, ``a = sum_v min(p_v, q_v)`` a constant.

    Args:
        logits: the draft's ``[B, T, V]``, ``T = n_blocks * rows`` of ``block_size - 1`` rows, or ``block_size`` with
            ``anchor_row``.
        teacher_logits: the target model's ``[B, T, V]``.
        target_ids: ``[B, T]``, for kind ``ce`` and the confidence of D-PACE; -100: no target.
        block_mask: valid positions ``[B, T]``; fractions are weights.
        num_tokens: as in :func:`denominator`.
        block_size: positions per block, including the anchor; None: one block.
        kind: D, as in :func:`divergence`.
        loss_gamma: decay length in positions; None: no decay.
        normalize: the denominator N, as in :func:`denominator`.
        position_weights: ``"decay"``, or a variant of ``dpace_weights``.
        dpace_alpha: alpha of ``dpace_weights``.
        confidence: q of D-PACE: the probability of the target (``"target"``), of the teacher's argmax (``"teacher"``),
            or a (``"acceptance"``).
        anchor_row: True if each block includes the row of its anchor.
        decay_from: as in :func:`position_weights_of`.
        confidence_logits: s ``[B, T]``; None: no confidence term.
        confidence_weight: c.
        num_blocks: as in :func:`denominator`.
        num_sequences: as in :func:`denominator`.
        total_weight: as in :func:`denominator`.
        reduction: ``"total"``, or ``"none"`` to return ``w_i m_i (...)`` of each row ``[B, T]``.
        options: options of :func:`divergence`.

    Returns:
        A scalar, or ``[B, T]``, in float32 (float64 for float64 logits), in nats.

    Source: :func:`divergence`; DSpark for the confidence term.
    """
    dtype = compute_dtype(logits)
    T = block_mask.shape[1]
    rows = max(T, 1) if block_size is None else max(block_size - (0 if anchor_row else 1), 1)
    mask, on = block_mask.to(dtype), block_mask != 0
    transform = {name: options.get(name) for name in ("softcap", "scale", "skip_id")}

    def weights_of(q: torch.Tensor) -> torch.Tensor:
        return position_weights_of(
            mask,
            rows,
            q,
            gamma=loss_gamma,
            decay_from=decay_from,
            variant=position_weights,
            alpha=dpace_alpha,
            anchor_row=anchor_row,
        )

    in_mean = weights_of(mask) if position_weights == "decay" else on.to(dtype)  # weights of the mean acceptance rate
    each = divergence(logits, teacher_logits, in_mean, kind=kind, targets=target_ids, reduction="none", **options)
    if confidence == "target" and target_ids is not None:
        q = torch.exp(-token_nll(transformed(logits, **transform), target_ids, active=block_mask)).detach()
    elif confidence == "teacher":
        untempered = {name: value for name, value in options.items() if name in OF_MODELS}
        q = torch.exp(-divergence(logits, teacher_logits, on.to(dtype), kind="teacher_ce", **untempered).value).detach()
    else:
        q = each.acceptance_rate
    weights = weights_of(q)
    value = each.value
    if confidence_logits is not None:
        s = torch.where(on, confidence_logits.to(dtype), 0.0)
        a = each.acceptance_rate.clamp(0, 1)
        value = value - confidence_weight * (
            a * torch.nn.functional.logsigmoid(s) + (1 - a) * torch.nn.functional.logsigmoid(-s)
        )
    if reduction == "none":
        return torch.where(weights != 0, weights * value, 0.0)
    over = denominator(
        weights, mask, rows, normalize, num_tokens=num_tokens, num_blocks=num_blocks, num_sequences=num_sequences,
        total_weight=total_weight,
    )  # fmt: skip
    return torch.where(weights != 0, weights / over * value, 0.0).sum()
