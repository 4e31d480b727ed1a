"""Chunk loop over rows of hidden states. Logits are materialised only here, in one buffer that all chunks reuse.

All ops from hidden states use this loop, forward and backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels._graph._private import is_in_torch_dispatch_mode
from dllm_kernels.rows._active_rows import ActiveRows, choose_chunk, limits_of_chunks
from dllm_kernels.rows._call import as_marks
from dllm_kernels.rows._interface import IGNORE
from dllm_kernels.rows._logits import Head
from dllm_kernels.rows._setup import NO_GRADIENTS, PER_ROW_GRADS, Gradients, NeedsGrad, Setup

# Columns of a low-precision chunk that are cast to float32 at a time, on devices whose matmul cannot add to a float32
# output (CPU, ROCm).
SLAB = 4096


class Factors(NamedTuple):
    """Per-row factors ``[N]`` applied to gradients after the matrix products; None for 1."""

    hidden: Tensor | None = None
    head: Tensor | None = None


NO_FACTORS = Factors()
Columns = tuple[int, torch.dtype]  # number of columns, and dtype, of a buffer of a chunk


def float16_scaling(scale: Tensor, setup: Setup) -> tuple[Tensor, Factors, Tensor | None]:
    """Split per-row scales into (scales of the logits gradient ``[N]``, factors after the matmuls, 0-d loss scale).

    Per-row loss scaling is for float16 only. There w / N times a probability would underflow, so the gradient of the
    logits is computed at scale 1. After the matmul each row of the gradient of the hidden states is multiplied by its
    scale. The loss scale is the largest scale. For the gradient of the head each row is multiplied by its scale over
    the loss scale, and the float32 sum by the loss scale. In every other dtype the scales are used unchanged.
    """
    if not setup.needs_loss_scaling:
        return scale, NO_FACTORS, None
    largest = scale.abs().amax() if scale.numel() else scale.new_ones(())
    largest = largest.clamp(min=torch.finfo(torch.float32).tiny)
    return (scale != 0).to(scale.dtype), Factors(scale, scale / largest), largest


def no_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Disable autocast on the device of a tensor."""
    return torch.autocast(x.device.type, enabled=False)


class Chunks:
    """Iterates over chunks of logits and accumulates the gradients.

    An optional low-rank term, ``u U^T``, is accumulated into the chunk's logits in place. Both terms share the gradient
    with respect to the logits.
    """

    def __init__(
        self, hidden: Tensor, head: Head, targets: Tensor | None, setup: Setup, needs: NeedsGrad = NO_GRADIENTS,
        factors: Factors = NO_FACTORS, *, listed: Tensor | None = None, others: Sequence[Columns] = (),
    ) -> None:  # fmt: skip
        """Allocate the buffer of a chunk and the gradients.

        Args:
            hidden: ``[N, D]``.
            head: the LM head, with ``[N, r]`` rows of its low-rank part.
            targets: int64 ``[N]``, ``IGNORE`` in inactive rows; None for zeros, if every row is active.
            setup: settings of the call.
            needs: inputs whose gradients are accumulated.
            factors: per-row factors of the gradients.
            listed: ``[N]``, restricts the rows to those that it does not mark as ``IGNORE``; None: the targets.
            others: the caller's other buffers of a chunk, such as the teacher's logits.
        """
        self.hidden, self.head, self.setup, self.needs, self.factors = hidden, head, setup, needs, factors
        self.weight = head.weight.to(setup.dtype)
        self.bias, self.U = (None if t is None else t.to(setup.dtype) for t in (head.bias, head.U))
        self.primitives = setup.primitives()
        V, device = len(head.weight), hidden.device
        choose = self._chooser_of_size([*others, (V, setup.chunk_dtype)])
        self.grads: dict[str, Tensor] = {}
        if needs.bias:
            self.grads["bias"] = torch.zeros(V, dtype=setup.accum_dtype, device=device)
        every_row = targets is None and listed is None
        self.targets = targets = as_marks(targets, hidden)
        # This may sync, which leaves the GPU idle. All that does not depend on the number of active rows comes before.
        listed, counted = (targets, None) if listed is None else (listed, targets)
        self.rows = ActiveRows(listed, setup.active_bound, counted, every_row)
        if needs.bias:
            self.rows.checked_(self.grads["bias"])
        size = setup.chunk_rows or choose()
        self.size = max(1, min(size, self.rows.count))
        self.logits = aligned_rows(self.size if self.rows.count else 0, V, dtype=setup.chunk_dtype, device=device)
        for field, t in zip(PER_ROW_GRADS, (hidden, head.u), strict=True):
            if t is not None and getattr(needs, field):
                self.grads[field] = self.rows.empty(t.shape[1], dtype=t.dtype, device=device)

    def _chooser_of_size(self, buffers: list[Columns]) -> Callable[[], int]:
        """Return a function that chooses the number of rows of a chunk, for the number of active rows.

        Ranks that share rows must use the same chunks, whatever number of columns they hold, because each chunk ends in
        a collective. The number of rows is multiplied by the number of ranks, which takes the same memory and fewer
        collectives.
        """
        D, setup, split = self.hidden.shape[1], self.setup, self.setup.split
        if setup.chunk_dtype != setup.dtype:  # the gradient of the logits is copied
            buffers.append((len(self.weight), setup.dtype))
        ranks = 1
        if split is not None and setup.splits_rows:
            ranks, buffers = split.ranks, [(max(V, split.vocabulary), dtype) for V, dtype in buffers]
        V = max(V for V, _ in buffers)
        sms, memory = limits_of_chunks(self.hidden.device)
        # Rows of hidden states are gathered, cast, and computed from the gradient of the logits.
        fitting = memory // (sum(V * dtype.itemsize for V, dtype in buffers) + 4 * D * setup.dtype.itemsize)

        def choose() -> int:
            rows = self.rows.count if ranks == 1 else -(-self.rows.total // ranks)
            return ranks * choose_chunk(rows, V, D, setup.needs.weight, sms, fitting)

        return choose

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Compute the logits of each chunk; yield (slice, hidden rows, targets, logits)."""
        for start in range(0, self.rows.count, self.size):
            chunk = slice(start, min(start + self.size, self.rows.count))
            h = self.rows.take(self.hidden, chunk).to(self.setup.dtype)
            logits = self.logits[: h.shape[0]]
            u = None if self.U is None else self._rows_of_u(chunk)
            head_product(h, Head(self.weight, self.bias, u, self.U), logits)
            yield chunk, h, self.rows.take_targets(chunk), logits

    def _rows_of_u(self, chunk: slice) -> Tensor:
        assert self.head.u is not None
        return self.rows.take(self.head.u, chunk).to(self.setup.dtype)

    def add_gradients(
        self, chunk: slice, h: Tensor, y: Tensor, grad_logits: Tensor, scale: Tensor, factors: Factors | None = None
    ) -> None:
        """Accumulate the hidden, weight and bias gradients from ``grad_logits``, which has overwritten the logits.

        Per-row factors, given for the chunk or else those of the call, are applied after the matmuls. The gradient of
        float32 logits is first rounded, once, to the dtype of the matmuls.
        """
        grad_logits = grad_logits.to(self.setup.dtype)
        take = self.rows.take
        factors = factors or Factors(*(None if f is None else take(f, chunk) for f in self.factors))
        hidden_scale, head_scale = (None if f is None else f.unsqueeze(1) for f in factors)
        for field, weight in zip(PER_ROW_GRADS, (self.weight, self.U), strict=True):
            if weight is not None and field in self.grads:
                rows = torch.mm(grad_logits, weight)
                rows = self.rows.checked_(rows if hidden_scale is None else rows * hidden_scale)
                self.rows.put(self.grads[field], chunk, rows)
        if self.needs.weight or self.needs.U:
            # Zero the rows without a gradient, because 0 * NaN would spread to the whole gradient of the head.
            idle = ((scale == 0) | (y == IGNORE)).unsqueeze(1)
            for field, t in (("weight", self.head.weight), ("U", self.head.U)):
                if t is not None and getattr(self.needs, field):
                    rows = h if field == "weight" else self._rows_of_u(chunk)
                    rows = self.rows.checked_((rows if head_scale is None else rows * head_scale).masked_fill(idle, 0))
                    self.grads[field] = self._accumulate_product(self.grads.get(field), rows, grad_logits, t.dtype)
        if self.needs.bias:
            _add_column_sums(self.grads["bias"], grad_logits, head_scale)

    def raise_loss_scale(self, loss_scale: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """Raise the loss scale to the largest of ``size``; return it and the per-row factors of the chunk.

        The head gradients accumulated so far are rescaled.
        """
        largest = torch.maximum(loss_scale, size.amax())
        for field, grad in self.grads.items():
            if field not in PER_ROW_GRADS:
                grad *= loss_scale / largest
        return largest, size / largest

    def _accumulate_product(self, total: Tensor | None, h: Tensor, grad_logits: Tensor, dtype: torch.dtype) -> Tensor:
        """Accumulate ``grad_logits^T h`` into ``total`` in float32.

        With a single chunk the matmul's own output dtype is used, unless the result must still be unscaled or cast to
        ``dtype``.
        """
        a, acc = grad_logits.t(), self.setup.accum_dtype
        if a.is_cuda or not self.setup.needs_loss_scaling:  # a CPU casts both to float32 anyway
            h = h.to(a.dtype)
        single = self.size >= self.rows.count and a.dtype == dtype and not self.setup.needs_loss_scaling
        if a.dtype == acc or single:
            if total is not None:
                return total.addmm_(a, h)
            if self.size >= self.rows.count:
                return torch.mm(a, h)
            # A selective activation checkpoint may keep the result of mm, and raises if it is written to later.
            return torch.mm(a, h, out=a.new_empty(a.shape[0], h.shape[1]))
        if a.is_cuda and torch.version.hip is None:
            if total is None:
                return torch.mm(a, h, out_dtype=acc)
            return _add_product(total, a, h)
        if total is None:
            total = torch.zeros(a.shape[0], h.shape[1], dtype=acc, device=h.device)
        # torch has no 16-bit matmul into a float32 output with rocBLAS, and with float16 that of a chunk may overflow.
        if a.is_cuda and a.dtype != torch.float16:
            return total.add_(torch.mm(a, h))
        _add_product_by_slabs(total, a, h)
        return total

    def gradients(self, loss_scale: Tensor | None = None, *, wide: bool = False) -> Gradients:
        """Return the gradients in the dtypes of the inputs; multiply the head's by ``loss_scale``.

        With ``wide`` the gradients of the head are in the accumulation dtype.
        """
        acc, out = self.setup.accum_dtype, dict[str, Tensor]()
        for field, t, needed in zip(Gradients._fields, (self.hidden, *self.head), self.needs, strict=True):
            if t is None or not needed:
                continue
            grad = self.grads.get(field)
            if grad is None:  # no chunk was processed
                grad = self.rows.zeros(*t.shape, dtype=acc, device=t.device)
            if field in PER_ROW_GRADS:
                out[field] = self.rows.whole(grad)
            else:
                grad = grad if loss_scale is None else grad.to(acc) * loss_scale
                out[field] = grad.to(acc if wide else t.dtype)
        return Gradients(**out)


def head_product(h: Tensor, head: Head, out: Tensor) -> None:
    """Write ``h weight^T + bias + u U^T`` to ``out``, omitting terms that are None."""
    weight, bias, u, U = head
    if out.dtype != h.dtype:
        _wide_product(h, weight, out)
        if bias is not None:
            out += bias
        if U is not None and u is not None:
            _wide_product(u, U, out, add=True)
        return
    if bias is None:
        torch.mm(h, weight.t(), out=out)
    else:
        torch.addmm(bias, h, weight.t(), out=out)
    if U is not None and u is not None:
        out.addmm_(u, U.t())


def _wide_product(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Write, or add, the product ``a b^T`` of 16-bit operands to a float32 ``out`` without intermediate rounding.

    On devices whose matmul cannot do so (CPU, ROCm) ``a`` is cast to float32 at once, and ``b`` in slabs of rows.
    """
    if not a.is_cuda or torch.version.hip is not None:
        _add_product_by_slabs(out.t(), b, a.t(), beta=int(add))
    elif add:
        _add_product(out, a, b.t())
    elif is_in_torch_dispatch_mode():  # see _add_product
        out.copy_(torch.mm(a, b.t(), out_dtype=out.dtype))
    else:
        torch.mm(a, b.t(), out_dtype=out.dtype, out=out)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add the product of 16-bit operands to a float32 ``total``, on a device whose matmul supports that output."""
    if is_in_torch_dispatch_mode():  # FlopCounterMode has no formula for overloads with out_dtype and out=
        return total.add_(torch.mm(a, b, out_dtype=total.dtype))
    return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def aligned_rows(rows: int, V: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate ``[rows, V]``; on a GPU rows begin at multiples of 64 elements, for aligned matmuls and kernels."""
    columns = -(-V // 64) * 64 if device.type == "cuda" else V
    return torch.empty(rows, columns, dtype=dtype, device=device)[:, :V]


def _add_product_by_slabs(out: Tensor, a: Tensor, b: Tensor, beta: int = 1) -> None:
    """Write ``a b + beta out`` to ``out`` in its dtype; cast ``a`` slab by slab, to avoid a copy of the whole."""
    wide = b.to(out.dtype)
    for v in range(0, a.shape[0], SLAB):
        out[v : v + SLAB].addmm_(a[v : v + SLAB].to(out.dtype), wide, beta=beta)


def _add_column_sums(out: Tensor, a: Tensor, factor: Tensor | None) -> None:
    """Add the column sums of ``a``, its rows times ``factor``, to ``out`` in its dtype; in slabs if ``a`` is copied."""
    whole = factor is None and (a.is_cuda or a.dtype == out.dtype)
    slab = max(a.shape[1], 1) if whole else SLAB  # a rank may hold no columns
    for v in range(0, a.shape[1], slab):
        part = a[:, v : v + slab]
        out[v : v + slab] += (part if factor is None else part * factor).sum(0, dtype=out.dtype)
