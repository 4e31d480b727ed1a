"""Logits that an LM head makes: the record that ops and losses take in the place of stored logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels._checks import Extra
from dllm_kernels._graph._named import replaced
from dllm_kernels._graph._plain import Deferred
from dllm_kernels.rows._dtypes import in_dtype_of
from dllm_kernels.rows._transform import NO_TRANSFORM, Transform


class Head(NamedTuple):
    """LM head as custom ops take it; the logits are ``hidden weight^T + bias + u U^T``.

    Attributes:
        weight: ``[V, D]``.
        bias: ``[V]`` or None.
        u: rows of the low-rank part ``[..., r]``, or None.
        U: ``[V, r]``, or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    u: Tensor | None = None
    U: Tensor | None = None

    @property
    def flat(self) -> Head:
        """The head with the rows of its low-rank part as ``[N, r]``."""
        return Head(self.weight, self.bias, flat_rows(self.u), self.U)

    @property
    def extra(self) -> Extra | None:
        """The low-rank part as a record of logits holds it."""
        return None if self.u is None or self.U is None else (self.u, self.U)

    @property
    def shared(self) -> tuple[Tensor | None, ...]:
        """The tensors that all rows share."""
        return self.weight, self.bias, self.U

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Head:
        """Apply a function to the tensors that all rows share."""
        weight, bias, U = (None if t is None else function(t) for t in self.shared)
        return Head(weight, bias, self.u, U)  # type: ignore[arg-type]


def flat_rows(t: Any) -> Any:
    """Reshape ``[..., C]`` to ``[N, C]``; None stays None."""
    return None if t is None else t.reshape(-1, t.shape[-1])


class LinearLogits(NamedTuple):
    r"""Logits of an LM head that are computed one chunk of rows at a time, and never stored whole.

    .. math:: z = s \, c \tanh\!\left(\frac{W h + b + U u}{c}\right), \qquad z_{\text{skip\_id}} = -\infty

    Every op and every loss takes it in the place of logits ``[..., V]``. It is differentiable in ``hidden``,
    ``weight``, ``bias`` and ``extra``. Nothing is computed or checked before an op reads it.

    Examples:
        >>> from dllm_kernels.ops import token_nll
        >>> hidden, weight = torch.zeros(2, 8, requires_grad=True), torch.zeros(10, 8)
        >>> out = token_nll(LinearLogits(hidden, weight), torch.tensor([3, 4]))
        >>> [round(x, 4) for x in out.nll.tolist()]
        [2.3026, 2.3026]

    Attributes:
        hidden: ``[..., D]``, float16, bfloat16, float32 or float64.
        weight: ``[V, D]``, the LM head, of the dtype of ``hidden`` unless autocast is on.
        bias: ``[V]`` or None.
        extra: low-rank second part of the head, in its dtype, (u ``[..., r]``, one row per row of hidden states; U
            ``[V, r]``), or None.
        logits_dtype: torch.float32 keeps the logits of float16 and bfloat16 operands in float32, also for the argmax.
            The gradient of the logits is rounded once, before its matrix products. None: the dtype of the operands.
        chunk_size: rows per chunk of logits; None: chosen from the sizes and the memory of the device.
        num_active: upper bound on the number of active rows; None: read back from a GPU, a host sync. If the bound is
            too small, all floating results and the gradients of parameters and of rows with an upstream gradient are
            NaN, flags are False, and argmax ids are -100.
        softcap: cap c, which the op must then not have, too; None: no cap.
        scale: factor s after the cap; None: 1.
        skip_id: column that is never predicted; None: every column can be predicted.
        compute_dtype: dtype of the matrix products; None: that of the operands, or of ``torch.autocast``.
        source: identity of the head, of records whose tensors are aliases of its parameters; None: the tensors.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    extra: Extra | None = None
    logits_dtype: torch.dtype | None = None
    chunk_size: int | None = None
    num_active: int | None = None
    softcap: float | None = None
    scale: float | None = None
    skip_id: int | None = None
    compute_dtype: torch.dtype | None = None
    source: Any = None

    @property
    def transform(self) -> Transform:
        """Transform of the output of the head."""
        return Transform(self.softcap, self.scale, self.skip_id)

    @property
    def head(self) -> Head:
        """The tensors of the head; ``extra`` must be valid."""
        return Head(self.weight, self.bias, *(self.extra or (None, None)))

    @property
    def settings(self) -> tuple[Any, ...]:
        """What is done to the output of the head: the transform, and the dtypes of the products and of the logits."""
        return self.transform, self.compute_dtype, self.logits_dtype

    def in_chunks_of(self, size: int) -> LinearLogits:
        """Return the record with this number of rows per chunk, if it has none."""
        return replaced(self, chunk_size=size) if self.chunk_size is None else self

    def like(self, other: Any) -> bool:
        """Return True if the other logits are a record that differs in its hidden states only."""
        return self.shares_weight(other) and self.extra is other.extra and self[4:] == other[4:]

    def same_head(self, other: LinearLogits) -> bool:
        """Return True if one call may take the rows of both records."""
        if self.settings != other.settings:
            return False
        return self.shares_weight(other) and (self.source is not None or self.head.U is other.head.U)

    def shares_weight(self, other: Any) -> bool:
        """Return True if the other logits are a record of the same weight and bias."""
        if not isinstance(other, LinearLogits):
            return False
        if self.source is not None or other.source is not None:
            return bool(self.source == other.source)
        return self.weight is other.weight and self.bias is other.bias


Logits = Tensor | LinearLogits


def rows_of(logits: Logits) -> Tensor:
    """Return logits ``[..., V]``, or the hidden states ``[..., D]`` that they are computed from."""
    return logits.hidden if isinstance(logits, LinearLogits) else logits


def vocabulary_of(logits: Logits) -> int:
    """Return the number of columns V of validated logits."""
    return logits.weight.shape[0] if isinstance(logits, LinearLogits) else logits.shape[-1]


def map_rows(logits: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the rows: the logits, or the hidden states and those of the low-rank part of the head."""
    if not isinstance(logits, LinearLogits):
        return function(logits)
    extra: Any = logits.extra
    if isinstance(extra, (tuple, list)) and len(extra) == 2:
        extra = function(extra[0]), extra[1]
    return replaced(logits, hidden=function(logits.hidden), extra=extra)


def detached(logits: Logits) -> Logits:
    """Return logits, or their record, as constants."""
    if not isinstance(logits, LinearLogits):
        return logits.detach()
    head = Head(*[None if t is None else t.detach() for t in logits.head])  # type: ignore[arg-type]
    return replaced(logits, hidden=logits.hidden.detach(), weight=head.weight, bias=head.bias, extra=head.extra)


def cast_head(logits: LinearLogits) -> LinearLogits:
    """Cast weight and bias to the dtype of the rows, unless autocast does; float64 logits stay float64."""
    weight, bias = (in_dtype_of(logits.hidden, t) for t in (logits.weight, logits.bias))
    return not_narrowed(replaced(logits, weight=weight, bias=bias))


def not_narrowed(logits: LinearLogits) -> LinearLogits:
    """Keep float64 logits in float64; an op would reject another dtype for them."""
    is_float64 = getattr(logits.hidden, "dtype", None) == torch.float64
    return replaced(logits, logits_dtype=None) if is_float64 else logits


def opened(logits: Any, transform: Transform = NO_TRANSFORM) -> Any:
    """Ask deferred logits for their record, or for their values if no record with this further transform exists."""
    if type(logits) is Tensor or not isinstance(logits, Deferred):
        return logits
    record = logits.record()
    composes = record is not None and (record.softcap is None or transform.softcap is None)
    return record if composes else logits.materialize("an op of dllm_kernels")


def both_opened(logits: Any, teacher: Any, transform: Transform, teacher_transform: Transform) -> tuple[Any, Any]:
    """Open the logits of two models that one op compares; deferred ones are records if both are."""
    records = opened(logits, transform), opened(teacher, teacher_transform)
    dtypes = [getattr(z.hidden, "dtype", None) for z in records if isinstance(z, LinearLogits)]
    if teacher is None or (len(dtypes) == 2 and dtypes[0] == dtypes[1]):
        return records
    both = [z.materialize("an op of dllm_kernels") if isinstance(z, Deferred) else z for z in (logits, teacher)]
    return both[0], both[1]
