"""System information for bug reports: ``python -m dllm_kernels.report``.

Prints versions, devices, the backend that runs on each, other packages, and a correctness check of a small loss.
Contains no paths and no names of machines or users, so it can be posted unchanged.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import warnings
from collections.abc import Iterator

import torch

import dllm_kernels
from dllm_kernels._backends._backend import BACKENDS, use_triton

BESIDE = (
    "numpy", "triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows", "transformers", "accelerate",
    "datasets", "peft", "trl", "deepspeed", "nemo-automodel", "dllm", "specforge", "speculators", "liger-kernel",
    "cut-cross-entropy", "flash-attn", "quack-kernels", "torchtitan", "lightning", "bitsandbytes",
)  # fmt: skip
# A valid value of each is a single word or a number.
VARIABLES = ("DLLM_KERNELS_BACKEND", "DLLM_KERNELS_CHECK", "TRITON_INTERPRET", "OMP_NUM_THREADS")
TOLERANCE = 1e-5


def report() -> str:
    """Return the lines that ``python -m dllm_kernels.report`` prints.

    Returns:
        One fact per line, ``name: value``.
    """
    return "\n".join(f"{name}: {value}" for name, value in _facts())


def _facts() -> Iterator[tuple[str, str]]:
    yield "dllm_kernels", dllm_kernels.__version__
    yield "python", f"{platform.python_implementation()} {platform.python_version()}"
    kernel = re.match(r"[\d.]*", platform.release())  # the suffix is host-specific and may identify the machine
    yield "system", f"{platform.system()} {kernel and kernel[0]} {platform.machine()}"
    platforms = {"ROCm": torch.version.hip, "CUDA": torch.version.cuda}
    built_for = next((f"{name} {version}" for name, version in platforms.items() if version), "CPU")
    yield "torch", f"{torch.__version__}, built for {built_for}"
    for name in BESIDE:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)
    yield "cpu", f"{torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    for index in range(torch.cuda.device_count()):
        yield f"gpu {index}", _gpu(index)
    if not torch.cuda.device_count():
        yield "gpu", "none"
    for name in VARIABLES:
        if name in os.environ:  # other values may be paths
            yield name, os.environ[name] if re.fullmatch(r"[\w.,+-]*", os.environ[name]) else "(no word)"
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for backend in BACKENDS:
            yield f"backend={backend} on {device}", _tried(device, backend)


def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    architecture = getattr(properties, "gcnArchName", "") or f"sm_{properties.major}{properties.minor}"
    return f"{properties.name}, {architecture}, {properties.total_memory / 2**30:.0f} GiB"


def _tried(device: str, backend: str) -> str:
    """Name the implementation that runs and compare a small loss with float64, or state why it cannot run."""
    logits, targets = _logits(device), torch.arange(8, device=device)
    weights = torch.linspace(0.5, 1.0, 8, device=device)
    try:
        runs = "triton" if use_triton(backend, logits) else "torch"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of Triton's interpreter contain the path of its file
            loss = dllm_kernels.weighted_nll(logits.requires_grad_(), targets, weights, backend=backend).loss
            (gradient,) = torch.autograd.grad(loss, logits)
    except Exception as error:  # the report must list any failure
        reason = str(error)
        shown = isinstance(error, ValueError) and not re.search(r"[/\\\n]", reason)
        return f"no, {reason}" if shown else f"fails, {type(error).__name__}"
    exact = _logits("cpu").double().requires_grad_()
    expected = (torch.nn.functional.cross_entropy(exact, targets.cpu(), reduction="none") * weights.cpu()).sum()
    (wanted,) = torch.autograd.grad(expected, exact)
    worst = max((loss.cpu() - expected).abs().item(), (gradient.cpu() - wanted).abs().max().item())
    return f"{runs}, {'right' if worst < TOLERANCE else f'WRONG by {worst:.1e}'}"


def _logits(device: str) -> torch.Tensor:
    """Return deterministic logits ``[8, 100]``."""
    return torch.sin(torch.arange(800.0, dtype=torch.float64, device="cpu")).float().view(8, 100).mul(3).to(device)


if __name__ == "__main__":
    print(report())
