"""Rules of the cross-entropy: its targets, the weights of classes, and smoothed labels."""

from __future__ import annotations

from typing import Any

import torch

from dllm_kernels._checks import check_target_range
from dllm_kernels._graph._plain import readable_without_sync
from dllm_kernels.deferred._logits import DeferredLogits, rule
from dllm_kernels.deferred._moves import Call
from dllm_kernels.deferred._nll import DeferredNLL, dtype_after, target_ids
from dllm_kernels.deferred._record import Stats
from dllm_kernels.deferred._stat_rules import known_ids, stat, takes_skipped
from dllm_kernels.deferred._tensor import arguments

Tensor = torch.Tensor


@rule("cross_entropy", "nll_loss")
def _cross_entropy(x: DeferredLogits, call: Call) -> Any:
    log_probs = call.function.__name__ == "nll_loss"
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    args = arguments(names, call.args, call.kwargs)
    target = known_ids(args.get("target"))
    unsupported = any(args.get(name) is not None for name in ("size_average", "reduce")) or not x.fusible
    if log_probs != x.log_probs or x.axis != (1 if x.ndim > 1 else 0) or unsupported:
        return NotImplemented
    if not isinstance(target, Tensor) or target.is_floating_point():
        return NotImplemented
    rows = x.shape[: x.axis] + x.shape[x.axis + 1 :]
    reduction, ignored = args.get("reduction", "mean"), args.get("ignore_index", -100)
    if target.shape != rows or reduction not in ("none", "sum", "mean") or takes_skipped(x, target):
        return NotImplemented

    def plain(z: Tensor) -> Tensor:
        return call.function(z, torch.zeros(1, dtype=torch.long, device=z.device))  # type: ignore[no-any-return]

    dtype = dtype_after(plain, x.dtype, x.device)
    weight, smoothing = args.get("weight"), args.get("label_smoothing", 0.0)
    if smoothing:
        return NotImplemented if weight is not None else _smoothed(x, target, ignored, smoothing, reduction, dtype)
    nll = DeferredNLL.of(x, target, ignored, dtype)
    if weight is not None:
        return _with_class_weights(nll, weight, reduction)
    if reduction == "none":
        return nll.result()
    return nll.reduced(None if reduction == "sum" else (target != ignored).sum())


def _with_class_weights(nll: DeferredNLL, weight: Any, reduction: str) -> Any:
    """Multiply the NLL by the weight of its target; the mean is weighted, too."""
    usable = type(weight) is Tensor and not weight.requires_grad and weight.shape == (nll.logits.classes,)
    if not usable or weight.device != nll.device:
        return NotImplemented
    counted = nll.target != nll.ignore_index
    each = torch.where(counted, weight[nll.target.clamp(0, len(weight) - 1)], 0.0)
    if reduction == "mean":
        each = each / each.sum()
    weighted = nll.weighted(each, nll.dtype)
    return weighted.result() if reduction == "none" else weighted.reduced()


def _smoothed(
    x: DeferredLogits, target: Tensor, ignored: int, smoothing: Any, reduction: str, dtype: torch.dtype
) -> Any:
    """Return the cross-entropy with smoothed labels, which needs the sum of all logits of a row."""
    if not x.sums_classes or not isinstance(smoothing, int | float) or not 0 <= smoothing <= 1:
        return NotImplemented
    V, dropped = x.shape[x.axis], target == ignored

    def values(stats: Stats) -> Tensor:
        uniform = stats.lse - stats.total / V
        nll: Tensor = -stats.log_probs[..., 0]
        return torch.where(dropped, 0.0, (1 - smoothing) * nll + smoothing * uniform)

    ids = target_ids(target, ignored)
    check_target_range(readable_without_sync(target) or None, "targets", target, V, ignored)
    each = stat(x, "smoothed", values, dtype, ids=ids, total=True)
    if reduction == "none":
        return each
    return each.sum() if reduction == "sum" else each.sum() / (~dropped).sum()
