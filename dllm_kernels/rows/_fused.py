"""Shared code of the autograd Functions of all ops: when they record a graph, and gradients of first order.

An op is a subclass of :class:`Fused` with ``forward`` and ``backward`` as torch documents them. The parts that
torch.compile must not trace, such as kernels and the chunk loop, are functions decorated with ``opaque``
(``_graph/_opaque.py``).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dllm_kernels._graph._plain import check_no_transform
from dllm_kernels.rows._logits import Head
from dllm_kernels.rows._setup import NeedsGrad, Setup

Function = TypeVar("Function", bound=Callable[..., Any])


class Fused(torch.autograd.Function):
    """Base of the Functions of the ops."""

    @classmethod
    def under(cls, setup: Setup) -> Callable[..., Any]:
        """Return the function to call: ``apply``, or ``forward`` alone if no input requires a gradient."""
        if torch.compiler.is_compiling() or any(setup.needs):
            return cls.apply
        return functools.partial(cls.forward, _NoGraph())


class _NoGraph:
    """The context of a forward pass without autograd; keeps nothing."""

    def save_for_backward(self, *_: Any) -> None:
        pass

    def mark_non_differentiable(self, *_: Any) -> None:
        pass

    def set_materialize_grads(self, _: bool) -> None:
        pass


def outputs(
    ctx: Any, differentiable: Sequence[Tensor | None], constant: Sequence[Tensor | None], link: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the outputs of a forward pass to autograd, without those that are None.

    A None would make torch 2.11 mark the wrong ones as constants while a graph is traced. ``link``: see
    :func:`link_to`.
    """
    constants = [t for t in constant if t is not None]
    ctx.mark_non_differentiable(*constants)
    ctx.set_materialize_grads(False)
    results = (*[t for t in differentiable if t is not None], *constants)
    return results if link is None else (*results, link)


def link_to(like: Tensor) -> Tensor:
    """Make an empty output, which leads from a backward pass to the inputs if forward saves and returns it."""
    return like.new_empty(0)


def first_order(instead: str) -> Callable[[Function], Function]:
    """Decorate a ``backward``: an error if its gradients are differentiated, and no call without upstream gradients.

    ``torch.autograd.function.once_differentiable`` raises only if the upstream gradient has a graph. If it is a
    constant, as in ``torch.autograd.grad(loss, x, create_graph=True)``, the returned gradient counts as a constant too,
    and a penalty on it would silently have no gradient.

    The node that raises must be on every path from the gradient to the inputs of the Function and to the upstream
    gradients, because ``backward(inputs=[weight])`` visits no other nodes. The saved tensors must therefore be all
    inputs that require a gradient, or include a :func:`link_to` them.

    Args:
        instead: function with a second derivative, for the message.
    """

    def decorate(backward: Function) -> Function:
        @functools.wraps(backward)
        def wrapped(ctx: Any, *grads: Tensor | None) -> Any:
            if all(g is None for g in grads):
                return (None,) * len(ctx.needs_input_grad)
            check_no_transform(*grads)
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return backward(ctx, *grads)
            if getattr(ctx, "once", None) is not None:
                ctx.once.check()
            saved = ctx.saved_tensors  # read once, because an activation checkpoint recomputes and frees them

            def gradients(*tensors: Any) -> Any:
                return backward(_Restored(ctx, tensors[: len(saved)]), *tensors[len(saved) :])

            return refuse_second_order(gradients, (*saved, *grads), instead)

        return wrapped  # type: ignore[return-value]

    return decorate


class _Restored:
    """A context with other saved tensors."""

    def __init__(self, ctx: Any, saved_tensors: Sequence[Any]) -> None:
        self.ctx, self.saved_tensors = ctx, saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


def refuse_second_order(make: Callable[..., Any], tensors: Sequence[Tensor | None], instead: str) -> Any:
    """Compute gradients ``make(*tensors)`` that raise when they are differentiated; see :func:`first_order`."""
    if not torch.is_grad_enabled():
        return make(*tensors)
    return _Gradients.apply(make, instead, *tensors)  # type: ignore[no-untyped-call]


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[..., Any], instead: str, *tensors: Tensor | None) -> Any:
        ctx.instead = instead
        return make(*tensors)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "a gradient that dllm_kernels made was differentiated, and it has no second derivative; "
            f"for a second-order term use {ctx.instead}"
        )


class Once:
    """Raises if gradients computed in forward are requested a second time, or would be lost."""

    def __init__(self, name: str, instead: str, head: Head, needs: NeedsGrad) -> None:
        self.name, self.instead, self.consumed = name, instead, False
        parameters = ((head.weight, needs.weight), (head.bias, needs.bias), (head.U, needs.U))
        self.head = [weakref.ref(t) for t, needed in parameters if needed and t is not None]

    def check(self) -> None:
        """Raise for a second backward, before saved tensors are read, because torch's error names no op."""
        if self.consumed:
            raise RuntimeError(
                f"{self.name} computes its gradients in the forward pass and frees them in the first backward; "
                f"recompute the loss to run backward again, or use {self.instead}"
            )

    def __call__(self) -> None:
        self.check()
        self.consumed = True
        for parameter in (ref() for ref in self.head):
            # FSDP2 may have freed the gathered head. No other check detects that, because backward does not read it.
            if parameter is not None and parameter.numel() and not parameter.untyped_storage().size():
                raise RuntimeError(
                    "weight, bias or extra[1] was freed before its gradient arrived, which would be lost: under "
                    "fully_shard with reshard_after_forward=False, run the loss inside the head's forward "
                    "(dllm_kernels.distributed.LossHead) where the head is also called by itself in the same step"
                )
