"""Target check as a custom op for torch.compile: it has no outputs, and no graph may drop or move it.

Imported only while a graph is traced, because registration is slow.
"""

import torch
from torch._library.effects import EffectType

from dllm_kernels._utils._target_range import raise_bad_target

# Reads the targets back to the host, which a CUDA graph cannot do.
target_range = torch.library.custom_op(
    "dllm_kernels::check_target_range", raise_bad_target, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
target_range.register_fake(lambda *_: None)
target_range.register_effect(EffectType.ORDERED)
