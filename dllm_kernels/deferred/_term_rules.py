"""Rules of terms, and of deferred logits for which no other rule holds; see ``_terms.py``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from dllm_kernels._checks import FLOAT_DTYPES
from dllm_kernels.deferred._affine import VALUES, affine_of
from dllm_kernels.deferred._entries import are_entries
from dllm_kernels.deferred._expressions import Operation, RowFunction, moved
from dllm_kernels.deferred._graph import Step
from dllm_kernels.deferred._logits import CASTS, RULES, DeferredLogits, cast_dtype, like
from dllm_kernels.deferred._moves import MOVES, Call, dims_of
from dllm_kernels.deferred._nll import DeferredNLL, dtype_after
from dllm_kernels.deferred._tensor import (
    WHOLE,
    DeferredTensor,
    Rule,
    UnknownArgumentError,
    arguments,
    meta_after,
    registers,
    softmax_arguments,
)
from dllm_kernels.deferred._terms import Term, logits_of, recorded
from dllm_kernels.rows._dtypes import accum_dtype

Tensor = torch.Tensor
ELEMENTWISE = (
    "__abs__", "__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__", "__pow__", "__rpow__", "__rsub__",
    "__rtruediv__", "abs", "absolute", "add", "clamp", "clamp_max", "clamp_min", "clip", "div", "entr", "eq", "exp",
    "expm1", "ge", "gt", "isfinite", "isinf", "isnan", "le", "log", "log1p", "log2", "logaddexp", "logsigmoid", "lt",
    "masked_fill", "maximum", "minimum", "mul", "nan_to_num", "ne", "neg", "pow", "reciprocal", "relu", "rsub",
    "sigmoid", "softplus", "special_entr", "special_xlogy", "sqrt", "square", "sub", "subtract", "tanh",
    "where", "xlogy",
)  # fmt: skip

COMPARISONS = "eq", "ge", "gt", "le", "lt", "ne"


def _fallback(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule of terms, and of deferred logits if the rule that these have does not hold."""

    def register(rule: Rule) -> Rule:
        for table in (RULES, Term.rules):
            for name in names:
                table[name] = _first_of(table[name], rule) if name in table else rule
        return rule

    return register


def _first_of(first: Rule, second: Rule) -> Rule:
    def either(x: Any, call: Call) -> Any:
        try:
            result = first(x, call)
        except UnknownArgumentError:
            result = NotImplemented
        return second(x, call) if result is NotImplemented else result

    return either


def _arguments(x: Any, call: Call) -> tuple[Any, ...]:
    name = call.function.__name__
    return call.args if name in WHOLE else (x, *call.args)


# Operations on each element, and over the classes ---------------------------------------------------------------------


@_fallback(*ELEMENTWISE)
def _elementwise(x: Any, call: Call) -> Any:
    if "out" in call.kwargs or call.kwargs.get("inplace"):
        return NotImplemented
    function = call.function
    if function.__name__.strip("_") in COMPARISONS and any(are_entries(other, x) for other in call.args):
        return NotImplemented
    return recorded(
        lambda args, kwargs: function(*args, **kwargs), _arguments(x, call), call.kwargs, operation=function.__name__
    )


def _of_rows(x: DeferredNLL, call: Call) -> Any:
    """Record a function of numbers and of values of the same rows, which a sum computes in the chunks."""
    args, kwargs, function, of_x = _arguments(x, call), call.kwargs, call.function, x.function
    values: dict[int, Any] = {id(v): v for v in args if isinstance(v, DeferredNLL)}
    numbers = all(id(v) in values or not isinstance(v, Tensor) for v in args)
    if not numbers or any(map(torch.is_tensor, kwargs.values())) or kwargs.get("inplace"):
        return NotImplemented

    places = [list(values).index(id(v)) if id(v) in values else None for v in args]
    others = [None if id(v) in values else v for v in args]

    def step(*rows: Tensor) -> Tensor:
        return function(*(v if i is None else rows[i] for i, v in zip(places, others, strict=True)), **kwargs)  # type: ignore[no-any-return]

    after = meta_after(step, *values.values())
    if after is None or after[0].shape != x.shape or not after[0].is_floating_point():
        return NotImplemented
    affine = [{name: getattr(y, name) for name in VALUES} | {"dtype": y.dtype} for y in values.values()]
    for y, each in zip(values.values(), affine, strict=True):
        number = y.offset is None or (y.numel() and not any(y.offset.stride()))
        weighted = y.row_weights is not None or y.finite is not None or y.summed
        same = y.function and of_x and y.function.key == of_x.key and y.needs_grad == x.needs_grad
        if not same or weighted or not number or y.shape != x.shape or torch.is_autocast_enabled(x.device.type):
            return NotImplemented
        each["offset"] = y.offset if y.offset is None else y.offset[(0,) * y.ndim]
    inputs = tuple(y.function.expression for y in values.values())
    expression = Operation(
        lambda *rows: step(*(affine_of(t, **each) for t, each in zip(rows, affine, strict=True))), inputs, True
    )
    of_rows, recipe = RowFunction(expression, of_x and of_x.key), Step(step, x.logits.restored, list(values.values()))
    return x.changed(after[0].dtype, recipe, function=of_rows, factor=1.0, offset=None)


DeferredNLL.rules |= {
    name: _first_of(DeferredNLL.rules[name], _of_rows) if name in DeferredNLL.rules else _of_rows
    for name in ELEMENTWISE
}


def _in_place_rule(name: str) -> Rule:
    """Return the rule of an operation in place: the term becomes the result, if no other tensor shares its memory."""

    def change(p: Term, call: Call) -> Any:
        shared = p.is_view or any(ref() is not None for ref in p._derived)
        if shared or (p.needs_grad and not torch.is_grad_enabled()):
            return NotImplemented
        before = p.twin()
        if name == "__setitem__":
            mask, value = call.args
            is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == p.shape
            if not is_mask or not isinstance(value, int | float):
                return NotImplemented
            result = recorded(lambda z, m, v: z.masked_fill(m, v), before, mask, value, operation="setitem")
        else:
            function = getattr(Tensor, name)
            operands = [before if x is p else x for x in call.args]

            def changed(z: Tensor, args: Any, kwargs: Any) -> Tensor:
                value: Tensor = function(z, *args, **kwargs)
                return value if value.is_complex() else value.to(z.dtype)  # the former is refused

            result = recorded(changed, before, operands, call.kwargs, operation=name)
        if result is NotImplemented or result.shape != p.shape:
            return NotImplemented
        p.become(result)
        return None if name == "__setitem__" else p

    return change


IN_PLACE = "add", "clamp", "clamp_max", "clamp_min", "div", "exp", "log", "masked_fill", "mul", "neg", "sub"
Term.rules |= {f"{name}_": _in_place_rule(name) for name in IN_PLACE}
Term.rules["__setitem__"] = _in_place_rule("__setitem__")


@_fallback("einsum")
def _einsum(x: Any, call: Call) -> Any:
    """Compute a product of all elements, summed over the classes, or over all."""
    equation, *operands = call.args
    terms, arrow, out = str(equation).replace(" ", "").partition("->")
    first, *others = terms.split(",")
    alike = len(others) == 1 == len(operands) - 1 and others[0] == first and first.isalpha() and arrow
    if (
        not alike
        or len(set(first)) < len(first)
        or out not in ("", first[:-1])
        or operands[0].shape != operands[1].shape
    ):
        return NotImplemented
    rows = recorded(
        lambda a, b: torch.einsum("...v,...v->...", a, b), *operands, operation="einsum", reduces=True
    )  # fmt: skip
    return rows if out or rows is NotImplemented else rows.sum()


Term.rules |= dict.fromkeys(("expand_as", "view_as", "reshape_as"), like)


@registers(Term.rules)("to", "type", "type_as", *CASTS)
def _cast(p: Term, call: Call) -> Any:
    dtype = cast_dtype(p, call)
    if dtype is None or dtype == p.dtype:
        return NotImplemented if dtype is None else p
    meta = torch.empty_like(p.meta, dtype=dtype)
    return Term.of(p.logits, [p], lambda t: t.to(dtype), meta, p.operation, p.kind, p.factor)


@registers(Term.rules)("detach", "data")
def _detached(p: Term, call: Call) -> Any:
    return p.detached(call.on)


def _on_classes(x: Any, dim: Any) -> bool:
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    return isinstance(dim, int) and -x.ndim <= dim < x.ndim and dim % x.ndim == x.ndim - 1


@_fallback("softmax", "log_softmax")
def _normalized(x: Any, call: Call) -> Any:
    function, args = call.function, softmax_arguments(call)
    if not _on_classes(x, args.pop("dim", None)):
        return NotImplemented
    return recorded(lambda z: function(z, -1, **args), x, operation=function.__name__)


@_fallback("logsumexp", "amax", "amin")
def _reduced(x: Any, call: Call) -> Any:
    function, args = call.function, arguments(("dim", "keepdim"), call.args, call.kwargs)
    if not _on_classes(x, args.get("dim")):
        return NotImplemented
    keep = bool(args.get("keepdim"))
    return recorded(lambda z: function(z, -1, keep), x, operation=function.__name__, reduces=not keep)


@_fallback("sum", "mean")
def _summed(x: Any, call: Call) -> Any:
    function, args = call.function, arguments(("dim", "keepdim", "dtype"), call.args, call.kwargs)
    dim, keep = args.get("dim"), bool(args.get("keepdim"))
    dim = None if isinstance(dim, tuple | list) and not dim else dim
    dims = dims_of(dim, x.ndim) or []
    others = dims[:-1]
    dtype = args.get("dtype") or dtype_after(lambda z: function(z, -1), x.dtype, x.device)
    if dims[-1:] != [x.ndim - 1] or (keep and others) or not {x.dtype, dtype} <= set(FLOAT_DTYPES):
        return NotImplemented
    wide = accum_dtype(dtype)

    def over_classes(z: Tensor) -> Tensor:
        return function(z, -1, keep, dtype=dtype if keep else wide)  # type: ignore[no-any-return]

    total = recorded(over_classes, x, operation=function.__name__, reduces=not keep, dtype=dtype)
    return getattr(total, function.__name__)(others) if others and total is not NotImplemented else total


@_fallback("gather", "take_along_dim")
def _gathered(x: Any, call: Call) -> Any:
    along = call.function.__name__ == "take_along_dim"
    names = ("indices", "dim") if along else ("dim", "index", "sparse_grad")
    args = arguments(names, call.args, call.kwargs)
    ids = args.get("index", args.get("indices"))
    whole = isinstance(ids, Tensor) and ids.shape[:-1] == x.shape[:-1] and ids.dtype == torch.int64
    if not whole or not _on_classes(x, args.get("dim")) or args.get("sparse_grad"):
        return NotImplemented

    def entries(z: Tensor, index: Tensor) -> Tensor:
        index = index.broadcast_to(*z.shape[:-1], index.shape[-1])
        return z.gather(-1, index.remainder(z.shape[-1]) if along else index)  # as take_along_dim does

    return recorded(entries, x, ids, operation="gather")


class Stack(DeferredTensor):
    """Terms that ``torch.stack`` joins in a new first dimension, over which a mixture is summed.

    Attributes:
        items: the terms, logits and constants.
    """

    items: list[Any]

    def after(self, sources: Sequence[Any], step: Callable[..., Tensor]) -> Any:
        """Return a copy."""
        recipe = Step(step, self.sources[0]._recipe.restored, sources)
        return self.create(step(self.meta), self.tapped(), recipe, needs=self.needs, items=self.items)


@_fallback("stack")
def _stacked(items: Any, call: Call) -> Any:
    args = arguments(("dim",), call.args, call.kwargs)
    sources = [v for v in items if isinstance(v, Term | DeferredLogits)]
    shapes = {tuple(v.shape) for v in items if isinstance(v, Tensor)}
    first = next((v for v in sources if v.needs_grad), sources[0])
    if (
        args.get("dim", 0) != 0
        or len(shapes) > 1
        or recorded(_of_stack, list(items), operation="stack") is NotImplemented
    ):
        return NotImplemented

    def step(*values: Tensor) -> Tensor:
        found = iter(values)
        return torch.stack([next(found) if isinstance(v, DeferredTensor) else v for v in items])

    dtype = functools.reduce(torch.promote_types, (v.dtype for v in items))
    meta = torch.empty((len(items), *first.shape), dtype=dtype, device="meta")
    return Stack.create(
        meta, first.tapped(), Step(step, logits_of(first).restored, sources), needs=first.needs, items=items
    )


def _of_stack(items: list[Tensor]) -> Tensor:
    return torch.stack(items).sum(0)


def _mixed(stack: Stack, call: Call) -> Any:
    function, args = call.function, arguments(("dim", "keepdim"), call.args, call.kwargs)
    if args.get("dim") not in (0, (0,), [0]) or args.get("keepdim"):
        return NotImplemented
    return recorded(lambda items: function(torch.stack(items), 0), stack.items, operation="stack")


Stack.rules = dict.fromkeys(("logsumexp", "sum", "mean", "amax"), _mixed)


# Losses ---------------------------------------------------------------------------------------------------------------

POINTWISE = {
    "kl_div": ("input", "target", "size_average", "reduce", "reduction", "log_target"),
    "mse_loss": ("input", "target", "size_average", "reduce", "reduction", "weight"),
    "l1_loss": ("input", "target", "size_average", "reduce", "reduction", "weight"),
    "smooth_l1_loss": ("input", "target", "size_average", "reduce", "reduction", "beta"),
    "huber_loss": ("input", "target", "reduction", "delta", "weight"),
    "binary_cross_entropy_with_logits": (
        "input", "target", "weight", "size_average", "reduce", "reduction", "pos_weight"
    ),
}  # fmt: skip


@_fallback(*POINTWISE)
def _pointwise_loss(x: Any, call: Call) -> Any:
    function, name = call.function, call.function.__name__
    args = {k: v for k, v in arguments(POINTWISE[name], _arguments(x, call), call.kwargs).items() if v is not None}
    reduction = args.pop("reduction", "mean")
    shapes = [getattr(args.get(k), "shape", None) for k in ("input", "target")]
    if shapes != [x.shape] * 2 or {"size_average", "reduce"} & args.keys() or x.ndim < 2:  # a chunk has 2 dimensions
        return NotImplemented
    if reduction not in ("none", "sum", "mean", *(("batchmean",) if name == "kl_div" else ())):
        return NotImplemented
    terms = recorded(lambda a: function(**a, reduction="none"), args, operation=name)
    if terms is NotImplemented or reduction == "none":
        return terms
    total = terms.mean() if reduction == "mean" else terms.sum()
    return total / x.shape[0] if reduction == "batchmean" else total


@_fallback("cross_entropy")
def _soft_cross_entropy(x: Any, call: Call) -> Any:
    """Cross-entropy with probabilities, or with ids and label smoothing or weights of the classes."""
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    args = {k: v for k, v in arguments(names, call.args, call.kwargs).items() if v is not None}
    target, weight, reduction = args.get("target"), args.get("weight"), args.get("reduction", "mean")
    if (
        not isinstance(target, Tensor)
        or reduction not in ("none", "sum", "mean")
        or {"size_average", "reduce"} & set(args)
    ):
        return NotImplemented
    smoothing, ignored = args.get("label_smoothing", 0.0), args.get("ignore_index", -100)
    if x.ndim > 2:
        x = x.movedim(1, -1)
    soft = target.is_floating_point()
    target = (target.movedim(1, -1) if target.dim() > 2 else target) if soft else target.unsqueeze(-1)
    if target.shape != (x.shape if soft else (*x.shape[:-1], 1)):
        return NotImplemented

    def each(z: Tensor, y: Tensor, w: Tensor | None) -> Tensor:
        z, y = z.reshape(-1, z.shape[-1]), y.reshape(-1, y.shape[-1])
        options = {"reduction": "none", "ignore_index": ignored, "label_smoothing": smoothing}
        return F.cross_entropy(z, y if soft else y[:, 0], w, **options)

    def of_rows(z: Tensor, y: Tensor, w: Tensor | None) -> Tensor:
        return each(z, y, w).view(z.shape[:-1])

    rows = recorded(of_rows, x, target, weight, operation="cross_entropy", reduces=True)
    if rows is NotImplemented or reduction == "none":
        return rows
    if reduction == "sum" or soft:
        return rows.sum() if reduction == "sum" else rows.mean()
    ids = target.squeeze(-1)
    counted = ids != ignored
    if weight is None:
        return rows.sum() / counted.sum()
    return rows.sum() / torch.where(counted, weight.detach()[ids.where(counted, 0)], 0.0).sum()


# Moves of rows --------------------------------------------------------------------------------------------------------


def _move_rule(name: str) -> Rule:
    def move(p: Term, call: Call) -> Any:
        row_move, known = None, p.expression is not None or p.kind is not None
        if known and not any(isinstance(a, DeferredTensor) for a in call.args):
            row_move = MOVES[name](p.shape, p.logits.axis, call)
        if row_move is None:
            return _without_classes(p, call)
        x = p.logits.moved(row_move, row_move.apply, call.args[0] if name == "__getitem__" else None)
        after = meta_after(call.on, p)
        if x is p.logits or (after is not None and after[0] is p.meta):
            return p
        if not isinstance(x, DeferredLogits):
            return NotImplemented
        keys, expression = (p.logits.product_key, x.product_key), None
        if p.expression is not None and x.axis == x.ndim - 1:
            expression = moved(p.expression, row_move.apply, p.shape[:-1], keys, {})
        if expression is None and p.kind is None:
            return NotImplemented
        shape = *x.shape[: x.axis], p.shape[p.logits.axis], *x.shape[x.axis + 1 :]
        meta = torch.empty(shape, dtype=p.dtype, device="meta") if after is None else after[0]
        with torch.set_grad_enabled(p.needs_grad and torch.is_grad_enabled()):
            return Term.create(
                meta, x.tapped(), Step(call.on, x.restored, [p]), needs=x.needs, logits=x, operation=p.operation,
                kind=p.kind, factor=p.factor, expression=expression,
            )  # fmt: skip

    return move


def _without_classes(p: Term, call: Call) -> Any:
    """Remove the dimension of the classes, which has one element."""
    if p.shape[-1] != 1:
        return NotImplemented
    after = meta_after(call.on, p)
    if after is None or not after[1] or after[0].numel() != p.numel():
        return NotImplemented
    rows = recorded(lambda z: z.squeeze(-1), p, operation=p.operation, reduces=True)
    shape = tuple(after[0].shape)
    return rows if rows is NotImplemented or rows.shape == shape else rows.reshape(shape)


for _name in MOVES:
    Term.rules.setdefault(_name, _move_rule(_name))
