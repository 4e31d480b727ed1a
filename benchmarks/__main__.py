"""Run a measurement or the demo: ``python -m benchmarks SUBJECT [options]``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# One thread: at this size, more threads would only wait for each other.
TOY = (("--size", "toy", "--samples", "2", "--warmup", "1", "--threads", "1", "--cache", "hot"),)
ONCE = ((*TOY[0], "--samples", "1", "--warmup", "0"),)  # of slow calls; the last value of an option counts


@dataclass(frozen=True)
class Subject:
    """A subject of the command line.

    Attributes:
        module: the module with ``main(argv) -> int``.
        help: description in the list of subjects.
        smoke: arguments of CI's quick runs.
        needs: modules that must be installed, besides those of the package.
        extra: the extra of pyproject.toml that installs them.
        minutes: duration with the default options on a GPU, estimated as in ``on_gpu``. None: no estimate.
    """

    module: str
    help: str
    smoke: tuple[tuple[str, ...], ...] = TOY
    needs: tuple[str, ...] = ("tqdm",)
    extra: str = "bench"
    minutes: float | None = None

    @property
    def estimate(self) -> str:
        """Description of the duration, or an empty string."""
        return "" if self.minutes is None else f"estimated {self.minutes:g} minutes on an H200"

    def missing(self) -> list[str]:
        """Return the modules that the subject needs and that are not installed."""
        return [name for name in ("torch", *self.needs) if importlib.util.find_spec(name) is None]


SUBJECTS = {
    "train": Subject(
        "examples.demo.train",
        "train a small diffusion LM on real text, with the reference loss and with ours",
        # tests/repo/test_demo.py trains in the other modes
        tuple(("--mode", mode, "--tiny", "--steps", "2", "--threads", "1") for mode in ("block", "hybrid")),
        needs=("matplotlib", "tokenizers", "tqdm"),
        extra="demo",
    ),
    "peers": Subject(
        "benchmarks.peers", "list the peers that can be imported, and the reason for the others", ((),), needs=()
    ),
    "verify": Subject(
        "benchmarks.verify", "compare ours with float64 on all rows, at the headline shapes", minutes=1.0
    ),
    "headline": Subject(
        "benchmarks.headline",
        "ours alone at the headline shapes, with a copy and the bare matrix products",
        minutes=0.8,
    ),
    "token_nll": Subject("benchmarks.token_nll", "per-token NLL and MDLM loss from logits", ((*TOY[0][:-1], "cold"),)),
    "linear_nll": Subject("benchmarks.linear_nll", "fused linear cross-entropy from hidden states"),
    "fused_head": Subject("benchmarks.fused_head", "training loops from logits, with and without fused_head"),
    "row_stats": Subject("benchmarks.row_stats", "log-probabilities at given ids and entropy, with gradients"),
    "linear_sample": Subject(
        "benchmarks.linear_sample", "tokens with log-probabilities and entropies, for samplers", minutes=0.6
    ),
    "head_options": Subject("benchmarks.head_options", "float32 logits and LoRA in the NLL from hidden states"),
    "policy": Subject("benchmarks.policy", "one update of coupled-GRPO and of diffu-GRPO: three policies, backward"),
    "divergence": Subject(
        "benchmarks.divergence", "divergence from a teacher, from the hidden states of both, for each kind"
    ),
    "corruption": Subject("benchmarks.corruption", "uniform and blockwise corruption, Gumbel top-k", minutes=0.6),
    "collate": Subject("benchmarks.collate", "the collator"),
    "calls": Subject(
        "benchmarks.calls", "calls with visible overhead, such as small calls, compared with plain PyTorch"
    ),
    "losses": Subject("benchmarks.losses", "every loss class, compared with the plain loss", minutes=4.0),
    "memory": Subject("benchmarks.memory", "peak memory along the vocabulary, without time", needs=()),
    "plots": Subject("benchmarks.plots", "the pictures of README and the site, from committed results", (), needs=()),
    "inspect": Subject(
        "tools.inspect_kernels",
        "registers, spills, occupancy and the static roofline of every kernel",
        (("--target", "sm_90", "--kernel", "linear_nll_rows[bf16]"),),
        extra="triton",
        needs=("triton",),
    ),
    "prepare": Subject(
        "tools.prepare",
        "without a GPU, predictions and compiled kernels for a run on a GPU",
        (),  # tests/repo/test_on_gpu.py runs it
        extra="triton",
        needs=("triton",),
    ),
    "predicted": Subject(
        "tools.predicted", "the row kernels, compared with the prediction of the static roofline", ONCE
    ),
    "variants": Subject(
        "benchmarks.variants",
        "candidates for chunk sizes, cache hints, epilogues and samples, with their predicted gain",
        ONCE,
    ),
    "tune": Subject("benchmarks.tune", "search the kernels' tile sizes", ONCE),
    "on_gpu": Subject(
        "benchmarks.on_gpu",
        "the tests, measurements and sanitizer runs that need a GPU",
        (("--rehearse", "--steps", "corruption"),),
        minutes=9.0,
    ),
    "all": Subject(
        "benchmarks.suite",
        "every measurement with JSON, tables and plots",
        ((*ONCE[0], "--subject", "collate"),),
        needs=("matplotlib", "tqdm"),
    ),
}


def usage() -> str:
    """Return the usage text: the list of subjects, one per line."""
    lines = ["usage: python -m benchmarks SUBJECT [options]   (SUBJECT --help lists its options)"]
    lines += ["run it in the root of a clone: the wheel contains no benchmarks", ""]
    lines += [
        f"  {name:<12} {subject.help}" + (f" ({subject.estimate})" if subject.estimate else "")
        for name, subject in SUBJECTS.items()
    ]
    lines += [f"  {'smoke':<12} every subject at toy size, as CI runs it"]
    for extra in dict.fromkeys(subject.extra for subject in SUBJECTS.values()):
        names = {name for subject in SUBJECTS.values() if subject.extra == extra for name in subject.missing()}
        if names:
            lines += ["", f"not installed: {', '.join(sorted(names))}; run: pip install '.[{extra}]'"]
    return "\n".join(lines)


def refuse(names: Iterable[str]) -> bool:
    """Print what the subjects need and what is not installed; return False if nothing is missing."""
    missing = {name: found for name in names if (found := SUBJECTS[name].missing())}
    for name, found in missing.items():
        where = f"run: pip install '.[{SUBJECTS[name].extra}]'"
        print(f"{name} needs {', '.join(found)}, not installed; {where}", file=sys.stderr)
    return bool(missing)


def run(name: str, argv: list[str]) -> int:
    """Import the module of the subject and run its ``main``; return the exit status."""
    status: int = importlib.import_module(SUBJECTS[name].module).main(argv)
    return status


def _smoke_one(name: str, args: tuple[str, ...]) -> bool:
    print(f"\n=== {' '.join((name, *args))}", flush=True)
    start = time.perf_counter()
    try:
        status = run(name, list(args))
    except Exception:  # a broken benchmark must not prevent the others
        traceback.print_exc()
        status = 1
    print(f"=== {name}: {'ok' if status == 0 else 'FAILED'} in {time.perf_counter() - start:.1f} s", flush=True)
    return status == 0


def smoke(argv: list[str]) -> int:
    """Run every subject, or the named subjects, at toy size; return 1 if one of them fails or has no module."""
    if {"-h", "--help"} & set(argv):
        print("usage: python -m benchmarks smoke [SUBJECT ...]\n\nEvery subject, or those named, at toy size.")
        return 0
    if unknown := [name for name in argv if name not in SUBJECTS]:
        print(f"unknown subjects {', '.join(map(repr, unknown))}\n\n{usage()}", file=sys.stderr)
        return 2
    if refuse(argv or SUBJECTS):
        return 2
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in argv or SUBJECTS:
            for number, args in enumerate(SUBJECTS[name].smoke):
                out = Path(scratch) / (
                    f"{name}-{number}" if name in ("train", "all", "on_gpu") else f"{name}-{number}.json"
                )
                takes_out = name != "inspect"
                if not _smoke_one(name, (*args, *(("--out", str(out)) if takes_out else ()))):
                    failed.append(" ".join((name, *args)))
    print("\nsmoke: " + (f"FAILED: {'; '.join(failed)}" if failed else "all subjects ran"))
    return int(bool(failed))


def main(argv: list[str]) -> int:
    """Run the subject named by the first argument with the remaining arguments."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    name, rest = argv[0], argv[1:]
    if name == "smoke":
        return smoke(rest)
    if name not in SUBJECTS:
        print(f"unknown subject {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    if refuse([name]):
        return 2
    return run(name, rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
