"""The noise of rows of logits: what a backend needs to draw it; ``_random/_philox.py`` holds the layout of the bits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Second word of the counters of a uniform's high 16 and low 32 bits.
HIGH, LOW = 1, 2


class Noise(NamedTuple):
    """Uniforms of 48 bits for some columns of R rows, the same ones whichever part of a row that is.

    Attributes:
        seeds: int64 ``[R]``.
        rows: int64 ``[R]``, number of the row under its seed.
        first: the first column.
        total: columns of a whole row.
    """

    seeds: Tensor
    rows: Tensor
    first: int
    total: int

    @property
    def first_counter(self) -> Tensor:
        """Counter after a row's zero that holds the high bits of the first column, int64 ``[R]``."""
        return self.rows * -(-self.total // 16) + self.first // 16
