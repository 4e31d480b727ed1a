"""Sum of a masked-diffusion loss and a next-token loss."""

from __future__ import annotations

from typing import NamedTuple

import torch

from reference.mdlm import mdlm_loss
from reference.token_nll import Count, divided_by_count, weighted_nll


class HybridLoss(NamedTuple):
    """The total loss, differentiable, and its ``alpha * diffusion`` part, detached."""

    total_loss: torch.Tensor
    dllm_loss: torch.Tensor


def next_token_loss(
    causal_logits: torch.Tensor,
    target_ids: torch.Tensor,
    loss_mask_ar: torch.Tensor,
    num_ar_tokens: Count | None = None,
    fp32_upcast: bool = True,
    reduction: str = "total",
) -> torch.Tensor:
    """``sum_i m_{i+1} * nll(causal_logits_i, target_{i+1}) / max(num_ar_tokens, 1)``, m the AR loss mask."""
    rows, targets = causal_logits[:, :-1], target_ids[:, 1:]
    loss = weighted_nll(rows, targets, loss_mask_ar[:, 1:], fp32_upcast=fp32_upcast, reduction=reduction)
    if reduction == "none":
        return torch.nn.functional.pad(loss, (0, 1))
    return loss if num_ar_tokens is None else divided_by_count(loss, num_ar_tokens)


def hybrid_loss(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    noise_mask: torch.Tensor,
    p_mask: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_mask_ar: torch.Tensor | None = None,
    num_diffusion_tokens: Count | None = None,
    num_ar_tokens: Count | None = None,
    causal_logits: torch.Tensor | None = None,
    alpha: float = 1.0,
    fp32_upcast: bool = True,
    reduction: str = "total",
    shift: bool = False,
) -> HybridLoss:
    """``alpha`` times the masked-diffusion loss, plus the next-token loss of the causal logits.

    ``total = alpha * sum_i [noise_i and supervised_i] * nll_i / max(p_i, 1e-8) / max(num_diffusion_tokens, 1)
    + sum_i m_{i+1} * nll(causal_i, target_{i+1}) / max(num_ar_tokens, 1)``

    A denominator with count None is omitted. The second part needs both causal logits and ``loss_mask_ar``.

    Args:
        logits: ``[B, L, V]``; or ``[B, 2 L, V]``, the diffusion logits followed by the causal logits.
        target_ids: clean tokens ``[B, L]``, integer; -100 has no loss.
        noise_mask: corrupted positions ``[B, L]``; nonzero is True.
        p_mask: probability with which each position was corrupted, ``[B, L]``.
        loss_mask: supervised positions of the diffusion part ``[B, L]``; nonzero is True.
        loss_mask_ar: weights of the next-token part ``[B, L]``, may be fractional.
        num_diffusion_tokens: optional global count, a number or a 0-d tensor.
        num_ar_tokens: optional global count, a number or a 0-d tensor.
        causal_logits: ``[B, L, V]``; None: the causal logits in ``logits``, if any.
        alpha: weight of the diffusion part.
        fp32_upcast: ``False`` rounds each NLL to the dtype of its logits.
        reduction: ``"total"``, or ``"none"`` to return the contribution of each row to the sum, before any denominator.
        shift: as in :func:`reference.mdlm_loss`, for the diffusion part. The next-token part always predicts token
            i + 1.

    Returns:
        ``HybridLoss(total_loss, dllm_loss)``, scalars in nats; ``dllm_loss`` is detached. With ``reduction="none"``,
        ``total_loss`` is ``[B, 2 L]``, the rows of the diffusion part followed by the rows of the next-token part, or
        ``[B, L]`` without a next-token part. ``dllm_loss`` is then ``[B, L]``.

    Source: Nie et al. 2025 (LLaDA), arXiv:2502.09992, Eq. 5 for the diffusion part and Eq. 2 for the next-token
    cross-entropy.
    """
    L = target_ids.shape[1]
    if causal_logits is None and logits.shape[1] > L:
        logits, causal_logits = logits[:, :L], logits[:, L:]
    masks = noise_mask, p_mask, loss_mask
    total = alpha * mdlm_loss(logits, target_ids, *masks, num_diffusion_tokens, fp32_upcast, reduction, shift)
    diffusion = total.detach().clone()
    if causal_logits is not None and loss_mask_ar is not None:
        other = next_token_loss(causal_logits, target_ids, loss_mask_ar, num_ar_tokens, fp32_upcast, reduction)
        total = torch.cat([total, other], 1) if reduction == "none" else total + other
    return HybridLoss(total, diffusion)
