"""Target check as a custom op for torch.compile. It has no outputs; the ordered effect keeps it from being eliminated.

Imported only while a graph is traced, because registration is slow.
"""

import torch

from dllm_kernels._checks._target_range import raise_bad_target
from dllm_kernels._graph._private import ordered_effect

# Unsafe in a CUDA graph, because it reads the targets back to the host.
target_range = torch.library.custom_op(
    "dllm_kernels::check_target_range", raise_bad_target, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
target_range.register_fake(lambda *_: None)
ordered_effect(target_range)
