"""Candidates that only a measurement can decide: alternatives to choices that were made without a GPU.

Chunk sizes are measured with the public call from hidden states, through a frozen head (half of the rows active) and a
trained head. Kernels are measured alone, on one chunk of logits or on one batch. A candidate is a copy of
``dllm_kernels.backends.triton`` with a few replaced lines, or a kernel beside it:

* ``chunk``: no cache hint, no prefetching; ``one pass`` reads the row once (``candidates.linear_nll_once``).
* ``forward``: prefetching.
* ``greedy sample``: loads of 16 bytes (``candidates.greedy``).
* ``sample, statistics``: log-probabilities and entropy from the launch that draws the token, which has issue slots as
  its limit, instead of another launch, whose limit is memory.
* ``grad_hidden``: the product of few rows, whose tiles do not fill the GPU, in parts of the vocabulary that are added.

The error of a candidate is its distance from the package's own result. It is 0 if only the speed differs. ``predicted``
in the table, ``gain`` in the raw results, is the time of ours over that of the candidate as it was predicted before any
measurement (``GAINS``). A candidate replaces ours if it is measured faster on every GPU at hand.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import linear_nll, measure
from benchmarks.record import card, environment, report
from benchmarks.shapes import HEADLINE, Shape
from dllm_kernels.rows._active_rows import limits_of_chunks

KERNELS = Path(__file__).parents[1] / "dllm_kernels" / "backends" / "triton"
CHUNKS = {
    "toy": (4, 8),
    "small": (128, 256, 512),
    "full": (1024, 1280, 1536, 1664, 1920, 2048, 3072, 3840, 4096, 8192),
}
ROWS = {"toy": 2, "small": 512, "full": 2048}  # of a chunk
FEW_ROWS = {"toy": (2,), "small": (64,), "full": (256, 614)}  # whose grad_hidden has fewer tiles than multiprocessors
PARTS = (2, 3, 4, 8)  # of the vocabulary


class Change(NamedTuple):
    """A replacement in a file of ``dllm_kernels/backends/triton``; the old text must occur exactly once."""

    file: str
    old: str
    new: str


_HINT = 'EVICT="" if bound_by_issue else "evict_last"'
_NO_HINT, _NO_AHEAD = (
    Change("linear_nll.py", _HINT, 'EVICT=""'),
    Change("linear_nll.py", "EVICT, True\n", "EVICT, False\n"),
)
_AHEAD = Change("_math.py", "AHEAD: tl.constexpr = False", "AHEAD: tl.constexpr = True")
# The program that draws a token then computes (M, S, T) of the same columns, and the statistics only merge these.
_STATISTICS = (
    Change("sample.py", "import _launch, _tiles\n", "import _launch, _math, _tiles\n"),
    Change("sample.py", "score_ptr, column_ptr,\n", "score_ptr, column_ptr, max_ptr, sum_ptr, moment_ptr,\n"),
    Change(
        "sample.py",
        "    tl.store(column_ptr + at, column)\n",
        """    tl.store(column_ptr + at, column)
    of_columns = tl.maximum(start - before, 0), tl.minimum(end - before, V)
    row_max, row_sum, _, (moment,) = _math.column_stats(
        logits_ptr, n * stride_n, *of_columns, best.to(ACC), transform, BLOCK_V, 32, ACC, False, False, True, None, ""
    )
    tl.store(max_ptr + at, row_max)
    tl.store(sum_ptr + at, row_sum)
    tl.store(moment_ptr + at, moment)
""",
    ),
    Change(
        "sample.py",
        "    if C:\n        row_seeds",
        "    parts = [torch.empty(C, splits, device=device) for _ in range(3)]\n    if C:\n        row_seeds",
    ),
    Change("sample.py", "*row_seeds, score, column,", "*row_seeds, score, column, *parts,"),
    Change("sample.py", "[:, 0].to(torch.int64)", "[:, 0].to(torch.int64), parts"),
    Change("row_stats.py", "def forward(logits: Tensor, request: Any)", "def forward(logits, request, parts)"),
    Change(
        "row_stats.py",
        """        _row_stats_parts[(N * splits,)](
            **shared, TILES=tiles, ALIGNED=_launch.aligned(logits), **_launch.tile_options(tile)
        )
""",
        """        splits = parts[0].shape[1]
        shared |= dict(zip(("part_max_ptr", "part_sum_ptr", "part_moment_ptr"), parts), SPLITS=splits)
""",
    ),
)

Import = Callable[[str], Any]
Launch = Callable[[Import, "Rows"], tuple[Tensor, ...]]


@dataclass
class Rows:
    """A chunk of logits ``[C, V]``, which a launch may overwrite, with targets, scales and seeds of its rows."""

    logits: Tensor
    targets: Tensor
    scale: Tensor
    seeds: Tensor


def _chunk(module: Import, rows: Rows) -> tuple[Tensor, ...]:
    module("linear_nll").nll_and_grad_(rows.logits, rows.targets, rows.scale, with_correct=False)
    return (rows.logits,)


def _once(module: Import, rows: Rows) -> tuple[Tensor, ...]:
    from benchmarks.candidates.linear_nll_once import nll_and_factor_

    # The products that follow multiply by the factors.
    return rows.logits, nll_and_factor_(rows.logits, rows.targets, rows.scale)[1]


def _forward(module: Import, rows: Rows) -> tuple[Tensor, ...]:
    found = module("token_nll").nll(rows.logits[None], rows.targets, with_correct=False)
    return tuple(t for t in found if t is not None)


def _sample(module: Import, rows: Rows, temperature: float | None) -> Any:
    from dllm_kernels.corruption._noise import Noise
    from dllm_kernels.rows._transform import NO_TRANSFORM

    if temperature is None:
        return module("sample").sample(rows.logits, NO_TRANSFORM, None)
    noise = Noise(rows.seeds, torch.zeros_like(rows.seeds))
    return module("sample").sample(rows.logits, NO_TRANSFORM._replace(scale=1 / temperature), noise)


def _greedy(module: Import, rows: Rows) -> tuple[Tensor, ...]:
    return (_sample(module, rows, None)[1],)


def _greedy_wide(module: Import, rows: Rows) -> tuple[Tensor, ...]:
    from benchmarks.candidates.greedy import greedy

    return (greedy(rows.logits),)


def _request(ids: Tensor, rows: Rows) -> Any:
    from dllm_kernels.rows._stats_interface import StatsFlags, StatsRequest
    from dllm_kernels.rows._transform import NO_TRANSFORM

    transform = NO_TRANSFORM._replace(scale=1 / TEMPERATURE)
    return StatsRequest(ids[:, None], rows.targets, transform=transform, flags=StatsFlags(entropy=True))


def _then_statistics(module: Import, rows: Rows) -> tuple[Tensor, ...]:
    _, ids = _sample(module, rows, TEMPERATURE)
    found = module("row_stats").forward(rows.logits[None], _request(ids, rows))
    return ids, found.log_probs, found.entropy


def _with_statistics(module: Import, rows: Rows) -> tuple[Tensor, ...]:
    _, ids, parts = _sample(module, rows, TEMPERATURE)
    found = module("row_stats").forward(rows.logits[None], _request(ids, rows), parts)
    return ids, found.log_probs, found.entropy


TEMPERATURE = 0.7
#: Kernel -> candidates, each with the changes of the package's code. The first is the package's own.
CANDIDATES: dict[str, dict[str, tuple[tuple[Change, ...], Launch]]] = {
    "chunk": {
        "ours": ((), _chunk),
        "no evict_last": ((_NO_HINT,), _chunk),
        "no prefetch": ((_NO_AHEAD,), _chunk),
        "neither": ((_NO_HINT, _NO_AHEAD), _chunk),
        "one pass": ((), _once),
    },
    "forward": {"ours": ((), _forward), "prefetch": ((_AHEAD,), _forward)},
    "greedy sample": {"ours": ((), _greedy), "16-byte loads": ((), _greedy_wide)},
    "sample, statistics": {"ours": ((), _then_statistics), "in one launch": (_STATISTICS, _with_statistics)},
}
#: (kernel, candidate) -> card -> predicted gain, from the model of ``tools.inspect_kernels`` and Triton 3.6. One pass
#: overlaps loads and stores, where two passes wait for each other (shares of a copy's speed: 0.95 for 0.83 on an H100,
#: 0.92 for 0.73 on an H200). Loads of two bytes are limited by latency (0.53, 0.37), wide ones by memory. A draw needs
#: 71 issue slots per column and statistics 10.5; one launch takes their sum, two launches also the time of a pass.
GAINS: dict[tuple[str, str], dict[str, float]] = {
    ("chunk", "one pass"): {"H100": 1.14, "H200": 1.26},
    ("greedy sample", "16-byte loads"): {"H100": 1.88, "H200": 2.69},
    ("sample, statistics", "in one launch"): {"H100": 1.11, "H200": 1.05},
}


@contextlib.contextmanager
def kernels(changes: Sequence[Change]) -> Iterator[Callable[[str], Any]]:
    """Return an import function for a copy of ``dllm_kernels.backends.triton`` with these texts replaced."""
    with tempfile.TemporaryDirectory() as folder:
        package = f"kernels_{Path(folder).name}"
        copy = Path(folder, package)
        shutil.copytree(KERNELS, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for file, old, new in changes:
            text = (copy / file).read_text()
            if text.count(old) != 1:
                raise ValueError(f"backends/triton/{file} must hold once, has {text.count(old)} times:\n{old}")
            (copy / file).write_text(text.replace(old, new))
        for path in copy.rglob("*.py"):
            path.write_text(path.read_text().replace("dllm_kernels.backends.triton", package))
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


def _result(found: tuple[Tensor, ...]) -> Tensor:
    """Join results in float32; a gradient that lacks a factor per row is multiplied by it."""
    first, *others = found
    if first.dim() == 2:
        return first.float() * others[0].unsqueeze(1) if others else first.float()
    return torch.cat([t.flatten().float() for t in found])


def of_kernel(kernel: str, shape: Shape, options: argparse.Namespace) -> list[measure.Result]:
    """Measure one kernel of the package and its candidates."""
    count = min(ROWS[options.size], shape.rows)
    drawn = torch.randn(count, shape.vocab, device=options.device, dtype=options.dtype)
    y, seeds = (
        torch.randint(0, shape.vocab, (count,), device=options.device),
        torch.arange(count, device=options.device),
    )
    rows = Rows(drawn.clone(), y, torch.rand(count, device=options.device), seeds)

    with contextlib.ExitStack() as stack:
        launches = {
            name: (stack.enter_context(kernels(changes)), launch)
            for name, (changes, launch) in CANDIDATES[kernel].items()
        }

        def result(name: str) -> Tensor:
            rows.logits.copy_(drawn)
            module, launch = launches[name]
            return _result(launch(module, rows)).clone()

        exact = result("ours")
        off = measure.each_error({name: name for name in launches}, lambda n: measure.relative_error(result(n), exact))
        timed = {
            name: measure.Candidate(lambda _, module=module, launch=launch: launch(module, rows))  # type: ignore[misc]
            for name, (module, launch) in launches.items()
        }
        case = {"what": kernel, "shape": shape.name, "rows": count, "V": shape.vocab}
        here = card(environment(options.device)["gpu"]) or ""
        gains = {name: GAINS.get((kernel, name), {}).get(here) for name in launches}
        return _compared(case, timed, gains, off, options)


def few_rows(shape: Shape, count: int, options: argparse.Namespace) -> list[measure.Result]:
    """Measure the product for the gradient of few hidden states: as a whole, and as sums over parts of V."""
    logits = torch.randn(count, shape.vocab, device=options.device, dtype=options.dtype)
    head = torch.randn(shape.vocab, shape.hidden, device=options.device, dtype=options.dtype)
    wide = torch.promote_types(options.dtype, torch.float32)

    def in_parts(parts: int) -> Tensor:
        columns = shape.vocab // parts * parts
        left = logits[:, :columns].view(count, parts, -1).transpose(0, 1)
        right = head[:columns].view(parts, -1, shape.hidden)
        if logits.is_cuda and wide != options.dtype:
            total = torch.bmm(left, right, out_dtype=wide).sum(0)
        else:
            total = torch.bmm(left, right).sum(0, dtype=wide)
        if columns < shape.vocab:
            total += logits[:, columns:] @ head[columns:]
        return total.to(options.dtype)

    runs: dict[str, Callable[[], Tensor]] = {"ours": lambda: logits @ head}
    runs |= {f"{parts} parts": lambda parts=parts: in_parts(parts) for parts in PARTS}  # type: ignore[misc]
    exact = runs["ours"]()
    off = measure.each_error(runs, lambda run: measure.relative_error(run(), exact))
    timed = {name: measure.Candidate(lambda _, run=run: run()) for name, run in runs.items()}  # type: ignore[misc]
    case = {"what": "grad_hidden", "rows": count, "V": shape.vocab, "D": shape.hidden}
    sms = limits_of_chunks(torch.device(options.device))[0]
    gains = {f"{parts} parts": gain_of_parts(count, shape.hidden, parts, sms) for parts in PARTS} if sms else {}
    return _compared(case, timed, gains, off, options)


def gain_of_parts(rows: int, D: int, parts: int, sms: int) -> float:
    """Return the predicted gain of a product ``[rows, D]`` in parts, from its waves of 128 x 256 tiles."""
    tiles = -(-rows // 128) * -(-D // 256)
    return -(-tiles // sms) * parts / -(-tiles * parts // sms)


def _compared(
    case: dict[str, Any], timed: Mapping[str, measure.Candidate], gains: Mapping[str, float | None],
    off: Mapping[str, float], options: argparse.Namespace,
) -> list[measure.Result]:  # fmt: skip
    """Measure, and add the predicted gain of each candidate."""
    results = measure.compare("variants", case, "launch", timed, options, errors=off, memory=False)
    for result in results:
        result.extra["gain"] = gains.get(result.name)
    return results


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
    of = {"chunk": shapes.frozen[0], "forward": shapes.logits}
    for kernel in CANDIDATES:
        results += of_kernel(kernel, of.get(kernel, shapes.policy), options)
    for count in FEW_ROWS[options.size]:
        results += few_rows(shapes.frozen[-1], count, options)
    results += chunk_sizes(shapes.frozen[0], 0.5, options) + chunk_sizes(shapes.trained, 1.0, options)
    return report(results, options, baseline="ours")
