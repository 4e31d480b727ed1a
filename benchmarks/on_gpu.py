"""Everything that a GPU has to show, in one command: the tests that need one, every measurement, the sanitizer.

``python -m benchmarks on_gpu --out DIR [--wheels FOLDER]`` needs this checkout and, for the peers beside it, a folder of
their wheels. Each step is a process of its own with a time limit, its output in ``DIR/<step>.log``; a step that fails or
runs out of time does not keep the next from running. ``DIR/summary.json`` says what became of each, and is rewritten after
every step, so that what was measured before an interruption is kept.

The steps stand in the order of what is most worth knowing while time lasts. ``--step NAME`` runs some of them, ``--dry-run``
all of them at toy size on a CPU, through Triton's interpreter, which shows that the script runs to its end and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.record import environment

ROOT = Path(__file__).resolve().parents[1]
NUMBERS = (
    "token_nll", "linear_nll", "row_kernels", "row_stats", "losses", "mtp", "corruption", "corruption_levels", "gumbel_topk", "philox",
    "compile",
)  # fmt: skip
SMALL = "not more_than_2_to_the_31 and not compile and not hypothesis"


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: of the log and in the summary.
        command: what to run on a GPU.
        dry: what stands for it without one.
        minutes: after which it is stopped. Guessed from the numbers of launches and samples, not measured.
        needs: a program without which the step is skipped.
    """

    name: str
    command: tuple[str, ...]
    dry: tuple[str, ...]
    minutes: float
    needs: str | None = None


def steps(out: Path) -> list[Step]:
    """What to run, results under ``out``."""
    python, pytest = (
        (sys.executable, "-m", "benchmarks"),
        (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
    )
    files = tuple(f"tests/test_{name}.py" for name in NUMBERS)
    toy = ("--size", "toy", "--samples", "2", "--warmup", "1", "--threads", "1", "--cache", "hot", "--device", "cpu")

    def measured(subject: str, minutes: float, *, one_pass: bool = False) -> Step:
        """With ``one_pass``, by the chunk kernel that is off by default."""
        name, setting = (f"{subject}_one_pass", ("env", "DLLM_KERNELS_ONE_PASS=1")) if one_pass else (subject, ())
        to = ("--out", str(out / (subject if subject == "all" else f"{name}.json")))
        few = ("--subject", "collate") if subject == "all" else ()
        return Step(name, (*setting, *python, subject, *to), (*setting, *python, subject, *toy, *few, *to), minutes)

    sanitized = (*pytest, "tests/test_row_kernels.py", "tests/test_gumbel_topk.py", "-k", SMALL)
    return [
        Step("gpu_tests", (*pytest, "-m", "gpu", "tests"), (*pytest, "--collect-only", "-m", "gpu", "tests"), 4),
        Step("parity", (*pytest, "-n", "8", *files), (*pytest, "--collect-only", *files), 8),
        Step("model", (*python, "inspect"), (*python, "inspect", "--target", "sm_90", "--kernel", "token_nll_bwd[bf16"), 3),
        measured("predicted", 3),
        measured("token_nll", 4),
        measured("linear_nll", 6),
        measured("linear_nll", 6, one_pass=True),
        measured("row_stats", 6),
        measured("tune", 8),
        measured("losses", 6),
        measured("corruption", 3),
        measured("all", 10),
        *(
            Step(tool, ("compute-sanitizer", "--tool", tool, "--error-exitcode", "3", *sanitized),
                 (*pytest, "--collect-only", "tests/test_row_kernels.py"), 8, needs="compute-sanitizer")
            for tool in ("memcheck", "racecheck")
        ),
    ]  # fmt: skip


def install(wheels: Path, into: Path) -> dict[str, str]:
    """Install the peers' wheels beside this environment; returns the variables that make them importable."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(into))
    subprocess.run([*pip, *map(str, sorted(wheels.glob("*.whl")))], check=True)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(into), os.environ.get("PYTHONPATH", "")]))}


def run(step: Step, out: Path, dry: bool, extra: dict[str, str]) -> dict[str, object]:
    """Run one step; what became of it."""
    if step.needs is not None and not dry and shutil.which(step.needs) is None:
        return {"step": step.name, "outcome": f"skipped: {step.needs} is not installed"}
    command = step.dry if dry else step.command
    settings = {**os.environ, **extra, **({"TRITON_INTERPRET": "1"} if dry and step.name != "model" else {})}
    start = time.perf_counter()
    with Path(out, f"{step.name}.log").open("w") as log:
        try:
            status = subprocess.run(
                command,
                cwd=ROOT,
                env=settings,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=60 * step.minutes,
                check=False,
            ).returncode
            outcome = "ok" if status == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            outcome = f"stopped after {step.minutes:g} minutes"
    return {"step": step.name, "outcome": outcome, "seconds": time.perf_counter() - start, "command": list(command)}


def main(argv: Sequence[str]) -> int:
    """Run the steps and write the summary; 1 if one failed."""
    parser = argparse.ArgumentParser("python -m benchmarks on_gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs, results and the summary")
    parser.add_argument(
        "--wheels", type=Path, help="folder with wheels of the peers, installed without their requirements"
    )
    parser.add_argument("--step", action="append", help="run this step only (may be repeated)")
    parser.add_argument("--dry-run", action="store_true", help="toy size on a CPU, through Triton's interpreter")
    options = parser.parse_args(argv)
    chosen = steps(options.out)
    unknown = set(options.step or ()) - {step.name for step in chosen}
    if unknown:
        parser.error(f"argument --step: must be one of {', '.join(s.name for s in chosen)}, got {', '.join(unknown)}")
    if options.wheels is not None and not options.wheels.is_dir():
        parser.error(f"argument --wheels: must be a folder, got {options.wheels}")
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("a GPU is needed, and none is visible; --dry-run shows what would run")
    chosen = [step for step in chosen if options.step is None or step.name in options.step]
    options.out.mkdir(parents=True, exist_ok=True)
    extra = {} if options.wheels is None else install(options.wheels, options.out / "peers")
    print(f"at most {sum(step.minutes for step in chosen):g} minutes", flush=True)
    done: list[dict[str, object]] = []
    for step in chosen:
        done.append(run(step, options.out, options.dry_run, extra))
        print(f"{step.name}: {done[-1]['outcome']}", flush=True)
        where = environment("cpu" if options.dry_run else "cuda")
        summary = {"dry_run": options.dry_run, "environment": where, "steps": done}
        Path(options.out, "summary.json").write_text(json.dumps(summary, indent=1))
    return int(any(not str(d["outcome"]).startswith(("ok", "skipped")) for d in done))
