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


def _warps(block: int, itemsize: int) -> int:
    """Warps of 32 threads with four 16-byte accesses each to a tile, or fewer."""
    return max(1, min(block * itemsize // 2048, 32))


def token_nll_fwd(N: int, V: int, itemsize: int) -> Tile:
    """One pass over a row: 8 KiB of it a tile, 4 warps, so four 16-byte loads a thread are on their way at a time.

    A row of eight tiles and more is always split over programs, of four tiles at least and sixteen at most: how many rows
    are active, and so how many programs have anything to do, is not known here, and the same kernels serve any number.
    """
    block = _bytes_to_block(itemsize, 8192, V)
    most = most_splits(V, block)
    least = min(most, max(2, -(-V // (16 * block))))
    return Tile(block, _warps(block, itemsize), max(least, min(most, -(-TARGET_PROGRAMS // max(N, 1)))))


def most_splits(V: int, block_v: int) -> int:
    """Programs that a row may be split over, whatever the number of rows."""
    return max(1, V // (4 * block_v))


def token_nll_bwd(V: int, itemsize: int) -> Tile:
    """Gradient of a part of a row: tiles of 8 KiB, four a program, which is what its beginning costs little beside."""
    block = _bytes_to_block(itemsize, 8192, V)
    return Tile(block, _warps(block, itemsize), -(-V // (4 * block)))


def linear_nll_rows(V: int, itemsize: int, small: bool = False) -> Tile:
    """A whole row by one program, read twice and written once: tiles of 32 KiB, 16 warps.

    Of 16 KiB where there is a soft cap or a column to skip, for which there are no registers otherwise.

    Its registers leave room for one such program a multiprocessor: some 130 rows of 300 KB at a time, which an L2 of 50 MB
    holds until they are read again.
    """
    block = _bytes_to_block(itemsize, 16384 if small else 32768, V)
    return Tile(block, _warps(block * (2 if small else 1), itemsize))


def linear_nll_rows_once(V: int, itemsize: int) -> Tile:
    """A whole row by one program, read and written once: tiles of 16 KiB, 8 warps."""
    block = _bytes_to_block(itemsize, 16384, V)
    return Tile(block, _warps(block, itemsize))
