"""Rows and blocks of a batch, and what is drawn for them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dllm_kernels._random import _philox
from dllm_kernels._random._rules import Array

Corrupted = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Grid(NamedTuple):
    """Rows, positions of a row, blocks of a row, positions of a block."""

    B: int
    L: int
    blocks: int
    size: int

    @classmethod
    def of(cls, input_ids: torch.Tensor, block_size: int | None) -> Grid:
        """Make the grid of a batch; without a block size, or with one beyond L, a row is one block of L."""
        B, L = input_ids.shape
        size = L if block_size is None else min(block_size, L)
        return cls(B, L, -(-L // size), size)

    @property
    def even(self) -> bool:
        """Whether no block is short."""
        return self.blocks * self.size == self.L

    def layout(self, whole_words: bool = False) -> _philox.Layout:
        """Layout of the draws of a row."""
        return _philox.Layout(self.blocks, self.L, whole_words)

    def fold(self, at_place: Array) -> Array:
        """``[rows, L]`` as ``[rows, blocks, size]`` where there are several and none is short."""
        return at_place.reshape(-1, self.blocks, self.size) if self.blocks > 1 and self.even else at_place

    def beside(self, of_block: Array) -> Array:
        """``[rows, blocks]``, or ``[rows, 1]`` for all blocks, so that it broadcasts against what ``fold`` gives."""
        if self.blocks == 1:
            return of_block
        if self.even:
            return of_block[..., None]
        return of_block if of_block.shape[1] == 1 else _spread(of_block, self.size, self.L)


def _spread(of_block: Array, size: int, L: int) -> Array:
    if isinstance(of_block, torch.Tensor):
        return of_block.repeat_interleave(size, dim=1)[:, :L]
    return of_block.repeat(size, axis=1)[:, :L]


class Rows(NamedTuple):
    """Some rows of the batch and what is drawn for them."""

    part: slice
    ids: Array
    supervised: Array | None
    levels: Array
    draws: Array
    words: Array | None


class Change(NamedTuple):
    """Chosen positions, what to put there (a number or ``[rows, L]``), the level of each block (None: 1)."""

    chosen: Array
    token: Array | int
    level: Array | None


def lengths(grid: Grid) -> list[int]:
    """Positions of each block of a row."""
    return [grid.size] * (grid.blocks - 1) + [grid.L - (grid.blocks - 1) * grid.size]
