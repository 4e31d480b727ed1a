"""Row weights of drafted blocks: position decay, D-PACE, the denominators, and counts per offset of a block.

The functions validate only the layout of the blocks and the prefix. :class:`dllm_kernels.losses._draft.DraftLoss`
validates the rest.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._checks._target_range import first_true
from dllm_kernels._graph._named import replaced
from dllm_kernels._graph._plain import plain, readable_without_sync
from dllm_kernels.losses import _common
from dllm_kernels.losses._common import Count, divide
from dllm_kernels.ops.dpace_weights import VARIANTS, weights_of_blocks

PAPER_GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}  # block size: gamma, the DFlash paper, appendix A.1
POSITION_WEIGHTS = ("decay", *VARIANTS)
MEAN_EPS = 1e-6  # added to the sum of the weights that divides a mean
NORMALIZE = ("tokens", "rows", "mean", "blocks", "sequences", "sequence_blocks")


class Counts(NamedTuple):
    """Normalization counts for the whole step. None: counted from this call.

    ``blocks`` is ``[B]`` with "sequence_blocks". ``weight`` is the sum of the weights and has no minimum.
    """

    tokens: Count
    blocks: Count
    sequences: Count
    weight: float | Tensor | None = None

    def as_batch(self) -> Counts:
        """Return the counts of packed rows as those of a batch of one sequence."""
        return replaced(self, blocks=_common.as_batch(self.blocks, 0))


def rows_of_block(T: int, block_size: int | None, anchor_row: bool = False) -> int:
    """Return the rows per block of T rows; T itself if ``block_size`` is None.

    Raises:
        ValueError: T is not a whole number of blocks.
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


def size_of_blocks(name: str, blocks: Tensor, block_size: int | None, anchor_row: bool) -> int:
    """Return the ``block_size`` of rows ``[B, blocks, k]``: k + 1, or k with ``anchor_row``.

    Raises:
        TypeError: ``block_size`` is not an int.
        ValueError: ``block_size`` is another number.
    """
    block_size = _checks.checked_size("block_size", block_size)
    k = blocks.shape[2]
    size = k if anchor_row else k + 1
    if block_size is not None and block_size != size:
        rows = "block_size" if anchor_row else "block_size - 1"
        raise ValueError(
            f"block_size must be {size} for {name} [B, blocks, k] = {tuple(blocks.shape)}, because a block has {rows} "
            f"rows with anchor_row={anchor_row}, got {block_size}"
        )
    return size


def in_blocks(t: Tensor, rows: int) -> Tensor:
    """Reshape ``[B, T]`` to ``[B, T / rows, rows]``."""
    return t.reshape(t.shape[0], t.shape[1] // rows, rows)


def _repeated(blocks: Tensor, rows: int) -> Tensor:
    """Repeat the value of each block ``[B, blocks]`` for its rows, ``[B, blocks * rows]``."""
    return blocks.unsqueeze(2).expand(*blocks.shape, rows).flatten(1)


PerOffset = tuple[Tensor | None, Tensor | None]  # correct and valid rows of each offset of a block


def counts_per_offset(correct: Tensor, block_mask: Tensor, rows: int | None) -> PerOffset:
    """Sum ``correct * block_mask`` and ``block_mask``, both ``[B, T]``, over batch and blocks of ``rows`` rows.

    Float32; ``correct`` may be bool or float. (None, None) if ``rows`` is None or below 1, or T is not a multiple.
    """
    if rows is None or rows < 1 or correct.shape[1] % rows != 0:
        return None, None
    valid = block_mask.to(torch.float32).reshape(-1, rows)
    if correct.dtype == torch.bool:
        hits = correct.reshape(valid.shape) * valid
    else:  # it may be NaN in invalid positions
        hits = torch.where(valid != 0, correct.to(torch.float32).reshape(valid.shape) * valid, 0.0)
    return hits.sum(dim=0), valid.sum(dim=0)


def checked_prefix(prefix: Tensor, mask_name: str, mask: Tensor, rows: int) -> Tensor:
    """Validate a prefix against a mask ``[B, T]`` of blocks of this many rows; return it as plain int64."""
    (B, T) = mask.shape
    _checks.check_ids("prefix", prefix)
    _checks.check_shape("prefix", prefix, (B, T // rows), "an entry for each block")
    _checks.check_same_device(mask_name, mask, prefix=prefix)
    prefix = plain(prefix).long()  # in int8, the number of rows would wrap around
    if readable_without_sync(prefix) and (where := first_true((prefix < 1) | (prefix > rows))) is not None:
        raise ValueError(f"prefix must lie in [1, {rows}], got {int(prefix[where])} at position {where}")
    return prefix


def rows_in_prefix(prefix: Tensor, rows: int) -> Tensor:
    """Return True for the rows whose token is part of the prefix ``[B, blocks]``, ``[B, blocks, rows]``."""
    return torch.arange(1, rows + 1, device=prefix.device) < prefix.unsqueeze(2)


def _over_total(weights: Tensor, total: float | Tensor) -> Tensor:
    """Divide row weights by the step total, clamped to avoid division by zero; a negative total gives NaN."""
    if isinstance(total, Tensor):
        total = total.detach().to(weights.device, weights.dtype, non_blocking=True).reshape(())
    else:  # torch.as_tensor would be a host sync
        total = torch.full((), total, dtype=weights.dtype, device=weights.device)
    return weights / total.clamp(min=torch.finfo(weights.dtype).tiny).masked_fill(total < 0, torch.nan)


class BlockWeights(NamedTuple):
    """Row weights of one loss of drafted blocks, from validated settings.

    Attributes:
        position_weights: name of the weighting, one of ``POSITION_WEIGHTS``.
        loss_gamma: gamma of the decay, "paper" or None.
        dpace_alpha: alpha of D-PACE.
        normalize: the denominator, one of ``NORMALIZE``.
        anchor_row: True if the first row of a block is the anchor's.
        decay_from: row of a block at which the decay begins.
    """

    position_weights: str
    loss_gamma: float | str | None
    dpace_alpha: float
    normalize: str
    anchor_row: bool
    decay_from: int

    @property
    def decays(self) -> bool:
        """True for the decay, False for D-PACE."""
        return self.position_weights == "decay"

    def gamma(self, block_size: int | None) -> float | None:
        """Return gamma of blocks of this size.

        Raises:
            ValueError: ``loss_gamma="paper"``, and the paper has no gamma for the size.
        """
        if not isinstance(self.loss_gamma, str):
            return self.loss_gamma
        if block_size not in PAPER_GAMMAS:
            sizes = ", ".join(map(str, PAPER_GAMMAS))
            raise ValueError(f"block_size must be one of {sizes} with loss_gamma='paper', got {block_size}")
        return PAPER_GAMMAS[block_size]

    def decay(
        self, T: int, block_size: int | None, device: torch.device | str, dtype: torch.dtype,
        *, prefix: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute the decay of T predicted positions ``[T]``, restarting at each block; all ones without a gamma.

        With a ``prefix [B, blocks]`` it is ``[B, T]`` and begins at the row ``prefix - 1`` of each block, counted from
        0.
        """
        gamma = self.gamma(block_size)
        if gamma is None and not self.decay_from and prefix is None:
            return torch.ones(T, device=device, dtype=dtype)
        rows = rows_of_block(T, block_size, self.anchor_row)
        if prefix is None:
            return self._decay_of_block(gamma, rows, device, dtype).repeat(T // rows)
        steps = torch.arange(T, device=device) % rows - (_repeated(prefix, rows) - 1)
        return torch.where(steps < 0, 0.0, torch.exp(-steps.to(dtype) / (math.inf if gamma is None else gamma)))

    def _decay_of_block(self, gamma: float | None, rows: int, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """Compute the decay of the rows of one block."""
        rising = torch.arange(self.decay_from, self.decay_from - rows, -1, device=device, dtype=dtype)
        decay = torch.exp(rising / (math.inf if gamma is None else gamma))
        return torch.where(rising > 0, 0.0, decay) if self.decay_from else decay

    def row_weights(self, mask: Tensor, block_size: int | None, q: Tensor | None, prefix: Tensor | None) -> Tensor:
        """Compute the detached row weights ``[B, T]`` before the denominator.

        The decay needs no confidence ``q``, and D-PACE takes no ``prefix``.
        """
        T = mask.shape[1]
        if self.decays and prefix is not None:
            return self.decay(T, block_size, mask.device, mask.dtype, prefix=prefix) * mask
        gamma = self.gamma(block_size) if self.decays else None
        if self.decays and gamma is None and not self.decay_from:
            return mask.clone()  # the caller may own the mask
        rows = rows_of_block(T, block_size, self.anchor_row)
        valid = in_blocks(mask, rows)
        if self.decays:
            return (self._decay_of_block(gamma, rows, mask.device, mask.dtype) * valid).flatten(1)
        assert q is not None
        q = in_blocks(q.detach(), rows)
        variant = VARIANTS[self.position_weights]
        return weights_of_blocks(q, valid, self.dpace_alpha, variant, self.anchor_row).reshape(mask.shape)

    def normalized(self, weights: Tensor, mask: Tensor, block_size: int | None, counts: Counts) -> Tensor:
        """Divide row weights ``[B, T]`` by the denominator.

        A block or a sequence counts if its mask is not all 0. T must be a whole number of blocks only if they count.
        """
        if self.normalize == "mean":
            return (
                weights / (weights.sum() + MEAN_EPS) if counts.weight is None else _over_total(weights, counts.weight)
            )
        if self.normalize == "rows":
            return divide(weights, counts.tokens, mask)
        if self.normalize == "tokens":
            return divide(weights, counts.tokens)
        size = None if self.normalize == "sequences" else block_size
        valid = in_blocks(mask != 0, rows_of_block(mask.shape[1], size, self.anchor_row)).any(-1)
        if self.normalize == "blocks":
            return divide(weights, counts.blocks, valid)
        if self.normalize == "sequence_blocks":
            blocks: Any = valid.sum(1) if counts.blocks is None else counts.blocks
            weights = weights / blocks.detach().clamp(min=1).to(weights.dtype).unsqueeze(1)
        return divide(weights, counts.sequences, valid.any(1))
