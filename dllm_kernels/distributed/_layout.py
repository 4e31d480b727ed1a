"""Layout of DTensors over their mesh, the part that a rank holds, and two differentiable all-reduces.

A mesh dimension of a head weight is *tensor parallel* if it has one of ``TENSOR_PARALLEL_NAMES``, or if the hidden
states are a DTensor that is replicated over it. Every other mesh dimension is *data parallel*: the ranks along it hold
different rows, as under FSDP2. :func:`tensor_parallel_dims` has the exact rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from dllm_kernels.rows._interface import IGNORE
from dllm_kernels.rows._transform import Transform

Function = TypeVar("Function", bound=Callable[..., Any])
Groups = Sequence[dist.ProcessGroup]
TENSOR_PARALLEL_NAMES = ("tp", "tensor_parallel", "tensor")


def outside_the_graph(function: Function) -> Function:
    """Exclude a function from tracing by torch.compile, because it communicates and its sizes depend on the rank."""
    reason = "losses on DTensors run outside the graph"
    out: Function = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return out


def shard_dim(placement: Any) -> int | None:
    """Return the tensor dimension that a placement splits, or None."""
    return getattr(placement, "dim", None)


def is_strided(placement: Any) -> bool:
    """Return True for the placement by which FSDP2 shards a dimension that tensor parallelism has split before."""
    return hasattr(placement, "split_factor")


def dim_name(mesh: DeviceMesh, i: int) -> str | None:
    """Return the name of a mesh dimension, or None."""
    return None if mesh.mesh_dim_names is None else mesh.mesh_dim_names[i]


def local_range(size: int, mesh: DeviceMesh, splits: Sequence[int]) -> tuple[int, int]:
    """Return (start, length) of this rank's part of a dimension, split by the mesh dimensions ``splits`` in turn.

    Each split is that of ``torch.chunk`` and of DTensor's ``Shard``: pieces of the rounded-up size, of which the last
    ones may be shorter or empty.
    """
    start = 0
    for i in splits:
        step = -(-size // mesh.size(i))
        begin = min(mesh.get_local_rank(i) * step, size)
        size = min(step, size - begin)
        start += begin
    return start, size


class RankRows(NamedTuple):
    """Rows of a tensor ``[..., C]`` that this rank holds, if DTensor splits them over ranks.

    Attributes:
        shape: the global shape without the last dimension.
        ranges: (start, length) of this rank's part of each dimension of ``shape``.
        groups: the process groups whose ranks hold the other rows.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    groups: tuple[dist.ProcessGroup, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return tuple(length for _, length in self.ranges)

    def local(self, t: Tensor) -> Tensor:
        """Return this rank's part of a per-row tensor of the global shape; a view."""
        for d, (start, length) in enumerate(self.ranges):
            if length != self.shape[d]:
                t = t.narrow(d, start, length)
        return t

    def whole(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Combine per-row results of this rank to the global shape, equal on every rank, in one all-reduce."""
        last_first = reversed([*zip(self.ranges, self.shape, strict=True)])  # the order of F.pad
        pads = [n for (start, length), size in last_first for n in (start, size - start - length)]
        return sum_over(F.pad(torch.stack(parts), pads), self.groups).unbind()


class VocabShard(NamedTuple):
    """Range of columns that this rank holds.

    Attributes:
        start: the first column.
        size: number of columns; the last ranks may hold fewer than the others, or none.
        total: size of the vocabulary, V.
        step: number of columns of a full shard.
        group: the ranks that share the vocabulary, in the order of their columns.
    """

    start: int
    size: int
    total: int
    step: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, V: int, mesh: DeviceMesh, i: int) -> VocabShard:
        """Return this rank's shard of a vocabulary that mesh dimension ``i`` splits."""
        start, size = local_range(V, mesh, [i])
        return cls(start, size, V, -(-V // mesh.size(i)), mesh.get_group(i))

    def in_vocabulary(self, ids: Tensor) -> Tensor:
        """Return True for ids in [0, V), whichever rank holds their column."""
        return (ids >= 0) & (ids < self.total)

    def local_ids(self, ids: Tensor) -> Tensor:
        """Convert ids to columns of this shard; ``IGNORE`` for columns of other shards."""
        column = ids - self.start
        return torch.where((column >= 0) & (column < self.size), column, IGNORE)

    def local_transform(self, transform: Transform) -> Transform:
        """Return the transform of the columns of this shard."""
        return transform.sliced(self.start, self.size)

    def gather(self, part: Tensor) -> Tensor:
        """All-gather every rank's ``[N, C]`` as ``[ranks, N, C]``."""
        ranks = dist.get_world_size(self.group)
        parts = part.new_empty(ranks * part.shape[0], part.shape[1])
        if part.numel():
            dist.all_gather_into_tensor(parts, part, group=self.group)
        return parts.view(ranks, *part.shape)

    def add_parts(self, part: Tensor) -> Tensor:
        """All-reduce ``part`` over the group in place."""
        dist.all_reduce(part, group=self.group)
        return part


def rows_of(name: str, t: Tensor) -> RankRows:
    """Return the rows of ``[..., C]`` that this rank holds, for any layout of the columns; all rows if it is plain."""
    if not isinstance(t, DTensor):
        return RankRows(tuple(t.shape[:-1]), tuple((0, size) for size in t.shape[:-1]), ())
    mesh, leading = t.device_mesh, t.dim() - 1
    splits: list[list[int]] = [[] for _ in range(leading)]
    for i, placement in enumerate(t.placements):
        d = shard_dim(placement)
        if d is not None and d < leading:
            check_contiguous(name, t, i)
            splits[d].append(i)
    ranges = tuple(local_range(t.shape[d], mesh, s) for d, s in enumerate(splits))
    groups = tuple(mesh.get_group(i) for s in splits for i in s)
    return RankRows(tuple(t.shape[:-1]), ranges, groups)


def check_contiguous(name: str, t: DTensor, i: int) -> None:
    """Raise unless mesh dimension ``i`` splits the tensor into contiguous pieces."""
    if is_strided(t.placements[i]):
        raise ValueError(f"{name} must be split by Shard placements, got {layout(t)}; redistribute it")


def layout(t: DTensor) -> str:
    """Format the placements of a DTensor and the mesh dimensions, for error messages."""
    mesh = t.device_mesh
    return ", ".join(f"{p!r} over {dim_name(mesh, i) or f'dim {i}'}" for i, p in enumerate(t.placements))


def check_local_shape(name: str, t: DTensor, expected: Sequence[int]) -> None:
    """Raise unless this rank's piece has the shape that ``torch.chunk`` would give it."""
    local = tuple(t.to_local().shape)
    if local != tuple(expected):
        raise ValueError(
            f"{name} must be split as torch.chunk does, which gives this rank a piece of shape {tuple(expected)}, got "
            f"{local}; make it with distribute_tensor or redistribute"
        )


class _Sum(torch.autograd.Function):
    """All-reduce (sum) over ``groups`` in forward and over ``grad_groups`` in backward; the identity if empty."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, groups: Groups, grad_groups: Groups) -> Tensor:
        ctx.grad_groups = grad_groups
        return _all_reduced(t, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _all_reduced(grad, ctx.grad_groups), None, None


def _all_reduced(t: Tensor, groups: Groups) -> Tensor:
    for group in groups:
        t = t.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(t, group=group)
    return t


class _LocalPiece(torch.autograd.Function):
    """``DTensor.to_local`` with a gradient that has the strides of the whole tensor.

    Before torch 2.13 ``DTensor.to_local`` derives them from this rank's piece, which is wrong if pieces differ in size.
    autograd then gathers the gradient of a leaf to change its layout.
    """

    @staticmethod
    def forward(ctx: Any, t: DTensor, grad_placements: Sequence[Placement]) -> Tensor:
        ctx.whole = (t.device_mesh, grad_placements, t.shape, t.stride())
        local = t.to_local()
        wait = getattr(local, "wait", None)  # an asynchronous collective may be unfinished
        local = local if wait is None else wait()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return as_dtensor(grad, *ctx.whole), None


def local_piece(t: DTensor, grad_placements: Sequence[Placement]) -> Tensor:
    """Return this rank's piece of a DTensor; its gradient becomes a DTensor of the given placements."""
    out: Tensor = _LocalPiece.apply(t, grad_placements)  # type: ignore[no-untyped-call]
    return out


def sum_over(t: Tensor, groups: Groups) -> Tensor:
    """All-reduce (sum) partial results; the gradient of the replicated sum passes unchanged."""
    out: Tensor = _Sum.apply(t, groups, ())  # type: ignore[no-untyped-call]
    return out


def sum_gradient_over(t: Tensor, groups: Groups) -> Tensor:
    """Return the replicated tensor, with an all-reduce (sum) of its gradient, of which each rank computes a part."""
    out: Tensor = _Sum.apply(t, (), groups)  # type: ignore[no-untyped-call]
    return out


def as_dtensor(local: Tensor, mesh: DeviceMesh, placements: Any, shape: Any, stride: Any) -> DTensor:
    """Call ``DTensor.from_local`` on a piece of known layout, without checks."""
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def split_like(t: Tensor, weight: Tensor) -> Tensor:
    """Lay a tensor ``[V]``, equal on every rank, out like a DTensor ``[V, D]``, without communication."""
    assert isinstance(weight, DTensor)
    return distribute_tensor(t, weight.device_mesh, weight.placements, src_data_rank=None)


def tensor_parallel_dims(weight: DTensor, hidden: Tensor) -> list[int]:
    """Return the tensor-parallel mesh dimensions of a head; the others are data parallel.

    A mesh dimension is tensor parallel if

    - it has one of ``TENSOR_PARALLEL_NAMES``,
    - ``hidden``, a DTensor on the mesh of the head, is replicated over it, or
    - it shards a dimension that FSDP2 shards too, with a strided placement.

    If ``hidden`` is a DTensor on the mesh of the head, and none of the other mesh dimensions splits the head, all are
    tensor parallel. FSDP2 does not average the gradients then, and the rule of DTensor applies: they are summed.
    """
    mesh, placements = weight.device_mesh, weight.placements
    strided = {shard_dim(p) for p in placements if is_strided(p)}
    shared = hidden.placements if isinstance(hidden, DTensor) and hidden.device_mesh == mesh else None
    dims = [
        i
        for i, p in enumerate(placements)
        if dim_name(mesh, i) in TENSOR_PARALLEL_NAMES
        or (shared is not None and shared[i].is_replicate())
        or (shard_dim(p) in strided and not is_strided(p) and p.is_shard())
    ]
    others = [p for i, p in enumerate(placements) if i not in dims]
    return list(range(mesh.ndim)) if shared is not None and all(p.is_replicate() for p in others) else dims
