"""System information for bug reports: ``python -m dllm_kernels.report``.

Prints a verdict for each device, the backends that run there, versions, and the report of ``torch.utils.collect_env``.
The verdict compares small losses, statistics, noise and samples with PyTorch in float64 or with recorded values.
Contains no paths and no names of machines or users, so it can be posted unchanged.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import re
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import collect_env

import dllm_kernels
from dllm_kernels import ops
from dllm_kernels._checks._backend import BACKENDS, use_triton

# Packages that torch's own report does not list.
BESIDE = (
    "transformers", "accelerate", "datasets", "peft", "trl", "deepspeed", "nemo-automodel", "dllm", "specforge",
    "speculators", "liger-kernel", "cut-cross-entropy", "flash-attn", "quack-kernels", "lightning", "bitsandbytes",
)  # fmt: skip
# A valid value of each is a single word or a number.
VARIABLES = ("DLLM_KERNELS_BACKEND", "DLLM_KERNELS_CHECK", "TRITON_INTERPRET", "OMP_NUM_THREADS")
HIDDEN, PATH = "(no word)", "(path)"
# The folders of an absolute path.
FOLDERS = re.compile(r"(?:[A-Za-z]:)?[/\\](?:[^\s/\\]+[/\\])+")
# A word with a slash, or such words in quotation marks; group 1 is an address that may be shown.
PATHS = re.compile(r"""(https?://(?:www\.)?(?:nvidia\.com|pytorch\.org)\S*)|(['"])[^'"]*[/\\][^'"]*\2|\S*[/\\]\S*""")
# Masked positions of seeds 3 and 10, and tokens of seeds 0 to 3, which are the same on every device.
MASKED = ({1, 2, 3, 5, 10, 11, 14}, {0, 1, 2, 3, 8, 10, 12, 14, 15})
SAMPLED = (96, 20, 3, 14)
# Lines of lscpu that fill a screen and decide nothing.
LONG = re.compile(r"^(?:Vulnerability .*|Flags:.*)\n", re.MULTILINE)


def report() -> str:
    """Return the text that ``python -m dllm_kernels.report`` prints.

    It takes a few seconds, and some more when a GPU compiles its kernels for the first time.

    Returns:
        Verdicts and the facts about this package, one ``name: value`` per line, and the report of
        ``torch.utils.collect_env`` without folders, without the list of a processor's flags and vulnerabilities, and
        without the suffix of the operating system's version, which may identify a machine.
    """
    lines = [f"{name}: {value}" for name, value in (*_devices(), *_facts())]
    kernel = re.match(r"[\d.]*", platform.release())
    system = f"{platform.system()} {kernel and kernel[0]} {platform.machine()}"
    environment = collect_env.get_env_info()._replace(python_platform=system)  # type: ignore[no-untyped-call]
    text: str = collect_env.pretty_str(environment)  # type: ignore[no-untyped-call]
    return "\n".join([*lines, "", LONG.sub("", FOLDERS.sub("", text))])


def _devices() -> list[tuple[str, str]]:
    """Return the verdict of each device, then the outcome of each backend there."""
    verdicts, outcomes = [], []
    built = torch.version.cuda is not None or torch.version.hip is not None
    for device in ("cpu", "cuda") if built or torch.cuda.is_available() else ("cpu",):
        if (reason := _unusable(device)) is not None:
            verdicts.append((device, f"not usable: {reason}"))
            continue
        # Gradients are compared, so a caller's no_grad() or inference_mode() must not apply.
        with torch.inference_mode(False), torch.enable_grad():
            by_backend = {backend: _tried(device, backend) for backend in BACKENDS}
        word, _, rest = by_backend["auto"].partition(", ")
        verdicts.append((device, f"not usable: {rest}" if word in ("no", "fails") else rest))
        outcomes += [(f"backend={backend} on {device}", outcome) for backend, outcome in by_backend.items()]
    return verdicts + outcomes


def _facts() -> Iterator[tuple[str, str]]:
    yield "dllm_kernels", dllm_kernels.__version__
    for name in BESIDE:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)
    yield "CPU threads of torch", str(torch.get_num_threads())
    for name in VARIABLES:
        if name in os.environ:
            yield name, HIDDEN if _hidden(name) else os.environ[name]


def _hidden(name: str) -> bool:
    """Return True if the value of a variable is not shown, because values other than a word may be paths."""
    return not re.fullmatch(r"[\w.,+-]*", os.environ.get(name, ""))


def _said(error: Exception) -> str:
    """Return the first line of an exception's message without paths and hidden values, after its type if needed."""
    if isinstance(error, subprocess.CalledProcessError):  # of a compiler, whose arguments are paths
        return f"{Path(error.cmd[0]).name} ended with status {error.returncode}"
    first = str(error).strip().partition("\n")[0]
    if any(name in first and _hidden(name) for name in VARIABLES):
        first = re.sub(r", got .*", f", got {HIDDEN}", first)
    text = PATHS.sub(lambda match: match[1] or PATH, first)[:300]
    return text if type(error) in (ValueError, RuntimeError) and text else f"{type(error).__name__}: {text}"


def _unusable(device: str) -> str | None:
    """Return the reason why torch cannot use the device, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.zeros(1, device=device)
    except Exception as failure:
        return _said(failure)
    return None


def _tried(device: str, backend: str) -> str:
    """Name the implementation that runs and compare its results, or state why it cannot run."""
    wrong = []
    try:
        runs = "triton" if use_triton(backend, torch.zeros(1, device=device)) else "torch"
    except ValueError as refused:
        return f"no, {_said(refused)}"
    for name, check in CHECKS.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings of Triton's interpreter contain the path of its file
                error, allowed = check(device, backend)
        except ValueError as refused:
            return f"no, {_said(refused)}"
        except Exception as failure:  # the report must list any failure
            return f"fails, {_said(failure)}"
        if not error <= allowed:
            wrong.append(f"{name} by {error:.1e}")
    return f"{runs}, {'WRONG: ' + ', '.join(wrong) if wrong else 'right'}"


Form = Callable[..., Sequence[Tensor]]


def _error(tested: Form, plain: Form, leaves: Sequence[Tensor], device: str) -> tuple[float, float]:
    """Compare outputs and gradients of ``tested`` with ``plain`` in float64; return the largest error and its limit.

    Errors are relative to the largest entry of a result. The limit is twice the error of ``plain`` in the dtype of the
    leaves, one rounding step, and the noise of another order of summation.
    """

    def results(form: Form, device: str, dtype: torch.dtype) -> list[Tensor]:
        inputs = [t.to(device, dtype, copy=True).requires_grad_() for t in leaves]
        outputs = form(*inputs)
        total = torch.stack([(t * torch.linspace(0.5, 1.0, t.numel(), device=device)).sum() for t in outputs]).sum()
        tensors = (*outputs, *torch.autograd.grad(total, inputs))
        return [t.detach().cpu().double() for t in tensors]

    dtype = leaves[0].dtype
    noise = torch.finfo(torch.float32).eps * leaves[-1].numel() ** 0.5
    pairs = []
    compared = results(tested, device, dtype), results(plain, "cpu", dtype), results(plain, "cpu", torch.float64)
    for actual, rounded, exact in zip(*compared, strict=True):
        error, plain_error = (float((t - exact).abs().max() / exact.abs().max()) for t in (actual, rounded))
        pairs.append((error, 2 * plain_error + torch.finfo(dtype).eps + noise))
    return max(pairs, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0] / pair[1])


def _values(*shape: int) -> Tensor:
    """Return deterministic values between -3 and 3."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64, device="cpu")
    return torch.sin(count).float().view(shape).mul(3)


def _nll_check(rows: int, V: int) -> Callable[[str, str], tuple[float, float]]:
    """Return the check of a weighted NLL from float32 logits."""

    def check(device: str, backend: str) -> tuple[float, float]:
        targets, weights = torch.arange(rows, device="cpu"), torch.linspace(0.5, 1.0, rows, device="cpu")

        def tested(logits: Tensor) -> list[Tensor]:
            return [dllm_kernels.weighted_nll(logits, targets.to(device), weights.to(device), backend=backend).loss]

        def plain(logits: Tensor) -> list[Tensor]:
            return [(F.cross_entropy(logits, targets, reduction="none") * weights).sum()]

        return _error(tested, plain, [_values(rows, V)], device)

    return check


def _linear_nll(device: str, backend: str) -> tuple[float, float]:
    """Check the NLL from bfloat16 hidden states through a trained head, in two chunks."""
    targets, weights = torch.arange(24, device="cpu"), torch.linspace(0.5, 1.0, 24, device="cpu")

    def tested(hidden: Tensor, head: Tensor) -> list[Tensor]:
        logits = ops.LinearLogits(hidden, head).in_chunks_of(16)
        return [dllm_kernels.weighted_nll(logits, targets.to(device), weights.to(device), backend=backend).loss]

    def plain(hidden: Tensor, head: Tensor) -> list[Tensor]:
        logits = F.linear(hidden, head)
        nll = F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="none")
        return [(nll * weights).sum()]

    return _error(tested, plain, [_values(24, 64).bfloat16(), (_values(100, 64) / 64).bfloat16()], device)


def _statistics(device: str, backend: str) -> tuple[float, float]:
    """Check log-probabilities and entropy from float32 logits."""
    ids = torch.arange(8, device="cpu")

    def tested(logits: Tensor) -> list[Tensor]:
        out = ops.token_log_probs(logits, ids.to(device), with_entropy=True, backend=backend)
        assert out.entropy is not None
        return [out.log_probs, out.entropy]

    def plain(logits: Tensor) -> list[Tensor]:
        log_p = logits.log_softmax(-1)
        return [log_p.gather(-1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)]

    return _error(tested, plain, [_values(8, 100)], device)


def _corruption(device: str, backend: str) -> tuple[float, float]:
    """Count the positions at which the masks of two seeds differ from the recorded ones."""
    ids, seeds = torch.zeros(2, 16, dtype=torch.int64, device=device), torch.arange(3, 17, 7, device=device)
    noise = dllm_kernels.corrupt_uniform(ids, torch.ones_like(ids), 1, seeds=seeds, backend=backend)[1]
    masked = (set(row.nonzero().flatten().tolist()) for row in noise.cpu())
    return float(sum(len(row ^ recorded) for row, recorded in zip(masked, MASKED, strict=True))), 0.0


def _sample(device: str, backend: str) -> tuple[float, float]:
    """Count the tokens of four seeds that differ from the recorded ones; the logits are exact in every dtype."""
    head = (torch.arange(400, device=device).view(100, 4) * 37 % 13 - 6) / 4
    seeds = torch.arange(4, device=device)
    ids = ops.linear_sample(torch.eye(4, device=device), head, seeds=seeds, backend=backend).ids.tolist()
    return float(sum(token != recorded for token, recorded in zip(ids, SAMPLED, strict=True))), 0.0


# A row of 20,000 float32 logits is shared by two programs.
CHECKS: dict[str, Callable[[str, str], tuple[float, float]]] = {
    "float32 NLL": _nll_check(8, 100), "bfloat16 linear NLL": _linear_nll, "NLL of a split row": _nll_check(2, 20_000),
    "row statistics": _statistics, "corruption": _corruption, "sample": _sample,
}  # fmt: skip


if __name__ == "__main__":
    print(report())
