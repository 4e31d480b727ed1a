"""Terms: functions of deferred logits and constants that keep the dimension of the classes.

Operations on each element and over the classes are recorded as an expression. A reduction over the classes gives the
value of each row, a :class:`DeferredNLL` of this function: its weights, masks and sums are those of the NLL. Other
logits, such as a teacher's, may occur in the expression if they require no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree

from dllm_kernels._graph._call_state import CallState
from dllm_kernels._graph._plain import any_dtensor, autocasts, holds
from dllm_kernels.deferred._expressions import Constant, Leaf, Operation, RowFunction
from dllm_kernels.deferred._graph import Step
from dllm_kernels.deferred._logits import DeferredLogits
from dllm_kernels.deferred._nll import DeferredNLL
from dllm_kernels.deferred._tensor import DeferredTensor

Tensor = torch.Tensor


class Term(DeferredTensor):
    """A function of deferred logits in the shape of the logits, or with another size in the place of the classes.

    Attributes:
        logits: the logits whose gradient passes through this tensor.
        operation: what the report names as the operation that needs the logits.
        expression: the function; None if the classes are not the last dimension.
        kind: the softmax, the log-softmax, or the product of the softmax and the log-softmax or the logits; None for
            other functions.
        factor: factor of ``kind``.
    """

    logits: DeferredLogits
    operation: str
    expression: Any
    kind: str | None
    factor: float

    @classmethod
    def of(
        cls, x: DeferredLogits, sources: Sequence[Any], step: Callable[..., Tensor], meta: Tensor, operation: str,
        kind: str | None = None, factor: float = 1.0, constants: Sequence[Constant] = (),
    ) -> Any:  # fmt: skip
        """Return ``step(*sources, *constants)``, which is like ``meta``."""
        x.check_unchanged()
        needs_grad = torch.is_grad_enabled() and any(s.needs_grad for s in sources) and meta.dtype.is_floating_point
        x = x.detach() if x.needs_grad and not needs_grad else x  # type: ignore[assignment]
        inputs = (*map(expression_of, sources), *constants)
        recipe = Step(lambda *values: step(*values, *(c.whole() for c in constants)), x.restored, sources)
        through = [source for source in sources if source.needs_grad]
        expression = None if None in inputs else Operation(step, inputs, needs_grad)
        with torch.set_grad_enabled(needs_grad):
            parts = (through or [x])[0].tapped()
            return cls.create(
                meta, parts, recipe, needs=x.needs, logits=x, operation=operation, kind=kind, factor=factor,
                expression=expression,
            )  # fmt: skip

    @property
    def noted(self) -> list[Any]:
        """Tensors without a graph that have entries of logits of the head call."""
        return self.logits.noted

    @property
    def values_key(self) -> Any:
        """Equal for terms with the same values; None if only a term itself has them."""
        return None if self.kind is None else (self.logits.values_key, self.kind, self.factor, self.dtype)

    def after(self, sources: Sequence[Any], step: Callable[..., Tensor]) -> Any:
        """Return a copy, which a Function or torch may give a graph later."""
        return self._like(step(self.meta), self.tapped(), Step(step, self.logits.restored, sources))

    def materialize(self, use: str = "materialize") -> Tensor:
        """Return the values; the report names the operation of the plain loop that computes them."""
        return super().materialize(self.operation)

    def detached(self, step: Callable[..., Tensor]) -> Any:
        """Return this tensor without a graph."""
        with torch.no_grad():
            return self.of(self.logits, [self], step, step(self.meta), self.operation, self.kind, self.factor)


def expression_of(x: Any) -> Any:
    """Return the expression of deferred logits or of a term, or None."""
    if isinstance(x, Term):
        expression = x.expression
        constant = expression is not None and expression.needs_grad and not x.needs_grad  # a copy without a graph
        return replace(expression, needs_grad=False) if constant else expression
    plain = x.fusible and x.axis == x.ndim - 1 and x.overwritten is None and not x.skip_finite
    if not plain or any_dtensor(*x.parts):
        return None
    bias, shift, needs_grad = x.class_bias, x.shift, x.needs_grad and torch.is_grad_enabled()
    if bias is not None and bias.filled is not None and not holds((bias.values.isinf() | ~bias.filled).all()):
        return None
    leaf = Leaf(x.copied(), x.dtype, x.product_key, needs_grad)
    if x.log_probs or not shift:
        return leaf
    rows = () if shift.rows is None else (Constant(shift.rows, shift.rows._version),)
    return Operation(shift._replace(rows=None).added_to, (leaf, *rows), needs_grad)


def logits_of(x: Any) -> DeferredLogits:
    """Return the logits whose gradient passes through deferred logits or a term."""
    return x.logits if isinstance(x, Term) else x


class _Slot:
    """Place of a tensor among the arguments of a recorded function."""


def recorded(
    function: Callable[..., Tensor], *values: Any, operation: str, reduces: bool = False, dtype: Any = None,
) -> Any:  # fmt: skip
    """Record ``function(*values)``, of deferred logits, terms, constant tensors and other values.

    Args:
        function: the function, whose dimension of the classes is the last one.
        values: arguments, also nested in lists and dicts.
        operation: name for the report, if that of no term among the values.
        reduces: True if the result has no dimension of the classes, so that it is the value of each row.
        dtype: dtype of the result; None: that of the function.

    Returns:
        A term or, with ``reduces``, a DeferredNLL; ``NotImplemented`` if the operation cannot be recorded.
    """
    flat, spec = _pytree.tree_flatten(list(values))
    sources = [v for v in flat if isinstance(v, DeferredTensor)]
    tensors = [v for v in flat if isinstance(v, Tensor) and not isinstance(v, DeferredTensor)]
    if not all(isinstance(v, Term | DeferredLogits) for v in sources):
        return NotImplemented
    through = [logits_of(v) for v in sources if v.needs_grad and torch.is_grad_enabled()]
    x = (through or [logits_of(sources[0])])[0]
    rows, device = x.shape[:-1], x.device
    if any(v.shape[:-1] != rows or v.device != device or expression_of(v) is None for v in sources):
        return NotImplemented
    if any(z.product_key != x.product_key for z in through) or not all(_is_constant(t, device) for t in tensors):
        return NotImplemented
    state, hidden = CallState.now(x.hidden), x.hidden
    slots = [_Slot() if isinstance(v, Tensor) else v for v in flat]
    are_sources, count = [isinstance(v, DeferredTensor) for v in flat if isinstance(v, Tensor)], len(sources)

    def step(*operands: Tensor) -> Tensor:
        found, constants = iter(operands[:count]), iter(operands[count:])
        ordered = iter([next(found) if is_source else next(constants) for is_source in are_sources])
        with state.restored(hidden):
            arguments = [next(ordered) if isinstance(v, _Slot) else v for v in slots]
            return function(*_pytree.tree_unflatten(arguments, spec))

    def imitated(make: Callable[[Tensor], Tensor]) -> Any:
        operands = [make(getattr(v, "meta", v)) for v in (*sources, *tensors)]
        try:
            result: Any = step(*operands)
        except Exception:  # the error is that of the operation itself
            return None
        return result if isinstance(result, Tensor) else None  # such as NotImplemented

    with torch.no_grad():
        meta = imitated(lambda t: torch.empty_like(t, device="meta"))
        shape = None if meta is None else tuple(meta.shape) if reduces else tuple(meta.shape[:-1])
        if shape != tuple(rows) or not (reduces or meta.dim()) or meta.is_complex():
            return NotImplemented
        if dtype is None and autocasts(x.hidden):
            small = imitated(lambda t: torch.zeros([min(n, 2) for n in t.shape], dtype=t.dtype, device=device))
            dtype = getattr(small, "dtype", None)
    meta = torch.empty_like(meta, dtype=dtype)
    constants = [Constant.of(t, rows) for t in tensors]
    if not reduces:
        name = next((v.operation for v in sources if isinstance(v, Term)), operation)
        return Term.of(x, sources, step, meta, name, constants=constants)
    needs_grad = bool(through)
    expression = Operation(step, (*map(expression_of, sources), *constants), needs_grad)
    with torch.set_grad_enabled(needs_grad):
        parts = next((v for v in sources if v.needs_grad), x).tapped()
    return DeferredNLL.of_function(x, parts, RowFunction(expression, x.product_key), meta.dtype).result()


def _is_constant(t: Tensor, device: torch.device) -> bool:
    """Return True for a tensor that may be an operand beside deferred logits."""
    graph = t.requires_grad and torch.is_grad_enabled()
    plain = type(t) in (Tensor, torch.nn.Parameter) and not t.is_inference() and not t.is_complex()
    return plain and not graph and (t.device == device or t.dim() == 0)
