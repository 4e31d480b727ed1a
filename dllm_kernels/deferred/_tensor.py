"""Deferred tensors: torch knows shape, strides, dtype, device and graph; the values are computed when they are needed.

Every operation first looks for a rule in ``rules``, which records it or computes it without the values. All others, and
code below ``__torch_function__`` (autograd Functions, hooks, extensions), receive the values, computed once and shared
by all views, in the graph of the tensor. ``_graph.py`` has the autograd nodes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree

from dllm_kernels._graph._own_graph import own_graph
from dllm_kernels._graph._plain import Deferred, is_dtensor
from dllm_kernels._graph._private import (
    backward_task,
    disable_dynamo,
    may_recompute,
    outside_transforms,
    plainly,
    same_storage,
    transforms_active,
    views_tracked,
)
from dllm_kernels.deferred import _entries, _graph
from dllm_kernels.deferred._moves import Call
from dllm_kernels.deferred._released import release_sources

ALIASES = {
    "__mul__": "mul", "__rmul__": "mul", "multiply": "mul", "__truediv__": "div", "true_divide": "div", "divide": "div",
    "__neg__": "neg", "negative": "neg", "__imul__": "mul_", "__idiv__": "div_", "multiply_": "mul_",
    "__itruediv__": "div_", "true_divide_": "div_", "divide_": "div_",
}  # fmt: skip
CHANGES = "add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow"
IN_PLACE = "__setitem__", *(f"__i{name}__" for name in CHANGES)
# Answered by torch, which does not need the values for them.
KNOWN = (
    "__delete__", "__get__", "__hash__", "__len__", "__set__", "_is_view", "backward", "dim", "element_size",
    "get_device", "has_names", "is_complex", "is_contiguous", "is_floating_point", "is_inference", "is_same_size",
    "ndimension", "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_",
    "retain_grad", "size", "storage_offset", "stride",
)  # fmt: skip
VIEWS = "T", "mT", "H", "mH", "real", "data"  # attributes that are tensors
EXPOSING = "numpy", "__array__", "__dlpack__", "untyped_storage", "data_ptr"  # whose results share memory
RESHAPED = (
    "as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_",
    "unsqueeze_",
)  # fmt: skip
FIRST = "input", "tensors", "self"
RENAMED = {"axis": "dim", "keepdims": "keepdim"}
# Their rules take all arguments, because the deferred tensor may be any of them.
WHOLE = (
    "__matmul__", "__rmatmul__", "__rsub__", "add", "broadcast_tensors", "dot", "einsum", "expand_as", "inner",
    "kl_div", "l1_loss", "logaddexp", "matmul", "maximum", "minimum", "mse_loss", "mv", "reshape_as", "rsub",
    "special_xlogy", "sub", "subtract", "vdot", "view_as", "where", "xlogy",
)  # fmt: skip
FRAMEWORKS = "torch.distributed", "torch.nn", "torch.utils", "deepspeed"  # their hooks do not read the gradient
Rule = Callable[[Any, Call], Any]


class UnknownArgumentError(Exception):
    """A rule does not know an argument by name."""


class DeferredTensor(Tensor, Deferred):
    """Base class of deferred tensors.

    Attributes:
        meta: tensor on the meta device with the shape, strides and dtype of this one.
        parts: what the values are computed from, detached: hidden states, rows of adapters or None, parameters.
        needs: for each part, True if it had a gradient at the head call.
        sources: the deferred tensors that this one is computed from; empty for the output of a head.
    """

    rules: ClassVar[dict[str, Rule]] = {}
    meta: Tensor
    _device: torch.device
    parts: tuple[Tensor | None, ...]
    needs: tuple[bool, ...]
    sources: tuple[DeferredTensor, ...]
    _recipe: Any  # of the values
    _derived: list[weakref.ref[DeferredTensor]]
    _dense: Tensor | None = None  # values without a graph
    _value: Any = None  # values in the graph of this tensor as it was when `_node` was its grad_fn
    _node: Any = None
    _linked: Any = None  # grad_fn of the values when the graph of this tensor was last that of its values
    _tapped: tuple[Tensor | None, ...] | None = None
    _gradient_requested: bool = False  # by a hook of the user, or retain_grad
    _checkpointed: bool = False  # a rule has used it under hooks of saved tensors, such as those of a checkpoint
    _leaf_view: bool = False  # a leaf that requires a gradient, as torch makes views without gradients enabled
    _node_read: bool = False  # its grad_fn was read, and may therefore have hooks
    _changed_view: DeferredTensor | None = None  # that a Function may have marked dirty, kept until the next `sync`
    _copy: bool = False  # has the values of a tensor that requires a gradient; a Function or torch may make its graph
    _together: Any = None  # returns the values of this view, created by one operation with those of other views
    _entries: Any = None  # identity of the tensor that the values are entries of, and a function that selects them
    _needed_in: int = -1  # the backward pass in which a function that is recomputed has needed the values

    @classmethod
    def create(cls, meta: Tensor, parts: _graph.Parts, recipe: Any, **attributes: Any) -> Any:
        """Return a tensor like ``meta``, a tensor on the meta device."""
        sources = getattr(recipe, "sources", ())
        device = next(t.device for t in parts if t is not None)
        inference = torch.is_inference_mode_enabled()
        with plainly():
            modes = [source.is_inference() for source in sources if same_storage(meta, source.meta)]
            other = modes[:1] == [not inference]  # than that of the tensor that this one is a view of
            with _inference(not inference) if other else contextlib.nullcontext():
                tensor = _graph.placeholder(cls, meta, device, recipe, sources, parts)
        with _inference(False) if inference else contextlib.nullcontext():  # for DTensors
            detached = tuple([None if t is None else t.detach() for t in parts])
        vars(tensor).update(
            attributes, meta=meta, _device=device, parts=detached, sources=tuple(sources), _recipe=recipe, _derived=[]
        )
        for source in sources:
            source._derived.append(weakref.ref(tensor))
        return tensor

    # Read often, so without a detour over ``__torch_function__``.
    shape = property(lambda self: self.meta.shape)
    dtype = property(lambda self: self.meta.dtype)
    ndim = property(lambda self: self.meta.ndim)
    device = property(lambda self: self._device)

    def filled(self) -> tuple[Tensor | None, ...]:
        """Return the parts with their values, which sharding may have freed."""
        return self.parts

    def tapped(self) -> tuple[Tensor | None, ...]:
        """Return the parts; in the graph, their gradients pass through this tensor."""
        with plainly():
            if not (self.requires_grad and torch.is_grad_enabled() and any(self.needs)):
                return self.filled()
            if self._tapped is None:
                self._tapped = _graph.tap(self, self.needs, self.filled())
            return self._tapped

    @property
    def _own_node(self) -> bool:
        """True if the graph is the original one, or that of a copy: gradients of the parts may pass through it."""
        with plainly():
            if self.is_leaf:
                return not self.requires_grad or (self._leaf_view and not torch.is_grad_enabled())
            return self._copy or getattr(self.grad_fn, "recipe", None) is self._recipe

    @property
    def deferred(self) -> bool:
        """True if rules apply: the values have not been computed, and their gradient was not requested."""
        known = (self._value is not None or self._dense is not None) and not self._recomputed
        return (
            not known
            and (not self._gradient_requested or self._recomputed)
            and not (self._node_read and _graph.has_hooks(self))
            and self._own_node
            and (self._recomputed or all(source.deferred for source in self.sources))
        )

    @property
    def needs_grad(self) -> bool:
        """True if gradients pass through this tensor."""
        with plainly():
            return self.requires_grad

    @property
    def watched(self) -> bool:
        """True if the gradient of the values must pass through this tensor, which may have hooks."""
        with plainly():
            hooked = self._backward_hooks is not None
        return hooked or self._gradient_requested or self._node_read or self._leaf_view

    @property
    def _recomputed(self) -> bool:
        """True in a backward that recomputes a function, which had not needed the values of the tensor until then."""
        return self._checkpointed and backward_task() not in (-1, self._needed_in)

    def _note_need(self) -> None:
        """Note that a function that is recomputed needs the values, from which it then goes on, as at first."""
        for x in self.family() if self._recomputed else ():
            x._needed_in = backward_task()

    def before_values(self, use: str) -> None:
        """Check and report that the values of the output of a head are computed."""

    def dense(self, use: str = "backward") -> Tensor:
        """Return the values without a graph."""
        if use != "backward":  # the backward of an operation that computed the tensor recomputes no function
            self._note_need()
        if self._value is not None:
            return self._value.detach()  # type: ignore[no-any-return]
        if self._dense is None:
            if not self.sources:
                self.before_values(use)
            self._dense = self._laid_out(self._recipe.values(use if self.sources else self.filled()))
            release_sources(self)
        return self._dense

    def _laid_out(self, t: Tensor) -> Tensor:
        if t.stride() == self.meta.stride() or t.numel() == 0:
            return t
        return torch.empty_strided(t.shape, self.meta.stride(), dtype=t.dtype, device=t.device).copy_(t)

    def materialize(self, use: str = "materialize") -> Tensor:
        """Return the values, computed once, in the graph of this tensor."""
        with plainly():
            needs_grad, node = self.requires_grad, self.grad_fn
        self._note_need()
        if self._value is None or (needs_grad and (node is not self._node or not self._value.requires_grad)):
            in_own_graph = self.watched or not self.sources or getattr(node, "recipe", None) is not self._recipe
            with torch.inference_mode(False), own_graph(), torch.set_grad_enabled(needs_grad):
                known = self._value is not None or (self._dense is not None and not self.is_view)
                if not needs_grad or in_own_graph or known:
                    values = self.dense(use)
                    with plainly():
                        values = _graph.in_graph(self, values) if needs_grad else values
                else:
                    sources = [source.materialize(use) for source in self.sources]
                    with self._recipe.restored():
                        values = self._laid_out((self._together or self._recipe.function)(*sources))
            self._value, self._node, self._linked = values, node, values.grad_fn
            release_sources(self)
        return self._value  # type: ignore[no-any-return]

    def twin(self) -> Any:
        """Return a tensor with the values and attributes of this one; its gradients pass through this one."""
        with torch.set_grad_enabled(self.needs_grad):
            return self._like(self.meta, self.tapped(), self._recipe)

    def _like(self, meta: Tensor, parts: _graph.Parts, recipe: Any) -> Any:
        attributes = {name: getattr(self, name) for name in vars(self).keys() - STATE}
        return self.create(meta, parts, recipe, **attributes)

    def sync(self) -> None:
        """Bring values and graphs of the family up to date after changes in place that no rule has seen.

        A Function that marked a tensor as dirty changed its graph. An operation on values changed their graph.

        Raises:
            RuntimeError: another Function takes this tensor, whose graph it has read already.
        """
        family, in_function = [x for x in self.family() if x._value is not None], not torch.is_grad_enabled()
        with plainly(), torch.enable_grad():
            for x in family:
                if x.requires_grad and x._node is not None and x.grad_fn is not x._node:
                    if in_function and x is not self and not self._is_view() and _graph.in_function():
                        raise RuntimeError(
                            "an autograd Function must not take deferred logits directly after another one that marked "
                            "a view of them as dirty; call materialize() of the logits first, and use its result"
                        )
                    for y in family:
                        if y._together:
                            y.linked_value()
                    x._value.copy_(_graph.in_graph(x, x.dense().clone()))
            for x in family:
                x._changed_view = x._changed_view if in_function else None
                if x._value.requires_grad and x._value.grad_fn is not x._linked:
                    x._become_values()
                    if x.retains_grad and not x._value.retains_grad:
                        x._value.retain_grad()
                        x._value.grad = x.grad

    def _become_values(self) -> None:
        """Make the graph of the values that of this tensor."""
        with plainly():
            # The values have another node now, to which no gradient of this one goes. Torch moves a retained gradient.
            if _graph.becomes(self) and not self.retains_grad:
                self.detach_()
            _graph.become(self, self._value)
            self._node, self._linked = self.grad_fn, self._value.grad_fn

    def _node_of_values(self) -> Any:
        """Return the node of the values, whose hooks must also see the gradient of this tensor."""
        with plainly():
            if self.grad_fn is not None and not _graph.becomes(self):
                x: DeferredTensor = self
                while x.is_view:  # the values must be a view of those of the source, because changes look at the node
                    x = x.sources[0]
                    x.materialize("grad_fn")
                self.linked_value()
                self._become_values()
        return self._value.grad_fn

    def family(self) -> list[DeferredTensor]:
        """Return all deferred tensors that may share memory with this one, and those computed from them."""
        visited: dict[int, DeferredTensor] = {}
        queue: list[DeferredTensor] = [self]
        while queue:
            x = queue.pop()
            if id(x) not in visited:
                visited[id(x)] = x
                queue += [y for y in x.sources if same_storage(x.meta, y.meta)]
                queue += [y for y in (ref() for ref in x._derived) if y is not None]
        return list(visited.values())

    def in_place(self, use: str, change: Callable[[Tensor], Any]) -> None:
        """Change the values. Torch tracks which tensors share their memory, because views are views of the values."""
        family = self.family()
        self.dense(use)  # its gradient then passes what it is computed from, which may get hooks
        for x in family:
            x.materialize(use)
            x._checkpointed &= not same_storage(x.meta, self.meta)
            if not x.is_view and any(same_storage(source.meta, self.meta) for source in x.sources):
                x._recipe.keep_graph()
        for x in family:
            if x._together or (torch.is_grad_enabled() and self.requires_grad):
                x.linked_value()
        values = self.materialize(use)
        version = values._version
        change(values)
        self.sync()
        if self.needs_grad and not torch.is_grad_enabled():
            root = self
            while root.sources:
                root = root.sources[0]
            root._changed_view = self
        if values._version > version and not values.is_inference():
            torch.autograd.graph.increment_version(self)  # for Functions that saved this tensor

    def linked_value(self) -> Tensor:
        """Return the values; for a view, a view of the values of its source: torch then changes the graphs of both."""
        value: Any = self._value
        if self.is_view and value.requires_grad and self._own_node and not self._copy:
            known, source = self.sources[0]._value, self.sources[0].linked_value()
            base = source if source._base is None else source._base
            if self._together or source is not known or value._base is not base:
                self._together = None  # torch forbids to change such views, and what they are views of
                with torch.inference_mode(False), torch.enable_grad(), self._recipe.restored():
                    self._value = value = self._recipe.function(source)
                self._linked = value.grad_fn
        return value  # type: ignore[no-any-return]

    @property
    def is_view(self) -> bool:
        """True for a view of another deferred tensor."""
        return bool(self.sources) and same_storage(self.meta, self.sources[0].meta) and not self._leaf_view

    def sharing(self, result: Any, several: bool) -> Any:
        """Return a tensor that shares memory with the values as a member of the family; anything else unchanged."""
        if result is self._value:
            return self
        if self._value is None or not _shares(result, self._value):
            return result
        step = strided(result, result.storage_offset() - self._value.storage_offset())
        meta = step(self.meta)
        leaf = result.requires_grad and not torch.is_grad_enabled()
        if not torch.is_grad_enabled() or several:  # torch forbids to change the base of such views
            result = step(self._value) if torch.is_grad_enabled() else result.detach()
        with torch.set_grad_enabled(result.requires_grad):
            recipe = _graph.Step(step, self._recipe.restored, [self])
            view = self._like(meta, self.parts, recipe)
        with plainly():
            view._value, view._node, view._linked = result, view.grad_fn, result.grad_fn
        return view.as_leaf() if leaf else view

    def as_leaf(self) -> DeferredTensor:
        """Require a gradient, like a view that torch creates without gradients enabled."""
        with plainly():
            self._leaf_view = True
            self.requires_grad_()
        return self

    def become(self, other: DeferredTensor) -> DeferredTensor:
        """Take the place of a tensor that is computed from this one, which no other tensor shares memory with."""
        with plainly():
            if other.requires_grad:
                _graph.become(self, other)
        for name in vars(self).keys() & STATE:
            del vars(self)[name]
        vars(self).update({**vars(other), "_derived": [], "_tapped": None, "_copy": True})
        for source in self.sources:
            source._derived.append(weakref.ref(self))
        return self

    def _request_gradient(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Register a hook, or retain the gradient, of this tensor and of its values."""
        hook = args[0] if args else None
        hook = getattr(hook, "func", hook)  # FSDP1 registers a functools.partial
        if str(getattr(hook, "__module__", "")).startswith(FRAMEWORKS):
            return _without_function(func, (self, *args), kwargs)
        self._gradient_requested, value = True, self._value
        with plainly():
            linked = self._apart and _graph.becomes(self)  # its gradient is the gradient of the values
            handle = None if linked else func(self, *args, **kwargs)
        if self._apart and value is not None and value.requires_grad:
            other, first = func(value, *args, **kwargs), handle
            handle = first or other
            if first is not None:
                handle.remove = lambda: (type(first).remove(first), other.remove())
        return handle

    def _total_grad(self, grad: Any) -> Any:
        """Return the retained gradient from that of this tensor and that of its values, which may include it."""
        with plainly():
            value: Any = self._value
            return value.grad if value.retains_grad and _graph.becomes(self) else _graph.total(grad, value.grad)

    @property
    def _apart(self) -> bool:
        """True if the graph of the values does not contain this tensor."""
        with plainly():
            if self._value is None or self._value.requires_grad != self.requires_grad:  # a Function has returned it
                return False
            return getattr(self._value.grad_fn, "deferred_node", None) is not self.grad_fn

    @classmethod
    @disable_dynamo
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs, args = getattr(func, "__name__", str(func)), dict(kwargs or {}), list(args)
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else ""
        if name == "__set__" and attribute == "data":
            return args[0].in_place("data", lambda values: setattr(values, "data", _plain(args[1], "data")))
        if name == "__get__" and attribute in VIEWS:
            name, func = attribute, _attribute(attribute)
        if name in KNOWN:
            if name in ("register_hook", "retain_grad") or attribute == "grad_fn":
                args[0].sync()
            if name in ("register_hook", "retain_grad"):
                return args[0]._request_gradient(func, args[1:], kwargs)
            if attribute == "grad_fn":
                args[0]._node_read = True
                if args[0]._apart:
                    return args[0]._node_of_values()
            answer = _without_function(func, args, kwargs)
            return args[0]._total_grad(answer) if attribute == "grad" and args[0]._apart else answer
        if func is torch.autograd.grad:
            return _gradients(func, args, kwargs)
        if transforms_active():  # of torch.func, in a function that refers to the tensor
            with outside_transforms():
                args, kwargs = _pytree.tree_map(lambda x: _plain(x, name), (args, kwargs))
            return func(*args, **kwargs)
        name = ALIASES.get(name, name)
        objects = _deferred_in((*args, *kwargs.values()))
        known = all(t is Tensor or issubclass(t, Deferred) for t in types)  # another class may change the result
        rule = objects[0].rules.get(name) if known and all(x.deferred for x in objects) else None
        if rule is not None:
            with contextlib.suppress(UnknownArgumentError):
                result = _by_rule(rule, name, func, args, kwargs)
                if result is not NotImplemented:
                    recomputed = may_recompute()
                    while recomputed and objects:
                        objects[0]._checkpointed = True
                        objects += objects.pop(0).sources
                    return result
        return _by_values(name, func, args, kwargs, objects)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute the values for code below ``__torch_function__``, such as autograd Functions."""
        name = func.overloadpacket.__name__
        if func in _graph.COPIES and not kwargs and isinstance(args[0], DeferredTensor):
            with plainly(), torch.no_grad():
                copy = args[0].after([args[0]], func)
            if isinstance(copy, DeferredTensor):
                copy.note_copy_of(args[0])
            return copy
        mutable = func._schema.is_mutable

        def value(x: Any) -> Any:
            with views_tracked():  # the graph of the values is kept
                return x.dense(name) if isinstance(x, DeferredTensor) else x

        if mutable and isinstance(args[0], DeferredTensor):
            if name in RESHAPED:  # torch calls no `__torch_function__` for set_
                _refuse_shape_change(name)
            for x in args[0].family():  # copies keep the values that they had
                value(x)

        result = func(*_pytree.tree_map(value, args), **_pytree.tree_map(value, kwargs or {}))
        return args[0] if mutable and isinstance(args[0], DeferredTensor) else result

    def note_copy_of(self, source: Any) -> None:
        """Note that gradients of the parts may pass a Function that returns this copy of its input.

        Inside the forward of a Function, only its inputs require a gradient. A copy of another tensor is not a copy of
        the input.
        """
        with plainly():
            self._copy = source.requires_grad

    def after(self, sources: Sequence[Any], step: Callable[..., Tensor]) -> Any:
        """Return the tensor ``step(*sources)``, which has the parts of this one."""
        raise NotImplementedError

    def as_subclass(self, cls: Any) -> Any:  # torch calls no `__torch_function__` for it
        """Return this tensor if it is a ``cls``, otherwise its values as a ``cls``."""
        return self if isinstance(self, cls) else self.materialize("as_subclass").as_subclass(cls)

    def __getattr__(self, name: str) -> Any:
        parts = vars(self).get("parts", ())
        if parts and is_dtensor(parts[0]) and hasattr(parts[0], name):
            return getattr(self.materialize(name), name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


# Attributes of one tensor, which tensors computed from it do not inherit.
STATE = DeferredTensor.__annotations__.keys() - {"needs"}


def replaced(values: Iterable[Any], function: Callable[[Any], Any]) -> list[Any]:
    """Return arguments with each object in them, also in containers, replaced by a function of it."""
    return [_pytree.tree_map(function, x) if isinstance(x, tuple | list | dict) else function(x) for x in values]


def _deferred_in(values: Iterable[Any]) -> list[DeferredTensor]:
    tensors: list[DeferredTensor] = []
    for x in values:
        if isinstance(x, DeferredTensor):
            tensors.append(x)
        elif isinstance(x, tuple | list | dict):
            tensors += _deferred_in(x.values() if isinstance(x, dict) else x)
    return tensors


def _by_rule(rule: Rule, name: str, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    named = {RENAMED.get(key, key): value for key, value in kwargs.items()}
    if name in WHOLE:
        deferred = next(x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, DeferredTensor))
        return rule(deferred, Call(func, tuple(args), named))
    first, *others = args or [named.pop(next((n for n in FIRST if n in named), next(iter(named))))]
    if name == "mul" and not isinstance(first, DeferredTensor) and others:
        first, others = others[0], [first]
    if not isinstance(first, DeferredTensor | tuple | list):  # a sequence: cat, stack
        return NotImplemented
    result = rule(first, Call(func, tuple(others), named))
    for x in [result] if isinstance(result, DeferredTensor) else result if isinstance(result, tuple | list) else ():
        if x is first:
            continue
        if name in ("clone", "contiguous"):
            x.note_copy_of(first)
        elif name not in ("detach", "data") and _is_leaf_view(x, first):
            x.as_leaf()
    return result


def _is_leaf_view(x: Any, source: Any) -> bool:
    if torch.is_grad_enabled() or not isinstance(x, DeferredTensor) or not isinstance(source, DeferredTensor):
        return False
    return source.requires_grad and same_storage(x.meta, source.meta)


def _by_values(name: str, func: Any, args: list[Any], kwargs: dict[str, Any], objects: list[DeferredTensor]) -> Any:
    """Call a function with values in the place of deferred tensors."""
    for x in objects:
        x.sync()
    if name == "__deepcopy__" and objects[0].requires_grad and objects[0].is_leaf:
        return objects[0].dense(name).clone().requires_grad_()
    in_place = name in IN_PLACE or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True
    changed = (args or [kwargs.get("input")])[0] if in_place else kwargs.get("out")
    if not isinstance(changed, DeferredTensor):
        plain_args, plain_kwargs = _pytree.tree_map(lambda x: _beside(x, objects, name), (args, kwargs))
        for x in objects if in_place or name in EXPOSING else ():  # a list, or the caller, may change the values
            for each in x.family():
                each.materialize(name)
        result = func(*plain_args, **plain_kwargs)
        for x in objects:
            if in_place:
                x.sync()
            several = isinstance(result, tuple | list)
            result = _pytree.tree_map(lambda t: x.sharing(t, several), result)  # noqa: B023
        return result
    views = (ref() for ref in changed._derived)
    if name in RESHAPED or (name == "detach_" and any(x is not None and x.is_view for x in views)):
        _refuse_shape_change(name)
    if name == "detach_":
        for x in changed.family():
            x.materialize(name)
        changed._dense, changed._value = changed.dense(name), None
        return _without_function(func, args, kwargs)
    with plainly():
        if changed.is_leaf and changed.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")

    def change(values: Tensor) -> None:
        plain = _pytree.tree_map(lambda x: values if x is changed else _plain(x, name), (args, kwargs))
        func(*plain[0], **plain[1])
        if values.shape != changed.shape:  # such as addbmm_ of one element
            _refuse_shape_change(name)

    changed.in_place(name, change)
    return None if name == "__setitem__" else changed


def _refuse_shape_change(name: str) -> None:
    raise NotImplementedError(f"{name} must not be called on deferred logits; use an operation that returns a tensor")


def _without_function(func: Any, args: Any, kwargs: Any) -> Any:
    with plainly():
        return func(*args, **kwargs)


def _plain(x: Any, use: str) -> Any:
    return x.materialize(use) if isinstance(x, DeferredTensor) else x


def _beside(x: Any, objects: list[DeferredTensor], use: str) -> Any:
    entries = _entries.beside(x, objects, use)
    return _plain(x, use) if entries is None else entries


def _shares(result: Any, values: Any) -> bool:
    if type(result) is not Tensor or result.layout is not torch.strided or result.dtype != values.dtype:
        return False
    return same_storage(result, values)


@contextlib.contextmanager
def _inference(mode: bool) -> Iterator[None]:
    grad = torch.is_grad_enabled()  # inference_mode(False) enables gradients
    with torch.inference_mode(mode), torch.set_grad_enabled(grad and not mode):
        yield


def strided(meta: Tensor, offset: int) -> Callable[[Tensor], Tensor]:
    """Return the operation that creates a view; unlike one of several views, it allows changes of the other views."""
    shape, strides = meta.shape, meta.stride()
    return lambda z: z.as_strided(shape, strides, z.storage_offset() + offset)


def _attribute(name: str) -> Callable[[Tensor], Any]:
    def attribute(t: Tensor) -> Any:
        return getattr(t, name)

    attribute.__name__ = name
    return attribute


def meta_after(step: Callable[..., Any], *sources: Any) -> tuple[Any, bool] | None:
    """Return shape, strides and dtype after ``step``, and whether it makes a view; None if that depends on values."""
    metas = [t.meta for t in sources]
    try:
        with torch.no_grad():
            out = step(*metas)
    except Exception:
        return None
    return out, isinstance(out, Tensor) and any(same_storage(out, t) for t in metas)


def _gradients(func: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """Compute ``torch.autograd.grad``; gradients of deferred tensors pass these, their values, or both.

    Raises:
        RuntimeError: the gradient of a deferred tensor is that of a fused loss, which never computes it.
    """
    inputs = [args[1]] if isinstance(args[1], Tensor) else list(args[1])
    apart = [x for x in inputs if isinstance(x, DeferredTensor) and x._apart and x._value.requires_grad]
    values = [x._value for x in apart]
    unused = {"allow_unused": True} if apart else {}
    with plainly():
        gradients = func(args[0], [*inputs, *values], *args[2:], **{**kwargs, **unused})
    grads = list(gradients[: len(inputs)])
    for x, gradient in zip(inputs, grads, strict=True):
        if isinstance(gradient, _graph.PartsGradient):
            raise RuntimeError(
                "inputs of torch.autograd.grad must be tensors that the loss was computed from, got deferred ones of "
                f"shape {tuple(x.shape)}, which a fused loss never computes; call materialize() of them before the loss"
            )
    for x, gradient in zip(apart, gradients[len(inputs) :], strict=True):
        index = next(i for i, each in enumerate(inputs) if each is x)
        grads[index] = _graph.total(grads[index], gradient)
    return tuple(grads)


def registers(rules: dict[str, Rule]) -> Callable[..., Callable[[Rule], Rule]]:
    """Return a decorator ``rule(*names)``, which enters the rule of operations into a table."""

    def rule(*names: str) -> Callable[[Rule], Rule]:
        def register(function: Rule) -> Rule:
            rules.update(dict.fromkeys(names, function))
            return function

        return register

    return rule


def arguments(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function of torch by name.

    Raises:
        UnknownArgumentError: an argument has another name or place, so the operation needs the tensor.
    """
    if len(args) > len(names) or not kwargs.keys() <= set(names):
        raise UnknownArgumentError
    return {**dict(zip(names, args, strict=False)), **kwargs}


def softmax_arguments(call: Call) -> dict[str, Any]:
    """Return the arguments of softmax or log_softmax by name."""
    functional = call.function in (F.softmax, F.log_softmax)
    return arguments(("dim", "_stacklevel", "dtype") if functional else ("dim", "dtype"), call.args, call.kwargs)


def where_arguments(call: Call) -> dict[str, Any]:
    """Return the arguments of ``torch.where`` or of the method by name."""
    is_method = call.function is Tensor.where
    names = ("input", "condition", "other") if is_method else ("condition", "input", "other")
    return arguments(names, call.args, call.kwargs)
