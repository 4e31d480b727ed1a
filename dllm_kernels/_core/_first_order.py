"""A backward pass that has no derivative of its own, and says so.

``torch.autograd.function.once_differentiable`` complains only where the upstream gradient has a graph. Where it is a
constant, as in ``torch.autograd.grad(loss, x, create_graph=True)``, the gradient it returns passes for a constant too, and
a penalty on it would silently train nothing.

What raises must lie on every way from the gradient to what the Function was called with, and to the upstream gradients:
autograd visits nothing else where it is told whose gradient is wanted (``backward(inputs=[weight])``). The inputs
themselves are not at hand in backward, where the Function has kept its gradients instead of them. But an output of the
Function leads to all of them, and an empty one (:func:`handle`) costs no memory to keep.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]
Backward = Callable[..., tuple[Any, ...]]


def handle(like: torch.Tensor) -> torch.Tensor:
    """An output of no elements, through which a backward pass finds the inputs: to be saved last, and returned."""
    return like.new_empty(0)


def first_order_only(backward: Backward) -> Backward:
    """Wrap a backward method: under ``create_graph=True`` its gradients raise when they are differentiated.

    The method takes, behind ``ctx``, a function that returns the saved tensors: they can be looked at only once, since an
    activation checkpoint makes them anew and lets go of them. The last of them leads to all inputs that want a gradient: a
    :func:`handle`, or the only such input. ``ctx.instead`` says what to compute with where a second derivative is needed.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, lambda: ctx.saved_tensors, *grads)
        saved = functools.cache(lambda: ctx.saved_tensors)
        with torch.no_grad():
            out = backward(ctx, saved, *grads)
        return without_derivative(out, (saved()[-1], *grads), ctx.instead)

    return wrapped


def without_derivative(gradients: tuple[Any, ...], of: tuple[Any, ...], instead: str) -> tuple[Any, ...]:
    """The gradients, functions of the tensors ``of`` whose derivative raises."""
    roots = [t for t in of if torch.is_tensor(t) and t.requires_grad]
    return tuple(_NoDerivative.apply(instead, g, *roots) if torch.is_tensor(g) else g for g in gradients)  # type: ignore[no-untyped-call]


class _NoDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, instead: str, grad: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        ctx.instead = instead
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "a gradient that dllm_kernels made was differentiated, and it has no second derivative; for a second-order term "
            f"use {ctx.instead}"
        )
