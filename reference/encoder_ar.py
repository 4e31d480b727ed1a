"""Next-token cross-entropy of a co-trained encoder."""

from __future__ import annotations

import torch

from reference.token_nll import Count, compute_dtype, divided_by_count, weighted_nll


def encoder_ar_loss(
    encoder_logits: torch.Tensor,
    input_ids: torch.Tensor,
    valid_mask: torch.Tensor | None = None,
    num_tokens: Count | None = None,
    reduction: str = "total",
    segment_ids: torch.Tensor | None = None,
    normalize: str = "tokens",
    num_sequences: Count | None = None,
) -> torch.Tensor:
    """Compute the mean next-token cross-entropy over pairs of valid adjacent positions.

    ``loss = sum_i [valid_i and valid_{i+1}] * nll(logits_i, ids_{i+1}) / max(n, 1)``, with ``n`` the given count, or if
    None the number of pairs of this call.

    Args:
        encoder_logits: ``[B, S, V]``, floating.
        input_ids: clean tokens ``[B, S]``, integer; a target of -100 has no loss.
        valid_mask: ``[B, S]``, nonzero is True; None: all.
        num_tokens: optional global count, a number or a 0-d tensor.
        reduction: ``"total"``, or ``"none"`` to return the contribution of each row to the sum, before any denominator;
            0 for the last row.

        segment_ids: ``[B, S]``, integer; a pair is scored only if both ids are equal and not negative; None: all pairs.
        normalize: ``"tokens"``, or ``"sequences"`` for the mean over sequences of the mean over their pairs. Sequences
            without pairs do not count.
        num_sequences: optional global count of sequences.

    Returns:
        A scalar, or ``[B, S]``, in float32 (float64 for float64 logits), in nats.

    Source: the usual next-token cross-entropy, -(1/n) sum_i log p(x_{i+1} | x_{<=i}).
    """
    valid = torch.ones_like(input_ids, dtype=torch.bool) if valid_mask is None else valid_mask.bool()
    pairs = valid[:, :-1] & valid[:, 1:]
    if segment_ids is not None:
        pairs = pairs & (segment_ids[:, :-1] == segment_ids[:, 1:]) & (segment_ids[:, 1:] >= 0)
    weights = pairs.to(compute_dtype(encoder_logits))
    loss = weighted_nll(encoder_logits[:, :-1], input_ids[:, 1:], weights, reduction=reduction)
    if reduction == "none":
        return torch.nn.functional.pad(loss, (0, 1))
    if normalize == "sequences":
        nll = weighted_nll(encoder_logits[:, :-1], input_ids[:, 1:], weights, reduction="none")
        means = [row.sum() / int(n) for row, n in zip(nll, pairs.sum(1), strict=True) if n > 0]
        total = torch.stack(means).sum() if means else loss
        return divided_by_count(total, len(means) if num_sequences is None else num_sequences)
    return divided_by_count(loss, pairs.sum() if num_tokens is None else num_tokens)
