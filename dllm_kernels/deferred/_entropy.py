"""Rules that find the entropy of rows: the sum of the softmax times the log-softmax over the classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from dllm_kernels._checks import FLOAT_DTYPES
from dllm_kernels.deferred._graph import Step
from dllm_kernels.deferred._logits import RULES, DeferredLogits, on_classes, rule
from dllm_kernels.deferred._moves import Call
from dllm_kernels.deferred._nll import dtype_after
from dllm_kernels.deferred._pending import Asked, DeferredStat
from dllm_kernels.deferred._tensor import DeferredTensor, arguments

Tensor = torch.Tensor


class OfSoftmax(DeferredTensor):
    """Softmax of logits, or its product with the log-softmax, in the shape of the logits.

    Attributes:
        logits: the logits.
        operation: what the report names as the operation that needs the logits.
        product: True for the product.
    """

    logits: DeferredLogits
    operation: str
    product: bool

    @classmethod
    def of(
        cls, x: DeferredLogits, sources: Sequence[Any], step: Callable[..., Tensor], dtype: torch.dtype, operation: str,
        product: bool = False,
    ) -> Any:  # fmt: skip
        """Return ``step(*sources)``."""
        x.check_unchanged()
        form = torch.empty(x.shape, dtype=dtype, device="meta")
        recipe = Step(step, x.restored, sources)
        return cls.made(form, x.tapped(), recipe, needs=x.needs, logits=x, operation=operation, product=product)

    def after(self, sources: Sequence[Any], step: Callable[..., Tensor]) -> Any:
        """Return a copy."""
        return self.made(
            step(self.form), self.tapped(), Step(step, self.logits.restored, sources), needs=self.needs,
            logits=self.logits, operation=self.operation, product=False,
        )  # fmt: skip

    def materialize(self, use: str = "materialize") -> Tensor:
        """Return the values; the report names the operation that would have made them."""
        return super().materialize(self.operation)


@rule("softmax")
def _softmax(x: DeferredLogits, call: Call) -> Any:
    names = ("dim", "dtype") if call.function is not F.softmax else ("dim", "_stacklevel", "dtype")
    given = arguments(names, call.args, call.kwargs)
    dtype = given.get("dtype")
    if not on_classes(x, given.get("dim")) or dtype not in (None, *FLOAT_DTYPES) or not _has_entropy(x):
        return NotImplemented
    dtype = dtype or dtype_after(lambda z: z.softmax(-1), x.dtype, x.device)
    return OfSoftmax.of(x, [x], lambda z: call.on(z).to(dtype), dtype, "softmax")


@rule("exp")
def _exp(x: DeferredLogits, call: Call) -> Any:
    if not x.log_probs or call.args or call.kwargs or not _has_entropy(x):
        return NotImplemented
    dtype = dtype_after(lambda z: z.exp(), x.dtype, x.device)
    return OfSoftmax.of(x, [x], lambda z: z.exp().to(dtype), dtype, "exp")


def _has_entropy(x: DeferredLogits) -> bool:
    return x.fusible and x.requires_grad and torch.is_grad_enabled() and x.overwritten is None and x.skip is None


def _normalized(x: DeferredLogits) -> Any:
    """Return the logits whose log-softmax ``x`` is; None if they are not known."""
    source = x.sources[0] if len(x.sources) == 1 else None
    return source if isinstance(source, DeferredLogits) and not source.log_probs else None


def _product(p: Any, call: Call) -> Any:
    """Multiply the softmax by the log-softmax of the same logits."""
    (other,) = call.args if len(call.args) == 1 and not call.kwargs else (None,)
    if isinstance(p, DeferredLogits):
        p, other = other, p
    if not isinstance(p, OfSoftmax) or p.product or not isinstance(other, DeferredLogits) or not other.log_probs:
        return NotImplemented
    base = p.logits if not p.logits.log_probs else _normalized(p.logits)
    if p.logits is not other and (base is None or base is not _normalized(other)):
        return NotImplemented
    dtype = torch.promote_types(p.dtype, other.dtype)
    if not _has_entropy(other) or dtype != other.dtype:
        return NotImplemented
    return OfSoftmax.of(other, [p, other], lambda a, b: a * b, dtype, p.operation, product=True)


def _sum(p: OfSoftmax, call: Call) -> Any:
    given = arguments(("dim", "keepdim", "dtype"), call.args, call.kwargs)
    x = p.logits
    if not p.product or not on_classes(x, given.get("dim")) or given.get("keepdim") or given.get("dtype") is not None:
        return NotImplemented
    dtype = dtype_after(lambda z: z.sum(-1), p.dtype, p.device)
    form = torch.empty(x.shape[: x.axis] + x.shape[x.axis + 1 :], dtype=dtype, device="meta")
    return DeferredStat.of_logits(x, "entropy", Asked(None, True, lambda _, __, entropy: -entropy.to(dtype)), form)


def _product_of_logits(x: Any, call: Call) -> Any:
    found = _product(x, call)
    return multiplied(x, call) if found is NotImplemented else found


multiplied = RULES["mul"]
RULES["mul"] = _product_of_logits
OfSoftmax.rules = {"mul": _product, "sum": _sum}
