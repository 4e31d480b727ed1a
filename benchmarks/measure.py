"""Measurement of time, peak memory, error and ceilings. ``record.py`` prints and writes the results.

A subject builds its inputs and its candidates (ours, the plain code, the peers) and calls ``compare``.

* Time. Candidates are interleaved round-robin, and each round starts with another one, so a drifting clock affects all
  of them equally. Reported are the 20, 50 and 80 % quantiles.
  CUDA: events. The device sleeps before the start event for longer than the host needs to queue the call. Launch
  overhead is therefore hidden, as in a training step. The host's time until the call returns is reported separately. A
  call that waits for the device also waits for this sleep, before its own work. CPU: ``perf_counter``, or with
  ``--processor-time`` the time that the process spends on a processor, where other processes use the cores, too.
* Cache. ``"cold"``: inputs rotate, and a buffer larger than the last-level cache is overwritten before each sample.
  ``"hot"``: the same call has just run on the same input.
* Memory. The peak of allocated bytes minus the bytes allocated before. CUDA: the counters of the caching allocator.
  CPU: the profiler's record of every allocation and release inside torch, which includes temporaries of composite ops
  and of autograd. It misses allocations outside of torch's allocator (BLAS workspaces), and the release of memory that
  was allocated before ``prepare``.
* Ceilings. Copy bandwidth (bytes read plus bytes written) and matrix-product rate, measured in the same run.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.record import said, table, write_json
from benchmarks.result import Result as Result  # re-exported for the subjects
from benchmarks.result import Timing as Timing
from benchmarks.shapes import Shape

# More than the last-level cache of an H200 (50 MB) and of common CPUs.
FLUSH_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}
ROWS_BYTES = 256 << 20  # of float64 rows that a comparison with float64 holds at the same time
Value = TypeVar("Value")
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def _same(index: int) -> Any:
    return index


@dataclass(frozen=True)
class Candidate:
    """A call to time.

    Attributes:
        run: the timed function; called with the result of ``prepare``.
        prepare: untimed function of the number of the input set; by default it returns this number. To time backward
            alone, run forward here.
    """

    run: Callable[[Any], object]
    prepare: Callable[[int], Any] = _same


CandidateLike = Candidate | Callable[[int], object]


def without_gradients(leaves: Iterable[torch.Tensor | None]) -> Callable[[Any], None]:
    """Return a ``prepare`` that drops the gradients of the leaves, untimed, so that new ones are allocated."""

    def prepare(_: Any) -> None:
        for leaf in leaves:
            if leaf is not None:
                leaf.grad = None

    return prepare


def arguments(subject: str, description: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options of all subjects; a subject may add its own."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {subject}", description=description)
    add = parser.add_argument
    add(
        "--size",
        choices=("toy", "small", "full"),
        help="toy: CI; small: CPU; full: GPU (default by the device)",
    )
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--backend", default="auto", choices=("auto", "triton", "torch"), help="backend of our ops")
    add("--dtype", choices=tuple(DTYPES), help="default: float32 on CPU, bfloat16 on GPU")
    add("--samples", type=int, default=20)
    add("--warmup", type=int, default=3)
    add("--cache", choices=("hot", "cold"), default="cold")
    add("--threads", type=int, help="CPU threads of torch")
    add("--processor-time", action="store_true", help="CPU: time on a processor instead of wall-clock time")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="write the raw results as JSON")
    add("--live", action="store_true", help="print each case and write it to --out as soon as it is measured")
    return parser


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Add ``--shape`` for a subject that runs over shapes; ``chosen`` applies it."""
    parser.add_argument("--shape", action="append", help="first letters of the name of a shape (default: all)")


def add_alone(parser: argparse.ArgumentParser) -> None:
    """Add ``--alone`` for a subject that can run without its peers."""
    parser.add_argument("--alone", action="store_true", help="without peers and plain code")


def add_phases(parser: argparse.ArgumentParser, phases: Sequence[str]) -> None:
    """Add ``--phase`` for a subject with several phases."""
    parser.add_argument("--phase", action="append", choices=tuple(phases), help="default: all")


def chosen(shapes: Sequence[Shape], options: argparse.Namespace) -> tuple[Shape, ...]:
    """Return the shapes that ``--shape`` names; at toy size all, because they have other names."""
    if not options.shape or options.size == "toy":
        return tuple(shapes)
    return tuple(shape for shape in shapes if shape.name.startswith(tuple(options.shape)))


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments, fill the defaults that depend on the device, and apply clock, threads and seed."""
    global _host_clock
    options = parser.parse_args(argv)
    on_gpu = torch.device(options.device).type == "cuda"
    if on_gpu and options.processor_time:
        parser.error("--processor-time is for CPUs: it does not contain the time of a GPU")
    _host_clock = time.process_time if options.processor_time else time.perf_counter
    options.size = options.size or ("full" if on_gpu else "small")
    options.dtype = DTYPES[options.dtype or ("bfloat16" if on_gpu else "float32")]
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    return options


def _as_candidate(candidate: CandidateLike) -> Candidate:
    return candidate if isinstance(candidate, Candidate) else Candidate(candidate)


def _flusher(device: torch.device) -> Callable[[], object]:
    buffer = torch.empty(FLUSH_BYTES[device.type], dtype=torch.uint8, device=device)
    return buffer.zero_


# Above the clock rate of every GPU, so that a sleep is never shorter than requested.
CLOCK = 2.5e9
SLEEP = (50e-6, 2e-3)  # s, minimum and maximum; a call that waits for the device returns long after its last launch


def _sleep_for(host: float) -> int:
    """Return the clocks to sleep so that two calls of this host time each are queued before the device wakes up."""
    least, most = SLEEP
    return int(CLOCK * min(max(2.5 * host, least), most))


def _host_time(candidate: Candidate, device: torch.device) -> float:
    """Return the seconds until a call returns, with an idle device before the call: the median of three."""
    taken = []
    for _ in range(3):
        state = candidate.prepare(0)
        torch.cuda.synchronize(device)
        taken.append(_time_cpu(candidate, state, lambda: None, 0.0, device))
    torch.cuda.synchronize(device)
    return sorted(taken)[1]


_host_clock = time.perf_counter


def _time_cuda(
    candidate: Candidate, state: Any, before: Callable[[], object], host: float, device: torch.device
) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    torch.cuda._sleep(_sleep_for(host))  # type: ignore[no-untyped-call]
    before()
    start.record()
    result = candidate.run(state)
    end.record()
    torch.cuda.synchronize(device)
    del result
    return float(start.elapsed_time(end)) / 1e3


def _time_cpu(
    candidate: Candidate, state: Any, before: Callable[[], object], host: float, device: torch.device
) -> float:
    before()
    start = _host_clock()
    result = candidate.run(state)
    seconds = _host_clock() - start
    del result
    return seconds


@functools.cache
def _set_aside(modules: int) -> None:
    """Exclude the objects of ``modules`` from garbage collection, because a collection of them takes too long."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # otherwise nanobind reports these objects as leaked


def _collect_garbage() -> None:
    _set_aside(len(sys.modules))  # repeated, because a peer may have been imported
    gc.collect()


def measure(
    candidates: Mapping[str, CandidateLike],
    *,
    device: torch.device | str,
    input_sets: int = 1,
    samples: int = 20,
    warmup: int = 3,
    cache: str = "cold",
    label: str = "",
    failed: dict[str, str] | None = None,
) -> dict[str, Timing]:
    """Time the candidates, interleaved.

    Args:
        candidates: name -> callable of the number of an input set, or a ``Candidate``.
        device: device of the work; determines the clock.
        input_sets: number of input sets that rotate.
        samples: timed calls per candidate.
        warmup: untimed calls per candidate before the samples.
        cache: "cold" (flushed, inputs rotate) or "hot" (the same call has just run).
        label: text of the progress bar.
        failed: receives the reason for each candidate that raises; the candidate is then dropped. None: the exception
            propagates.

    Returns:
        name -> ``Timing``, in the order given.
    """
    from tqdm import tqdm

    device = torch.device(device)
    on_gpu = device.type == "cuda"
    clock = _time_cuda if on_gpu else _time_cpu
    flush = _flusher(device) if cache == "cold" else None
    items = {name: _as_candidate(candidate) for name, candidate in candidates.items()}
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    host = dict.fromkeys(candidates, 0.0)
    rounds = tqdm(range(warmup + samples), desc=label, leave=False, disable=not sys.stderr.isatty())

    def sample(name: str, number: int) -> None:
        candidate, index = items[name], number % input_sets
        if number == warmup and on_gpu:
            host[name] = _host_time(candidate, device)
        state = candidate.prepare(index)
        if flush is None:
            again = candidate.prepare(index)
            seconds = clock(candidate, state, lambda: candidate.run(again), host[name], device)
        else:
            seconds = clock(candidate, state, flush, host[name], device)
        if number >= warmup:
            taken[name].append(seconds)

    _collect_garbage()
    gc.disable()  # a garbage collection during a sample would distort it
    try:
        for number in rounds:
            first = number % max(len(items), 1)
            for name in (*list(items)[first:], *list(items)[:first]):
                try:
                    sample(name, number)
                except Exception as error:
                    if failed is None:
                        raise
                    failed[name] = _failure(name, error)
                    del items[name]
    finally:
        gc.enable()
    return {name: Timing(tuple(taken[name]), host[name] if on_gpu else None) for name in items}


def _failure(name: str, error: Exception) -> str:
    """Print the traceback of a candidate that raised, release its memory, and return the reason in one line."""
    if not isinstance(error, torch.OutOfMemoryError):
        print(f"{name} raised:\n{''.join(traceback.format_exception(error))}", file=sys.stderr, flush=True)
    reason = said(error)
    traceback.clear_frames(error.__traceback__)
    with contextlib.suppress(Exception):  # this also fails on a broken device
        torch.cuda.empty_cache()
    return reason


_MARK = "benchmarks: measured from here"


def _peak_cpu(candidate: Candidate, index: int) -> int:
    from torch.profiler import ProfilerActivity, profile, record_function

    candidate.prepare(index)  # release the previous result before the record starts
    # prepare is recorded, too, because a release is only recorded for a recorded allocation
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        state = candidate.prepare(index)
        with record_function(_MARK):
            pass
        kept = candidate.run(state)
    del kept, state
    events = sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    start = next(event.start_ns() for event in events if event.name() == _MARK)
    held = peak = 0
    for event in events:
        if event.name() == "[memory]" and event.start_ns() >= start:
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def _peak_cuda(candidate: Candidate, index: int, device: torch.device) -> int:
    state = candidate.prepare(index)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = candidate.run(state)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del kept, state
    return peak


def peak_memory(candidate: CandidateLike, device: torch.device | str, index: int = 0) -> int:
    """Peak of allocated bytes while the candidate runs, above what was allocated when its ``run`` began.

    Args:
        candidate: a callable of the number of the input set, or a ``Candidate``; its ``prepare`` is not counted.
        device: device of its tensors.
        index: number of the input set.
    """
    device = torch.device(device)
    _collect_garbage()
    candidate = _as_candidate(candidate)
    return _peak_cuda(candidate, index, device) if device.type == "cuda" else _peak_cpu(candidate, index)


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Return ``||value - exact|| / ||exact||`` in float64; the norm of the difference if ``exact`` is zero."""
    distance = Distance()
    distance.add(value, exact)
    return distance.relative()


def allowed_error(plain: float, dtype: torch.dtype) -> float:
    """Return the largest allowed :func:`relative_error`: twice plain PyTorch's plus one rounding step of the result."""
    return 2 * plain + torch.finfo(dtype).eps


def each_error(candidates: Mapping[str, Value], error_of: Callable[[Value], float]) -> dict[str, float]:
    """Return ``error_of`` for each candidate, except if it raises; ``compare`` meets and records the exception."""
    found = {}
    for name, candidate in candidates.items():
        try:
            found[name] = error_of(candidate)
        except Exception as error:
            _failure(f"{name}, compared with float64,", error)
    return found


class Distance:
    """``relative_error`` of a tensor compared in parts, for references of which only a part fits into memory."""

    def __init__(self) -> None:
        self._squares: list[torch.Tensor] = []

    def add(self, value: torch.Tensor, exact: torch.Tensor) -> None:
        """Compare one more part."""
        parts = value.double() - exact.double(), exact.double()
        self._squares.append(torch.stack([torch.linalg.vector_norm(part).square() for part in parts]))

    def relative(self) -> float:
        """Return the relative error of all parts together."""
        difference, scale = torch.stack(self._squares).sum(0).sqrt().tolist()
        return float(difference / scale if scale else difference)


def slices(rows: int, columns: int) -> list[slice]:
    """Return slices of so many float64 rows that a few temporaries of a slice fit on any GPU."""
    step = max(1, ROWS_BYTES // (8 * max(columns, 1)))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def copy_bandwidth(device: torch.device | str, nbytes: int, samples: int = 20) -> float:
    """Measure the bytes read plus bytes written per second by a device copy of ``nbytes``."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = measure({"copy": lambda _: target.copy_(source)}, device=device, samples=samples, label="copy ceiling")
    return 2 * nbytes / timing["copy"].median


def gemm_rate(device: torch.device | str, dtype: torch.dtype, n: int, samples: int = 20) -> float:
    """Measure the floating-point operations per second of an n x n x n matrix product."""
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    timing = measure({"gemm": lambda _: a @ b}, device=device, samples=samples, label="product ceiling")
    return 2 * n**3 / timing["gemm"].median


def ceilings(device: torch.device | str, dtype: torch.dtype, size: str) -> dict[str, float]:
    """Measure both ceilings of this run: ``{"copy_bytes_per_s": ..., "gemm_flop_per_s": ...}``."""
    nbytes = {"toy": 1 << 20, "small": 256 << 20, "full": 2 << 30}[size]
    n = {"toy": 64, "small": 1024, "full": 8192}[size]
    samples = 3 if size == "toy" else 20
    return {
        "copy_bytes_per_s": copy_bandwidth(device, nbytes, samples),
        "gemm_flop_per_s": gemm_rate(device, dtype, n, samples),
    }


def compare(
    subject: str,
    case: Mapping[str, Any],
    phase: str,
    candidates: Mapping[str, CandidateLike],
    options: argparse.Namespace,
    *,
    input_sets: int = 1,
    errors: Mapping[str, float] | None = None,
    allowed_error: float | None = None,
    floor_s: float | None = None,
    floor_bytes: int | None = None,
    memory: bool = True,
) -> list[Result]:
    """Measure the peak memory of every candidate on one case, and time the candidates that fit into memory.

    If a candidate raises, the reason is recorded in ``extra["failed"]``, and the other candidates still run.

    Args:
        subject: name of the benchmark.
        case: description of the case, for the record and the table.
        phase: "forward", "backward", "both", ...
        candidates: name -> callable of the number of the input set, or ``Candidate``.
        options: the result of ``parse``.
        input_sets: number of input sets that rotate.
        errors: name -> distance from float64.
        allowed_error: the largest error that counts as correct.
        floor_s: lower bound of the time at this run's ceilings.
        floor_bytes: lower bound of the extra memory.
        memory: whether to report peak memory.

    Returns:
        One ``Result`` per candidate, in the order given.
    """
    label = " ".join([subject, phase, *(f"{key}={value}" for key, value in case.items())])
    start = time.perf_counter()
    results = {name: Result(subject, dict(case), phase, name, options.cache) for name in candidates}
    fitting = {}
    for name, candidate in candidates.items():
        result = results[name]
        result.error = None if errors is None else errors.get(name)
        result.allowed_error = allowed_error
        result.floor_s, result.floor_bytes = floor_s, floor_bytes
        try:  # memory first: candidates that do not fit are not timed
            peak = peak_memory(candidate, options.device)
        except Exception as error:
            result.extra["failed"] = _failure(name, error)
            continue
        result.peak_bytes = peak if memory else None
        fitting[name] = candidate
    failed: dict[str, str] = {}
    timings = measure(
        fitting,
        device=options.device,
        input_sets=input_sets,
        samples=options.samples,
        warmup=options.warmup,
        cache=options.cache,
        label=label,
        failed=failed,
    )
    for name, timing in timings.items():
        results[name].timing = timing
    for name, reason in failed.items():
        results[name].extra["failed"] = reason
    print(f"{label}: {len(results)} candidates, {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    if options.live:
        _show(list(results.values()), options)
    return list(results.values())


_shown: list[Result] = []


def _show(results: list[Result], options: argparse.Namespace) -> None:
    """Print the table of a case and write all results of this process, so that an interrupted run keeps them."""
    _shown.extend(results)
    print(f"\n{table(results)}", flush=True)
    if options.out is not None:
        write_json(options.out, _shown, options)
