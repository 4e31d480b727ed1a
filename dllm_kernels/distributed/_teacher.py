"""The teacher of a divergence, made local: the rows and the columns that this rank has of the student."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dllm_kernels._core._inputs import RowInputs
from dllm_kernels._core._plan import Plan
from dllm_kernels._utils._plain import plain
from dllm_kernels.distributed._layout import Rows, check_local_shape, is_strided, shard_dim, sum_over
from dllm_kernels.distributed._shard import VocabShard
from dllm_kernels.distributed.fsdp import gather_head


def with_local_teacher(
    local: RowInputs, plan: Plan, inputs: RowInputs, rows: Rows, shard: VocabShard | None
) -> tuple[RowInputs, Plan]:
    """Add this rank's part of the teacher of ``inputs`` to its ``local`` inputs: its rows of the student, and its columns.

    The teacher may be laid out in any way. A plain tensor is whole, and equal on every rank; a DTensor is
    redistributed. If ``teacher_rows`` is given, every rank needs all of the teacher's rows.
    """
    if plan.divergence is None:
        return local, plan
    x, index, columns, u = inputs.teacher_x, inputs.teacher_rows, inputs.teacher_columns, inputs.teacher_extra_x
    assert x is not None
    part = shard if columns is None else None  # if columns are picked, every rank needs all of them
    if columns is not None and shard is not None:
        columns = columns.narrow(0, shard.start, shard.size)
    teacher: dict[str, Any] = {
        "teacher_x": _local_rows(x, inputs.x, rows, None if plan.from_hidden else part, picked=index is not None),
        "teacher_extra_x": None if u is None else _local_rows(u, inputs.x, rows, None, picked=index is not None),
        "teacher_rows": rows.local(index),
        "teacher_columns": columns,
    }
    heads: dict[str, Any] = {
        n: _local_head(getattr(inputs, n), x, part) for n in ("teacher_weight", "teacher_bias", "teacher_extra_weight")
    }
    config = plan.divergence._replace(all_reduce=lambda t: sum_over(t, rows.groups))
    return local._replace(**teacher, **heads), plan._replace(divergence=config)


def _local_rows(t: torch.Tensor, x: torch.Tensor, rows: Rows, part: VocabShard | None, *, picked: bool) -> torch.Tensor:
    """Return the teacher's rows ``[..., C]`` beside the student's, or all rows if they are picked; only the columns of ``part``.

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
    """Return the teacher's head, or its rows for the columns of ``part``."""
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
