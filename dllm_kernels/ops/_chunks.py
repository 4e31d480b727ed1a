"""The chunk loop: the one place where the logits of a head exist, in one buffer that every chunk re-uses.

Everything here takes a job over N rows and its plan, forward and backward, eager and compiled alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from dllm_kernels.ops._active_rows import ActiveRows, choose_chunk, multiprocessors
from dllm_kernels.ops._plan import NO_GRADIENTS, LinearJob, Needs, Plan
from dllm_kernels.ops._results import rounded, weighted_sum
from dllm_kernels.ops._rows import SKIP

# Columns of a low-precision chunk that are widened at a time where a product cannot sum in float32 by itself (CPU).
SLAB = 4096

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class Weighted(NamedTuple):
    """What the forward pass of a weighted sum leaves: the loss, each row's numbers, and the gradients for backward."""

    loss: torch.Tensor
    rows: Rows
    grad_hidden: torch.Tensor | None
    grad_weight: torch.Tensor | None
    grad_bias: torch.Tensor | None
    headroom: torch.Tensor | None

    @property
    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        """Those of hidden, weight and bias, and what to multiply them by."""
        return self[2:]


def weighted_forward(job: LinearJob, plan: Plan) -> Weighted:
    """The loss, (nll, row_max, log_sum, correct), and the gradients that the plan needs."""
    assert job.weights is not None
    with _no_autocast(job):
        headroom = None
        scale: torch.Tensor | None = None
        if any(plan.needs):
            scale, headroom = _fp16_headroom(job.weights, plan.dtype)
        chunks = _Chunks(job, plan, plan.needs)
        nll, row_max, log_sum, correct = chunks.run(scale)
        nll = rounded(nll, plan)
        grads = chunks.gradients(wide=headroom is not None)
        return Weighted(weighted_sum(nll, job.weights, plan), (nll, row_max, log_sum, correct), *grads, headroom)


def token_forward(job: LinearJob, plan: Plan) -> tuple[Rows, torch.Tensor | None]:
    """(nll, row_max, log_sum, correct); with a frozen head also the gradient of hidden for upstream gradients of 1."""
    with _no_autocast(job):
        frozen = plan.needs.frozen
        chunks = _Chunks(job, plan, plan.needs if frozen else NO_GRADIENTS)
        ones = torch.ones(job.targets.shape, dtype=plan.acc, device=job.targets.device) if frozen else None
        return chunks.run(ones), chunks.gradients()[0]


def scale_rows(unit_grad: torch.Tensor, grad_nll: torch.Tensor) -> torch.Tensor:
    """Rows times their upstream gradient; a row with an upstream gradient of 0 gets zeros whatever it holds."""
    factor = grad_nll.reshape(-1, 1)
    return torch.where(factor != 0, unit_grad * factor, 0.0).to(unit_grad.dtype)


def token_backward(
    job: LinearJob, plan: Plan, stats: tuple[torch.Tensor, torch.Tensor], grad_nll: torch.Tensor
) -> Gradients:
    """The logits made again chunk by chunk, and the gradients from the rows' saved (row_max, log_sum)."""
    with _no_autocast(job):
        scale = grad_nll.reshape(-1).to(plan.acc).contiguous()
        chunks = _Chunks(job, plan, plan.needs)
        for chunk, h, y, logits in chunks:
            s, row_max, log_sum = (chunks.rows.take(t, chunk) for t in (scale, *stats))
            chunks.primitives.row_grad(logits[None], y, s, row_max, log_sum, logits[None])
            chunks.add_gradients(chunk, h, y, logits, s)
        return chunks.gradients()


def _no_autocast(job: LinearJob) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(job.hidden.device.type, enabled=False)


class _Chunks:
    """The chunks of a job, and the gradients that gather while they pass."""

    def __init__(self, job: LinearJob, plan: Plan, needs: Needs) -> None:
        self.job, self.plan, self.needs = job, plan, needs
        self.weight = job.weight.to(plan.dtype)
        self.bias = None if job.bias is None else job.bias.to(plan.dtype)
        self.rows = ActiveRows(job.targets, plan.num_active)
        self.primitives = plan.primitives()
        (V, D), device = job.weight.shape, job.hidden.device
        size = plan.chunk_size or choose_chunk(self.rows.count, V, D, plan, multiprocessors(device))
        self.size = max(1, min(size, self.rows.count))
        self.logits = torch.empty(self.size if self.rows.count else 0, V, dtype=plan.dtype, device=device)
        self.grad_hidden = self.rows.empty(D, dtype=job.hidden.dtype, device=device) if needs.hidden else None
        self.grad_weight: torch.Tensor | None = None
        self.grad_bias = torch.zeros(V, dtype=plan.acc, device=device) if needs.bias else None

    def __iter__(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Chunks as (slice, hidden rows, targets, logits): the product that makes the logits happens here."""
        for start in range(0, self.rows.count, self.size):
            chunk = slice(start, min(start + self.size, self.rows.count))
            h = self.rows.take(self.job.hidden, chunk).to(self.plan.dtype)
            logits = self.logits[: h.shape[0]]
            if self.bias is None:
                torch.mm(h, self.weight.t(), out=logits)
            else:
                torch.addmm(self.bias, h, self.weight.t(), out=logits)
            yield chunk, h, self.rows.take_targets(chunk), logits

    def run(self, scale: torch.Tensor | None) -> Rows:
        """One pass over all chunks: (nll, row_max, log_sum, correct), and the gradients for ``scale [N]`` where needed.

        ``scale=None`` makes none: only the first product and the reduction run.
        """
        rows, acc, flags = self.rows, self.plan.acc, {"with_correct": self.plan.with_correct}
        outputs = [rows.empty(dtype=dtype, device=self.logits.device) for dtype in (acc, acc, acc, torch.bool)]
        for chunk, h, y, logits in self:
            if scale is None:
                stats = self.primitives.row_stats(logits[None], y, **flags)
            else:
                s = rows.take(scale, chunk)
                stats = self.primitives.row_nll_grad_(logits, y, s, **flags)
                self.add_gradients(chunk, h, y, logits, s)
            nll, row_max, log_sum, _, correct = stats
            for out, part in zip(outputs, (nll, row_max, log_sum, correct), strict=True):
                if part is not None:
                    rows.put(out, chunk, part)
        if rows.overflow is not None:
            outputs[0].masked_fill_(rows.overflow, float("nan"))
        nll, row_max, log_sum, correct = (rows.whole(out) for out in outputs)
        return nll, row_max, log_sum, correct

    def add_gradients(
        self, chunk: slice, h: torch.Tensor, y: torch.Tensor, grad_logits: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """The products with the gradient that now stands where the logits were."""
        if self.grad_hidden is not None:
            self.rows.put(self.grad_hidden, chunk, torch.mm(grad_logits, self.weight))
        if self.needs.weight:
            # Rows without a gradient as zeros: a NaN there, times 0, would reach all of grad_weight.
            idle = ((scale == 0) | (y == SKIP)).unsqueeze(1)
            self._add_grad_weight(h.masked_fill(idle, 0), grad_logits)
        if self.grad_bias is not None:
            _add_column_sums(self.grad_bias, grad_logits)

    def _add_grad_weight(self, h: torch.Tensor, grad_logits: torch.Tensor) -> None:
        """grad_weight += grad_logits^T h, in float32 whatever the dtype; a single chunk is rounded by its product.

        But for float16, whose gradient is not yet scaled down (``_fp16_headroom``) and might not fit.
        """
        a, acc = grad_logits.t(), self.plan.acc
        single = self.size >= self.rows.count and a.dtype == self.job.weight.dtype and a.dtype != torch.float16
        if a.dtype == acc or single:
            self.grad_weight = torch.mm(a, h) if self.grad_weight is None else self.grad_weight.addmm_(a, h)
            return
        if self.grad_weight is None:
            self.grad_weight = torch.zeros(a.shape[0], h.shape[1], dtype=acc, device=h.device)
        if not a.is_cuda:
            _add_product_by_slabs(self.grad_weight, a, h)
        elif torch.version.hip is None:
            torch.addmm(self.grad_weight, a, h, out_dtype=acc, out=self.grad_weight)
        else:  # rocBLAS has no product of low-precision matrices into a float32 one through torch
            self.grad_weight += torch.mm(a, h)

    def gradients(self, *, wide: bool = False) -> Gradients:
        """The gradients in the dtypes of the inputs; with ``wide`` those of the head in the dtype of the sums."""
        weight, bias, acc = self.job.weight, self.job.bias, self.plan.acc
        grad_weight = self.grad_weight
        if self.needs.weight and grad_weight is None:
            grad_weight = torch.zeros(weight.shape, dtype=acc, device=weight.device)
        return (
            None if self.grad_hidden is None else self.rows.whole(self.grad_hidden),
            None if grad_weight is None else grad_weight.to(acc if wide else weight.dtype),
            None if self.grad_bias is None or bias is None else self.grad_bias.to(acc if wide else bias.dtype),
        )


def _add_product_by_slabs(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Out += a b in the dtype of out, widening ``a`` a slab at a time: no wide copy of a chunk of logits exists."""
    wide = b.to(out.dtype)
    for v in range(0, a.shape[0], SLAB):
        out[v : v + SLAB].addmm_(a[v : v + SLAB].to(out.dtype), wide)


def _add_column_sums(out: torch.Tensor, a: torch.Tensor) -> None:
    """Out += column sums of ``a`` in the dtype of out; on CPU a widening sum copies its operand, hence slabs."""
    slab = max(a.shape[1], 1) if a.is_cuda or a.dtype == out.dtype else SLAB  # a rank may hold no columns
    for v in range(0, a.shape[1], slab):
        out[v : v + slab] += a[:, v : v + slab].sum(0, dtype=out.dtype)


def _fp16_headroom(scale: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """For float16, row weights divided by the largest of them, and that: w / N times a probability would underflow."""
    if dtype != torch.float16:
        return scale, None
    if scale.numel() == 0:
        return scale, scale.new_ones(())
    largest = scale.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    return scale / largest, largest
