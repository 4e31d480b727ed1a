"""All checks and measurements that need a GPU, within a time limit: correctness, measurements, tests, the sanitizer.

``python -m benchmarks on_gpu --total 15 --out DIR`` runs the steps in order of importance. Each step runs in a separate
process for at most its share of the minutes. Steps that no longer fit are left out, and so are those whose packages or
input are missing. When a step ends, all processes that it started are ended.

The first step, ``verify``, compares ours with float64. Its result is the first line that is printed. If it fails, the
exit status is 1, and every verdict says "unverified". Then follow the figures of ours alone, the tests that need a GPU,
the comparisons with the peers, the parity tests, and the rest. Output goes to stdout immediately.

``DIR`` holds three files, which are updated continuously, so an interrupted run keeps its results.
``results.tar.gz`` has the log of every step and the raw numbers of measurements. ``summary.json`` has the outcome of
each step. ``verdicts.md`` compares each bar, that is, each performance target, with its measurement.

    --total M         minutes for which the machine can be had, in all calls together. With 15, the first call ends
                      after nine minutes. A second one with ``--resume``, at most half a minute later, takes four. Both
                      run all essential steps. One and a half minutes remain for the start of the machine.
    --prepared FOLDER results of ``python -m benchmarks prepare``, which needs no GPU
    --wheels FOLDER ...
                      peers, installed without their requirements and for this run only, while the first step runs
    --resume DIR      an earlier ``DIR``: its results are kept, and steps that have run are not repeated
    --steps NAME ...  only these steps, even if they have run

A machine without a package index needs these wheels for its version of Python, some 9 MB together: ``liger-kernel``,
``cut-cross-entropy``, ``nemo-automodel``, ``speculators``, ``trl`` and ``verl``. Without ``nemo-automodel``, the
original, the bar of corruption is not measured. Their imports also need ``pydantic`` with ``pydantic-core``,
``annotated-types`` and ``typing-inspection``, if the machine lacks them. ``quack-kernels`` and Liger's CuTe kernels
also need ``nvidia-cutlass-dsl``, ``nvidia-cutlass-dsl-libs-base``, ``nvidia-cutlass-dsl-libs-cu13``,
``apache-tvm-ffi``, ``torch-c-dlpack-ext`` and ``einops``, and ``cuda-bindings`` and ``protobuf`` if the machine lacks
them. ``nvidia-cutlass-dsl-libs-cu13`` is a compiler of 92 MB, the others have 8 MB together. Where a transfer is
limited, split it (``split --bytes=46M WHEEL WHEEL.part-``) and give the folders of all parts to ``--wheels``, which
joins them. Without its last part, pip rejects the wheel, and the run continues without these kernels. The tests need
``pytest``, ``pytest-timeout``, ``pytest-xdist`` with ``execnet``, and ``hypothesis`` with ``sortedcontainers``.

``--rehearse`` runs all steps at toy size on a CPU, with Triton's interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.carried import RECORD, Wheels, use_prepared
from benchmarks.record import environment, write_whole
from benchmarks.verdicts import verdicts

ROOT = Path(__file__).resolve().parents[1]
# The parity tests in three parts, the most important first.
PARITY = {
    "parity_nll": (
        "ops/test_token_nll",
        "ops/test_linear_nll",
        "internals/test_rows",
        "kernels/test_row_kernels",
        "ops/test_row_stats",
        "internals/test_backends",
    ),
    "parity_losses": (
        "losses/test_losses",
        "internals/test_losses",
        "mtp/test_mtp",
        "ops/test_linear_sample",
        "ops/test_divergence",
        "kernels/test_divergence_kernel",
    ),
    "parity_noise": (
        "corruption/test_corruption",
        "internals/test_corruption",
        "corruption/test_corruption_levels",
        "ops/test_gumbel_topk",
        "ops/test_compile",
    ),
}
BENCHMARKS = (sys.executable, "-m", "benchmarks")
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v")
TEST_MODULES = ("pytest", "pytest_timeout", "xdist", "hypothesis")
TOY = ("--size", "toy", "--samples", "2", "--warmup", "1", "--threads", "1", "--cache", "hot", "--device", "cpu")
REFRESH = 15.0  # s between two updates of the files while a step runs
RESERVE = 10.0  # s reserved for ending the last step and writing its outcome
PATIENCE = 2.0  # s between SIGTERM and SIGKILL
START, PAUSE = 1.5, 0.5  # min of ``--total`` for the start of the machine, and between two calls
LEFT, ENDED = "left out", "ended"  # first words of the outcome of a step that could not run, or took too long
MARK = "DLLM_KERNELS_STEP"  # in the environment of all processes that a step starts


@dataclass(frozen=True)
class Step:
    """A command.

    Attributes:
        name: name of its log and results, and in the summary.
        minutes: time limit. Estimated from launches, bytes and flops on an H200, not measured.
        command: command on a GPU.
        toy: replacement for a run without a GPU.
        settings: environment variables.
        needs: a required program; the step is left out without it.
        modules: required modules; the step is left out without them.
        input: a required file; the step is left out without it.
        decides: True if it must run in the fifteen minutes for which a GPU is available.
        beside: True if it neither imports a peer nor measures a time, so that the peers may be installed while it runs.
    """

    name: str
    minutes: float
    command: tuple[str, ...]
    toy: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    needs: str | None = None
    modules: tuple[str, ...] = ()
    input: Path | None = None
    decides: bool = False
    beside: bool = False


def steps(work: Path) -> list[Step]:
    """List the steps, most important first; results are written to ``work``."""

    def result(name: str) -> str:
        return str(work / f"{name}.json")

    def measured(
        name: str, minutes: float, *words: str, subject: str | None = None, on_gpu: tuple[str, ...] = (),
        input: Path | None = None, decides: bool = False,
    ) -> Step:  # fmt: skip
        run = (*BENCHMARKS, subject or name, "--live", "--out", result(name), *words)
        return Step(name, minutes, (*run, *on_gpu), (*run, *TOY), input=input, decides=decides)

    def tests(name: str, minutes: float, *words: str) -> Step:
        # One thread, because twelve processes share the cores, and the memory of the CPU path depends on its threads.
        alone = {"OMP_NUM_THREADS": "1"}
        return Step(name, minutes, (*PYTEST, *words), (*PYTEST, "--collect-only", "-q", *words), alone,
                    modules=TEST_MODULES, decides=True, beside=True)  # fmt: skip

    def parity(name: str, minutes: float) -> Step:
        return tests(name, minutes, "-n", "12", "-m", "not exhaustive", *(f"tests/{n}.py" for n in PARITY[name]))

    def sanitized(tool: str) -> Step:
        some = (
            "tests/kernels/test_row_kernels.py",
            "tests/ops/test_gumbel_topk.py",
            "tests/kernels/test_divergence_kernel.py",
            "-m",
            "not exhaustive",
        )
        run = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "3", *PYTEST, "-x", *some)
        # Without this, an access beyond a tensor may still lie inside a block of torch's cache and go undetected.
        alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        return Step(tool, 2.5, run, (*PYTEST, "--collect-only", "-q", *some), alone,
                    needs=run[0], modules=TEST_MODULES)  # fmt: skip

    shares = ("--share", "1.0", "--share", "0.5", "--share", "0.15")
    with_gpu_marks = [
        str(f.relative_to(ROOT)) for f in sorted(ROOT.glob("tests/*/test_*.py")) if "mark.gpu" in f.read_text()
    ]
    short, dflash, policy = ("--shape", "LLaDA SFT 4x1024"), ("--shape", "DFlash Qwen3-4B"), ("--shape", "policy")
    dflash_8b, trained = ("--shape", "DFlash Qwen3-8B 7680"), ("--shape", "trained head")
    both, compiled, few = ("--phase", "both"), ("--compiled",), ("--samples", "10")
    peers = (*BENCHMARKS, "peers", "--out", result("peers"))
    verify, model = (*BENCHMARKS, "verify", "--out", result("verify")), work / "model.json"
    return [
        # What decides: a call of nine minutes ends with the first parity tests, one of four runs the others.
        Step("verify", 1.0, verify, (*verify, *TOY, "--backend", "triton"), decides=True, beside=True),
        measured("headline", 0.8, decides=True),
        tests("gpu_tests", 0.9, "-n", "6", "-m", "gpu", *with_gpu_marks),
        Step("peers", 0.4, peers, peers, decides=True),
        measured("linear_nll", 1.4, *dflash, *dflash_8b, *both, "--share", "0.5", on_gpu=(*compiled, *few),
                 decides=True),
        measured("trained_head", 0.9, *trained, *both, "--share", "1.0", subject="linear_nll",
                 on_gpu=(*compiled, *few), decides=True),
        measured("token_nll", 0.8, *short, *both, "--share", "1.0", on_gpu=compiled, decides=True),
        measured("corruption", 0.6, decides=True),
        parity("parity_nll", 1.4),
        parity("parity_losses", 1.2),
        parity("parity_noise", 1.1),
        measured("predicted", 0.6, "--model", str(model), input=model, decides=True),
        measured("row_stats", 0.6, *policy, "--form", "logits", "--share", "1.0", on_gpu=(*compiled, *few),
                 decides=True),
        # The rest: the sanitizer, where it supports the device, and what may be gained.
        sanitized("memcheck"),
        sanitized("racecheck"),
        measured("variants", 1.0, on_gpu=few),
        measured("row_stats_hidden", 1.2, *policy, *dflash, "--form", "hidden", "--share", "1.0", subject="row_stats",
                 on_gpu=(*compiled, *few)),
        measured("divergence", 0.8, "--kind", "kl", "--kind", "l1", on_gpu=("--samples", "5")),
        measured("linear_sample", 0.6),
        measured("policy", 2.5, on_gpu=("--samples", "5")),
        measured("tune", 5.0, on_gpu=("--samples", "5")),
        measured("token_nll_sizes", 3.0, *shares, subject="token_nll"),
        measured("linear_nll_sizes", 3.5, "--share", "0.5", subject="linear_nll", on_gpu=few),
        measured("losses", 4.0),
    ]  # fmt: skip


def plan(steps: Sequence[Step], minutes: float) -> tuple[list[Step], list[Step]]:
    """Return (steps that fit if every step takes its share, steps that do not), each in the given order."""
    fits, left, seconds = [], [], 60 * minutes - RESERVE
    for step in steps:
        if 60 * step.minutes <= seconds:
            fits.append(step)
            seconds -= 60 * step.minutes
        else:
            left.append(step)
    return fits, left


class Run:
    """A run: its working folder, the outcomes of its steps, and its output files."""

    def __init__(self, out: Path, work: Path, *, toy: bool, wheels: Wheels) -> None:
        self.out, self.work, self.toy, self.wheels = out, work, toy, wheels
        self.settings = {**({"TRITON_INTERPRET": "1"} if toy else {}), "PYTHONUNBUFFERED": "1"}
        self.done: dict[str, dict[str, object]] = {}
        self.start, self.earlier = time.monotonic(), list[float]()
        # Read once before the first step, because git and nvidia-smi would disturb measurements.
        self.environment = environment("cpu" if toy else "cuda")

    def resume(self, folder: Path) -> None:
        """Load the results of an earlier run, and the minutes of its calls.

        Steps that were left out are not done. A verification that was ended is not done either, because without it
        nothing counts, and now its kernels are compiled.
        """
        with tarfile.open(folder / "results.tar.gz") as archive:
            archive.extractall(self.work, filter="data")
        summary = json.loads((self.work / "summary.json").read_text())
        self.earlier = list(summary["calls"])
        for name, found in summary["steps"].items():
            if not found["outcome"].startswith((LEFT, ENDED) if name == "verify" else LEFT):
                self.done[name] = found

    def save(self, running: str | None = None) -> None:
        """Update the three output files, each atomically."""
        calls = [*self.earlier, round((time.monotonic() - self.start) / 60, 2)]
        summary = {"rehearsal": self.toy, "environment": self.environment, "calls": calls, "steps": self.done,
                   "running": running}  # fmt: skip
        found = "\n".join(verdicts(self.work, "toy" if self.toy else "full")) + "\n"
        for folder in (self.work, self.out):
            write_whole(folder / "summary.json", json.dumps(summary, indent=1))
            write_whole(folder / "verdicts.md", found)
        beside = self.out / "results.tar.gz.new"
        with tarfile.open(beside, "w:gz", compresslevel=6) as archive:
            for path in sorted(self.work.iterdir()):
                if path.is_file() and path.suffix in (".json", ".log", ".md"):
                    archive.add(path, path.name)
        beside.replace(self.out / "results.tar.gz")

    @property
    def verdict(self) -> str:
        """The line that says whether the kernels are right."""
        return (self.work / "verdicts.md").read_text().partition("\n")[0]

    def finish_wheels(self) -> None:
        """Wait until the peers are installed."""
        self.settings |= self.wheels.finish()

    def step(self, step: Step) -> None:
        """Run one step until it ends or reaches its time limit."""
        if not step.beside or self.missing(step):
            self.finish_wheels()
        start = time.monotonic()
        missing = self.missing(step)
        outcome = f"{LEFT}: {missing}" if missing else self._outcome(step, start + 60 * step.minutes)
        seconds = round(time.monotonic() - start, 1)
        self.done[step.name] = {"outcome": outcome, "seconds": seconds, "command": list(self._command(step))}
        print(f"=== {step.name}: {outcome}, {seconds:.0f} s", flush=True)
        self.save()

    def missing(self, step: Step) -> str | None:
        """Say what the step needs and cannot find: a program, a package here or among the wheels, or its input."""
        if step.needs is not None and not self.toy and shutil.which(step.needs) is None:
            return f"{step.needs} is not installed"
        path = [*self.settings.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
        find = importlib.machinery.PathFinder.find_spec
        if absent := next((name for name in step.modules if find(name, path) is None), None):
            return f"{absent} is not installed"
        return f"{step.input.name} is missing" if step.input is not None and not step.input.is_file() else None

    def _command(self, step: Step) -> tuple[str, ...]:
        return step.toy if self.toy else step.command

    def _outcome(self, step: Step, deadline: float) -> str:
        log, first = self.work / f"{step.name}.log", step.name == "verify"
        with started(self._command(step), log, {**self.settings, **step.settings}, quiet=first) as process:
            while process.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, min(REFRESH, deadline - time.monotonic())))
                self.save(running=step.name)
            status = process.poll()
        if first:  # its result comes before its tables
            self.save()
            print(f"{self.verdict}\n\n{log.read_text(errors='replace')}", flush=True)
        if status is None:
            return f"{ENDED} after its {step.minutes:g} minutes"
        if status and step.needs is not None and any(text in log.read_text() for text in REFUSALS):
            return f"{LEFT}: {step.needs} refuses this device"
        return "ok" if status == 0 else f"failed with status {status}"


# Message of the sanitizer on an unsupported device (seen on virtual machines).
REFUSALS = ("Device not supported", "LibraryNotLoaded")


@contextlib.contextmanager
def started(
    command: Sequence[str], log: Path, settings: Mapping[str, str], *, quiet: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in a separate process group, with output to log and stdout; at exit, end all that it started.

    ``quiet``: the output goes to the log alone.
    """
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **settings, MARK: mark}, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    echo = threading.Thread(target=_echo, args=(process, log, quiet), daemon=True)
    echo.start()
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            left = _of_mark(mark)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            patience = time.monotonic() + PATIENCE
            while left and number == signal.SIGTERM and time.monotonic() < patience and _of_mark(mark):
                process.poll()  # reap the ended process
                time.sleep(0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may delay its end
            process.wait(2.0)
        echo.join(2.0)


def _echo(process: subprocess.Popen[bytes], log: Path, quiet: bool) -> None:
    assert process.stdout is not None
    with log.open("wb") as file:
        for line in process.stdout:
            file.write(line)
            file.flush()
            if not quiet:
                sys.stdout.write(line.decode(errors="replace"))
                sys.stdout.flush()


def _of_mark(mark: str) -> list[int]:
    """Return the processes whose environment has the mark: those of a step, in any session and with any parent."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks on_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the results")
    add("--minutes", type=float, default=9.0, help="time limit of this call in minutes (default: 9)")
    add("--total", type=float, help="minutes of all calls, the start of the machine included (default: no limit)")
    add("--prepared", type=Path, metavar="FOLDER", help="results of python -m benchmarks prepare")
    add("--wheels", type=Path, nargs="+", metavar="FOLDER", default=[],
        help="folders with wheels of the peers and their requirements, or parts of wheels, see above")  # fmt: skip
    add("--resume", type=Path, help="results of an earlier run, whose steps are not run again")
    add("--steps", nargs="+", metavar="NAME", help="run only these steps")
    add("--rehearse", action="store_true", help="run at toy size on a CPU")
    return parser


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(argv)
    names = [step.name for step in steps(options.out)]
    if unknown := set(options.steps or ()) - set(names):
        parser.error(f"argument --steps: must be of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    for folder in options.wheels:
        if not folder.is_dir():
            parser.error(f"argument --wheels: must be a folder, got {folder}")
    if options.prepared is not None and not (options.prepared / RECORD).is_file():
        parser.error(f"argument --prepared: must be a folder with {RECORD}, got {options.prepared}")
    if options.resume is not None and not (options.resume / "results.tar.gz").is_file():
        parser.error(f"argument --resume: must be a folder with results.tar.gz, got {options.resume}")
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("a GPU is required, but none is visible; --rehearse runs the steps at toy size on a CPU")
    return options


def limit(options: argparse.Namespace, earlier: Sequence[float]) -> float:
    """Return the minutes of this call, given those of earlier ones."""
    if options.total is None:
        return float(options.minutes)
    return float(min(options.minutes, options.total - START - PAUSE * len(earlier) - sum(earlier)))


def main(argv: Sequence[str]) -> int:
    """Run the steps that fit and write the results; return 1 if a step failed."""
    options = _parsed(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        work = Path(scratch, "results")
        work.mkdir()
        run = Run(options.out, work, toy=options.rehearse, wheels=Wheels(options.wheels, Path(scratch)))
        if options.resume is not None:
            run.resume(options.resume)
        said = [] if options.prepared is None else [use_prepared(options.prepared, work)]
        todo = [s for s in steps(work) if (s.name in options.steps if options.steps else s.name not in run.done)]
        return _run_all(run, todo, run.start + 60 * limit(options, run.earlier), said)


def _run_all(run: Run, todo: Sequence[Step], deadline: float, said: Sequence[str]) -> int:
    """Run every step that still fits when its turn comes; time that a step did not use is available to the next."""
    run.save()
    first = [step for step in todo[:1] if step.name == "verify"]
    left_out = _run_each(run, first, deadline)
    rest = todo[len(first) :]
    if len(left_out) == len(first):  # the verdict is that of an earlier call
        print(run.verdict)
    if not (installing := run.wheels.installing):
        run.finish_wheels()
    fits, left = plan(rest, (deadline - time.monotonic()) / 60)
    lacking = [f"{step.name} ({missing})" for step in rest if (missing := run.missing(step))]
    for line in (
        *said,
        f"fits: {', '.join(f'{s.name} {s.minutes:g} min' for s in fits) or 'nothing'}",
        f"fits only if others take less: {', '.join(s.name for s in left) or 'nothing'}",
        f"cannot run{' without the wheels' if installing else ''}: {', '.join(lacking) or 'nothing'}",
    ):
        print(line, flush=True)
    left_out += _run_each(run, rest, deadline)
    run.finish_wheels()
    print((run.work / "verdicts.md").read_text())
    for name, record in run.done.items():
        print(f"{name}: {record['outcome']}")
    print(f"left out for lack of time: {', '.join(left_out) or 'nothing'}")
    if waiting := [step.name for step in todo if step.decides and step.name in left_out]:
        print(f"continue with --resume {run.out}, because these decide: {', '.join(waiting)}")
    ran = (str(run.done[step.name]["outcome"]) for step in todo if step.name in run.done)
    return int(not all(outcome.startswith(("ok", LEFT)) for outcome in ran))


def _run_each(run: Run, todo: Sequence[Step], deadline: float) -> list[str]:
    """Run the steps that still fit when their turn comes; return the others."""
    left_out = []
    for step in todo:
        if time.monotonic() + 60 * step.minutes + RESERVE > deadline:
            left_out.append(step.name)
        else:
            run.step(step)
    return left_out
