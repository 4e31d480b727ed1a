"""Every kernel that the public functions launch, compiled for four GPUs without one: nothing spills, and what bounds it."""

import ast
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "dllm_kernels" / "kernels"
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
CALLS = {"real": TARGETS, "odd": ("sm_90", "gfx942")}
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])

# Kernels that are to be rewritten: what they spill, in bytes, until then.
SPILLS = {
    ("sm_100", "token_nll_fwd", "fp32"): (TRITON >= (3, 7), "8 bytes"),
}


def is_known(r):
    return SPILLS.get((r["target"], r["function"], r["dtype"]), (False,))[0]


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    """(which calls) -> the records of ``inspect`` of the kernels they launch; compiled once for all pytest workers.

    In a process of its own: here Triton interprets.
    """
    shared = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}

    def of(calls):
        out = shared / f"inspect_{calls}.json"
        with Path(shared, f"inspect_{calls}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not out.exists():
                targets = [word for target in CALLS[calls] for word in ("--target", target)]
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks",
                    "inspect",
                    "--calls",
                    calls,
                    *targets,
                    *OPTIONS,
                    "--out",
                    str(out),
                ]
                done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
                assert out.exists(), done.stderr[-2000:]
        return json.loads(out.read_text())

    return of


def spilling(records):
    """The records that spill; an error where there are none to look at."""
    assert records, "nothing was compiled"
    assert all(r["registers"] > 0 for r in records)
    return [r for r in records if r["spills"] != 0]


@pytest.mark.parametrize(("calls", "target"), [(calls, target) for calls in CALLS for target in CALLS[calls]])
def test_nothing_spills(calls, target, reports):
    records = [r for r in reports(calls) if r["target"] == target]
    assert [(r["kernel"], r["spills"]) for r in spilling(records) if not is_known(r)] == []


def test_an_empty_report_fails():
    with pytest.raises(AssertionError, match="nothing was compiled"):
        spilling([])


def jit_functions():
    """Name -> the names that it mentions, for every function of the package under ``triton.jit``."""
    for path in sorted(KERNELS.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                yield node.name, {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_is_launched_by_a_public_function(target, reports):
    functions = dict(jit_functions())
    called = set().union(*functions.values())
    launched = {r["function"] for r in reports("real") if r["target"] == target}
    assert {name.lstrip("_") for name in functions.keys() - called} == launched


@pytest.mark.parametrize("target", TARGETS)
def test_tiles_move_sixteen_bytes_at_a_time(target, reports):
    records = [r for r in reports("real") if r["target"] == target and r["function"] != "token_nll_merge"]
    assert records
    assert [r["kernel"] for r in records if r["widest_access"] != 16] == []


@pytest.mark.parametrize("target", TARGETS)
def test_no_program_has_more_threads_than_a_gpu_allows(target, reports):
    lanes = 64 if target.startswith("gfx") else 32
    records = [r for r in reports("real") if r["target"] == target]
    assert records
    assert all(r["num_warps"] * lanes <= 1024 for r in records)
