"""The record of a run: the environment of a measurement, JSON, and tables for reading."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.result import OUT_OF_MEMORY, PEERS, QUANTILES, Result

PACKAGES = (
    "triton",
    "numpy",
    "nemo-automodel",
    "liger-kernel",
    "cut-cross-entropy",
    "quack-kernels",
    "speculators",
    "trl",
    "verl",
    "pydantic",
    "transformers",
)


# Whole names of GPUs with a model or a bar -> short name and number of multiprocessors. The name of another card may
# contain a short name (GH200), and a slice of a card has fewer multiprocessors.
CARDS = {
    "NVIDIA A100-SXM4-80GB": ("A100", 108),
    "NVIDIA H100 80GB HBM3": ("H100", 132),
    "NVIDIA H200": ("H200", 132),
}


def card(gpu: Mapping[str, Any] | None) -> str | None:
    """Return the short name of a GPU in the environment of a measurement; None if it is not in ``CARDS``."""
    gpu = gpu or {}
    short, multiprocessors = CARDS.get(str(gpu.get("name")), (None, None))
    return short if gpu.get("multiprocessors") == multiprocessors else None


def _command(*words: str) -> str | None:
    if shutil.which(words[0]) is None:
        return None
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def version(package: str) -> str | None:
    """Return the installed version of the package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def said(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first[:200]}" if first else type(error).__name__


def _sources() -> str:
    """Return a digest of the package's code, which identifies the code of a copy without git history."""
    root = Path(__file__).parents[1] / "dllm_kernels"
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(root.rglob("*.py")))).hexdigest()[:16]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpu(device: torch.device) -> dict[str, Any] | None:
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    query = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"
    return {
        "name": found.name,
        "memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "capability": f"{found.major}.{found.minor}",
        "nvidia_smi": {
            "query": query,
            "answer": _command("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"),
        },
    }


@functools.cache
def environment(device: torch.device | str) -> dict[str, Any]:
    """Return device, clocks, driver, versions, commit and date of a measurement."""
    commit = _command("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD")
    dirty = _command("git", "-C", str(Path(__file__).parent), "status", "--porcelain", "--untracked-files=no")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "modified": bool(dirty),
        "sources": _sources(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": {name: version(name) for name in PACKAGES},
        "cpu": {"model": _cpu_model(), "count": os.cpu_count(), "threads": torch.get_num_threads()},
        "gpu": _gpu(torch.device(device)),
    }


def device_name(device: torch.device | str) -> str:
    """Return a short name of the device, for tables and folders."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_model()


def write_json(
    path: Path,
    results: Iterable[Result],
    options: argparse.Namespace,
    measured_ceilings: Mapping[str, float] | None = None,
    **more: Any,
) -> None:
    """Write the environment, options, ceilings and every sample."""
    record = {
        "environment": environment(options.device),
        "options": {
            key: str(value) if isinstance(value, Path | torch.dtype) else value
            for key, value in vars(options).items()
            if key != "out"  # the path of the file is irrelevant for the results
        },
        "ceilings": dict(measured_ceilings or {}),
        "results": [result.to_json() for result in results],
        **more,
    }
    write_whole(path, json.dumps(record, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: readers, also after an interruption, find the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format a Markdown table, columns in the order of first appearance, aligned to be readable as text."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[str(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    lines = [columns, ["-" * width for width in widths], *cells]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def duration(seconds: float) -> str:
    """Format seconds as a short text in a fitting unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def size(nbytes: float) -> str:
    """Format bytes as a short text in a fitting binary unit."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"


def _row(result: Result, baseline: Result | None) -> dict[str, str]:
    row = {key: str(value) for key, value in result.case.items()}
    row |= {"phase": result.phase, "name": result.name}
    if "failed" in result.extra:
        row["median"] = result.extra["failed"]
    if result.timing is not None:
        low, middle, high = (duration(result.timing.quantile(q)) for q in QUANTILES)
        row |= {"median": middle, "20-80 %": f"{low} - {high}"}
        if result.timing.host is not None:
            row["host"] = duration(result.timing.host)
        if baseline is not None and baseline.timing is not None:
            row[f"speed / {baseline.name}"] = f"{baseline.timing.median / result.timing.median:.2f}x"
        if result.extra.get("gain") is not None:
            row["predicted"] = f"{result.extra['gain']:.2f}x"
        if result.floor_s is not None:
            row["of floor"] = f"{100 * result.floor_s / result.timing.median:.0f} %"
    if result.peak_bytes is not None:
        row["peak"] = size(result.peak_bytes)
        if baseline is not None and baseline.peak_bytes:
            row[f"peak / {baseline.name}"] = f"{result.peak_bytes / baseline.peak_bytes:.2f}"
        if result.floor_bytes is not None:
            row["peak floor"] = size(result.floor_bytes)
    if result.error is not None:
        row["error"] = f"{result.error:.1e}"
    return row


def table(results: Sequence[Result], baseline: str | None = None) -> str:
    """Format a Markdown table, with ratios to the candidate ``baseline`` of the same case and phase."""

    def key(result: Result) -> tuple[str, str, str]:
        return json.dumps(result.case, default=str), result.phase, result.cache

    baselines = {key(result): result for result in results if result.name == baseline}
    return markdown([_row(result, baselines.get(key(result))) for result in results])


def report(
    results: Sequence[Result],
    options: argparse.Namespace,
    *,
    baseline: str | None = None,
    measured_ceilings: Mapping[str, float] | None = None,
) -> int:
    """Print the table, the device and ceilings above it, and write the JSON if ``--out`` is given.

    Returns:
        The exit status: 1 if a candidate other than a peer raised an error other than out-of-memory.
    """
    print(f"\n{device_name(options.device)}, torch {torch.__version__}")
    print(f"{options.samples} samples, {options.cache} cache, {torch.get_num_threads()} CPU threads")
    if measured_ceilings:
        copy, product = measured_ceilings["copy_bytes_per_s"], measured_ceilings["gemm_flop_per_s"]
        print(f"ceilings: copy {copy / 1e9:.3g} GB/s (read + written), product {product / 1e12:.3g} TFLOP/s")
    print("\n" + table(results, baseline))
    if options.out is not None:
        write_json(options.out, results, options, measured_ceilings)
        print(f"\nraw results: {options.out}")
    failed = {result.name: result.extra["failed"] for result in results if "failed" in result.extra}
    return int(any(name not in PEERS and reason != OUT_OF_MEMORY for name, reason in failed.items()))
