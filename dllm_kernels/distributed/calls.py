"""Common decisions of ranks that must call a model equally often, because its forward communicates.

A loop whose number of calls depends on the rows of a rank, such as a generation that ends at an EOS, would end on one
rank while the others wait for it in a collective of their next call.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dllm_kernels._graph._plain import is_dtensor

Groups = list[dist.ProcessGroup]


def groups_of(model: nn.Module) -> Groups:
    """Return the groups of this rank whose ranks communicate in each forward of a model.

    They are those of its DTensors (FSDP2, tensor parallelism), of FSDP1 and DeepSpeed ZeRO-3 units, and of a
    DistributedDataParallel that broadcasts buffers. All ranks return them in one order.
    """
    groups: list[Any] = []
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            if module.will_sync_module_buffers():  # type: ignore[no-untyped-call]
                groups.append(module.process_group)
        elif fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            groups.append(module.process_group)
        for p in module.parameters(recurse=False):
            if is_dtensor(p):
                mesh: Any = p.device_mesh  # type: ignore[attr-defined]
                groups += [mesh.get_group(i) for i in range(mesh.ndim)]
            elif hasattr(p, "ds_process_group"):
                groups.append(p.ds_process_group)
    by_ranks = {tuple(dist.get_process_group_ranks(group)): group for group in groups}
    return [group for ranks, group in by_ranks.items() if len(ranks) > 1]


def on_any_rank(condition: bool, groups: Groups, device: torch.device) -> bool:
    """Return True if ``condition`` is True on any rank of the groups; a host sync if there are groups."""
    if not groups:
        return condition
    flag = torch.full((), int(condition), dtype=torch.int32, device=device)  # torch.tensor would be a second host sync
    for group in groups:
        dist.all_reduce(flag, dist.ReduceOp.MAX, group)
    return bool(flag)
