"""The columns of a vocabulary that one rank holds, where ranks share it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dllm_kernels._backends._rows import SKIP
from dllm_kernels._utils._transform import Transform
from dllm_kernels.distributed._layout import local_range


class VocabShard(NamedTuple):
    """The columns that this rank holds.

    Attributes:
        start: first of them.
        size: how many; the last ranks may hold fewer than the others, or none.
        total: size of the vocabulary, V.
        step: columns of a full shard.
        group: the ranks that hold the other columns, in their order.
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

    def in_vocabulary(self, ids: torch.Tensor) -> torch.Tensor:
        """Whether any rank holds the column."""
        return (ids >= 0) & (ids < self.total)

    def local_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Convert ids to columns of this rank; ``SKIP`` for columns of other ranks."""
        here = ids - self.start
        return torch.where((here >= 0) & (here < self.size), here, SKIP)

    def local_transform(self, transform: Transform) -> Transform:
        """Restrict the transform to these columns, which may not include the skipped one."""
        skip = -1 if transform.skip_id is None else transform.skip_id - self.start
        return transform._replace(skip_id=skip if 0 <= skip < self.size else None)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """All-gather every rank's ``[N, C]`` as ``[ranks, N, C]``."""
        ranks = dist.get_world_size(self.group)
        parts = part.new_empty(ranks * part.shape[0], part.shape[1])
        if part.numel():
            dist.all_gather_into_tensor(parts, part, group=self.group)
        return parts.view(ranks, *part.shape)

    def add_parts(self, part: torch.Tensor) -> torch.Tensor:
        """All-reduce ``part`` over the group in place."""
        dist.all_reduce(part, group=self.group)
        return part
