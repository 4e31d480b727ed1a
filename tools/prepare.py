"""Compute what a run on a GPU needs and no GPU has to compute: ``python -m benchmarks prepare --out FOLDER``.

``model.json`` has the predicted speed of the kernels that ``predicted`` measures. ``triton.tar.gz`` is a part of
Triton's cache: the kernels that ``verify`` launches, compiled. Both depend on the version of Triton, so run this with
the version of the other machine. ``python -m benchmarks on_gpu --prepared FOLDER`` uses them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from unittest import mock

from benchmarks.carried import KERNELS, MODEL, RECORD
from benchmarks.record import version, write_whole
from tools.gpus import TARGETS

# The kernels that ``predicted`` measures.
PREDICTED = (
    "token_nll_bwd[bf16]",
    "token_nll_fwd_split[bf16]",
    "token_nll_fwd_split[bf16, correct]",
    "linear_nll_rows[bf16]",
    "linear_nll_rows[bf16, correct]",
    "divergence_rows[bf16, grad, fast]",
    "divergence_rows[bf16, grad, fast, tv=i64]",
)


def compile_of_verify(target: str, size: str, cache: Path) -> int:
    """Compile the kernels that ``verify`` launches, into a folder like Triton's cache; return their number."""
    from benchmarks import measure, verify
    from tools.mock_gpu import MockGPU

    argv = ["--device", "cuda", "--dtype", "bfloat16", "--size", size]
    checks = list(verify.checks(measure.parse(measure.arguments("verify"), argv)).values())
    with MockGPU(target, reads_zeros=True) as gpu:
        for check in checks[:1] if size == "toy" else checks:
            list(check())
    for specimen in gpu.specimens:  # not in several threads, which see each other's unfinished keys
        _ = specimen.source.fn.cache_key
    with mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(cache)), ThreadPoolExecutor(os.cpu_count()) as pool:
        return len(list(pool.map(lambda specimen: specimen.compile(), gpu.specimens)))


def main(argv: Sequence[str]) -> int:
    """Write the folder."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--target", choices=list(TARGETS), default="sm_90", help="the GPU (default: sm_90)")
    parser.add_argument("--size", choices=("toy", "full"), default="full", help="toy: a few kernels, as CI runs it")
    options = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET=1 is set, so no kernel is compiled: unset it", file=sys.stderr)
        return 2
    from tools.inspect_kernels import inspect

    names = PREDICTED[:1] if options.size == "toy" else PREDICTED
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:
        count = compile_of_verify(options.target, options.size, Path(cache))
        with tarfile.open(options.out / KERNELS, "w:gz") as archive:
            for path in sorted(Path(cache).rglob("*")):
                if path.is_file():
                    archive.add(path, str(path.relative_to(cache)))
    reports = [asdict(report) for report in inspect([options.target], names)]
    write_whole(options.out / MODEL, json.dumps(reports, indent=1))
    write_whole(options.out / RECORD, json.dumps({"triton": version("triton"), "target": options.target}) + "\n")
    print(f"{options.out}: {len(reports)} predictions, {count} kernels, {options.target}, Triton {version('triton')}")
    return 0
