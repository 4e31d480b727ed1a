"""Rules of the NLL of rows: functions that stay affine in it, with constant coefficients.

A function without a rule, or whose rule returns ``NotImplemented``, receives the NLL of each row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dllm_kernels._graph._plain import readable_without_sync
from dllm_kernels.deferred._moves import Call, dims_of
from dllm_kernels.deferred._nll import DeferredNLL
from dllm_kernels.deferred._tensor import DeferredTensor, Rule, arguments, registers, where_arguments

Tensor = torch.Tensor
# Methods that create a tensor with the dtype and the device of another one.
NEW = "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"
LIKE = "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"
RULES: dict[str, Rule] = {}
DeferredNLL.rules = RULES


rule = registers(RULES)


@rule(*NEW)
def new_tensor(x: Any, call: Call) -> Tensor:
    """Make a new tensor, which takes only dtype and device of the deferred one."""
    return call.on(torch.empty(0, dtype=x.dtype, device=x.device))  # type: ignore[no-any-return]


@rule(*LIKE)
def _new_like(x: DeferredNLL, call: Call) -> Any:
    return call.on(torch.empty_strided(x.shape, x.meta.stride(), dtype=x.dtype, device=x.device))


# Constant coefficients ------------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool)


def _is_constant(value: Any) -> bool:
    """Return True for a tensor that may be a coefficient."""
    return (
        isinstance(value, Tensor)
        and not isinstance(value, DeferredTensor)
        and not (value.requires_grad and torch.is_grad_enabled())
        and not value.is_complex()
    )


def _fits(x: DeferredNLL, shape: Sequence[int]) -> bool:
    """Return True if a tensor of this shape broadcasts to that of ``x``."""
    pairs = zip(reversed(shape), reversed(x.shape), strict=False)
    return len(shape) <= x.ndim and all(n in (1, m) for n, m in pairs)


def _promoted(x: DeferredNLL, other: Any) -> torch.dtype:
    return torch.result_type(x.meta, other)


@rule("mul", "div")
def _weighted(x: DeferredNLL, call: Call) -> Any:
    divides = "div" in call.function.__name__
    if len(call.args) != 1 or call.kwargs:
        return NotImplemented
    (other,) = call.args
    if _is_number(other):
        if not math.isfinite(other) or (divides and other == 0):
            return NotImplemented
        return x.times(1 / other if divides else other)
    if not _is_constant(other) or not _fits(x, other.shape):
        return NotImplemented
    dtype = _promoted(x, other)
    if divides:  # in the dtype of the sum: 1 / p overflows float16
        other = 1 / x.constant(other)
    return x.weighted(other, dtype)


@rule("neg")
def _negative(x: DeferredNLL, call: Call) -> Any:
    return x.times(-1)


@rule("add", "sub", "rsub", "subtract", "__rsub__")
def _sum(x: DeferredNLL, call: Call) -> Any:
    args = arguments(("input", "other", "alpha"), call.args, call.kwargs)
    alpha, name = args.get("alpha", 1), call.function.__name__
    if len(args) - ("alpha" in args) != 2 or not _is_number(alpha) or not math.isfinite(alpha):
        return NotImplemented
    if isinstance(alpha, bool) or (name != "add" and any(map(_is_bool, args.values()))):  # torch refuses these
        return NotImplemented
    terms = [(args["input"], -alpha if "rsub" in name else 1), (args["other"], -alpha if name[:3] == "sub" else 1)]
    if name == "add":
        terms[1] = args["other"], alpha
    total: Any = None
    for value, factor in sorted(terms, key=lambda term: not isinstance(term[0], DeferredNLL)):
        if isinstance(value, DeferredNLL):
            term = value if factor == 1 else value.times(factor)
            total = term if total is None else total.plus(term)
        elif (_is_number(value) and math.isfinite(value)) or (_is_constant(value) and _fits(x, value.shape)):
            dtype, value = _promoted(total, value), total.constant(value) * factor
            total = total.changed(offset=value if total.offset is None else total.offset + value, dtype=dtype)
        else:
            return NotImplemented
        if total is None:
            return NotImplemented
    return total


@rule("where")
def _where(x: DeferredNLL, call: Call) -> Any:
    args = where_arguments(call)
    if len(args) != 3 or not _is_mask(x, args["condition"]):
        return NotImplemented
    total: Any = None
    first, second, keep = args["input"], args["other"], args["condition"]
    if not isinstance(first, DeferredNLL):
        first, second, keep = second, first, ~keep
    if isinstance(second, DeferredNLL):
        total = first.masked(keep, 0).plus(second.masked(~keep, 0))
        return NotImplemented if total is None else total
    if not _is_number(second) and not (_is_constant(second) and _fits(x, second.shape)):
        return NotImplemented
    return first.masked(keep, second, _promoted(first, second))


@rule("masked_fill")
def _filled(x: DeferredNLL, call: Call) -> Any:
    args = arguments(("mask", "value"), call.args, call.kwargs)
    value = args.get("value")
    if not _is_mask(x, args.get("mask")) or not _is_number(value):
        return NotImplemented
    return x.masked(~args["mask"], value)


@rule("nan_to_num")
def _finite(x: DeferredNLL, call: Call) -> Any:
    args = arguments(("nan", "posinf", "neginf"), call.args, call.kwargs)
    plain = x.offset is None and x.finite is None and not x.summed
    if args.pop("nan", None) not in (None, 0) or args or not plain or not readable_without_sync(x.target):
        return NotImplemented
    return x.changed(finite=x.coefficients(), factor=1.0, row_weights=None)


@rule("mul_", "div_", "masked_fill_", "__setitem__")
def _in_place(x: DeferredNLL, call: Call) -> Any:
    """Change this NLL, if nothing else refers to its memory."""
    if x.sources or any(ref() is not None for ref in x._derived) or not torch.is_grad_enabled():
        return NotImplemented
    name, (first, *others) = call.function.__name__, call.args or (None,)
    before = x.changed()
    if name == "__setitem__":
        mask = isinstance(first, Tensor) and first.dtype == torch.bool and 0 < first.dim() <= x.ndim
        if not mask or first.shape != x.shape[: first.dim()]:
            return NotImplemented
        first = first.reshape((*first.shape, *[1] * (x.ndim - first.dim())))
    changes = {"masked_fill_": _filled, "__setitem__": _filled}.get(name, _weighted)
    result = changes(before, Call(call.function, (first, *others), call.kwargs))
    if result is NotImplemented:
        return NotImplemented
    x.become(result if result.dtype == x.dtype else result.changed(dtype=x.dtype))
    return None if name == "__setitem__" else x


def _is_mask(x: DeferredNLL, value: Any) -> bool:
    return _is_constant(value) and value.dtype == torch.bool and _fits(x, value.shape)


# Moves ----------------------------------------------------------------------------------------------------------------


@rule("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel")
def _reshaped(x: DeferredNLL, call: Call) -> Any:
    probe = torch.empty(x.shape, device="meta", dtype=torch.float32)
    out = call.on(probe)
    if out is probe or out.dtype != torch.float32:
        return x if out is probe else NotImplemented
    shape, dims = tuple(out.shape), x.ndim
    return x.moved(lambda t: t.reshape((*shape, *t.shape[dims:])))


@rule("transpose", "permute", "movedim", "t", "T", "swapaxes")
def _permuted(x: DeferredNLL, call: Call) -> Any:
    out = call.on(torch.empty(tuple(range(2, 2 + x.ndim)), device="meta"))
    order, dims = [n - 2 for n in out.shape], x.ndim
    return x.moved(lambda t: t.permute(*order, *range(dims, t.dim())))


@rule("__getitem__")
def _indexed(x: DeferredNLL, call: Call) -> Any:
    index = call.args[0] if isinstance(call.args[0], tuple) else (call.args[0],)
    has_ellipsis, dims = any(item is Ellipsis for item in index), x.ndim

    def move(t: Tensor) -> Tensor:
        whole = (*index, *[slice(None)] * (t.dim() - dims))
        return t[whole if has_ellipsis else index]

    return x.moved(move)


@rule("contiguous")
def _contiguous(x: DeferredNLL, call: Call) -> Any:
    return x if x.is_contiguous() else _cloned(x, call)


@rule("clone")
def _cloned(x: DeferredNLL, call: Call) -> Any:
    return x.changed(needs=x.needs)  # in the forward of a Function, whose output has a graph later


@rule("float", "double", "to", "type_as")
def _cast(x: DeferredNLL, call: Call) -> Any:
    dtype = {"float": torch.float32, "double": torch.float64}.get(call.function.__name__, x.dtype)
    for value in (*call.args, *call.kwargs.values()):
        value = value.dtype if isinstance(value, Tensor) and value.device == x.device else value
        if not isinstance(value, torch.dtype) or not value.is_floating_point:
            return NotImplemented
        dtype = value
    return x if dtype == x.dtype else x.changed(dtype=dtype)


# Sums -----------------------------------------------------------------------------------------------------------------


@rule("sum", "mean")
def _reduced(x: DeferredNLL, call: Call) -> Any:
    args = arguments(("dim", "keepdim", "dtype"), call.args, call.kwargs)
    dim, averages = args.get("dim"), call.function.__name__ == "mean"
    dims = dims_of(dim, x.ndim)
    if dims is None or args.get("dtype") is not None or (isinstance(dim, tuple | list) and not dim):
        return NotImplemented
    count = math.prod(x.shape[d] for d in dims)
    if len(dims) == x.ndim and not args.get("keepdim"):
        return x.reduced(count if averages else None)
    if averages and not count:
        return NotImplemented
    total = x.summed_over(dims, 1 / count if averages else 1.0)
    for d in dims if args.get("keepdim") else ():
        total = total.unsqueezed(d)
    return total


@rule("dot", "vdot", "inner", "matmul", "__matmul__", "__rmatmul__", "mv")
def _product(x: DeferredNLL, call: Call) -> Any:
    if len(call.args) != 2 or call.kwargs or torch.is_autocast_enabled(x.device.type):
        return NotImplemented
    first, second = call.args[::-1] if call.function.__name__ == "__rmatmul__" else call.args
    other = second if first is x else first
    if not _is_constant(other) or other.dtype != x.dtype or other.dim() != 1 or not x.ndim:
        return NotImplemented
    if call.function.__name__ in ("dot", "vdot") and x.ndim > 1:  # torch refuses it
        return NotImplemented
    dim = x.ndim - 1 if first is x or call.function.__name__ == "inner" else max(x.ndim - 2, 0)
    if x.shape[dim] != len(other):
        return NotImplemented
    weighted = x.weighted(other.view(-1, *[1] * (x.ndim - 1 - dim)), x.dtype)
    return weighted.reduced() if x.ndim == 1 else weighted.summed_over([dim])


@rule("einsum")
def _einsum(x: DeferredNLL, call: Call) -> Any:
    equation, *operands = call.args
    if not isinstance(equation, str) or call.kwargs or torch.is_autocast_enabled(x.device.type):
        return NotImplemented
    operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    out = out if arrow else "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    if len(terms) != len(operands) or not left.replace(",", "").isalpha() or not (out + "a").isalpha():
        return NotImplemented
    dims = next(term for term, t in zip(terms, operands, strict=True) if t is x)
    if len(dims) != x.ndim or any(len(set(term)) < len(term) or not set(term) <= set(dims) for term in (*terms, out)):
        return NotImplemented
    others = [(term, t) for term, t in zip(terms, operands, strict=True) if t is not x]
    result = x
    for term, t in others:
        sizes = [x.shape[dims.index(c)] for c in term]
        if not _is_constant(t) or t.dtype != x.dtype or list(t.shape) != sizes:
            return NotImplemented
        t = t.permute([term.index(c) for c in dims if c in term])
        result = result.weighted(t[tuple(slice(None) if c in term else None for c in dims)], x.dtype)
    if not out:
        return result.reduced()
    if len(others) != len(terms) - 1:
        return NotImplemented
    summed = [i for i, c in enumerate(dims) if c not in out]
    result = result.summed_over(summed) if summed else result
    remaining = [c for c in dims if c in out]
    return result if remaining == list(out) else result.permute([remaining.index(c) for c in out])
