"""The chunk loop: the one place where the logits of a head exist, in one buffer that every chunk re-uses.

Everything here takes a job over N rows and its plan, forward and backward, eager and compiled alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from dllm_kernels._backends._rows import SKIP
from dllm_kernels._core._active_rows import ActiveRows, choose_chunk, multiprocessors
from dllm_kernels._core._inputs import Gradients, NeedsGrad, RowInputs
from dllm_kernels._core._plan import Plan

# Columns of a low-precision chunk that are widened at a time where a product cannot sum in float32 by itself (CPU).
SLAB = 4096

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


class Factors(NamedTuple):
    """What each row's gradient is multiplied by after the product and not before, ``[N]`` or None."""

    hidden: torch.Tensor | None = None
    head: torch.Tensor | None = None


NO_FACTORS = Factors()


def unit_scale(scale: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, Factors, torch.Tensor | None]:
    """(scale to make the gradient of the logits for, ``[N]``; the factors after the products; the loss_scale, 0-d).

    float16 only: per-row loss scaling. The gradient of the logits is made at scale 1, since w / N times a probability would
    underflow. After the product each row of hidden's gradient gets its own scale. For the head's gradient each row gets its
    scale over the largest one, and the sum is multiplied by that largest one, the loss_scale, in float32. In every other dtype
    the scale is used as it is.
    """
    if not plan.needs_loss_scaling:
        return scale, NO_FACTORS, None
    largest = scale.abs().amax() if scale.numel() else scale.new_ones(())
    largest = largest.clamp(min=torch.finfo(torch.float32).tiny)
    return (scale != 0).to(scale.dtype), Factors(scale, scale / largest), largest


def no_autocast(inputs: RowInputs) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(inputs.x.device.type, enabled=False)


class Chunks:
    """The chunks of a job, and the gradients that gather while they pass.

    A second part of the head, ``extra_x extra_weight^T``, is a product that adds to the chunk where it lies, and what the
    gradient of the logits then is, is it for both parts.
    """

    def __init__(self, inputs: RowInputs, plan: Plan, needs: NeedsGrad, factors: Factors = NO_FACTORS) -> None:
        self.inputs, self.plan, self.needs, self.factors = inputs, plan, needs, factors
        self.weight = inputs.head.to(plan.dtype)
        self.bias = None if inputs.bias is None else inputs.bias.to(plan.dtype)
        self.extra_weight = None if inputs.extra_weight is None else inputs.extra_weight.to(plan.dtype)
        assert inputs.targets is not None
        self.rows = ActiveRows(inputs.targets, plan.options.num_active)
        self.primitives = plan.primitives()
        (V, D), device = inputs.head.shape, inputs.x.device
        size = plan.options.chunk_size or choose_chunk(self.rows.count, V, D, plan, multiprocessors(device))
        self.size = max(1, min(size, self.rows.count))
        self.logits = aligned_rows(self.size if self.rows.count else 0, V, dtype=plan.dtype, device=device)
        self.grad_hidden = self.rows.empty(D, dtype=inputs.x.dtype, device=device) if needs.x else None
        self.grad_extra_x: torch.Tensor | None = None
        if needs.extra_x and inputs.extra_x is not None:
            self.grad_extra_x = self.rows.empty(inputs.extra_x.shape[1], dtype=inputs.extra_x.dtype, device=device)
        self.grad_weight: torch.Tensor | None = None
        self.grad_extra_weight: torch.Tensor | None = None
        self.grad_bias = torch.zeros(V, dtype=plan.accum_dtype, device=device) if needs.bias else None

    def __iter__(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Chunks as (slice, hidden rows, targets, logits): the product that makes the logits happens here."""
        for start in range(0, self.rows.count, self.size):
            chunk = slice(start, min(start + self.size, self.rows.count))
            h = self.rows.take(self.inputs.x, chunk).to(self.plan.dtype)
            logits = self.logits[: h.shape[0]]
            if self.bias is None:
                torch.mm(h, self.weight.t(), out=logits)
            else:
                torch.addmm(self.bias, h, self.weight.t(), out=logits)
            if self.extra_weight is not None:
                logits.addmm_(self._extra_rows(chunk), self.extra_weight.t())
            yield chunk, h, self.rows.take_targets(chunk), logits

    def _extra_rows(self, chunk: slice) -> torch.Tensor:
        assert self.inputs.extra_x is not None
        return self.rows.take(self.inputs.extra_x, chunk).to(self.plan.dtype)

    def run(self, scale: torch.Tensor | None) -> Rows:
        """One pass over all chunks: (nll, row_max, log_sum, correct), and the gradients for ``scale [N]`` where needed.

        ``scale=None`` makes none: only the first product and the reduction run.
        """
        rows, acc, options = self.rows, self.plan.accum_dtype, self.plan.options
        through: dict[str, Any] = {"with_correct": options.with_correct, "transform": options.transform}
        device = self.logits.device
        correct = rows.empty(dtype=torch.bool, device=device) if options.with_correct else None
        out = [*(rows.empty(dtype=acc, device=device) for _ in range(3)), correct]
        for chunk, h, y, logits in self:
            if scale is None:
                stats = self.primitives.nll(logits[None], y, **through)
            else:
                s = rows.take(scale, chunk)
                stats = self.primitives.nll_and_grad_(logits, y, s, **through)
                self.add_gradients(chunk, h, y, logits, s)
            rows.put_each(out, chunk, stats)
        nll, row_max, log_sum, correct = rows.finished(out)
        return nll, row_max, log_sum, correct

    def add_gradients(
        self,
        chunk: slice,
        h: torch.Tensor,
        y: torch.Tensor,
        grad_logits: torch.Tensor,
        scale: torch.Tensor,
        factors: Factors | None = None,
    ) -> None:
        """The products with the gradient that now stands where the logits were, but for factors a row, the chunk's or all's."""
        take = self.rows.take
        factors = factors or Factors(*(None if f is None else take(f, chunk) for f in self.factors))
        of_hidden, of_head = (None if f is None else f.unsqueeze(1) for f in factors)
        for grad, weight in ((self.grad_hidden, self.weight), (self.grad_extra_x, self.extra_weight)):
            if grad is not None and weight is not None:
                rows = torch.mm(grad_logits, weight)
                self.rows.put(grad, chunk, rows if of_hidden is None else rows * of_hidden)
        if self.needs.weight or self.needs.extra_weight:
            # Rows without a gradient as zeros: a NaN there, times 0, would reach all of grad_weight.
            idle = ((scale == 0) | (y == SKIP)).unsqueeze(1)

            def added(total: torch.Tensor | None, h: torch.Tensor, parameter: torch.Tensor | None) -> torch.Tensor:
                assert parameter is not None
                h = h if of_head is None else h * of_head
                return self._plus_product(total, h.masked_fill(idle, 0), grad_logits, parameter.dtype)

            if self.needs.weight:
                self.grad_weight = added(self.grad_weight, h, self.inputs.weight)
            if self.needs.extra_weight:
                self.grad_extra_weight = added(
                    self.grad_extra_weight, self._extra_rows(chunk), self.inputs.extra_weight
                )
        if self.grad_bias is not None:
            _add_column_sums(self.grad_bias, grad_logits, of_head)

    def raised(self, loss_scale: torch.Tensor, size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the loss_scale that a chunk of these sizes needs, its rows' factors), the head's gradients so far divided anew."""
        largest = torch.maximum(loss_scale, size.amax())
        for grad in (self.grad_weight, self.grad_bias, self.grad_extra_weight):
            if grad is not None:
                grad *= loss_scale / largest
        return largest, size / largest

    def _plus_product(
        self, total: torch.Tensor | None, h: torch.Tensor, grad_logits: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Total + grad_logits^T h, in place, in float32 whatever the dtype; a single chunk is rounded by its product.

        But not where it still wants its loss_scale, or where the parameter has another ``dtype``.
        """
        a, acc = grad_logits.t(), self.plan.accum_dtype
        if a.is_cuda or not self.plan.needs_loss_scaling:  # a CPU widens both anyway
            h = h.to(a.dtype)
        single = self.size >= self.rows.count and a.dtype == dtype and not self.plan.needs_loss_scaling
        if a.dtype == acc or single:
            return torch.mm(a, h) if total is None else total.addmm_(a, h)
        if a.is_cuda and torch.version.hip is None:
            if total is None:
                return torch.mm(a, h, out_dtype=acc)
            if is_in_torch_dispatch_mode():  # FlopCounterMode has no formula for this overload of addmm, and raises
                return total.add_(torch.mm(a, h, out_dtype=acc))
            return torch.addmm(total, a, h, out_dtype=acc, out=total)
        if total is None:
            total = torch.zeros(a.shape[0], h.shape[1], dtype=acc, device=h.device)
        if a.is_cuda:  # rocBLAS has no product of low-precision matrices into a float32 one through torch
            return total.add_(torch.mm(a, h))
        _add_product_by_slabs(total, a, h)
        return total

    def gradients(self, loss_scale: torch.Tensor | None = None, *, wide: bool = False) -> Gradients:
        """Gradients in the dtypes of the inputs, the head's times ``loss_scale``.

        With ``wide`` those of the head are in the accumulation dtype.
        """

        def of_rows(grad: torch.Tensor | None) -> torch.Tensor | None:
            return None if grad is None else self.rows.whole(grad)

        def of_head(grad: torch.Tensor | None, parameter: torch.Tensor | None, needed: bool) -> torch.Tensor | None:
            if parameter is None or not needed:
                return None
            if grad is None:  # there was no chunk
                grad = torch.zeros(parameter.shape, dtype=self.plan.accum_dtype, device=parameter.device)
            if loss_scale is not None:
                grad = grad.to(self.plan.accum_dtype) * loss_scale
            return grad.to(self.plan.accum_dtype if wide else parameter.dtype)

        inputs, needs = self.inputs, self.needs
        return Gradients(
            of_rows(self.grad_hidden),
            of_head(self.grad_weight, inputs.weight, needs.weight),
            of_head(self.grad_bias, inputs.bias, needs.bias),
            of_rows(self.grad_extra_x),
            of_head(self.grad_extra_weight, inputs.extra_weight, needs.extra_weight),
        )


def aligned_rows(rows: int, V: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[rows, V]`` of fresh memory; on a GPU every row begins at a multiple of 64 elements, as products and kernels want."""
    columns = -(-V // 64) * 64 if device.type == "cuda" else V
    return torch.empty(rows, columns, dtype=dtype, device=device)[:, :V]


def _add_product_by_slabs(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Out += a b in the dtype of out, widening ``a`` a slab at a time: no wide copy of a chunk of logits exists."""
    wide = b.to(out.dtype)
    for v in range(0, a.shape[0], SLAB):
        out[v : v + SLAB].addmm_(a[v : v + SLAB].to(out.dtype), wide)


def _add_column_sums(out: torch.Tensor, a: torch.Tensor, factor: torch.Tensor | None) -> None:
    """Out += column sums of ``a``, rows times their factor, in the dtype of out; a slab at a time where that makes copies."""
    whole = factor is None and (a.is_cuda or a.dtype == out.dtype)
    slab = max(a.shape[1], 1) if whole else SLAB  # a rank may hold no columns
    for v in range(0, a.shape[1], slab):
        part = a[:, v : v + slab]
        out[v : v + slab] += (part if factor is None else part * factor).sum(0, dtype=out.dtype)
