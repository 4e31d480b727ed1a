"""Every kernel at its real tiles, compiled for four GPUs without one: it compiles, and nothing spills."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


@functools.cache
def report(target):
    """The records of one target, from a process where Triton compiles instead of interpreting."""
    out = Path(os.environ.get("PYTEST_TMPDIR", "/tmp")) / f"dllm_kernels_inspect_{os.getpid()}_{target}.json"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks", "inspect", "--target", target, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    try:
        return done, json.loads(out.read_text()) if out.exists() else []
    finally:
        out.unlink(missing_ok=True)


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_without_spills(target):
    done, records = report(target)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {r["target"] for r in records} == {target}
    assert [r["kernel"] for r in records if r["spills"] != 0] == []
    assert all(r["registers"] > 0 for r in records)


def test_every_kernel_has_a_specimen():
    _, records = report("sm_90")
    compiled = {r["kernel"].split("[")[0] for r in records}
    for name in ("token_nll_fwd", "token_nll_fwd_split", "token_nll_merge", "token_nll_bwd", "linear_nll_rows"):
        assert name in compiled


@pytest.mark.parametrize("target", TARGETS)
def test_rows_of_logits_move_sixteen_bytes_at_a_time(target):
    _, records = report(target)
    rows = [r for r in records if r["kernel"].startswith(("token_nll_fwd", "token_nll_bwd", "linear_nll_rows"))]
    assert rows
    assert {r["widest_access"] for r in rows} == {16}


@pytest.mark.parametrize("target", TARGETS)
def test_no_program_has_more_threads_than_a_gpu_allows(target):
    _, records = report(target)
    lanes = 64 if target.startswith("gfx") else 32
    assert all(r["num_warps"] * lanes <= 1024 for r in records)


# A launch hands an integer that is 1 over as a compile-time constant, where it may: then it has no type of its own.
ONES = """
from benchmarks.inspect_kernels import TARGETS, compile_specimen, specimens

for specimen in specimens():
    free = [p.name for p in specimen.kernel.params if specimen.signature.get(p.name) in ("i32", "i64") and not p.do_not_specialize]
    signature = {k: v for k, v in specimen.signature.items() if k not in free}
    ones = specimen.constexprs | dict.fromkeys(free, 1)
    divisible = tuple(name for name in specimen.divisible if name not in free)
    compile_specimen(specimen._replace(signature=signature, constexprs=ones, divisible=divisible), TARGETS["sm_90"])
    print(specimen.name)
"""


def test_every_kernel_compiles_where_its_integers_are_1():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", ONES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == len(report("sm_90")[1])
