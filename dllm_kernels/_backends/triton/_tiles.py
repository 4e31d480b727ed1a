"""Tile sizes: pure functions of shape and dtype, each with the measurement behind it.

None of these has been measured on a GPU yet; what is known is from offline compilation (registers, spills, width of
the global accesses) and is said beside each.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Tile(NamedTuple):
    """Columns a program takes at a time, its warps, and how many programs share a row."""

    block_v: int
    num_warps: int
    splits: int = 1


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _bytes_to_block(itemsize: int, nbytes: int, V: int) -> int:
    return max(64, min(nbytes // itemsize, _next_power_of_2(V)))


def _warps(block: int, itemsize: int) -> int:
    """Warps of 32 threads with four 16-byte accesses each to a tile, or fewer."""
    return at_most_a_thread_a_column(max(1, min(block * itemsize // 2048, 32)), block)


def at_most_a_thread_a_column(num_warps: int, block_v: int) -> int:
    """So many warps, or as many as a tile has columns for, one a thread, where a warp has 64 of them as on AMD.

    The threads beyond would read columns of others, which in a kernel that works in place may already be written over.
    """
    return max(1, min(num_warps, block_v // 64))


def token_nll_fwd(V: int, itemsize: int) -> Tile:
    """One pass over a row: 8 KiB of it a tile, 4 warps, so four 16-byte loads a thread are on their way at a time.

    A row of eight tiles and more is split over two programs, a long one over programs of sixteen tiles, whatever the
    number of rows: a sum has its order, and a row its bits, from where it is split. Of 8 tiles a simulated H200 loses
    2 % more.
    """
    block = _bytes_to_block(itemsize, 8192, V)
    splits = min(V // (4 * block), max(2, -(-V // (16 * block))))
    return Tile(block, _warps(block, itemsize), max(1, splits))


def token_nll_bwd(V: int, itemsize: int) -> Tile:
    """Gradient of a part of a row: tiles of 8 KiB, four a program, which is what its beginning costs little beside."""
    block = _bytes_to_block(itemsize, 8192, V)
    return Tile(block, _warps(block, itemsize), -(-V // (4 * block)))


# Bytes of a row up to which the kernels that read a row more than once run as two programs of 8 warps per
# multiprocessor, so that one loads while the other reduces; longer rows as one program of 16 warps, because the L2 has
# to hold the rows of all programs until they are read again. Share of a copy on an H200 (model; not run on a GPU), 16
# warps -> 8 warps, bf16:
#   V          16,000     32,000     65,536     102,400    128,256    151,936
#   NLL        28 -> 65   57 -> 87   66 -> 93   81 -> 84   91 -> 78   90 -> 75
#   kl         34 -> 52   48 -> 65   57 -> 68   66 -> 66   68 -> 64   70 -> 62
SHORT_ROW = 128 * 1024


def _programs(V: int, itemsize: int) -> int:
    """Programs per multiprocessor that share its warps and registers."""
    return 2 if V * itemsize <= SHORT_ROW else 1


def linear_nll_rows(V: int, itemsize: int, small: bool = False) -> Tile:
    """Tile of a program that reads a row twice and writes it once: 32 KiB, 16 warps; 16 KiB, 8 warps for a short row.

    Half of that where there is a soft cap or a column to skip, for which there are no registers otherwise.

    Its registers leave room for 16 warps a multiprocessor: some 130 rows of 300 KB at a time, which an L2 of 50 MB
    holds until they are read again.
    """
    block = _bytes_to_block(itemsize, (16384 if small else 32768) // _programs(V, itemsize), V)
    return Tile(block, _warps(block * (2 if small else 1), itemsize))


def divergence_rows(V: int, itemsize: int, *, kinds: int = 1, with_steps: bool = False) -> Tile:
    """Tile of a program that reads a pair of rows two or three times: 16 KiB of each, 16 warps; half for short rows.

    Of 8 KiB where there is a soft cap, a column to skip or more than two kinds, for which there are no registers
    otherwise, and of 4 KiB for more than five kinds, of which ten spill on AMD with 8.

    Its registers leave room for 16 warps a multiprocessor. Tiles of 32 KiB save 0.6 of 15 slots a pair of columns in
    the first pass, and spill with a column to skip.
    """
    tile_bytes = 4096 if kinds > 5 else 8192 if with_steps or kinds > 2 else 16384
    block = _bytes_to_block(itemsize, tile_bytes // _programs(V, itemsize), V)
    return Tile(block, at_most_a_thread_a_column(_warps(block * (32768 // tile_bytes), itemsize), block))


# Columns whose exact scores ``sample`` computes at a time.
FEW_COLUMNS = 64


def sample(V: int, itemsize: int) -> Tile:
    """Draw one token of a row: one warp, sixteen columns a thread, those of one counter, and 32 tiles a program.

    Programs of four warps and 2,048 columns spill scalar registers on gfx942, those of two with a transform. So does a
    transform in float64, unless a tile is as wide as its exact scores are computed.
    """
    widest = FEW_COLUMNS if itemsize == 8 else 512
    block = max(FEW_COLUMNS, min(widest, _next_power_of_2(V)))
    return Tile(block, 1, -(-V // (32 * block)))


class SelectTile(NamedTuple):
    """Rows and columns of a program, its warps, and whether the keys of a row stay in memory."""

    rows: int
    block: int
    num_warps: int
    in_memory: bool


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
