"""A backward pass that has no derivative of its own, and says so.

``torch.autograd.function.once_differentiable`` complains only where the upstream gradient has a graph. Where it is a
constant, as in ``torch.autograd.grad(loss, x, create_graph=True)``, the gradient it returns passes for a constant too, and
a penalty on it would silently train nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Backward = Callable[..., tuple[Any, ...]]


def first_order_only(backward: Backward) -> Backward:
    """Wrap a backward method: under ``create_graph=True`` its gradients raise when they are differentiated."""

    @functools.wraps(backward)
    def wrapped(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            out = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return out
        return tuple(_NoDerivative.apply(g.detach().requires_grad_()) if torch.is_tensor(g) else g for g in out)  # type: ignore[no-untyped-call]

    return wrapped


class _NoDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "the gradient of this loss was differentiated, and it has no second derivative; for a second-order term use "
            "torch.nn.functional.cross_entropy"
        )
