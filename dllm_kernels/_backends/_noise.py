"""Parameters of the noise of rows of logits; ``_random/_philox.py`` defines the layout of its bits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Second counter word of the high 16 and of the low 32 bits of a uniform.
HIGH, LOW = 1, 2


class Noise(NamedTuple):
    """Uniforms of 48 bits for a range of columns of R rows; they do not depend on how a row is split into ranges.

    Attributes:
        seeds: int64 ``[R]``.
        rows: int64 ``[R]``, number of the row under its seed.
        first: the first column of the range.
        total: number of columns of a whole row.
    """

    seeds: Tensor
    rows: Tensor
    first: int
    total: int

    @property
    def first_counter(self) -> Tensor:
        """Counter of the high bits of the first column, counted from ``_philox.ZERO``, int64 ``[R]``."""
        return self.rows * -(-self.total // 16) + self.first // 16
