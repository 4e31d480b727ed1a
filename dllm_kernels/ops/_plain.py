"""Small per-row tensors (targets, masks, weights, counts) may come as DTensors; everything here works on plain ones."""

from __future__ import annotations

from typing import Any


def is_dtensor(t: Any) -> bool:
    """Whether ``t`` is a DTensor, found out without loading torch.distributed."""
    return hasattr(t, "device_mesh")


def plain(t: Any) -> Any:
    """The whole tensor behind a DTensor (no communication where it is replicated); anything else as it is."""
    return t.full_tensor() if is_dtensor(t) else t


def all_plain(*tensors: Any) -> tuple[Any, ...]:
    """:func:`plain` of each."""
    return tuple(plain(t) for t in tensors)
