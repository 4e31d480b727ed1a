"""The mutation tool: tests for every module, and one complete run."""

import fnmatch
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import mutants

PACKAGE = mutants.ROOT / mutants.PACKAGE
FILES = [str(path.relative_to(PACKAGE)) for path in sorted(PACKAGE.rglob("*.py"))]


def test_every_module_has_judges_that_exist():
    without = [file for file in FILES if not any(t.startswith("tests/") for t in mutants.judges_of(file))]
    assert all(file.endswith("__init__.py") for file in without), without
    stems = {stem for _, arguments in mutants.JUDGES for stem in arguments.split(" -k ")[0].split()}
    assert not [stem for stem in stems if not [*mutants.ROOT.glob(f"tests/*/test_{stem}.py")]]
    patterns = [pattern for pattern, _ in mutants.JUDGES]
    used = {next((p for p in patterns if fnmatch.fnmatch(file, p)), None) for file in FILES}
    assert set(patterns) <= used, f"{set(patterns) - used}: nothing that they match is left to them"


CODE = "def area(width, height):\n    return width * height\n\n\ndef unused():\n    return 7 < 8\n"
TEST = "from dllm_kernels import shapes\n\ndef test_area():\n    assert shapes.area(3, 4) == 12\n"


@pytest.mark.exhaustive
def test_a_run_distinguishes_killed_from_survived_and_resumes(tmp_path):
    files = {
        "dllm_kernels/__init__.py": "",
        "dllm_kernels/shapes.py": CODE,
        "tests/test_shapes.py": TEST,
        "pyproject.toml": "",
    }
    for path, text in files.items():
        Path(tmp_path, path).parent.mkdir(exist_ok=True)
        Path(tmp_path, path).write_text(text)

    def run(*more):
        options = f"--root {tmp_path} --out {tmp_path}/out.jsonl --tests tests/test_shapes.py --count 2".split()
        command = [sys.executable, "-m", "tools.mutants", *options, *more]
        done = subprocess.run(command, cwd=mutants.ROOT, env=os.environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout, [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]

    printed, entries = run("-j", "2")
    assert {entry["line"]: entry["verdict"] for entry in entries} == {2: "killed", 6: "survived"}
    assert "dllm_kernels/shapes.py:6" in printed
    assert "1 killed, 0 timeout, 1 survived of 2" in printed
    assert (tmp_path / "dllm_kernels/shapes.py").read_text() == CODE
    again, same = run("-j", "1")
    assert (again, same) == (printed, entries)  # nothing was judged twice
