"""The regular call, accepted in one expression: plain tensors of the right dtypes and shapes on a CPU, and no check asked for.

Only a quick yes. A no says nothing: the checks of the public function then find what is wrong, or that nothing is.
"""

from __future__ import annotations

import os
from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_INTS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))


def is_regular(logits: Any, ids: Any, backend: Any) -> bool:
    """Whether logits ``[..., V]`` and ids ``[...]``, all of tokens, would pass every check and run on the torch path."""
    return (
        type(logits) in _PLAIN and type(ids) in _PLAIN and not torch.compiler.is_compiling()
        and logits.is_cpu and ids.is_cpu and logits.dtype in _FLOATS and ids.dtype in _INTS
        and logits.numel() > 0 and logits.shape[:-1] == ids.shape
        and "DLLM_KERNELS_CHECK" not in os.environ
        and (backend == "torch" or (backend == "auto" and "DLLM_KERNELS_BACKEND" not in os.environ))
        and ids.min().item() >= 0
    )  # fmt: skip
