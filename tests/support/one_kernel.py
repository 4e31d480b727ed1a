"""``python -m tests.support.one_kernel NAME``: the checks of one file of kernels, or of one op, within a minute.

Processes that run at the same time stop at their first failure, which is printed when they end:

- accesses: the calls of ``tests/kernels/test_bounds.py``, executed as PTX on arrays of all threads;
- offsets past 32 bits and spilled registers, on a mock GPU;
- numbers and bits in another batch: the tests in ``JUDGES``, or of the op of this name, and ``tests/kernels`` in
  Triton's interpreter.
"""

import contextlib
import functools
import os
import re
import shlex
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
from tools.ptx.__main__ import SUBJECTS

ROOT = Path(__file__).parents[2]
BATCHES = "tests/kernels/test_batch_invariance.py"
JUDGES = {  # file of kernels -> stems of its tests and options of pytest
    "_aligned": "gumbel_topk corruption -k triton",
    "_philox": "corruption linear_sample -k 'triton or kernel or bits'",
    "_select": "gumbel_topk corruption -k triton",
    "_transform": "flags transform",
    "corruption": "corruption padding corruption_levels -k 'triton or kernel or count or long or product or registers'",
    "divergence": "divergence_kernel",
    "gumbel_topk": "gumbel_topk padding -k triton",
    "linear_nll": "row_kernels linear_nll -k 'row or triton'",
    "row_stats": "row_stats row_objective soft_embedding -k triton",
    "row_weights": "row_weights losses -k 'triton or kernel'",
    "sample": "linear_sample -k sample",
    "token_nll": "row_kernels token_nll linear_nll -k 'kernel or triton'",
}
OF_CASES = "errors cases flags num_active"  # tests over all ops, beside that of an op of the same name
OF_OTHERS = "row_kernels token_nll linear_nll row_stats transform -k 'kernel or triton'"


def judges_of(file):
    """Return the arguments of pytest for a file of kernels."""
    stem = file.lstrip("_")
    usual = f"{stem} {OF_CASES} -k {stem}" if (ROOT / f"tests/ops/test_{stem}.py").exists() else OF_OTHERS
    stems, *options = re.split("(?= -k )", JUDGES.get(file, usual))
    found = [str(path.relative_to(ROOT)) for stem in stems.split() for path in ROOT.glob(f"tests/*/test_{stem}.py")]
    return [*(path for path in sorted(found) if "reference" not in path), *shlex.split("".join(options))]


@functools.cache
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
    """Return (kernels, their files, ops that launch them)."""
    calls = {one: launched_by(one) for one in CALLS}
    file = name if name in SOURCES else f"_{name}"
    if file in SOURCES:
        files, kernels = [file], set().union(*map(launched_in, files_with(file)))
        ops = [op_of(one) for one, found in calls.items() if found & kernels]
    else:
        ops = [op_of(one) for one in calls if op_of(one) == name]
        kernels = set().union(*(found for one, found in calls.items() if op_of(one) in ops))
        files = [other for other in SOURCES if launched_in(other) & kernels]
    if not ops:
        stems, names = [stem.removeprefix("_") for stem in SOURCES], [*dict.fromkeys(map(op_of, calls))]
        raise SystemExit(f"K must be a file of kernels {stems} or an op {names}, got {name!r}")
    return sorted(kernels), files, [*dict.fromkeys(ops)]


def commands(name):
    """Return the command of each process by what it checks."""
    kernels, files, ops = chosen(name)
    of_ops = ["-k", " or ".join(f"({' and '.join(op.split())})" for op in ops)]
    options = ["-x", "--tb=short", "--disable-warnings", "-p", "no:cacheprovider", "-n", "0"]
    options += ["--timeout", "120", "--timeout-method", "thread"]  # a kernel that overwrites memory may end in a loop
    judges = {file: judges_of(file) for file in files}
    others = [f"tests/kernels/test_{stem}.py" for stem in SUBJECTS["kernels"].split()]
    others = [file for file in others if file != BATCHES and not any(file in judge for judge in judges.values())]
    tests, everyday = [sys.executable, "-m", "pytest", *options], ["-m", "not exhaustive"]
    return {
        "accesses": [sys.executable, "-m", "tools.ptx", *options, *everyday, "tests/kernels/test_bounds.py", *of_ops],
        "offsets and registers": [sys.executable, "-W", "ignore", "-m", "tests.support.mock_gpu_checks", *kernels],
        "other batches": [*tests, BATCHES, *of_ops],  # of every day are the cases of few ops
        "other tests of kernels": [*tests, *everyday, *others, *of_ops],
        **{f"numbers of {file}": [*tests, *everyday, *judge] for file, judge in judges.items()},
    }


def run(command):
    """Return (output, exit code) of a process."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    options = {"env": {"OMP_NUM_THREADS": "1", **kept}, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=ROOT, text=True, **options)
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
