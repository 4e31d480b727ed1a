import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dllm_kernels
from dllm_kernels.rows import _records

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_holds_the_package_and_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"dllm_kernels", f"dllm_kernels-{dllm_kernels.__version__}.dist-info"}
    packed = {name for name in wheel.namelist() if name.startswith("dllm_kernels/")}
    here = {p.relative_to(ROOT).as_posix() for p in (ROOT / "dllm_kernels").rglob("*") if p.suffix in {".py", ".typed"}}
    assert packed == here


def test_carries_types_and_license(wheel):
    names = wheel.namelist()
    assert "dllm_kernels/py.typed" in names
    assert any(name.endswith("LICENSE") for name in names)


def test_metadata(wheel):
    (name,) = (n for n in wheel.namelist() if n.endswith("METADATA"))
    metadata = wheel.read(name).decode()
    assert f"Version: {dllm_kernels.__version__}" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata
    assert "Requires-Dist: torch>=2.11" in metadata


def test_every_record_is_found_by_its_name():
    """As a compiled op looks for it."""
    found = {op.name: op for op in vars(_records).values() if isinstance(op, _records.RowOp)}
    records = {name: op for name, op in found.items() if op is not _records.ROW_OBJECTIVE}  # which is never compiled
    assert records == _records.ROW_OPS
