"""Rules of sums of logits: of the logits of one head with numbers as coefficients, and over classes.

The head is linear, so that ``a W h + b W h'`` is ``W (a h + b h')``, and the sum over the classes is the product of the
hidden states and the sum of the rows of the head. Both need logits without a soft cap.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch

from dllm_kernels._checks import FACTOR_RANGE
from dllm_kernels._graph._plain import any_dtensor
from dllm_kernels.deferred import _logits
from dllm_kernels.deferred._logits import DeferredLogits, alike, rule
from dllm_kernels.deferred._moves import Call, dims_of
from dllm_kernels.deferred._nll import dtype_after
from dllm_kernels.deferred._pending import DeferredStat, is_lse_of
from dllm_kernels.deferred._record import NO_SHIFT, class_sum
from dllm_kernels.deferred._tensor import arguments

Tensor = torch.Tensor


def _is_linear(x: Any) -> bool:
    return isinstance(x, DeferredLogits) and x.cap is None and not x.log_probs and x.is_plain


def is_factor(value: Any) -> bool:
    """Return True for a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@rule("add", "sub", "rsub", "subtract", "__rsub__")
def combined(x: DeferredLogits, call: Call) -> Any:
    """Combine logits of one head, or subtract the logsumexp."""
    args, name = arguments(("input", "other", "alpha"), call.args, call.kwargs), call.function.__name__
    first: Any = args.get("input")
    second: Any = args.get("other")
    alpha = args.get("alpha", 1)
    if "rsub" in name:
        first, second = second, first
    if name != "add" and first is x and is_lse_of(second, x) and alpha == 1:
        dtype = torch.promote_types(x.dtype, second.dtype)
        meta, axis = torch.empty_like(x.meta, dtype=dtype), x.axis
        stats = (second, *second.sources) if isinstance(second, DeferredStat) else ()
        by_exp = any(lse.sources and not lse.is_view for lse in stats)  # does not keep the logits for the backward pass
        for lse in stats:
            lse.leave()

        def normalized(z: Tensor) -> Tensor:
            lse = z.exp().sum(axis, keepdim=True).log() if by_exp else z.logsumexp(axis, keepdim=True)
            return (z - lse).to(dtype)

        return x.after([x], normalized, meta=meta, owns=True, log_probs=True, of_probs=None, shift=NO_SHIFT)
    if not is_factor(alpha) or not all(map(_is_linear, (first, second))) or first.shape != second.shape:
        return NotImplemented
    if not alike(first, second):
        return NotImplemented
    factor = Fraction(alpha) * second.scale / first.scale * (1 if name == "add" else -1)
    if not abs(factor) < FACTOR_RANGE[1]:
        return NotImplemented
    (h, u, *rest), (other_h, other_u, *_) = first.tapped(), second.tapped()
    hidden = torch.add(h, other_h, alpha=float(factor))
    low_rank = None if u is None else torch.add(u, other_u, alpha=float(factor))
    bias_factor = first.bias_factor + factor * second.bias_factor

    def step(a: Tensor, b: Tensor) -> Tensor:
        return a.add(b, alpha=alpha) if name == "add" else a.sub(b, alpha=alpha)

    return first.after([first, second], step, (hidden, low_rank, *rest), bias_factor=bias_factor, owns=True)


@rule("neg")
def negative(x: DeferredLogits, call: Call) -> Any:
    """Change the sign, by a change of the sign of the hidden states."""
    return _multiplied(x, call, -1)


def _multiplied(x: DeferredLogits, call: Call, value: Any) -> Any:
    """Multiply by a number that is not positive."""
    if not _is_linear(x) or not is_factor(value) or not -FACTOR_RANGE[1] < value <= 0:
        return NotImplemented
    h, u, *rest = x.tapped()
    sign = 0 if -FACTOR_RANGE[0] < value else -1
    parts = h * sign, None if u is None else u * sign, *rest  # type: ignore[operator]
    scale = x.scale * (Fraction(-value) if sign else 1)
    if not FACTOR_RANGE[0] < scale < FACTOR_RANGE[1]:
        return NotImplemented
    meta = torch.empty_like(x.meta)
    return x.after([x], call.on, parts, meta=meta, owns=True, bias_factor=x.bias_factor * sign, scale=scale)


def _by_number(name: str) -> None:
    positive = _logits.RULES[name]

    def product(x: DeferredLogits, call: Call) -> Any:
        result = positive(x, call)
        if result is not NotImplemented or len(call.args) != 1 or call.kwargs or not is_factor(call.args[0]):
            return result
        (value,) = call.args
        return _multiplied(x, call, value if name == "mul" else 1 / value if value else None)

    _logits.RULES[name] = product


_by_number("mul")
_by_number("div")


@rule("sum", "mean")
def _over_classes(x: DeferredLogits, call: Call) -> Any:
    """Sum over the classes, or over all: a product of the hidden states and the sum of the rows of the head."""
    args = arguments(("dim", "keepdim", "dtype"), call.args, call.kwargs)
    dims = dims_of(args.get("dim"), x.ndim)
    if not _is_linear(x) or not x.fusible or args.get("dtype") is not None or args.get("keepdim"):
        return NotImplemented
    if not dims or dims not in ([x.axis], list(range(x.ndim))):
        return NotImplemented
    everything = len(dims) == x.ndim
    dtype = dtype_after(lambda z: call.function(z, -1), x.dtype, x.device)
    with x.restored():
        record = x.rows()
        if any_dtensor(record.hidden, record.weight):
            return NotImplemented
        total = class_sum(record, everything)
    if call.function.__name__ == "mean":
        total = total / (x.numel() if everything else x.shape[x.axis])
    return total.to(dtype)
