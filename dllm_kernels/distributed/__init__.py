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
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._graph._plain import is_dtensor, plain

__all__ = ["LossHead", "gather_head", "global_token_count", "set_gradient_divide_factor", "summed_over"]


def summed_over(t: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum a tensor over the ranks of a group; returns a detached copy.

    Args:
        t: tensor of any shape; the shape must be equal on every rank. The strides may differ.
        group: the ranks to sum over, among them this one; None: all.

    Returns:
        A new tensor of the shape and dtype of ``t``, equal on every rank.

    Raises:
        TypeError: ``t`` is not a plain tensor, or ``group`` is not a process group.
        ValueError: ``t`` holds bools, whose sum is not a bool, or this rank is not in ``group``.
    """
    _check_summed("t", t, group)
    if t.dtype == torch.bool:
        raise ValueError("t must have a numeric dtype, got bool; pass t.sum() for a count, or t.long()")
    return _summed(plain(t), group)


def _check_summed(name: str, t: object, group: object) -> None:
    """Raise unless ``t`` is a plain tensor, and ``group`` None or a process group of this rank."""
    _checks.check_tensor(name, t)
    if is_dtensor(t):
        raise TypeError(f"{name} must be a plain torch.Tensor, got DTensor; pass its to_local() or full_tensor()")
    if group is None:
        return
    if dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must contain this rank, got a group of other ranks")
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        hint = "; pass its get_group()" if hasattr(group, "get_group") else ""
        raise TypeError(f"group must be a torch.distributed.ProcessGroup or None, got {_checks.type_name(group)}{hint}")


def _summed(t: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum contiguous copies, because a collective sums memory, and the strides of two ranks may differ."""
    total = t.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def global_token_count(mask: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Count the nonzero entries of a mask over all ranks, for the denominator of a loss whose batch is split over them.

    For masked and block diffusion the denominator is the number of supervised tokens, corrupted or not.

    Args:
        mask: this rank's mask, such as ``loss_mask``, any shape and dtype.
        group: this rank and those that hold the other parts of the batch; None: all. Exclude ranks that share rows,
            such as those of tensor parallelism, because each would count them. Without an initialised process group,
            the count is that of this process.

    Returns:
        0-d int64 on the mask's device, computed without a host sync: pass it to a loss as its ``num_..._tokens``.

    Raises:
        TypeError: ``mask`` is not a plain tensor, or ``group`` is not a process group.
        ValueError: on a CPU, the mask holds a negative number, NaN or an infinity; or this rank is not in ``group``.
    """
    _check_summed("mask", mask, group)
    _checks.check_mask_values("mask", mask)
    count = (mask != 0).sum()
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return count
    return _summed(count, group)


def __getattr__(name: str) -> Any:
    """Import the names that need DTensor on first use, because its import is slow."""
    if name in __all__:
        from dllm_kernels.distributed import fsdp

        return getattr(fsdp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
