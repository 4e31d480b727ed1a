"""Truncation of a distribution to its most likely columns: top-k, then top-p, then min-p.

With the columns of a row in descending order of their logits, of equal ones the lowest first, all three truncations
keep a prefix of the row. top-k keeps k columns. top-p keeps the columns before which less than the share p of the mass
lies. min-p keeps those with x_v - max x >= log(min_p), for which no order is needed.

The masses of top-p are integers: a sum of integers does not depend on the order of summation, so that every device and
rank finds the same prefix.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# A mass of the most likely column, whose sum over 2^22 columns fits int64.
_UNIT = 2.0**40


class Truncation(NamedTuple):
    """Truncations of a softmax, in this order; None omits one.

    Attributes:
        top_k: number of columns to keep, of equal ones the lowest.
        top_p: share of the mass to keep, that of the columns kept so far, in (0, 1).
        min_p: smallest probability to keep, as a share of the largest one, in (0, 1].
    """

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    @property
    def sorts(self) -> bool:
        """True if the order of the columns is needed, not only the largest logit."""
        return self.top_k is not None or self.top_p is not None


NO_TRUNCATION = Truncation()


def only_prefix(values: Tensor, columns: Tensor, V: int, truncation: Truncation) -> Tensor:
    """Return rows ``[R, V]`` with the kept ones of ``values`` in their columns, and -inf elsewhere.

    Args:
        values: the largest logits of each row ``[R, k]``, in descending order.
        columns: their columns, of equal values the lowest first.
        V: number of columns.
        truncation: with ``top_k`` values are the ``top_k`` largest, otherwise all.

    Returns:
        ``[R, V]``. A row without a finite largest logit keeps all of ``values``, so that its softmax stays NaN.
    """
    out = values.new_full((len(values), V), -math.inf)
    return out.scatter_(1, columns, values.masked_fill(~_prefix(values, truncation), -math.inf))


def _prefix(values: Tensor, truncation: Truncation) -> Tensor:
    most = values[:, :1]
    below, keep = values.double() - most.double(), torch.ones_like(values, dtype=torch.bool)
    if truncation.top_p is not None:
        mass = (below.exp() * _UNIT).round().to(torch.int64)
        total = mass.cumsum(1)
        keep &= (total - mass).double() < truncation.top_p * total[:, -1:].double()
    if truncation.min_p is not None:
        keep &= below >= math.log(truncation.min_p)
    return keep | ~most.isfinite()


def only_near(x: Tensor, most: Tensor, min_p: float) -> Tensor:
    """Set logits ``x [R, V]`` to -inf if they lie more than ``-log(min_p)`` below ``most [R, 1]``; NaN stays."""
    return x.masked_fill(x.double() - most.double() < math.log(min_p), -math.inf)
