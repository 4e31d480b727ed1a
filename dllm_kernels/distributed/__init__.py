"""The losses on many processes: sharded heads (FSDP2), split vocabularies (tensor parallelism), global counts.

The only part of the package that imports ``torch.distributed``; ``ops`` loads it when it meets a DTensor. Nothing has
to be
called: hand DTensors to the losses. What is here is for the training loop:

- :func:`global_token_count`, :func:`summed_over`: denominators and statistics over ranks;
- :class:`LossHead`, :func:`gather_head`, :func:`set_gradient_divide_factor`: heads under FSDP2.
"""

from typing import Any

from dllm_kernels.distributed.reduce import global_token_count, summed_over

__all__ = ["LossHead", "gather_head", "global_token_count", "set_gradient_divide_factor", "summed_over"]


def __getattr__(name: str) -> Any:
    """Import the names that need DTensor on first use, because its import is slow."""
    if name in __all__:
        from dllm_kernels.distributed import fsdp

        return getattr(fsdp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
