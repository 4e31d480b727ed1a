"""Rules of functions of the softmax: sums of its product with log-softmax or logits, and the probability of classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dllm_kernels._checks import FLOAT_DTYPES
from dllm_kernels._graph._plain import any_dtensor
from dllm_kernels.deferred._graph import Step
from dllm_kernels.deferred._logits import RULES, DeferredLogits, on_classes, rule
from dllm_kernels.deferred._moves import Call
from dllm_kernels.deferred._nll import dtype_after
from dllm_kernels.deferred._pending import DeferredStat, is_stat_of
from dllm_kernels.deferred._record import NO_SHIFT, Stats
from dllm_kernels.deferred._stat_rules import class_dim, class_ids, picked, stat, takes_skipped
from dllm_kernels.deferred._sums import is_factor, negative
from dllm_kernels.deferred._tensor import arguments, registers, softmax_arguments
from dllm_kernels.deferred._terms import Term
from dllm_kernels.rows._dtypes import accum_dtype

Tensor = torch.Tensor
P, LOG_P, P_LOG_P, P_Z, EXP = "p", "log p", "p log p", "p z", "exp z"
P_LOW, LOG_P_LOW = "p + eps", "log (p + eps)"  # or the larger of both, for an eps that changes no sum over p
LOGS = {"log": 1.0, "log2": 1 / math.log(2), "log10": 1 / math.log(10)}


def _term(
    x: DeferredLogits, sources: Sequence[Any], step: Callable[..., Tensor], dtype: torch.dtype, operation: str,
    kind: str | None, factor: float = 1.0,
) -> Any:  # fmt: skip
    return Term.of(x, sources, step, torch.empty(x.shape, dtype=dtype, device="meta"), operation, kind, factor)


def _has_softmax(x: DeferredLogits) -> bool:
    return x.fusible and x.overwritten is None


@rule("softmax")
def _softmax(x: DeferredLogits, call: Call) -> Any:
    args = softmax_arguments(call)
    dtype = args.get("dtype")
    if not on_classes(x, args.get("dim")) or dtype not in (None, *FLOAT_DTYPES) or not _has_softmax(x):
        return NotImplemented
    dtype = dtype or dtype_after(lambda z: z.softmax(-1), x.dtype, x.device)
    dim, given = x.axis - x.ndim, args.get("dtype")  # also that of a chunk of rows
    return _term(x, [x], lambda z: z.softmax(dim, dtype=given).to(dtype), dtype, "softmax", P)


@rule("exp")
def _exp(x: DeferredLogits, call: Call) -> Any:
    if call.args or call.kwargs or not _has_softmax(x):
        return NotImplemented
    dtype = dtype_after(lambda z: z.exp(), x.dtype, x.device)
    return _term(x, [x], lambda z: z.exp().to(dtype), dtype, "exp", P if x.log_probs else EXP)


@rule("clamp", "clamp_min")
def _clamped(x: DeferredLogits, call: Call) -> Any:
    """Replace log-probabilities of -inf by the lowest number, as Categorical does for its entropy."""
    lowest = arguments(("min", "max"), call.args, call.kwargs)
    is_number = lowest.keys() == {"min"} and not isinstance(lowest["min"], Tensor)
    if not x.log_probs or not _has_softmax(x) or not is_number or lowest["min"] != torch.finfo(x.dtype).min:
        return NotImplemented
    return _term(x, [x], call.on, x.dtype, "clamp", LOG_P)


def _same_logits(x: DeferredLogits, y: DeferredLogits) -> bool:
    """Return True if log-probabilities or logits are of the same rows."""
    return x is y or (x.product_key == y.product_key and x.transform_key == y.transform_key)


def _changed(p: Term, call: Call, kind: str, factor: float, dtype: torch.dtype | None = None) -> Term:
    """Return the result of an operation on each entry as another term."""
    return _term(p.logits, [p], call.on, dtype or p.dtype, p.operation, kind, factor)  # type: ignore[no-any-return]


def _product(p: Any, call: Call) -> Any:
    """Multiply by a number, or the softmax by its logarithm or by the logits."""
    (other,) = call.args if len(call.args) == 1 and not call.kwargs else (None,)
    if isinstance(p, Term) and is_factor(other) and p.kind not in (None, P_LOW):
        return _changed(p, call, p.kind, p.factor * other)  # type: ignore[operator]
    if not isinstance(p, Term) or p.kind != P:
        p, other = other, p
    if not isinstance(p, Term) or p.kind != P:
        return NotImplemented
    if isinstance(other, Term) and other.kind in (LOG_P, LOG_P_LOW):
        logits, kind, factor = other.logits, P_LOG_P, p.factor * other.factor
    elif isinstance(other, DeferredLogits) and _has_softmax(other) and not other.infinite:  # 0 times -inf
        logits, kind, factor = other, P_LOG_P if other.log_probs else P_Z, p.factor
    else:
        return NotImplemented
    same_graph = p.needs_grad == other.needs_grad or not torch.is_grad_enabled()
    if not same_graph or not _same_logits(p.logits, logits):
        return NotImplemented
    dtype = torch.promote_types(p.dtype, other.dtype)
    return _term(logits, [p, other], lambda a, b: a * b, dtype, p.operation, kind, factor)


def _quotient(p: Term, call: Call) -> Any:
    """Divide by a number, or exponentials of logits by their sum."""
    (other,) = call.args if len(call.args) == 1 and not call.kwargs else (None,)
    if is_factor(other) and other and p.kind not in (None, P_LOW):
        return _changed(p, call, p.kind, p.factor / other)
    if p.kind != EXP or p.factor != 1 or not is_stat_of(other, p.logits, EXP):
        return NotImplemented
    x = p.logits
    dim, dtype = x.axis - x.ndim, torch.promote_types(p.dtype, other.dtype)  # type: ignore[union-attr]
    for stat_ in (other, *other.sources):  # type: ignore[union-attr]
        stat_.leave()
    return _term(x, [x], lambda z: z.softmax(dim).to(dtype), dtype, p.operation, P)


def _negative(p: Term, call: Call) -> Any:
    return _product(p, Call(torch.mul, (-1,), {}))


def _logarithm(p: Term, call: Call) -> Any:
    """Take the logarithm of probabilities."""
    x, base, factor = p.logits, LOGS[call.function.__name__], p.factor
    dtype = dtype_after(call.on, p.dtype, p.device) if p.kind in (P, P_LOW) else None
    if dtype is None or factor != 1 or call.args or call.kwargs or p.needs_grad != x.needs_grad:
        return NotImplemented
    if base == 1 and p.kind == P:
        changes = {"log_probs": True, "of_probs": p.dtype if p.dtype.itemsize == 2 else None, "skip_finite": False}
        meta = torch.empty_like(p.meta, dtype=dtype)
        return x.after([p], lambda t: t.log().to(dtype), p.tapped(), owns=True, meta=meta, **changes)
    if p.kind == P and x.infinite:
        return NotImplemented
    return _changed(p, call, LOG_P if p.kind == P else LOG_P_LOW, base, dtype)


def _raised(p: Term, call: Call) -> Any:
    """Add a number to all probabilities, or raise those below it, if that changes no sum over p log p."""
    name = call.function.__name__
    if "add" in name:
        others = [t for t in call.args if t is not p]  # none in p + p
        value = others[0] if len(others) == 1 and len(call.args) == 2 and not call.kwargs else None
        least = 1.0
    else:
        value = arguments(("min", "max"), call.args, call.kwargs).get("min") if len(call.args) < 2 else None
        least = -math.log(value) if isinstance(value, float) and 0 < value < 0.1 else 0.0
    if p.kind != P or p.factor != 1 or not isinstance(value, float) or not 0 < value < 0.1:
        return NotImplemented
    if "max" in call.kwargs or value * p.shape[p.logits.axis] * least > torch.finfo(accum_dtype(p.dtype)).eps:
        return NotImplemented
    step = (lambda t: t + value) if "add" in name else call.on
    return _term(p.logits, [p], step, p.dtype, p.operation, P_LOW)


def _entr(p: Term, call: Call) -> Any:
    """Compute -p log p by entr, or p log p by xlogy, which is 0 for p = 0."""
    product = "xlogy" in call.function.__name__
    if p.kind != P or p.factor != 1 or call.kwargs or p.dtype != accum_dtype(p.dtype):
        return NotImplemented
    if len(call.args) != 2 * product or any(other is not p for other in call.args):
        return NotImplemented
    step = (lambda t: torch.xlogy(t, t)) if product else call.on
    return _term(p.logits, [p], step, p.dtype, p.operation, P_LOG_P, 1.0 if product else -1.0)


def _sum(p: Term, call: Call) -> Any:
    return over_classes(p.logits, p.kind, p.factor, p.dtype, call)


def over_classes(x: DeferredLogits, kind: str | None, factor: float, dtype: torch.dtype, call: Call) -> Any:
    """Sum or average a term over the classes, or over everything."""
    args = arguments(("dim", "keepdim", "dtype"), call.args, call.kwargs)
    dim, averages = args.get("dim"), call.function.__name__ == "mean"
    if kind not in (P_LOG_P, P_Z, EXP, LOG_P) or args.get("dtype") is not None or not x.fusible:
        return NotImplemented
    linear = x.cap is None and x.skip is None and not x.fills_classes  # the sum of the logits then is a product
    if kind == LOG_P and (not linear or any_dtensor(*x.parts)):
        return NotImplemented
    everything, (shift, axis, V) = dim is None, (x.shift, x.axis, x.shape[x.axis])
    if not everything and not class_dim(x, dim):
        return NotImplemented
    dtype = dtype_after(lambda z: z.sum(-1), dtype, x.device)
    scale = factor / V if averages and not everything else factor

    def value(stats: Stats) -> Any:
        if kind == LOG_P:
            return (stats.total - stats.lse * V) * scale
        if kind == EXP:
            return (stats.lse + shift.of(stats, axis)).exp() * scale
        # The mean of the logits is lse - entropy.
        return (-stats.entropy if kind == P_LOG_P else stats.lse - stats.entropy + shift.of(stats, axis)) * scale

    needed = {"entropy": kind in (P_LOG_P, P_Z), "total": kind == LOG_P, "best": kind in (P_Z, EXP) and shift.best}
    name = EXP if kind == EXP and scale == 1 else "entropy"
    result = stat(x, name, value, dtype, not everything and args.get("keepdim"), **needed)
    if not everything:
        return result
    return result.sum() / x.numel() if averages else result.sum()


def _gathered(p: Term, call: Call) -> Any:
    """Return the probabilities of classes, or their logarithms."""
    x, kind, dtype, factor = p.logits, p.kind, p.dtype, p.factor
    ids = class_ids(x, call)
    if kind not in (P, LOG_P, EXP) or ids is None or takes_skipped(x, ids):
        return NotImplemented
    shift, axis = x.shift if kind == EXP else NO_SHIFT, x.axis

    def value(stats: Stats) -> Any:
        logs = stats.log_probs
        logs = logs + (stats.lse + shift.of(stats, axis)).unsqueeze(-1) if kind == EXP else logs
        return ((logs if kind == LOG_P else logs.exp()) * factor).to(dtype)

    return picked(x, ids, value, dtype, best=shift.best, of=p)


def _product_of_logits(x: Any, call: Call) -> Any:
    result = _product(x, call)
    return multiplied(x, call) if result is NotImplemented else result


def _negative_of_logits(x: DeferredLogits, call: Call) -> Any:
    if not x.log_probs or not _has_softmax(x) or x.infinite:
        return negative(x, call)
    return _term(x, [x], call.on, x.dtype, "neg", LOG_P, -1.0)


def _sum_of_logits(x: DeferredLogits, call: Call) -> Any:
    if x.log_probs and x.overwritten is None:
        return over_classes(x, LOG_P, 1.0, x.dtype, call)
    return summed(x, call)


# Distributions --------------------------------------------------------------------------------------------------------


@rule("eq", "__eq__")
def _is_equal(x: DeferredLogits, call: Call) -> Any:
    """Compare with itself, as Categorical checks its logits for NaN: without one if no product can overflow.

    On a GPU this is a host sync.
    """
    if len(call.args) != 1 or call.args[0] is not x or call.kwargs or not x.fusible or x.overwritten is not None:
        return NotImplemented
    with torch.no_grad(), x.restored():
        hidden, weight, bias, extra, *_ = x.rows()
        if any_dtensor(hidden, weight):
            return NotImplemented
        sizes = [_size(hidden) * _size(weight), *([] if extra is None else [_size(extra[0]) * _size(extra[1])])]
        sizes += [] if bias is None else [bias.where(bias > torch.finfo(bias.dtype).min, 0.0).abs().amax().double()]
        limit = min(torch.finfo(dtype).max for dtype in (hidden.dtype, x.dtype)) / max(float(x.scale), 1.0)
    if not (torch.stack(sizes).sum() < limit).item():
        return NotImplemented
    return torch.ones((), dtype=torch.bool, device=x.device).expand(x.shape)


def _size(rows: Tensor) -> Tensor:
    """Return the largest norm of a row, NaN if one is NaN."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=accum_dtype(rows.dtype))
    return norms.amax().double()


@rule("broadcast_tensors")
def _broadcast(_: DeferredLogits, call: Call) -> Any:
    if not all(isinstance(t, Tensor) for t in call.args):
        return NotImplemented
    shape = torch.broadcast_shapes(*(t.shape for t in call.args))  # type: ignore[no-untyped-call]
    return tuple(t if t.shape == shape else t.expand(shape) for t in call.args)


multiplied, summed = RULES["mul"], RULES["sum"]
RULES["mul"], RULES["neg"] = _product_of_logits, _negative_of_logits
RULES["sum"] = RULES["mean"] = _sum_of_logits
Term.rules = {
    **dict.fromkeys(LOGS, _logarithm),
    **dict.fromkeys(("add", "clamp", "clamp_min"), _raised),
    **dict.fromkeys(("sum", "mean"), _sum),
    **dict.fromkeys(("gather", "take_along_dim"), _gathered),
    "mul": _product, "neg": _negative, "div": _quotient, "special_entr": _entr,
    "xlogy": _entr, "special_xlogy": _entr,
}  # fmt: skip


@registers(DeferredStat.rules)("log")
def _log_of_sum(x: DeferredStat, call: Call) -> Any:
    """Take the logarithm of a sum of exponentials, which is the logsumexp."""
    request, logits = x.request, x.logits
    if x.kind != EXP or request is None or call.args or call.kwargs:
        return NotImplemented
    axis, dtype, shift = x.axis, dtype_after(torch.log, x.dtype, x.device), logits.shift

    def finish(stats: Stats) -> Any:
        value = (stats.lse + shift.of(stats, logits.axis)).to(dtype)
        return value if axis is None else value.unsqueeze(axis)

    return x.like("lse", request._replace(finish=finish), Step(call.on, logits.restored, [x]), dtype)
