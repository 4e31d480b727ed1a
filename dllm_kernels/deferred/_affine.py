"""Affine functions of values of rows, with constant coefficients: their weights, masks and sums."""

from __future__ import annotations

import functools
from typing import Any

import torch

from dllm_kernels.deferred._pending import Pending
from dllm_kernels.rows._dtypes import accum_dtype

Tensor = torch.Tensor


class AffineRows(Pending):
    """``factor * row_weights * values + offset``, summed over the last dimension of the rows or not.

    Attributes:
        target: one integer per row.
        row_weights: constants, one per row, in the dtype of the sum, or None.
        factor: a number.
        offset: constants in the shape of this tensor, or None.
        finite: constants whose product with the NLL is the input of ``nan_to_num``, before all else; None: there is no
            ``nan_to_num``.
        summed: True if the rows ``target`` have one dimension more than this tensor, over which it is a sum.
    """

    target: Tensor
    row_weights: Tensor | None
    factor: float
    offset: Tensor | None
    finite: Tensor | None
    summed: bool

    @property
    def bare(self) -> bool:
        """True if this is the values themselves, in any dtype."""
        return self.factor == 1 and not self.summed and self.row_weights is self.offset is self.finite is None

    def changed(self, dtype: torch.dtype | None = None, recipe: Any = None, **changes: Any) -> Any:
        """Return another function of the same values."""
        raise NotImplementedError

    def constant(self, value: Tensor | float) -> Tensor:
        """Return a copy of a constant in this tensor's shape, in the dtype of the sum."""
        dtype = accum_dtype(self.logits.hidden.dtype)
        if isinstance(value, Tensor):
            tensor = value.detach().to(self.device, torch.promote_types(dtype, value.dtype), copy=True)
        else:
            tensor = torch.full((), value, dtype=dtype, device=self.device)
        return tensor.expand(self.shape)

    def expand_to_rows(self, constant: Tensor) -> Tensor:
        """Expand a constant in this tensor's shape to the rows."""
        return constant.unsqueeze(-1).expand(self.target.shape) if self.summed else constant

    def times(self, factor: float) -> Any:
        """Return the product with a number."""
        return self.changed(factor=self.factor * factor, offset=None if self.offset is None else self.offset * factor)

    def weighted(self, weights: Tensor, dtype: torch.dtype) -> Any:
        """Return the product with constants, in a dtype."""
        weights = self.constant(weights)
        offset = None if self.offset is None else self.offset * weights
        weights = self.expand_to_rows(weights)
        weights = weights if self.row_weights is None else self.row_weights * weights
        return self.changed(row_weights=weights, offset=offset, dtype=dtype)

    def masked(self, keep: Tensor, fill: Any, dtype: torch.dtype | None = None) -> Any:
        """Return the NLL with ``fill``, a number or constants, where ``keep`` is False; NaN there does not count."""
        weights = torch.where(self.expand_to_rows(keep.expand(self.shape)), self.coefficients(), 0.0)
        offset = self.offset
        if offset is not None or isinstance(fill, Tensor) or fill != 0:
            offset = torch.where(keep, 0.0 if offset is None else offset, self.constant(fill))
        return self.changed(row_weights=weights, factor=1.0, offset=offset, dtype=dtype)

    def plus(self, other: Any) -> Any:
        """Return the sum with an NLL of the same rows and targets; None for any other."""
        if any(getattr(self, name) is not getattr(other, name) for name in ("target", "logits", "finite", "function")):
            return None
        if self.summed != other.summed or self.needs_grad != other.needs_grad:
            return None
        offset = other.offset if self.offset is None else self.offset
        if offset is not None and self.offset is not None and other.offset is not None:
            offset = self.offset + other.offset
        dtype = torch.promote_types(self.dtype, other.dtype)
        weights = self.coefficients() + other.coefficients()
        return self.changed(row_weights=weights, factor=1.0, offset=offset, dtype=dtype)

    def coefficients(self) -> Tensor:
        """Return factor times weight of each row."""
        if self.factor == 1 and self.row_weights is not None:
            return self.row_weights
        weights = self.expand_to_rows(self.constant(self.factor))
        return weights if self.row_weights is None else weights * self.row_weights


# The values of rows themselves.
VALUES: dict[str, Any] = {"row_weights": None, "factor": 1.0, "offset": None, "finite": None, "summed": False}


def active_rows(row_weights: Tensor | None, finite: Tensor | None, **_: Any) -> Tensor | None:
    """Return a mask of the rows whose coefficient is not 0; None if all rows count."""
    constants = [t for t in (finite, row_weights) if t is not None]
    return functools.reduce(torch.mul, [t != 0 for t in constants]) if constants else None


def affine_of(
    nll: Tensor, dtype: torch.dtype, *, row_weights: Tensor | None, factor: float, offset: Tensor | None,
    finite: Tensor | None, summed: bool,
) -> Tensor:  # fmt: skip
    """Return the affine function of the NLL; NaN in rows without a coefficient do not count."""
    active = active_rows(row_weights, finite)
    nll = (nll if active is None else torch.where(active, nll, 0.0)).to(dtype)
    nll = nll if finite is None else (nll * finite).to(dtype).nan_to_num()
    nll = nll if factor == 1 else nll * factor
    nll = nll if row_weights is None else (nll * row_weights).to(dtype)
    nll = nll.sum(-1) if summed else nll
    return nll if offset is None else (nll + offset).to(dtype)
