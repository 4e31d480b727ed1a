"""Which rows of a linear loss are projected: compaction of the active ones, a chunk at a time."""

from __future__ import annotations

import torch

ROW_MULTIPLE = 128


class ActiveRows:
    """The rows that count, listed or all.

    Attributes:
        count: how many rows are worked on.
        mask: ``[N]`` bool, the rows that really count; None when every row of ``count`` does.
        total: number of rows of the caller, N.
    """

    def __init__(self, mask: torch.Tensor, num_active: int | None) -> None:
        """List the rows where ``mask [N]`` is True.

        Reading their number back is a host sync on a GPU; it pays since the matrix products then run on these rows only.
        It is skipped inside CUDA-graph capture, where all rows are taken and the mask is applied to the gradient, and
        when the caller gives ``num_active``, an upper bound of it.
        """
        self.total = mask.numel()
        self.mask: torch.Tensor | None = None
        self.overflow: torch.Tensor | None = None
        self._index: torch.Tensor | None = None
        self._padded = num_active is not None
        if num_active is not None:
            self._index = torch.nonzero_static(mask, size=num_active, fill_value=self.total).squeeze(1)
            self.mask = self._index < self.total
            self.overflow = mask.sum() > num_active
        elif mask.is_cuda and torch.cuda.is_current_stream_capturing():
            self.mask = mask
        else:
            index = mask.nonzero().squeeze(1)
            self._index = index if index.numel() < self.total else None
        self.count = self.total if self._index is None else self._index.numel()

    def take(self, t: torch.Tensor, chunk: slice) -> torch.Tensor:
        """The chunk's rows of a per-row tensor; a view where all rows are taken."""
        if self._index is None:
            return t[chunk]
        index = self._index[chunk]
        return t.index_select(0, index.clamp(max=self.total - 1) if self._padded else index)

    def take_mask(self, chunk: slice) -> torch.Tensor | None:
        """Which rows of the chunk really count, or None when all do."""
        return None if self.mask is None else self.mask[chunk]

    def empty(self, *columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A per-row result that :meth:`put` fills; rows that are not listed are zero."""
        if self._index is None:
            return torch.empty(self.total, *columns, dtype=dtype, device=device)
        return torch.zeros(self.total + self._padded, *columns, dtype=dtype, device=device)

    def put(self, out: torch.Tensor, chunk: slice, value: torch.Tensor) -> None:
        """Write the chunk's rows; the padding of a given ``num_active`` goes to a spare last row."""
        if self._index is None:
            out[chunk] = value
        else:
            out.index_copy_(0, self._index[chunk], value.to(out.dtype))

    def whole(self, out: torch.Tensor) -> torch.Tensor:
        """The result without the spare row; a copy where it is a number a row, for callers may write into those."""
        if not self._padded:
            return out
        return out[: self.total].clone() if out.dim() == 1 else out[: self.total]


def choose_chunk(rows: int, V: int, itemsize: int, trains_head: bool, on_gpu: bool, memory_budget: int | None) -> int:
    """Rows of logits that exist at a time.

    A trainable head wants larger chunks, since each reads and writes its gradient once (8 V D bytes). On CPU the chunk
    only has to keep the matrix products efficient. ``memory_budget`` bounds the chunk of logits, in bytes. Chunks are
    of equal size, in multiples of 128 rows. The GPU sizes come from others' measurements; not measured here on a GPU.
    """
    if on_gpu:
        chunk = 4096 if trains_head else 2048
    else:
        chunk = 512
    if memory_budget is not None:
        chunk = min(chunk, max(1, memory_budget // (V * itemsize)))
    chunks = max(1, -(-rows // chunk))
    even = -(-rows // chunks)
    rounded = -(-even // ROW_MULTIPLE) * ROW_MULTIPLE
    return max(1, min(chunk, rounded))
