"""The check of targets as torch.compile sees it: an op without outputs that no graph may drop or move.

Loaded only while a graph is traced, since registering costs import time.
"""

from __future__ import annotations

import torch
from torch._library.effects import EffectType

from dllm_kernels.ops import _checks


# It reads the targets back to the host, which no CUDA graph can hold.
@torch.library.custom_op("dllm_kernels::check_target_range", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _target_range_op(targets: torch.Tensor, vocab_size: int, ignore_index: int) -> None:
    _checks.check_target_range(targets, vocab_size, ignore_index)


@_target_range_op.register_fake
def _(targets: torch.Tensor, vocab_size: int, ignore_index: int) -> None:
    return None


_target_range_op.register_effect(EffectType.ORDERED)
