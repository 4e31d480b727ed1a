"""Introspective diffusion loss: next-token cross-entropy on the masked copy and on the clean copy of a sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch

from reference.token_nll import Count, compute_dtype, divided_by_count, weighted_nll


class IDLMLoss(NamedTuple):
    """The total loss, differentiable, and the cross-entropy of the masked copy, detached."""

    total_loss: torch.Tensor
    dllm_loss: torch.Tensor


def idlm_loss(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    answer_mask: torch.Tensor,
    valid_mask: torch.Tensor,
    num_diffusion_tokens: Count | None = None,
    clean_loss_weight: float = 0.2,
    auto_balance: bool = False,
    reduction: str = "total",
) -> IDLMLoss:
    """Add the next-token cross-entropy of the answer on the masked copy and ``alpha`` times the one on the clean copy.

    ``CE(z) = sum_i [answer_{i+1} and valid_{i+1}] * nll(z_i, target_{i+1}) / max(n, 1)``, with ``n`` the given count,
    or if None the number of such positions of this call; ``total = CE(masked) + alpha * CE(clean)``.

    Args:
        logits: ``[B, 2 L, V]``: the masked copy, then the clean copy.
        target_ids: clean tokens ``[B, L]``, integer; a target of -100 has no loss.
        answer_mask: tokens of the answer ``[B, L]``; nonzero is True.
        valid_mask: tokens that are not padding ``[B, L]``; nonzero is True.
        num_diffusion_tokens: optional global count, a number or a 0-d tensor.
        clean_loss_weight: ``alpha``.
        auto_balance: True to use the constant ``alpha`` ``CE(masked) / max(CE(clean), 1e-6)``.
        reduction: ``"total"``, or ``"none"`` to return the contribution of each row to the sum, before any denominator.

    Returns:
        ``IDLMLoss(total_loss, dllm_loss)``, scalars in nats; ``dllm_loss`` is CE(masked), detached. With
        ``reduction="none"``, ``total_loss`` is ``[B, 2 L]``.

    Source: Introspective Diffusion Language Models, arXiv:2604.11035, Eq. 2 for the balance.
    """
    L = target_ids.shape[1]
    scored = answer_mask[:, 1:].bool() & valid_mask[:, 1:].bool()
    weights, count = (
        scored.to(compute_dtype(logits)),
        scored.sum() if num_diffusion_tokens is None else num_diffusion_tokens,
    )

    def cross_entropy(half: torch.Tensor) -> torch.Tensor:
        return divided_by_count(weighted_nll(half[:, :-1], target_ids[:, 1:], weights), count)

    masked, clean = cross_entropy(logits[:, :L]), cross_entropy(logits[:, L:])
    alpha = (masked / clean.clamp(min=1e-6)).detach() if auto_balance else clean_loss_weight
    if reduction == "none":
        halves = (logits[:, :L], 1.0), (logits[:, L:], alpha)
        rows = [
            factor * weighted_nll(half[:, :-1], target_ids[:, 1:], weights, reduction="none") for half, factor in halves
        ]
        return IDLMLoss(torch.cat([torch.nn.functional.pad(row, (0, 1)) for row in rows], 1), masked.detach().clone())
    return IDLMLoss(masked + alpha * clean, masked.detach().clone())
