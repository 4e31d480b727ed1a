"""Blocks of drafted tokens: which rows belong to one, and what a loss over blocks is divided by."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dllm_kernels.base import _checks
from dllm_kernels.losses._common import Count, check_counts, divide

NORMALIZE = ("tokens", "rows", "mean", "blocks", "sequences", "sequence_blocks")


class Counts(NamedTuple):
    """What the caller says of the whole step; None: what this call has. ``blocks``: with "sequence_blocks" ``[B]``.

    ``weight``: the sum of the weights, which has no least.
    """

    tokens: Count
    blocks: Count
    sequences: Count
    weight: float | torch.Tensor | None = None

    def check(self, normalize: str, target_ids: torch.Tensor) -> None:
        """Check all three, used or not."""
        check_counts(num_tokens=self.tokens, num_sequences=self.sequences, total_weight=self.weight)
        if normalize != "sequence_blocks" or self.blocks is None:
            check_counts(num_blocks=self.blocks)
            return
        _checks.check_mask("num_blocks", self.blocks, target_ids.shape[:1], "one entry per sequence")
        assert isinstance(self.blocks, torch.Tensor)
        _checks.check_same_device("target_ids", target_ids, num_blocks=self.blocks)
        _checks.check_constant("num_blocks", self.blocks)


def rows_of_block(T: int, block_size: int | None, anchor_row: bool = False) -> int:
    """Rows of each block among T; one block where there is no ``block_size``.

    Raises:
        ValueError: T is no whole number of blocks.
    """
    if block_size is None:
        return max(T, 1)
    rows = block_size if anchor_row else block_size - 1
    if T % max(rows, 1) != 0 or (rows == 0 and T > 0):
        of = "block_size" if anchor_row else "block_size - 1"
        raise ValueError(
            f"T must be a multiple of {of} for a whole number of blocks, got T={T} and block_size={block_size}"
        )
    return max(rows, 1)


def in_blocks(t: torch.Tensor, rows: int) -> torch.Tensor:
    """``[B, T]`` as ``[B, T / rows, rows]``."""
    return t.reshape(t.shape[0], t.shape[1] // rows, rows)


def normalized(weights: torch.Tensor, mask: torch.Tensor, rows: int, normalize: str, counts: Counts) -> torch.Tensor:
    """Row weights ``[B, T]`` over the denominator. A block of ``rows`` or a sequence counts where its mask has any row."""
    if normalize == "mean":
        return weights / (weights.sum() + 1e-6) if counts.weight is None else _share(weights, counts.weight)
    if normalize == "rows":
        return divide(weights, mask.sum() if counts.tokens is None else counts.tokens)
    if normalize == "tokens":
        return divide(weights, counts.tokens)
    valid = in_blocks(mask != 0, rows).any(-1)
    if normalize == "blocks":
        return divide(weights, valid.sum() if counts.blocks is None else counts.blocks)
    if normalize == "sequence_blocks":
        blocks: Any = valid.sum(1) if counts.blocks is None else counts.blocks
        weights = weights / blocks.detach().clamp(min=1).to(weights.dtype).unsqueeze(1)
    return divide(weights, valid.any(1).sum() if counts.sequences is None else counts.sequences)


def _share(weights: torch.Tensor, total: float | torch.Tensor) -> torch.Tensor:
    """Row weights over the sum of those of the whole step; over 0 there is none to share."""
    total = torch.as_tensor(total, dtype=weights.dtype, device=weights.device).detach().reshape(())
    return weights / total.clamp(min=torch.finfo(weights.dtype).tiny)
