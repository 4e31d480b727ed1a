"""Few tests import private modules, so that the other tests hold for any implementation of the public functions."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
# Rooms without a public name.
ROOMS = "backends|deferred|head|rows"
PRIVATE = re.compile(rf"dllm_kernels(\.\w+)*\.(_[a-z]\w*|({ROOMS})\b)(\.\w+)*")
# What the source of a file with such an import contains; parsing every file takes long.
MAY_BE = re.compile(
    rf"dllm_kernels[\w.]*\.(_[a-z]|{ROOMS})|from dllm_kernels[\w.]* import (\([^)]*|[^(\n]*)\b(_[a-z]|{ROOMS})"
)
MAY = ("kernels", "internals", "support")
BY_NAME = ("import_module", "importorskip", "setattr", "delattr")  # calls that import a module named by a string


def private_imports(source):
    """Return (line, name) of every private module, or name in one, that the source of a file imports."""
    for node in ast.walk(ast.parse(source)) if MAY_BE.search(source) else ():
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            names = [str(node.args[0].value)] if called in BY_NAME else []
        yield from ((node.lineno, name) for name in names if PRIVATE.fullmatch(name))


def test_only_tests_of_kernels_and_internals_import_private_modules():
    files = sorted(TESTS.rglob("*.py"))
    assert {path.relative_to(TESTS).parts[0] for path in files} > {*MAY}
    found = [
        f"{path.relative_to(TESTS.parent)}:{line} imports {name}"
        for path in files
        if path.relative_to(TESTS).parts[0] not in MAY
        for line, name in private_imports(path.read_text())
    ]
    assert found == []


def test_every_test_file_is_in_a_folder():
    assert [path.name for path in TESTS.glob("*.py")] == ["conftest.py"]
