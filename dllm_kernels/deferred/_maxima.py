"""Rules of maxima over the classes: of logits, their softmax and their log-softmax, with ids.

The maximum is the entry of the argmax, whose log-probability is one more statistic of the row. Its gradient is that of
this entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dllm_kernels._graph._plain import any_dtensor
from dllm_kernels.deferred._entries import note
from dllm_kernels.deferred._entropy import EXP, LOG_P, P
from dllm_kernels.deferred._graph import Recipe, Step
from dllm_kernels.deferred._logits import RULES, DeferredLogits, on_classes, rule
from dllm_kernels.deferred._moves import Call
from dllm_kernels.deferred._pending import DeferredStat, add_alive
from dllm_kernels.deferred._record import Stats
from dllm_kernels.deferred._stat_rules import class_dim, picked, stat
from dllm_kernels.deferred._tensor import DeferredTensor, arguments
from dllm_kernels.deferred._terms import Term
from dllm_kernels.ops.linear_sample import largest_of
from dllm_kernels.rows._dtypes import accum_dtype

Tensor = torch.Tensor
Z = "z"


class BestIds(DeferredTensor):
    """Argmax of logits, computed with their maximum when one of both is needed.

    Attributes:
        values: the maximum; None for a copy, and when the ids are known.
        found: a list that gets the ids.
    """

    values: Any
    found: list[Tensor]

    @classmethod
    def of(cls, values: DeferredStat, found: list[Tensor]) -> Any:
        """Return the ids of a maximum."""
        meta = torch.empty_like(values.meta, dtype=torch.int64)
        recipe = Recipe(lambda _: found[0], values.logits.restored, [False] * len(values.parts))
        with torch.no_grad():
            return cls.create(meta, values.parts, recipe, needs=recipe.needs, values=values, found=found)

    @property
    def deferred(self) -> bool:
        """True, so that rules of other tensors take the ids as arguments."""
        return True

    def dense(self, use: str = "backward") -> Tensor:
        """Return the ids."""
        if self.values is not None:
            self.values.dense(use)
            self.values = None
        return super().dense(use)

    def after(self, sources: Sequence[Any], step: Callable[..., Tensor]) -> Any:
        """Return a copy."""
        with torch.no_grad():
            recipe = Step(step, sources[0].restored, sources)
            return self.create(step(self.meta), self.parts, recipe, needs=self.needs, values=None, found=self.found)

    def restored(self) -> Any:
        """Return a context without effect: ids do not depend on autocast."""
        return torch.set_grad_enabled(torch.is_grad_enabled())


def _term(x: Any) -> tuple[DeferredLogits, str | None, float]:
    """Return logits, kind and factor of logits or of a term."""
    if isinstance(x, Term):
        return x.logits, x.kind, x.factor
    return x, LOG_P if x.log_probs else Z, 1.0


def _values(x: DeferredLogits, kind: str, factor: float, log_probs: Callable[[Stats], Tensor]) -> Any:
    """Return a function of statistics: the entries of a term whose log-probabilities are ``log_probs(stats)``."""
    shift, axis = x.shift, x.axis

    def values(stats: Stats) -> Tensor:
        out = log_probs(stats)
        if kind in (Z, EXP):
            added = stats.lse + shift.of(stats, axis)
            out = out + (added.unsqueeze(-1) if out.dim() > added.dim() else added)
        return (out if kind in (Z, LOG_P) else out.exp()) * factor

    return values


def _usable(x: Any) -> bool:
    """Return True if the order of the entries is that of the logits, also after rounding."""
    logits, kind, factor = _term(x)
    rounded = kind != Z and x.dtype != accum_dtype(x.dtype)
    known = kind in (Z, LOG_P, P, EXP) and factor > 0 and logits.overwritten is None and logits.fusible
    return known and not rounded and not any_dtensor(*logits.parts)


def _maximum(x: Any, call: Call) -> Any:
    """Compute ``max(dim)`` with its ids, or ``amax(dim)``, whose gradient is the same unless there is a tie."""
    args = arguments(("dim", "keepdim"), call.args, call.kwargs)
    alone, (logits, kind, factor) = call.function.__name__ == "amax", _term(x)
    on_dim = class_dim if alone else on_classes
    if not _usable(x) or not on_dim(logits, args.get("dim")):
        return NotImplemented
    if alone and x.needs_grad and torch.is_grad_enabled() and x.dtype != accum_dtype(x.dtype):
        return NotImplemented
    found: list[Tensor] = []
    keepdim, axis = args.get("keepdim"), logits.axis
    values = _values(logits, kind, factor, lambda stats: stats.best)  # type: ignore[arg-type]

    def finish(stats: Stats) -> Tensor:
        found[:] = [stats.ids.unsqueeze(axis) if keepdim else stats.ids]
        return values(stats)  # type: ignore[no-any-return]

    best = stat(logits, "max" if kind == Z else "of max", finish, x.dtype, keepdim, best=True)
    note(x, best, lambda z: call.on(z) if alone else call.on(z)[0])
    if isinstance(best, DeferredStat):
        add_alive(logits.sums, best)  # is computed before the head gets a gradient
    if alone:
        return best
    ids = BestIds.of(best, found) if isinstance(best, DeferredStat) else found[0]
    return torch.return_types.max((best, ids))


def _top(x: Any, call: Call) -> Any:
    """Compute the k largest entries and their ids."""
    args = arguments(("k", "dim", "largest", "sorted"), call.args, call.kwargs)
    k, (logits, kind, factor) = args.get("k"), _term(x)
    if not _usable(x) or not on_classes(logits, args.get("dim", -1)) or args.get("largest", True) is not True:
        return NotImplemented
    if not isinstance(k, int) or not 0 < k < logits.shape[logits.axis] or logits.fills_classes:
        return NotImplemented
    logits.check_unchanged()
    axis, dtype, in_logits = logits.axis, x.dtype, kind in (Z, EXP)
    values = _values(logits, kind, factor, lambda stats: stats.log_probs)  # type: ignore[arg-type]
    with torch.no_grad(), logits.restored():
        top, ids = largest_of(logits.rows(), k, log_probs=not in_logits)
        # With a logsumexp of 0, logits are log-probabilities; the first is the maximum.
        known = Stats(top, torch.zeros_like(top[..., 0]), best=top[..., 0])
        largest = values(known).to(dtype).movedim(-1, axis)
    if logits.needs_grad and torch.is_grad_enabled():
        best = logits.shift.best and in_logits
        stat_ = picked(logits, ids, lambda stats: values(stats).to(dtype), dtype, best=best)
        stat_.know(largest)
        largest = stat_
    note(x, largest, lambda z: call.on(z)[0])
    return torch.return_types.topk((largest, ids.movedim(-1, axis)))


def _argmax(x: Term, call: Call) -> Any:
    return RULES["argmax"](x.logits, call) if _usable(x) else NotImplemented


rule("max", "amax")(_maximum)
rule("topk")(_top)
Term.rules |= {"max": _maximum, "amax": _maximum, "topk": _top, "argmax": _argmax}
