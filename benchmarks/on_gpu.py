"""All checks and measurements that need a GPU, within a time limit: correctness, measurements, tests, the sanitizer.

``python -m benchmarks on_gpu --minutes M --out DIR`` runs the steps in order of importance. Each step runs in a
separate process for at most its share of the minutes. Steps that no longer fit are left out. When a step ends, all
processes that it started are ended. The first step lists the peers that can be imported, and the reason for the others.
The second, ``verify``, compares ours with float64. If it fails, the exit status is 1, and every verdict says
"unverified". Then follow the comparisons with the ceilings and the peers, and the rest. Output goes to stdout
immediately.

``DIR`` holds three files, which are updated continuously, so an interrupted run keeps its results.
``results.tar.gz`` has the log of every step and the raw numbers of measurements. ``summary.json`` has the outcome of
each step. ``verdicts.md`` compares each bar, that is, each performance target, with its measurement.

    --wheels FOLDER ...
                      peers, installed without their requirements and for this run only
    --resume DIR      an earlier ``DIR``: its results are kept, and steps that have an outcome are not repeated
    --steps NAME ...  only these steps, even if they have an outcome

A machine without a package index needs these wheels for its version of Python, some 9 MB together: ``liger-kernel``,
``cut-cross-entropy``, ``nemo-automodel``, ``speculators``, ``trl`` and ``verl``. Without ``nemo-automodel``, the
original, the bar of corruption is not measured. Their imports also need ``pydantic`` with ``pydantic-core``,
``annotated-types`` and ``typing-inspection``, if the machine lacks them. ``quack-kernels`` and Liger's CuTe kernels
also need ``nvidia-cutlass-dsl``, ``nvidia-cutlass-dsl-libs-base``, ``nvidia-cutlass-dsl-libs-cu13``,
``apache-tvm-ffi``, ``torch-c-dlpack-ext`` and ``einops``, and ``cuda-bindings`` and ``protobuf`` if the machine lacks
them. ``nvidia-cutlass-dsl-libs-cu13`` is a compiler of 92 MB, the others have 8 MB together. Where a transfer is
limited, split it (``split --bytes=46M WHEEL WHEEL.part-``) and give the folders of all parts to ``--wheels``, which
joins them. Without its last part, pip rejects the wheel, and the run continues without these kernels. The tests need
``pytest``, ``pytest-timeout``, ``pytest-xdist`` with ``execnet``, and ``hypothesis`` with ``sortedcontainers``. Steps
whose packages are missing are left out, which is said before the first step.

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
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.record import environment, write_whole
from benchmarks.verdicts import verdicts

ROOT = Path(__file__).resolve().parents[1]
NUMBERS = (
    "ops/test_token_nll",
    "internals/test_token_nll",
    "ops/test_linear_nll",
    "internals/test_linear_nll",
    "kernels/test_row_kernels",
    "ops/test_row_stats",
    "ops/test_linear_sample",
    "internals/test_linear_sample",
    "internals/test_row_stats",
    "losses/test_losses",
    "internals/test_losses",
    "mtp/test_mtp",
    "internals/test_mtp",
    "corruption/test_corruption",
    "internals/test_corruption",
    "corruption/test_corruption_levels",
    "internals/test_corruption_levels",
    "ops/test_gumbel_topk",
    "internals/test_gumbel_topk",
    "internals/test_philox",
    "internals/test_compile",
    "ops/test_divergence",
    "internals/test_divergence",
    "kernels/test_divergence_kernel",
)
# The kernels that ``predicted`` measures: to compile all of bfloat16 takes more than the time of ``model``.
PREDICTED = (
    "token_nll_bwd[bf16]",
    "token_nll_fwd_split[bf16]",
    "token_nll_fwd_split[bf16, correct]",
    "linear_nll_rows[bf16]",
    "linear_nll_rows[bf16, correct]",
    "divergence_rows[bf16, grad, fast]",
    "divergence_rows[bf16, grad, fast, tv=i64]",
)
BENCHMARKS = (sys.executable, "-m", "benchmarks")
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v")
TEST_MODULES = ("pytest", "pytest_timeout", "xdist", "hypothesis")
TOY = ("--size", "toy", "--samples", "2", "--warmup", "1", "--threads", "1", "--cache", "hot", "--device", "cpu")
REFRESH = 15.0  # s between two updates of the files while a step runs
RESERVE = 10.0  # s reserved for ending the last step and writing its outcome
PATIENCE = 2.0  # s between SIGTERM and SIGKILL
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
    """

    name: str
    minutes: float
    command: tuple[str, ...]
    toy: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    needs: str | None = None
    modules: tuple[str, ...] = ()


def steps(work: Path) -> list[Step]:
    """List the steps, most important first; results are written to ``work``."""

    def result(name: str) -> str:
        return str(work / f"{name}.json")

    def measured(
        name: str, minutes: float, *words: str, subject: str | None = None, on_gpu: tuple[str, ...] = ()
    ) -> Step:
        run = (*BENCHMARKS, subject or name, "--live", "--out", result(name), *words)
        return Step(name, minutes, (*run, *on_gpu), (*run, *TOY))

    def tests(name: str, minutes: float, *words: str) -> Step:
        # One thread, because twelve processes share the cores, and the memory of the CPU path depends on its threads.
        alone = {"OMP_NUM_THREADS": "1"}
        return Step(name, minutes, (*PYTEST, *words), (*PYTEST, "--collect-only", "-q", *words), alone,
                    modules=TEST_MODULES)  # fmt: skip

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
    both, compiled = ("--phase", "both"), ("--compiled",)
    peers = (*BENCHMARKS, "peers", "--out", result("peers"))
    verify = (*BENCHMARKS, "verify", "--out", result("verify"))
    smoke, inspect = (*BENCHMARKS, "smoke"), (*BENCHMARKS, "inspect", "--target", "sm_90", "--out", result("model"))
    kernels = ("token_nll", "linear_nll", "row_stats", "linear_sample", "divergence", "corruption")
    return [
        Step("peers", 0.6, peers, peers),
        Step("verify", 1.5, verify, (*verify, *TOY, "--backend", "triton")),
        measured("headline", 1.5),
        measured("token_nll", 1.2, *short, *both, "--share", "1.0", on_gpu=compiled),
        measured("linear_nll", 1.8, *dflash, *dflash_8b, *both, "--share", "0.5",
                 on_gpu=(*compiled, "--samples", "10")),
        measured("trained_head", 1.0, *trained, *both, "--share", "1.0", subject="linear_nll",
                 on_gpu=(*compiled, "--samples", "10")),
        measured("corruption", 0.7),
        # The second call: whether all tests pass, and the peers from logits and hidden states of policies.
        tests("gpu_tests", 1.5, "-n", "6", "-m", "gpu", *with_gpu_marks),
        # Compiles the kernels once, because otherwise twelve processes would compile them at the same time.
        Step("compile", 0.8, (*smoke, *kernels), (*smoke, "corruption")),
        tests("parity", 5.0, "-n", "12", "-m", "not exhaustive", *(f"tests/{n}.py" for n in NUMBERS)),
        measured("row_stats", 1.5, *policy, *dflash, "--share", "1.0", on_gpu=(*compiled, "--samples", "10")),
        # The third: the sanitizer, where it supports the device, and whether the model of the kernels holds.
        sanitized("memcheck"),
        sanitized("racecheck"),
        # Runs as on a machine without a GPU, because the predictions depend on the installed version of Triton.
        Step("model", 1.5, (*inspect, *(word for name in PREDICTED for word in ("--kernel", name))),
             (*inspect, "--kernel", PREDICTED[0]),
             {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}),
        measured("predicted", 1.2, "--model", result("model")),
        measured("divergence", 0.8, "--kind", "kl", "--kind", "l1", on_gpu=("--samples", "5")),
        measured("variants", 0.5, on_gpu=("--samples", "10")),
        measured("linear_sample", 0.6),
        measured("policy", 2.5, on_gpu=("--samples", "5")),
        measured("tune", 5.0, on_gpu=("--samples", "5")),
        measured("token_nll_sizes", 3.0, *shares, subject="token_nll"),
        measured("linear_nll_sizes", 3.5, "--share", "0.5", subject="linear_nll", on_gpu=("--samples", "10")),
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

    def __init__(self, out: Path, work: Path, *, toy: bool, settings: Mapping[str, str]) -> None:
        self.out, self.work, self.toy = out, work, toy
        self.settings = {**settings, **({"TRITON_INTERPRET": "1"} if toy else {}), "PYTHONUNBUFFERED": "1"}
        self.done: dict[str, dict[str, object]] = {}
        # Read once before the first step, because git and nvidia-smi would disturb measurements.
        self.environment = environment("cpu" if toy else "cuda")

    def resume(self, folder: Path) -> None:
        """Load the results of an earlier run."""
        with tarfile.open(folder / "results.tar.gz") as archive:
            archive.extractall(self.work, filter="data")
        self.done = json.loads((self.work / "summary.json").read_text())["steps"]

    def save(self, running: str | None = None) -> None:
        """Update the three output files, each atomically."""
        summary = {"rehearsal": self.toy, "environment": self.environment, "steps": self.done, "running": running}
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

    def step(self, step: Step) -> None:
        """Run one step until it ends or reaches its time limit."""
        start = time.monotonic()
        if missing := self.missing(step):
            outcome = f"left out: {missing} is not installed"
        else:
            outcome = self._outcome(step, start + 60 * step.minutes)
        seconds = round(time.monotonic() - start, 1)
        self.done[step.name] = {"outcome": outcome, "seconds": seconds, "command": list(self._command(step))}
        print(f"=== {step.name}: {outcome}, {seconds:.0f} s", flush=True)
        self.save()

    def missing(self, step: Step) -> str | None:
        """Return what the step needs and cannot find, in this environment or among the wheels."""
        if step.needs is not None and not self.toy and shutil.which(step.needs) is None:
            return step.needs
        path = [*self.settings.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
        find = importlib.machinery.PathFinder.find_spec
        return next((name for name in step.modules if find(name, path) is None), None)

    def _command(self, step: Step) -> tuple[str, ...]:
        return step.toy if self.toy else step.command

    def _outcome(self, step: Step, deadline: float) -> str:
        log = self.work / f"{step.name}.log"
        with started(self._command(step), log, {**self.settings, **step.settings}) as process:
            while process.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, min(REFRESH, deadline - time.monotonic())))
                self.save(running=step.name)
            status = process.poll()
        if status is None:
            return f"ended after its {step.minutes:g} minutes"
        if status and step.needs is not None and any(text in log.read_text() for text in REFUSALS):
            return f"left out: {step.needs} refuses this device"
        return "ok" if status == 0 else f"failed with status {status}"


# Message of the sanitizer on an unsupported device (seen on virtual machines).
REFUSALS = ("Device not supported", "LibraryNotLoaded")


@contextlib.contextmanager
def started(command: Sequence[str], log: Path, settings: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in a separate process group, with output to log and stdout; at exit, end all that it started."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **settings, MARK: mark}, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    echo = threading.Thread(target=_echo, args=(process, log), daemon=True)
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


def _echo(process: subprocess.Popen[bytes], log: Path) -> None:
    assert process.stdout is not None
    with log.open("wb") as file:
        for line in process.stdout:
            file.write(line)
            file.flush()
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


def joined(folders: Sequence[Path], scratch: Path) -> list[Path]:
    """Return the wheels in the folders; files ``WHEEL.part-*`` are joined, in the order of their names."""
    parts: dict[str, list[Path]] = {}
    for part in sorted((p for folder in folders for p in folder.glob("*.whl.part-*")), key=lambda path: path.name):
        parts.setdefault(part.name.rpartition(".part-")[0], []).append(part)
    for name, found in parts.items():
        with Path(scratch, name).open("wb") as whole:
            for part in found:
                whole.write(part.read_bytes())
    return sorted([*(w for folder in folders for w in folder.glob("*.whl")), *(Path(scratch, name) for name in parts)])


def _rejects(wheels: Sequence[Path], into: Path) -> bool:
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade")
    return bool(subprocess.run([*pip, "--target", str(into), *map(str, wheels)], check=False).returncode)


def install(wheels: Sequence[Path], into: Path) -> dict[str, str]:
    """Install the peers' wheels beside this environment; returns the variables that make them importable.

    One call of pip installs all of them. If it rejects one, each is installed separately, and the run continues without
    those that pip rejects. A wheel without its last part is not offered to pip.
    """
    whole = [wheel for wheel in wheels if zipfile.is_zipfile(wheel)]
    rejected = [wheel for wheel in wheels if wheel not in whole]
    if whole and _rejects(whole, into):
        rejected += [wheel for wheel in whole if _rejects([wheel], into)]
    for wheel in rejected:
        print(f"pip rejects {wheel.name}: measured without it", flush=True)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(into), os.environ.get("PYTHONPATH", "")]))}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks on_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the results")
    add("--minutes", type=float, default=9.0, help="time limit in minutes (default: 9)")
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
    if options.resume is not None and not (options.resume / "results.tar.gz").is_file():
        parser.error(f"argument --resume: must be a folder with results.tar.gz, got {options.resume}")
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("a GPU is required, but none is visible; --rehearse runs the steps at toy size on a CPU")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the steps that fit and write the results; return 1 if a step failed."""
    start = time.monotonic()
    options = _parsed(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch, "results")
        work.mkdir()
        peers = install(joined(options.wheels, Path(scratch)), Path(scratch, "peers")) if options.wheels else {}
        run = Run(options.out, work, toy=options.rehearse, settings=peers)
        if options.resume is not None:
            run.resume(options.resume)
        todo = [s for s in steps(work) if (s.name in options.steps if options.steps else s.name not in run.done)]
        return _run_all(run, todo, start + 60 * options.minutes)


def _run_all(run: Run, todo: Sequence[Step], deadline: float) -> int:
    """Run every step that still fits when its turn comes; time that a step did not use is available to the next."""
    fits, left = plan(todo, (deadline - time.monotonic()) / 60)
    print(f"fits: {', '.join(f'{s.name} {s.minutes:g} min' for s in fits) or 'nothing'}", flush=True)
    print(f"fits only if others take less: {', '.join(s.name for s in left) or 'nothing'}", flush=True)
    lacking = [f"{step.name} needs {missing}" for step in todo if (missing := run.missing(step))]
    print(f"not installed: {', '.join(lacking) or 'nothing'}", flush=True)
    run.save()
    failed, left_out = 0, []
    for step in todo:
        if time.monotonic() + 60 * step.minutes + RESERVE > deadline:
            left_out.append(step.name)
            continue
        run.step(step)
        failed += not str(run.done[step.name]["outcome"]).startswith(("ok", "left out"))
    print((run.work / "verdicts.md").read_text())
    for name, record in run.done.items():
        print(f"{name}: {record['outcome']}")
    print(f"left out for lack of time: {', '.join(left_out) or 'nothing'}", flush=True)
    return int(failed > 0)
