"""Alternatives to choices that were made without a GPU: chunk sizes, a cache hint, prefetching.

Chunk sizes are measured with the public call from hidden states, through a frozen head (half of the rows active) and a
trained head. Kernel variants are copies of ``dllm_kernels._backends.triton`` with a few replaced lines (``VARIANTS``).
They run on one chunk of logits or on one batch. The error of a variant is its distance from the package's own result.
It is 0 if only the speed differs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import linear_nll, measure
from benchmarks.record import report
from benchmarks.shapes import HEADLINE, Shape

KERNELS = Path(__file__).parents[1] / "dllm_kernels" / "_backends" / "triton"
CHUNKS = {
    "toy": (4, 8),
    "small": (128, 256, 512),
    "full": (1024, 1280, 1536, 1664, 1920, 2048, 3072, 3840, 4096, 8192),
}
ROWS = {"toy": 2, "small": 512, "full": 2048}  # of a chunk


class Change(NamedTuple):
    """A replacement in a file of ``dllm_kernels/_backends/triton``; the old text must occur exactly once."""

    file: str
    old: str
    new: str


_HINT = 'EVICT="" if bound_by_issue else "evict_last"'
_NO_HINT, _NO_AHEAD = (
    Change("linear_nll.py", _HINT, 'EVICT=""'),
    Change("linear_nll.py", "EVICT, True\n", "EVICT, False\n"),
)
_AHEAD = Change("_math.py", "AHEAD: tl.constexpr = False", "AHEAD: tl.constexpr = True")
VARIANTS = {
    "no evict_last": (_NO_HINT,), "no prefetch": (_NO_AHEAD,), "neither": (_NO_HINT, _NO_AHEAD), "prefetch": (_AHEAD,),
}  # fmt: skip
OF_KERNEL = {"chunk": ("no evict_last", "no prefetch", "neither"), "forward": ("prefetch",)}


@contextlib.contextmanager
def kernels(changes: Sequence[Change]) -> Iterator[Callable[[str], Any]]:
    """Return an import function for a copy of ``dllm_kernels._backends.triton`` with these texts replaced."""
    with tempfile.TemporaryDirectory() as folder:
        package = f"kernels_{Path(folder).name}"
        copy = Path(folder, package)
        shutil.copytree(KERNELS, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for file, old, new in changes:
            text = (copy / file).read_text()
            if text.count(old) != 1:
                raise ValueError(f"_backends/triton/{file} must hold once, has {text.count(old)} times:\n{old}")
            (copy / file).write_text(text.replace(old, new))
        for path in copy.rglob("*.py"):
            path.write_text(path.read_text().replace("dllm_kernels._backends.triton", package))
        sys.path.insert(0, folder)
        try:
            yield lambda name: importlib.import_module(f"{package}.{name}")
        finally:
            sys.path.remove(folder)
            for name in [name for name in sys.modules if name.partition(".")[0] == package]:
                del sys.modules[name]


def chunk_sizes(shape: Shape, share: float, options: argparse.Namespace) -> list[measure.Result]:
    """Measure the public call from hidden states with its default chunk size and with others."""
    inputs = linear_nll.make_inputs(shape, share, options.dtype, options.device, False)
    active = int((inputs[3] != 0).sum())
    case = {"what": "chunk size", "shape": shape.name, "active": f"{share:.0%}"}
    candidates = {}
    for chunk in (None, *(c for c in CHUNKS[options.size] if c < active), active):
        ours = linear_nll.ours(options, chunk)
        candidates[f"chunks of {chunk}" if chunk else "ours"] = linear_nll.candidate(ours, inputs, shape, "both")
    return measure.compare("variants", case, "both", candidates, options)


def _launch(module: Callable[[str], Any], kernel: str, logits: torch.Tensor, y: torch.Tensor, s: torch.Tensor) -> Any:
    """Launch once: on a chunk, which is overwritten, or forward on a batch."""
    if kernel == "chunk":
        return module("linear_nll").nll_and_grad_(logits, y, s, with_correct=False)
    return module("token_nll").nll(logits[None], y, with_correct=False)


def of_kernel(kernel: str, shape: Shape, options: argparse.Namespace) -> list[measure.Result]:
    """Measure one kernel of the package and its variants."""
    rows = min(ROWS[options.size], shape.rows)
    drawn = torch.randn(rows, shape.vocab, device=options.device, dtype=options.dtype)
    y = torch.randint(0, shape.vocab, (rows,), device=options.device)
    s, logits = torch.rand(rows, device=options.device), drawn.clone()

    def result(module: Callable[[str], Any]) -> torch.Tensor:
        logits.copy_(drawn)
        out = _launch(module, kernel, logits, y, s)
        return logits.clone() if kernel == "chunk" else torch.cat([t.flatten() for t in out if t is not None])

    with contextlib.ExitStack() as stack:
        variants = {"ours": (), **{name: VARIANTS[name] for name in OF_KERNEL[kernel]}}
        modules = {name: stack.enter_context(kernels(changes)) for name, changes in variants.items()}
        exact = result(modules["ours"])
        off = measure.each_error(modules, lambda module: measure.relative_error(result(module), exact))
        timed = {
            name: measure.Candidate(
                lambda _, module=module: _launch(module, kernel, logits, y, s)  # type: ignore[misc]
            )
            for name, module in modules.items()
        }
        case = {"what": f"{kernel} kernel", "shape": shape.name, "rows": rows, "V": shape.vocab}
        return measure.compare("variants", case, "launch", timed, options, errors=off, memory=False)


def main(argv: Sequence[str]) -> int:
    """Print the table and write the JSON."""
    parser = measure.arguments("variants", __doc__)
    parser.set_defaults(samples=10)
    options = measure.parse(parser, argv)
    options.recipe_chunk = False
    if torch.device(options.device).type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        again = [sys.executable, "-m", "benchmarks", "variants", *argv]
        return subprocess.run(again, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode
    shapes, results = HEADLINE[options.size], list[measure.Result]()
    for kernel, shape in zip(OF_KERNEL, (shapes.frozen[0], shapes.logits), strict=True):
        results += of_kernel(kernel, shape, options)
    results += chunk_sizes(shapes.frozen[0], 0.5, options) + chunk_sizes(shapes.trained, 1.0, options)
    return report(results, options, baseline="ours")
