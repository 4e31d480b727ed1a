"""The mutation tool: its mutations, code that it skips, its even choice, and one complete run."""

import ast
import fnmatch
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tools import mutants

PACKAGE = mutants.ROOT / mutants.PACKAGE
FILES = [str(path.relative_to(PACKAGE)) for path in sorted(PACKAGE.rglob("*.py"))]


def mutated_lines(source):
    """Return every mutated form of one line, or of the lines of a function."""
    source = source.encode()
    return {mutants.mutated(source, m).decode() for m in mutants.mutants_of("x.py", source)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a = b < c", ["a = b <= c"]),
        ("a = (b) is not (c)", ["a = (b) is (c)"]),
        ("a = b not in c", ["a = b in c"]),
        ("a = b == c != d", ["a = b != c != d", "a = b == c == d"]),
        ("a = b - c * d", ["a = b + c * d", "a = b - c / d"]),
        ("a = b and c or d", ["a = b or c or d", "a = b and c and d"]),
        ("a = not b", ["a = (b)"]),
        ("a = -100", ["a = -101", "a = -99"]),
        ("a = 0.5", ["a = 1.5", "a = (-0.5)"]),
        ("a = True", ["a = False"]),
        ("a = max(b, c.amin(d))", ["a = min(b, c.amin(d))", "a = max(b, c.amax(d))"]),
        ("a = f(b, c=d)", ["a = f(b)"]),
        ("a = f(b=c, d=e)", ["a = f(d=e)", "a = f(b=c)"]),
        ("f(a)", ["pass"]),
        ("a.b = c", ["pass"]),
        ("a += b", ["pass"]),
        ("if a:\n    b = c", ["if not (a):\n    b = c"]),
        ("a = b if c else d", ["a = b if not (c) else d"]),
        ("def f():\n    return a", ["def f():\n    return None"]),
        ("def f() -> bool:\n    return a", ["def f() -> bool:\n    return not (a)"]),
        ("def f() -> bool:\n    return False", ["def f() -> bool:\n    return True"]),
        ("a = tl.sum(b < c, 0)", ["a = tl.sum(b <= c, 0)"]),
        ("a = b[0]", ["a = b[1]"]),
        ("a = b[2]", ["a = b[3]", "a = b[1]"]),
        (
            "def f(a=1):\n    b = a | c",
            ["def f(a=2):\n    b = a | c", "def f(a=0):\n    b = a | c", "def f(a=1):\n    b = a & c"],
        ),
        ("é = b < c  # <", ["é = b <= c  # <"]),
    ],
)  # fmt: skip
def test_mutations_of_each_kind_of_code(source, expected):
    assert mutated_lines(source) == set(expected)
    assert all(ast.parse(line) for line in expected)


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring of 3 < 4."""',
        "import a",
        "from a import b",
        "A = int | float",
        "A = TypeVar('A', bound=int)",
        "def f(a: Literal[1] = b) -> Literal[2]:\n    c: Literal[3] = d",
        "assert a < 1",
        "def f():\n    raise ValueError(a + 1)",
        "a = f'{b + 1} of {c}'",
        "a = 'b' + c",
        "a = f(device=b < 1)",
        "def specimens():\n    return 1",
        "tl.debug_barrier()",
        "a = f(out=b)",
        "TILE = 1 << 9",
        "def f():\n    return None",
        "@f(1)\ndef g(): ...",
        "__all__ = [a, 1]",
    ],
)
def test_code_that_is_not_mutated(source):
    assert not mutated_lines(source)


@pytest.mark.exhaustive
def test_the_choice_is_even_and_deterministic():
    found = {file: mutants.mutants_of(file, (PACKAGE / file).read_bytes()) for file in FILES}
    chosen = mutants.chosen(found, 200, 0)
    assert len(chosen) == len(set(chosen)) == 200
    assert chosen == mutants.chosen(found, 200, 0)
    assert chosen != mutants.chosen(found, 200, 1)
    lines = {file: len({m.line for m in of_file}) for file, of_file in found.items()}
    picked = Counter(m.file for m in chosen)
    assert all(abs(picked[file] - 200 * n / sum(lines.values())) <= 1 for file, n in lines.items())
    assert len(mutants.chosen(found, 10**6, 0)) == sum(lines.values())  # never two in one line


def test_every_module_has_judges_that_exist():
    for file in FILES:
        tests = [t for t in mutants.judges_of(file) if t.startswith("tests/")]
        assert file.endswith("__init__.py") or tests, file
        assert all((mutants.ROOT / t).exists() for t in tests) or file.endswith("__init__.py"), file
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
