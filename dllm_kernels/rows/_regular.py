"""The weighted NLL of a regular call on few logits, in as few steps as there can be: most losses are one of these.

Numbers and autograd are those of the record ``WEIGHTED_NLL`` (``rows/_records.py``) on the torch path, without options.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dllm_kernels.base._regular import on_torch_path
from dllm_kernels.rows._first_order import first_order_only
from dllm_kernels.rows._plan import Options
from dllm_kernels.rows._records import WEIGHTED_NLL
from dllm_kernels.rows._results import WeightedNLL
from dllm_kernels.rows_torch import _few

_NO_OPTIONS = (Options(), Options(backend="torch"))


def weighted_nll(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, options: Options
) -> WeightedNLL | None:
    """Of arguments that have been checked; None where something is not regular, or the logits are not few."""
    # In this order: of a graph no options are compared, which would make them constants of it.
    if not (on_torch_path(options.backend, logits, targets, weights) and options in _NO_OPTIONS):
        return None
    found = _few.weighted_sum(logits, targets, weights)
    if found is None:
        return None
    loss, nll, active = found
    if logits.requires_grad and torch.is_grad_enabled():
        loss = _Sum.apply(logits, (loss,), active)  # type: ignore[no-untyped-call]
    return WeightedNLL(loss, nll)


class _Sum(torch.autograd.Function):
    """The sum that has been made, in a tuple, so that it is no input."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, made: tuple[torch.Tensor], active: _few.Active) -> torch.Tensor:
        ctx.save_for_backward(logits)
        ctx.active, ctx.instead = active, WEIGHTED_NLL.instead[0]
        ctx.set_materialize_grads(False)
        return made[0]

    @staticmethod
    @first_order_only
    def backward(ctx: Any, saved: Callable[[], Any], grad: torch.Tensor | None) -> tuple[Any, None, None]:
        if grad is None:
            return None, None, None
        (logits,) = saved()
        return _few.weighted_grad(logits, ctx.active, grad), None, None
