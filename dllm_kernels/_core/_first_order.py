"""Backward passes without a derivative of their own, which raise when they are differentiated.

``torch.autograd.function.once_differentiable`` complains only where the upstream gradient has a graph. Where it is a
constant, as in ``torch.autograd.grad(loss, x, create_graph=True)``, the gradient it returns passes for a constant too,
and a penalty on it would silently train nothing.

The error must lie on every path from the gradient to the inputs of the Function, and to the upstream gradients:
autograd visits nothing else where it is told whose gradient is wanted (``backward(inputs=[weight])``). The inputs
themselves are not at hand in backward, where the Function has kept its gradients instead of them. But an output of
the Function leads to all of them, and an empty one (:func:`handle`) costs no memory to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dllm_kernels._utils._plain import refuse_forward_mode, refuse_vmap, transforms_active

Tensors = tuple[torch.Tensor | None, ...]


def handle(like: torch.Tensor) -> torch.Tensor:
    """Make an empty output that leads from a backward pass to the inputs; save it and return it."""
    return like.new_empty(0)


def first_order(make: Callable[..., Tensors], tensors: Sequence[torch.Tensor | None], instead: str) -> Tensors:
    """Compute gradients ``make(*tensors)`` that raise when they are differentiated.

    Args:
        make: computes the gradients from its arguments alone, which a transform of ``torch.func`` unwraps.
        tensors: the upstream gradients, the saved tensors, and a tensor that leads to all inputs that require a
            gradient: a :func:`handle`, or the only such input.
        instead: what to use if a second derivative is needed.
    """
    if not torch.is_grad_enabled() and not transforms_active():
        return make(*tensors)
    return _Gradients.apply(make, instead, *tensors)  # type: ignore[no-untyped-call, no-any-return]


class FirstOrder:
    """Base of autograd Functions: raises for each transform of ``torch.func`` that needs more than a gradient."""

    @staticmethod
    def vmap(*_: Any) -> Any:
        refuse_vmap()

    @staticmethod
    def jvp(*_: Any) -> Any:
        refuse_forward_mode()


class _Gradients(FirstOrder, torch.autograd.Function):
    @staticmethod
    def forward(make: Callable[..., Tensors], _: str, *tensors: torch.Tensor | None) -> Tensors:
        return make(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.instead = inputs[1]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "a gradient that dllm_kernels made was differentiated, and it has no second derivative; for a second-order term "
            f"use {ctx.instead}"
        )
