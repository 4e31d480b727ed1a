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
        return self._replace(skip_id=None)

    @property
    def is_identity(self) -> bool:
        """True without any step; comparing a symbolic number would specialise a graph."""
        return self.softcap is None and self.scale is None and self.skip_id is None

    def check(self) -> Transform:
        """Return the transform, or raise unless each field is None or valid; :meth:`checked` compares with V."""
        _checks.check_factor("softcap", self.softcap)
        _checks.check_factor("scale", self.scale)
        column: Any = self.skip_id
        if column is not None and not _checks.is_int(column):
            raise TypeError(f"skip_id must be an int or None, got {_checks.type_name(column)}")
        if column is not None and column < 0:
            raise ValueError(f"skip_id must not be negative, got {column}")
        return self

    def checked(self, V: int) -> Transform:
        """Validate the transform of logits with V columns, and convert to Python types; a scale of 1 becomes None."""
        if self.is_identity:
            return NO_TRANSFORM
        self.check()
        cap, scale, column = self
        if column is not None and column >= V:
            raise ValueError(f"skip_id must lie in [0, {V}), got {column}")
        return Transform(
            None if cap is None else float(cap),
            None if scale is None or _changing.equals(float(scale), 1) else float(scale),
            None if column is None else int(column),
        )

    def check_leaves_a_column(self, V: int) -> None:
        """Raise a ValueError if rows have no other column, so that they have no distribution."""
        if self.skip_id is not None and V == 1:
            raise ValueError(f"skip_id must leave a column to choose, got {self.skip_id} and a head of one column")

    def possible(self, ids: Tensor) -> Tensor:
        """Replace ids of the skipped column by -1, which no column has."""
        return ids if self.skip_id is None else ids.masked_fill(ids == self.skip_id, -1)

    def fill_skipped_(self, t: Tensor, value: float) -> Tensor:
        """Fill the skipped column of ``t [..., V]``."""
        if self.skip_id is not None:
            t.select(-1, self.skip_id).fill_(value)
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
