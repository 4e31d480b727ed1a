"""Mutation testing: break the package in one place at a time and run its tests. See ``python -m tools.mutants --help``.

Each mutant is tested in a copy of the source tree. The tests are everyday tests that execute its line, by a record of
the lines of each test. They run in a fork of this process, which has already imported torch. A mutant survives if no
test fails. Then either a test is missing, or the mutant is equivalent to the original.
"""

import argparse
import ast
import contextlib
import difflib
import fnmatch
import glob
import hashlib
import importlib
import inspect
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
from tqdm import tqdm

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.dont_write_bytecode = True  # Python would reuse a .pyc of equal source length and second
tqdm.monitor_interval = 0  # no threads in the process that forks

ROOT = Path(__file__).parent.parent
PACKAGE = "dllm_kernels"
DEADLINE = 1800  # seconds, for tests with unknown run time

JUDGES = ("tests/[!r]*/test_*.py", "tests/repo/test_report.py")  # not those of the reference and of the repository
# Seconds of a processor, as recorded, for the first tests of a mutant and for more tests if it survives these.
BUDGETS = 20, 90
# Mutations that cannot be detected without a GPU: those that change only speed or the device of a tensor.
SPEED_ONLY = ("backends/triton/_tiles.py",)
SIZES = {  # block sizes, and thresholds between equivalent algorithms
    "BLOCK_BYTES", "COMMON_BLOCK_BYTES", "COPY_BYTES", "FEW", "GRAIN", "LONG", "MAX_THREADS", "MORE", "MOST", "SLAB",
    "TILE", "_MILD", "_SLICE",
}  # fmt: skip
SAME_WITHOUT = {
    "device",
    "num_warps",
    "num_stages",
    "eviction_policy",
    "enable_fp_fusion",
    "strict",
    "stacklevel",
    "non_blocking",
    "out",  # without it, the returned result has the same values
    "debug_barrier",  # Triton's interpreter runs one thread
}

SWAPPED = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is", "in": "not in",
    "not in": "in", "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "//", "**": "*", "@": "+", "<<": ">>",
    ">>": "<<", "&": "|", "|": "&", "^": "&", "and": "or", "or": "and", "min": "max", "max": "min", "amin": "amax",
    "amax": "amin", "minimum": "maximum", "maximum": "minimum",
}  # fmt: skip
OPERATOR = re.compile(r"is\s+not|not\s+in|\b(?:is|in|and|or)\b|<<|>>|<=|>=|==|!=|//|\*\*|[-+*/%@&|^<>]")

Place = ast.stmt | ast.expr | ast.keyword
Calls = dict[str, tuple[float, list[str]]]  # test -> its seconds, and the lines that it executes by function


class Mutant(NamedTuple):
    """One replacement: ``new`` replaces the bytes from ``start`` to ``end`` of a file; ``kind`` names the mutation."""

    file: str
    line: int
    start: int
    end: int
    new: str
    kind: str


class _Places(ast.NodeVisitor):
    """Collects the mutants of one file."""

    def __init__(self, file: str, source: bytes):
        self.file, self.source, self.found = file, source, list[Mutant]()
        self.lines = [0]
        for line in source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.within_function, self.returns_bool = False, False

    def start(self, node: Place) -> int:
        return self.lines[node.lineno - 1] + node.col_offset

    def end(self, node: Place) -> int:
        assert node.end_lineno is not None  # nodes from ast.parse always have an end
        assert node.end_col_offset is not None
        return self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.stmt | ast.expr) -> str:
        return self.source[self.start(node) : self.end(node)].decode()

    def add(self, kind: str, node: Place, new: str, start: int | None = None, end: int | None = None) -> None:
        start, end = self.start(node) if start is None else start, self.end(node) if end is None else end
        self.found.append(Mutant(self.file, self.source[:start].count(b"\n") + 1, start, end, new, kind))

    def operator(self, kind: str, left: ast.expr, right: ast.expr) -> None:
        """Swap the operator between two operands; parentheses next to it are kept."""
        start, end = self.end(left), self.start(right)
        between = self.source[start:end].decode()
        sign = OPERATOR.search(re.sub(r"#.*", lambda comment: " " * len(comment[0]), between))
        if sign:
            new = SWAPPED[" ".join(sign[0].split())]
            self.add(kind, left, between[: sign.start()] + new + between[sign.end() :], start, end)

    # Not mutated: texts, types, and error messages (the conditions of errors are mutated)

    def visit(self, node: ast.AST) -> None:
        if not isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
            super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name == "specimens":
            return
        outer = self.within_function, self.returns_bool
        self.within_function, self.returns_bool = True, isinstance(node.returns, ast.Name) and node.returns.id == "bool"
        for child in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(child)
        self.within_function, self.returns_bool = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for child in node.body:
            self.visit(child)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    # Mutated

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
            self.operator("comparison", left, right)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = any(
            isinstance(x, ast.JoinedStr) or isinstance(getattr(x, "value", 0), str) for x in (node.left, node.right)
        )
        types = isinstance(node.op, ast.BitOr) and not self.within_function
        if not texts and not types:
            self.operator("arithmetic", node.left, node.right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.operator("and / or", left, right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add("not dropped", node, f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add("constant", node, str(not node.value))
        elif isinstance(node.value, int | float):
            values = (node.value + 1, node.value - 1)
            for value in values if node.value not in values else (node.value * 2,):  # a float that + 1 does not change
                self.add("constant", node, repr(value) if value >= 0 else f"({value!r})")

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "TypeVar":
            return
        if name.startswith(("min", "max", "amin", "amax")) and name in SWAPPED:
            self.add("min / max", node.func, SWAPPED[name], self.end(node.func) - len(name))
        for keyword in node.keywords:
            if keyword.arg and keyword.arg not in SAME_WITHOUT:
                self.drop_argument(keyword)
        args = node.args[:1] if self.text(node.func) in ("tl.sum", "tl.max", "tl.min") else node.args
        for child in (node.func, *args, *(k.value for k in node.keywords if k.arg not in SAME_WITHOUT)):
            self.visit(child)

    def drop_argument(self, keyword: ast.keyword) -> None:
        start, end = self.start(keyword), self.end(keyword)
        after = re.match(rb"\s*,\s*", self.source[end:])
        before = re.search(rb",\s*$", self.source[:start])
        if after:
            end += after.end()
        elif before:
            start = before.start()
        self.add("argument dropped", keyword, "", start, end)

    def negate(self, node: ast.If | ast.IfExp | ast.While) -> None:
        self.add("condition negated", node.test, f"not ({self.text(node.test)})")
        self.generic_visit(node)

    visit_If = visit_IfExp = visit_While = negate  # noqa: N815

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and self.text(node.value) != "None":
            if not self.returns_bool:
                self.add("returns None", node.value, "None")
            elif not isinstance(node.value, ast.Constant):  # None acts like False, and constants are mutated elsewhere
                self.add("returns the opposite", node.value, f"not ({self.text(node.value)})")
            self.visit(node.value)

    def drop(self, node: ast.stmt) -> None:
        self.add("statement dropped", node, "pass")
        self.generic_visit(node)

    visit_AugAssign = drop  # noqa: N815

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "attr", "") not in SAME_WITHOUT:
            self.drop(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.targets[0], ast.Attribute | ast.Subscript):
            self.drop(node)
        elif not self.text(node.targets[0]).startswith("__") and self.text(node.targets[0]) not in SIZES:
            self.visit(node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Mutate index 0 to 1 only, because index -1 equals index 0 in a sequence of one element."""
        self.visit(node.value)
        if isinstance(node.slice, ast.Constant) and type(node.slice.value) is int and node.slice.value == 0:
            self.add("constant", node.slice, "1")
        else:
            self.visit(node.slice)


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """Return every mutant of a file, in the order of its lines."""
    places = _Places(file, source)
    places.visit(ast.parse(source))
    return sorted(places.found, key=lambda m: (m.start, m.new))


def mutated(source: bytes, m: Mutant) -> bytes:
    """Return the content of the file with the mutation applied."""
    return source[: m.start] + m.new.encode() + source[m.end :]


def chosen(found: dict[str, list[Mutant]], count: int, seed: int) -> list[Mutant]:
    """Choose ``count`` mutants: per file in proportion to its mutable lines, spread evenly over these lines."""
    lines = {file: sorted({m.line for m in mutants}) for file, mutants in found.items() if mutants}
    total = sum(map(len, lines.values()))
    result, owed = [], 0.0
    for file, numbers in sorted(lines.items()):
        owed += count * len(numbers) / total
        n = min(round(owed), len(numbers))
        owed -= n
        rng = random.Random(f"{seed} {file}")
        for k in range(n):
            line = rng.choice(numbers[k * len(numbers) // n : (k + 1) * len(numbers) // n])
            result.append(rng.choice([m for m in found[file] if m.line == line]))
    return result


def functions_of(source: bytes) -> dict[int, tuple[str, int]]:
    """Return (name of the function or method, number of the line within it) for each line of the functions of a file.

    Changes elsewhere in the file keep these numbers. Functions within functions have no names.
    """

    def found(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[int, tuple[str, int]]]:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
                for line in range(first, (node.end_lineno or first) + 1):
                    yield line, (prefix + node.name, line - first)
            elif isinstance(node, ast.ClassDef):
                yield from found(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.If | ast.Try):
                yield from found([*node.body, *node.orelse], prefix)

    return dict(found(ast.parse(source).body, ""))


@contextlib.contextmanager
def executed(package: str) -> Iterator[dict[str, set[int]]]:
    """Collect the lines that run by file of the package, including the lines that Dynamo traces."""
    lines = defaultdict[str, set[int]](set)

    def trace(frame: FrameType, *_: Any) -> Any:
        code, scope = frame.f_code, frame.f_locals
        if code.co_name == "set_current_loc" and scope["filename"].startswith(package):  # Dynamo traces a line
            lines[scope["filename"]].add(scope["lineno"])
        runs_often = code.co_flags & inspect.CO_OPTIMIZED  # in contrast to the code of a module or a class
        return trace_line if runs_often and code.co_filename.startswith(package) else None

    def trace_line(frame: FrameType, *_: Any) -> Any:
        lines[frame.f_code.co_filename].add(frame.f_lineno)
        return trace_line

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(None)


@contextlib.contextmanager
def record_rank(name: str) -> Iterator[None]:
    """Record one check in one of several processes for ``Recorder``."""
    package, folder = json.loads(os.environ["RECORD_RANKS"])
    began = time.process_time()
    with executed(package) as lines:
        yield
    record = time.process_time() - began, {file: sorted(lines[file]) for file in lines}
    Path(folder, f"{name}-{os.getpid()}").write_text(json.dumps(record))


class Recorder:
    """A plugin of pytest that writes, for each test that passes, its seconds and the lines that it executes."""

    def __init__(self, package: Path, out: Path):
        self.package, self.out, self.tests, self.failed = f"{package}/", out, dict[str, Any](), set[str]()
        self.functions, self.names = dict[str, dict[int, tuple[str, int]]](), dict[str, int]()
        self.ranks = tempfile.mkdtemp(dir=out.parent)
        os.environ["RECORD_RANKS"] = json.dumps([self.package, self.ranks])  # read by ``record_rank``

    def numbers(self, file: str, lines: set[int]) -> Iterator[int]:
        """Yield the numbers in ``names`` of each ``file:function:lines`` of a file."""
        if file not in self.functions:
            self.functions[file] = functions_of(Path(file).read_bytes())
        places = sorted(self.functions[file].get(line, ("", line)) for line in lines)
        for function, group in itertools.groupby(places, lambda place: place[0]):
            name = f"{file.removeprefix(self.package)}:{function}:{' '.join(str(line) for _, line in group)}"
            yield self.names.setdefault(name, len(self.names))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Record one test. Lines that run in other processes are missing, except those of ``record_rank``."""
        began = time.process_time()
        with executed(self.package) as lines:
            result = yield
        seconds = time.process_time() - began
        for mark in item.iter_markers("ranks"):
            for path in Path(self.ranks).glob(glob.escape("-".join(mark.args)) + "-*"):
                of_rank, by_file = json.loads(path.read_text())
                seconds += of_rank
                for file in by_file:
                    lines[file].update(by_file[file])
        own = [k for file in lines for k in self.numbers(file, lines[file])]
        self.tests[item.nodeid] = round(seconds, 2), own
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure."""
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the record."""
        passed = {name: self.tests[name] for name in self.tests if name not in self.failed}
        self.out.write_text(json.dumps({"names": [*self.names], "tests": passed}))


def judges_of(file: str, function: str, line: int, calls: Calls) -> tuple[list[str], list[str]]:
    """Return the first tests of a line, and the tests that run if the mutant survives these; see ``BUDGETS``.

    The first are the tests that execute the line, then those of its function: a case of each test, then a second one of
    each. Tests that execute little of the package come before the others. Code outside of functions, and functions that
    no recorded test calls, are judged by the tests of the whole file.
    """
    far = dict[str, int]()  # of each function with lines
    for name in {name for _, called in calls.values() for name in called if name.startswith(f"{file}:")}:
        _, other, lines = name.split(":")
        own = other == function
        far[name] = 0 if own and str(line) in lines.split() else 1 if own and function else 2
    of_test = {
        test: min((far[name] for name in called if name in far), default=3) for test, (_, called) in calls.items()
    }
    nearest = min(of_test.values(), default=3)
    cases = dict[tuple[int, str], list[str]]()
    for test, distance in of_test.items():
        if distance <= (1 if function and nearest < 2 else max(nearest, 2)):
            cases.setdefault((distance, test.partition("[")[0]), []).append(test)
    for tests in cases.values():
        random.Random(0).shuffle(tests)
    ranked = [(key[0], k, len(calls[t][1]), t) for key, tests in cases.items() for k, t in enumerate(tests)]
    first, more = list[str](), list[str]()
    for tests, budget in zip((first, more), BUDGETS, strict=True):
        seconds = 0.0
        for distance, *_, test in sorted(ranked):
            fits = seconds + calls[test][0] <= budget or not first
            if fits and test not in first and (tests is first or distance == nearest):
                tests.append(test)
                seconds += calls[test][0]
    return first, more


class Job(NamedTuple):
    """Tests to run on a file with content ``source``. Without a mutant, they are recorded, or must pass."""

    file: str
    source: bytes
    tests: tuple[str, ...]
    mutant: Mutant | None = None
    seconds: float = DEADLINE


class Workplace:
    """A copy of the source tree in which a separate process runs one job at a time."""

    def __init__(self, root: Path, folder: Path):
        self.folder, self.log, self.record = folder, folder.with_suffix(".log"), folder.with_suffix(".json")
        shutil.copytree(
            root, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "results", "demo-out", "*.egg-info")
        )
        self.job: Job | None = None

    def start(self, job: Job) -> None:
        """Start the job without waiting for it."""
        self.job, self.began = job, time.monotonic()
        self.path = self.folder / PACKAGE / job.file
        self.original = self.path.read_bytes()
        self.path.write_bytes(job.source)
        self.record.unlink(missing_ok=True)
        self.process = multiprocessing.get_context("fork").Process(target=self._run_tests, args=(job,))
        self.process.start()

    def _run_tests(self, job: Job) -> None:
        os.setsid()
        output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(self.folder)
        sys.path[:] = [str(self.folder), *(p for p in sys.path if p not in ("", str(ROOT)))]
        sys.modules.pop("tools")
        os.environ["PYTHONPATH"] = str(self.folder)  # for processes that tests start
        os.environ["STOP_AT_FIRST_FAILURE"] = "1"  # read by the distributed tests
        options = ["-q", "-rfE", "--tb=short", "--disable-warnings", "-p", "no:cacheprovider", "-p", "no:xdist"]
        plugins = [Recorder(self.folder / PACKAGE, self.record)] if job.mutant is None else []
        code = pytest.main(["-m", "not exhaustive", *job.tests, *options, *([] if plugins else ["-x"])], plugins)
        sys.stdout.flush()
        os._exit(code)

    def verdict(self) -> str | None:
        """Return the outcome of the job, or None while it runs."""
        assert self.job
        self.seconds = time.monotonic() - self.began
        if self.process.is_alive() and self.seconds < self.job.seconds:
            return None
        late = self.process.is_alive()
        if late and self.process.pid:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.path.write_bytes(self.original)
        self.job = None
        return "timeout" if late else "survived" if self.process.exitcode == pytest.ExitCode.OK else "killed"


def done(jobs: list[Job], places: list[Workplace], label: str) -> Iterator[tuple[Job, str, Workplace]]:
    """Yield (job, verdict, workplace) of each job when it ends."""
    waiting = jobs[::-1]
    with tqdm(total=len(jobs), desc=label, disable=None) as bar:
        while waiting or any(place.job for place in places):
            for place in places:
                job = place.job
                if job and (verdict := place.verdict()):
                    bar.update()
                    yield job, verdict, place
                if not place.job and waiting:
                    place.start(waiting.pop())
            time.sleep(0.02)


def recorded(root: Path, out: Path, patterns: Sequence[str], places: list[Workplace]) -> Calls:
    """Return the lines that each test executes. Files of tests that have changed since ``out`` are run again.

    A change of what they share changes their tests, and runs all again.
    """
    paths = sorted({path for pattern in patterns for path in root.glob(pattern)})
    shared = b"".join(p.read_bytes() for p in sorted(root.glob("tests/**/*.py")) if not p.name.startswith("test_"))
    hashes = {str(p.relative_to(root)): hashlib.sha256(shared + p.read_bytes()).hexdigest() for p in paths}
    old = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    calls = {record["path"]: record for record in old if hashes.get(record["path"]) == record["hash"]}
    init = (root / PACKAGE / "__init__.py").read_bytes()
    with out.open("a") as file:
        jobs = [Job("__init__.py", init, (path,)) for path in hashes if path not in calls]
        for (_, _, (path,), *_), verdict, place in done(jobs, places, "recorded"):
            if verdict != "survived":
                print(place.log.read_text()[-2000:], f"{path} has failed, and its failed tests are not used.", sep="\n")
            calls[path] = {"path": path, "hash": hashes[path], **json.loads(place.record.read_text())}
            print(json.dumps(calls[path]), file=file, flush=True)
    return {
        test: (seconds, [record["names"][k] for k in numbers])
        for record in calls.values()
        for test, (seconds, numbers) in record["tests"].items()
    }


def described(m: Mutant, source: bytes) -> dict[str, Any]:
    """Return the JSON record of a mutant; ``key`` stays the same until the file changes."""
    before, after = (text.decode().splitlines() for text in (source, mutated(source, m)))
    diff = [
        line
        for line in difflib.unified_diff(before, after, n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]
    key = hashlib.sha256(repr(m).encode() + source).hexdigest()[:16]
    return {"file": m.file, "line": m.line, "kind": m.kind, "diff": diff, "key": key}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    add = parser.add_argument
    add("--only", default="*", help="pattern of paths within the package, such as ops/token_nll.py or 'losses/*'")
    add("--count", type=int, default=220, help="number of mutants (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of the choice of mutants")
    add("-j", "--jobs", type=int, default=os.cpu_count(), help="number of mutants tested at the same time")
    add("--out", type=Path, default=Path("mutants.jsonl"), help="results, one line per mutant; these are not repeated")
    add("--calls", type=Path, default=Path("mutants-calls.jsonl"), help="the lines that each test executes")
    add("--tests", nargs="+", default=JUDGES, help="patterns of files of tests (default: JUDGES)")
    add("--root", type=Path, default=ROOT, help="source tree to mutate")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Test the mutants, write the results, and print the survivors."""
    options = arguments(argv)
    package = options.root / PACKAGE
    paths = (str(path.relative_to(package)) for path in sorted(package.rglob("*.py")))
    sources = {p: (package / p).read_bytes() for p in paths if fnmatch.fnmatch(p, options.only) and p not in SPEED_ONLY}
    picked = chosen({file: mutants_of(file, source) for file, source in sources.items()}, options.count, options.seed)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    known = {entry["key"]: entry for entry in map(json.loads, lines)}
    entries: dict[Mutant | None, dict[str, Any]] = {}
    for m in picked:
        entry = described(m, sources[m.file])
        entries[m] = known.get(entry["key"], entry)
    new = [m for m in picked if "verdict" not in entries[m]]
    for name in ("torch", "torch._dynamo", "numpy", "hypothesis", "triton.language") if new else ():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        places = [Workplace(options.root, Path(folder, str(k))) for k in range(options.jobs if new else 0)]
        calls = recorded(options.root, options.calls, options.tests, places) if new else {}
        jobs = dict[Mutant | None, list[Job]]()
        for m in new:
            content, function = mutated(sources[m.file], m), functions_of(sources[m.file]).get(m.line, ("", m.line))
            judges = judges_of(m.file, *function, calls)
            limits = [60 + 5 * sum(calls[name][0] for name in tests) for tests in judges]
            jobs[m] = [Job(m.file, content, tuple(t), m, limit) for t, limit in zip(judges, limits, strict=True) if t]
        failed = set()
        with options.out.open("a") as out:
            while first := [waiting.pop(0) for waiting in jobs.values() if waiting]:
                for job, verdict, place in done(first, places, "mutants"):
                    if verdict == "survived" and jobs[job.mutant]:
                        continue
                    jobs[job.mutant].clear()
                    entries[job.mutant] |= {"verdict": verdict, "seconds": round(place.seconds, 1)}
                    print(json.dumps(entries[job.mutant]), file=out, flush=True)
                    log = place.log.read_text()
                    if verdict == "killed":  # without a name if the tests were not even collected
                        failed |= {name for name in job.tests if f"\nFAILED {name}" in log} or set(job.tests)
        unbroken = [Job(new[0].file, sources[new[0].file], tuple(failed), new[0])] if failed else []
        for _, verdict, place in done(unbroken, places, "unbroken"):
            if verdict != "survived":
                raise SystemExit(f"{verdict} without a mutation:\n{place.log.read_text()[-3000:]}")
    report(list(entries.values()))
    return 0


def report(entries: list[dict[str, Any]]) -> None:
    """Print the survivors and the number of mutants per verdict."""
    for entry in entries:
        if entry["verdict"] == "survived":
            print(f"\n{PACKAGE}/{entry['file']}:{entry['line']} {entry['kind']}", *entry["diff"], sep="\n  ")
    verdicts = [entry["verdict"] for entry in entries]
    print(
        "\n" + ", ".join(f"{verdicts.count(v)} {v}" for v in ("killed", "timeout", "survived")), f"of {len(verdicts)}"
    )


if __name__ == "__main__":
    sys.exit(main())
