"""Multi-token prediction: labels of each depth, and the loss over all depths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from reference.token_nll import IGNORE_INDEX, Count, counted_rows, token_nll, weighted_nll


class MTPLoss(NamedTuple):
    """Scaled total loss, and unscaled loss of each depth."""

    loss: torch.Tensor
    per_depth_losses: list[torch.Tensor]


def seq_idx_from_cu_seqlens(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """Compute the index of the packed sub-sequence of each position.

    ``seq_idx[t] = #{i >= 1 : cu_seqlens[i] <= t}``: a boundary position belongs to the new sub-sequence, and padding
    after the last boundary forms a separate sub-sequence.

    Args:
        cu_seqlens: cumulative lengths ``[n + 1]`` or ``[1, n + 1]``, beginning with 0, integer.
        length: number of positions, padding included.

    Returns:
        ``[length]``, int64.

    Source: the packed-sequence layout of variable-length attention.
    """
    positions = torch.arange(length, device=cu_seqlens.device)
    boundaries = cu_seqlens.reshape(-1)[1:]
    return (boundaries[:, None] <= positions).sum(dim=0)


def mtp_labels(
    labels: torch.Tensor, depth: int, ignore_index: int = IGNORE_INDEX, seq_idx: torch.Tensor | None = None
) -> torch.Tensor:
    """Shift labels left by ``depth + 1`` within each packed sub-sequence.

    ``out[t] = labels[t + depth + 1]`` if position ``t + depth + 1`` exists and lies in the sub-sequence of t, else
    ``ignore_index``.

    Args:
        labels: ``[..., S]``, integer; the shift runs over the last dimension.
        depth: index of the depth, from 0.
        ignore_index: label of positions without a loss.
        seq_idx: optional sub-sequence of each position, ``[S]`` or the shape of ``labels``; values are only compared
            for equality.

    Returns:
        A copy of the shape of ``labels``.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.2: depth k predicts the token k positions further ahead.
    """
    S = labels.shape[-1]
    shifted = torch.full_like(labels, ignore_index)
    for t in range(S - depth - 1):
        source = t + depth + 1
        shifted[..., t] = labels[..., source]
        if seq_idx is not None:
            same = seq_idx[..., t] == seq_idx[..., source]
            shifted[..., t] = torch.where(same, shifted[..., t], ignore_index)
    return shifted


def masked_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    mask: torch.Tensor | None = None,
    num_label_tokens: Count | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "sum",
) -> torch.Tensor:
    """Cross-entropy over the labels that are neither ``ignore_index`` nor masked.

    ``"sum"``: ``sum_i nll_i / num_label_tokens`` (0 for a count of 0, no denominator for None);
    ``"mean"``: ``sum_i nll_i`` over the number of counted labels; ``"none"``: ``nll`` of every row,
    flattened.

    Args:
        logits: ``[..., V]``, floating.
        labels: ``[...]``, integer.
        mask: optional ``[...]``; 0 for positions without a loss.
        num_label_tokens: optional global count, a number or a 0-d tensor, for ``"sum"``.
        ignore_index: label of positions without a loss.
        reduction: ``"sum"``, ``"mean"`` or ``"none"``.

    Returns:
        A scalar, or ``[N]`` for ``"none"``, in float32 (float64 for float64 logits), in nats.

    Source: cross-entropy with one-hot targets.
    """
    if mask is not None:
        labels = torch.where(mask.bool(), labels, ignore_index)
    if reduction == "none":
        return token_nll(logits, labels, ignore_index).reshape(-1)
    if reduction == "mean":
        counted = counted_rows(labels, ignore_index, None).sum()
        return token_nll(logits, labels, ignore_index).sum() / counted
    if num_label_tokens is None:
        return token_nll(logits, labels, ignore_index).sum()
    if num_label_tokens == 0:
        return weighted_nll(logits, labels, torch.zeros_like(labels), ignore_index)
    return token_nll(logits, labels, ignore_index).sum() / num_label_tokens


def mtp_loss(
    per_depth_logits: Sequence[torch.Tensor],
    labels: torch.Tensor,
    scaling_factor: float,
    num_label_tokens: Count | None = None,
    ignore_index: int = IGNORE_INDEX,
    cu_seqlens: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
) -> MTPLoss:
    """Compute the multi-token prediction loss: the scaled mean over depths of the summed cross-entropy of each depth.

    ``loss = scaling_factor / D * sum_k loss_k``, ``loss_k = sum_i nll(logits_k[i], labels_k[i]) /
    num_label_tokens`` with ``labels_k`` from :func:`mtp_labels`; no denominator for None, and 0 for a count
    of 0.

    Args:
        per_depth_logits: D tensors ``[B, S, V]``, or ``[1, S, V]`` with labels ``[S]``.
        labels: the unshifted labels ``[B, S]`` or ``[S]``, integer.
        scaling_factor: weight of the mean over the depths.
        num_label_tokens: optional global count of labels, a number or a 0-d tensor.
        ignore_index: label of positions without a loss.
        cu_seqlens: optional cumulative lengths of packed sub-sequences ``[n + 1]``.
        seq_idx: optional sub-sequence of each position ``[B, S]`` or ``[S]``; takes precedence over ``cu_seqlens``.

    Returns:
        ``MTPLoss(loss, per_depth_losses)``, in nats.

    Source: DeepSeek-V3, arXiv:2412.19437, Eq. 24 (each depth) and 25 (their mean, scaled).
    """
    if seq_idx is None and cu_seqlens is not None:
        seq_idx = seq_idx_from_cu_seqlens(cu_seqlens, labels.shape[-1])
    if seq_idx is not None:
        seq_idx = seq_idx.broadcast_to(labels.shape) if labels.dim() > 1 else seq_idx.reshape(labels.shape)
    losses = []
    for depth, logits in enumerate(per_depth_logits):
        rows = logits.reshape(*labels.shape, logits.shape[-1])
        targets = mtp_labels(labels, depth, ignore_index, seq_idx)
        losses.append(masked_cross_entropy(rows, targets, num_label_tokens=num_label_tokens, ignore_index=ignore_index))
    return MTPLoss(torch.stack(losses).sum() * (scaling_factor / len(losses)), losses)
