"""Weighted cross-entropy of a block draft model, its accuracy per offset, and its acceptance length."""

from __future__ import annotations

import torch

from reference.dpace_weights import dpace_weights
from reference.draft_sampling import prefix_weights
from reference.token_nll import Count, compute_dtype, divided_by_count, token_nll, weighted_nll


def decay_weights(
    T: int,
    block_size: int | None,
    gamma: float | None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Compute the weight of each predicted position, which decays with its offset in the block.

    ``w_k = exp(-(k - 1) / gamma)``, ``k = 1, 2, ...``, restarting every ``block_size - 1`` positions (the anchor of a
    block is not predicted). All ones if ``gamma`` is None.

    Args:
        T: number of predicted positions.
        block_size: positions per block, including the anchor; None: one block of length T.
        gamma: decay length in positions; None: no decay.
        dtype: dtype of the result.
        device: device of the result.

    Returns:
        ``[T]``.

    Raises:
        ValueError: the weights decay and T is not a whole number of blocks.

    Source: the DFlash paper, Eq. 4.
    """
    if gamma is None:
        return torch.ones(T, dtype=dtype, device=device)
    period = T if block_size is None else block_size - 1
    if T > 0 and (period < 1 or T % period != 0):
        raise ValueError(f"T must be a multiple of block_size - 1 = {period} when the weights decay, got {T}")
    offsets = [t % period for t in range(T)]
    return torch.exp(-torch.tensor(offsets, dtype=dtype, device=device) / gamma)


def draft_accuracy_per_position(
    correct: torch.Tensor, block_mask: torch.Tensor, block_size: int | None
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Count argmax matches and valid positions per offset of a block, over batch and blocks.

    ``hits[k] = sum_{b,n} correct[b, n, k] * block_mask[b, n, k]``,
    ``count[k] = sum_{b,n} block_mask[b, n, k]``

    Args:
        correct: argmax matches ``[B, T]``, ``T = n_blocks * (block_size - 1)``.
        block_mask: valid positions ``[B, T]``.
        block_size: positions per block, including the anchor.

    Returns:
        ``(hits, count)``, float32 ``[block_size - 1]``; ``(None, None)`` if ``block_size`` is None or at most 1, or T
        is not a whole number of blocks.

    Source: the metrics ``draft_acc_k`` of DFlash training.
    """
    B, T = correct.shape
    if block_size is None or block_size <= 1 or T % (block_size - 1) != 0:
        return None, None
    valid = block_mask.float()
    hits = torch.where(correct.bool(), valid, 0.0)
    shape = (B, T // (block_size - 1), block_size - 1)
    return hits.reshape(shape).sum(dim=(0, 1)), valid.reshape(shape).sum(dim=(0, 1))


def acceptance_stats(
    rates: torch.Tensor,
    block_mask: torch.Tensor,
    rows: int,
    bonus: bool = False,
    anchor_row: bool = False,
    prefix: torch.Tensor | None = None,
) -> tuple[float, int]:
    """Sum ``sum_j mask_j prod_{i <= j} rate_i`` over blocks, each of which ends before its first row with mask 0.

    Args:
        rates: argmax matches or acceptance rates ``[B, T]``, ``T = n_blocks * rows``.
        block_mask: valid positions ``[B, T]``.
        rows: positions per block.
        bonus: True to count one more token per block, the token of the target model.
        anchor_row: True if the first row of a block is the anchor's, which may be invalid without ending the block.
        prefix: number of given tokens of each block, including the anchor ``[B, n_blocks]``; the block begins with the
            row that predicts the first token after them. None: 1.

    Returns:
        (sum, number of blocks that have a valid row before they end).

    Source: speculative decoding, Leviathan et al. 2023, arXiv:2211.17192, section 2.
    """
    total, count = 0.0, 0
    blocks = rates.reshape(-1, rows).tolist(), block_mask.reshape(-1, rows).tolist()
    given = [1] * len(blocks[0]) if prefix is None else prefix.flatten().tolist()
    for block, mask, tokens in zip(*blocks, given, strict=True):
        block, mask = block[tokens - 1 :], mask[tokens - 1 :]
        if anchor_row and tokens == 1 and not mask[0]:
            block, mask = block[1:], mask[1:]
        if not mask or not mask[0]:
            continue
        count, accepted = count + 1, 1.0
        total += bonus
        for rate, valid in zip(block, mask, strict=True):
            if not valid:
                break
            accepted *= rate
            total += valid * accepted
    return total, count


def acceptance_length(
    rates: torch.Tensor,
    block_mask: torch.Tensor,
    rows: int,
    bonus: bool = False,
    anchor_row: bool = False,
    prefix: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the mean over blocks of :func:`acceptance_stats`.

    Args:
        rates: as in :func:`acceptance_stats`.
        block_mask: as in :func:`acceptance_stats`.
        rows: as in :func:`acceptance_stats`.
        bonus: as in :func:`acceptance_stats`.
        anchor_row: as in :func:`acceptance_stats`.
        prefix: as in :func:`acceptance_stats`.

    Returns:
        A float32 scalar, 0 if no block counts.

    Source: :func:`acceptance_stats`.
    """
    total, count = acceptance_stats(rates, block_mask, rows, bonus, anchor_row, prefix)
    return torch.tensor(total / max(count, 1), device=rates.device)


def dflash_loss(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    block_mask: torch.Tensor,
    num_tokens: Count | None = None,
    block_size: int | None = None,
    loss_gamma: float | None = 7.0,
    normalize: str = "tokens",
    *,
    position_weights: str = "decay",
    dpace_alpha: float = 0.5,
    anchor_row: bool = False,
    num_blocks: Count | None = None,
    num_sequences: Count | None = None,
    reduction: str = "total",
    prefix: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the weighted cross-entropy of the predicted positions.

    ``loss = sum_i w_i * nll_i / denominator``, with ``w_i = exp(-(k_i - 1) / loss_gamma) * block_mask_i``, or the
    D-PACE weights of the confidence ``exp(-nll_i)``. The denominator is ``max(num_tokens, 1)`` (or 1 without a count)
    for ``"tokens"``, the same with the sum of the mask as default for ``"rows"``, and ``sum_i w_i + 1e-6`` for
    ``"mean"``. For ``"blocks"`` and ``"sequences"`` it is the number of blocks or sequences with a valid row.
    ``"sequence_blocks"`` is ``(1 / B') sum_b sum_i w_i * nll_i / A_b``, with A_b the number of valid blocks of sequence
    b, and B' the number of sequences with a valid block.

    Args:
        logits: ``[B, T, V]``, ``T = n_blocks * rows`` of ``block_size - 1`` rows, or ``block_size`` with
            ``anchor_row``.
        target_ids: ``[B, T]``, integer; -100 has no loss.
        block_mask: valid positions ``[B, T]``; fractions are weights.
        num_tokens: optional global count, a number or a 0-d tensor.
        block_size: positions per block, including the anchor; None: one block.
        loss_gamma: decay length in positions; None: no decay.
        normalize: ``"tokens"``, ``"rows"``, ``"mean"``, ``"blocks"``, ``"sequences"`` or ``"sequence_blocks"``.
        position_weights: ``"decay"``, or a variant of ``dpace_weights``.
        dpace_alpha: alpha of ``dpace_weights``.
        anchor_row: True if the row of the anchor predicts a token too.
        num_blocks: global count of valid blocks; with ``"sequence_blocks"`` the count of each sequence ``[B]``.
        num_sequences: global count of sequences with a valid row.
        reduction: ``"total"``, or ``"none"`` to return the contribution of each row to the sum, before any denominator.
        prefix: number of given tokens of each block, including the anchor ``[B, n_blocks]``, with the decay. Rows of
            given tokens are masked; the decay of the others is that of ``prefix_weights``. None: 1.

    Returns:
        A scalar, or ``[B, T]``, in float32 (float64 for float64 logits), in nats.

    Raises:
        ValueError: ``normalize`` is unknown, or T is not a whole number of blocks.

    Source: the DFlash paper, Eq. 4; D-PACE, arXiv:2605.18810.
    """
    if normalize not in ("tokens", "rows", "mean", "blocks", "sequences", "sequence_blocks"):
        raise ValueError(
            f"normalize must be 'tokens', 'rows', 'mean' or a count of blocks or sequences, got {normalize!r}"
        )
    dtype = compute_dtype(logits)
    B, T = target_ids.shape
    rows = max(T, 1) if block_size is None else max(block_size - (0 if anchor_row else 1), 1)
    if prefix is not None:
        block_mask = torch.where(prefix_weights(prefix, rows, None).to(logits.device) != 0, block_mask, 0)
    mask = block_mask.to(dtype)
    if prefix is not None:
        weights = prefix_weights(prefix, rows, loss_gamma).to(logits.device, dtype) * mask
    elif position_weights == "decay":
        period = None if block_size is None else rows + 1
        weights = decay_weights(T, period, loss_gamma, dtype, logits.device) * mask
    else:
        q = torch.exp(-token_nll(logits, target_ids, active=block_mask).detach())
        blocks = (B, T // rows, rows)
        weights = dpace_weights(
            q.reshape(blocks), mask.reshape(blocks), dpace_alpha, position_weights, anchor_row
        ).reshape(B, T)
    if reduction == "none":
        return weighted_nll(logits, target_ids, weights, reduction="none")
    if normalize in ("tokens", "rows"):
        loss = weighted_nll(logits, target_ids, weights)
        count = mask.sum() if normalize == "rows" and num_tokens is None else num_tokens
        return loss if count is None else divided_by_count(loss, count)
    if normalize == "mean":
        return weighted_nll(logits, target_ids, weights) / (weights.sum() + 1e-6)
    valid = (block_mask != 0).reshape(B, T // rows, rows).any(-1)
    if normalize == "blocks":
        count = valid.sum() if num_blocks is None else num_blocks
        return divided_by_count(weighted_nll(logits, target_ids, weights), count)
    if normalize == "sequence_blocks":
        blocks_per_sequence = valid.sum(1) if num_blocks is None else torch.as_tensor(num_blocks)
        weights = weights / blocks_per_sequence.clamp(min=1).to(dtype)[:, None]
    count = valid.any(1).sum() if num_sequences is None else num_sequences
    return divided_by_count(weighted_nll(logits, target_ids, weights), count)
