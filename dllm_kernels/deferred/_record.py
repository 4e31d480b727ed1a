"""Functions of records of logits, and numbers that are added to all logits of a row."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

import torch

from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._logits import LinearLogits
from dllm_kernels.rows._transform import transformed

Tensor = torch.Tensor


class Stats(NamedTuple):
    """Statistics of rows, of the transformed logits without a shift.

    Attributes:
        log_probs: log-probabilities of the requested classes ``[..., K]``, or None.
        lse: logsumexp.
        entropy: entropy, or None.
        best: log-probability of the argmax, or None.
        ids: argmax, or None.
        total: sum of the logits of all classes, or None.
    """

    log_probs: Any
    lse: Tensor
    entropy: Any = None
    best: Any = None
    ids: Any = None
    total: Any = None


class Shift(NamedTuple):
    """A number per row that is added to the logits, after their transform; the softmax does not depend on it.

    Attributes:
        number: a number for all rows.
        rows: constants with the shape of the logits, but of size 1 in the class dimension; or None.
        best: True if the maximum of the row is subtracted.
        constant: True if that maximum has no gradient.
    """

    number: Fraction = Fraction(0)
    rows: Tensor | None = None
    best: bool = False
    constant: bool = True

    def __bool__(self) -> bool:
        return self.number != 0 or self.rows is not None or self.best

    def times(self, factor: Fraction) -> Shift:
        """Return the shift of logits that are multiplied by a positive number."""
        rows = None if self.rows is None else self.rows * float(factor)
        return self._replace(number=self.number * factor, rows=rows)

    def added_to(self, z: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return shifted logits ``[..., V]``; ``rows``: constants ``[..., 1]``."""
        best = z.max(-1, keepdim=True).values if self.best else None
        z = z if best is None else z - (best.detach() if self.constant else best)
        z = z + float(self.number) if self.number else z
        return z if rows is None else (z + rows).to(z.dtype)

    def of(self, stats: Stats, axis: int) -> Any:
        """Return the shift of each row; ``axis``: the class dimension of the logits."""
        total: Any = float(self.number)
        if self.rows is not None:
            total = total + self.rows.movedim(axis, -1).squeeze(-1)
        if self.best:
            best = stats.best + stats.lse
            total = total - (best.detach() if self.constant else best)
        return total


NO_SHIFT = Shift()


class Overwritten(NamedTuple):
    """Rows of log-probabilities that were set to constants.

    Attributes:
        mask: True for these rows.
        seen: the caller's mask, and its version.
        fill: value of their classes.
        ids: one class per row with another value, or None.
        value: that value.
    """

    mask: Tensor
    seen: tuple[Tensor, int]
    fill: float
    ids: Tensor | None = None
    value: float = 0.0

    def at(self, ids: Tensor) -> Tensor | float:
        """Return the log-probabilities of classes, one per row, in these rows."""
        return self.fill if self.ids is None else torch.where(self.ids == ids, self.value, self.fill)


class ClassBias:
    """Constants that are added to the bias of the head, before cap and scale.

    Attributes:
        values: ``[V]``, in the accumulation dtype.
        filled: True for classes that are set to -inf or to a number so low that their probability is 0; or None.
        infinite: True if the logit of one of these classes is or may be -inf.
    """

    def __init__(self, values: Tensor, filled: Tensor | None = None, infinite: bool = False) -> None:
        self.values, self.filled, self.infinite = values, filled, infinite

    def added_to(self, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the bias of a head in a dtype."""
        values = self.values if bias is None else bias + self.values
        finite = torch.finfo(dtype)
        return torch.where(values.isinf(), values, values.clamp(finite.min, finite.max)).to(dtype)

    def scaled(self) -> ClassBias:
        """Return the bias of logits that are multiplied by a number, which may make a low logit -inf."""
        return self if self.filled is None else ClassBias(self.values, self.filled, infinite=True)

    def sliced(self, item: slice) -> ClassBias:
        """Return the bias of a slice of the classes."""
        return ClassBias(self.values[item], None if self.filled is None else self.filled[item], self.infinite)


def logits_of(record: LinearLogits, classes: Tensor) -> Tensor:
    """Compute the logits of some classes ``[K]`` of all rows, ``[..., K]``, in float64."""
    hidden, weight, bias, extra, *_ = record
    z = torch.nn.functional.linear(hidden, weight[classes], None if bias is None else bias[classes])
    z = (z if extra is None else z + torch.nn.functional.linear(extra[0], extra[1][classes])).double()
    return transformed(z, record.transform.pointwise, z)


def class_sum(record: LinearLogits, everything: bool = False) -> Tensor:
    """Sum the logits over the classes, or over everything: a product with the sum of the rows of the head.

    The logits must be linear, without a soft cap or a skipped class.
    """
    hidden, weight, bias, extra, *_ = record
    acc, rows = accum_dtype(hidden.dtype), hidden.shape[:-1].numel()

    def over(h: Tensor, w: Tensor) -> Tensor:
        h = h.reshape(-1, h.shape[-1]).sum(0, dtype=acc) if everything else h.to(acc)
        return h @ w.sum(0, dtype=acc)

    with torch.autocast(hidden.device.type, enabled=False):
        total = over(hidden, weight) + (0 if extra is None else over(*extra))
        if bias is not None:
            total = total + bias.sum(dtype=acc) * (rows if everything else 1)
        return total if record.scale is None else total * record.scale
