"""Kinds of tensors: plain, DTensor, without values, inside a transform of ``torch.func``.

Small per-row tensors (targets, masks, weights, counts) may come as DTensors; the package works on plain ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad


def is_dtensor(t: Any) -> bool:
    """Whether ``t`` is a DTensor, found out without loading torch.distributed.

    Only tensors are asked: a count that changes from step to step is a symbol while a graph is traced, which has no
    attributes to look for.
    """
    return type(t) is not torch.Tensor and isinstance(t, torch.Tensor) and hasattr(t, "device_mesh")


def plain(t: Any) -> Any:
    """The whole tensor behind a DTensor (no communication where it is replicated); anything else as it is."""
    return t.full_tensor() if is_dtensor(t) else t


def all_plain(*tensors: Any) -> tuple[Any, ...]:
    """:func:`plain` of each."""
    return tuple(plain(t) for t in tensors)


def autocasts(t: torch.Tensor) -> bool:
    """Whether autocast is on for the tensor's device; the meta device has none."""
    return t.device.type != "meta" and torch.is_autocast_enabled(t.device.type)


def plain_count(count: Any) -> Any:
    """A count as a number or a plain tensor; a number of NumPy's is an array while a graph is traced."""
    return torch.as_tensor(count, device="cpu") if isinstance(count, np.ndarray) else plain(count)


def has_values(t: torch.Tensor) -> bool:
    """Whether the tensor has values at all: not on the meta device, nor under ``FakeTensorMode``."""
    # The device by its name: what stands for a GPU that is not there has another, and launches kernels.
    return not (t.device.type == "meta" or isinstance(t, FakeTensor))


def check_no_tangent(*tensors: torch.Tensor | None) -> None:
    """Raise where forward-mode differentiation has come with a tangent, which would be dropped: its derivative would be 0."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):  # type: ignore[no-untyped-call]
        refuse_forward_mode()


def refuse_forward_mode() -> NoReturn:
    """Raise the error of forward-mode differentiation."""
    raise NotImplementedError(
        "dllm_kernels has no forward-mode derivatives (torch.func.jvp, torch.autograd.forward_ad): use backward"
    )


def transforms_active() -> bool:
    """Whether the code runs inside a transform of ``torch.func``, such as ``grad``."""
    return torch._C._are_functorch_transforms_active()


def levels(t: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor, then the tensor that it wraps at each level of ``torch.func`` transforms; the last is plain."""
    yield t
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
        yield t


def is_batched(t: torch.Tensor) -> bool:
    """Whether the tensor has a batch dimension of ``torch.func.vmap``, which its shape does not show."""
    return transforms_active() and any(torch._C._functorch.is_batchedtensor(each) for each in levels(t))


def check_not_batched(*tensors: torch.Tensor | None) -> None:
    """Raise if one of the tensors :func:`is_batched`."""
    if not torch.compiler.is_compiling() and any(t is not None and is_batched(t) for t in tensors):
        refuse_vmap()


def refuse_vmap() -> NoReturn:
    """Raise the error of ``torch.func.vmap``."""
    raise NotImplementedError(
        "dllm_kernels has no batching rule for torch.func.vmap, nor for jacrev and hessian, which use it: call the op "
        "on the whole batch, whose leading dimensions are rows, or once per sample in a loop"
    )


def values_are_there(t: torch.Tensor | None) -> bool:
    """Whether looking at values costs no sync: on CPU, and of no tensor that stands for others, as in a graph."""
    return t is not None and t.is_cpu and has_values(t) and not torch.compiler.is_compiling() and not is_batched(t)
