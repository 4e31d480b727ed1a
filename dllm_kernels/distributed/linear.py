"""The linear losses with a sharded head: gathered (FSDP2), vocabulary-parallel (TP), or both on a 2-D mesh.

A mesh dimension is tensor-parallel when it is named "tp", "tensor" or "tensor_parallel", or when the hidden states are a
DTensor that is replicated over it while the head is sharded; every other dimension is data-parallel. Over data-parallel
dimensions the head is gathered and its gradient averaged (``fsdp.py``). Over a tensor-parallel one the head's rows stay
where they are (``vocab_parallel.py``); hidden states are the same on its ranks, and their gradient is summed over them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dllm_kernels.distributed.fsdp import averaged_gradient, gather_head
from dllm_kernels.distributed.vocab_parallel import (
    VocabShard,
    replicated,
    shard_of,
    sharded_primitives,
    summed_gradient,
)
from dllm_kernels.ops import linear_nll as ops
from dllm_kernels.ops._backend import use_triton
from dllm_kernels.ops._rows import row_primitives
from dllm_kernels.ops.token_nll import TokenNLL, WeightedNLL

TP_NAMES = ("tp", "tensor", "tensor_parallel")


def weighted_linear_nll(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    active: torch.Tensor | None,
    with_lse: bool,
    round_nll: bool,
    **options: Any,
) -> WeightedNLL:
    """``ops.weighted_linear_nll`` where the head or the hidden states are DTensors.

    Raises:
        ValueError: a layout that cannot be served, with what to do.
    """
    h, w, b, shard = _resolved(hidden, weight, bias)
    y, row_weights, on = _rows(targets, weights, active)
    assert row_weights is not None
    if shard is None:
        return ops.weighted_linear_nll(
            h, w, y, row_weights, bias=b, active=on, with_lse=with_lse, round_nll=round_nll, **options
        )
    chosen = _options(h, w, shard, **options)
    return ops.weighted_with_options(
        h, w, y, row_weights, b, on, with_lse=with_lse, round_nll=round_nll, options=chosen
    )


def linear_token_nll(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    active: torch.Tensor | None,
    with_lse: bool,
    **options: Any,
) -> TokenNLL:
    """``ops.linear_token_nll`` where the head or the hidden states are DTensors.

    Raises:
        ValueError: a layout that cannot be served, with what to do.
    """
    h, w, b, shard = _resolved(hidden, weight, bias)
    y, _, on = _rows(targets, None, active)
    if shard is None:
        return ops.linear_token_nll(h, w, y, bias=b, active=on, with_lse=with_lse, **options)
    chosen = _options(h, w, shard, **options)
    return ops.token_with_options(h, w, y, b, on, with_lse=with_lse, options=chosen)


def _rows(
    targets: torch.Tensor, weights: torch.Tensor | None, active: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    y = replicated("targets", targets)
    assert y is not None
    return y, replicated("weights", weights), replicated("active", active)


def _options(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    shard: VocabShard,
    *,
    chunk_size: int | None,
    memory_budget: int | None,
    num_active: int | None,
    ignore_index: int,
    with_correct: bool,
    backend: str,
) -> Any:
    """The options of a call; chunks must be the same on every rank, since each ends in a collective."""
    dtype = ops.compute_dtype(hidden, weight)
    if chunk_size is None and memory_budget is not None:
        most = -(-shard.V // torch.distributed.get_world_size(shard.group))
        chunk_size = max(1, memory_budget // (most * dtype.itemsize))
    primitives = sharded_primitives(row_primitives(use_triton(backend, hidden)), shard)
    return ops._Options(dtype, chunk_size, None, num_active, ignore_index, with_correct, primitives)


def _resolved(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, VocabShard | None]:
    """Plain hidden states, head and bias of this rank, and its share of the vocabulary if that is split."""
    h = _local_hidden(hidden)
    if not isinstance(weight, DTensor):
        if isinstance(bias, DTensor):
            raise ValueError(f"bias must be a plain tensor like weight, got a DTensor with {bias.placements}")
        return h, weight, bias, None
    tp = _tensor_parallel_dim(hidden, weight)
    if bias is not None and not isinstance(bias, DTensor):
        raise ValueError("bias must be a DTensor laid out like weight, got a plain tensor")
    if tp is None:
        return h, gather_head(weight, h), None if bias is None else gather_head(bias, h), None
    shard = shard_of(weight, tp, 0)
    local_bias = None if bias is None else _local_rows("bias", bias, tp, h)
    return summed_gradient(h, shard.group), _local_rows("weight", weight, tp, h), local_bias, shard


def _local_hidden(hidden: torch.Tensor) -> torch.Tensor:
    if not isinstance(hidden, DTensor):
        return hidden
    if any(isinstance(p, Partial) for p in hidden.placements):
        raise ValueError(f"hidden must not be Partial, got {hidden.placements}; redistribute it to Replicate first")
    if any(isinstance(p, Shard) for p in hidden.placements):
        raise ValueError(
            f"hidden must be replicated over its mesh, got {hidden.placements}; where ranks have rows of their own, pass "
            "hidden.to_local() with this rank's targets and global counts"
        )
    return hidden.to_local()


def _tensor_parallel_dim(hidden: torch.Tensor, weight: DTensor) -> int | None:
    """The mesh dimension over which the head's rows stay where they are, or None."""
    mesh = weight.device_mesh
    names = mesh.mesh_dim_names or ()
    replicated_there = isinstance(hidden, DTensor) and hidden.device_mesh == mesh
    for i, placement in enumerate(weight.placements):
        named = i < len(names) and names[i] in TP_NAMES
        if not (named or replicated_there) or isinstance(placement, Replicate):
            continue
        if not (isinstance(placement, Shard) and placement.dim == 0):
            raise ValueError(
                f"weight must be Shard(0) over the tensor-parallel mesh dimension {i}, its rows being the vocabulary, got "
                f"{placement}; redistribute it to Shard(0)"
            )
        return i
    return None


def _local_rows(name: str, parameter: torch.Tensor, tp: int, hidden: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a head's parameter: gathered over data-parallel dimensions, as they are over ``tp``."""
    if not isinstance(parameter, DTensor):
        raise ValueError(f"{name} must be a DTensor laid out like weight, got a plain tensor")
    mesh = parameter.device_mesh
    wanted = [Shard(0) if i == tp else Replicate() for i in range(mesh.ndim)]
    if list(parameter.placements) != wanted:
        parameter = parameter.redistribute(placements=wanted)
    grads = [Shard(0) if i == tp else Partial() for i in range(mesh.ndim)]
    dtype = ops.compute_dtype(hidden, parameter)
    local: torch.Tensor = parameter.to_local(grad_placements=grads)
    return averaged_gradient(local if local.dtype == dtype else local.to(dtype), mesh.size() // mesh.size(tp))
