"""The public functions on a GPU that is not there: what they launch, and what a capture or a large batch would need."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests import mock_gpu_checks

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def outcome(tmp_path_factory):
    """What became of every check; run once, also where several pytest workers ask."""
    shared = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent
    out = shared / "mock_gpu.json"
    with Path(shared, "mock_gpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
            command = [sys.executable, "-W", "ignore", "-m", mock_gpu_checks.__name__, str(out)]
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            assert out.exists(), done.stderr[-2000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", mock_gpu_checks.CHECKS)
def test_mock_gpu(name, outcome):
    assert outcome[name] == ""
