"""Expressions: functions of rows of logits and constants, evaluated for a chunk of rows at a time.

The value of a row is a number, such as a divergence to a teacher. :func:`row_values` computes it for each row, and
:func:`weighted_rows` its weighted sum. Each chunk repeats the operations of the caller's loop on its rows, in a graph
of its own. The gradients of hidden states and head are computed in the forward pass if the upstream gradient of each
row is known: for a sum, or with a frozen head. Otherwise backward computes the logits again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from dllm_kernels import _checks
from dllm_kernels._graph._own_graph import own_graph
from dllm_kernels._graph._plain import readable_without_sync
from dllm_kernels.rows._call import Call, checked, flat_index, flat_values, row_marks
from dllm_kernels.rows._chunks import NO_FACTORS, Chunks, float16_scaling, no_autocast
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._fused import Fused, first_order, link_to, outputs
from dllm_kernels.rows._interface import IGNORE
from dllm_kernels.rows._kept_gradients import keep_gradients, scale_gradients
from dllm_kernels.rows._logits import Head, LinearLogits, flat_rows
from dllm_kernels.rows._options import Options
from dllm_kernels.rows._setup import NO_GRADIENTS, Gradients, Setup, stored
from dllm_kernels.rows._transform import NO_TRANSFORM, Transform

Tensor = torch.Tensor
NAMES = _checks.Names()
# Has a second derivative, and can be differentiated more than once.
LOGITS = "the loss of logits.materialize()"
BUFFERS = 4  # of the size of a chunk of logits, for the operations of an expression
# Size of a chunk on a CPU: malloc reuses the memory of tensors up to 32 MiB, and maps new pages for larger ones.
CPU_CHUNK_BYTES = 16 << 20


class Chunk:
    """Rows for which expressions are evaluated, and the values known so far.

    Attributes:
        key: key of the product that is given.
        product: product of hidden states and head ``[n, V]``: logits before their transform.
        rows: int64 ``[n]``, flat index of the rows.
        values: values of the expressions and logits that were evaluated.
    """

    def __init__(self, key: Any, product: Tensor, rows: Tensor) -> None:
        self.key, self.product, self.rows = key, product, rows
        self.values: dict[Any, Tensor] = {}


@dataclass(frozen=True, eq=False)
class Constant:
    """A constant that was an operand.

    Attributes:
        tensor: ``[..., k]`` with the shape of the rows; or ``[k]`` or 0-d, for all rows.
        version: version of the tensor when it was used.
        index: flat index of the rows ``[...]`` that are used, or None.
    """

    tensor: Tensor
    version: int
    index: Tensor | None = None

    @classmethod
    def of(cls, t: Tensor, rows: torch.Size) -> Constant:
        """Return the constant; a small one is a copy, because the caller may write into the original."""
        t = t.detach()
        small = t.shape[-1:].numel() == t.numel()
        t = t.reshape(t.shape[-1:]) if small and t.shape[:-1] != rows else t  # some losses do not broadcast
        with torch.inference_mode(False):  # the copy has a version
            t = t.clone() if small or t.shape[-1] == 1 else t
        return cls(t if t.dim() <= 1 else t.expand(*rows, t.shape[-1]), t._version)

    def whole(self) -> Tensor:
        """Return the tensor of all rows.

        Raises:
            RuntimeError: it was modified.
        """
        if self.tensor._version != self.version:
            raise RuntimeError(
                "operands of deferred logits must not be modified before the loss is computed, got a modified tensor "
                f"of shape {tuple(self.tensor.shape)}; modify a copy"
            )
        return self.tensor

    def at(self, chunk: Chunk) -> Tensor:
        """Return the constant for the rows of a chunk."""
        t = self.whole()
        return t if t.dim() <= 1 else _rows_at(t, self.index, chunk.rows)


@dataclass(frozen=True, eq=False)
class Leaf:
    """Deferred logits, or their log-probabilities.

    Attributes:
        logits: a copy of their attributes, with the classes last.
        dtype: their dtype.
        key: equal for logits of the same rows, whatever their transform.
        needs_grad: True if gradients pass through them.
        index: see :class:`Constant`.
    """

    logits: Any
    dtype: torch.dtype
    key: Any
    needs_grad: bool
    index: Tensor | None = None

    def at(self, chunk: Chunk) -> Tensor:
        """Return the logits of the rows of a chunk."""
        product = self.key, None if self.index is None else id(self.index)
        if product not in chunk.values:
            chunk.values[product] = chunk.product if self.key == chunk.key else self._product(chunk.rows)
        key = *product, *self.logits.transform_key
        if key not in chunk.values:
            transform = Transform(self.logits.softcap, self.logits.factor, self.logits.skip)
            bias, z = self.logits.class_bias, transformed(chunk.values[product], transform)
            # A class that was set has no gradient.
            chunk.values[key] = z if bias is None or bias.filled is None else z.masked_fill(bias.filled, -torch.inf)
        z = chunk.values[key]
        z = z if self.needs_grad else z.detach()
        if self.logits.of_probs is not None:  # its rounding is not that of log_softmax, and cancels in p log p
            return z.softmax(-1).to(self.logits.of_probs).log().to(self.dtype)
        return z.log_softmax(-1, dtype=self.dtype) if self.logits.log_probs else z.to(self.dtype)

    @torch.no_grad()
    def _product(self, rows: Tensor) -> Tensor:
        """Compute logits of another head call before their transform, without a graph."""
        logits = self.logits
        h, u, *parameters = logits.filled_parts(logits.parts)
        h, u = (None if t is None else _rows_at(t, self.index, rows) for t in (h, u))
        return stored(logits.rows_of((h, u, *parameters)))


@dataclass(frozen=True, eq=False)
class Operation:
    """A function of other expressions.

    Attributes:
        function: function of tensors whose last dimension is that of the classes.
        inputs: expressions of its arguments.
        needs_grad: True if gradients pass through it.
    """

    function: Callable[..., Tensor]
    inputs: tuple[Any, ...]
    needs_grad: bool

    def at(self, chunk: Chunk) -> Tensor:
        """Return the value for the rows of a chunk."""
        if id(self) not in chunk.values:
            inputs = [each.at(chunk) for each in self.inputs]
            with torch.set_grad_enabled(self.needs_grad and torch.is_grad_enabled()):
                chunk.values[id(self)] = self.function(*inputs)
        return chunk.values[id(self)]


Expression = Constant | Leaf | Operation


def moved(expression: Any, move: Callable[[Tensor], Tensor], rows: torch.Size, keys: tuple[Any, Any], memo: Any) -> Any:
    """Return the expression for moved rows; ``keys`` are those of the logits before and after."""
    if id(expression) not in memo:
        if isinstance(expression, Operation):
            inputs = tuple(moved(each, move, rows, keys, memo) for each in expression.inputs)
            result: Any = replace(expression, inputs=inputs)
        elif isinstance(expression, Leaf) and expression.key == keys[0]:
            result = replace(expression, key=keys[1])
        elif isinstance(expression, Constant) and expression.tensor.dim() <= 1:
            result = expression
        else:
            index = expression.index
            if index is None:
                tensor = expression.tensor if isinstance(expression, Constant) else expression.logits.hidden
                index = row_numbers(rows, tensor.device)
            result = replace(expression, index=move(index.unsqueeze(-1)).squeeze(-1))
        memo[id(expression)] = result
    return memo[id(expression)]


def row_numbers(rows: torch.Size, device: torch.device) -> Tensor:
    """Return the flat index of each row."""
    return torch.arange(rows.numel(), device=device).view(rows)


def _rows_at(t: Tensor, index: Tensor | None, rows: Tensor) -> Tensor:
    """Return rows ``[n, k]`` of ``t [..., k]``; a view if they are consecutive on a CPU."""
    rows = rows if index is None else index.reshape(-1)[rows]
    try:
        flat = t.view(-1, t.shape[-1])
    except RuntimeError:  # not a view, and a copy would be as large as all logits
        return t[torch.unravel_index(rows, t.shape[:-1])]
    if readable_without_sync(rows) and len(rows):
        first = int(rows[0])
        if torch.equal(rows, torch.arange(first, first + len(rows), device=rows.device)):
            return flat[first : first + len(rows)]
    return flat[rows]


def transformed(z: Tensor, transform: Transform) -> Tensor:
    """Transform logits, in a graph."""
    cap, scale, skip = transform
    z = z if cap is None and scale is None else z.to(accum_dtype(z.dtype))
    z = z if cap is None else (z / cap).tanh() * cap
    z = z if scale is None else z * scale
    if skip is None:
        return z
    return z.masked_fill(torch.arange(z.shape[-1], device=z.device) == skip, -torch.inf)


class RowFunction(NamedTuple):
    """The value of each row.

    Attributes:
        expression: the value ``[n]``.
        key: key of the logits whose hidden states the function is called with.
    """

    expression: Operation
    key: Any

    def __call__(self, product: Tensor, rows: Tensor) -> Tensor:
        """Return the values of some rows, from their logits before the transform."""
        return self.expression.at(Chunk(self.key, product, rows))


class WeightedRows(NamedTuple):
    """Weighted sum of the values of rows, 0-d, and the values ``[...]``."""

    loss: Tensor
    nll: Tensor


def row_values(record: LinearLogits, function: RowFunction, rows: Tensor, active: Tensor | None) -> Tensor:
    """Compute the value of each row that is active; 0 for others."""
    call = _checked(record, rows)
    loss, _ = _computed(call, function, rows, row_marks(active), None)
    return loss.view(rows.shape)


def weighted_rows(record: LinearLogits, function: RowFunction, rows: Tensor, weights: Tensor) -> WeightedRows:
    """Compute the weighted sum of the values; rows of weight 0 are not read."""
    call = _checked(record, rows)
    weights = flat_values(weights, accum_dtype(record.hidden.dtype))
    loss, values = _computed(call, function, rows, row_marks(weights), weights)
    return WeightedRows(loss, values.view(rows.shape))


def _checked(record: LinearLogits, rows: Tensor) -> Call:
    if record.hidden.is_cpu:
        fitting = CPU_CHUNK_BYTES // (len(record.weight) * accum_dtype(record.hidden.dtype).itemsize)
        record = record.in_chunks_of(min(max(fitting // 64 * 64, 64), 512))
    return checked(NAMES, record, rows, Options(NO_TRANSFORM, IGNORE, False, "auto"))


def _computed(call: Call, function: RowFunction, rows: Tensor, marks: Any, weights: Any) -> tuple[Tensor, Tensor]:
    setup = Setup.of(call.logits, call.options)
    assert call.head is not None
    run = _RowLoss.under(setup)
    loss, values, *_ = run(flat_rows(call.x), function, flat_index(rows), marks, weights, setup, *call.head.flat)
    return loss, values


class _RowLoss(Fused):
    """Weighted sum of the values of rows, or each value if there are no weights."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, function: RowFunction, rows: Tensor, marks: Tensor | None, weights: Tensor | None,
        setup: Setup, *head: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        parts, summed = Head(*head), weights is not None  # type: ignore[arg-type]
        ctx.computes = any(setup.needs) and (summed or setup.needs.frozen_head)
        scale = weights
        if ctx.computes and not summed:
            scale = torch.ones(rows.shape, dtype=setup.accum_dtype, device=hidden.device)
        values, *saved = _evaluated(
            hidden, parts, function, rows, marks, scale if ctx.computes else None, setup, summed
        )
        if ctx.computes:
            once = ("the sum of a function of deferred logits", LOGITS) if summed else None
            link = keep_gradients(ctx, hidden, parts, saved, setup, once)  # type: ignore[arg-type]
        else:
            link = link_to(hidden)
            ctx.setup, ctx.function = setup, function
            ctx.save_for_backward(hidden, *head, rows, link)
        loss = values if weights is None else torch.where(weights != 0, values * weights, 0.0).sum()
        return outputs(ctx, [loss], [values.detach().clone() if weights is None else values], link)

    @staticmethod
    @first_order(LOGITS)
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        if ctx.computes:
            grad_hidden, *grad_head = scale_gradients(ctx, grad)
        else:
            hidden, *head, rows, _link = ctx.saved_tensors
            scale = grad.to(ctx.setup.accum_dtype).contiguous()
            results = _evaluated(
                hidden, Head(*head), ctx.function, rows, row_marks(scale), scale, ctx.setup, True, gradients_only=True
            )
            grad_hidden, *grad_head = results[1]
        return grad_hidden, None, None, None, None, None, *grad_head


def _evaluated(
    hidden: Tensor, head: Head, function: RowFunction, rows: Tensor, marks: Tensor | None, scale: Tensor | None,
    setup: Setup, summed: bool, *, gradients_only: bool = False,
) -> tuple[Tensor, Gradients, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the values of N rows, the gradients for per-row factors ``scale``, loss scale and row sizes, or None."""
    needs = NO_GRADIENTS if scale is None else setup.needs
    with no_autocast(hidden):
        factors, loss_scale, row_size = NO_FACTORS, None, None
        if scale is not None:
            if marks is not None:
                scale = scale.masked_fill(marks == IGNORE, 0)
            row_size = None if gradients_only or (summed and not setup.needs_loss_scaling) else scale
            if summed:
                scale, factors, loss_scale = float16_scaling(scale, setup)
                factors = factors if gradients_only else factors._replace(hidden=None)  # applied in backward
        V = len(head.weight)
        chunks = Chunks(hidden, head, marks, setup, needs, factors, others=[(V, setup.chunk_dtype)] * BUFFERS)
        values = chunks.rows.empty(dtype=setup.accum_dtype, device=hidden.device)
        for chunk, h, y, z in chunks:
            index, needs_grad = chunks.rows.take(rows, chunk), any(needs)
            with torch.inference_mode(False), torch.set_grad_enabled(needs_grad), own_graph():
                z = z.detach().requires_grad_(needs_grad)
                value = function(z, index)
            if scale is not None:
                s = chunks.rows.take(scale, chunk)
                (grad,) = torch.autograd.grad(value, z, s.to(value.dtype), allow_unused=True)
                chunks.add_gradients(chunk, h, y, torch.zeros_like(z) if grad is None else grad, s)
            chunks.rows.put(values, chunk, value.detach())
        if gradients_only:
            return values, chunks.gradients(loss_scale), None, None
        return values, chunks.gradients(wide=loss_scale is not None), loss_scale, row_size
