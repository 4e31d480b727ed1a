"""Rules of statistics of rows: chosen logits, logsumexp and argmax; :func:`stat` and :func:`picked` make others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dllm_kernels import ops
from dllm_kernels._checks import check_target_range
from dllm_kernels._graph._plain import readable_without_sync
from dllm_kernels.deferred._entries import note
from dllm_kernels.deferred._logits import DeferredLogits, on_classes, rule
from dllm_kernels.deferred._moves import Call
from dllm_kernels.deferred._nll import NO_INDEX, DeferredNLL, dtype_after
from dllm_kernels.deferred._pending import DeferredStat, NeededStats, argmax_of
from dllm_kernels.deferred._record import NO_SHIFT, Stats
from dllm_kernels.deferred._tensor import DeferredTensor, arguments
from dllm_kernels.rows._interface import IGNORE

Tensor = torch.Tensor


@rule("gather", "take_along_dim")
def _gathered(x: DeferredLogits, call: Call) -> Any:
    ids, dtype, log_probs = class_ids(x, call), x.dtype, x.log_probs
    if ids is None or takes_skipped(x, ids) or (x.overwritten is not None and ids.shape[-1] > 1):
        return NotImplemented
    if log_probs and ids.shape[-1] == 1:
        nll, dim = DeferredNLL.of(x, ids.squeeze(-1), NO_INDEX, dtype, -1.0), x.axis
        target = nll.target.unsqueeze(dim)
        return note(x, nll.unsqueezed(dim).result(), lambda z: z.gather(dim, target))
    shift, axis = NO_SHIFT if log_probs else x.shift, x.axis

    def values(stats: Stats) -> Tensor:
        added = 0.0 if log_probs else (stats.lse + shift.of(stats, axis)).unsqueeze(-1)
        return (stats.log_probs + added).to(dtype)  # type: ignore[no-any-return]

    return picked(x, ids, values, dtype, best=shift.best)


def known_ids(ids: Any) -> Any:
    """Return ids, computed if they are deferred."""
    return ids.materialize() if isinstance(ids, DeferredTensor) else ids


def class_ids(x: DeferredLogits, call: Call) -> Tensor | None:
    """Return the ids that ``gather`` along the classes takes, with the classes last; None for any other call.

    Raises:
        IndexError: an id on a CPU is out of range, as in torch.
    """
    along = call.function.__name__ == "take_along_dim"
    args = arguments(("indices", "dim") if along else ("dim", "index", "sparse_grad"), call.args, call.kwargs)
    index = known_ids(args.get("indices" if along else "index"))
    usable = x.fusible and on_classes(x, args.get("dim"))
    if not usable or not isinstance(index, Tensor) or args.get("sparse_grad"):
        return None
    rest = [d for d in range(x.ndim) if d != x.axis]
    if index.dim() != x.ndim or any(index.shape[d] != x.shape[d] for d in rest):
        return None
    index = index.remainder(x.shape[x.axis]) if along else index  # as take_along_dim does
    index = index.movedim(x.axis, -1)
    check_target_range(readable_without_sync(index) or None, "index", index, x.shape[x.axis], None)
    return index


def picked(
    x: DeferredLogits, ids: Tensor, finish: Callable[[Stats], Tensor], dtype: torch.dtype, best: bool = False,
    of: Any = None,
) -> Any:  # fmt: skip
    """Return values of the ids, with their dimension at the class dimension of the logits; ``of``: a term of these."""
    axis = x.axis
    ids = ids.where(ids != IGNORE, -1)  # out of range, too, which is not checked on a GPU
    meta = torch.empty(ids.movedim(-1, axis).shape, dtype=dtype, device="meta")
    request = NeededStats(lambda stats: finish(stats).movedim(-1, axis), ids, best=best)
    index = ids.movedim(-1, axis)
    return note(
        x if of is None else of, DeferredStat.from_logits(x, "picked", request, meta), lambda z: z.gather(axis, index)
    )


def takes_skipped(x: DeferredLogits, ids: Tensor) -> bool:
    """Return True if an id is a class that was set, on a CPU; on a GPU, the result of such an id is NaN, or as low."""
    filled = None if x.class_bias is None else x.class_bias.filled
    if (x.skip is None and filled is None) or not readable_without_sync(ids):
        return False
    if filled is not None and bool(filled[ids.clamp(0, len(filled) - 1)].any()):
        return True
    return x.skip is not None and bool((ids == x.skip).any())


def stat(
    x: DeferredLogits, kind: str, values: Callable[[Stats], Tensor], dtype: torch.dtype, keepdim: Any = False,
    **needed: Any,
) -> Any:  # fmt: skip
    """Return a statistic of each row, with a dimension in the place of the classes or not."""
    axis = x.axis if keepdim else None
    shape = [1 if i == x.axis else n for i, n in enumerate(x.shape) if keepdim or i != x.axis]

    def finish(stats: Stats) -> Tensor:
        value = values(stats).to(dtype)
        return value if axis is None else value.unsqueeze(axis)

    meta = torch.empty(shape, dtype=dtype, device="meta")
    return DeferredStat.from_logits(x, kind, NeededStats(finish, **needed), meta, axis)


def class_dim(x: DeferredLogits, dim: Any) -> bool:
    """Return True if ``dim`` is the class dimension, or a list of it alone."""
    return on_classes(x, dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim)


@rule("logsumexp")
def _logsumexp(x: DeferredLogits, call: Call) -> Any:
    args = arguments(("dim", "keepdim"), call.args, call.kwargs)
    if x.log_probs or not x.fusible or not class_dim(x, args.get("dim")):
        return NotImplemented
    dtype, shift, axis = dtype_after(lambda z: z.logsumexp(-1), x.dtype, x.device), x.shift, x.axis
    keepdim = args.get("keepdim")
    return stat(x, "lse", lambda stats: stats.lse + shift.of(stats, axis), dtype, keepdim, best=shift.best)


@rule("argmax")
def _argmax(x: DeferredLogits, call: Call) -> Any:
    args = arguments(("dim", "keepdim"), call.args, call.kwargs)
    if not on_classes(x, args.get("dim")) or x.overwritten is not None:
        return NotImplemented
    x.check_unchanged()
    if (ids := argmax_of(x)) is None:
        with torch.no_grad():
            ids = ops.linear_sample(x.rows()._replace(scale=None), temperature=0).ids
    return ids.unsqueeze(x.axis) if args.get("keepdim") else ids
