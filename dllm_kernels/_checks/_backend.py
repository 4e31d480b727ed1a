"""Choice of the backend: Triton kernels or plain torch."""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings

import torch
from torch import Tensor

from dllm_kernels._checks import check_choice

BACKENDS = ("auto", "triton", "torch")
GET_TRITON = (
    "triton is not installed; GPU builds of torch install theirs (triton, triton-rocm, triton-xpu), beside another "
    "build run: pip install 'triton>=3.6'"
)


@functools.cache
def triton_available() -> bool:
    """Return True if Triton is installed, without importing it."""
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # sys.modules["triton"] is a stub without a spec
        return False


@functools.cache
def _warn_without_triton(device: str) -> None:
    warnings.warn(f"tensors on {device} take the slower PyTorch path, because {GET_TRITON}", stacklevel=3)


def interpreting() -> bool:
    """Return True if Triton kernels run on CPU tensors, in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def use_triton(backend: str, tensor: Tensor) -> bool:
    """Choose the backend of one call.

    Args:
        backend: "auto", "triton" or "torch". "auto" follows the environment variable ``DLLM_KERNELS_BACKEND`` if it is
            set and not empty. Otherwise it selects Triton for CUDA and ROCm tensors if Triton is installed.
        tensor: an input of the op; only its device is read.

    Returns:
        True for the Triton kernels, False for plain torch. On a GPU without Triton, "auto" warns once.

    Raises:
        ValueError: an unknown name, or ``"triton"`` if it cannot run. An explicit choice never falls back silently.
    """
    source = "backend"
    if isinstance(backend, str) and backend == "auto":
        backend = os.environ.get("DLLM_KERNELS_BACKEND") or "auto"
        source = "DLLM_KERNELS_BACKEND"
    check_choice(source, backend, BACKENDS)
    if backend == "torch":
        return False
    on_gpu = tensor.is_cuda  # costs a fifth of tensor.device.type
    if backend == "auto":
        if on_gpu and not triton_available() and not torch.compiler.is_compiling():
            _warn_without_triton(tensor.device.type)
        return on_gpu and triton_available()
    if not triton_available():
        raise ValueError(f"{source}='triton' was asked for, but {GET_TRITON}")
    if not on_gpu and not interpreting():
        raise ValueError(
            f"{source}='triton' needs a CUDA or ROCm tensor, got one on {tensor.device}; "
            "set TRITON_INTERPRET=1 before the first import to run the kernels on CPU tensors"
        )
    return True
