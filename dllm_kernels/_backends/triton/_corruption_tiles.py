"""Tile sizes of the corruption kernels. None has been measured on a GPU; compiled offline none spills."""

from __future__ import annotations

import math
from typing import NamedTuple


class SelectTile(NamedTuple):
    """Rows and columns of a program, its warps, and whether the keys of a row stay in memory."""

    rows: int
    block: int
    num_warps: int
    in_memory: bool


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


# Columns at a time of a row whose keys stay in memory. The corruption kernel keeps more scalars alive: at 4,096 Triton
# 3.6 runs out of scalar registers for it on gfx942, while at 2,048 Triton 3.9 spills the other on sm_90.
TOPK_IN_MEMORY, CORRUPT_IN_MEMORY = 4096, 2048


def select(D: int, in_memory_block: int = TOPK_IN_MEMORY) -> SelectTile:
    """Choosing k of D positions.

    Up to 4,096 positions a row is in registers, many short rows a program: four int64 keys a thread, eight at 4,096.
    Rows of up to 128 go to programs of one warp, which sort without waiting for another. At 8,192 with sixteen keys a
    thread the compiler spills, so longer rows keep their keys in memory, in L2 mostly.
    """
    block = max(4, _next_power_of_2(D))
    if block > 4096:
        return SelectTile(1, in_memory_block, 16, True)
    if block <= 128:
        return SelectTile(128 // block, block, 1, False)
    rows = max(1, 256 // block)
    return SelectTile(rows, block, max(2, min(16, rows * block // 128)), False)


class IndependentTile(NamedTuple):
    """Blocks and positions of a program, draws (or words) of a counter that it takes at a time, and its warps."""

    rows: int
    block: int
    share: int
    num_warps: int


def independent(blocks: int, size: int, counter: int) -> IndependentTile:
    """Positions that do not depend on each other; ``counter`` is how many of them one counter serves.

    Where blocks begin at any draw of a counter each position counts by itself: at eight of them a thread sm_100 spills.
    """
    block = max(4, min(1024, _next_power_of_2(size)))
    part = share(blocks, size, block, counter)
    return IndependentTile(1024 // block, block, part, 4 if part > 1 else 8)


def share(blocks: int, size: int, block: int, counter: int) -> int:
    """Return how many of a counter's ``counter`` positions a tile can take at a time, for any start of its block."""
    return min(block, counter if blocks == 1 else math.gcd(size, counter))
