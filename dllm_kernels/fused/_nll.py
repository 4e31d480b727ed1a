"""Deferred negative log-likelihoods of rows: their weighted sum is one op, which skips rows of weight 0.

The NLL of rows, times or divided by constants, is recorded as row weights. A sum or mean over all rows is then
``weighted_linear_nll``, which computes its gradients in the forward pass. Any other use computes the NLL of each row by
``linear_token_nll``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dllm_kernels import ops
from dllm_kernels._utils._dtypes import accum_dtype
from dllm_kernels._utils._plain import readable_without_sync
from dllm_kernels.fused._graph import Recipe, Step
from dllm_kernels.fused._moves import Call
from dllm_kernels.fused._tensor import DeferredTensor, arguments, form_after

Tensor = torch.Tensor
NO_INDEX = -(2**31)  # ignore_index of log-probabilities, for which no id is ignored


class DeferredNLL(DeferredTensor):
    """Weighted NLL of rows, ``factor * row_weights * nll``.

    Parts: those of the logits, with the classes as the last dimension.

    Target and weights are as they were when they were given: copies, because the caller may write into them.

    Attributes:
        logits: a copy of the attributes of the logits that the rows are from.
        target: integers, one per row.
        ignore_index: target with NLL 0.
        row_weights: constants, one per row, in the dtype of the sum, or None.
        factor: a number.
    """

    logits: Any
    target: Tensor
    ignore_index: int
    row_weights: Tensor | None
    factor: float

    @classmethod
    def of(cls, logits: Any, target: Tensor, ignore_index: int, dtype: torch.dtype, factor: float = 1.0) -> Any:
        """Return the NLL of logits with the classes in any dimension."""
        return cls._of(
            logits.classes_last(), dtype, logits=logits.copied(), target=target.detach().clone(),
            ignore_index=ignore_index, row_weights=None, factor=factor,
        )  # fmt: skip

    @classmethod
    def _of(
        cls, parts: Any, dtype: torch.dtype, recipe: Any = None, form: Any = None, needs: Any = None, **kept: Any
    ) -> Any:
        logits, target = kept["logits"], kept["target"]
        if needs is None:
            needs = [n and t is not None and t.requires_grad for t, n in zip(parts, logits.needs, strict=True)]
        if form is None:
            form = torch.empty(target.shape, dtype=dtype, device="meta")
        recipe = recipe or Recipe(functools.partial(_values, dtype=dtype, **kept), logits.restored, needs)
        return cls.made(form, parts, recipe, needs=needs, **kept)

    def now(self) -> Tensor:
        """Return the NLL; without a graph, such as old log-probabilities, its values, because the head may change."""
        return self if self.requires_grad else self.materialize()

    def changed(self, dtype: torch.dtype | None = None, **changes: Any) -> Any:
        """Return the NLL of the same rows with other weights or dtype."""
        return self._of(self.tapped(), dtype or self.dtype, **{name: getattr(self, name) for name in KEPT} | changes)

    def after(self, sources: Sequence[Any], step: Callable[..., Tensor]) -> Any:
        """Return the NLL as another tensor."""
        kept = {name: getattr(self, name) for name in KEPT}
        recipe = Step(step, self.logits.restored, sources)
        return self._of(self.tapped(), self.dtype, recipe, step(self.form), self.needs, **kept)

    def reduced(self, count: Tensor | int | None = None) -> Tensor:
        """Return the sum over all rows, or their sum over a count."""
        dtype = accum_dtype(self.logits.hidden.dtype)
        weights = torch.full((), self.factor, dtype=dtype, device=self.device)
        weights = weights if self.row_weights is None else weights * self.row_weights.to(dtype)
        known = isinstance(count, int)
        if count is not None:
            weights = weights / (max(count, 1) if isinstance(count, int) else count.clamp(min=1))
        with self.logits.restored():
            given = _arguments(self.tapped(), self.logits, self.target, self.ignore_index)
            loss = ops.weighted_linear_nll(**given, weights=weights.expand(self.shape)).loss
        if count is not None and not (known and count):
            loss = torch.where(torch.as_tensor(count, device=self.device) > 0, loss, torch.nan)  # 0 / 0
        return loss.to(self.dtype)

    def weighted(self, weights: Tensor, dtype: torch.dtype) -> Any:
        """Return the NLL with further weights, in a dtype."""
        kept = accum_dtype(self.logits.hidden.dtype)
        weights = weights.to(self.device, torch.promote_types(kept, weights.dtype), copy=self.row_weights is None)
        weights = weights if self.row_weights is None else self.row_weights * weights
        return self.changed(row_weights=weights.expand(self.shape), dtype=dtype)

    def moved(self, of_rows: Callable[[Tensor], Tensor], of_matrix: Callable[[Tensor], Tensor]) -> Any:
        """Apply a move of rows, given for one value per row and for a vector per row."""
        h, u, *rest = self.tapped()
        weights = None if self.row_weights is None else of_rows(self.row_weights)
        kept = {name: getattr(self, name) for name in KEPT} | {"target": of_rows(self.target), "row_weights": weights}
        parts = of_matrix(h), None if u is None else of_matrix(u), *rest  # type: ignore[arg-type]
        form, is_view = form_after(of_rows, self) or (None, False)
        recipe = Step(of_rows, self.logits.restored, [self]) if is_view else None  # a copy needs its own rows only
        return self._of(parts, self.dtype, recipe, form if is_view else None, **kept)

    def unsqueezed(self, dim: int) -> Any:
        """Return the NLL with a new dimension at ``dim``, not negative."""
        return self.moved(lambda t: t.unsqueeze(dim), lambda t: t.unsqueeze(dim))


KEPT = "logits", "target", "ignore_index", "row_weights", "factor"


def _arguments(parts: Any, logits: Any, target: Tensor, ignore_index: int) -> dict[str, Any]:
    hidden, weight, bias, extra, softcap, scale = logits.rows_of(parts)
    return {
        "hidden": hidden, "weight": weight, "targets": target, "bias": bias, "extra": extra,
        "ignore_index": ignore_index, "softcap": softcap, "scale": scale, "logits_dtype": logits.logits_dtype,
        "check_targets": readable_without_sync(target) or None,  # as torch checks them
    }  # fmt: skip


def _values(
    parts: Any, logits: Any, target: Tensor, ignore_index: int, row_weights: Tensor | None, factor: float,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    active = None if row_weights is None else row_weights != 0
    nll = ops.linear_token_nll(**_arguments(parts, logits, target, ignore_index), active=active).nll.to(dtype)
    nll = nll if factor == 1 else nll * factor
    return nll if row_weights is None else (nll * row_weights).to(dtype)


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
    return x if x.is_contiguous() else x.changed()


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
