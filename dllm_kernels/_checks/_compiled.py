"""Target check as a custom op for torch.compile. It has no outputs; the ordered effect keeps it from being eliminated.

Imported only while a graph is traced, because registration is slow.
"""

import torch
from torch._library.effects import EffectType

from dllm_kernels._checks._target_range import raise_bad_target

# Unsafe in a CUDA graph, because it reads the targets back to the host.
target_range = torch.library.custom_op(
    "dllm_kernels::check_target_range", raise_bad_target, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
target_range.register_fake(lambda *_: None)
target_range.register_effect(EffectType.ORDERED)
