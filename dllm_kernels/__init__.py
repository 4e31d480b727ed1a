"""Fused losses and corruption routines for training diffusion language models: drop-in replacements by import."""

# ruff: noqa: F403, F405 -- re-exports the __all__ of each subpackage
from typing import TYPE_CHECKING, Any

from dllm_kernels import corruption, generate, losses, mtp, ops, policy
from dllm_kernels.collate import DLLMCollator
from dllm_kernels.corruption import *
from dllm_kernels.generate import *
from dllm_kernels.losses import *
from dllm_kernels.mtp import *
from dllm_kernels.ops import *
from dllm_kernels.policy import *

if TYPE_CHECKING:
    from dllm_kernels.fused import fused_head

__version__ = "0.1.0"

_batched_gumbel_topk = batched_gumbel_topk
_compute_per_token_nll = compute_per_token_nll

__all__ = ["DLLMCollator", "__version__", "fused_head"]
__all__ += corruption.__all__ + generate.__all__ + losses.__all__ + mtp.__all__ + ops.__all__ + policy.__all__


def __getattr__(name: str) -> Any:
    """Import ``fused_head`` on first use, because deferred logits are a fifth of the import time."""
    if name == "fused_head":
        from dllm_kernels.fused import fused_head

        return fused_head
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
