"""Where a bad target stands; reads the targets back to the host."""

from __future__ import annotations

import torch


def raise_bad_target(targets: torch.Tensor, name: str, V: int, ignore_index: int, shift: int) -> None:
    """Raise an IndexError naming the first target outside [0, V) that is not ``ignore_index``, see ``_checks``."""
    targets = targets.long()  # compared as int8 or uint8, a vocabulary size or -100 would wrap around
    where = first_true(((targets < 0) | (targets >= V)) & (targets != ignore_index))
    if where is not None:
        position = (*where[:-1], where[-1] + shift) if where else where
        raise IndexError(
            f"{name} must lie in [0, {V}) or be {ignore_index}, got {int(targets[where])} at position {position}"
        )


def first_true(found: torch.Tensor) -> tuple[int, ...] | None:
    """Where the first True stands, or None."""
    return tuple(found.nonzero()[0].tolist()) if bool(found.any()) else None
