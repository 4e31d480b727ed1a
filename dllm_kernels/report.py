"""System information for bug reports: ``python -m dllm_kernels.report``.

Prints versions, the backend that runs on each device, a correctness check of a small loss, and the report of
``torch.utils.collect_env``. Contains no paths and no names of machines or users, so it can be posted unchanged.
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
from torch.utils import collect_env

import dllm_kernels
from dllm_kernels._backends._backend import BACKENDS, use_triton

# Packages that torch's own report does not list.
BESIDE = (
    "transformers", "accelerate", "datasets", "peft", "trl", "deepspeed", "nemo-automodel", "dllm", "specforge",
    "speculators", "liger-kernel", "cut-cross-entropy", "flash-attn", "quack-kernels", "lightning", "bitsandbytes",
)  # fmt: skip
# A valid value of each is a single word or a number.
VARIABLES = ("DLLM_KERNELS_BACKEND", "DLLM_KERNELS_CHECK", "TRITON_INTERPRET", "OMP_NUM_THREADS")
HIDDEN = "(no word)"
# The folders of an absolute path.
FOLDERS = re.compile(r"(?:[A-Za-z]:)?[/\\](?:[^\s/\\]+[/\\])+")
TOLERANCE = 1e-5


def report() -> str:
    """Return the text that ``python -m dllm_kernels.report`` prints; takes a few seconds.

    Returns:
        The facts about this package, one ``name: value`` per line, and the report of ``torch.utils.collect_env``
        without folders and without the suffix of the operating system's version, which may identify a machine.
    """
    lines = [f"{name}: {value}" for name, value in _facts()]
    kernel = re.match(r"[\d.]*", platform.release())
    system = f"{platform.system()} {kernel and kernel[0]} {platform.machine()}"
    environment = collect_env.get_env_info()._replace(python_platform=system)  # type: ignore[no-untyped-call]
    text: str = collect_env.pretty_str(environment)  # type: ignore[no-untyped-call]
    return "\n".join([*lines, "", FOLDERS.sub("", text)])


def _facts() -> Iterator[tuple[str, str]]:
    yield "dllm_kernels", dllm_kernels.__version__
    for name in BESIDE:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)
    yield "CPU threads of torch", str(torch.get_num_threads())
    for name in VARIABLES:
        if name in os.environ:
            yield name, HIDDEN if _hidden(name) else os.environ[name]
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for backend in BACKENDS:
            # Gradients are compared, so a caller's no_grad() or inference_mode() must not apply.
            with torch.inference_mode(False), torch.enable_grad():
                result = _tried(device, backend)
            yield f"backend={backend} on {device}", result


def _hidden(name: str) -> bool:
    """Return True if the value of a variable is not shown, because values other than a word may be paths."""
    return not re.fullmatch(r"[\w.,+-]*", os.environ.get(name, ""))


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
        if any(name in reason and _hidden(name) for name in VARIABLES):
            reason = re.sub(r", got .*", f", got {HIDDEN}", reason, flags=re.DOTALL)
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
