"""Tests with code for a device, on a pretended GPU, where a test that mixes devices fails as on a real one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import INTERPRETED

TESTS = Path(__file__).parents[1]
CASES = 1  # of each test, in turn the first one and the last one, which are usually of the two backends
USES_A_DEVICE = re.compile(r"import .*\bDEVICE\b|^def test_\w+\([^)]*\b(device|backend|path)\b", re.MULTILINE)
# These launch kernels for a mock GPU, patch the interpreter, or start processes, which do not see the pretended GPU.
OTHERWISE = {"kernels", "distributed", "repo", "support"}
COMPILED = {
    "test_compile.py",
    "test_corruption_compile.py",
    "test_changing_arguments.py",
    "test_graph.py",
}  # a pretended GPU cannot trace


FILES = [
    file
    for file in sorted(TESTS.glob("*/test_*.py"))
    if file.parent.name not in OTHERWISE and file.name not in COMPILED and USES_A_DEVICE.search(file.read_text())
]


def test_the_folders_with_code_for_a_device_are_found():
    folders = {"corruption", "generate", "integrations", "internals", "losses", "mtp", "ops", "policy"}
    assert {file.parent.name for file in FILES} == folders


def printed_for_a_gpu():
    """Return the tests of the pages whose code selects a GPU if there is one; none of them may be skipped."""
    docs = TESTS.parent / "docs"
    pages = [page.relative_to(docs) for page in sorted(docs.rglob("*.md")) if "cuda.is_available()" in page.read_text()]
    assert [*map(str, pages)] == ["gpu.md"]
    assert "cuda.is_available()" in (TESTS.parent / "README.md").read_text()
    name = "test_the_code_runs_as_printed"
    return [*(f"tests/repo/test_docs.py::{name}[{page}]" for page in pages), f"tests/repo/test_readme.py::{name}"]


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not INTERPRETED, reason="kernels run in the interpreter on a pretended GPU")
def test_all_pass_on_a_pretended_gpu():
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.pretended_gpu", "--cases", str(CASES), "-rsf"]
    options = ["-m", "not exhaustive", "-p", "no:cacheprovider", "--tb=short", "--no-fold-skipped"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TRITON_INTERPRET"))}
    done = subprocess.run(
        [*command, *options, *map(str, FILES), *printed_for_a_gpu()], cwd=TESTS.parent,
        env={**kept, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    assert not re.findall("^SKIPPED .*tests/repo/.*", done.stdout, re.MULTILINE)  # the pages
