"""The transform that logits may go through before they become probabilities."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple


class Transform(NamedTuple):
    """What becomes of a logit z: ``scale * softcap * tanh(z / softcap)``, and -inf in column ``skip_id``; None: no such step.

    Attributes:
        softcap: bound of the logits' size (Gemma 2), > 0.
        scale: factor after the cap; a temperature T is 1 / T.
        skip_id: the column that is never predicted, such as the MASK token's. Its gradient is 0; as a target it is NaN.
    """

    softcap: float | None = None
    scale: float | None = None
    skip_id: int | None = None

    def pack(self) -> list[int]:
        """Three integers, as the schema of a compiled op can carry them: the bits of the floats, and the column."""
        bits = [-1 if f is None else struct.unpack("<q", struct.pack("<d", f))[0] for f in self[:2]]
        return [*bits, -1 if self.skip_id is None else self.skip_id]

    @classmethod
    def unpack(cls, packed: Sequence[int]) -> Transform:
        """The transform of :meth:`pack`; all bits set would be a NaN, which no transform has."""
        floats = (None if n == -1 else struct.unpack("<d", struct.pack("<q", n))[0] for n in packed[:2])
        return cls(*floats, None if packed[2] < 0 else packed[2])


NO_TRANSFORM = Transform()
