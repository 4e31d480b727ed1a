"""Locate out-of-range targets and invalid mask values. Causes a host sync."""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_kernels._graph._plain import readable_without_sync


def raise_bad_target(
    targets: Tensor, name: str, V: int, ignore_index: int | None, shift: int, excluded: int | None = None,
    counted: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise IndexError for the first target that is outside [0, V) or excluded, and is not ``ignore_index``.

    Only rows whose entry of ``counted`` is not 0 are checked; None: all rows.
    """
    on_host = type(targets) is Tensor and targets.is_cpu
    if excluded is None and on_host and _in_range(targets, V, ignore_index):
        return
    targets = targets.long()  # in int8 or uint8, a vocabulary size or -100 would wrap around
    bad, also = (targets < 0) | (targets >= V), ""
    if excluded is not None:
        bad, also = bad | (targets == excluded), f" and not be skip_id, {excluded}"
    if ignore_index is not None:
        bad, also = bad & (targets != ignore_index), f"{also} or be {ignore_index}"
    if counted is not None:
        bad = bad & (counted != 0)
    if (where := first_true(bad)) is not None:
        position = (*where[:-1], where[-1] + shift) if where else where
        dist = torch.distributed
        split = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        hint = "; a head or logits split over ranks must be a DTensor, not its local shard" if split else ""
        raise IndexError(f"{name} must lie in [0, {V}){also}, got {int(targets[where])} at position {position}{hint}")


def _in_range(targets: Tensor, V: int, ignore_index: int | None) -> bool:
    """Return True if all targets lie in [0, V) or are ``ignore_index``; with NumPy, a quarter of the time of torch."""
    ids = targets.numpy()
    outside = (ids < 0) | (ids >= V)
    if ignore_index is not None:
        outside &= ids != ignore_index
    return not outside.any()


def first_true(mask: Tensor) -> tuple[int, ...] | None:
    """Return the index of the first True, or None."""
    return tuple(mask.nonzero()[0].tolist()) if bool(mask.any()) else None


def first_fraction(mask: Tensor | None, supervised: Tensor) -> tuple[int, ...] | None:
    """Return the index of the first supervised mask value strictly between 0 and 1, or None; also None without data."""
    if mask is None or mask.shape != supervised.shape or not mask.is_floating_point() or mask.dtype.itemsize == 1:
        return None  # torch computes little in float8, which no mask may have
    if not (readable_without_sync(mask) and supervised.is_cpu and bool(mask.frac().any())):
        return None
    return first_true(supervised.bool() & (mask > 0) & (mask < 1))
