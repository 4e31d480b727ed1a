"""Compaction of the active rows of a linear loss, and the choice of the chunk size."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dllm_kernels.rows._interface import IGNORE

ROW_MULTIPLE = 128
# Memory of a chunk on a CPU. The logits of 512 rows take half of it at V = 262,144 in float32.
CPU_CHUNK_BYTES = 1 << 30
Outputs = Sequence[Tensor | None]


class ActiveRows:
    """Active rows of a call: all rows, or the listed ones.

    Attributes:
        count: number of rows to process.
        total: number of all rows, N.
        overflow: 0-d bool, True if ``num_active`` is too small; None if it is not given. All that the call computes is
            then NaN, because it covers some of the active rows only.
    """

    def __init__(self, targets: Tensor, bound: int | None, counted: Tensor | None, every_row: bool) -> None:
        """List the rows whose target in ``targets [N]`` is not ``IGNORE``.

        ``bound``, the argument ``num_active``, must be at least the number of such rows in ``counted``, by default in
        ``targets``. Backward lists fewer rows than forward if some have no upstream gradient. ``every_row``: True if no
        target is ``IGNORE``.

        Reading their number is a host sync on a GPU, which is worthwhile, because the matrix products then run on these
        rows only. There is no sync if every row is active, nor during CUDA-graph capture, which processes all rows, nor
        if the caller gives a bound.
        """
        self.total = targets.numel()
        self._targets = targets
        self.overflow: Tensor | None = None
        self._index: Tensor | None = None
        self._padded = bound is not None
        if bound is not None:
            mask = targets != IGNORE
            self._index = torch.nonzero_static(mask, size=bound, fill_value=self.total).squeeze(1)
            self.overflow = (mask if counted is None else counted != IGNORE).sum() > bound
            self._zero = self.checked_(torch.zeros((), device=targets.device))
        elif not every_row and not _captured(targets):
            index = (targets != IGNORE).nonzero().squeeze(1)
            self._index = index if index.numel() < self.total else None
        self.count = self.total if self._index is None else self._index.numel()

    def take(self, t: Tensor, chunk: slice) -> Tensor:
        """Take the chunk's rows of a per-row tensor; a view if all rows are active."""
        if self._index is None:
            return t[chunk]
        index = self._index[chunk]
        return t.index_select(0, index.clamp(max=self.total - 1) if self._padded else index)

    def take_targets(self, chunk: slice) -> Tensor:
        """Take the chunk's targets; ``IGNORE`` in the padding of a given ``num_active``."""
        targets = self.take(self._targets, chunk)
        if self._index is None or not self._padded:
            return targets
        return targets.masked_fill(self._index[chunk] == self.total, IGNORE)

    def empty(self, *columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a per-row result for :meth:`put` to fill; inactive rows are zero, ``IGNORE`` in int64."""
        if self._index is None:
            return torch.empty(self.total, *columns, dtype=dtype, device=device)
        return self.zeros(self.total + self._padded, *columns, dtype=dtype, device=device)

    def zeros(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate zeros, ``IGNORE`` in int64; NaN if ``num_active`` is too small and the dtype has NaN."""
        if dtype == torch.int64:
            return torch.full(shape, IGNORE, dtype=dtype, device=device)
        if self.overflow is None or not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device).copy_(self._zero)  # one pass, as for zeros

    def checked_(self, t: Tensor) -> Tensor:
        """Overwrite a tensor by NaN, flags by False and ids by ``IGNORE``, if ``num_active`` is too small."""
        if self.overflow is None:
            return t
        filler = math.nan if t.is_floating_point() else IGNORE if t.dtype == torch.int64 else 0
        return t.masked_fill_(self.overflow, filler)

    def put(self, out: Tensor, chunk: slice, value: Tensor) -> None:
        """Write the chunk's rows; the padding of a given ``num_active`` goes to a spare last row."""
        if self._index is None:
            out[chunk] = value
        else:
            out.index_copy_(0, self._index[chunk], value.to(out.dtype))

    def put_each(self, out: Outputs, chunk: slice, values: Outputs) -> None:
        """Call :meth:`put` on several results; results that were not requested are None."""
        for whole, value in zip(out, values, strict=True):
            if whole is not None and value is not None:
                self.put(whole, chunk, value)

    def finished(self, out: Outputs) -> list[Any]:
        """Call :meth:`checked_` and :meth:`whole` on each result."""
        return [None if t is None else self.whole(self.checked_(t)) for t in out]

    def whole(self, out: Tensor) -> Tensor:
        """Drop the spare row; copy results ``[N]``, because callers may write into them."""
        if not self._padded:
            return out
        return out[: self.total].clone() if out.dim() == 1 else out[: self.total]


def _captured(t: Tensor) -> bool:
    """Return True during CUDA-graph capture, in which a host sync is an error."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def limits_of_chunks(device: torch.device) -> tuple[int | None, int]:
    """Return the number of multiprocessors of a GPU, None for a CPU; and the bytes that a chunk may take.

    On a GPU these are a sixteenth of its memory, rounded to a power of the square root of 2. GPUs of one kind, whose
    memory differs by a per cent, therefore choose equal chunks, as ranks that share rows must.
    """
    if device.type != "cuda":
        return None, CPU_CHUNK_BYTES
    gpu = torch.cuda.get_device_properties(device)
    return gpu.multi_processor_count, int(2 ** (round(2 * math.log2(gpu.total_memory)) / 2)) // 16


def choose_chunk(rows: int, V: int, D: int, trains_head: bool, sms: int | None, fitting: int) -> int:
    """Choose the number of rows of a chunk, for a head ``[V, D]`` on a GPU with ``sms`` multiprocessors.

    On a CPU (None) chunks are of equal size and just large enough for efficient matrix products. On a GPU the size with
    the fewest waves wins, see :func:`_chunk_costs`. At most ``fitting`` rows fit into the memory of a chunk, but 128
    rows are always allowed, because fewer make products inefficient.
    """
    most = min(512 if sms is None else 8192 if trains_head else 2048, fitting // ROW_MULTIPLE * ROW_MULTIPLE)
    most = max(most, ROW_MULTIPLE)
    if rows <= ROW_MULTIPLE:
        return most
    if sms is None:
        even = -(-rows // -(-rows // most))
        return min(most, -(-even // ROW_MULTIPLE) * ROW_MULTIPLE)
    return _choose_for_gpu(rows, V, D, trains_head, most, sms)


@functools.lru_cache(maxsize=1024)
def _choose_for_gpu(rows: int, V: int, D: int, trains_head: bool, most: int, sms: int) -> int:
    """Choose the chunk size with the least :func:`_gpu_cost`; cached, because the GPU is idle until it is known."""
    costs = _chunk_costs(V, D, trains_head, most, sms)
    sizes = range(ROW_MULTIPLE, min(most, rows + ROW_MULTIPLE - 1) + 1, ROW_MULTIPLE)
    return min(sizes, key=lambda size: (_gpu_cost(size, rows, costs), size))


@functools.lru_cache(maxsize=64)
def _chunk_costs(V: int, D: int, trains_head: bool, most: int, sms: int) -> tuple[tuple[int, ...], int]:
    """Return (tile_costs, per_row): a chunk of c rows costs ``tile_costs[ceil(c / 128)] + per_row * c``.

    The unit is the time of one step of the inner dimension for one wave of 128 x 256 tiles; c is at most ``most``.

    The matmul of the logits has ceil(C / 128) ceil(V / 256) tiles of D steps. The matmul of grad_hidden has
    ceil(C / 128) ceil(D / 256) tiles of V steps. These are few and long, so an additional wave for a few tiles costs
    most: at 7,680 rows and D = 2,560, chunks of 1,920 rows make 150 tiles for 132 multiprocessors, and chunks of 1,664
    rows make 130. For a trainable head every chunk reads and writes the float32 gradient of the head, 8 V D bytes. On
    an H200 that takes about V D / 6,000 steps. The model has not been verified on a GPU.
    """

    def waves(tiles: int) -> int:
        return -(-tiles // sms)

    fixed = 2000 + (V * D // 6000 if trains_head else 0)  # 2000: launches and the tail of a product
    row_tiles = range(most // ROW_MULTIPLE + 1)  # tiles of 128 rows in a chunk
    tile_costs = (waves(tiles * -(-V // 256)) * D + waves(tiles * -(-D // 256)) * V + fixed for tiles in row_tiles)
    return tuple(tile_costs), waves(-(-V // 128) * -(-D // 256)) if trains_head else 0


def _gpu_cost(size: int, rows: int, costs: tuple[tuple[int, ...], int]) -> int:
    """Sum the :func:`_chunk_costs` over all chunks of ``rows`` rows."""
    (tile_costs, per_row), (whole, rest) = costs, divmod(rows, size)
    total = whole * tile_costs[size // ROW_MULTIPLE] + rows * per_row
    return total + (tile_costs[-(-rest // ROW_MULTIPLE)] if rest else 0)
