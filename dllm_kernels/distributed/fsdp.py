"""Heads sharded by FSDP2: gathered once a call, with a gradient that reaches the shard.

A loss that takes the LM head's weight outside the head's own forward sees FSDP2's sharded parameter, a DTensor. A plain
``full_tensor()`` would mark the gradient as the same on every rank and drop what the other ranks contribute, without a
word. Here the gathered weight's gradient is marked as partial, so that it is summed into the shards, and divided by the
number of data-parallel ranks, as FSDP2 averages every other gradient: losses are scaled by the training loop as for any
other parameter.

The other way needs none of this: let the loss run inside the head's own forward (:class:`LinearLossHead`), where FSDP2
has gathered the weight already and reduces its gradient by itself, overlapped with the rest of the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dllm_kernels.ops.linear_nll import compute_dtype, weighted_linear_nll
from dllm_kernels.ops.token_nll import WeightedNLL


def gather_head(weight: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The whole of a head's parameter, in the dtype it is computed with; its gradient reaches the shard.

    Args:
        weight: ``[V, D]`` or ``[V]``, a DTensor sharded (or replicated) over data-parallel mesh dimensions only; a plain
            tensor is returned as it is.
        hidden: what it is used with, for the dtype: a float32 shard of a head that computes in bfloat16 is gathered, and
            its gradient reduced, in bfloat16, as FSDP2 does under a MixedPrecisionPolicy.

    Returns:
        A plain tensor, differentiable: the gradient is averaged over all ranks of the mesh.

    Raises:
        ValueError: placements other than ``Shard`` and ``Replicate``.
    """
    if not isinstance(weight, DTensor):
        return weight
    if any(not isinstance(p, (Shard, Replicate)) for p in weight.placements):
        raise ValueError(
            f"weight must be sharded by FSDP2 (Shard, Replicate) to be gathered, got {weight.placements}; redistribute it "
            "or run the loss inside the head's own forward (LinearLossHead)"
        )
    mesh, dtype = weight.device_mesh, compute_dtype(hidden, weight)
    sharded: Any = weight if weight.dtype == dtype else weight.to(dtype)
    if not (torch.is_grad_enabled() and weight.requires_grad):
        whole: torch.Tensor = sharded.full_tensor()
        return whole
    whole = sharded.full_tensor(grad_placements=[Partial() for _ in range(mesh.ndim)])
    return averaged_gradient(whole, mesh.size())


class _AveragedGradient(torch.autograd.Function):
    """Identity whose gradient is divided by a number of ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad / ctx.ranks, None


def averaged_gradient(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """``x``, its gradient divided by ``ranks``."""
    if ranks == 1:
        return x
    out: torch.Tensor = _AveragedGradient.apply(x, ranks)  # type: ignore[no-untyped-call]
    return out


class LinearLossHead(nn.Module):
    """An LM head whose forward is the loss, so that FSDP2 gathers its weight and reduces its gradient by itself.

    Example::

        model.lm_head = LinearLossHead(V, D)          # shares nothing; load the old head's weight into it
        fully_shard(model.lm_head)
        fully_shard(model)
        loss = model.lm_head(hidden, targets, weights).loss

    Args:
        out_features: V.
        in_features: D.
        bias: whether the head has a bias.
        device: of its parameters.
        dtype: of its parameters.
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, **options: Any
    ) -> WeightedNLL:
        """``ops.weighted_linear_nll`` with this head; the options are its keyword arguments."""
        return weighted_linear_nll(hidden, self.weight, targets, weights, bias=self.bias, **options)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Plain logits, for evaluation; under FSDP2 name it to ``register_fsdp_forward_method``."""
        return nn.functional.linear(hidden, self.weight, self.bias)
