"""Autocast state of a head call, and detection of tensors that were modified since."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dllm_kernels._graph._plain import autocasts, is_dtensor, readable_without_sync


class CallState(NamedTuple):
    """Autocast state captured at the head call and restored when the logits are computed."""

    autocast: torch.dtype | None  # dtype of autocast, None if it is off

    @classmethod
    def now(cls, hidden: Tensor) -> CallState:
        """Capture the state at a head call with ``hidden``."""
        return cls(torch.get_autocast_dtype(hidden.device.type) if autocasts(hidden) else None)

    def dtype_of_products(self, hidden: Tensor, weight: Tensor) -> torch.dtype:
        """Return the dtype that ``F.linear`` computed in."""
        narrow = self.autocast is not None and torch.float64 not in (hidden.dtype, weight.dtype)
        return self.autocast if narrow else hidden.dtype  # type: ignore[return-value]

    def restored(self, hidden: Tensor) -> contextlib.AbstractContextManager[None]:
        """Restore the captured state within the context, outside of inference mode, which records no gradients."""
        unchanged = not torch.is_inference_mode_enabled() and self == CallState.now(hidden)
        return contextlib.nullcontext() if unchanged else self._restored(hidden)

    @contextlib.contextmanager
    def _restored(self, hidden: Tensor) -> Iterator[None]:
        grad, kind = torch.is_grad_enabled(), hidden.device.type  # inference_mode(False) enables gradients
        autocast = torch.autocast(kind, self.autocast, enabled=self.autocast is not None) if kind != "meta" else None
        with torch.inference_mode(False), torch.set_grad_enabled(grad), autocast or contextlib.nullcontext():
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
    """State of tensors at a head call, to detect later changes.

    In-place changes increment version counters, and steps of optimizers are observed. Writes to ``.data`` do neither:
    on a CPU, a few entries of each tensor are compared; on a GPU, reading them would be a host sync.
    """

    tensors: tuple[Tensor | None, ...]
    counters: tuple[int, ...]
    samples: tuple[Tensor | None, ...]
    entries: tuple[list[int] | None, ...]
    time: int
    now: Callable[[], Sequence[Tensor | None]]

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], now: Callable[[], Sequence[Tensor | None]]) -> Versions:
        """Record the state; ``now`` returns the parameters as their modules hold them at a later time."""
        _watch_optimizers()
        local = tuple(_local(t) for t in tensors)
        counters = tuple(0 if t is None else t._version for t in local)
        samples = tuple(_sample(t) for t in local)
        return cls(local, counters, samples, tuple(map(_bits, samples)), next(_clock), now)

    def changed(self) -> bool:
        """Return True if one of the tensors was modified since."""
        for t, counter, sample, entries in zip(*self[:4], strict=True):
            if t is None:
                continue
            if t._version > counter:
                return True
            if sample is not None:
                moved = sample.data_ptr() != t.data_ptr() or not t.untyped_storage().size()
                if _bits(_sample(t) if moved else sample) not in (None, entries):
                    return True
        later = [optimizer for optimizer, time in _stepped.items() if time > self.time]
        stepped = {id(p) for optimizer in later for group in optimizer.param_groups for p in group["params"]}
        return bool(stepped) and any(id(t) in stepped for t in (*self.tensors, *self.now()))

    def differ(self, tensors: Sequence[Tensor | None]) -> bool:
        """Return True if tensors that were gathered again have other values."""
        pairs = zip(map(_local, tensors), self.entries, strict=True)
        return any(entries is not None and _bits(_sample(t)) not in (None, entries) for t, entries in pairs)


def _local(t: Tensor | None) -> Tensor | None:
    if t is not None and is_dtensor(t):
        with torch.no_grad():
            t = t.to_local()  # type: ignore[attr-defined]
    return None if t is None or t.is_inference() else t


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sample(t: Tensor | None, count: int = 16) -> Tensor | None:
    """Return a view of the bits of a few entries; None if they cannot be read, or not without a sync."""
    if t is None or not readable_without_sync(t) or not t.is_contiguous() or not t.untyped_storage().size():
        return None
    return t.detach().view(-1).view(_BITS[t.element_size()])[:: max(1, t.numel() // count)]


def _bits(sample: Tensor | None) -> list[int] | None:
    return None if sample is None else sample.tolist()
