"""Autograd and autocast state of a head call, and detection of tensors that were modified in place since."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dllm_kernels._utils._plain import autocasts, is_dtensor


class CallState(NamedTuple):
    """Autograd and autocast state captured at the head call and restored when the logits are computed."""

    grad: bool
    autocast: torch.dtype | None  # dtype of autocast, None if it is off

    @classmethod
    def now(cls, hidden: torch.Tensor) -> CallState:
        """Capture the state at a head call with ``hidden``."""
        autocast = torch.get_autocast_dtype(hidden.device.type) if autocasts(hidden) else None
        return cls(torch.is_grad_enabled(), autocast)

    @contextlib.contextmanager
    def restored(self, hidden: torch.Tensor, *, narrow: bool = False) -> Iterator[None]:
        """Restore the captured state within the context.

        ``narrow``: also follow the current state, so that a use under ``torch.no_grad`` records no gradient.
        """
        grad = self.grad and (not narrow or torch.is_grad_enabled())  # before inference_mode(False), which enables it
        kind = hidden.device.type
        autocast = torch.autocast(kind, self.autocast, enabled=self.autocast is not None) if kind != "meta" else None
        with (
            torch.inference_mode(False),  # inference mode records no gradients
            torch.set_grad_enabled(grad),
            autocast or contextlib.nullcontext(),
        ):
            yield


_clock = itertools.count(1)
# Optimizer -> time of its last step, because the kernels of ``fused=True`` do not increment version counters.
_stepped: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        _stepped[optimizer] = next(_clock)


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_note_step)


class Versions(NamedTuple):
    """Version counters of tensors, which an in-place change increments, and the time for steps of optimizers.

    A write to ``.data`` is not detected, as it is not by autograd.
    """

    tensors: tuple[torch.Tensor, ...]
    counters: tuple[int, ...]
    time: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor | None]) -> Versions:
        """Record the counters. DTensors are omitted: FSDP writes to them whenever it gathers or frees a parameter."""
        kept = tuple(t for t in tensors if t is not None and not is_dtensor(t) and not t.is_inference())
        _watch_optimizers()
        return cls(kept, tuple(t._version for t in kept), next(_clock))

    def changed(self) -> bool:
        """Return True if one of the tensors was modified in place since, also by an optimizer."""
        if any(t._version > then for t, then in zip(self.tensors, self.counters, strict=True)):
            return True
        later = [optimizer for optimizer, time in _stepped.items() if time > self.time]
        stepped = {id(p) for optimizer in later for group in optimizer.param_groups for p in group["params"]}
        return any(id(t) in stepped for t in self.tensors)
