"""Rule of the cross-entropy with ids, and weights of the classes; ``_term_rules.py`` has that of smoothed labels."""

from __future__ import annotations

from typing import Any

import torch

from dllm_kernels.deferred._logits import DeferredLogits, rule
from dllm_kernels.deferred._moves import Call
from dllm_kernels.deferred._nll import DeferredNLL, dtype_after
from dllm_kernels.deferred._stat_rules import known_ids, takes_skipped
from dllm_kernels.deferred._tensor import arguments

Tensor = torch.Tensor


@rule("cross_entropy", "nll_loss")
def _cross_entropy(x: DeferredLogits, call: Call) -> Any:
    log_probs = call.function.__name__ == "nll_loss"
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    args = arguments(names, call.args, call.kwargs)
    target = known_ids(args.get("target"))
    unsupported = any(args.get(name) is not None for name in ("size_average", "reduce"))
    if log_probs != x.log_probs or x.axis != (1 if x.ndim > 1 else 0) or not x.fusible:
        return NotImplemented
    if unsupported or args.get("label_smoothing") or not isinstance(target, Tensor) or target.is_floating_point():
        return NotImplemented
    rows = x.shape[: x.axis] + x.shape[x.axis + 1 :]
    reduction, ignored = args.get("reduction", "mean"), args.get("ignore_index", -100)
    if target.shape != rows or reduction not in ("none", "sum", "mean") or takes_skipped(x, target):
        return NotImplemented

    def plain(z: Tensor) -> Tensor:
        return call.function(z, torch.zeros(1, dtype=torch.long, device=z.device))  # type: ignore[no-any-return]

    dtype = dtype_after(plain, x.dtype, x.device)
    weight = args.get("weight")
    nll = DeferredNLL.of(x, target, ignored, dtype)
    if weight is not None:
        return _with_class_weights(nll, weight, reduction)
    if reduction == "none":
        return nll.result()
    return nll.reduced(None if reduction == "sum" else (target != ignored).sum())


def _with_class_weights(nll: DeferredNLL, weight: Any, reduction: str) -> Any:
    """Multiply the NLL by the weight of its target; the mean is weighted, too."""
    like = (nll.logits.classes,), nll.device
    if type(weight) is not Tensor or weight.requires_grad or (weight.shape, weight.device) != like:
        return NotImplemented
    counted = nll.target != nll.ignore_index
    each = torch.where(counted, weight[nll.target.clamp(0, len(weight) - 1)], 0.0)
    if reduction == "mean":
        each = each / each.sum()
    weighted = nll.weighted(each, nll.dtype)
    if reduction == "none":
        return weighted.result()
    return weighted.reduced(0 if reduction == "mean" and not each.numel() else None)
