"""The teacher of a divergence: rows, LM head, compared rows and columns, and the logits of a chunk of rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels.rows._call import flat_index
from dllm_kernels.rows._chunks import Chunks, aligned_rows, head_product
from dllm_kernels.rows._divergence import Whole
from dllm_kernels.rows._logits import Head, flat_rows
from dllm_kernels.rows._setup import Setup
from dllm_kernels.rows._transform import Transform

# The teacher's logits of a chunk of the student's rows, and its whole rows if the logits are a part of them.
TeacherLogits = Callable[[slice], tuple[Tensor, Whole | None]]


class Teacher(NamedTuple):
    """Teacher of a divergence; all tensors are constants.

    Attributes:
        x: logits ``[..., V']`` or hidden states ``[..., D']``.
        weight: its own LM head ``[V', D']``; None for logits, and if it shares the student's.
        bias: bias of ``weight`` or None.
        u: ``[..., r]``, rows of the low-rank part of its head, or None.
        U: ``[V', r]`` or None.
        rows: int64 ``[...]``, teacher row of each student row; None for the same row.
        columns: int64 ``[V]``, teacher column of each student column; None for the same column.
        inverse: int64 ``[V']``, student column of each teacher column, -100 for teacher columns without one; None
            without ``columns``.
    """

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    u: Tensor | None = None
    U: Tensor | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None
    inverse: Tensor | None = None

    def flat(self, *, from_hidden: bool) -> Teacher:
        """Return the teacher with flat rows: hidden states ``[R, D']``; logits keep their shape."""
        rows, columns = (None if t is None else flat_index(t) for t in (self.rows, self.columns))
        x = flat_rows(self.x) if from_hidden else self.x
        return Teacher(x, self.weight, self.bias, flat_rows(self.u), self.U, rows, columns, self.inverse)

    def converted(self, setup: Setup, *, with_whole: bool) -> Teacher:
        """Cast its own part of the head, or only the compared columns, before :class:`Chunks` syncs."""
        columns = self.columns
        head = Head(self.weight, self.bias, None, self.U)  # type: ignore[arg-type]
        if self.weight is not None and not with_whole:
            head, columns = _picked(head, columns), None
        weight, bias, U = head.mapped(lambda t: t.to(setup.dtype)).shared
        return self._replace(weight=weight, bias=bias, U=U, columns=columns)

    def logits_of(self, chunks: Chunks, transform: Transform, *, with_whole: bool) -> TeacherLogits:
        """Make the function that computes the logits for a chunk of student rows, in a buffer that all chunks reuse.

        With ``with_whole`` it also returns the norms and the argmax of whole rows, if only some columns are compared.
        ``transform``: that of the teacher.
        """
        rows, setup = chunks.rows, chunks.setup
        weight, bias = (chunks.weight, chunks.bias) if self.weight is None else (self.weight, self.bias)
        head = Head(weight, bias, None, self.U)

        def take(t: Tensor | None, chunk: slice) -> Any:
            if t is None:
                return None
            taken = rows.take(t, chunk) if self.rows is None else gather(t, rows.take(self.rows, chunk))
            return taken.to(setup.dtype)

        def product(chunk: slice, head: Head, out: Tensor) -> Tensor:
            h, u = (take(t, chunk) for t in (self.x, self.u))
            head_product(h, head._replace(u=u), out := out[: len(h)])
            return out

        def buffer(columns: int) -> Tensor:
            return aligned_rows(len(chunks.logits), columns, dtype=chunks.logits.dtype, device=chunks.hidden.device)

        columns, V = self.columns, len(head.weight)
        if columns is None or not with_whole:
            compared = _picked(head, columns)
            out = buffer(len(compared.weight))
            return lambda chunk: (product(chunk, compared, out), None)
        norms_of = self.norms_function(setup, transform)
        if chunks.primitives.part_of is not None:  # this rank computes its columns, and a part of the whole rows
            start, size = chunks.primitives.part_of(V)
            compared, part = _picked(head, columns), head.mapped(lambda t: t[start : start + size])
            out, rest = buffer(len(columns)), buffer(size)
            return lambda chunk: (product(chunk, compared, out), norms_of(product(chunk, part, rest), start))
        out, rest = buffer(len(columns)), buffer(V + 1)
        rest[:, V] = math.nan  # read for columns that are out of range
        index = torch.where((columns >= 0) & (columns < V), columns, V)

        def compute(chunk: slice) -> tuple[Tensor, Whole]:
            logits = product(chunk, head, rest[:, :V])
            compared = torch.index_select(rest[: len(logits)], 1, index, out=out[: len(logits)])
            return compared, norms_of(logits, 0)

        return compute

    def norms_function(self, setup: Setup, transform: Transform) -> Callable[[Tensor, int], Whole]:
        """Return a function of the whole rows, or of their columns from a start on if rows are split."""
        inverse, skip = self.inverse, None
        assert inverse is not None
        if (column := transform.skip_id) is not None:
            skip = (inverse == column).to(torch.int32).argmax(0, keepdim=True)

        def norms_of(logits: Tensor, start: int) -> Whole:
            local_skip = None if skip is None else skip - start
            norms, best = setup.primitives().row_norms(logits, transform.pointwise, local_skip, start)
            return Whole(norms, inverse[best])

        return norms_of


def _picked(head: Head, columns: Tensor | None) -> Head:
    """Copy the parts of the head for these columns of the logits; all if None."""
    return head if columns is None else head.mapped(lambda t: gather(t.detach(), columns))


def gather(t: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """Copy the indexed rows, or columns, of a tensor; NaN for an index out of range."""
    inside = index.clamp(0, t.shape[dim] - 1)
    out_of_range = (index != inside).view(-1, *[1] * (t.dim() - 1 - dim))
    return t.index_select(dim, inside).masked_fill_(out_of_range, math.nan)


def rows_at(t: Tensor, index: Tensor) -> Tensor:
    """Gather rows of ``[B, L, V]`` by number, ``[n, V]``; NaN for a number out of range."""
    count = t.shape[0] * t.shape[1]
    inside = index.clamp(0, count - 1)
    rows = t[inside // t.shape[1], inside % t.shape[1]]
    return rows.masked_fill_((index != inside).unsqueeze(1), math.nan)
