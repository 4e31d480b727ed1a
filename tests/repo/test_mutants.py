"""The mutation tool: the choice of tests, and one complete run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools import mutants

CODE = """def area(width, height):
    return width * height


class Shape:
    def unused(self):
        return 7 < 8
"""
TEST = """import pytest
from dllm_kernels import shapes

@pytest.mark.parametrize("height", [4, 0])
def test_area(height):
    assert shapes.area(3, height) == 3 * height

def test_shape():
    shapes.Shape().unused()
"""


def test_a_mutant_is_judged_by_tests_that_execute_its_line_then_by_those_of_its_function():
    functions = mutants.functions_of(CODE.encode())
    assert functions == {1: ("area", 0), 2: ("area", 1), 6: ("Shape.unused", 0), 7: ("Shape.unused", 1)}
    short, long, other = ["shapes.py:area:1"], ["shapes.py:area:1", "other.py:f:1"], ["shapes.py:Shape.unused:1"]
    calls = {"a[1]": (1, long), "a[2]": (1, long), "b": (1, short), "c": (1, other), "d": (1, ["shapes.py:area:12"])}
    calls["e"] = 1, []
    first, more = mutants.judges_of("shapes.py", "area", 1, calls)
    assert (first, more) in ((["b", "a[1]", "a[2]", "d"], []), (["b", "a[2]", "a[1]", "d"], []))
    assert set(mutants.judges_of("shapes.py", "", 4, calls)[0]) == {"a[1]", "a[2]", "b", "c", "d"}
    assert set(mutants.judges_of("unknown.py", "", 4, calls)[0]) == calls.keys()
    calls["b"] = mutants.BUDGETS[0], short
    first, more = mutants.judges_of("shapes.py", "area", 1, calls)
    assert (first, sorted(more)) == (["b"], ["a[1]", "a[2]"])


def test_a_rank_records_the_lines_that_it_executes_and_that_dynamo_traces(tmp_path, monkeypatch):
    monkeypatch.setenv("RECORD_RANKS", json.dumps([mutants.__file__, str(tmp_path)]))
    traced = torch._guards.TracingContext(None)
    with torch._guards.tracing(traced), mutants.record_rank("2-check"):
        traced.set_current_loc(mutants.__file__, 10**6, "f")
        traced.set_current_loc("other", 1, "f")
        mutants.report([])
    _, lines = json.loads((tmp_path / f"2-check-{os.getpid()}").read_text())
    assert lines.keys() == {mutants.__file__}
    assert {10**6, mutants.report.__code__.co_firstlineno + 2} <= {*lines[mutants.__file__]}


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
        options = f"--root {tmp_path} --out {tmp_path}/out.jsonl --calls {tmp_path}/calls.jsonl --count 2".split()
        options += ["--tests", "tests/test_*.py"]
        command = [sys.executable, "-m", "tools.mutants", *options, *more]
        done = subprocess.run(command, cwd=mutants.ROOT, env=os.environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout, [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]

    printed, entries = run("-j", "2")
    assert {entry["line"]: entry["verdict"] for entry in entries} == {2: "killed", 7: "survived"}
    assert "dllm_kernels/shapes.py:7" in printed
    assert "1 killed, 0 timeout, 1 survived of 2" in printed
    assert (tmp_path / "dllm_kernels/shapes.py").read_text() == CODE
    again, same = run("-j", "1")
    assert (again, same) == (printed, entries)  # nothing was judged twice
