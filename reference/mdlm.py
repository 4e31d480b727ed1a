"""Masked-diffusion cross-entropy."""

from __future__ import annotations

import torch

from reference.token_nll import Count, compute_dtype, divided_by_count, weighted_nll


def diffusion_weights(
    noise_mask: torch.Tensor, p_mask: torch.Tensor, loss_mask: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Compute ``w_i = 1 / max(p_i, 1e-8)`` for positions that are corrupted and supervised, else 0."""
    masked = noise_mask.bool() & loss_mask.bool()
    return torch.where(masked, 1.0 / p_mask.to(dtype).clamp(min=1e-8), 0.0)


def mdlm_loss(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    noise_mask: torch.Tensor,
    p_mask: torch.Tensor,
    loss_mask: torch.Tensor,
    num_diffusion_tokens: Count | None = None,
    fp32_upcast: bool = True,
    reduction: str = "total",
    shift: bool = False,
) -> torch.Tensor:
    """Masked-diffusion loss: cross-entropy at the corrupted supervised positions, weighted by 1/p.

    ``loss = sum_i [noise_i and supervised_i] * nll_i / max(p_i, 1e-8) / max(num_diffusion_tokens, 1)``, without the
    last denominator if ``num_diffusion_tokens`` is None.

    Args:
        logits: ``[B, L, V]``, floating.
        target_ids: clean tokens ``[B, L]``, integer; -100 has no loss.
        noise_mask: corrupted positions ``[B, L]``; nonzero is True.
        p_mask: probability with which each position was corrupted, ``[B, L]``.
        loss_mask: supervised positions ``[B, L]``; nonzero is True.
        num_diffusion_tokens: optional global count of supervised tokens, a number or a 0-d tensor.
        fp32_upcast: ``False`` rounds each NLL to the dtype of ``logits``.
        reduction: ``"total"``, or ``"none"`` to return the contribution of each row to the sum, before any denominator.
        shift: row i predicts token i + 1, so token 0 has no loss and the last row predicts nothing.

    Returns:
        A scalar, or ``[B, L]``, in float32 (float64 for float64 logits), in nats.

    Source: Nie et al. 2025 (LLaDA), arXiv:2502.09992, Eq. 5, with 1/p for its 1/t; Sahoo et al. 2024 (MDLM),
    arXiv:2406.07524.
    """
    if shift:
        logits, target_ids = logits[:, :-1], target_ids[:, 1:]
        noise_mask, p_mask, loss_mask = noise_mask[:, 1:], p_mask[:, 1:], loss_mask[:, 1:]
    weights = diffusion_weights(noise_mask, p_mask, loss_mask, compute_dtype(logits))
    loss = weighted_nll(logits, target_ids, weights, fp32_upcast=fp32_upcast, reduction=reduction)
    if reduction == "none":
        return torch.nn.functional.pad(loss, (0, int(shift)))
    return loss if num_diffusion_tokens is None else divided_by_count(loss, num_diffusion_tokens)
