"""Run a row op whose inputs contain DTensors: on local tensors, with results of the global shape.

:mod:`dllm_kernels.distributed._layout` classifies mesh dimensions. Over data-parallel dimensions the head, its bias and
its low-rank part are gathered once (``fsdp.gather_head``). Over a tensor-parallel dimension they stay sharded. Each
rank projects the same hidden states to its part of the vocabulary. The statistics of the rows are combined by one small
all-gather per chunk (``vocab_parallel``). The gradient of the hidden states, of which each rank has the part that went
through its columns, is all-reduced. Logits may have their vocabulary split over one mesh dimension and their rows over
others. They are replicated over all further dimensions, and their gradient has their placements.

Per-row constants are plain tensors of the global shape, equal on every tensor-parallel rank. The rows of the low-rank
part of the head may be plain too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dllm_kernels._checks import check_dtypes
from dllm_kernels._graph._plain import plain
from dllm_kernels.distributed import _layout
from dllm_kernels.distributed._layout import Groups, RankRows, VocabShard, layout, shard_dim
from dllm_kernels.distributed.fsdp import gather_head
from dllm_kernels.distributed.vocab_parallel import ShardPrimitives
from dllm_kernels.rows._call import Call
from dllm_kernels.rows._logits import Head, LinearLogits
from dllm_kernels.rows._setup import Split
from dllm_kernels.rows._teacher import Teacher

WEIGHT, BIAS = "the LM head's weight", "the LM head's bias"


@_layout.outside_the_graph
def on_this_rank(
    op: Callable[..., Any], call: Call, per_row: Mapping[str, Any] | None = None, *, sums: tuple[str, ...] = (),
    embedding: Tensor | None = None, teacher: Teacher | None = None, **keywords: Any,
) -> Any:  # fmt: skip
    """Run an op on the tensors of this rank; return plain tensors of the global shape, equal on ranks that share rows.

    Differentiable results stay differentiable.

    Args:
        op: called as ``op(call, **per_row, **keywords, split=...)`` on plain tensors.
        call: the validated call.
        per_row: further tensors, or tuples of tensors, with one entry per row of the global shape; plain, or None.
        sums: fields of the result that are sums over rows.
        embedding: a further parameter ``[V, E]``, laid out like the head; passed on if given.
        teacher: the teacher of a divergence; passed on if given.
        keywords: passed on.

    Raises:
        ValueError: a layout is not supported; the message names the fix.
    """
    x, head, logits = call.x, call.head, call.logits
    if isinstance(logits, LinearLogits) and logits.compute_dtype is not None:  # gathering casts as autocast does
        options = {"sums": sums, "embedding": embedding, "teacher": teacher, **keywords}
        cast = logits.compute_dtype if logits.compute_dtype != x.dtype else None
        with torch.autocast(x.device.type, cast, enabled=cast is not None):
            return on_this_rank(op, call._replace(logits=logits._replace(compute_dtype=None)), per_row, **options)
    if isinstance(logits, LinearLogits) and head is not None:
        hidden, (weight, bias, u, U), local_embedding, rows, shard = _local_hidden(x, head, embedding)
        extra = None if u is None or U is None else (u, U)
        logits = logits._replace(hidden=hidden, weight=weight, bias=bias, extra=extra)
        if embedding is not None:
            keywords["embedding"] = local_embedding
    else:
        logits, rows, shard = _local_logits(x)
    if teacher is not None:
        keywords["teacher"] = _local_teacher(teacher, x, head is not None, rows, shard)

    def local(t: Any) -> Any:
        return tuple(map(rows.local, t)) if isinstance(t, tuple) else None if t is None else rows.local(t)

    row_tensors = {name: local(getattr(call, name)) for name in ("ids", "active", "weights")}
    keywords |= {name: local(t) for name, t in (per_row or {}).items()}
    out = op(call._replace(logits=logits, **row_tensors), **keywords, split=_split(rows, shard))
    if not rows.groups:
        return out
    summed = {name: _layout.sum_over(getattr(out, name), rows.groups) for name in sums}
    others = {name: t for name, t in out._asdict().items() if name not in summed}
    return out._replace(**summed, **dict(zip(others, _whole(rows, tuple(others.values())), strict=True)))


def _split(rows: RankRows, shard: VocabShard | None) -> Split:
    def all_reduce(t: Tensor) -> Tensor:
        return _layout.sum_over(t, rows.groups)

    if shard is None:
        return Split(None, 1, 0, all_reduce, rows.shape, bool(rows.groups))
    ranks = dist.get_world_size(shard.group)
    primitives = functools.partial(ShardPrimitives, shard)
    return Split(primitives, ranks, shard.step * ranks, all_reduce, rows.shape, bool(rows.groups))


def _whole(rows: RankRows, out: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """Combine results ``[...]`` or ``[..., K]`` of this rank's rows to the global shape, in one all-reduce."""
    local = [t for t in out if t is not None]
    dtype = next(t.dtype for t in local if t.is_floating_point())
    dtype = torch.float64 if any(t.dtype == torch.int64 for t in local) else dtype
    parts = [part for t in local for part in (t.unbind(-1) if t.dim() > len(rows.shape) else (t,))]
    whole = iter(rows.whole(*(t.to(dtype) for t in parts)))

    def restored(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        several = t.dim() > len(rows.shape)
        value = torch.stack([next(whole) for _ in range(t.shape[-1])], -1) if several else next(whole)
        value = value if t.requires_grad else value.detach()
        return value != 0 if t.dtype == torch.bool else value.to(t.dtype)

    return [restored(t) for t in out]


def _local_logits(logits: Tensor) -> tuple[Tensor, RankRows, VocabShard | None]:
    """Return this rank's part of logits ``[..., V]``, its rows, and its columns if they are split."""
    rows = _layout.rows_of("logits", logits)
    if not isinstance(logits, DTensor):  # only the teacher's tensors are DTensors
        return logits, rows, None
    if any(p.is_partial() for p in logits.placements):
        raise ValueError(
            f"logits must not be Partial, got {layout(logits)}; redistribute them to Replicate or Shard(-1) first"
        )
    split = [i for i, p in enumerate(logits.placements) if shard_dim(p) == logits.dim() - 1]
    for i in split:
        _layout.check_contiguous("logits", logits, i)
    if len(split) > 1:
        raise ValueError(
            f"logits must have their vocabulary split over one mesh dimension, got {layout(logits)}; redistribute them"
        )
    V = logits.shape[-1]
    shard = VocabShard.of(V, logits.device_mesh, split[0]) if split else None
    _layout.check_local_shape("logits", logits, (*rows.local_shape, V if shard is None else shard.size))
    return _layout.local_piece(logits, logits.placements), rows, shard


def _local_hidden(x: Tensor, head: Head, table: Tensor | None) -> tuple[Tensor, Head, Any, RankRows, VocabShard | None]:
    """Return this rank's (hidden states, head, embedding, rows), and its columns of the head if they are split."""
    tied = table is head.weight
    parameters = {WEIGHT: head.weight, BIAS: head.bias, "extra[1]": head.U, "embedding": None if tied else table}
    heads = {name: gather_head(t, x, name) for name, t in parameters.items() if t is not None}
    shard = _shard_of_head(heads[WEIGHT])
    _check_laid_out_alike(heads)
    groups = () if shard is None else (shard.group,)
    hidden, rows = _rows_here("hidden states", x, groups)
    u = None if head.u is None else _extra_rows_here(head.u, x, groups, rows)
    split = [set(dist.get_process_group_ranks(g)) for g in rows.groups]
    local = {name: _local_parameter(t, split) for name, t in heads.items()}
    weight, bias, second = local[WEIGHT], local.get(BIAS), local.get("extra[1]")
    table = weight if tied else local.get("embedding")
    check_dtypes("hidden", hidden, {"weight": weight, "bias": bias})
    check_dtypes("hidden", hidden, {"extra[0]": u, "extra[1]": second, "weight": weight})
    check_dtypes("hidden", hidden, {"embedding": table})
    for name, t in heads.items():
        if shard is not None and isinstance(t, DTensor):
            _layout.check_local_shape(name, t, (shard.size, *t.shape[1:]))
    return hidden, Head(weight, bias, u, second), table, rows, shard


def _shard_of_head(weight: Tensor) -> VocabShard | None:
    """Return the columns of the vocabulary that this rank holds, or None if no mesh dimension splits the head."""
    if not isinstance(weight, DTensor):
        return None
    split = [i for i, p in enumerate(weight.placements) if not p.is_replicate()]
    if len(split) > 1 or any(shard_dim(weight.placements[i]) != 0 for i in split):
        raise ValueError(
            "the LM head's weight must be Shard(0), split by vocabulary, over one tensor-parallel mesh dimension, got "
            f"{layout(weight)}; redistribute it"
        )
    for i in split:
        _layout.check_contiguous(WEIGHT, weight, i)
    return VocabShard.of(weight.shape[0], weight.device_mesh, split[0]) if split else None


def _check_laid_out_alike(heads: dict[str, Tensor]) -> None:
    """Raise unless all have the layout of the weight, because otherwise only one of two gradients is all-reduced."""
    for name, other in heads.items():
        both = heads[WEIGHT], other
        if len({getattr(t, "placements", None) for t in both}) > 1:
            want, got = (layout(t) if isinstance(t, DTensor) else "a plain tensor" for t in both)
            whose = "its weight" if name == BIAS else WEIGHT
            raise ValueError(f"{name} must be laid out like {whose}, {want}, got {got}; redistribute it")


def _local_parameter(t: Tensor, split: list[set[int]]) -> Tensor:
    """Return this rank's piece; its gradient is summed over the groups of ``split``, whose ranks hold other rows."""
    if not isinstance(t, DTensor):
        return t
    mesh, placements = t.device_mesh, t.placements
    grad_placements: list[Placement] = list(placements)
    for i, p in enumerate(placements):
        ranks = set(dist.get_process_group_ranks(mesh.get_group(i)))
        if p.is_replicate() and ranks in split:
            grad_placements[i] = Partial()
        elif p.is_replicate() and any(len(ranks & s) > 1 for s in split):
            raise ValueError(
                "the LM head must be on the mesh that splits the rows of the hidden states, or on a dimension of it, "
                f"got {layout(t)}: its gradient could not be summed over the ranks that share rows; redistribute one "
                "of them"
            )
    return _layout.local_piece(t.redistribute(placements=placements), grad_placements)  # redistribute sums in backward


def _extra_rows_here(u: Tensor, hidden: Tensor, groups: Groups, rows: RankRows) -> Tensor:
    """Return the rows ``[..., r]`` of the head's low-rank part that belong to this rank's hidden states."""
    if not isinstance(u, DTensor):  # every rank holds all rows and computes a part of the gradient
        return rows.local(_layout.sum_gradient_over(u, (*groups, *rows.groups)[::-1]))
    if isinstance(hidden, DTensor) and hidden.device_mesh != u.device_mesh:
        raise ValueError("extra[0] must be on the mesh of the hidden states, got a DTensor on another; redistribute it")
    like = hidden.placements if isinstance(hidden, DTensor) else [Replicate()] * u.device_mesh.ndim
    return _rows_here("extra[0]", u.redistribute(placements=_rows_only(like, u)), groups)[0]


def _rows_only(placements: Any, t: Tensor) -> list[Placement]:
    """Keep the placements that split a dimension of ``t`` other than the last; replace all others by Replicate."""
    return [Replicate() if shard_dim(p) in (None, t.dim() - 1) else p for p in placements]


def _rows_here(name: str, t: Tensor, groups: Groups) -> tuple[Tensor, RankRows]:
    """Return this rank's rows, replicated over ``groups``, over which their gradient is summed."""
    if not isinstance(t, DTensor):
        return _layout.sum_gradient_over(t, groups) if groups else t, _layout.rows_of(name, t)
    mesh, ranks = t.device_mesh, [dist.get_process_group_ranks(group) for group in groups]
    vocab = [dist.get_process_group_ranks(mesh.get_group(j)) in ranks for j in range(mesh.ndim)]
    placements = [Replicate() if shared else p for shared, p in zip(vocab, _rows_only(t.placements, t), strict=True)]
    grad_placements = [Partial() if shared else p for shared, p in zip(vocab, placements, strict=True)]
    t = t.redistribute(placements=placements)  # sums the partial gradients in backward
    rows = _layout.rows_of(name, t)
    _layout.check_local_shape(name, t, (*rows.local_shape, t.shape[-1]))
    local = _layout.local_piece(t, grad_placements)
    return _layout.sum_gradient_over(local, groups) if groups and not any(vocab) else local, rows


def _local_teacher(
    teacher: Teacher, student: Tensor, from_hidden: bool, rows: RankRows, shard: VocabShard | None
) -> Teacher:
    """Return this rank's part of the teacher: the rows and columns of its student logits.

    The teacher may have any layout. A plain tensor must be whole, and equal on every rank. A DTensor is redistributed.
    With ``teacher_rows`` every rank needs all rows of the teacher, and with ``teacher_columns`` all columns.
    """
    x, weight, bias, u, U, index, columns, inverse = teacher
    part, picked = shard if columns is None else None, index is not None
    if columns is not None and shard is not None:
        columns = columns.narrow(0, shard.start, shard.size)
    weight, bias, U = (None if t is None else _teacher_head(t, x, part) for t in (weight, bias, U))
    x = _teacher_rows(x, student, rows, None if from_hidden else part, picked=picked)
    u = None if u is None else _teacher_rows(u, student, rows, None, picked=picked)
    return Teacher(x, weight, bias, u, U, None if index is None else rows.local(index), columns, inverse)


def _teacher_rows(t: Tensor, x: Tensor, rows: RankRows, part: VocabShard | None, *, picked: bool) -> Tensor:
    """Return the teacher's rows ``[..., C]`` for the student's rows, or all if picked; only the columns of ``part``.

    The decision to communicate depends on layouts only, because all ranks must decide alike.
    """
    if isinstance(t, DTensor) and isinstance(x, DTensor) and x.device_mesh == t.device_mesh:
        t = t.redistribute(placements=_student_placements(t, x, rows, columns=part is not None, picked=picked))
        shape = tuple(t.shape[:-1]) if picked else rows.local_shape
        _layout.check_local_shape("the teacher's rows", t, (*shape, t.shape[-1] if part is None else part.size))
        return t.to_local()
    t = plain(t) if picked else rows.local(plain(t))
    return t if part is None else t.narrow(-1, part.start, part.size)


def _student_placements(t: DTensor, x: DTensor, rows: RankRows, *, columns: bool, picked: bool) -> list[Placement]:
    """Return placements for ``t`` that split its rows, and columns if requested, as those of ``x``; else Replicate."""
    row_splits = [not picked and x.device_mesh.get_group(i) in rows.groups for i in range(x.device_mesh.ndim)]
    placements: list[Placement] = [p if keep else Replicate() for p, keep in zip(x.placements, row_splits, strict=True)]
    for i, p in enumerate(x.placements):
        if columns and shard_dim(p) == x.dim() - 1:
            placements[i] = Shard(t.dim() - 1)
    return placements


def _teacher_head(t: Tensor, x: Tensor, part: VocabShard | None) -> Tensor:
    """Return a parameter of the teacher's head, restricted to the columns of ``part`` if given."""
    name = "the teacher's head"
    t = gather_head(t, x, name)
    if isinstance(t, DTensor) and part is not None and _is_split_like(t, part):
        _layout.check_local_shape(name, t, (part.size, *t.shape[1:]))
        return t.to_local()
    whole: Tensor = plain(t)
    return whole if part is None else whole.narrow(0, part.start, part.size)


def _is_split_like(t: DTensor, part: VocabShard) -> bool:
    """Return True if only the first dimension of ``t`` is split, over the ranks of ``part`` into the same pieces."""
    split = [(i, p) for i, p in enumerate(t.placements) if not p.is_replicate()]
    if len(split) != 1 or t.shape[0] != part.total:
        return False
    ((i, p),) = split
    ranks, expected = map(dist.get_process_group_ranks, (t.device_mesh.get_group(i), part.group))
    return shard_dim(p) == 0 and not _layout.is_strided(p) and ranks == expected
