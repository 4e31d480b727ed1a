"""Blocks of rows: what both files of row primitives in plain torch work on, a few rows at a time for each thread.

The working set is one block of rows in the dtype of sums for each of a few threads (``_backends/torch/_workers.py``), small enough to stay
in a core's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from dllm_kernels._backends.torch._workers import how_many
from dllm_kernels._utils._dtypes import accum_dtype

# Bytes of the block of rows that a thread works on. It has to stay in a core's cache: of those with 2 MiB, 0.5 and 1 MiB
# took the same time, 2 MiB 10 % and 4 MiB 35 % more. Many threads wait for the interpreter instead, hence larger blocks.
BLOCK_BYTES = 1 << 20
# Bytes of a block that all cores work on, or a GPU: fewer, larger operations.
COMMON_BLOCK_BYTES = 4 << 20
# Numbers from which on torch shares an operation out among its threads.
GRAIN = 1 << 15


class Buffers(NamedTuple):
    """A thread's buffers: a block in the accumulation dtype, one in the dtype of the logits, and one for slopes."""

    wide: torch.Tensor
    narrow: torch.Tensor
    slope: torch.Tensor


def places(t: torch.Tensor) -> torch.Tensor:
    """The numbers of the entries of ``[N]`` that are not 0.

    On a CPU torch branches at every entry, and of 32,768 random ones takes 325 us where NumPy takes 40 (AMD EPYC).
    """
    if t.is_cpu and t.numel() >= 4096:
        entries = t.numpy()
        return torch.from_numpy(np.flatnonzero(entries if entries.dtype == np.bool_ else entries != 0))
    return t.nonzero().squeeze(1)


def split(t: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    return (t,) if t.shape[0] <= size else torch.split(t, size)


def top(t: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """As many rows of ``t`` as the block has."""
    return t if t.shape[0] == block.shape[0] else t[: block.shape[0]]


class RowGather:
    """Some rows of a ``[B, L, V]`` tensor, a block at a time: in place where they lie side by side, else copied."""

    spare = 0

    def __init__(self, t: torch.Tensor, rows: torch.Tensor) -> None:
        B, L, V = t.shape
        position = t.stride(1) if L > 1 else t.stride(0) if B > 1 else V
        batch = t.stride(0) if B > 1 else L * position
        # Every row begins at a multiple of it, so that one number finds a row; a row may have no columns.
        step = math.gcd(batch, position) or V or 1
        batch, position = batch // step, position // step
        self.flat = t.detach().as_strided(((B - 1) * batch + (L - 1) * position + 1, V), (step, t.stride(2)))
        dense = (batch, position) == (L, 1)
        self.dense = dense and step == V
        self.index = rows if dense else rows // L * batch + rows % L * position
        self.first = 0 if rows.numel() == B * L else int(rows[0])
        self.together = dense and (rows.numel() == B * L or int(rows[-1]) - self.first == rows.numel() - 1)

    def blocks(self, size: int) -> tuple[torch.Tensor, ...]:
        """The rows themselves where they lie together, else their numbers, ``size`` at a time."""
        listed = self.flat[self.first : self.first + self.index.numel()] if self.together else self.index
        return split(listed, size)

    def load(self, block: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        """The block in the accumulation dtype: the rows themselves, or a copy in ``buffers.wide``."""
        wide = top(buffers.wide, block)
        if self.together:
            return block if block.dtype == wide.dtype else wide.copy_(block)
        if self.flat.dtype == wide.dtype:
            return torch.index_select(self.flat, 0, block, out=wide)
        return wide.copy_(torch.index_select(self.flat, 0, block, out=top(buffers.narrow, block)))

    def room(self, block: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        """Where to make what :meth:`store` is to write: the rows themselves, or ``buffers.wide``."""
        wide = top(buffers.wide, block)
        return block if self.together and block.dtype == wide.dtype else wide

    def store(self, block: torch.Tensor, values: torch.Tensor, buffers: Buffers) -> None:
        """Write what was made in :meth:`room`."""
        if self.together:
            if values is not block:
                block.copy_(values)
        elif values.dtype == self.flat.dtype:
            self.flat.index_copy_(0, block, values)
        else:
            self.flat.index_copy_(0, block, top(buffers.narrow, block).copy_(values))


class RowScatter:
    """The dense rows of a tensor, with zeros in those between the listed ones; a block at a time, as :class:`RowGather`.

    On CPU ``index_copy_`` and ``index_fill_`` take three to four times as long as ``index_select``. So a block is made in the
    first rows of a buffer that ends in a row of zeros, and every row of the tensor takes one of the buffer's.
    """

    together, spare = False, 1

    def __init__(self, flat: torch.Tensor, rows: torch.Tensor, size: int) -> None:
        within = torch.arange(rows.numel(), device=rows.device).remainder_(size)
        self.place = torch.full((flat.shape[0],), size, device=rows.device).index_copy_(0, rows, within)
        self.flat, self.size, self.bounds = flat, size, [0, *rows[size::size].tolist(), flat.shape[0]]
        self.count = rows.numel()

    def blocks(self, size: int) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        """The rows up to the next block's first, where each takes its numbers from, and how many are listed."""
        lengths = [hi - lo for lo, hi in zip(self.bounds, self.bounds[1:], strict=False)]
        listed = [min(size, self.count - start) for start in range(0, self.count, size)]
        return list(zip(torch.split(self.flat, lengths), torch.split(self.place, lengths), listed, strict=True))

    def room(self, block: tuple[torch.Tensor, torch.Tensor, int], buffers: Buffers) -> torch.Tensor:
        """Where to make what :meth:`store` is to write."""
        return buffers.wide[: block[2]]

    def store(self, block: tuple[torch.Tensor, torch.Tensor, int], values: torch.Tensor, buffers: Buffers) -> None:
        """Write what was made in :meth:`room`, and the zeros."""
        rows, place, _ = block
        source = buffers.wide
        if values.dtype != self.flat.dtype:
            source = buffers.narrow
            top(source, values).copy_(values)
        source[self.size].zero_()
        torch.index_select(source, 0, place, out=rows)


def with_zeros_between(out: torch.Tensor, rows: torch.Tensor, size: int) -> RowGather | RowScatter:
    """The listed rows of ``[B, L, V]``, to be written ``size`` at a time; all others are or will be zeros."""
    listed, N = RowGather(out, rows), out.shape[0] * out.shape[1]
    if rows.numel() == N:
        return listed
    if listed.dense and not listed.together and out.is_cpu:
        return RowScatter(listed.flat, rows, size)
    idle = torch.ones(N, dtype=torch.bool, device=out.device).index_fill_(0, rows, False).nonzero().squeeze(1)
    others = RowGather(out, idle)
    others.flat.index_fill_(0, others.index, 0)
    return listed


def sum_rows(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of each row of ``[R, V]``, ``[R, 1]``: to the bit that of the same row among others.

    A long sum that is a single number torch cuts into one part a thread, so that its roundings follow the number of threads.
    Of one such row, therefore, the sum is made twice.
    """
    if x.shape[0] != 1 or x.numel() < GRAIN:
        return torch.sum(x, 1, keepdim=True, out=out)
    total = x.expand(2, -1).sum(1, keepdim=True)[:1]
    return total if out is None else out.copy_(total)


def a_row_at_a_time(function: Callable[..., torch.Tensor], z: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``torch.softmax`` or ``torch.log_softmax`` of ``[R, V]`` along V, written to ``out``, which may be z.

    On CPU one pass does what maximum, difference, exponential, sum and quotient do in five, at a third of their time where
    torch's ``exp`` is slow, and every row is its own: to the bit what it would be among others.
    """
    if not z.is_cpu and z.data_ptr() == out.data_ptr():
        return out.copy_(function(z, 1))  # whether their kernels may write over what they read, nobody says
    return function(z, 1, out=out)


def team(rows: int, V: int, acc: torch.dtype, device: torch.device) -> tuple[int, int]:
    """Threads to share the rows out among, and how many rows make a block."""
    row, threads = max(V * acc.itemsize, 1), how_many(device)
    one_core = device.type == "cpu" and torch.get_num_threads() == 1
    if not one_core and (threads == 1 or rows * row <= COMMON_BLOCK_BYTES):  # so few are not worth waking threads for
        return 1, max(1, min(rows, COMMON_BLOCK_BYTES // row))
    many = min(max(threads // 4, 1), 4)
    least, most = (max(size // row, 1) for size in (BLOCK_BYTES // 4, BLOCK_BYTES * many))
    return threads, max(1, min(rows, max(rows // (4 * threads), least), most))


def buffers_for(
    threads: int, size: int, V: int, like: torch.Tensor, *, wide: bool, narrow: bool, slope: bool = False
) -> list[Buffers]:
    acc = accum_dtype(like.dtype)
    return [
        Buffers(
            torch.empty(size * wide, V, dtype=acc, device=like.device),
            torch.empty(size * (narrow and like.dtype != acc), V, dtype=like.dtype, device=like.device),
            torch.empty(size * slope, V, dtype=acc, device=like.device),
        )
        for _ in range(threads)
    ]


def column_of(y: torch.Tensor, V: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A column to look at for every target, and whether the target is really there."""
    column = y.clamp(0, max(V - 1, 0))
    return column, column == y if V else torch.zeros_like(y, dtype=torch.bool)
