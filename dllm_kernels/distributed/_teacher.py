"""The teacher of a divergence, made local: the rows and the columns that this rank has of the student."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dllm_kernels.base._plain import plain
from dllm_kernels.distributed._layout import Rows, check_local_shape, is_strided, shard_dim, sum_over
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
    """The teacher's rows ``[..., C]`` beside the student's, or all where they are picked; the columns of ``part``.

    Whether ranks communicate follows from layouts alone, which all of them know, and never from a rank's own piece.
    """
    if isinstance(t, DTensor) and isinstance(x, DTensor) and x.device_mesh == t.device_mesh:
        t = t.redistribute(placements=_beside(t, x, rows, columns=part is not None, picked=picked))
        shape = tuple(t.shape[:-1]) if picked else rows.local_shape
        check_local_shape("the teacher's rows", t, (*shape, t.shape[-1] if part is None else part.size))
        return t.to_local()
    t = plain(t)
    if not picked:
        t = rows.local(t)  # type: ignore[assignment]
    return t if part is None else t.narrow(-1, part.start, part.size)


def _beside(t: DTensor, x: DTensor, rows: Rows, *, columns: bool, picked: bool) -> list[Placement]:
    """Split over the mesh as the student's ``rows`` are, and as its columns; what is not, is whole on every rank."""
    of_columns, placements = x.dim() - 1, list[Placement]()
    for i, p in enumerate(x.placements):
        if shard_dim(p) == of_columns:
            placements.append(Shard(t.dim() - 1) if columns else Replicate())
        else:
            kept = not picked and x.device_mesh.get_group(i) in rows.groups
            placements.append(p if kept else Replicate())
    return placements


def _local_head(t: torch.Tensor | None, x: torch.Tensor, part: VocabShard | None) -> torch.Tensor | None:
    """The teacher's head, or the rows of it that make the columns of ``part``."""
    if t is None:
        return None
    name = "the teacher's head"
    t = gather_head(t, x, name)
    if isinstance(t, DTensor) and part is not None and _is_split_like(t, part):
        check_local_shape(name, t, (part.size, *t.shape[1:]))
        return t.to_local()
    t = plain(t)
    return t if part is None else t.narrow(0, part.start, part.size)


def _is_split_like(t: DTensor, part: VocabShard) -> bool:
    """Whether its first dimension, and no other, is split over the ranks of ``part``, into the same pieces."""
    split = [(i, p) for i, p in enumerate(t.placements) if not p.is_replicate()]
    if len(split) != 1 or t.shape[0] != part.total:
        return False
    ((i, p),) = split
    groups = t.device_mesh.get_group(i), part.group
    ranks, wanted = map(dist.get_process_group_ranks, groups)
    return shard_dim(p) == 0 and not is_strided(p) and ranks == wanted
