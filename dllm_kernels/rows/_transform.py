"""Transform of the logits before the softmax (soft cap, scale, skipped column), and its plain torch implementation.

The Triton implementation is in ``backends/triton/_transform.py``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._graph import _changing


class Transform(NamedTuple):
    """Maps a logit z to ``scale * softcap * tanh(z / softcap)``, and to -inf in column ``skip_id``; None omits a step.

    Attributes:
        softcap: bound of the magnitude of the logits (Gemma 2), > 0.
        scale: factor after the cap; a temperature T is a scale of 1 / T.
        skip_id: column that is never predicted, such as that of MASK. Its gradient is 0; its NLL as a target is NaN.
    """

    softcap: float | None = None
    scale: float | None = None
    skip_id: int | None = None

    @property
    def pointwise(self) -> Transform:
        """The transform without the skipped column."""
        return Transform(self.softcap, self.scale)

    @property
    def is_identity(self) -> bool:
        """True without any step; comparing a symbolic number would specialise a graph."""
        return self.softcap is None and self.scale is None and self.skip_id is None

    def check(self, V: int | None = None) -> Transform:
        """Return the transform; raise unless each field is None or valid, for V columns unless V is None."""
        _checks.check_factor("softcap", self.softcap)
        _checks.check_factor("scale", self.scale)
        _checks.check_column("skip_id", self.skip_id, V)
        return self

    def checked(self, V: int) -> Transform:
        """Validate the transform of logits with V columns, and convert to Python types; a scale of 1 becomes None."""
        if self.is_identity:
            return NO_TRANSFORM
        cap, scale, column = self.check(V)
        return Transform(
            None if cap is None else float(cap),
            None if scale is None or _changing.equals(float(scale), 1) else float(scale),
            None if column is None else int(column),
        )

    def check_targets(
        self, check: bool | None, name: str, targets: Tensor, V: int, ignore_index: int = -100, **rows: Any
    ) -> None:
        """Call :func:`check_target_range` for targets in V columns; ``rows``: its ``counted`` and ``shift``."""
        _checks.check_target_range(check, name, targets, V, ignore_index, excluded=self.skip_id, **rows)

    def then(self, other: Transform) -> Transform:
        """Return this transform followed by another one.

        Raises:
            ValueError: both have a soft cap, or different columns are skipped.
        """
        if self.is_identity:
            return other
        (cap, scale, column), (other_cap, other_scale, other_column) = self.check(), other.check()
        if cap is not None and other_cap is not None:
            raise ValueError(f"softcap must be None for logits that have one, {cap}, got {other_cap}")
        if column is not None and other_column not in (None, column):
            raise ValueError(f"skip_id must be that of the logits, {column}, or None, got {other_column}")
        if other_cap is not None:
            cap = other_cap if scale is None else other_cap / scale
        if other_scale is not None:
            scale = other_scale if scale is None else scale * other_scale
        return Transform(cap, scale, other_column if column is None else column)

    def sliced(self, start: int, size: int) -> Transform:
        """Return the transform of some of the columns, which skips one only if it is among them."""
        cap, scale, column = self
        inside = column is not None and start <= column < start + size
        return Transform(cap, scale, column - start if inside else None)  # type: ignore[operator]

    def common_skip(self, other: Transform) -> int | None:
        """Return the column that both transforms skip, or None."""
        return self.skip_id if self.skip_id == other.skip_id else None

    def choices(self, V: int) -> int:
        """Return the number of columns that can be predicted."""
        return V - (self.skip_id is not None)

    def check_leaves_a_column(self, V: int) -> None:
        """Raise a ValueError if no column can be predicted, so that rows have no distribution."""
        if not self.choices(V):
            raise ValueError(f"skip_id must leave a column to choose, got {self.skip_id} and a head of one column")

    def possible(self, ids: Tensor) -> Tensor:
        """Replace ids of the skipped column by -1, which no column has."""
        return ids if self.skip_id is None else ids.masked_fill(ids == self.skip_id, -1)

    def fill_skipped_(self, t: Tensor, value: float) -> Tensor:
        """Fill the skipped column of ``t [..., V]``."""
        if (column := self.skip_id) is not None:
            t.select(-1, column).fill_(value)
        return t

    @property
    def first_column(self) -> int:
        """The lowest column that is not skipped."""
        return int(self.skip_id == 0)


NO_TRANSFORM = Transform()


def transformed(z: Tensor, transform: Transform, out: Tensor) -> Tensor:
    """Transform logits z ``[..., V]``, in the accumulation dtype; returns z itself if the transform is the identity.

    The result is written to ``out``, of the shape and dtype of z, which may be z.
    """
    cap, scale, _ = transform
    if cap is not None:
        z = torch.div(z, cap, out=out).tanh_().mul_(cap if scale is None else cap * scale)
    elif scale is not None:
        z = torch.mul(z, scale, out=out)
    return _masked(z, transform, out)


def with_slope(z: Tensor, transform: Transform, out: Tensor, slope: Tensor | None) -> tuple[Tensor, Tensor | float]:
    """Return :func:`transformed` and its derivative: a float if it is constant, otherwise a tensor.

    The tensor is written to ``slope``, of the shape and dtype of z, which must not share memory with ``out``. ``slope``
    may be None without a soft cap, or if the derivative is not used.
    """
    scale = 1.0 if transform.scale is None else transform.scale
    if transform.softcap is None or slope is None:
        return transformed(z, transform, out), scale
    slope = torch.div(z, transform.softcap, out=slope).tanh_()
    x = torch.mul(slope, transform.softcap * scale, out=out)
    return _masked(x, transform, out), slope.square_().mul_(-scale).add_(scale)


def _masked(x: Tensor, transform: Transform, out: Tensor) -> Tensor:
    if transform.skip_id is None:
        return x
    return transform.fill_skipped_(x if x is out else out.copy_(x), -math.inf)


def through_(grad: Tensor, slope: Tensor | float, transform: Transform) -> Tensor:
    """Backpropagate ``grad [..., V]`` through the transform in place: times the slope, zero in column ``skip_id``."""
    if isinstance(slope, Tensor) or slope != 1:
        grad.mul_(slope)
    return transform.fill_skipped_(grad, 0)
