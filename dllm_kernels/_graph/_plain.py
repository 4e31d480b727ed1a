"""Tests for kinds of tensors: plain, DTensor, meta or fake, and what no op supports: tangents and ``torch.func``.

Small per-row tensors (targets, masks, weights, counts) may be DTensors. The package converts them to plain tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from dllm_kernels._graph._private import FakeTensor, batched_by_autograd, transforms_active


class Deferred:
    """Base class of tensors that are computed when their values are read (of ``fused_head``)."""

    def materialize(self, use: str = "materialize") -> Tensor:
        """Compute the tensor, at the first call; ``use`` names the operation that needs it."""
        raise NotImplementedError

    def record(self) -> Any:
        """Return the ``LinearLogits`` from which these logits are computed, or None."""
        return None


def is_dtensor(t: Any) -> bool:
    """Return True for a DTensor, without importing torch.distributed.

    ``hasattr`` is evaluated on tensors only, because a count that varies between steps is a symbol without attributes
    while a graph is traced.
    """
    return type(t) is not Tensor and isinstance(t, Tensor) and hasattr(t, "device_mesh")


def any_dtensor(*tensors: Any) -> bool:
    """Return True if one of the arguments, tensors or None, is a DTensor."""
    return any(type(t) is not Tensor and t is not None and is_dtensor(t) for t in tensors)


def plain(t: Any) -> Any:
    """Gather a DTensor (without communication if it is replicated), compute a deferred tensor; return others as is."""
    if isinstance(t, Deferred):
        return t.materialize("a tensor of each row")
    return t.full_tensor() if is_dtensor(t) else t


def all_plain(*tensors: Any) -> tuple[Any, ...]:
    """Apply :func:`plain` to each argument."""
    return tuple([t if t is None or type(t) is Tensor else plain(t) for t in tensors])


def autocasts(t: Tensor) -> bool:
    """Return True if autocast is enabled on the tensor's device; False on the meta device."""
    return t.device.type != "meta" and torch.is_autocast_enabled(t.device.type)


def plain_count(count: Any) -> Any:
    """Convert a count to a number or a plain tensor; a NumPy scalar is an array while a graph is traced."""
    return torch.as_tensor(count, device="cpu") if isinstance(count, np.ndarray) else plain(count)


def has_values(t: Tensor) -> bool:
    """Return True if the tensor has data: it is not on the meta device, and not a fake tensor."""
    # Test for "meta" and not for CPU or CUDA, because the mock GPU of the tests has another type and launches kernels.
    return (type(t) is Tensor and t.is_cpu) or not (t.device.type == "meta" or isinstance(t, FakeTensor))


def holds(condition: Tensor) -> bool:
    """Return the value of a condition; False if it has none. On a GPU this is a host sync."""
    return has_values(condition) and bool(condition)


def check_no_tangent(*tensors: Tensor | None) -> None:
    """Raise if an input has a forward-mode tangent, because dropping it would give a derivative of 0."""
    if torch.compiler.is_compiling():
        return
    for t in tensors:
        if t is not None and forward_ad.unpack_dual(t).tangent is not None:  # type: ignore[no-untyped-call]
            raise NotImplementedError(
                "dllm_kernels has no forward-mode derivatives (torch.autograd.forward_ad): use backward"
            )


def check_no_transform(*grads: Tensor | None) -> None:
    """Raise inside a transform of ``torch.func``, or for batched gradients, whose wrappers no kernel can read."""
    if torch.compiler.is_compiling():
        return
    if transforms_active() or any(g is not None and batched_by_autograd(g) for g in grads):
        raise NotImplementedError(
            "dllm_kernels does not support the transforms of torch.func (grad, vjp, jvp, vmap, jacrev, hessian): use "
            "backward or torch.autograd.grad; the leading dimensions of an op are rows, so a batch is one call"
        )


def readable_without_sync(t: Tensor | None) -> bool:
    """Return True if values can be read without a sync: on CPU, with data, and neither traced nor transformed."""
    if t is None or not t.is_cpu or not has_values(t) or torch.compiler.is_compiling():
        return False
    return not transforms_active()
