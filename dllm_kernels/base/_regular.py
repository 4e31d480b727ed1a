"""The regular call, accepted in one expression: plain tensors of the right dtypes and shapes on a CPU, and no check asked for.

Only a quick yes. A no says nothing: the checks of the public function then find what is wrong, or that nothing is.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.autograd import forward_ad

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_INTS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
_MASKS = _INTS | {torch.bool}


def is_regular(logits: Any, ids: Any, backend: Any) -> bool:
    """Whether logits ``[..., V]`` and ids ``[...]``, all of tokens, would pass every check and run on the torch path."""
    return (
        are_regular(logits, ids) and logits.shape[:-1] == ids.shape
        and (backend == "torch" or (backend == "auto" and "DLLM_KERNELS_BACKEND" not in os.environ))
        and ids.min().item() >= 0
    )  # fmt: skip


def on_torch_path(backend: Any, *tensors: Any) -> bool:
    """Whether the torch path does the work, on plain tensors that are not those of a graph and may have no tangent."""
    return (
        not torch.compiler.is_compiling() and forward_ad._current_level < 0 and all(type(t) in _PLAIN and t.is_cpu for t in tensors)
        and (backend == "torch" or (backend == "auto" and "DLLM_KERNELS_BACKEND" not in os.environ))
    )  # fmt: skip


def are_regular(logits: Any, ids: Any) -> bool:
    """Whether rows of logits and ids would pass the checks but for those of their shapes."""
    return (
        not torch.compiler.is_compiling() and forward_ad._current_level < 0 and type(logits) in _PLAIN and type(ids) in _PLAIN
        and logits.is_cpu and ids.is_cpu and logits.dtype in _FLOATS and ids.dtype in _INTS and logits.numel() > 0
        and "DLLM_KERNELS_CHECK" not in os.environ
    )  # fmt: skip


def are_regular_tokens(logits: Any, ids: Any, p: Any, noise: Any, supervised: Any) -> bool:
    """Whether logits ``[B, L, V]``, and ids, a constant p and masks ``[B, L]`` would pass every check of their kind."""
    return (
        are_regular(logits, ids) and logits.dim() == 3 and logits.shape[:2] == ids.shape
        and are_regular_masks(ids, p, noise, supervised)
    )  # fmt: skip


def are_regular_masks(ids: Any, p: Any, noise: Any, supervised: Any) -> bool:
    """Whether a constant p and masks without fractions, all of the shape of ``ids``, would pass every check of their kind."""
    return (
        not torch.compiler.is_compiling() and type(p) is type(noise) is type(supervised) is torch.Tensor
        and p.dtype in _FLOATS and not p.requires_grad and noise.dtype in _MASKS and supervised.dtype in _MASKS
        and ids.is_cpu and p.is_cpu and noise.is_cpu and supervised.is_cpu
        and ids.shape == p.shape == noise.shape == supervised.shape
    )  # fmt: skip
