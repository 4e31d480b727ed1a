"""Rules of logits that select classes, or change classes or rows to constants.

The "subs" parametrisation of MDLM sets the logit of MASK to -inf, subtracts the logsumexp, and then sets the rows of
tokens that are not masked to the log-probabilities of their tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dllm_kernels._graph._plain import any_dtensor, has_values, holds, readable_without_sync
from dllm_kernels.deferred._graph import Recipe, Step
from dllm_kernels.deferred._logits import RULES, DeferredLogits, move_rule, rule
from dllm_kernels.deferred._moves import Call
from dllm_kernels.deferred._nll_rules import LIKE
from dllm_kernels.deferred._record import ClassBias, Overwritten, logits_at
from dllm_kernels.deferred._tensor import DeferredTensor, arguments, meta_after, where_arguments
from dllm_kernels.rows._dtypes import accum_dtype

Tensor = torch.Tensor
# The exponential of a number below -745 is 0 in float64, below -104 in float32; the rest is for rounded logits.
LOW = -2000.0
NOTHING = -1e8  # a number that is this low does not change when a logit is added to it
by_index, by_narrow = move_rule("__getitem__"), move_rule("narrow")


def _plain_classes(x: DeferredLogits) -> bool:
    return x.axis == x.ndim - 1 and x.overwritten is None


def _class_item(x: DeferredLogits, index: Any) -> Any:
    """Return the item of an index that applies to the classes, if all others take all rows; otherwise None."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(item is not Ellipsis and not isinstance(item, int | slice) for item in items):
        return None
    if Ellipsis in items:
        place = items.index(Ellipsis)
        items[place : place + 1] = [slice(None)] * (x.ndim - len(items) + 1)
    *rows, item = items
    if len(items) != x.ndim or any(row != slice(None) for row in rows) or isinstance(item, bool):
        return None
    return item


def _class_of(x: DeferredLogits, index: Any) -> int | None:
    """Return the class that an index selects in all rows; None for any other index."""
    item, V = _class_item(x, index), x.shape[-1]
    if isinstance(item, int):
        return item % V if -V <= item < V else None
    chosen = range(V)[item] if isinstance(item, slice) else ()
    return chosen[0] if len(chosen) == 1 else None


# Selected and skipped classes -----------------------------------------------------------------------------------------


class DeferredColumn(DeferredTensor):
    """Logits of one class: a view of deferred logits, or a copy of one.

    Attributes:
        logits: the logits.
        class_id: the class; -1 for a copy.
    """

    logits: DeferredLogits
    class_id: int

    def after(self, sources: Sequence[Any], step: Any) -> Any:
        """Return a copy, which shares no memory with the logits."""
        recipe = Step(step, self.logits.restored, sources)
        return self.create(step(self.meta), self.tapped(), recipe, needs=self.needs, logits=self.logits, class_id=-1)


@rule("__getitem__")
def _selected(x: DeferredLogits, call: Call) -> Any:
    """Move rows, or select classes."""
    moved = by_index(x, call)
    if moved is not NotImplemented or not _plain_classes(x):
        return moved
    index = call.args[0]
    item = _class_item(x, index)
    if isinstance(item, slice):
        return _sliced(x, call, item)
    if isinstance(index, tuple) and len(index) == x.ndim and all(map(_is_ids, index)):
        return _chosen_classes(x, call, index)
    class_id = _class_of(x, index)
    if class_id is None:
        return NotImplemented
    meta, _ = meta_after(call.on, x)  # type: ignore[misc]
    recipe = Step(call.on, x.restored, [x])
    return DeferredColumn.create(meta, x.tapped(), recipe, needs=x.needs, logits=x, class_id=class_id)


def _is_ids(item: Any) -> bool:
    return type(item) is Tensor and item.dtype == torch.int64


def _chosen_classes(x: DeferredLogits, call: Call, index: Sequence[Tensor]) -> Any:
    """Select one class of each of some rows, by tensors of indices."""
    *rows, ids = torch.broadcast_tensors(*index)  # type: ignore[no-untyped-call]
    chosen = by_index(x, Call(call.function, (tuple(rows),), {})) if rows else x
    V = x.shape[-1]
    ids = ids.where((ids >= 0) | (ids < -V), ids + V).unsqueeze(-1)
    result = NotImplemented if chosen is NotImplemented else RULES["gather"](chosen, Call(torch.gather, (-1, ids), {}))
    return result if result is NotImplemented else result.squeeze(-1)


def _sliced(x: DeferredLogits, call: Call, item: slice) -> Any:
    """Take the rows of the head that belong to a slice of the classes."""
    V = x.shape[-1]
    chosen = range(V)[item]
    h, u, *parameters = x.tapped()
    if x.log_probs or x.shift.best or not len(chosen) or any_dtensor(h, *parameters):
        return NotImplemented
    head_classes = (range(x.split_head.out_features) if x.columns is None else x.columns)[item]
    sliced = (t if t is None else t[item] for t in parameters)
    changes: dict[str, Any] = {"columns": head_classes}
    if x.class_bias is not None:
        changes["class_bias"] = x.class_bias.sliced(item)
    if x.skip is not None:
        changes["skip"] = chosen.index(x.skip) if x.skip in chosen else None
    meta, _ = meta_after(call.on, x)  # type: ignore[misc]
    return x.after([x], call.on, (h, u, *sliced), meta=meta, **changes)


@rule("narrow")
def _narrowed(x: DeferredLogits, call: Call) -> Any:
    moved = by_narrow(x, call)
    dim, start, length = (call.argument(name, i) for i, name in enumerate(("dim", "start", "length")))
    if moved is not NotImplemented or not _plain_classes(x) or dim not in (-1, x.axis) or isinstance(start, Tensor):
        return moved
    start %= x.shape[-1]
    return _sliced(x, call, slice(start, start + length))


def _skipping(x: DeferredLogits, k: int | None, value: Any, adds: bool = False) -> dict[str, Any] | None:
    """Return the changes of logits whose class ``k`` gets a value, or to which it is added; None if not recorded."""
    usable = _plain_classes(x) and not x.log_probs and x.fusible and not x.shift.best
    if k is None or not usable or x.skip not in (None, k) or isinstance(value, bool) or x.shape[-1] < 2:
        return None
    if not isinstance(value, int | float) or not (value == -math.inf or _is_low(x, k, value, adds)):
        return None
    return {"skip": k, "skip_finite": value != -math.inf}


def _filling(x: DeferredLogits, classes: Tensor | None, value: Any) -> dict[str, Any] | None:
    """Return the changes of logits whose classes, a mask ``[V]``, get a value; None if not recorded."""
    if classes is None or not x.fusible or x.cap is not None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    low = value == -math.inf or (value <= NOTHING and x.hidden.dtype != torch.float16)
    if not low or x.shift.best or any_dtensor(*x.parts):
        return None
    before = x.class_bias
    fill = torch.where(classes, float(value), 0.0).to(accum_dtype(x.hidden.dtype))
    filled = classes if before is None or before.filled is None else before.filled | classes
    if readable_without_sync(filled) and bool(filled.all()):  # no class is left that the others are low beside
        return None
    values = fill if before is None else torch.where(classes, fill, before.values)
    infinite = value == -math.inf or (before is not None and before.infinite)
    return {"class_bias": ClassBias(values, filled, infinite)}


def _is_low(x: DeferredLogits, k: int, value: float, adds: bool) -> bool:
    """Return True if the probability of the class will be 0 in all rows, because it is far below that of another.

    On a GPU this is a host sync.
    """
    if not value < LOW or x.skip is not None:
        return False
    with torch.no_grad(), x.restored():
        record = x.rows()
        if any_dtensor(record.hidden, record.weight):
            return False
        columns = torch.full((2,), int(k == 0), device=x.device)
        columns[0] = k
        z = logits_at(record, columns)
    new = z[..., 0] + value if adds else value
    return holds((new - z[..., 1] < LOW + z.abs().amax(-1) * -0.1).all())


@rule("__setitem__")
def _assigned(x: DeferredLogits, call: Call) -> Any:
    index, value = call.args
    if isinstance(value, DeferredColumn):  # of ``z[..., k] += c``
        same = value.logits is x and value.class_id == _class_of(x, index)
        return None if same else NotImplemented
    if x.log_probs:
        return _overwrite(x, index, value)
    changes = _skipping(x, _class_of(x, index), value) or _filling(x, _mask_of(x, index), value)
    if changes is None:
        return NotImplemented
    changed = x.change(lambda z: _put(z, index, value), **changes)
    return changed if changed is NotImplemented else None


def _put(z: Tensor, index: Any, value: Any) -> Tensor:
    z = z.clone()
    z[index] = value
    return z


def _column_added(column: DeferredColumn, call: Call) -> Any:
    """Add a number to the logits of a class in place."""
    x, k = column.logits, column.class_id
    value = call.args[0] if len(call.args) == 1 and not call.kwargs else None
    if not isinstance(value, int | float) or k < 0:
        return NotImplemented
    value = -value if "sub" in call.function.__name__ else value
    changes = _skipping(x, k, value, adds=True)

    def step(z: Tensor) -> Tensor:
        z = z.clone()
        z[..., k] += value
        return z

    if changes is None or x.change(step, column, **changes) is NotImplemented:
        return NotImplemented
    return column


DeferredColumn.rules = {"add_": _column_added, "sub_": _column_added}


def _mask_of(x: DeferredLogits, index: Any) -> Tensor | None:
    """Return a mask ``[V]`` of the classes that an index selects in all rows; None for any other index."""
    if not _plain_classes(x):
        return None
    items = list(index) if isinstance(index, tuple) else [index]
    *rows, item = items
    place = slice(None) if isinstance(item, Tensor | list) else item
    if _class_item(x, (*rows, place)) is None:
        return None
    if isinstance(item, Tensor) and (item.dim() != 1 or item.dtype not in (torch.int64, torch.bool)):
        return None
    if isinstance(item, list) and not all(type(i) is int for i in item):
        return None
    mask = torch.zeros(x.shape[-1], dtype=torch.bool, device=x.device)
    mask[item] = True
    return mask


def _of_classes(x: DeferredLogits, mask: Any) -> Tensor | None:
    """Return a mask that selects classes in all rows as ``[V]``; None for any other mask."""
    if not isinstance(mask, Tensor) or isinstance(mask, DeferredTensor) or mask.dtype != torch.bool:
        return None
    if mask.numel() != x.shape[-1] or mask.dim() > x.ndim or not mask.dim() or mask.shape[-1] != mask.numel():
        return None
    return mask.flatten().clone()


def _filled_with(x: DeferredLogits, call: Call, mask: Any, value: Any) -> Any:
    """Set the classes of a mask to a value. On a GPU, reading the mask is a host sync."""
    if x.log_probs:
        return _filled_rows(x, call, mask, value)
    if isinstance(value, ConstantRows) and value.ids is None and value.dtype == x.dtype:
        value = value.fill
    elif type(value) is Tensor and value.dim() == 0 and not value.requires_grad and readable_without_sync(value):
        value = value.item()
    classes = _of_classes(x, mask) if _plain_classes(x) else None
    chosen = classes.nonzero().flatten().tolist() if classes is not None and has_values(classes) else []
    changes = (_skipping(x, chosen[0], value) if len(chosen) == 1 else None) or _filling(x, classes, value)
    if changes is None:
        return NotImplemented
    mask = mask.clone()

    def step(z: Tensor) -> Tensor:
        return z.masked_fill(mask, value)

    return x.change(step, **changes) if call.function.__name__[-1] == "_" else x.elementwise(step, **changes)


@rule("masked_fill", "masked_fill_")
def _filled(x: DeferredLogits, call: Call) -> Any:
    args = arguments(("mask", "value"), call.args, call.kwargs)
    return _filled_with(x, call, args.get("mask"), args.get("value"))


@rule("where")
def _chosen(x: DeferredLogits, call: Call) -> Any:
    args = where_arguments(call)
    first, second, keep = (args.get(name) for name in ("input", "other", "condition"))
    if not isinstance(keep, Tensor) or isinstance(keep, DeferredTensor) or keep.dtype != torch.bool:
        return NotImplemented
    if not isinstance(x, DeferredLogits):
        x = second if first is x else first  # type: ignore[unreachable]
    if not isinstance(x, DeferredLogits):
        return NotImplemented
    return _filled_with(x, call, *((~keep, second) if first is x else (keep, first)))


# Log-probabilities ----------------------------------------------------------------------------------------------------


class ConstantRows(DeferredTensor):
    """Logits that are a number, but for one class per row.

    Attributes:
        fill: the number.
        ids: classes with another value, one per row, or None.
        value: their value.
    """

    fill: float
    ids: Tensor | None
    value: float

    @classmethod
    def of(cls, x: Any, fill: float, dtype: torch.dtype, ids: Tensor | None = None, value: float = 0.0) -> Any:
        """Return a tensor of the shape of ``x``."""
        shape, device = x.shape, x.device

        def values(_: Any) -> Tensor:
            t = torch.full(shape, fill, dtype=dtype, device=device)
            return t if ids is None else t.scatter_(-1, ids.unsqueeze(-1), value)

        with torch.no_grad():
            recipe = Recipe(values, lambda: torch.autocast(device.type, enabled=False), [False])
            meta, parts = torch.empty(shape, dtype=dtype, device="meta"), [torch.empty(0, device=device)]
            return cls.create(meta, parts, recipe, needs=recipe.needs, fill=fill, ids=ids, value=value)

    def after(self, sources: Sequence[Any], step: Any) -> Any:
        """Return a copy."""
        return step(self.materialize())


@rule(*LIKE)
def _new_like(x: DeferredLogits, call: Call) -> Any:
    """Return a new tensor; a constant stays deferred, because it may become rows of log-probabilities."""
    first = call.args[0] if len(call.args) == 1 else None
    fill = {"zeros_like": 0.0, "ones_like": 1.0, "full_like": first}.get(call.function.__name__)
    if x.axis != x.ndim - 1 or call.kwargs or not isinstance(fill, int | float):
        return call.function(x.meta, *call.args, **{"device": x.device, **call.kwargs})
    return ConstantRows.of(x, float(fill), x.dtype)


def _scattered(x: ConstantRows, call: Call) -> Any:
    """Set one class per row."""
    named = {"value" if name == "src" else name: value for name, value in call.kwargs.items()}
    args = arguments(("dim", "index", "value"), call.args, named)
    ids, value = args.get("index"), args.get("value")
    if x.ids is not None or not _is_ids(ids) or isinstance(value, bool) or not isinstance(value, int | float):
        return NotImplemented
    if args.get("dim") not in (-1, x.ndim - 1) or ids.shape != (*x.shape[:-1], 1):  # type: ignore[union-attr]
        return NotImplemented
    return ConstantRows.of(x, x.fill, x.dtype, ids.squeeze(-1).clone(), float(value))  # type: ignore[union-attr]


ConstantRows.rules = {"scatter": _scattered, "where": _chosen}


def _filled_rows(x: DeferredLogits, call: Call, mask: Any, value: Any) -> Any:
    """Set the log-probabilities of the rows of a mask ``[..., 1]``."""
    constant = isinstance(value, ConstantRows) and value.shape == x.shape and value.dtype == x.dtype
    if not constant and (isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value)):
        return NotImplemented
    plain = isinstance(mask, Tensor) and not isinstance(mask, DeferredTensor) and mask.dtype == torch.bool
    if not _plain_classes(x) or not plain or mask.shape != (*x.shape[:-1], 1):
        return NotImplemented
    fill, ids, other = (value.fill, value.ids, value.value) if constant else (float(value), None, 0.0)
    mask = mask.squeeze(-1).clone()
    overwritten = Overwritten(mask, (mask, 0), fill, ids, other)

    def step(z: Tensor) -> Tensor:
        z = z.masked_fill(mask.unsqueeze(-1), fill)
        if ids is None:
            return z
        return torch.where(mask.unsqueeze(-1), z.scatter(-1, ids.unsqueeze(-1), other), z)

    changes: dict[str, Any] = {"overwritten": overwritten}
    return x.change(step, **changes) if call.function.__name__[-1] == "_" else x.elementwise(step, **changes)


def _overwrite(x: DeferredLogits, index: Any, value: Any) -> Any:
    """Set rows of log-probabilities to a number, or one class of each of these rows."""
    if x.axis != x.ndim - 1 or isinstance(value, bool) or not isinstance(value, int | float):
        return NotImplemented
    mask, ids = index if isinstance(index, tuple) and len(index) == 2 else (index, None)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != x.shape[:-1] or math.isnan(value):
        return NotImplemented
    if mask.is_inference():  # has no version
        return NotImplemented
    before = x.overwritten
    if ids is None:
        if before is not None:
            return NotImplemented
        overwritten = Overwritten(mask.clone(), (mask, mask._version), float(value))
    else:
        whole = isinstance(ids, Tensor) and ids.dim() == 1 and ids.dtype == torch.int64
        if before is None or before.ids is not None or not whole:
            return NotImplemented
        if before.seen[0] is not mask or before.seen[1] != mask._version:
            return NotImplemented
        if not _in_range(ids, mask, x.shape[-1]):
            return NotImplemented
        every = torch.zeros(mask.shape, dtype=torch.int64, device=ids.device).masked_scatter(mask, ids)
        overwritten = before._replace(ids=every, value=float(value))
    index = (mask.clone(), ids.clone()) if ids is not None else mask.clone()
    changed = x.change(lambda z: _put(z, index, value), overwritten=overwritten)
    return changed if changed is NotImplemented else None


def _in_range(ids: Tensor, mask: Tensor, V: int) -> bool:
    """Return True if the ids are classes, one per row of the mask, as far as that is known without a sync."""
    if not readable_without_sync(ids):
        return True
    return len(ids) == int(mask.sum()) and not bool(((ids < 0) | (ids >= V)).any())
