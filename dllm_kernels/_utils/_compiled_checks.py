"""Target check as a custom op for torch.compile: it has no outputs, and no graph may drop or move it.

Imported only while a graph is traced, because registration is slow.
"""

from __future__ import annotations

import torch
from torch._library.effects import EffectType

from dllm_kernels._utils._target_range import raise_bad_target


# Reads the targets back to the host, which a CUDA graph cannot do.
@torch.library.custom_op("dllm_kernels::check_target_range", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def target_range(
    targets: torch.Tensor, name: str, V: int, ignore_index: int | None, shift: int, skip_id: int | None = None
) -> None:
    """Call :func:`raise_bad_target`."""
    raise_bad_target(targets, name, V, ignore_index, shift, skip_id)


@target_range.register_fake
def _(*_: object) -> None:
    return None


target_range.register_effect(EffectType.ORDERED)
