"""The teacher of a divergence, made local: the rows and the columns that this rank has of the student."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dllm_kernels.distributed._layout import Rows, shard_dim, sum_over
from dllm_kernels.distributed._shard import VocabShard
from dllm_kernels.distributed.fsdp import gather_head
from dllm_kernels.rows._teacher import Pair


def local_pair(pair: Pair | None, x: torch.Tensor, rows: Rows, shard: VocabShard | None) -> Pair | None:
    """The pair with what belongs to this rank's rows of ``x``, the student's as the caller gave it, and to its columns.

    The teacher may be laid out in any way: a tensor of its that is plain is whole, the same on every rank, a DTensor is
    redistributed. Where rows are picked by number, all of them are needed on every rank.
    """
    if pair is None:
        return None
    it = pair.teacher
    assert it is not None
    columns = it.columns
    if columns is not None and shard is not None:
        columns = columns.narrow(0, shard.start, shard.size)
    part = shard if it.columns is None else None  # where columns are picked, all of them are needed
    teacher = it._replace(
        x=_local_rows(it.x, x, rows, None if pair.linear else part, picked=it.rows is not None),
        extra_x=None if it.extra_x is None else _local_rows(it.extra_x, x, rows, None, picked=it.rows is not None),
        rows=rows.local(it.rows),
        columns=columns,
        weight=_local_head(it.weight, it.x, part),
        bias=_local_head(it.bias, it.x, part),
        extra_weight=_local_head(it.extra_weight, it.x, part),
    )
    return pair._replace(teacher=teacher, total=lambda t: sum_over(t, rows.groups))


def _local_rows(t: torch.Tensor, x: torch.Tensor, rows: Rows, part: VocabShard | None, *, picked: bool) -> torch.Tensor:
    """The teacher's rows ``[..., C]`` beside the student's, or all where they are picked; the columns of ``part``."""
    if isinstance(t, DTensor):
        local = _laid_out_like(t, x, columns=part is not None, picked=picked).to_local()
        shape = tuple(t.shape[:-1]) if picked else rows.local_shape
        if tuple(local.shape) == (*shape, t.shape[-1] if part is None else part.size):
            return local
        t = t.full_tensor()
    if not picked:
        t = rows.local(t)  # type: ignore[assignment]
    return t if part is None else t.narrow(-1, part.start, part.size)


def _laid_out_like(t: DTensor, x: torch.Tensor, *, columns: bool, picked: bool) -> DTensor:
    """Split over the mesh as the student's rows are, and as its columns; what is not, is whole on every rank."""
    if not isinstance(x, DTensor) or x.device_mesh != t.device_mesh:
        return t.redistribute(placements=[Replicate()] * t.device_mesh.ndim)
    of_columns, last = x.dim() - 1, t.dim() - 1
    placements: list[Placement] = []
    for p in x.placements:
        d = shard_dim(p)
        kept = d is not None and (columns if d == of_columns else not picked)
        placements.append((Shard(last) if d == of_columns else p) if kept else Replicate())
    return t.redistribute(placements=placements)


def _local_head(t: torch.Tensor | None, x: torch.Tensor, part: VocabShard | None) -> torch.Tensor | None:
    """The teacher's head, or the rows of it that make the columns of ``part``."""
    if t is None:
        return None
    t = gather_head(t, x, "the teacher's head")
    if isinstance(t, DTensor):
        local = t.to_local()
        if part is not None and t.shape[0] == part.total and local.shape[0] == part.size:
            return local
        t = t.full_tensor()
    return t if part is None else t.narrow(0, part.start, part.size)
