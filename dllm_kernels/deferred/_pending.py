"""Statistics of rows that stay pending until one of them is needed; one pass then computes all of them.

``logsumexp``, ``gather`` and the entropy of logits, and the NLL of rows, are members of the list ``pending`` that all
logits of one head call share. The value of a member is needed if an operation without a rule uses it. All others that
are from the same rows are then computed with it by ``linear_row_stats``, which also has one backward pass for all.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dllm_kernels import ops
from dllm_kernels._checks import is_freed
from dllm_kernels._graph._own_graph import own_graph
from dllm_kernels._graph._plain import readable_without_sync
from dllm_kernels._graph._private import plainly
from dllm_kernels.deferred._graph import Recipe, Step
from dllm_kernels.deferred._moves import Call
from dllm_kernels.deferred._record import Stats, class_sum
from dllm_kernels.deferred._tensor import DeferredTensor, meta_after
from dllm_kernels.ops.row_stats import row_stats_of_best
from dllm_kernels.rows._interface import IGNORE

Tensor = torch.Tensor


class NeededStats(NamedTuple):
    """Statistics that a member needs, and how its values are computed from them.

    Attributes:
        finish: returns the member's values.
        ids: classes ``[..., K]`` whose log-probabilities are needed, -100 for none; or None.
        entropy: True if the entropy is needed.
        best: True if the argmax and its log-probability are needed.
        total: True if the sum over the classes is needed.
    """

    finish: Callable[[Stats], Tensor]
    ids: Tensor | None = None
    entropy: bool = False
    best: bool = False
    total: bool = False


def row_stats(logits: Any, parts: Any, needed: Sequence[NeededStats], argmax: bool = False) -> Stats:
    """Compute statistics of rows ``parts``, with the classes as the last dimension, and all ids in one tensor."""
    record = logits.rows_of(parts)
    rows = record.hidden.shape[:-1]
    groups = [a.ids.reshape(*rows, a.ids.shape[-1]) for a in needed if a.ids is not None]
    ids = torch.cat(groups, -1) if groups else record.hidden.new_full((*rows, 1), IGNORE, dtype=torch.int64)
    checks = readable_without_sync(ids) or None  # as torch checks them
    entropy, best, total = (any(getattr(a, name) for a in needed) for name in ("entropy", "best", "total"))
    if best:
        out = row_stats_of_best(record, ids, entropy=entropy, check_targets=checks)
        log_probs, log_best = out.log_probs[..., :-1], out.log_probs[..., -1]
    else:
        out = ops.row_stats(record, ids, entropy=entropy, with_ids=argmax, check_targets=checks)
        log_probs, log_best = out.log_probs, None
    return Stats(log_probs, out.lse, out.entropy, log_best, out.ids, class_sum(record) if total else None)


def rows_key(parts: Any, logits: Any) -> tuple[Any, ...]:
    """Return a key: equal for parts of the same rows in the same order, if their logits have the same transform."""
    return *product_key(parts, logits), *logits.transform_key


def product_key(parts: Any, logits: Any) -> tuple[Any, ...]:
    """Return a key: equal for parts of the same rows in the same order, with the same head."""
    h, u = parts[:2]
    plain = h.is_contiguous() and (u is None or u.is_contiguous())
    layout = h.shape[:-1].numel() if plain else (h.shape, h.stride())
    pointers = h.data_ptr(), h.dtype, None if u is None else u.data_ptr()
    return *pointers, layout, logits.columns, logits.bias_factor, logits.class_bias


def add_alive(refs: list[Any], tensor: Any) -> None:
    """Add a weak reference to a list of references, and remove those whose tensors no longer exist."""
    refs[:] = [ref for ref in refs if ref() is not None]
    refs.append(weakref.ref(tensor))


class Pending(DeferredTensor):
    """Base class of members; a derived class has :meth:`needed_stats`.

    Attributes:
        logits: a copy of the attributes of the logits that the rows are from.
        graph_parts: the parts in the graph that this tensor is computed from; None for a view or a copy.
    """

    logits: Any
    graph_parts: Any

    def filled(self) -> tuple[Tensor | None, ...]:
        """Return the parts with the values of freed ones; the parts of a view or a copy have their values."""
        return self.parts if self.sources else self.logits.filled_parts(self.parts)

    def needed_stats(self) -> NeededStats:
        """Return what this member needs."""
        raise NotImplementedError

    def join(self) -> None:
        """Enter the list of the head call."""
        add_alive(self.logits.pending, self)

    def leave(self) -> None:
        """Leave the lists: the values are not needed."""
        for members in (self.logits.pending, self.logits.sums):
            members[:] = [ref for ref in members if ref() is not self]

    @property
    def _rows_key(self) -> tuple[Any, ...]:
        """Equal for members of the same rows, in the same order."""
        return *rows_key(self.parts, self.logits), tuple(self.needs)

    def members(self) -> list[Pending]:
        """Return this member and all others of the same rows.

        The first is of logits that are still alive, if there are any, because hooks on these must see the whole
        gradient.
        """
        key, owner, members = self._rows_key, self.logits.owner(), [self]
        for other in (ref() for ref in self.logits.pending):
            if other is None or other is self or not other.open or other._rows_key != key:
                continue
            other_owner = other.logits.owner()
            if other_owner is None or other_owner is owner:
                members.append(other)
            elif owner is None:
                owner = other_owner
                members.insert(0, other)
        return members

    def together(self) -> list[Pending]:
        """Return the members that are computed with this one, which are at least one statistic; otherwise nothing."""
        members = self.members()
        return members if any(isinstance(member, DeferredStat) for member in members) else []

    @property
    def open(self) -> bool:
        """True if the values may be computed with others in one pass."""
        known = self.needs_grad and self.deferred and not self._recomputed and not self._checkpointed
        return known and not self.watched and not any(map(is_freed, self.parts))  # freed by sharding in the meantime

    def materialize(self, use: str = "materialize") -> Tensor:
        """Return the values, computed in one pass with the values of other pending members."""
        if self.open and (members := self.together()):
            compute(members)
        return super().materialize(use)

    def receive(self, value: Tensor) -> None:
        """Set the values, whose graph does not contain this tensor."""
        with plainly():
            self._value, self._node = self._laid_out(value), self.grad_fn
            self._linked = self._value.grad_fn


def argmax_of(x: Any) -> Any:
    """Compute the argmax with the members of the same rows; None if there are none."""
    parts: Any = [t if t is None else t.movedim(x.axis, -1) for t in x.parts[:2]]
    for member in (ref() for ref in x.pending):
        if member is not None and member.open and member._rows_key[:-1] == rows_key(parts, x):
            return compute(member.members(), argmax=True).view(parts[0].shape[:-1])
    return None


def compute(members: Sequence[Pending], argmax: bool = False) -> Any:
    """Compute members of the same rows in one pass, in the graph of the first; return the argmax if requested."""
    first = members[0]
    needed = [member.needed_stats() for member in members]
    with torch.inference_mode(False), torch.enable_grad(), own_graph(), first.logits.restored():
        out = row_stats(first.logits, first.graph_parts, needed, argmax)
        start = 0
        for member, a in zip(members, needed, strict=True):
            shape, log_probs = member.parts[0].shape[:-1], None  # type: ignore[union-attr]
            if a.ids is not None:
                count = a.ids.shape[-1]
                log_probs = out.log_probs[..., start : start + count].reshape(*shape, count)
                start += count
            rest = [None if t is None else t.reshape(shape) for t in out[1:]]
            member.receive(a.finish(Stats(log_probs, *rest)))  # type: ignore[arg-type]
        return out.ids


class DeferredStat(Pending):
    """Logsumexp, chosen logits or log-probabilities, or entropy of rows.

    Parts: those of the logits, with the classes as the last dimension.

    Attributes:
        logits_recipe: recipe of the logits; None after a change other than a new dimension in place of the classes.
        axis: dimension of size 1 in place of the classes, or None.
        request: what is needed; None for a view or a copy of another one.
        kind: what it is: "lse", "sum of exp", "max", "picked", "entropy", ...
    """

    logits_recipe: Any
    axis: int | None
    request: NeededStats | None
    kind: str

    @classmethod
    def from_logits(cls, x: Any, kind: str, request: NeededStats, meta: Tensor, axis: int | None = None) -> Any:
        """Return a statistic of logits; without a graph, its values, because the head may change."""
        x.check_unchanged()
        parts, logits = x.classes_last(), x.copied()
        needs = [n and t is not None and t.requires_grad for t, n in zip(parts, x.needs, strict=True)]

        def values(parts: Any) -> Tensor:
            return request.finish(row_stats(logits, parts, [request]))

        recipe = Recipe(values, logits.restored, needs)  # does not refer to x, which it would keep alive
        stat = cls.create(
            meta, parts, recipe, needs=needs, logits=logits, logits_recipe=x._recipe, axis=axis, request=request,
            kind=kind, graph_parts=parts,
        )  # fmt: skip
        if stat.requires_grad:
            stat.join()
            return stat
        result = stat.materialize()
        if kind == "lse" and not result.is_inference():
            x._recipe.lse = weakref.ref(result), result._version
        return result

    def know(self, values: Tensor) -> None:
        """Set the values, which were computed without a graph; a backward pass computes them again."""
        self.leave()
        self._dense = self._laid_out(values)

    def needed_stats(self) -> NeededStats:
        """Return what this statistic needs."""
        assert self.request is not None
        return self.request

    @property
    def open(self) -> bool:
        """True if the values may be computed with others in one pass."""
        return self.request is not None and super().open

    def dense(self, use: str = "backward") -> Tensor:
        """Return the values without a graph."""
        if self._value is None and self._dense is None and self.open:
            self.materialize(use)
        return super().dense(use)

    def like(self, kind: str, request: NeededStats, recipe: Step, dtype: torch.dtype) -> Any:
        """Return another statistic of the same rows, of the same shape."""
        parts, meta = self.tapped(), torch.empty_like(self.meta, dtype=dtype)
        stat = self.create(
            meta, parts, recipe, needs=self.needs, logits=self.logits, logits_recipe=self.logits_recipe, axis=self.axis,
            request=request, kind=kind, graph_parts=parts,
        )  # fmt: skip
        stat.join()
        return stat

    def after(self, sources: Sequence[Any], step: Callable[..., Tensor], axis: int | None = None) -> Any:
        """Return a view or a copy."""
        recipe, (meta, _) = Step(step, self.logits.restored, sources), meta_after(step, self)  # type: ignore[misc]
        logits_recipe = None if axis is None else self.logits_recipe
        return self.create(
            meta, self.tapped(), recipe, needs=self.needs, logits=self.logits, logits_recipe=logits_recipe, axis=axis,
            request=None, kind=self.kind, graph_parts=None,
        )  # fmt: skip


def is_stat_of(value: Any, x: Any, kind: str) -> bool:
    """Return True for a statistic of these logits, with a dimension in the place of the classes."""
    known = isinstance(value, DeferredStat) and value.kind == kind
    return known and value.logits_recipe is x._recipe and value.axis == x.axis


def is_lse_of(value: Any, x: Any) -> bool:
    """Return True for the logsumexp of these logits, with a dimension in the place of the classes."""
    if isinstance(value, DeferredStat):
        return is_stat_of(value, x, "lse")
    if x.needs_grad and torch.is_grad_enabled():  # without a graph, the logsumexp is a constant
        return False
    ref, version = getattr(x._recipe, "lse", (lambda: None, 0))
    known = isinstance(value, Tensor) and value is ref()
    return known and value._version == version and value.dim() == x.ndim


def _viewed(x: DeferredStat, call: Call) -> Any:
    """Make a view, or return the tensor itself if it has the shape."""
    result = meta_after(call.on, x)
    if result is not None and result[0] is x.meta:
        return x
    return x.after([x], call.on) if result is not None and result[1] else NotImplemented


def _with_dimension(x: DeferredStat, call: Call) -> Any:
    """Make a view by an index, which may have a dimension in the place of the classes."""
    marked = torch.empty(tuple(range(2, 2 + x.ndim)), device="meta")
    expected = list(marked.shape)
    expected.insert(x.logits.axis, 1)
    with contextlib.suppress(IndexError, RuntimeError):  # an index for other sizes
        if x.axis is None and list(call.on(marked).shape) == expected:
            return x.after([x], call.on, x.logits.axis)
    return _viewed(x, call)


def _scaled(x: DeferredStat, call: Call) -> Any:
    """Multiply by a number, which leaves the statistic pending."""
    number = all(isinstance(value, int | float) for value in call.args) and not call.kwargs
    if x.request is None or not number:
        return NotImplemented
    finish = x.request.finish
    request = x.request._replace(finish=lambda stats: call.on(finish(stats)))
    return x.like("scaled", request, Step(call.on, x.logits.restored, [x]), x.dtype)


def _detached(x: DeferredStat, call: Call) -> Any:
    """Detach a maximum, which may be a shift of the logits that does not need its values."""
    if x.kind != "max":
        return NotImplemented
    with torch.no_grad():
        detached = x.after([x], call.on, x.axis)
    detached.logits_recipe = x.logits_recipe
    return detached


DeferredStat.rules = {
    "detach": _detached,
    **dict.fromkeys(("squeeze", "view", "reshape", "flatten"), _viewed),
    **dict.fromkeys(("unsqueeze", "__getitem__"), _with_dimension),
    **dict.fromkeys(("neg", "mul", "div"), _scaled),
}
