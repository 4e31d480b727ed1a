"""``fused_head``: an LM head that returns deferred logits, so that an unchanged training loop makes no logits."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dllm_kernels._utils import _checks
from dllm_kernels._utils._call_state import CallState, Versions
from dllm_kernels._utils._dtypes import in_dtype_of
from dllm_kernels._utils._head import head_module
from dllm_kernels._utils._plain import is_dtensor
from dllm_kernels.fused import _lora
from dllm_kernels.fused._in_head import head_of
from dllm_kernels.fused._logits import DeferredLogits
from dllm_kernels.mtp.head import gathered_once

ON_LOGITS = "warn", "raise", "allow"
ADVICE = "leave the head as it is, and compute the loss from logits"
ENDS = (
    "F.cross_entropy with class ids, log_softmax(-1) with gather or F.nll_loss, gather(-1, ids), logsumexp(-1), "
    "argmax(-1), or a loss of dllm_kernels"
)
# What to use in place of an operation; ENDS for all others.
INSTEAD = {
    "softmax": "log_softmax(-1).gather(-1, ids).exp(), or dllm_kernels.row_stats(logits, ids, entropy=True)",
    "topk": "dllm_kernels.linear_sample(hidden, head, return_top=...)",
    "multinomial": "dllm_kernels.linear_sample(hidden, head, temperature=...)",
    "max": "argmax(-1)",
}
# Folders of torch and of this package, whose frames are not the place of a use.
FOLDERS = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, os.path.dirname(__file__)))
# Places that were warned about, per head.
_warned: weakref.WeakKeyDictionary[nn.Module, set[tuple[str, str, int]]] = weakref.WeakKeyDictionary()


class FusedHead:
    """LM head that returns deferred logits; the object that :func:`fused_head` yields.

    Attributes:
        materialized: number of times that the logits of a head call were computed, because an operation needed them.
    """

    def __init__(self, module: nn.Module, on_logits: str, logits_dtype: torch.dtype | None = None) -> None:
        self.module = module
        self.on_logits = on_logits
        self.logits_dtype = logits_dtype
        self.materialized = 0

    def forward(self, input: torch.Tensor) -> Any:
        """Replace the forward of the module."""
        if torch.compiler.is_compiling():
            return type(self.module).forward(self.module, input)
        parts, state = _lora.split(self.module), CallState.now(input)
        cast = None if input.dtype == torch.float64 else state.autocast
        low_rank = _lora.low_rank_rows(parts, input)
        parameters = [p for p in self.module.parameters() if not is_dtensor(p)]
        return DeferredLogits.of(
            hidden=input, low_rank=low_rank, head=self, parts=parts, axis=input.dim() - 1, state=state,
            dtype=cast or input.dtype, versions=Versions.of([input, *parameters]), used=[p[:0] for p in parameters],
        )  # fmt: skip

    def weights(self, parts: _lora.SplitHead, hidden: torch.Tensor, u: torch.Tensor | None) -> _lora.Head:
        """Return weight, bias and low-rank part. A sharded part is not cast, because it is cast when gathered."""
        weight, bias, extra = _lora.weights(parts, hidden, u)
        weight = weight if is_dtensor(weight) else in_dtype_of(hidden, weight)
        bias = bias if bias is None or is_dtensor(bias) else in_dtype_of(hidden, bias)
        return _lora.Head(weight, bias, extra)

    def logits(self, parts: _lora.SplitHead, hidden: torch.Tensor, u: torch.Tensor | None) -> torch.Tensor:
        """Compute the logits. A sharded weight is gathered here, because no hook of the module runs."""
        weight, bias, extra = self.weights(parts, hidden, u)
        bias = None if bias is None else gathered_once(bias, hidden)
        made = F.linear(hidden, gathered_once(weight, hidden), bias)
        return made if extra is None else made + F.linear(*extra)

    def report(self, use: str, shape: torch.Size) -> None:
        """Count a computation of the logits; warn or raise as ``on_logits`` says.

        Raises:
            RuntimeError: ``on_logits`` is "raise".
        """
        if self.on_logits != "allow":
            file, line, registry = _caller()
            use = use.strip("_")
            where, size = f"{use} at {file}:{line}", f"all {math.prod(shape)} of them, {tuple(shape)}"
            why = f"so that {size}, are computed"
            fix = f"{INSTEAD.get(use, ENDS)}, or fused_head(..., on_logits='allow')"
            if self.on_logits == "raise":
                raise RuntimeError(f"{where} needs the logits themselves, {why}; use {fix}")
            places = _warned.setdefault(self.module, set())
            if (use, file, line) not in places:
                places.add((use, file, line))
                text = f"{where} needs the logits themselves, {why}; use {fix}"
                warnings.warn_explicit(text, UserWarning, file, line, registry=registry)
        self.materialized += 1


def _caller() -> tuple[str, int, Any]:
    """Return file, line and warning registry of the innermost frame outside of torch and this package."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(FOLDERS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_globals.setdefault("__warningregistry__", {})


@contextlib.contextmanager
def fused_head(model: nn.Module, *, head: nn.Module | None = None, on_logits: str = "warn") -> Iterator[FusedHead]:
    """Train with an unchanged loop without materializing the logits: the LM head returns deferred logits.

    Within the context, the head returns an object that holds hidden states and head, with the shape, dtype and device
    of logits. The code between head and loss stays as it is, in the model and in the loop. The context may enclose one
    step or a whole training.

    **Recorded**, computed on hidden states: casts, soft caps ``c * tanh(z / c)``, a positive factor, and operations
    that select or move whole rows (slices, indices, views, ``expand``, ``transpose``, ``permute``, ``split``, ``cat``,
    ``stack``, ...).

    **Fused**, one chunk of logits at a time: ``F.cross_entropy`` and ``nn.CrossEntropyLoss`` with class ids (without
    label smoothing and class weights), ``log_softmax(-1)`` with ``gather`` or ``F.nll_loss``, ``gather(-1, ids)``,
    ``logsumexp(-1)``, ``argmax(-1)``, and every loss and op of this package that takes logits.

    **The NLL of rows is deferred as well.** Times or divided by constants, such as masks and 1 / p, then summed or
    averaged over all rows, it is :func:`weighted_linear_nll`, which does not project rows of weight 0. Any other use is
    :func:`linear_token_nll`.

    **Materialized**: every other operation receives the logits, computed once.

    Values and gradients equal those of the unfused loop up to rounding. A loss from ``sum()``, ``mean()`` or a
    reducing ``F.cross_entropy`` computes its gradients in the forward pass, so its backward can run only once. In a
    compiled model the head computes its logits as before.

    Examples:
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.body = torch.nn.Embedding(10, 8)
        ...         self.lm_head = torch.nn.Linear(8, 10, bias=False)
        ...
        ...     def forward(self, ids):
        ...         return self.lm_head(self.body(ids))
        >>> model, ids = Model(), torch.tensor([[1, 2, 3, 4]])
        >>> masked, p = torch.tensor([[True, False, True, True]]), 0.75
        >>> with fused_head(model) as fused:
        ...     logits = model(ids)  # deferred
        ...     nll = torch.nn.functional.cross_entropy(
        ...         logits[masked], ids[masked], reduction="none"
        ...     )
        ...     loss = (nll / p).sum() / ids.numel()
        ...     loss.backward()
        >>> fused.materialized
        0

    Args:
        model: the model, also in DDP or sharded by FSDP2.
        head: the LM head; None: ``model.get_output_embeddings()``, otherwise a module named ``lm_head``. An
            ``nn.Linear``, or LoRA or a trained copy of one (PEFT, NeMo AutoModel).
        on_logits: for an operation that needs the logits: "warn" warns once for each place in the code, "raise" raises
            RuntimeError, "allow" is silent.

    Yields:
        An object whose ``materialized`` counts head calls whose logits were computed.

    Raises:
        TypeError: ``model`` or ``head`` is not a module.
        ValueError: the model has no LM head; the head does more than a linear layer (a ``forward`` or hooks of its
            own, another adapter); ``on_logits`` is unknown; or the head is fused already.
        RuntimeError: ``on_logits="raise"`` and an operation needs the logits; hidden states or head were modified in
            place, or by an optimizer, before the logits were used; or the NLL of rows was modified in place after rows
            of it were used.
    """
    found = head_of(model, head)
    _checks.check_choice("on_logits", on_logits, ON_LOGITS)
    with deferring(found, FusedHead(found, on_logits)) as fused:
        yield fused


@contextlib.contextmanager
def deferring(module: nn.Module, fused: FusedHead) -> Iterator[FusedHead]:
    """Replace the forward of the head within the context."""
    _lora.check_head(module, ADVICE)
    with _lora.replaced_forward(module, _lora.Replacement(module, fused.forward)):
        yield fused


@contextlib.contextmanager
def deferred_logits(model: nn.Module, logits_dtype: torch.dtype | None = None) -> Iterator[bool]:
    """Make the LM head return deferred logits within the context if it is supported, and materialize them silently.

    Yields True if the head is supported.
    """
    module = head_module(model)
    if module is None or not _lora.takes_apart(module):
        yield False
        return
    with deferring(module, FusedHead(module, "allow", logits_dtype)):
        yield True
