"""Deferred logits of an LM head: losses of this package use the hidden states instead, all other uses materialize them.

Model and framework code between head and loss may cast or cap the logits, and returns them in a model output. The head
therefore returns a placeholder that holds the hidden states. The placeholder also records a cast to another floating
dtype and a soft cap ``c tanh(z / c)``. Any other operation first materializes the logits by calling the head.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils import _pytree

from dllm_kernels._utils._checks import FLOAT_DTYPES
from dllm_kernels._utils._plain import autocasts
from dllm_kernels.integrations._lora import takes_apart
from dllm_kernels.mtp.head import head_module

Step = Callable[[torch.Tensor], torch.Tensor]


class Cap(NamedTuple):
    """State of a soft cap ``c * tanh(z / c)`` applied in three operations."""

    c: float
    done: int  # 1: divided by c, 2: tanh applied, 3: multiplied by c


class CallState(NamedTuple):
    """Autograd and autocast state captured at the head call and restored when the logits are computed."""

    grad: bool
    autocast: torch.dtype | None  # dtype of autocast, None if it is off
    version: int  # version counter of the hidden states

    @classmethod
    def now(cls, hidden: torch.Tensor) -> CallState:
        """Capture the state at a head call with ``hidden``."""
        autocast = torch.get_autocast_dtype(hidden.device.type) if autocasts(hidden) else None
        version = 0 if hidden.is_inference() else hidden._version
        return cls(torch.is_grad_enabled(), autocast, version)

    @contextlib.contextmanager
    def restored(self, hidden: torch.Tensor) -> Iterator[None]:
        """Restore the captured state within the context."""
        kind = hidden.device.type
        autocast = torch.autocast(kind, self.autocast, enabled=self.autocast is not None) if kind != "meta" else None
        with (
            torch.inference_mode(False),  # inference mode records no gradients
            torch.set_grad_enabled(self.grad),
            autocast or contextlib.nullcontext(),
        ):
            yield

    def check_unchanged(self, hidden: torch.Tensor) -> None:
        """Raise RuntimeError if the hidden states were modified in place since the head call."""
        if not hidden.is_inference() and hidden._version > self.version:
            raise RuntimeError(
                "hidden states must not be modified in place between the LM head and the first use of its logits, "
                "got a modified tensor; patch with fuse_head=False, or modify a copy"
            )


@dataclass(repr=False, eq=False)  # dataclass, because DDP searches its fields for tensors
class DeferredLogits:
    """Placeholder for ``head(hidden)``.

    Attributes:
        hidden: input of the head, ``[..., D]``.
        head: the LM head.
        call_state: autograd and autocast state at the head call.
        dtype: dtype of the logits.
        steps: operations recorded since the head call, in order.
        cap: the soft cap among ``steps``, or None.
        used: tensors in the future autograd graph of the logits: hidden states, and views of the parameters of the
            head.
    """

    hidden: torch.Tensor
    head: _Head
    call_state: CallState
    dtype: torch.dtype
    steps: tuple[Step, ...] = ()
    cap: Cap | None = None
    _logits: torch.Tensor | None = None
    used: list[torch.Tensor] = field(init=False)  # a property, below

    @property
    def usable(self) -> bool:
        """True if the logits have not been materialized, so a loss can use hidden states, head and softcap instead.

        False for a head called under no_grad and a loss called with gradients enabled: the logits are then constants.
        """
        if self._logits is not None or (self.cap is not None and self.cap.done != 3):
            return False
        self.call_state.check_unchanged(self.hidden)
        return self.call_state.grad or not torch.is_grad_enabled()

    @property
    def softcap(self) -> float | None:
        """Soft cap of the logits, or None."""
        return None if self.cap is None else self.cap.c

    def materialize(self) -> torch.Tensor:
        """Return the logits, materialized at the first call."""
        if self._logits is None:
            self.call_state.check_unchanged(self.hidden)
            with self.call_state.restored(self.hidden):
                made = self.head.logits(self.hidden)
                for step in self.steps:
                    made = step(made)
            self._logits = made
        return self._logits

    @property
    def shape(self) -> torch.Size:
        """Shape of the logits."""
        return torch.Size((*self.hidden.shape[:-1], cast(int, self.head.module.out_features)))

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return self.hidden.device

    def float(self) -> Any:
        """Cast to float32, still deferred."""
        return self.to(torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Cast to another floating dtype, still deferred.

        The cast does not change a loss from hidden states, which computes in float32 and does not round to a narrower
        dtype.
        """
        dtype = kwargs.get("dtype", args[0] if len(args) == 1 else None)
        alone = dtype in FLOAT_DTYPES and len(args) + len(kwargs) == 1
        if alone and dtype == self.dtype and self._logits is None:
            return self
        return self._after(alone, lambda z: z.to(*args, **kwargs), self.cap, dtype)

    def tanh(self) -> Any:
        """Record the second step of a soft cap; otherwise return the tanh of the logits."""
        divided = self.cap is not None and self.cap.done == 1
        return self._after(divided, torch.tanh, self.cap and self.cap._replace(done=2))

    def __truediv__(self, c: Any) -> Any:
        return self._after(self.cap is None and isinstance(c, (int, float)) and c > 0, lambda z: z / c, Cap(c, 1))

    def __mul__(self, c: Any) -> Any:
        return self._after(isinstance(c, (int, float)) and self.cap == Cap(c, 2), lambda z: z * c, Cap(c, 3))

    __rmul__ = __mul__

    def _after(self, recorded: bool, step: Step, cap: Cap | None, dtype: torch.dtype | None = None) -> Any:
        """Record the step if it is recordable and the logits are not materialized; otherwise apply it to the logits."""
        if not recorded or self._logits is not None:
            return step(self.materialize())
        return DeferredLogits(self.hidden, self.head, self.call_state, dtype or self.dtype, (*self.steps, step), cap)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # private names and protocols of NumPy and pickle
            raise AttributeError(name)
        return getattr(self.materialize(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()
        args, kwargs = _pytree.tree_map(
            lambda x: x.materialize() if isinstance(x, cls) else x,
            (args, kwargs or {}),
            is_leaf=lambda x: isinstance(x, cls),
        )
        return func(*args, **kwargs)


def _on_logits(name: str) -> Callable[..., Any]:
    def method(self: DeferredLogits, *args: Any) -> Any:
        others = (a.materialize() if isinstance(a, DeferredLogits) else a for a in args)
        return getattr(operator, name)(self.materialize(), *others)

    return method


def _used(x: DeferredLogits) -> list[torch.Tensor]:
    return [x.hidden, *(p.view_as(p) for p in x.head.module.parameters())]  # views, because DDP skips leaves


DeferredLogits.used = property(_used)  # type: ignore[assignment]
_BINARY = ("add", "sub", "matmul", "pow", "mod", "floordiv")
# In-place operations apply to the materialized logits, because every reference to them must see the change.
_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
for _name in (*_BINARY, *_IN_PLACE, *_COMPARED, "neg", "pos", "abs", "getitem", "setitem", "contains"):
    setattr(DeferredLogits, f"__{_name}__", _on_logits(_name))
for _name in (*_BINARY, "truediv"):
    setattr(
        DeferredLogits,
        f"__r{_name}__",
        lambda self, other, name=_name: getattr(operator, name)(other, self.materialize()),
    )
for _function in (bool, int, float, len, iter):
    setattr(DeferredLogits, f"__{_function.__name__}__", lambda self, of=_function: of(self.materialize()))


def _unflatten(children: Any, context: Any) -> DeferredLogits:
    x = DeferredLogits(children[0], *context)
    x._logits = children[1]
    return x


# FSDP2 searches the output of a module for the tensors whose gradients it must wait for.
_pytree.register_pytree_node(
    DeferredLogits, lambda x: ([x.hidden, x._logits], (x.head, x.call_state, x.dtype, x.steps, x.cap)), _unflatten
)


class _Head:
    """LM head that returns deferred logits, except while a placeholder materializes its logits."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.materializing = False

    def forward(self, hidden: torch.Tensor) -> Any:
        """Replace the forward of the module."""
        if self.materializing or torch.compiler.is_compiling():
            return type(self.module).forward(self.module, hidden)
        call_state = CallState.now(hidden)
        cast = None if hidden.dtype == torch.float64 else call_state.autocast
        return DeferredLogits(hidden, self, call_state, cast or hidden.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits by calling the module, so that hooks that gather its weight run."""
        self.materializing = True
        try:
            made: torch.Tensor = self.module(hidden)
            return made
        finally:
            self.materializing = False


@contextlib.contextmanager
def deferred_logits(model: nn.Module) -> Iterator[bool]:
    """Make the LM head of the model return :class:`DeferredLogits` within the context, if the head is supported.

    Yields True if the head is supported.
    """
    module = head_module(model)
    if module is None or not takes_apart(module):
        yield False
        return
    module.forward = _Head(module).forward
    try:
        yield True
    finally:
        del module.forward
