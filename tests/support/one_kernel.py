"""``python -m tests.support.one_kernel NAME``: the checks of one file of kernels, or of one op, within a minute.

Three processes run at the same time. Each one stops at its first failure and prints it when it ends:

- the tests of the numbers, in Triton's interpreter: comparisons with the oracle, and the bits in another batch;
- the calls of ``tests/kernels/test_bounds.py``, executed as PTX on arrays of all threads;
- on a mock GPU, offsets past 32 bits and spilled registers.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is first imported
import pytest
from triton.runtime.interpreter import GridExecutor

from tests.kernels.test_bounds import CALLS, call
from tools.kernel_files import SOURCES, files_with, launched_in
from tools.mutants import judges_of
from tools.ptx.__main__ import SUBJECTS

ROOT = Path(__file__).parents[2]
FILES = [f"tests/kernels/test_{name}.py" for name in SUBJECTS["kernels"].split()]


def launched_by(name):
    """Return the kernels that a call launches, none of which runs, because a faulty one might end this process."""
    found = set()
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Exception):
        patch.setattr(GridExecutor, "__call__", lambda self, *_, **__: found.add(self.fn.__name__))
        call(name, patch)
    return found


def op_of(name):
    return name.partition(",")[0]


def chosen(name):
    """Return (kernels, ops that launch them, for each file of kernels its tests as arguments of pytest)."""
    calls = {one: launched_by(one) for one in CALLS}
    file = name if name in SOURCES else f"_{name}"
    if file in SOURCES:
        kernels, files = set().union(*map(launched_in, files_with(file))), [file]
    else:
        kernels = set().union(*(found for one, found in calls.items() if op_of(one) == name))
        files = [other for other in SOURCES if launched_in(other) & kernels]
    ops = {op_of(one): None for one, found in calls.items() if found & kernels and (file in SOURCES or op_of(one) == name)}
    if not ops:
        names = [other.removeprefix("_") for other in SOURCES]
        raise SystemExit(f"K must be a file of kernels, {names}, or an op, {[*dict.fromkeys(map(op_of, calls))]}, got {name!r}")
    return sorted(kernels), [*ops], [judges_of(f"backends/triton/{other}.py") for other in files]


def commands(name):
    """Return the command of each process by what it checks."""
    kernels, ops, judges = chosen(name)
    of_ops = [*FILES, "-k", " or ".join(f"({' and '.join(op.split())})" for op in ops)]
    options = ["-x", "--tb=short", "--disable-warnings", "-p", "no:cacheprovider", "-n", "0", "-m", "not exhaustive"]
    tests = [sys.executable, "-m", "pytest", *options]
    return {
        "accesses of the compiled kernels": [sys.executable, "-m", "tools.ptx", *options, *of_ops],
        "offsets and registers": [sys.executable, "-W", "ignore", "-m", "tests.support.mock_gpu_checks", *kernels],
        "edge-case rows, other batches": [*tests, *of_ops],
        **{f"numbers: {' '.join(judge)}": [*tests, *judge] for judge in judges},
    }


def run(command):
    """Return (output, exit code) of a process."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command, cwd=ROOT, env={"OMP_NUM_THREADS": "1", **kept}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.stdout, done.returncode


def main(name):
    """Run the processes, print the output of each when it ends, and return 1 if one failed."""
    found, start, failed = commands(name), time.monotonic(), []
    with ThreadPoolExecutor(len(found)) as pool:
        labels = {pool.submit(run, command): label for label, command in found.items()}
        for done in as_completed(labels):
            output, code = done.result()
            failed += [labels[done]] if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else []
            said = output if labels[done] in failed else output.rstrip().rpartition("\n")[2]
            print(f"{time.monotonic() - start:.0f} s, {labels[done]}: {said}", flush=True)
    print(f"{name}: FAILED: {', '.join(failed)}" if failed else f"{name}: passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or [""])))
