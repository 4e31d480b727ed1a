"""Deferred negative log-likelihoods of rows: their weighted sum is one op, which skips rows of weight 0.

The NLL of rows, times or divided by constants, is recorded as row weights. A sum or mean over all rows is then
``weighted_linear_nll``, which computes its gradients in the forward pass. Any other use computes the NLL of each row by
``linear_token_nll``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dllm_kernels import ops
from dllm_kernels._utils._dtypes import accum_dtype
from dllm_kernels._utils._own_graph import own_graph
from dllm_kernels._utils._plain import readable_without_sync
from dllm_kernels.fused._moves import Call, Move
from dllm_kernels.fused._object import TorchObject, arguments

Tensor = torch.Tensor
NO_INDEX = -(2**31)  # ignore_index of log-probabilities, for which no id is ignored


@dataclass(repr=False, eq=False)
class DeferredNLL(TorchObject):
    """Weighted NLL of rows, ``factor * weights * nll``.

    Logits, target and weights are as they were when they were given: copies, because the caller may write into them.

    Attributes:
        logits: deferred logits with the classes as the last dimension.
        target: integers, one per row.
        ignore_index: target with NLL 0.
        weights: constants, one per row, in the dtype of the sum, or None.
        factor: a number.
        dtype: dtype of the values.
        made: the NLL of which these are rows, and the operation on its values; None if they are all rows.
    """

    logits: Any
    target: Tensor
    ignore_index: int
    weights: Tensor | None
    factor: float
    dtype: torch.dtype
    made: tuple[DeferredNLL, Callable[[Tensor], Tensor]] | None = None
    _values: Tensor | None = None
    _moved: weakref.WeakSet[DeferredNLL] = field(default_factory=weakref.WeakSet)

    @classmethod
    def of(cls, logits: Any, target: Tensor, ignore_index: int, dtype: torch.dtype, factor: float = 1.0) -> DeferredNLL:
        """Return the NLL of logits with the classes in any dimension."""
        axis = logits.axis
        logits = logits.moved(Move(lambda t: t.movedim(axis, -1), -1), lambda z: z.movedim(axis, -1))
        return cls(logits, target.detach().clone(), ignore_index, None, factor, dtype)

    def changed(self, **changes: Any) -> DeferredNLL:
        """Return a copy with changed attributes, without a graph under ``torch.no_grad``."""
        if not torch.is_grad_enabled():
            changes.setdefault("logits", self.logits.moved(Move(lambda t: t, -1), lambda z: z))
        return replace(self, **{"made": None, "_values": None, "_moved": weakref.WeakSet(), **changes})

    @property
    def shape(self) -> torch.Size:
        """Shape of the rows."""
        return self.target.shape

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.target.device

    @property
    def requires_grad(self) -> bool:
        """True if the values are part of an autograd graph."""
        return bool(self.logits.requires_grad)

    @property
    def deferred(self) -> bool:
        """True if the values have not been computed."""
        return self._values is None

    def materialize(self, use: str = "materialize") -> Tensor:
        """Return the values of the rows, differentiable with any gradient per row."""
        if self._values is None:
            with self.logits.state.restored(self.logits.hidden), own_graph():
                self._values = self.values()
        return self._values

    def before_in_place(self, use: str) -> Tensor:
        """Compute all rows before a change in place, and every selection of them from these, which may share memory."""
        first = self
        while first.made is not None:
            first = first.made[0]
        first._share(use)
        return self.materialize(use)

    def _share(self, use: str) -> None:
        values = self.materialize(use)
        for other in list(self._moved):
            if other._values is not None:
                raise RuntimeError(
                    "the NLL of rows must not be modified in place after rows of it were used, got "
                    f"{use}; modify a copy"
                )
            assert other.made is not None
            with torch.set_grad_enabled(self.logits.state.grad):
                other._values = other.made[1](values)
            other._share(use)
        self._moved.clear()  # from here on, torch knows what shares memory

    def values(self) -> Tensor:
        """Compute the values of the rows under the current autograd state."""
        active = None if self.weights is None else self.weights != 0
        nll = ops.linear_token_nll(**self._arguments(), active=active).nll.to(self.dtype)
        nll = nll if self.factor == 1 else nll * self.factor
        return nll if self.weights is None else (nll * self.weights).to(self.dtype)

    def reduced(self, count: Tensor | int | None = None) -> Tensor:
        """Return the sum over all rows, or their sum over a count."""
        dtype = accum_dtype(self.logits.hidden.dtype)
        weights = torch.full((), self.factor, dtype=dtype, device=self.device)
        weights = weights if self.weights is None else weights * self.weights.to(dtype)
        known = isinstance(count, int)
        if count is not None:
            weights = weights / (max(count, 1) if isinstance(count, int) else count.clamp(min=1))
        with self.logits.restored():
            given = self._arguments()
            loss = ops.weighted_linear_nll(**given, weights=weights.expand(self.shape)).loss
        if count is not None and not (known and count):
            loss = torch.where(torch.as_tensor(count, device=self.device) > 0, loss, torch.nan)  # 0 / 0
        return loss.to(self.dtype)

    def _arguments(self) -> dict[str, Any]:
        hidden, weight, bias, extra, softcap, scale = self.logits.rows()
        return {
            "hidden": hidden, "weight": weight, "targets": self.target, "bias": bias, "extra": extra,
            "ignore_index": self.ignore_index, "softcap": softcap, "scale": scale,
            "logits_dtype": self.logits.logits_dtype,
            "check_targets": readable_without_sync(self.target) or None,  # as torch checks them
        }  # fmt: skip

    def weighted(self, weights: Tensor, dtype: torch.dtype) -> DeferredNLL:
        """Return the NLL with further weights, in a dtype."""
        kept = accum_dtype(self.logits.hidden.dtype)
        weights = weights.to(self.device, torch.promote_types(kept, weights.dtype), copy=self.weights is None)
        weights = weights if self.weights is None else self.weights * weights
        return self.changed(weights=weights.expand(self.shape), dtype=dtype)

    def moved(self, of_rows: Callable[[Tensor], Tensor], of_matrix: Callable[[Tensor], Tensor]) -> DeferredNLL:
        """Apply a move of rows, given for one value per row and for a vector per row."""
        logits = self.logits.moved(Move(of_matrix, -1), of_matrix)
        weights = None if self.weights is None else of_rows(self.weights)
        made = self.changed(logits=logits, target=of_rows(self.target), weights=weights, made=(self, of_rows))
        self._moved.add(made)
        return made

    def unsqueezed(self, dim: int) -> DeferredNLL:
        """Return the NLL with a new dimension at ``dim``, not negative."""
        return self.moved(lambda t: t.unsqueeze(dim), lambda t: t.unsqueeze(dim))


# Methods that make a tensor of the dtype and on the device of another.
NEW = "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"
RULES: dict[str, Callable[[DeferredNLL, Call], Any]] = {}
DeferredNLL.rules = RULES


Rule = Callable[[Any, Call], Any]


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


@rule(*NEW)
def new_tensor(x: Any, call: Call) -> Tensor:
    """Make a new tensor, which takes only dtype and device of the deferred one."""
    return call.on(torch.empty(0, dtype=x.dtype, device=x.device))  # type: ignore[no-any-return]


@rule("mul", "div")
def _weighted(x: DeferredNLL, call: Call) -> Any:
    divides = call.function.__name__ not in ("mul", "__mul__", "__rmul__", "multiply")
    if len(call.args) != 1 or call.kwargs:
        return NotImplemented
    (other,) = call.args
    if isinstance(other, int | float):
        if not math.isfinite(other) or (divides and other == 0):
            return NotImplemented
        return x.changed(factor=x.factor / other if divides else x.factor * other)
    if not isinstance(other, Tensor) or (other.requires_grad and torch.is_grad_enabled()) or other.is_complex():
        return NotImplemented
    if other.dim() > x.ndim or torch.broadcast_shapes(other.shape, x.shape) != x.shape:  # type: ignore[no-untyped-call]
        return NotImplemented
    dtype = torch.result_type(torch.empty(x.shape, dtype=x.dtype, device="meta"), other)
    other = other.detach()
    if divides:  # in the dtype of the sum: 1 / p overflows float16
        other = 1 / other.to(torch.promote_types(accum_dtype(x.logits.hidden.dtype), other.dtype))
    return x.weighted(other, dtype)


@rule("neg")
def _negative(x: DeferredNLL, call: Call) -> Any:
    return x.changed(factor=-x.factor)


@rule("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel")
def _reshaped(x: DeferredNLL, call: Call) -> Any:
    out = call.on(torch.empty(x.shape, device="meta", dtype=torch.float32))
    if out.dtype != torch.float32:
        return NotImplemented
    shape = tuple(out.shape)
    return x.moved(lambda t: t.reshape(shape), lambda t: t.reshape(*shape, t.shape[-1]))


@rule("__getitem__")
def _indexed(x: DeferredNLL, call: Call) -> Any:
    index = call.args[0] if isinstance(call.args[0], tuple) else (call.args[0],)
    of_logits = (*index, slice(None))
    return x.moved(lambda t: t[index], lambda t: t[of_logits])


@rule("contiguous")
def _kept(x: DeferredNLL, call: Call) -> Any:
    return x


@rule("clone")
def _cloned(x: DeferredNLL, call: Call) -> Any:
    return x.changed()


@rule("float", "double", "to")
def _cast(x: DeferredNLL, call: Call) -> Any:
    dtype = {"float": torch.float32, "double": torch.float64}.get(call.function.__name__, x.dtype)
    for value in (*call.args, *call.kwargs.values()):
        if not isinstance(value, torch.dtype) or not value.is_floating_point:
            return NotImplemented
        dtype = value
    return x if dtype == x.dtype else x.changed(dtype=dtype)


@rule("detach")
def _detached(x: DeferredNLL, call: Call) -> Any:
    with torch.no_grad(), x.logits.restored():
        return x.values()


@rule("sum", "mean")
def _reduced(x: DeferredNLL, call: Call) -> Any:
    given = arguments(("dim", "keepdim", "dtype"), call.args, call.kwargs)
    dim, dtype = given.get("dim"), given.get("dtype")
    dims = range(x.ndim) if dim is None else sorted(d % x.ndim for d in ([dim] if isinstance(dim, int) else dim))
    if list(dims) != list(range(x.ndim)) or given.get("keepdim") or dtype is not None:
        return NotImplemented
    return x.reduced(x.target.numel() if call.function.__name__ == "mean" else None)


def dtype_after(function: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the result of a function that keeps the dtype of its input, unless autocast changes it."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return dtype
    return function(torch.zeros(1, 2, dtype=dtype, device=device)).dtype
