"""The linear losses for DTensors: a head sharded by FSDP2, by tensor parallelism, or by both, and so its second part.

Which is which: see :mod:`dllm_kernels.distributed._layout`. Over data-parallel mesh dimensions the head is gathered
once (``fsdp.gather_head``). Over a tensor-parallel one it stays where it is: each rank projects the same hidden states
to its part of the vocabulary, the rows' statistics are combined (``vocab_parallel``), one small all-gather a chunk, and
the hidden states' gradient, of which each rank has the part that went through its columns, is summed over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from dllm_kernels._core._active_rows import choose_chunk, multiprocessors
from dllm_kernels._core._inputs import RowInputs
from dllm_kernels._core._plan import Plan
from dllm_kernels._utils._checks import check_dtypes
from dllm_kernels.distributed._layout import (
    Rows,
    check_contiguous,
    check_local_shape,
    layout,
    local_piece,
    rows_of,
    shard_dim,
    sum_gradient_over,
)
from dllm_kernels.distributed._shard import VocabShard
from dllm_kernels.distributed._teacher import with_local_teacher
from dllm_kernels.distributed.fsdp import gather_head
from dllm_kernels.distributed.vocab_parallel import shard_primitives


def local_hidden(inputs: RowInputs, plan: Plan) -> tuple[RowInputs, Plan, Rows]:
    """Return this rank's part of inputs with a differentiable DTensor, the plan for it, and its rows.

    What is known of each row is plain, of the global shape, the same on every tensor-parallel rank; the rows of the
    head's second part may be that too.

    Raises:
        ValueError: a layout that cannot be served, with what to do.
    """
    x, embedding = inputs.x, inputs.embedding
    w, b = gather_head(inputs.head, x), None if inputs.bias is None else gather_head(inputs.bias, x)
    vocab_dim = _vocab_mesh_dim(w)
    second = None if inputs.extra_weight is None else gather_head(inputs.extra_weight, x, "extra[1]")
    tied = embedding is inputs.weight
    table = w if tied else None if embedding is None else gather_head(embedding, x, "embedding")
    _check_like(w, {"the LM head's bias": b, "extra[1]": second, "embedding": table})
    group = w.device_mesh.get_group(vocab_dim) if vocab_dim is not None and isinstance(w, DTensor) else None
    hidden, rows = _local_hidden("hidden states", x, group)
    u = None if inputs.extra_x is None else _local_extra_rows(inputs.extra_x, x, group, rows)
    split = [set(dist.get_process_group_ranks(g)) for g in rows.groups]
    weight, bias, extra_weight = (None if t is None else _local_parameter(t, split) for t in (w, b, second))
    assert weight is not None
    check_dtypes("hidden", hidden, {"weight": weight, "bias": bias})
    check_dtypes("hidden", hidden, {"extra[0]": u, "extra[1]": extra_weight, "weight": weight})
    embedding = weight if tied else None if table is None else _local_parameter(table, split)
    check_dtypes("hidden", hidden, {"embedding": embedding})
    shard = None
    if vocab_dim is not None and isinstance(w, DTensor):
        shard = VocabShard.of(w.shape[0], w.device_mesh, vocab_dim)
        check_local_shape("the LM head's weight", w, (shard.size, w.shape[1]))
        for name, t in (("extra[1]", second), ("embedding", table)):
            if isinstance(t, DTensor):
                check_local_shape(name, t, (shard.size, t.shape[1]))
        plan = _on_shard(hidden, plan, shard)
    grad_inputs: dict[str, Any] = {
        "x": hidden,
        "weight": weight,
        "bias": bias,
        "extra_x": u,
        "extra_weight": extra_weight,
    }
    local = rows.local_inputs(inputs)._replace(**grad_inputs, embedding=embedding)
    return *with_local_teacher(local, plan, inputs, rows, shard), rows


def _on_shard(hidden: torch.Tensor, plan: Plan, shard: VocabShard) -> Plan:
    """Adapt the plan to a split vocabulary.

    Every rank must cut the same chunks, since each ends in a collective, whatever number of columns it holds. A chunk
    has as many more rows as the vocabulary is split: the same memory, and fewer collectives.
    """
    chunk_size = plan.options.chunk_size
    if chunk_size is None:
        ranks = dist.get_world_size(shard.group)
        rows, sms = -(-hidden.shape[:-1].numel() // ranks), multiprocessors(hidden.device)
        chunk_size = ranks * choose_chunk(rows, shard.step * ranks, hidden.shape[-1], plan, sms)
    return plan._replace(options=plan.options._replace(chunk_size=chunk_size), rows=shard_primitives(shard, plan))


def _vocab_mesh_dim(weight: torch.Tensor) -> int | None:
    """Return the tensor-parallel mesh dimension that splits the vocabulary, or None."""
    if not isinstance(weight, DTensor):
        return None
    split = [i for i, p in enumerate(weight.placements) if not p.is_replicate()]
    if len(split) > 1 or any(shard_dim(weight.placements[i]) != 0 for i in split):
        raise ValueError(
            "the LM head's weight must be Shard(0), split by vocabulary, over one tensor-parallel mesh dimension, got "
            f"{layout(weight)}; redistribute it"
        )
    for i in split:
        check_contiguous("the LM head's weight", weight, i)
    return split[0] if split else None


def _check_like(weight: torch.Tensor, others: dict[str, torch.Tensor | None]) -> None:
    """Raise unless all have the layout of ``weight``: otherwise only one of two gradients would be all-reduced."""
    for name, other in others.items():
        if other is None:
            continue
        placements = [t.placements if isinstance(t, DTensor) else None for t in (weight, other)]
        if placements[0] != placements[1]:
            want, got = (layout(t) if isinstance(t, DTensor) else "a plain tensor" for t in (weight, other))
            whose = "its weight" if name.startswith("the LM head's") else "the LM head's weight"
            raise ValueError(f"{name} must be laid out like {whose}, {want}, got {got}; redistribute it")


def _local_parameter(t: torch.Tensor, split: list[set[int]]) -> torch.Tensor:
    """Return this rank's piece; its gradient is summed over the ranks of ``split``, each of which uses it for other rows."""
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
                "the LM head must be on the mesh that splits the rows of the hidden states, or on a dimension of it, got "
                f"{layout(t)}: its gradient could not be summed over the ranks that share rows; redistribute one of them"
            )
    return local_piece(t.redistribute(placements=placements), grad_placements)  # redistribute makes that sum


def _local_extra_rows(
    u: torch.Tensor, hidden: torch.Tensor, group: dist.ProcessGroup | None, rows: Rows
) -> torch.Tensor:
    """Return the rows ``[..., r]`` of the head's low-rank part that belong to this rank's hidden states."""
    if not isinstance(u, DTensor):
        for each in (group, *rows.groups):  # every rank has all of it and makes a part of its gradient
            u = u if each is None else sum_gradient_over(u, each)
        local = rows.local(u)
        assert local is not None
        return local
    if isinstance(hidden, DTensor) and hidden.device_mesh != u.device_mesh:
        raise ValueError("extra[0] must be on the mesh of the hidden states, got a DTensor on another; redistribute it")
    last = u.dim() - 1
    like = hidden.placements if isinstance(hidden, DTensor) else [Replicate()] * u.device_mesh.ndim
    placements: list[Placement] = [Replicate() if shard_dim(p) in (None, last) else p for p in like]
    return _local_hidden("extra[0]", u.redistribute(placements=placements), group)[0]


def _local_hidden(name: str, hidden: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, Rows]:
    """Hidden states as this rank uses them, the same on all ranks of ``group``, over which their gradient is summed."""
    if not isinstance(hidden, DTensor):
        return hidden if group is None else sum_gradient_over(hidden, group), rows_of(name, hidden)
    mesh, last = hidden.device_mesh, hidden.dim() - 1
    ranks = None if group is None else dist.get_process_group_ranks(group)
    vocab = [dist.get_process_group_ranks(mesh.get_group(j)) == ranks for j in range(mesh.ndim)]
    placements: list[Placement] = [
        Replicate() if shared or shard_dim(p) in (None, last) else p
        for shared, p in zip(vocab, hidden.placements, strict=True)
    ]
    grad_placements = [Partial() if shared else p for shared, p in zip(vocab, placements, strict=True)]
    hidden = hidden.redistribute(placements=placements)  # in backward, what sums the parts
    rows = rows_of(name, hidden)
    check_local_shape(name, hidden, (*rows.local_shape, hidden.shape[-1]))
    local = local_piece(hidden, grad_placements)
    return local if group is None or any(vocab) else sum_gradient_over(local, group), rows
