"""Tile sizes: pure functions of shape and dtype, each with its reason.

A function for one kernel alone may stand in the file of the kernel, built from :func:`bytes_to_block` and
:func:`warps`. The tests find it by its return type.

None has been measured on a GPU yet. The reasons come from offline compilation (registers, spills, width of global
accesses) and from a model of an H200.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Tile(NamedTuple):
    """Columns that a program processes at a time, its number of warps, and the number of programs per row."""

    block_v: int
    num_warps: int
    splits: int = 1


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def bytes_to_block(itemsize: int, nbytes: int, V: int) -> int:
    """Return the columns of a tile of some bytes, at most those of a row: a power of 2, at least 64."""
    return max(64, min(nbytes // itemsize, _next_power_of_2(V)))


def warps(block: int, itemsize: int) -> int:
    """Return the number of warps such that 32 threads make four 16-byte accesses each per tile, at most 32 warps."""
    return at_most_a_thread_a_column(max(1, min(block * itemsize // 2048, 32)), block)


def at_most_a_thread_a_column(num_warps: int, block_v: int) -> int:
    """Limit the number of warps such that no tile has more threads than columns, for warps of 64 threads as on AMD.

    Additional threads would read the columns of others, which an in-place kernel may have overwritten already.
    """
    return max(1, min(num_warps, block_v // 64))


def token_nll_fwd(V: int, itemsize: int) -> Tile:
    """Tile of one pass over a row: 8 KiB and 4 warps, so that each thread has four 16-byte loads in flight.

    A row of eight tiles or more is split over two programs, a long row over programs of sixteen tiles. The split does
    not depend on the number of rows, because the order of a sum, and so the bits of a row, depend on the split. With
    programs of 8 tiles a simulated H200 loses 2 % more.
    """
    block = bytes_to_block(itemsize, 8192, V)
    splits = min(V // (4 * block), max(2, -(-V // (16 * block))))
    return Tile(block, warps(block, itemsize), max(1, splits))


def token_nll_bwd(V: int, itemsize: int) -> Tile:
    """Tile of the gradient of a part of a row: 8 KiB, four tiles per program, which amortise its start."""
    block = bytes_to_block(itemsize, 8192, V)
    return Tile(block, warps(block, itemsize), -(-V // (4 * block)))


# Longest row in bytes for which kernels that read a row more than once run as two programs of 8 warps per
# multiprocessor, so that one loads while the other reduces. Longer rows run as one program of 16 warps, because the L2
# must hold the rows of all programs until they are read again. Percentage of the speed of a copy on an H200 (model; not
# run on a GPU), 16 warps -> 8 warps, bf16:
#   V          16,000     32,000     65,536     102,400    128,256    151,936
#   NLL        28 -> 65   57 -> 87   66 -> 93   81 -> 84   91 -> 78   90 -> 75
#   kl         34 -> 52   48 -> 65   57 -> 68   66 -> 66   68 -> 64   70 -> 62
SHORT_ROW = 128 * 1024


def _programs(V: int, itemsize: int) -> int:
    """Return the number of programs that share the warps and registers of a multiprocessor."""
    return 2 if V * itemsize <= SHORT_ROW else 1


def linear_nll_rows(V: int, itemsize: int, small: bool = False) -> Tile:
    """Tile of a program that reads a row twice and writes it once: 32 KiB, 16 warps; 16 KiB, 8 warps for a short row.

    ``small`` halves the bytes, for a soft cap or a skipped column, because registers do not suffice otherwise.

    The registers allow 16 warps per multiprocessor. Some 130 rows of 300 KB are processed at a time, which an L2 of
    50 MB holds until they are read again.
    """
    block = bytes_to_block(itemsize, (16384 if small else 32768) // _programs(V, itemsize), V)
    return Tile(block, warps(block * (2 if small else 1), itemsize))


def divergence_rows(V: int, itemsize: int, *, kinds: int = 1, with_steps: bool = False) -> Tile:
    """Tile of a program that reads a pair of rows two or three times: 16 KiB of each, 16 warps; half for short rows.

    8 KiB with a soft cap, a skipped column or more than two kinds, because registers do not suffice otherwise. 4 KiB
    for more than five kinds, because ten kinds spill on AMD with 8 KiB.

    The registers allow 16 warps per multiprocessor. Tiles of 32 KiB save 0.6 of 15 issue slots per pair of columns in
    the first pass, but spill with a skipped column.
    """
    tile_bytes = 4096 if kinds > 5 else 8192 if with_steps or kinds > 2 else 16384
    block = bytes_to_block(itemsize, tile_bytes // _programs(V, itemsize), V)
    return Tile(block, at_most_a_thread_a_column(warps(block * (32768 // tile_bytes), itemsize), block))


# Columns whose exact scores ``sample`` computes at a time.
FEW_COLUMNS = 64


def sample(V: int, itemsize: int) -> Tile:
    """Tile of sampling one token per row: one warp, 32 tiles per program, and the 16 columns of a counter per thread.

    Programs of four warps and 2,048 columns spill scalar registers on gfx942. Programs of two warps do so with a
    transform, and so does a transform in float64, unless a tile has only ``FEW_COLUMNS``.
    """
    widest = FEW_COLUMNS if itemsize == 8 else 512
    block = max(FEW_COLUMNS, min(widest, _next_power_of_2(V)))
    return Tile(block, 1, -(-V // (32 * block)))


class SelectTile(NamedTuple):
    """Rows and columns of a program, its number of warps, and True if the keys of a row are kept in memory."""

    rows: int
    block: int
    num_warps: int
    in_memory: bool


# Columns processed at a time if the keys of a row are kept in memory. The corruption kernel has more live scalars: at
# 4,096 columns Triton 3.6 runs out of scalar registers on gfx942. At 2,048 columns Triton 3.9 spills in the top-k
# kernel on sm_90. With left padding, both kernels spill scalar registers on gfx942 at these sizes (Triton 3.9).
TOPK_IN_MEMORY, CORRUPT_IN_MEMORY, PADDED_IN_MEMORY = 4096, 2048, 1024


def select(D: int, in_memory_block: int = TOPK_IN_MEMORY) -> SelectTile:
    """Tile of the selection of k of D positions.

    Rows of up to 4,096 positions are kept in registers, with several short rows per program: four int64 keys per
    thread, eight at 4,096. Rows of up to 128 are processed by programs of one warp, which sort without waiting for
    other warps. At 8,192, with sixteen keys per thread, the compiler spills. Longer rows therefore keep their keys in
    memory, mostly in L2.
    """
    block = max(4, _next_power_of_2(D))
    if block > 4096:
        return SelectTile(1, in_memory_block, 16, True)
    if block <= 128:
        return SelectTile(128 // block, block, 1, False)
    rows = max(1, 256 // block)
    return SelectTile(rows, block, max(2, min(16, rows * block // 128)), False)


class IndependentTile(NamedTuple):
    """Blocks and positions of a program, draws (or words) taken from a counter at a time, and the number of warps."""

    rows: int
    block: int
    share: int
    num_warps: int


def independent(blocks: int, size: int, counter: int, with_segments: bool = False) -> IndependentTile:
    """Tile of positions that are corrupted independently; ``counter`` is the number of positions per counter.

    If blocks may begin at any draw of a counter, each position computes its own counter, and ``with_segments`` the one
    of its segment's level. With eight such positions per thread sm_90 and sm_100 spill, hence 8 warps.
    """
    block = max(4, min(1024, _next_power_of_2(size)))
    part = share(blocks, size, block, counter)
    return IndependentTile(1024 // block, block, part, 4 if part > 1 and not with_segments else 8)


def share(blocks: int, size: int, block: int, counter: int) -> int:
    """Return how many of a counter's ``counter`` positions a tile can take at a time, for any start of its block."""
    return min(block, counter if blocks == 1 else math.gcd(size, counter))
