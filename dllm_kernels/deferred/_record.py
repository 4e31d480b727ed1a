"""What is recorded of logits: statistics of rows, numbers that are added, and the form that these give the logits."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

import torch

from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._logits import Head, LinearLogits
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


ONE = Fraction(1)


class Form:
    """What is done to the logits of a head.

    Attributes:
        scale: factor after the cap.
        cap: soft cap, or None.
        log_probs: True for log-probabilities.
        of_probs: 16-bit dtype of the softmax that log-probabilities are the logarithm of, or None.
        bias_factor: factor of the bias, in sums of logits.
        columns: classes of the head, None for all.
        skip: class that is never predicted, because its logit is -inf or so low that its probability is 0, or None.
        skip_finite: True if that logit is not -inf.
        overwritten: rows of log-probabilities that were replaced, or None.
        shift: numbers per row that are added to the logits.
        class_bias: constants that are added to the bias of the head, or None.
    """

    scale: Fraction = ONE
    cap: Fraction | None = None
    log_probs: bool = False
    of_probs: torch.dtype | None = None
    bias_factor: Fraction = ONE
    columns: range | None = None
    skip: int | None = None
    skip_finite: bool = False
    overwritten: Overwritten | None = None
    shift: Shift = NO_SHIFT
    class_bias: ClassBias | None = None

    @property
    def softcap(self) -> float | None:
        """Soft cap of the logits, or None."""
        return None if self.cap is None else float(self.cap)

    @property
    def factor(self) -> float | None:
        """Factor after the cap; None for 1."""
        return None if self.scale == ONE else float(self.scale)

    @property
    def transform_key(self) -> tuple[Any, ...]:
        """Equal for logits with the same transform."""
        return self.scale, self.cap, self.skip

    @property
    def is_plain(self) -> bool:
        """True if no class was set and nothing was added."""
        return self.skip is None and self.class_bias is None and not self.shift

    @property
    def fills_classes(self) -> bool:
        """True if several classes were set; an op does not know that they have no gradient if they are targets."""
        return self.class_bias is not None and self.class_bias.filled is not None

    @property
    def infinite(self) -> bool:
        """True if a class has or may have a logit of -inf."""
        skipped = self.skip is not None and not self.skip_finite
        return skipped or (self.class_bias is not None and self.class_bias.infinite)

    def bias_of(self, head: Head) -> Tensor | None:
        """Return the bias of the logits of a head."""
        bias = head.bias if head.bias is None or self.bias_factor == ONE else head.bias * float(self.bias_factor)
        return bias if self.class_bias is None else self.class_bias.added_to(bias, head.weight.dtype)


def logits_at(record: LinearLogits, classes: Tensor) -> Tensor:
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
