"""Checks at the public door: each names the argument, what was expected and what came."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Sequence

import numpy as np
import torch

from dllm_kernels.ops._plain import is_dtensor

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INT_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def check_tensor(name: str, value: object) -> None:
    """Raise a TypeError unless ``value`` is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def check_dtype(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Raise a ValueError unless the tensor's dtype is one of ``dtypes``."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must have dtype {_names(dtypes)}, got {_names([tensor.dtype])}")


def check_float(name: str, value: object) -> None:
    """Raise unless ``value`` is a float16, bfloat16, float32 or float64 tensor."""
    check_tensor(name, value)
    assert isinstance(value, torch.Tensor)
    check_dtype(name, value, FLOAT_DTYPES)


def check_ids(name: str, value: object) -> None:
    """Raise unless ``value`` is an integer tensor."""
    check_tensor(name, value)
    assert isinstance(value, torch.Tensor)
    check_dtype(name, value, INT_DTYPES)


def check_shape(name: str, tensor: torch.Tensor, expected: Sequence[int], of: str = "") -> None:
    """Raise a ValueError unless the tensor has exactly this shape; ``of`` says where the expectation is from."""
    if tuple(tensor.shape) != tuple(expected):
        hint = f" ({of})" if of else ""
        raise ValueError(f"{name} must have shape {tuple(expected)}{hint}, got {tuple(tensor.shape)}")


def check_ndim(name: str, tensor: torch.Tensor, ndim: int, layout: str) -> None:
    """Raise a ValueError unless the tensor has ``ndim`` dimensions; ``layout`` is what to call them."""
    if tensor.dim() != ndim:
        raise ValueError(f"{name} must have shape {layout}, got {tuple(tensor.shape)}")


def check_same_device(first_name: str, first: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise a ValueError unless every given tensor is on the device of the first."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            raise ValueError(f"{name} must be on {first.device} like {first_name}, got {tensor.device}")


def check_mask(name: str, value: object, expected: Sequence[int], of: str = "") -> None:
    """Raise unless ``value`` is a bool, integer or floating mask of the expected shape."""
    check_tensor(name, value)
    assert isinstance(value, torch.Tensor)
    check_dtype(name, value, (torch.bool, *INT_DTYPES, *FLOAT_DTYPES))
    check_shape(name, value, expected, of)


def check_positive_int(name: str, value: object) -> None:
    """Raise unless ``value`` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):  # NumPy's integers too
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def check_count(name: str, value: object) -> None:
    """Raise unless ``value`` is None, a number, or a tensor with one element."""
    if value is None or (not isinstance(value, bool) and isinstance(value, numbers.Real)):  # NumPy's numbers too
        return
    if isinstance(value, (torch.Tensor, np.ndarray)):  # NumPy's numbers are arrays while a graph is traced
        if math.prod(value.shape) != 1:
            raise ValueError(f"{name} must be a number or a 0-d tensor, got a tensor of shape {tuple(value.shape)}")
        return
    raise TypeError(f"{name} must be a number or a 0-d tensor, got {type(value).__name__}")


def targets_checked(check_targets: bool | None) -> bool:
    """Whether to look for out-of-range targets: the argument, else the environment variable.

    A compiled function reads the variable when it is traced, and does not look again.
    """
    if check_targets is None:
        return os.environ.get("DLLM_KERNELS_CHECK", "0") == "1"
    return check_targets


def check_target_range(targets: torch.Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raise an IndexError naming the first target outside [0, vocab_size) that is not ``ignore_index``.

    Reads the targets back to the host (a sync), hence only on request. While a graph is traced, one op stands for it, so
    that the graph stays whole and the check runs with it.
    """
    if torch.compiler.is_compiling():
        from dllm_kernels.ops._compiled_checks import _target_range_op

        _target_range_op(targets, vocab_size, ignore_index)
        return
    targets = targets.long()  # compared as int8 or uint8, a vocabulary size or -100 would wrap around
    bad = ((targets < 0) | (targets >= vocab_size)) & (targets != ignore_index)
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        value = int(targets[tuple(where)])
        raise IndexError(
            f"targets must lie in [0, {vocab_size}) or be {ignore_index}, got {value} at position {tuple(where)}"
        )


def check_linear_dtypes(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise unless weight and bias have the dtype of hidden, or autocast will give them one.

    A DTensor may be stored in another dtype, as under FSDP2's mixed precision: it is looked at once it is gathered.
    """
    dtypes = [t.dtype for t in (hidden, weight, bias) if t is not None]
    if torch.is_autocast_enabled(hidden.device.type) and torch.float64 not in dtypes:  # which autocast leaves alone
        return
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype and not is_dtensor(tensor):
            raise ValueError(
                f"{name} must have the dtype of hidden, {hidden.dtype}, unless torch.autocast is on, got {tensor.dtype}"
            )
