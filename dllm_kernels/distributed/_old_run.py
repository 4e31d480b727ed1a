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

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from dllm_kernels._core._active_rows import choose_chunk, multiprocessors
from dllm_kernels._core._inputs import RowInputs
from dllm_kernels._core._op import RowOp
from dllm_kernels._core._plan import Plan
from dllm_kernels._core._results import RestObjective, RowObjective, WeightedNLL
from dllm_kernels._core._run import run_plain
from dllm_kernels._utils._checks import check_dtypes
from dllm_kernels.distributed import _layout
from dllm_kernels.distributed._layout import Groups, Rows, VocabShard, check_local_shape, layout, shard_dim, sum_over
from dllm_kernels.distributed.fsdp import gather_head
from dllm_kernels.distributed.vocab_parallel import shard_primitives

Tensor = torch.Tensor
WEIGHT, BIAS = "the LM head's weight", "the LM head's bias"


@_layout.outside_the_graph
def run(op: RowOp, inputs: RowInputs, plan: Plan) -> Any:
    """Run the op; return plain tensors of the global shape, equal on every rank that shares the rows.

    Differentiable outputs stay differentiable.

    Raises:
        ValueError: a layout is not supported; the message names the fix.
    """
    here, rows, shard = (_local_hidden if plan.from_hidden else _local_logits)(inputs)
    if shard is not None:
        plan = _sharded_plan(inputs, here.x, plan, shard)
    out = run_plain(op, here, plan)
    if not rows.groups:
        return out
    if isinstance(out, (WeightedNLL, RowObjective, RestObjective)):
        return type(out)(sum_over(out.loss, rows.groups), *_whole(rows, out[1:]))
    return type(out)(*_whole(rows, out))


def _whole(rows: Rows, out: tuple[Tensor | None, ...]) -> list[Tensor | None]:
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


def _sharded_plan(inputs: RowInputs, x: Tensor, plan: Plan, shard: VocabShard) -> Plan:
    """Adapt the plan to a split vocabulary.

    Every rank must use the same chunks, whatever number of columns it holds, because each chunk ends in a collective.
    The number of rows per chunk is multiplied by the number of ranks, which takes the same memory and fewer
    collectives.
    """
    if plan.options.top_p is not None and plan.options.top_k is None:  # the whole row would have to be sorted
        raise ValueError("top_k must be given with top_p if the vocabulary is split over ranks, got None; pass both")
    plan = plan._replace(rows=shard_primitives(shard, plan.primitives()))
    if plan.options.chunk_size is not None or not plan.from_hidden:
        return plan
    ranks = dist.get_world_size(shard.group)
    rows, sms = -(-x.shape[:-1].numel() // ranks), multiprocessors(x.device)
    chunk_size = ranks * choose_chunk(rows, shard.step * ranks, x.shape[-1], plan.needs.weight, sms)
    return plan._replace(options=plan.options._replace(chunk_size=chunk_size))


def _local_logits(inputs: RowInputs) -> tuple[RowInputs, Rows, VocabShard | None]:
    """Return this rank's part of inputs with logits ``[..., V]``, its rows, and its columns if they are split."""
    logits = inputs.x
    rows = _layout.rows_of("logits", logits)
    if not isinstance(logits, DTensor):  # only the teacher's tensors are DTensors
        return inputs, rows, None
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
    check_local_shape("logits", logits, (*rows.local_shape, V if shard is None else shard.size))
    return rows.local_inputs(inputs)._replace(x=_layout.local_piece(logits, logits.placements)), rows, shard


def _local_hidden(inputs: RowInputs) -> tuple[RowInputs, Rows, VocabShard | None]:
    """Return this rank's part of inputs with hidden states and a head, its rows, and its columns if they are split."""
    x, tied = inputs.x, inputs.embedding is inputs.weight
    given = {WEIGHT: inputs.head, BIAS: inputs.bias, "extra[1]": inputs.extra_weight}
    given |= {"embedding": None if tied else inputs.embedding}
    heads = {name: gather_head(t, x, name) for name, t in given.items() if t is not None}
    shard = _shard_of_head(heads[WEIGHT])
    _check_laid_out_alike(heads)
    groups = () if shard is None else (shard.group,)
    hidden, rows = _rows_here("hidden states", x, groups)
    u = None if inputs.extra_x is None else _extra_rows_here(inputs.extra_x, x, groups, rows)
    split = [set(dist.get_process_group_ranks(g)) for g in rows.groups]
    local = {name: _local_parameter(t, split) for name, t in heads.items()}
    weight, bias, second = local[WEIGHT], local.get(BIAS), local.get("extra[1]")
    embedding = weight if tied else local.get("embedding")
    check_dtypes("hidden", hidden, {"weight": weight, "bias": bias})
    check_dtypes("hidden", hidden, {"extra[0]": u, "extra[1]": second, "weight": weight})
    check_dtypes("hidden", hidden, {"embedding": embedding})
    for name, t in heads.items():
        if shard is not None and isinstance(t, DTensor):
            check_local_shape(name, t, (shard.size, *t.shape[1:]))
    local_inputs = rows.local_inputs(inputs)._replace(x=hidden, extra_x=u, weight=weight, bias=bias)
    return local_inputs._replace(extra_weight=second, embedding=embedding), rows, shard


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


def _extra_rows_here(u: Tensor, hidden: Tensor, groups: Groups, rows: Rows) -> Tensor:
    """Return the rows ``[..., r]`` of the head's low-rank part that belong to this rank's hidden states."""
    if not isinstance(u, DTensor):  # every rank holds all rows and computes a part of the gradient
        return rows.local(_layout.sum_gradient_over(u, (*groups, *rows.groups)[::-1]))
    if isinstance(hidden, DTensor) and hidden.device_mesh != u.device_mesh:
        raise ValueError("extra[0] must be on the mesh of the hidden states, got a DTensor on another; redistribute it")
    like = hidden.placements if isinstance(hidden, DTensor) else [Replicate()] * u.device_mesh.ndim
    return _rows_here("extra[0]", u.redistribute(placements=_of_rows(like, u)), groups)[0]


def _of_rows(placements: Any, t: Tensor) -> list[Placement]:
    """Keep the placements that split a dimension of ``t`` other than the last; replace all others by Replicate."""
    return [Replicate() if shard_dim(p) in (None, t.dim() - 1) else p for p in placements]


def _rows_here(name: str, t: Tensor, groups: Groups) -> tuple[Tensor, Rows]:
    """Return this rank's rows, replicated over ``groups``, over which their gradient is summed."""
    if not isinstance(t, DTensor):
        return _layout.sum_gradient_over(t, groups) if groups else t, _layout.rows_of(name, t)
    mesh, ranks = t.device_mesh, [dist.get_process_group_ranks(group) for group in groups]
    vocab = [dist.get_process_group_ranks(mesh.get_group(j)) in ranks for j in range(mesh.ndim)]
    placements = [Replicate() if shared else p for shared, p in zip(vocab, _of_rows(t.placements, t), strict=True)]
    grad_placements = [Partial() if shared else p for shared, p in zip(vocab, placements, strict=True)]
    t = t.redistribute(placements=placements)  # sums the partial gradients in backward
    rows = _layout.rows_of(name, t)
    check_local_shape(name, t, (*rows.local_shape, t.shape[-1]))
    local = _layout.local_piece(t, grad_placements)
    return _layout.sum_gradient_over(local, groups) if groups and not any(vocab) else local, rows
