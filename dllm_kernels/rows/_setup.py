"""How a call computes its logits: the LM head, and the settings that a custom op takes as typed arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_kernels._checks._backend import use_triton
from dllm_kernels._graph._plain import check_no_tangent, is_dtensor
from dllm_kernels.rows._dtypes import accum_dtype, dtype_of_products
from dllm_kernels.rows._logits import Head, LinearLogits, Logits, flat_rows
from dllm_kernels.rows._options import Options
from dllm_kernels.rows._primitives import RowPrimitives, row_primitives
from dllm_kernels.rows._transform import NO_TRANSFORM, Transform


class NeedsGrad(NamedTuple):
    """Flags of the inputs that require a gradient: the logits or hidden states, and the tensors of the head."""

    x: bool = False
    weight: bool = False
    bias: bool = False
    u: bool = False
    U: bool = False

    @classmethod
    def of(cls, x: Tensor, head: Head | None) -> NeedsGrad:
        """Evaluate before ``autograd.Function.apply``: inside its forward, requires_grad is True even under no_grad."""
        if not torch.is_grad_enabled():
            return NO_GRADIENTS
        return cls(*[t is not None and t.requires_grad for t in (x, *(head or ()))])

    @property
    def frozen_head(self) -> bool:
        """True if only rows need a gradient, so that each depends on the upstream gradient of its own row alone."""
        return (self.x or self.u) and not (self.weight or self.bias or self.U)


class Gradients(NamedTuple):
    """Gradients of the inputs of :class:`NeedsGrad`; None for inputs that require none."""

    x: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    u: Tensor | None = None
    U: Tensor | None = None


# Gradients with one row per row of the call. Those of the other inputs, the parameters of the head, are sums over rows.
PER_ROW_GRADS = ("x", "u")
NO_GRADIENTS = NeedsGrad()


class Split(NamedTuple):
    """The part of a call on DTensors that this rank computes; created by ``distributed/run.py``.

    Attributes:
        primitives: makes the row primitives for its columns from those of whole rows; None if it holds whole rows.
        ranks: number of ranks that share each row.
        vocabulary: number of columns of a whole row, rounded up to a multiple of ``ranks``.
        all_reduce: sums a 0-d tensor over the ranks that hold the other rows.
        shape: shape of all rows.
        other_rows: True if other ranks hold other rows.
    """

    primitives: Callable[[RowPrimitives], RowPrimitives] | None
    ranks: int
    vocabulary: int
    all_reduce: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    other_rows: bool


class Setup(NamedTuple):
    """Settings of a call: all that the code below a public function needs beside tensors.

    Attributes:
        transform: transform of the logits.
        triton: True for the Triton kernels, False for plain torch.
        dtype: dtype of the matrix products, and of the gradient of the logits.
        chunk_dtype: dtype of the logits.
        needs: inputs that require a gradient.
        chunk_rows: rows of logits that exist at a time; None: chosen.
        active_bound: upper bound on the number of active rows; None: counted.
        with_lse: True if the logsumexp is a result.
        with_correct: True if the argmax-match is a result.
        with_ids: True if the argmax is a result.
        split: this rank's part of a call on DTensors, or None.
    """

    transform: Transform = NO_TRANSFORM
    triton: bool = False
    dtype: torch.dtype = torch.float32
    chunk_dtype: torch.dtype = torch.float32
    needs: NeedsGrad = NO_GRADIENTS
    chunk_rows: int | None = None
    active_bound: int | None = None
    with_lse: bool = False
    with_correct: bool = False
    with_ids: bool = False
    split: Split | None = None

    @classmethod
    def of(cls, logits: Logits, options: Options, split: Split | None = None) -> Setup:
        """Derive the settings of a call from validated logits and options.

        Raises:
            ValueError: the ``logits_dtype`` of a record does not fit the head, or the backend cannot run.
            NotImplementedError: an input has a forward-mode tangent.
        """
        chunk_rows, active_bound = None, None
        if not isinstance(logits, LinearLogits):
            check_no_tangent(logits)
            x, head = logits, None
        else:
            x, head = logits.hidden, logits.head
            check_no_tangent(x, *head)
            *_, chunk_rows, active_bound = logits[:7]
        return cls(
            options.transform, use_triton(options.backend, x), *dtypes_of(logits), NeedsGrad.of(x, head), chunk_rows,
            active_bound, options.with_lse, options.with_correct, options.with_ids, split,
        )  # fmt: skip

    @property
    def accum_dtype(self) -> torch.dtype:
        """Dtype of sums and of all results per row."""
        return accum_dtype(self.dtype)

    @property
    def needs_loss_scaling(self) -> bool:
        """True if the gradient of the logits is float16, whose smallest number is 6e-8, so that gradients underflow."""
        return self.dtype == torch.float16

    @property
    def splits_rows(self) -> bool:
        """True if this rank holds some columns of each row."""
        return self.split is not None and self.split.primitives is not None

    def primitives(self) -> RowPrimitives:
        """Return the row primitives to call."""
        whole = row_primitives(self.triton)
        if self.split is None or self.split.primitives is None:
            return whole
        return self.split.primitives(whole)


def compute_dtype(logits: LinearLogits) -> torch.dtype:
    """Return the dtype of the matrix products as ``F.linear`` would choose it, autocast included."""
    if logits.compute_dtype is not None:
        return logits.compute_dtype
    return dtype_of_products(logits.hidden, logits.weight)


def stored(logits: LinearLogits) -> Tensor:
    """Compute all logits of a record with torch, before its transform, for an op that reads them beside stored ones.

    Raises:
        ValueError: some tensors of the record are DTensors, and some are not.
    """
    tensors = [t for t in (logits.hidden, *logits.head) if t is not None]
    check_no_tangent(*tensors)
    if len({is_dtensor(t) for t in tensors}) > 1:
        raise ValueError(
            "a LinearLogits beside stored logits must hold only plain tensors or only DTensors, got both; pass the "
            "logits of both models as LinearLogits"
        )
    dtype, wide = dtypes_of(logits)
    hidden, *head = [None if t is None else t.to(dtype).to(wide) for t in (logits.hidden, *logits.head)]
    weight, bias, u, U = head
    linear: Any = F.linear if is_dtensor(hidden) else _linear
    with torch.autocast(logits.hidden.device.type, enabled=False):
        z: Tensor = linear(hidden, weight, bias)
        return z if u is None or U is None else z + linear(u, U, None)


class _Linear(torch.autograd.Function):
    """``F.linear``, but a row without an upstream gradient does not reach that of the weight, even if it holds NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), grad = ctx.saved_tensors, flat_rows(grads[0])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = (grad @ weight).view(x.shape) if needs_x else None
        grad_weight = None
        if needs_weight:
            grad_weight = grad.t() @ flat_rows(x).masked_fill((grad == 0).all(-1, keepdim=True), 0)
        return grad_x, grad_weight, grad.sum(0) if needs_bias else None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call,no-any-return]


def dtypes_of(logits: Logits) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype of the matrix products, and of the logits or their chunks.

    Raises:
        ValueError: the ``logits_dtype`` of a record does not fit the head.
    """
    if not isinstance(logits, LinearLogits):
        return logits.dtype, logits.dtype
    dtype, wide = compute_dtype(logits), logits.logits_dtype
    narrow = dtype in (torch.float16, torch.bfloat16)
    if wide not in (None, dtype) and not (narrow and wide == torch.float32):
        allowed = f"torch.float32, {dtype}" if narrow else dtype
        raise ValueError(f"logits_dtype must be {allowed} or None for this head, got {wide}")
    return dtype, wide or dtype
