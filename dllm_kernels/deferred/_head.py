"""``fused_head``: an LM head that returns deferred logits, so that an unchanged training loop computes no logits."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from dllm_kernels import _checks
from dllm_kernels._graph._call_state import CallState
from dllm_kernels._graph._plain import is_dtensor
from dllm_kernels._graph._private import constant_while_traced, disable_dynamo, transforms_active
from dllm_kernels.deferred import _classes, _cross_entropy, _entropy, _maxima, _shifts, _stat_rules, _sums, _term_rules  # noqa: F401  rules
from dllm_kernels.deferred._logits import DeferredLogits
from dllm_kernels.head import _lora
from dllm_kernels.head._in_head import head_of
from dllm_kernels.head._module import freed_after_forward, fsdp1_unit, head_module
from dllm_kernels.head._parameters import gathered_once
from dllm_kernels.rows._dtypes import in_dtype_of
from dllm_kernels.rows._logits import Head

ON_LOGITS = "warn", "raise", "allow"
ADVICE = "leave the head as it is, and compute the loss from logits"
ENDS = (
    "F.cross_entropy with class ids, log_softmax(-1) with gather or F.nll_loss, gather(-1, ids), logsumexp(-1), "
    "argmax(-1), or a loss of dllm_kernels"
)
BODY = "torch.compile of the body alone, such as model.model.compile()"
COMPILED = "torch.compile of a model with its head"
OWN_UNIT = "FullyShardedDataParallel of the head, which frees its weight after the head's forward,"
# What to use in place of an operation; ENDS for all others.
INSTEAD = {
    COMPILED: BODY,
    OWN_UNIT: "fully_shard, or FullyShardedDataParallel with the head in the root unit",
    "softmax": "log_softmax(-1).gather(-1, ids).exp(), or dllm_kernels.row_stats(logits, ids, entropy=True)",
    "topk": "dllm_kernels.linear_sample(hidden, head, return_top=...)",
    "multinomial": "dllm_kernels.linear_sample(hidden, head, temperature=...)",
    "max": "max(-1) with the class dimension, or argmax(-1)",
}
# Folders of torch and of this package, whose frames are not the place of a use.
FOLDERS = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, os.path.dirname(__file__)))
# Places that were warned about, per head.
_warned: weakref.WeakKeyDictionary[nn.Module, set[tuple[str, str, int]]] = weakref.WeakKeyDictionary()


class FusedHead:
    """LM head that returns deferred logits; the object that :func:`fused_head` yields.

    Attributes:
        materialized: number of times that the logits of a head call were computed, because an operation needed them.
        called: True after the first call of the head, in a compiled graph after it was traced.
        sums: losses of the head calls of this thread that are not computed yet.
        logits_fields: fields of the records of its logits.
    """

    def __init__(self, model: nn.Module, module: nn.Module, on_logits: str, **logits_fields: Any) -> None:
        self.module = module
        self.unit = fsdp1_unit(model, module)
        self.on_logits = on_logits
        self.logits_fields = logits_fields
        self.materialized = 0
        self.called = False
        self._of_thread = threading.local()

    @property
    def sums(self) -> list[weakref.ref[Any]]:  # a loss must not be computed by two threads at a time
        return vars(self._of_thread).setdefault("sums", [])  # type: ignore[no-any-return]

    def replaced_forward(self) -> contextlib.AbstractContextManager[None]:
        """Replace the forward of the module within the context."""
        return _lora.replaced_forward(self.module, _lora.Replacement(self.module, self.forward), ADVICE)

    def forward(self, input: torch.Tensor) -> Any:
        """Return the deferred logits of hidden states, or the logits if they cannot be deferred."""
        plain = functools.partial(type(self.module).forward, self.module, input)
        if torch.compiler.is_compiling():
            if self.on_logits == "raise":
                self._refuse_compiled()
            else:
                self._note_compiled()
            return plain()
        self.called = True
        dual = forward_ad.unpack_dual(input).tangent is not None  # type: ignore[no-untyped-call]
        split, state = _lora.split(self.module), CallState.now(input)
        transformed = "a transform of torch.func or forward-mode autograd" if dual or transforms_active() else None
        if use := transformed or (OWN_UNIT if freed_after_forward(self.unit) else None):
            self.report(use, torch.Size((*input.shape[:-1], split.out_features)))
            return plain()
        cast = None if input.dtype == torch.float64 else state.autocast
        low_rank, parameters = _lora.low_rank_rows(split, input), split.parameters()
        if not is_dtensor(input):
            parameters = [gathered_once(t, input) for t in parameters]  # type: ignore[arg-type]
        return DeferredLogits.from_head(self, split, (input, low_rank, *parameters), state, cast or input.dtype)

    def weights(self, split: _lora.SplitHead, parts: Sequence[Any]) -> Head:
        """Return weight, bias and low-rank part. A sharded part is not cast, because it is cast when gathered."""
        hidden, u, *parameters = parts
        weight, bias, *low_rank = _lora.weights(split, hidden, u, parameters)
        return Head(*(t if is_dtensor(t) else in_dtype_of(hidden, t) for t in (weight, bias)), *low_rank)  # type: ignore[arg-type]

    def logits(self, split: _lora.SplitHead, parts: Sequence[Any]) -> torch.Tensor:
        """Compute the logits."""
        weight, bias, u, U = self.weights(split, parts)
        z = F.linear(parts[0], weight, bias)
        return z if u is None or U is None else z + F.linear(u, U)

    # A function marked as constant is called while a graph is traced, once for each graph. Dynamo would wrap an error
    # of this call in its own, so a call that is not traced raises it when the model runs. The functions of
    # torch.compiler that do this import torch._dynamo, which takes seconds.
    @constant_while_traced
    def _note_compiled(self) -> None:
        self.report(COMPILED, torch.Size(()))

    @disable_dynamo
    def _refuse_compiled(self) -> None:
        self.report(COMPILED, torch.Size(()))

    def report(self, use: str, shape: torch.Size) -> None:
        """Count a computation of the logits; warn or raise as ``on_logits`` says.

        Raises:
            RuntimeError: ``on_logits`` is "raise".
        """
        self.called = True
        if self.on_logits != "allow":
            file, line, registry = _caller()
            use = use.strip("_")
            size = f"all {math.prod(shape)} of them, {tuple(shape)}," if shape else "all of them"
            fix = f"so that {size} are computed; use {INSTEAD.get(use, ENDS)}, or fused_head(..., on_logits='allow')"
            if self.on_logits == "raise":
                raise RuntimeError(f"{use} at {file}:{line} needs the logits themselves, {fix}")
            places = _warned.setdefault(self.module, set())
            if (use, file, line) not in places:
                places.add((use, file, line))
                text = f"{use} at {file}:{line} needs the logits themselves, {fix}"
                warnings.warn_explicit(text, UserWarning, file, line, registry=registry)
        self.materialized += 1

    def warn_if_unused(self) -> None:
        """Warn at the end of the context if the model did not call the head."""
        if not self.called and self.on_logits != "allow":
            warnings.warn(
                f"fused_head had no effect, because the model did not call its head, {_checks.type_name(self.module)}; "
                "call the head instead of using its weight, pass head=, or compute the loss of LinearLogits(hidden, "
                "head)",
                stacklevel=4,  # the with statement
            )


def _caller() -> tuple[str, int, Any]:
    """Return file, line and warning registry of the innermost frame outside of torch and this package."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(FOLDERS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_globals.setdefault("__warningregistry__", {})


@contextlib.contextmanager
def fused_head(model: nn.Module, *, head: nn.Module | None = None, on_logits: str = "warn") -> Iterator[FusedHead]:
    """Train with an unchanged loop without materializing the logits: the LM head returns deferred logits.

    Within the context, the head returns a tensor that holds hidden states and head. It has the shape, dtype, device and
    graph of logits, and its values are computed when they are needed. The code between head and loss stays as it is, in
    the model and in the loop. The context may enclose one step or a whole training.

    **Recorded**, computed on hidden states: casts, soft caps ``c * tanh(z / c)`` and ``c * sigmoid(z)``, a factor, a
    constant per row or per class, the maximum of the row that is subtracted, sums and differences of logits of the
    head, slices of the classes, classes set to -inf, and operations that select or move whole rows (slices, indices,
    views, ``expand``, ``transpose``, ``permute``, ``split``, ``cat``, ``stack``, ...).

    **Fused**, one chunk of logits at a time: ``F.cross_entropy`` and ``nn.CrossEntropyLoss``, ``log_softmax(-1)`` with
    ``gather``, ``F.nll_loss`` or a sum, ``gather(-1, ids)``, ``logsumexp(-1)``, ``argmax(-1)``, maxima and ``topk`` of
    logits, softmax and log-softmax, the entropy as the sum of softmax times log-softmax or of a ``Categorical``, and
    every loss and op of this package that takes logits. Statistics and losses of the same logits are computed in one
    pass if they are pending together.

    **The NLL of rows is deferred as well.** Affine functions of it with constant coefficients, such as masks and 1 / p,
    also through ``where``, ``masked_fill``, ``einsum`` and sums over some dimensions, that are summed or averaged over
    all rows, are :func:`weighted_linear_nll`, which does not project rows of weight 0. Any other use is
    :func:`linear_token_nll`.

    **Functions of the logits and constants**, such as divergences to a teacher, that are reduced over the classes: each
    chunk of rows repeats the operations of the loop. The value of a row then is what the NLL is above.

    **Materialized**: every other operation, and code that needs ordinary tensors (autograd Functions, hooks, reentrant
    checkpoints), receives the logits, computed once.

    Values and gradients equal those of the unfused loop up to rounding. A loss from ``sum()``, ``mean()`` or a
    reducing ``F.cross_entropy`` computes its gradients in the forward pass, so its backward can run only once. A
    compiled model computes its logits as before, which counts as materialized, once per graph: compile the body.

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
            ``nn.Linear``, or LoRA, a trained copy or trained rows of one (PEFT, NeMo AutoModel).
        on_logits: for an operation that needs the logits: "warn" warns once for each place in the code, "raise" raises
            RuntimeError, "allow" is silent. Unless it is "allow", a context in which the model did not call the head
            ends with a warning.

    Yields:
        An object whose ``materialized`` counts head calls whose logits were computed.

    Raises:
        TypeError: ``model`` or ``head`` is not a module.
        ValueError: the model has no LM head; the head does more than a linear layer (a ``forward`` or hooks of its
            own, another adapter); ``on_logits`` is unknown; or the head is fused already.
        RuntimeError: ``on_logits="raise"`` and an operation needs the logits; hidden states or head were modified
            before the logits were used; or the gradient of logits is read that a fused loss never computes.
        NotImplementedError: an in-place change of the shape of the logits, or ``detach_`` of logits with a view.
    """
    module = head_of(model, head)
    _checks.check_choice("on_logits", on_logits, ON_LOGITS)
    fused = FusedHead(model, module, on_logits)
    with fused.replaced_forward():
        yield fused
    fused.warn_if_unused()


@contextlib.contextmanager
def deferred_logits(model: nn.Module, **logits_fields: Any) -> Iterator[bool]:
    """Make the LM head return deferred logits within the context if it is supported, and materialize them silently.

    ``logits_fields``: fields of the records of the logits, such as their dtype.

    Yields True if the head is supported.
    """
    module = head_module(model)
    if module is None or not _lora.takes_apart(module):
        yield False
        return
    with FusedHead(model, module, "allow", **logits_fields).replaced_forward():
        yield True
