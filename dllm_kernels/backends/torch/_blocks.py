"""Blocks of rows: the shared machinery of the row primitives in plain torch.

A thread works on one block of rows at a time, in the dtype of sums. On a CPU a few threads share the blocks
(``backends/torch/_workers.py``), and a block is small enough to stay in a core's cache. On any other device a block is
large, because each operation on it is a kernel launch, and no value is read back to the host. The exception is
:meth:`RowIndex.of`, which needs the number of active rows and therefore syncs once per call of a primitive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from dllm_kernels.backends.torch._workers import num_threads
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._transform import Transform, with_slope

# Bytes of a block that one thread processes. It must stay in a core's cache.
BLOCK_BYTES = 1 << 20
# Bytes of a block that all cores process together, in fewer and larger operations.
COMMON_BLOCK_BYTES = 4 << 20
# Smallest size in bytes of a block on any other device, if there are enough rows.
DEVICE_BLOCK_BYTES = 256 << 20
# Smallest number of elements for which torch splits an operation across threads.
GRAIN = 1 << 15


Fields = TypeVar("Fields", bound=tuple[Any, ...])


class Buffers(NamedTuple):
    """Buffers of one thread.

    Attributes:
        wide: a block in the dtype of sums; without rows if not requested.
        narrow: a block in the dtype of the logits; None if not requested, or if that is the dtype of sums.
        slope: a block in the dtype of sums for the derivative of the soft cap; None if not requested.
        padded: ``narrow``, or ``wide`` if that is None, which has an additional last row for zeros; None if not
            requested.
        more: more blocks in the dtype of sums.
    """

    wide: Tensor
    narrow: Tensor | None
    slope: Tensor | None
    padded: Tensor | None
    more: Sequence[Tensor]


class RowIndex(NamedTuple):
    """Indices of the rows that a call processes.

    Attributes:
        indices: int64 ``[n]``.
        total: number of rows from which they are chosen.
        n: number of chosen rows.
        first: number of the first row if the rows are adjacent and ascending. None otherwise, or if the host does not
            know it.
        whole: True if these are all rows in order.
    """

    indices: Tensor
    total: int
    n: int
    first: int | None
    whole: bool

    @classmethod
    def of(cls, t: Tensor, inactive: int, weights: Tensor | None = None) -> RowIndex:
        """List the rows whose entry in ``t [N]`` is not ``inactive``, and whose weight is not 0.

        Causes a host sync, unless on a CPU. There NumPy is used, because ``torch.nonzero`` on a CPU branches at every
        entry: 325 us for 32,768 random entries instead of 40 us (AMD EPYC).
        """
        N = t.shape[0]
        if not t.is_cpu:
            on = t != inactive if weights is None else (t != inactive) & (weights != 0)
            numbers = on.nonzero().squeeze(1)
            whole = numbers.shape[0] == N
            return cls(numbers, N, numbers.shape[0], 0 if whole else None, whole)
        mask = t.numpy() != inactive
        if weights is not None:
            mask &= weights.numpy() != 0
        (on_host,) = mask.nonzero()
        n = len(on_host)
        adjacent = n > 0 and on_host.item(n - 1) - on_host.item(0) == n - 1
        return cls(torch.from_numpy(on_host), N, n, on_host.item(0) if adjacent else None, n == N > 0)

    @classmethod
    def listed(cls, numbers: Tensor, total: int) -> RowIndex:
        """Index the given rows, in any order; rows may be repeated."""
        n, first = numbers.shape[0], None
        if numbers.is_cpu and n and bool((np.diff(numbers.numpy()) == 1).all()):
            first = int(numbers[0])
        return cls(numbers, total, n, first, first == 0 and n == total)

    def take(self, t: Tensor) -> Tensor:
        """Take the entries of these rows from a tensor with one entry per row; ``t`` itself if these are all rows."""
        return t if self.whole else t.index_select(0, self.indices)

    def put(self, t: Tensor, inactive: int = 0) -> Tensor:
        """Inverse of :meth:`take`: one entry per row of the call, ``inactive`` in all other rows."""
        if self.whole:
            return t
        return t.new_full((self.total, *t.shape[1:]), inactive).index_copy_(0, self.indices, t)


def split(t: Tensor, size: int) -> tuple[Tensor, ...]:
    return (t,) if t.shape[0] <= size else torch.split(t, size)


def split_all(per_row: Fields, size: int) -> list[Fields]:
    """Split a tuple of tensors with one entry per row into blocks; fields that are not tensors are repeated."""
    n = per_row[0].shape[0]
    if n <= size:
        return [per_row]
    parts = (torch.split(t, size) if isinstance(t, Tensor) else [t] * -(-n // size) for t in per_row)
    make: Any = getattr(type(per_row), "_make", tuple)
    return [make(part) for part in zip(*parts, strict=True)]


def top(t: Tensor, block: Tensor) -> Tensor:
    """Take the first rows of ``t``, as many as the block has."""
    return t if t.shape[0] == block.shape[0] else t[: block.shape[0]]


class RowGather:
    """Rows of a ``[B, L, V]`` tensor, block by block: in place if the rows are adjacent, otherwise copied."""

    def __init__(self, t: Tensor, rows: RowIndex) -> None:
        (B, L, V), (batch, position, column) = t.shape, t.stride()
        position = position if L > 1 else batch if B > 1 else V
        batch = batch if B > 1 else L * position
        # Every row begins at a multiple of the step, so that one index addresses a row. The step is 1 if V is 0.
        step = math.gcd(batch, position) or V or 1
        batch, position = batch // step, position // step
        self.flat = t.as_strided(((B - 1) * batch + (L - 1) * position + 1, V), (step, column))
        dense = (batch, position) == (L, 1)
        self.dense = dense and step == V
        self.rows = rows
        self.index = rows.indices if dense else rows.indices // L * batch + rows.indices % L * position
        self.in_place = dense and rows.first is not None

    def blocks(self, size: int) -> tuple[Tensor, ...]:
        """Blocks of ``size``: views of the rows if they are adjacent, otherwise their numbers in ``flat``."""
        first, count = self.rows.first, self.rows.n
        if not self.in_place or first is None:
            return split(self.index, size)
        return split(self.flat if count == self.flat.shape[0] else self.flat[first : first + count], size)

    def load(self, block: Tensor, wide: Tensor, buffers: Buffers) -> Tensor:
        """Return the block in the dtype of sums: a view of the rows, or a copy in ``wide``, of ``buffers.wide``."""
        if self.in_place:
            return block if block.dtype == wide.dtype else wide.copy_(block)
        if buffers.narrow is None:
            return torch.index_select(self.flat, 0, block, out=wide)
        return wide.copy_(torch.index_select(self.flat, 0, block, out=top(buffers.narrow, block)))

    def output_buffer(self, block: Tensor, wide: Tensor) -> Tensor:
        """Return the buffer for the argument of :meth:`store`: the rows themselves, or ``wide``."""
        return block if self.in_place and block.dtype == wide.dtype else wide

    def store(self, block: Tensor, values: Tensor, buffers: Buffers) -> None:
        """Write values that were computed in the buffer of :meth:`output_buffer`."""
        if self.in_place:
            if values is not block:
                block.copy_(values)
        elif buffers.narrow is None:
            self.flat.index_copy_(0, block, values)
        else:
            self.flat.index_copy_(0, block, top(buffers.narrow, block).copy_(values))


def transformed_rows(
    source: RowGather, block: Tensor, transform: Transform, buffers: Buffers
) -> tuple[Tensor, Tensor | float, Tensor]:
    """Return (transformed logits of a block in the dtype of sums, their slope if it has a buffer, ``wide``)."""
    wide = top(buffers.wide, block)
    slope = None if buffers.slope is None else top(buffers.slope, block)
    return *with_slope(source.load(block, wide, buffers), transform, wide, slope), wide


class RowScatter:
    """Dense rows of a CPU tensor, written block by block as by :class:`RowGather`; all other rows are set to zeros.

    On a CPU ``index_copy_`` and ``index_fill_`` take three to four times as long as ``index_select``. Therefore a block
    is computed in a buffer with a row of zeros behind it, and every row of the tensor is selected from that buffer.
    """

    in_place = False

    def __init__(self, flat: Tensor, rows: RowIndex, size: int) -> None:
        index, source = rows.indices.numpy(), np.full(rows.total, size)
        source[index] = np.arange(rows.n) if rows.n <= size else np.arange(rows.n) % size
        self.flat, self.source = flat, torch.from_numpy(source)
        self.bounds = [0, *index[size::size].tolist(), rows.total]

    def blocks(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """Blocks of (rows up to the first one of the next block, their rows in the buffer)."""
        if len(self.bounds) == 2:
            return [(self.flat, self.source)]
        lengths = [hi - lo for lo, hi in zip(self.bounds, self.bounds[1:], strict=False)]
        return list(zip(torch.split(self.flat, lengths), torch.split(self.source, lengths), strict=True))

    def output_buffer(self, block: tuple[Tensor, Tensor], wide: Tensor) -> Tensor:
        """Return the buffer for the argument of :meth:`store`."""
        return wide

    def store(self, block: tuple[Tensor, Tensor], values: Tensor, buffers: Buffers) -> None:
        """Write values that were computed in the buffer of :meth:`output_buffer`, and the zeros between them."""
        rows, source = block
        if buffers.narrow is not None:
            top(buffers.narrow, values).copy_(values)
        assert buffers.padded is not None
        buffers.padded[-1].zero_()
        torch.index_select(buffers.padded, 0, source, out=rows)


def with_zeros_between(out: Tensor, rows: RowIndex, size: int) -> RowGather | RowScatter:
    """Return the target to store blocks of ``size`` rows in ``out [B, L, V]``; all other rows become zeros.

    They are zeroed here, or by :meth:`RowScatter.store`.
    """
    target = RowGather(out, rows)
    if rows.whole:
        return target
    if target.dense and not target.in_place and out.is_cpu:
        return RowScatter(target.flat, rows, size)
    inactive = torch.ones(rows.total, dtype=torch.bool, device=out.device).index_fill_(0, rows.indices, False)
    if out.is_cpu:
        others = RowGather(out, RowIndex.of(inactive, 0))
        others.flat.index_fill_(0, others.index, 0)
    else:
        zero_rows_(out, inactive)
    return target


def zero_rows_(t: Tensor, inactive: Tensor) -> None:
    """Zero the rows of ``t [..., V]`` for which ``inactive [N]`` is True."""
    if t.is_cpu:
        t.view(-1, t.shape[-1]).index_fill_(0, RowIndex.of(inactive, 0).indices, 0)
    else:  # a list of row numbers would be a sync
        t.masked_fill_(inactive.view(*t.shape[:-1], 1), 0)


def sum_rows(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum of each row of ``[R, V]``, ``[R, 1]``; bitwise independent of the other rows.

    torch splits a full reduction across threads, so that its rounding depends on the number of threads. A single long
    row is therefore expanded to two rows, which forces a reduction per row.
    """
    if x.shape[0] != 1 or x.numel() < GRAIN:
        return torch.sum(x, 1, keepdim=True, out=out)
    total = x.expand(2, -1).sum(1, keepdim=True)[:1]
    return total if out is None else out.copy_(total)


def rowwise(function: Callable[..., Tensor], z: Tensor, out: Tensor) -> Tensor:
    """Write ``torch.softmax`` or ``torch.log_softmax`` of ``[R, V]`` along V to ``out``, which may be z.

    One call replaces maximum, difference, exponential, sum and quotient. On a CPU it takes a third of their time if
    ``torch.exp`` is slow. Each row is bitwise independent of the others.
    """
    if not z.is_cpu and z.data_ptr() == out.data_ptr():
        return out.copy_(function(z, 1))  # aliasing input and out= is not documented for these kernels
    return function(z, 1, out=out)


def partition(rows: int, V: int, acc: torch.dtype, on_cpu: bool, sides: int = 1) -> tuple[int, int]:
    """Return (threads that share the rows, rows per block). On a CPU, blocks of ``sides`` tensors share the cache."""
    row = max(V * acc.itemsize, 1)
    if not on_cpu:
        return 1, max(1, min(rows, -(-DEVICE_BLOCK_BYTES // row)))
    row *= sides
    if torch.get_num_threads() == 1:
        return 1, max(1, min(rows, BLOCK_BYTES // row))
    threads = num_threads()
    if threads == 1 or rows * row <= COMMON_BLOCK_BYTES:  # too few rows to amortise waking threads
        return 1, max(1, min(rows, COMMON_BLOCK_BYTES // row))
    many = min(max(threads // 4, 1), 4)  # many threads contend for the GIL, hence larger blocks
    least, most = (max(size // row, 1) for size in (BLOCK_BYTES // 4, BLOCK_BYTES * many))
    return threads, max(1, min(rows, max(rows // (4 * threads), least), most))


def buffers_for(
    threads: int, size: int, like: Tensor, *, wide: bool = True, narrow: bool = False,
    slope: bool = False, padded: bool = False, more: int = 0,
) -> list[Buffers]:  # fmt: skip
    """Allocate :class:`Buffers` of ``size`` rows for each thread, on the device of ``like``, a tensor of logits."""
    V, dtype, device, buffers = like.shape[-1], accum_dtype(like.dtype), like.device, []
    for _ in range(threads):
        a = torch.empty(size * wide + padded, V, dtype=dtype, device=device)
        b = torch.empty(size + padded, V, dtype=like.dtype, device=device) if narrow and like.dtype != dtype else None
        blocks = [torch.empty(size, V, dtype=dtype, device=device) for _ in range(more + slope)]
        last = a if b is None else b
        buffers.append(Buffers(a, b, blocks.pop() if slope else None, last if padded else None, blocks))
    return buffers
