"""Tile sizes: pure functions of shape and dtype, each with the measurement behind it.

None of these has been measured on a GPU yet; what is known is from offline compilation (registers, spills, width of
the global accesses) and is said beside each.
"""

from __future__ import annotations

from typing import NamedTuple

# Enough programs to fill the largest current GPUs (132 multiprocessors) several times over.
TARGET_PROGRAMS = 1024


class Tile(NamedTuple):
    """Columns a program takes at a time, its warps, and how many programs share a row."""

    block_v: int
    num_warps: int
    splits: int = 1


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _bytes_to_block(itemsize: int, nbytes: int, V: int) -> int:
    return max(16, min(nbytes // itemsize, _next_power_of_2(V)))


def token_nll_fwd(N: int, V: int, itemsize: int) -> Tile:
    """One pass over a row: 8 KiB of it a tile, 8 warps, so two 16-byte loads a thread and tile are in flight.

    Rows are split over several programs where there are too few of them to fill the GPU, down to four tiles each.
    """
    block = _bytes_to_block(itemsize, 8192, V)
    splits = min(most_splits(V, block), -(-TARGET_PROGRAMS // max(N, 1)))
    return Tile(block, 8 if block >= 2048 else 4, splits)


def most_splits(V: int, block_v: int) -> int:
    """Programs that a row may be split over, whatever the number of rows."""
    return max(1, V // (4 * block_v))


def token_nll_bwd(V: int, itemsize: int) -> Tile:
    """Gradient of one tile of one row; a 2-D cover of [N, V], 8 KiB read and written a program."""
    block = _bytes_to_block(itemsize, 8192, V)
    return Tile(block, 8 if block >= 2048 else 4)


def linear_nll_rows(V: int, itemsize: int) -> Tile:
    """A whole row by one program, read twice and written once; the second read is near enough to hit in L2."""
    block = _bytes_to_block(itemsize, 16384, V)
    return Tile(block, 16 if block >= 8192 else 8 if block >= 2048 else 4)
