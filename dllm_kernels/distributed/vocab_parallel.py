r"""Losses over a vocabulary that is split between ranks (tensor parallelism).

Every rank holds some columns of each row. Each reduces its own columns, and one small collective of ``[rows, 4]``
numbers merges them: the maximum M_r, the sum S_r of exp(z - M_r), the target's logit t (NaN on ranks that do not have
it) and whether a column of the owner beats the target. Then, on every rank alike,

    M = max_r M_r,    S = sum_r S_r exp(M_r - M),    nll = (M - t) + log S,

and the gradient of a rank's columns needs nothing more from the others. The target is the argmax when no column of its
own rank beats it, the ranks before have only smaller logits and the ranks after none larger: the lowest index of the
whole vocabulary wins a tie.

This is done by wrapping the row primitives of a backend: the autograd functions of ``ops`` run on a shard unchanged.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from dllm_kernels.ops._backend import use_triton
from dllm_kernels.ops._rows import RowPrimitives, row_primitives
from dllm_kernels.ops.token_nll import TokenNLL, rows_with_primitives

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on

# What a row's target becomes in the columns of this rank: switched off, or in another rank's columns.
OFF, ELSEWHERE = -2, -1
Stats = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


class VocabShard(NamedTuple):
    """This rank's columns of the vocabulary.

    Attributes:
        group: the ranks that hold the other columns.
        rank: this process's place in the group; ranks hold the columns in this order.
        start: index of the first column here.
        columns: how many columns are here; may be 0.
        V: columns of the whole vocabulary.
    """

    group: dist.ProcessGroup
    rank: int
    start: int
    columns: int
    V: int


def shard_of(tensor: DTensor, mesh_dim: int, dim: int) -> VocabShard:
    """The columns that this rank has of a DTensor sharded along ``dim`` over one mesh dimension."""
    mesh = tensor.device_mesh
    V, world, rank = tensor.shape[dim], mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
    most = -(-V // world)  # DTensor shards as torch.chunk does: full chunks first, what is left, then nothing
    start = min(rank * most, V)
    return VocabShard(mesh.get_group(mesh_dim), rank, start, min(most, V - start), V)


def sharded_primitives(base: RowPrimitives, shard: VocabShard) -> RowPrimitives:
    """Row primitives that take this rank's columns and targets of the whole vocabulary."""
    return RowPrimitives(
        functools.partial(_row_stats, base, shard),
        functools.partial(_row_grad, base, shard),
        functools.partial(_row_nll_grad_, base, shard),
        base.scale_,
    )


def _local_targets(targets: torch.Tensor, ignore_index: int, shard: VocabShard) -> torch.Tensor:
    here = (targets >= shard.start) & (targets < shard.start + shard.columns)
    local = torch.where(here, targets - shard.start, ELSEWHERE)
    return local.masked_fill_(targets == ignore_index, OFF)


def _row_stats(
    base: RowPrimitives,
    shard: VocabShard,
    logits: torch.Tensor,
    targets: torch.Tensor,
    active: torch.Tensor | None,
    *,
    ignore_index: int,
    with_correct: bool,
) -> Stats:
    if shard.columns:
        local = _local_targets(targets, ignore_index, shard)
        stats = base.row_stats(logits, local, active, ignore_index=OFF, with_correct=with_correct)
        _, row_max, log_sum, target_logit, correct = stats
        beaten = torch.zeros_like(row_max) if correct is None else (~correct).to(row_max.dtype)
        packed = torch.stack([row_max, log_sum.exp(), target_logit, beaten])
    else:
        packed = _no_columns(logits, targets)
    *merged, correct = _merged(_gathered(packed, shard))
    on = targets != ignore_index
    if active is not None:
        on = on & (active != 0)
    nll, row_max, log_sum, target_logit = (torch.where(on, t, 0.0) for t in merged)
    return nll, row_max, log_sum, target_logit, correct & on if with_correct else None


def _no_columns(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What a rank without columns contributes: no maximum, no sum, no target, nothing that beats it."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    packed = torch.zeros(4, targets.numel(), dtype=dtype, device=targets.device)
    packed[0] = torch.finfo(dtype).min
    packed[2] = math.nan
    return packed


def _gathered(packed: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """``[world, 4, rows]`` from every rank's ``[4, rows]``: the one collective."""
    world = dist.get_world_size(shard.group)
    out = packed.new_empty(world * packed.shape[0], packed.shape[1])
    _all_gather(out, packed.contiguous(), group=shard.group)
    return out.view(world, *packed.shape)


def _merged(
    parts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    maxima, sums, target_logits, beaten = parts.unbind(1)
    row_max = maxima.amax(0)
    log_sum = (sums * torch.exp(maxima - row_max)).sum(0).log()
    has_target = ~target_logits.isnan()
    target = torch.where(has_target, target_logits, 0.0).sum(0).masked_fill(~has_target.any(0), math.nan)
    nll = ((row_max - target) + log_sum).masked_fill(log_sum == -math.inf, math.nan)
    owner = has_target.int().argmax(0)
    rank = torch.arange(len(parts), device=parts.device).unsqueeze(1)
    loses = torch.where(rank < owner, maxima >= target, maxima > target)
    loses = torch.where(rank == owner, beaten != 0, loses)
    return nll, row_max, log_sum, target, ~loses.any(0) & ~nll.isnan()


def _row_grad(
    base: RowPrimitives,
    shard: VocabShard,
    logits: torch.Tensor,
    targets: torch.Tensor,
    active: torch.Tensor | None,
    scale: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    out: torch.Tensor,
    *,
    ignore_index: int,
    whole_row: bool = True,
) -> None:
    if not shard.columns:
        return
    if whole_row:  # a target that no rank has: the row's NLL is NaN, and so is its gradient
        scale = torch.where((targets >= 0) & (targets < shard.V) | (scale == 0), scale, math.nan)
    local = _local_targets(targets, ignore_index, shard)
    base.row_grad(logits, local, active, scale, row_max, log_sum, out, ignore_index=OFF, whole_row=False)


def _row_nll_grad_(
    base: RowPrimitives,
    shard: VocabShard,
    logits: torch.Tensor,
    targets: torch.Tensor,
    active: torch.Tensor | None,
    scale: torch.Tensor,
    *,
    ignore_index: int,
    with_correct: bool,
) -> Stats:
    flags: dict[str, Any] = {"ignore_index": ignore_index}
    stats = _row_stats(base, shard, logits[None], targets, active, with_correct=with_correct, **flags)
    _row_grad(base, shard, logits[None], targets, active, scale, stats[1], stats[2], logits[None], **flags)
    return stats


class _SummedGradient(torch.autograd.Function):
    """Identity whose gradient is summed over a group: each rank has only its columns' share of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def summed_gradient(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A replicated input of a computation that each rank does a part of: its gradient is the sum of the parts."""
    out: torch.Tensor = _SummedGradient.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def replicated(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The local tensor of what must be the same on every rank."""
    if not isinstance(tensor, DTensor):
        return tensor
    if any(not isinstance(p, Replicate) for p in tensor.placements):
        raise ValueError(
            f"{name} must be replicated over the mesh, or a plain tensor that is the same on its ranks, got "
            f"{tensor.placements}; pass {name}.full_tensor(), or give every rank its own rows as plain tensors"
        )
    return tensor.to_local()


def token_nll(
    logits: DTensor,
    targets: torch.Tensor,
    *,
    active: torch.Tensor | None,
    ignore_index: int,
    with_lse: bool,
    with_correct: bool,
    inplace_backward: bool,
    backend: str,
) -> TokenNLL:
    """``ops.token_nll`` of DTensor logits: sharded along the vocabulary, or the same on every rank.

    Args:
        logits: ``[..., V]`` with ``Shard(-1)`` on one mesh dimension and ``Replicate`` on the others. The logits are
            never gathered; their gradient has their placements.
        targets: ``[...]``, the same on every rank of the mesh: a plain tensor, or a DTensor with ``Replicate``.
        active: as in ``ops.token_nll``, replicated likewise.
        ignore_index: as in ``ops.token_nll``, and so the rest.
        with_lse: as in ``ops.token_nll``.
        with_correct: as in ``ops.token_nll``.
        inplace_backward: as in ``ops.token_nll``, on this rank's columns.
        backend: as in ``ops.token_nll``.

    Returns:
        :class:`TokenNLL` of plain tensors, the same on every rank.

    Raises:
        ValueError: a layout that cannot be served, with what to do.
    """
    last = logits.dim() - 1
    sharded = [i for i, p in enumerate(logits.placements) if isinstance(p, Shard) and p.dim == last]
    others = [p for i, p in enumerate(logits.placements) if i not in sharded]
    if len(sharded) > 1 or any(not isinstance(p, Replicate) for p in others):
        raise ValueError(
            "logits must be a DTensor with Shard(-1) on at most one mesh dimension and Replicate on the others, got "
            f"{logits.placements}; redistribute it, or where ranks have rows of their own, pass logits.to_local() with "
            "this rank's targets and global counts"
        )
    y, on = replicated("targets", targets), replicated("active", active)
    assert y is not None
    local = logits.to_local()
    triton: bool | RowPrimitives = use_triton(backend, local)
    if sharded:
        triton = sharded_primitives(row_primitives(triton), shard_of(logits, sharded[0], last))
    return rows_with_primitives(
        local, y, on, ignore_index=ignore_index, with_lse=with_lse, with_correct=with_correct,
        inplace_backward=inplace_backward, triton=triton,
    )  # fmt: skip
