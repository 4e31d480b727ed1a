"""Autograd nodes of deferred tensors.

A deferred tensor is the output of :class:`_Placeholder`. Its backward takes two kinds of gradients: the gradient of the
values, which torch computes, and the gradients of the *parts* that the values are computed from (hidden states and
parameters of the head), which fused operations compute. The latter are sent as a :class:`PartsGradient`, so that they
pass every node and hook between the head and the loss (DDP, FSDP2, copies).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from dllm_kernels._graph._own_graph import ModifiedError, own_graph, unchanged, with_version
from dllm_kernels._graph._private import PlainFunction, plainly, preserve_version, same_storage, wrapper

aten = torch.ops.aten
Parts = Sequence[Tensor | None]
COPIES = aten.detach.default, aten.alias.default, aten.clone.default, aten.view_as.default


class Recipe:
    """Computes the values of a deferred tensor from its parts, and gradients of the parts.

    The graph holds the recipe, but not the tensor, so that it does not keep the values alive. ``sums`` refers
    to losses to compute before the head gets a gradient, because an optimizer may then change it.
    """

    sums: Sequence[Any] = ()

    def __init__(self, compute: Callable[[Parts], Tensor], restored: Callable[[], Any], needs: Sequence[bool]) -> None:
        self.compute, self.restored, self.needs = compute, restored, needs
        self._graph: Any = None

    def values(self, parts: Any) -> Tensor:
        """Compute the values; the graph of this computation serves :meth:`gradients`."""
        with torch.inference_mode(False), torch.set_grad_enabled(any(self.needs)), self.restored(), own_graph():
            leaves = self.leaves(parts)
            out = self.compute(leaves)
            if out.requires_grad:
                ends = [get_gradient_edge(t) if need else None for t, need in zip(leaves, self.needs, strict=True)]
                self._graph = ends, get_gradient_edge(out)
        return out.detach()

    def leaves(self, parts: Any) -> list[Any]:
        """Return what the values are computed from."""
        pairs = zip(parts, self.needs, strict=True)
        return [t if t is None else t.detach().requires_grad_() if need else t.detach() for t, need in pairs]

    def gradients(self, ctx: Any, grad: Tensor) -> list[Tensor | None]:
        """Return the gradients of the saved parts, in a graph of their own if gradients are enabled."""
        if torch.is_grad_enabled():
            pairs = zip(ctx.saved_tensors, self.needs, strict=True)
            # A parameter may have been frozen since.
            leaves: Any = [
                t if t is None else t.view_as(t).requires_grad_() if need else t.detach() for t, need in pairs
            ]
            with self.restored():
                out: Any = self.compute(leaves)
            return gradients_of(out, leaves, self.needs, grad)
        if self._graph is not None:
            with contextlib.suppress(ModifiedError):  # hooks of the caller may have saved copies
                leaves, out = self._graph
                return gradients_of(out, leaves, self.needs, grad)
        self.values(ctx.saved_tensors)
        leaves, out = self._graph
        return gradients_of(out, leaves, self.needs, grad)


class Step(Recipe):
    """Computes the values of a deferred tensor from those of its sources, and the gradients of the sources."""

    def __init__(self, function: Callable[..., Tensor], restored: Callable[[], Any], sources: Sequence[Any]) -> None:
        grad = torch.is_grad_enabled()
        super().__init__(lambda values: function(*values), restored, [grad and source.needs_grad for source in sources])
        self.function, self.sources = function, sources

    def leaves(self, use: str) -> list[Any]:
        """Return the values of the sources as they are now."""
        values = [source.dense(use) for source in self.sources]
        self._seen, leaves = [with_version(v)[1] for v in values], super().leaves(values)
        inputs = [t.view_as(t) for t in leaves]
        for t in leaves:  # the operations save what they need of the values
            t.data = t.new_empty(0)
        return inputs

    def keep_graph(self) -> None:
        """Keep a graph for :meth:`gradients`, before the sources change."""
        if self._graph is None and any(self.needs):
            self.values("backward")

    def gradients(self, ctx: Any, grad: Tensor) -> list[Tensor | None]:
        """Return the gradients of the sources."""
        self.keep_graph()
        if not torch.is_grad_enabled():
            leaves, out = self._graph
            return gradients_of(out, leaves, self.needs, grad)
        inputs = [(v := source.materialize()).view_as(v) for source in self.sources]  # one may occur twice
        with self.restored(), own_graph():
            result: Any = self.function(*inputs)
        for values, seen in zip(inputs, self._seen, strict=True):
            if not same_storage(result, values):  # the gradient of a view does not depend on the values
                unchanged((values, seen))
        return gradients_of(result, inputs, self.needs, grad)


def gradients_of(out: Any, inputs: Parts, needs: Sequence[bool], grad: Tensor) -> list[Tensor | None]:
    """Return the gradients of the inputs that need one."""
    needed = [t for t, need in zip(inputs, needs, strict=True) if need]
    graph = torch.is_grad_enabled()
    grads = iter(
        torch.autograd.grad(out, needed, grad, retain_graph=True, create_graph=graph, allow_unused=True)  # type: ignore[arg-type]
    )
    return [next(grads) if need else None for need in needs]


class PartsGradient(Tensor):
    """Gradient of a deferred tensor: gradients of its parts, and of its values or None; has the shape of the tensor."""

    parts: Parts
    dense: Tensor | None

    @classmethod
    def of(cls, like: tuple[Any, ...], parts: Iterable[Tensor | None], dense: Tensor | None = None) -> Any:
        """Return a gradient of a tensor with a shape, a dtype and a device."""
        gradient = wrapper(cls, like[0], dtype=like[1], device=like[2])
        gradient.parts, gradient.dense = list(parts), dense
        return gradient

    @property
    def like(self) -> tuple[Any, ...]:
        """Shape, dtype and device."""
        return self.shape, self.dtype, self.device

    def _map(self, function: Callable[[Tensor], Tensor]) -> Any:
        parts = (t if t is None else function(t) for t in self.parts)
        return self.of(self.like, parts, self.dense if self.dense is None else function(self.dense))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with plainly():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        x, *others = args
        if func is aten.isnan.default:  # called by anomaly detection
            return torch.stack([t.isnan().any() for t in (*x.parts, x.dense) if t is not None])
        if func in COPIES:
            return x._map(lambda t: t)
        if func is aten.neg.default or (func in SCALED and isinstance(x, cls) and _is_number(others[0])):
            return x._map(lambda t: func(t, *others))
        if func is aten.add.Tensor and not kwargs and x.shape == getattr(others[0], "shape", None):
            x, y = (x, others[0]) if isinstance(x, cls) else (others[0], x)
            if not isinstance(y, cls):
                return cls.of(x.like, x.parts, total(x.dense, y))
            return cls.of(x.like, map(total, x.parts, y.parts), total(x.dense, y.dense))
        raise RuntimeError(
            f"{func} needs the gradient of logits, which a fused loss never computes; call materialize() of the "
            "logits, or register the hook, before the loss"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PartsGradient(shape={tuple(self.shape)})"


SCALED = aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor) or (value.dim() == 0 and type(value) is Tensor)


def total(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients, of which each may be missing."""
    return b if a is None else a if b is None else a + b


class _Placeholder(PlainFunction):
    """Return a deferred tensor in the graph of its sources or, if it has none, of its parts."""

    @staticmethod
    def forward(ctx: Any, cls: Any, meta: Tensor, device: Any, recipe: Any, sources: int, *tensors: Any) -> Any:
        ctx.recipe, ctx.sources = recipe, sources
        ctx.set_materialize_grads(False)  # the values may have no gradient, and those of the parts pass another node
        if not sources:
            ctx.save_for_backward(*tensors)
        return wrapper(cls, meta.shape, meta.stride(), meta.storage_offset(), dtype=meta.dtype, device=device)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        needs, dense = ctx.needs_input_grad[5:], grad
        for loss in [ref() for ref in getattr(ctx.recipe, "sums", ())]:
            if loss is not None:
                loss.materialize()
        grads: list[Any] = [None] * len(needs)
        if isinstance(grad, PartsGradient):
            grads[ctx.sources :], dense = grad.parts, grad.dense
            grad.parts = ()  # the last reference: AccumulateGrad can then keep the tensor instead of copying it
        if dense is not None:
            for i, g in enumerate(ctx.recipe.gradients(ctx, dense)):
                grads[i] = total(grads[i], g) if needs[i] else None
        return None, None, None, None, None, *grads


class _Tap(PlainFunction):
    """Return the parts of a deferred tensor; their gradients pass through the tensor."""

    @staticmethod
    def forward(ctx: Any, x: Any, needs: Sequence[bool], parts: Parts) -> Any:
        ctx.set_materialize_grads(False)
        ctx.like, ctx.present = (x.shape, x.dtype, x.device), [t is not None for t in parts]
        out = [None if t is None else t.detach() for t in parts]
        ctx.mark_non_differentiable(*[t for t, need in zip(out, needs, strict=True) if t is not None and not need])
        return tuple(t for t in out if t is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if all(g is None for g in grads):  # a view whose values were used
            return None, None, None
        remaining = iter(grads)
        return PartsGradient.of(ctx.like, [next(remaining) if present else None for present in ctx.present]), None, None


class _Values(PlainFunction):
    """Return the values of a deferred tensor; their gradient passes through the tensor."""

    @staticmethod
    def forward(ctx: Any, x: Any, dense: Sequence[Tensor]) -> Tensor:
        ctx.deferred_node = x.grad_fn
        ctx.set_materialize_grads(False)  # torch has no gradient of norm(0), and the parameters get none
        return dense[0].detach()  # no view, which torch treats differently, with the version of the values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Become(PlainFunction):
    """Send the gradient of a deferred tensor to another tensor, which holds its values after a change in place."""

    @staticmethod
    def forward(ctx: Any, x: Any, values: Tensor) -> Any:
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None, grad


def placeholder(cls: Any, meta: Tensor, device: torch.device, recipe: Any, sources: Parts, parts: Parts) -> Any:
    """Return a deferred tensor like ``meta``, a tensor on the meta device."""
    return _Placeholder.apply(cls, meta, device, recipe, len(sources), *sources, *parts)  # type: ignore[no-untyped-call]


def tap(x: Any, needs: Sequence[bool], parts: Parts) -> tuple[Tensor | None, ...]:
    """Return the parts in the graph of a deferred tensor."""
    tapped = iter(_Tap.apply(x, needs, parts))  # type: ignore[no-untyped-call]
    return tuple(None if t is None else next(tapped) for t in parts)


def in_graph(x: Any, dense: Tensor) -> Tensor:
    """Return values in the graph of a deferred tensor."""
    return _Values.apply(x, [dense])  # type: ignore[no-any-return, no-untyped-call]


def become(x: Any, values: Tensor) -> None:
    """Replace ``x`` in the graph by the tensor ``values``."""
    guard = contextlib.nullcontext() if x.is_inference() else preserve_version(x)
    with torch.enable_grad(), guard:
        _Become.apply(x, values)  # type: ignore[no-untyped-call]


def in_function() -> bool:
    """Return True in the forward of an autograd Function."""
    classes: list[Any] = [torch.autograd.Function]
    for c in classes:
        classes += c.__subclasses__()
    codes, frame = {getattr(c.forward, "__code__", None) for c in classes}, sys._getframe(1)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def has_hooks(x: Any) -> bool:
    """Return True if the node of a deferred tensor has hooks."""
    with plainly():
        node = x.grad_fn
    for register in () if node is None else (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def becomes(x: Any) -> bool:
    """Return True if :func:`become` has replaced ``x`` in the graph."""
    return getattr(x.grad_fn, "_forward_cls", None) is _Become
