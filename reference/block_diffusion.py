"""Unweighted cross-entropy of block diffusion with random-token corruption."""

from __future__ import annotations

import torch

from reference.token_nll import Count, compute_dtype, divided_by_count, weighted_nll


def block_diffusion_loss(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    num_diffusion_tokens: Count | None = None,
    fp32_upcast: bool = True,
    reduction: str = "total",
    shift: bool = False,
) -> torch.Tensor:
    """Mean cross-entropy over all supervised positions, corrupted or not.

    ``loss = sum_i [supervised_i] * nll_i / max(n, 1)``, with ``n`` the given count, or if None the number of supervised
    positions of this call.

    Args:
        logits: ``[B, L, V]``, floating.
        target_ids: clean tokens ``[B, L]``, integer; -100 has no loss.
        loss_mask: supervised positions ``[B, L]``; nonzero is True.
        num_diffusion_tokens: optional global count of supervised tokens, a number or a 0-d tensor.
        fp32_upcast: ``False`` rounds each NLL to the dtype of ``logits``.
        reduction: ``"total"``, or ``"none"`` to return the contribution of each row to the sum, before any denominator.
        shift: row i predicts token i + 1, so token 0 has no loss and is not counted, and the last row predicts nothing.

    Returns:
        A scalar, or ``[B, L]``, in float32 (float64 for float64 logits), in nats.

    Source: Austin et al. 2021 (D3PM), arXiv:2107.03006, the denoising cross-entropy of Eq. 5, with the uniform kernel
    and without a time-dependent weight.
    """
    if shift:
        logits, target_ids, loss_mask = logits[:, :-1], target_ids[:, 1:], loss_mask[:, 1:]
    supervised = loss_mask.bool()
    weights = supervised.to(compute_dtype(logits))
    loss = weighted_nll(logits, target_ids, weights, fp32_upcast=fp32_upcast, reduction=reduction)
    if reduction == "none":
        return torch.nn.functional.pad(loss, (0, int(shift)))
    return divided_by_count(loss, supervised.sum() if num_diffusion_tokens is None else num_diffusion_tokens)
