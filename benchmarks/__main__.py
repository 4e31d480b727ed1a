"""``python -m benchmarks SUBJECT [options]``: one command line for every measurement and for the demo."""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

# One thread: at this size more of them only wait for each other.
TOY = (("--size", "toy", "--samples", "2", "--warmup", "1", "--threads", "1", "--cache", "hot"),)
MODES = ("mdlm", "block", "hybrid", "scdd", "idlm", "dflash", "distill", "mtp")


@dataclass(frozen=True)
class Subject:
    """One thing that can be run: the module that offers ``main(argv) -> int`` and how CI runs it quickly."""

    module: str
    help: str
    smoke: tuple[tuple[str, ...], ...] = TOY


SUBJECTS = {
    "train": Subject(
        "examples.demo.train",
        "train a small diffusion LM on real text, reference loss beside ours",
        tuple(("--mode", mode, "--tiny", "--steps", "2", "--threads", "1") for mode in MODES),
    ),
    "peers": Subject("benchmarks.peers", "which peers can be imported, and why not the others", ((),)),
    "verify": Subject("benchmarks.verify", "ours against float64 on all rows, at the shapes of the headline figures"),
    "headline": Subject("benchmarks.headline", "ours alone at those shapes, beside a copy and the bare products"),
    "token_nll": Subject("benchmarks.token_nll", "per-token NLL and MDLM loss from logits", ((*TOY[0][:-1], "cold"),)),
    "linear_nll": Subject("benchmarks.linear_nll", "fused linear cross-entropy from hidden states"),
    "row_stats": Subject("benchmarks.row_stats", "log-probabilities at given ids and entropy, with gradients"),
    "linear_sample": Subject("benchmarks.linear_sample", "tokens with log-probabilities and entropies, for samplers"),
    "policy": Subject("benchmarks.policy", "one update of coupled-GRPO and of diffu-GRPO: three policies, backward"),
    "divergence": Subject("benchmarks.divergence", "divergence to a teacher from hidden states of both, kind by kind"),
    "corruption": Subject("benchmarks.corruption", "uniform and blockwise corruption, Gumbel top-k"),
    "collate": Subject("benchmarks.collate", "the collator"),
    "calls": Subject("benchmarks.calls", "small calls and others whose fixed cost shows, beside plain PyTorch"),
    "losses": Subject("benchmarks.losses", "every loss class against the plain one"),
    "inspect": Subject(
        "tools.inspect_kernels",
        "registers, spills, occupancy and the static roofline of every kernel",
        (("--target", "sm_90", "--kernel", "bf16"),),
    ),
    "predicted": Subject("tools.predicted", "the row kernels beside what the static roofline says of them"),
    "variants": Subject(
        "benchmarks.variants", "chunk sizes, a cache hint and prefetching, each beside what the package does"
    ),
    "tune": Subject("benchmarks.tune", "search the kernels' tile sizes"),
    "on_gpu": Subject(
        "benchmarks.on_gpu",
        "the tests, measurements and sanitizer runs that need a GPU",
        (("--rehearse", "--steps", "gpu_tests", "corruption"),),
    ),
    "all": Subject(
        "benchmarks.suite", "every measurement with JSON, tables and plots", ((*TOY[0], "--subject", "collate"),)
    ),
}


def usage() -> str:
    """The list of subjects, one a line."""
    lines = ["usage: python -m benchmarks SUBJECT [options]   (SUBJECT --help lists its options)", ""]
    lines += [f"  {name:<11} {subject.help}" for name, subject in SUBJECTS.items()]
    lines += [f"  {'smoke':<11} every subject at toy size, as CI runs it"]
    return "\n".join(lines)


def run(name: str, argv: list[str]) -> int:
    """Import the subject's module and run its ``main``; returns the exit status."""
    status: int = importlib.import_module(SUBJECTS[name].module).main(argv)
    return status


def _smoke_one(name: str, args: tuple[str, ...]) -> bool:
    print(f"\n=== {' '.join((name, *args))}", flush=True)
    start = time.perf_counter()
    try:
        status = run(name, list(args))
    except Exception:  # one broken benchmark must not hide the others
        traceback.print_exc()
        status = 1
    print(f"=== {name}: {'ok' if status == 0 else 'FAILED'} in {time.perf_counter() - start:.1f} s", flush=True)
    return status == 0


def smoke(argv: list[str]) -> int:
    """Run every subject (or those named) at toy size; 1 if any of them fails or has no module."""
    if {"-h", "--help"} & set(argv):
        print("usage: python -m benchmarks smoke [SUBJECT ...]\n\nEvery subject, or those named, at toy size.")
        return 0
    if unknown := [name for name in argv if name not in SUBJECTS]:
        print(f"unknown subjects {', '.join(map(repr, unknown))}\n\n{usage()}", file=sys.stderr)
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
    """Run the subject named by the first argument with the rest."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    name, rest = argv[0], argv[1:]
    if name == "smoke":
        return smoke(rest)
    if name not in SUBJECTS:
        print(f"unknown subject {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    return run(name, rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
