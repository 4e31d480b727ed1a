"""The decay-weighted cross-entropy of a block draft model, and its accuracy at each offset."""

from __future__ import annotations

import torch

from reference.token_nll import Count, compute_dtype, divided_by_count, weighted_nll


def decay_weights(
    T: int,
    block_size: int | None,
    gamma: float | None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Weight of each predicted position, falling with its offset in the block.

    ``w_k = exp(-(k - 1) / gamma)``, ``k = 1, 2, ...``, starting over every ``block_size - 1`` positions (the
    anchor of a block is not predicted). All ones when ``gamma`` is None.

    Args:
        T: number of predicted positions.
        block_size: positions of a block, its anchor included; None for one block of length T.
        gamma: how slowly the weights fall, in positions.
        dtype: of the result.
        device: of the result.

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
    """Argmax matches and valid positions at each offset of the block, summed over batch and blocks.

    ``hits[k] = sum_{b,n} correct[b, n, k] * block_mask[b, n, k]``,
    ``count[k] = sum_{b,n} block_mask[b, n, k]``

    Args:
        correct: argmax matches ``[B, T]``, ``T = n_blocks * (block_size - 1)``.
        block_mask: valid positions ``[B, T]``.
        block_size: positions of a block, its anchor included.

    Returns:
        ``(hits, count)``, float32 ``[block_size - 1]``; ``(None, None)`` when ``block_size`` is None or at
        most 1, or T is not a whole number of blocks.

    Source: the metrics ``draft_acc_k`` of DFlash training.
    """
    B, T = correct.shape
    if block_size is None or block_size <= 1 or T % (block_size - 1) != 0:
        return None, None
    valid = block_mask.float()
    hits = torch.where(correct.bool(), valid, 0.0)
    shape = (B, T // (block_size - 1), block_size - 1)
    return hits.reshape(shape).sum(dim=(0, 1)), valid.reshape(shape).sum(dim=(0, 1))


def dflash_loss(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    block_mask: torch.Tensor,
    num_tokens: Count | None = None,
    block_size: int | None = None,
    gamma: float | None = 7.0,
    normalize: str = "tokens",
) -> torch.Tensor:
    """Decay-weighted cross-entropy of the predicted positions.

    ``loss = sum_i w_i * nll_i / denominator``, ``w_i = exp(-(k_i - 1) / gamma) * block_mask_i``; the
    denominator is ``max(num_tokens, 1)`` (or 1 without a count) for ``"tokens"``, ``sum_i w_i + 1e-6`` for
    ``"mean"``.

    Args:
        logits: ``[B, T, V]``, ``T = n_blocks * (block_size - 1)``.
        target_ids: ``[B, T]``, integer; -100 has no loss.
        block_mask: valid positions ``[B, T]``, kept as weights when fractional.
        num_tokens: optional global count, a number or a 0-d tensor.
        block_size: positions of a block, its anchor included; None for one block.
        gamma: how slowly the weights fall, in positions; None for no decay.
        normalize: ``"tokens"`` or ``"mean"``.

    Returns:
        A scalar in float32 (float64 for float64 logits), in nats.

    Raises:
        ValueError: ``normalize`` is neither of the two, or the weights decay over a broken block.

    Source: the DFlash paper, Eq. 4.
    """
    if normalize not in ("tokens", "mean"):
        raise ValueError(f"normalize must be 'tokens' or 'mean', got {normalize!r}")
    dtype = compute_dtype(logits)
    decay = decay_weights(target_ids.shape[1], block_size, gamma, dtype, logits.device)
    weights = decay * block_mask.to(dtype)
    loss = weighted_nll(logits, target_ids, weights)
    if normalize == "mean":
        return loss / (weights.sum() + 1e-6)
    return loss if num_tokens is None else divided_by_count(loss, num_tokens)
