"""Losses on several processes: sharded heads (FSDP2), split vocabularies (tensor parallelism), global counts.

Below the integrations, only this folder imports ``torch.distributed``; ``ops`` loads it at the first DTensor. Losses
accept DTensors directly. The public names are for the training loop:

- :func:`global_token_count`, :func:`summed_over`: denominators and statistics over ranks;
- :class:`LossHead`, :func:`gather_head`, :func:`set_gradient_divide_factor`: heads under FSDP2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dllm_kernels._utils import _checks
from dllm_kernels._utils._deferred import of_computed

__all__ = ["LossHead", "gather_head", "global_token_count", "set_gradient_divide_factor", "summed_over"]


@of_computed
def summed_over(t: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum a tensor over the ranks of a group; returns a detached copy.

    Args:
        t: tensor of any shape; the shape must be equal on every rank.
        group: the ranks to sum over; None: all.

    Returns:
        A new tensor of the shape and dtype of ``t``, equal on every rank.
    """
    _checks.check_tensor("t", t)
    total = t.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def global_token_count(mask: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Count the nonzero entries of a mask over all ranks, for the denominator of a loss whose batch is split over them.

    For masked and block diffusion the denominator is the number of supervised tokens, corrupted or not.

    Args:
        mask: this rank's mask, such as ``loss_mask``, any shape and dtype.
        group: the ranks that hold the other parts of the batch; None: all. Exclude ranks that share rows, such as those
            of tensor parallelism, because each would count them. Without an initialised process group, the count is
            that of this process.

    Returns:
        0-d int64 on the mask's device, computed without a host sync: pass it to a loss as its ``num_..._tokens``.
    """
    _checks.check_tensor("mask", mask)
    _checks.check_mask_values("mask", mask)
    count = (mask != 0).sum()
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return count
    return summed_over(count, group)


def __getattr__(name: str) -> Any:
    """Import the names that need DTensor on first use, because its import is slow."""
    if name in __all__:
        from dllm_kernels.distributed import fsdp

        return getattr(fsdp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
