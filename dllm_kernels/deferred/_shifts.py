"""Rules of constants that are added to logits: one number, one number per row, or one per class; and the sigmoid.

A number per row changes values, but not the softmax. A number per class is added to the bias of the head.
``sigmoid(z)`` is ``(1 + tanh(z / 2)) / 2``: a soft cap, a factor and a number.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch

from dllm_kernels._checks import FLOAT_DTYPES
from dllm_kernels._graph._plain import any_dtensor, holds, is_dtensor, readable_without_sync
from dllm_kernels.deferred._logits import DeferredLogits, rule
from dllm_kernels.deferred._moves import Call
from dllm_kernels.deferred._pending import is_stat_of
from dllm_kernels.deferred._record import NO_SHIFT, ClassBias, Shift
from dllm_kernels.deferred._sums import combined
from dllm_kernels.deferred._tensor import DeferredTensor, arguments
from dllm_kernels.rows._dtypes import accum_dtype

Tensor = torch.Tensor
FARTHEST = 1000.0  # larger constants would round the logits of the plain loop


def _finite_constant(value: Any) -> bool:
    """Return True for a constant that keeps the digits of the logits. On a GPU this is a host sync for a tensor."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return abs(value) < FARTHEST
    constant = isinstance(value, Tensor) and not isinstance(value, DeferredTensor) and not is_dtensor(value)
    if (
        not constant
        or value.is_complex()
        or value.dtype == torch.bool
        or (value.requires_grad and torch.is_grad_enabled())
    ):
        return False
    return holds((value.detach().abs() < FARTHEST).all())


def _changes(x: DeferredLogits, value: Any, sign: int) -> dict[str, Any] | None:
    """Return the changes of logits to which a value is added (sign 1) or from which it is subtracted; or None."""
    if x.log_probs or x.overwritten is not None or not x.fusible:
        return None
    if sign < 0 and is_stat_of(value, x, "max"):
        return {"shift": Shift(best=True, constant=not value.needs_grad)}
    if not _finite_constant(value):
        return None
    if not isinstance(value, Tensor):
        return {"shift": x.shift._replace(number=x.shift.number + sign * Fraction(value))}
    sizes = [1] * (x.ndim - value.dim()) + list(value.shape)
    if value.dim() > x.ndim or any(n not in (1, m) for n, m in zip(sizes, x.shape, strict=True)):
        return None
    value = value.detach().to(x.device, accum_dtype(x.hidden.dtype)).reshape(sizes) * sign
    if sizes[x.axis] == 1:
        rows = [1 if i == x.axis else n for i, n in enumerate(x.shape)]
        value = value.expand(rows)
        return {"shift": x.shift._replace(rows=value if x.shift.rows is None else x.shift.rows + value)}
    if value.numel() != x.shape[x.axis] or x.shift.best or x.skip_finite:
        return None
    bias = _added_bias(x, value.flatten())
    return None if bias is NotImplemented else {"class_bias": bias}


def _terms(x: DeferredLogits, call: Call) -> tuple[Any, int]:
    """Return what is added to or subtracted from the logits by a call, and the sign; None for anything else."""
    names = ("input", "other", "alpha")
    whole = len(call.args) + len(call.kwargs) > 1 and call.function.__name__.strip("_") in ("add", "sub", "subtract")
    args = arguments(names if whole else names[1:], call.args, call.kwargs)
    name = call.function.__name__
    alpha = args.pop("alpha", 1)
    others = [value for value in args.values() if value is not x]
    sign = -1 if "sub" in name else 1
    reversed_ = "rsub" in name or ("sub" in name and args.get("other") is x)
    # torch refuses True; with a tensor it is add(z, alpha, other), which is deprecated
    unit = not isinstance(alpha, Tensor | bool) and alpha == 1
    return (others[0], sign) if len(others) == 1 and not reversed_ and unit else (None, 0)


def _added(x: DeferredLogits, call: Call) -> Any:
    result = combined(x, call)
    value, sign = _terms(x, call) if result is NotImplemented else (None, 0)
    changes = _changes(x, value, sign) if sign else None
    if changes is None:
        return result
    dtype = torch.promote_types(x.dtype, value.dtype) if isinstance(value, Tensor) and value.dim() else x.dtype
    return x.elementwise(_step(x, value, sign), dtype, **changes) if dtype in FLOAT_DTYPES else NotImplemented


def _step(x: DeferredLogits, value: Any, sign: int) -> Any:
    axis = x.axis
    if not is_stat_of(value, x, "max"):
        value = value.detach().clone() if isinstance(value, Tensor) else value
        return lambda z: z + sign * value
    constant = not value.needs_grad
    for each in (value, *value.sources):
        each.leave()

    def shifted(z: Tensor) -> Tensor:
        best = z.max(axis, keepdim=True).values
        return z - (best.detach() if constant else best)

    return shifted


def _added_in_place(x: DeferredLogits, call: Call) -> Any:
    value = call.args[0] if len(call.args) == 1 and not call.kwargs else None
    sign = -1 if "sub" in call.function.__name__ else 1
    changes = None if value is None else _changes(x, value, sign)
    if changes is None or (isinstance(value, Tensor) and torch.promote_types(x.dtype, value.dtype) != x.dtype):
        return NotImplemented
    return x.change(_step(x, value, sign), **changes)


rule("add", "sub", "subtract")(_added)
rule("add_", "sub_", "subtract_", "__iadd__", "__isub__")(_added_in_place)


@rule("tanh")
def _capped(x: DeferredLogits, call: Call) -> Any:
    """``tanh(s z)`` is ``s c tanh(z / c)`` for the cap ``c = 1 / s``."""
    bias = NotImplemented if call.args or call.kwargs else _bias_before_cap(x)
    return bias if bias is NotImplemented else x.elementwise(call.on, cap=1 / x.scale, class_bias=bias, shift=NO_SHIFT)


def _bias_before_cap(x: DeferredLogits) -> Any:
    """Return the bias of logits that get a soft cap, which a number that is added to them is a part of."""
    bias = x.class_bias
    if x.cap is not None or x.log_probs or x.skip is not None or x.fills_classes:
        return NotImplemented
    if x.shift.rows is not None or x.shift.best:
        return NotImplemented
    return _added_bias(x, torch.full((), float(x.shift.number), device="cpu")) if x.shift.number else bias


def _added_bias(x: DeferredLogits, constants: Tensor) -> Any:
    """Return the bias after constants ``[V]`` or ``[]`` were added to the logits; NotImplemented if not as exact."""
    if x.cap is not None or any_dtensor(*x.parts):
        return NotImplemented
    operands = x.rows()
    dtype = operands.compute_dtype or operands.hidden.dtype
    values = constants.to(x.device, accum_dtype(x.hidden.dtype)) / float(x.scale)
    values = values.expand(x.shape[x.axis])
    if dtype != accum_dtype(dtype):
        exact = readable_without_sync(values) and bool((values.to(dtype) == values).all())
        if operands.bias is not None or not exact:
            return NotImplemented
    before = x.class_bias
    return ClassBias(values) if before is None else ClassBias(before.values + values, before.filled, before.infinite)


@rule("sigmoid", "special_expit")
def _sigmoid(x: DeferredLogits, call: Call) -> Any:
    bias = NotImplemented if call.args or call.kwargs else _bias_before_cap(x)
    if bias is NotImplemented:
        return NotImplemented
    half = Shift(Fraction(1, 2))
    return x.elementwise(call.on, cap=2 / x.scale, scale=x.scale / 4, shift=half, class_bias=bias)
