"""Moves of whole rows: operations of logits that can be applied to hidden states instead.

Each function takes the shape of the logits, the dimension of their classes and the call, and returns the operation for
rows ``[..., D, ...]`` that have another size in that dimension, with the new dimension of the classes. It returns None
if the operation splits, selects or combines classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor


class Move(NamedTuple):
    """An operation on rows: ``apply(rows)`` is a tensor, or a tuple of tensors; ``axis`` is their class dimension."""

    apply: Callable[[Tensor], Any]
    axis: int


class Call(NamedTuple):
    """A call of a function of torch, whose first argument is the tensor."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, tensor: Any) -> Any:
        """Call the function for another tensor."""
        return self.function(tensor, *self.args, **self.kwargs)

    def argument(self, name: str, place: int, default: Any = None) -> Any:
        """Return an argument by name or by its place after the tensor."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


def reshaped(shape: Sequence[int], axis: int, call: Call) -> Move | None:
    """Move by a change of shape: view, reshape, flatten, unflatten, squeeze, unsqueeze."""
    if any(isinstance(value, torch.dtype) for value in (*call.args, *call.kwargs.values())):
        return None
    out = call.on(torch.empty(shape, device="meta"))
    new, V = tuple(out.shape), shape[axis]
    before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    places = [
        i for i, n in enumerate(new) if n == V and math.prod(new[:i]) == before and math.prod(new[i + 1 :]) == after
    ]
    if not places:
        return None
    place = places[-1]
    return Move(lambda t: t.reshape(*new[:place], t.shape[axis], *new[place + 1 :]), place)


def permuted(shape: Sequence[int], axis: int, call: Call) -> Move | None:
    """Move by an order of dimensions: transpose, permute, movedim."""
    marked = torch.empty(tuple(range(2, 2 + len(shape))), device="meta")
    return Move(call.on, call.on(marked).shape.index(axis + 2))


def expanded(shape: Sequence[int], axis: int, call: Call) -> Move | None:
    """Move by repeating rows: expand."""
    sizes = call.args[0] if call.args and not isinstance(call.args[0], int) else call.args or call.kwargs.get("size")
    if sizes is None:
        return None
    place = axis + len(sizes) - len(shape)
    if sizes[place] not in (-1, shape[axis]):
        return None
    return Move(lambda t: call.function(t, (*sizes[:place], -1, *sizes[place + 1 :])), place)


def copied(shape: Sequence[int], axis: int, call: Call) -> Move | None:
    """Move by a copy: contiguous, clone."""
    return Move(call.on, axis)


def dims_of(dim: Any, ndim: int) -> list[int] | None:
    """Return the dimensions of a reduction, in order; None for those that torch refuses, or knows of a scalar."""
    dims = list(range(ndim)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    known = {d % ndim for d in dims if -ndim <= d < ndim}
    return sorted(known) if len(known) == len(dims) else None


def along(name: str, place: int, default: Any = 0, removes: bool = False) -> Callable[..., Move | None]:
    """Return the move of an operation along the dimension that the argument ``name`` names."""

    def move(shape: Sequence[int], axis: int, call: Call) -> Move | None:
        value = call.argument(name, place, default)
        if value is None:  # roll without dims
            return None
        dims = [d % len(shape) for d in ([value] if isinstance(value, int) else value)]
        return None if axis in dims else Move(call.on, axis - removes * sum(d < axis for d in dims))

    return move


def indexed(shape: Sequence[int], axis: int, call: Call) -> Move | None:
    """Move by an index over dimensions other than the class dimension."""
    items = list(call.args[0]) if isinstance(call.args[0], tuple) else [call.args[0]]
    missing = len(shape) - sum(map(_consumed, items))
    if missing < 0:
        return None  # too many indices: the error is that of the logits
    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)
    place = next(i for i, item in enumerate(items) if item is Ellipsis)
    items[place : place + 1] = [slice(None)] * missing
    first = [sum(map(_consumed, items[:i])) for i in range(len(items))]  # dimension at which each item begins
    class_index = next(i for i, item in enumerate(items) if first[i] <= axis < first[i] + _consumed(item))
    item, before, after = items[class_index], items[:class_index], items[class_index + 1 :]
    if not isinstance(item, slice) or range(shape[axis])[item] != range(shape[axis]):
        return None
    # Dimensions behind the class dimension keep their places, unless tensors index on both sides of it.
    if any(map(_is_advanced, after)) or (any(map(_is_advanced, before)) and any(isinstance(i, int) for i in after)):
        return None
    index = (*before, slice(None), *after)
    return Move(lambda t: call.function(t, index), -1 - sum(not isinstance(i, int) for i in after))


def _is_advanced(item: Any) -> bool:
    """Return True for a tensor, list or array in an index."""
    return not (item is None or isinstance(item, slice | int)) or isinstance(item, bool)


def _consumed(item: Any) -> int:
    """Return the number of dimensions that an item of an index consumes."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, Tensor):
        return item.dim() if item.dtype in (torch.bool, torch.uint8) else 1
    dtype = getattr(item, "dtype", None)
    return item.ndim if dtype is not None and str(dtype) == "bool" else 1


MOVES: dict[str, Callable[..., Move | None]] = {
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel"), reshaped),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "T", "mT"), permuted),
    **dict.fromkeys(("contiguous", "clone"), copied),
    "expand": expanded,
    "__getitem__": indexed,
    "split": along("dim", 1), "chunk": along("dim", 1), "tensor_split": along("dim", 1),
    "split_with_sizes": along("dim", 1), "unbind": along("dim", 0, removes=True),
    "index_select": along("dim", 0), "narrow": along("dim", 0), "select": along("dim", 0, removes=True),
    "roll": along("dims", 1, None),
}  # fmt: skip
