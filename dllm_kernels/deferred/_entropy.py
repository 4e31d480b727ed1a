"""Rules of functions of the softmax: sums of its product with log-softmax or logits, and the probability of classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from dllm_kernels._checks import FLOAT_DTYPES
from dllm_kernels._graph._plain import is_dtensor
from dllm_kernels.deferred._logits import RULES, DeferredLogits, class_ids, on_classes, picked, rule
from dllm_kernels.deferred._moves import Call
from dllm_kernels.deferred._nll import dtype_after
from dllm_kernels.deferred._pending import DeferredStat, NeededStats
from dllm_kernels.deferred._sums import negative
from dllm_kernels.deferred._tensor import arguments
from dllm_kernels.deferred._terms import Term
from dllm_kernels.rows._dtypes import accum_dtype

Tensor = torch.Tensor
P, LOG_P, P_LOG_P, P_Z = "p", "log p", "p log p", "p z"


def _term(
    x: DeferredLogits, sources: Sequence[Any], step: Callable[..., Tensor], dtype: torch.dtype, operation: str,
    kind: str | None, factor: float = 1.0,
) -> Any:  # fmt: skip
    return Term.of(x, sources, step, torch.empty(x.shape, dtype=dtype, device="meta"), operation, kind, factor)


def _has_softmax(x: DeferredLogits) -> bool:
    return x.fusible and x.overwritten is None and x.skip is None


@rule("softmax")
def _softmax(x: DeferredLogits, call: Call) -> Any:
    names = ("dim", "dtype") if call.function is not F.softmax else ("dim", "_stacklevel", "dtype")
    args = arguments(names, call.args, call.kwargs)
    dtype = args.get("dtype")
    if not on_classes(x, args.get("dim")) or dtype not in (None, *FLOAT_DTYPES) or not _has_softmax(x):
        return NotImplemented
    dtype = dtype or dtype_after(lambda z: z.softmax(-1), x.dtype, x.device)
    return _term(x, [x], lambda z: call.on(z).to(dtype), dtype, "softmax", P)


@rule("exp")
def _exp(x: DeferredLogits, call: Call) -> Any:
    if not x.log_probs or call.args or call.kwargs or not _has_softmax(x):
        return NotImplemented
    dtype = dtype_after(lambda z: z.exp(), x.dtype, x.device)
    return _term(x, [x], lambda z: z.exp().to(dtype), dtype, "exp", P)


@rule("clamp", "clamp_min")
def _clamped(x: DeferredLogits, call: Call) -> Any:
    """Replace log-probabilities of -inf by the lowest number, as Categorical does for its entropy."""
    lowest = arguments(("min", "max"), call.args, call.kwargs)
    if not x.log_probs or not _has_softmax(x) or lowest != {"min": torch.finfo(x.dtype).min}:
        return NotImplemented
    return _term(x, [x], call.on, x.dtype, "clamp", LOG_P)


def _same_logits(x: DeferredLogits, y: DeferredLogits) -> bool:
    """Return True if log-probabilities or logits are of the same rows."""
    return x is y or x.rows_key == y.rows_key


def _product(p: Any, call: Call) -> Any:
    """Multiply by a number, or the softmax by its logarithm or by the logits."""
    (other,) = call.args if len(call.args) == 1 and not call.kwargs else (None,)
    if isinstance(p, Term) and isinstance(other, int | float) and math.isfinite(other) and p.kind is not None:
        return _term(p.logits, [p], call.on, p.dtype, p.operation, p.kind, p.factor * other)
    if not isinstance(p, Term) or p.kind != P:
        p, other = other, p
    if not isinstance(p, Term) or p.kind != P:
        return NotImplemented
    if isinstance(other, Term):
        logits, kind, factor = other.logits, P_LOG_P if other.kind == LOG_P else None, p.factor * other.factor
    elif isinstance(other, DeferredLogits) and _has_softmax(other):
        logits, kind, factor = other, P_LOG_P if other.log_probs else P_Z, p.factor
    else:
        return NotImplemented
    same_graph = p.needs_grad == other.needs_grad or not torch.is_grad_enabled()
    if kind is None or not same_graph or not _same_logits(p.logits, logits):
        return NotImplemented
    dtype = torch.promote_types(p.dtype, other.dtype)
    return _term(logits, [p, other], lambda a, b: a * b, dtype, p.operation, kind, factor)


def _negative(p: Term, call: Call) -> Any:
    return _product(p, Call(torch.mul, (-1,), {}))


def _sum(p: Term, call: Call) -> Any:
    args = arguments(("dim", "keepdim", "dtype"), call.args, call.kwargs)
    x, kind, factor = p.logits, p.kind, p.factor
    usable = kind in (P_LOG_P, P_Z) and on_classes(x, args.get("dim"))
    if not usable or args.get("keepdim") or args.get("dtype") is not None:
        return NotImplemented
    dtype = dtype_after(lambda z: z.sum(-1), p.dtype, p.device)
    meta = torch.empty(x.shape[: x.axis] + x.shape[x.axis + 1 :], dtype=dtype, device="meta")

    def finish(_: Any, lse: Tensor, entropy: Tensor) -> Tensor:  # the mean of the logits is lse - entropy
        return ((-entropy if kind == P_LOG_P else lse - entropy) * factor).to(dtype)

    return DeferredStat.from_logits(x, "entropy", NeededStats(None, True, finish), meta)


def _gathered(p: Term, call: Call) -> Any:
    """Return the probabilities of classes."""
    ids, dtype, factor = class_ids(p.logits, call), p.dtype, p.factor
    if p.kind != P or ids is None:
        return NotImplemented
    return picked(p.logits, ids, lambda log_probs, _: (log_probs.exp() * factor).to(dtype), dtype)


def _product_of_logits(x: Any, call: Call) -> Any:
    result = _product(x, call)
    return multiplied(x, call) if result is NotImplemented else result


def _negative_of_logits(x: DeferredLogits, call: Call) -> Any:
    if not x.log_probs or not _has_softmax(x):
        return negative(x, call)
    return _term(x, [x], call.on, x.dtype, "neg", LOG_P, -1.0)


# Distributions --------------------------------------------------------------------------------------------------------


@rule("eq", "__eq__")
def _is_equal(x: DeferredLogits, call: Call) -> Any:
    """Compare with itself, as Categorical checks its logits for NaN: without one if no product can overflow.

    On a GPU this is a host sync.
    """
    if call.args != (x,) or call.kwargs or not x.fusible or x.overwritten is not None:
        return NotImplemented
    with torch.no_grad(), x.restored():
        hidden, weight, bias, extra, *_ = x.rows()
        if is_dtensor(hidden) or is_dtensor(weight):
            return NotImplemented
        sizes = [_size(hidden) * _size(weight), *([] if extra is None else [_size(extra[0]) * _size(extra[1])])]
        sizes += [] if bias is None else [bias.abs().amax().double()]
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
    shape = torch.broadcast_shapes(*(t.shape for t in call.args))  # type: ignore[no-untyped-call]
    return tuple(t.expand(shape) for t in call.args)


multiplied = RULES["mul"]
RULES["mul"], RULES["neg"] = _product_of_logits, _negative_of_logits
Term.rules = {"mul": _product, "neg": _negative, "sum": _sum, "gather": _gathered, "take_along_dim": _gathered}
