"""The public functions on a mock GPU: their launches, and the requirements of a capture and of large batches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.support import mock_gpu_checks

ROOT = Path(__file__).parents[2]


def run_checks(out):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", mock_gpu_checks.__name__, str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert out.exists(), done.stderr[-2000:]


@pytest.fixture(scope="session")
def outcome(once):
    """Return the outcome of every check."""
    return json.loads(once("mock_gpu.json", run_checks).read_text())


@pytest.mark.exhaustive  # half a minute
@pytest.mark.parametrize("name", mock_gpu_checks.CHECKS)
def test_mock_gpu(name, outcome):
    if outcome[name]:
        pytest.fail(outcome[name], pytrace=False)
