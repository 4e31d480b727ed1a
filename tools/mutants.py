"""Mutation testing: break the package in one place at a time and run its tests. See ``python -m tools.mutants --help``.

Each mutant is tested in a copy of the source tree. The tests are the everyday tests of its module (``JUDGES``). They
run in a fork of this process, which has already imported torch. A mutant survives if no test fails. Then either a test
is missing, or the mutant is equivalent to the original.
"""

import argparse
import ast
import contextlib
import difflib
import fnmatch
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
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

EVERY_ROW_OP = (
    "errors graph token_nll linear_nll extra transform logits_dtype row_stats"
    " row_objective soft_embedding divergence second_order compile -k 'not triton'"
)
# Path within the package -> stems of the judges and options of pytest, with fast tests first. `token_nll` stands for
# every tests/*/test_token_nll.py but that of the oracle. The first matching entry is used. If no entry matches, the
# tests of the op whose name ends with the stem of the file are used, and those of its OpCase in OF_CASES. For other
# files, the tests of every op are used, or those with the stem of the file.
OF_CASES = "errors cases flags num_active"
JUDGES = (
    ("*sample.py", "linear_sample distributed -k sample"),
    ("*_noise.py", "linear_sample"),
    (
        "backends/triton/*corruption*",
        "corruption padding corruption_levels -k 'triton or kernel or count or long or product or registers'",
    ),
    ("backends/triton/gumbel_topk.py", "gumbel_topk padding -k triton"),
    ("backends/triton/_aligned.py", "gumbel_topk corruption -k triton"),
    ("backends/triton/_select.py", "gumbel_topk corruption -k triton"),
    ("backends/triton/_philox.py", "corruption linear_sample -k 'triton or kernel or bits'"),
    ("policy/views.py", "views -k 'not triton'"),
    ("policy/objective.py", "objective loss"),
    ("policy/loss.py", "loss"),
    ("policy/*", "views objective loss"),
    ("*/_transform.py", "flags transform"),
    ("rows/_logits.py", "linear_logits torch_func token_nll -k 'not triton'"),
    ("backends/torch/_workers.py", "backends"),
    ("backends/triton/linear_nll*", "row_kernels linear_nll -k 'row or triton'"),
    ("backends/triton/divergence.py", "divergence_kernel"),
    ("distributed/*", "distributed head -k 'two_processes or four_processes or without_a_process_group or divided'"),
    ("rows/_rest.py", "topk_divergence -k 'not triton'"),
    ("*divergence*", "divergence cases"),
    ("backends/triton/row_weights.py", "row_weights losses -k 'triton or kernel'"),
    ("backends/triton/row_stats.py", "row_stats row_objective soft_embedding -k triton"),
    ("backends/triton/_*", "row_kernels token_nll linear_nll row_stats transform -k 'kernel or triton'"),
    ("backends/triton/token_nll.py", "row_kernels token_nll linear_nll -k 'kernel or triton'"),
    ("head/_lora.py", "nemo_lora transformers fused_head_programs -k 'nemo_lora or head or adapter or copy'"),
    ("head/_in_head.py", "generate trl -k 'not trainers'"),
    ("deferred/*", "deferred fused_head fused_head_programs"),
    ("fused.py", "fused_head fused_head_programs"),
    ("integrations/names.py", "names"),
    ("integrations/_recipe.py", "nemo_noise"),
    ("integrations/nemo*", "nemo nemo_lora"),
    ("integrations/_hosts.py", "nemo nemo_noise speculators"),
    ("integrations/speculators.py", "speculators"),
    ("integrations/trl.py", "trl trl_pairs"),
    ("integrations/_attention.py", "integrations transformers -k 'every_token or causal or trace or mixes'"),
    ("integrations/transformers*", "integrations transformers"),
    ("collate.py", "flags collate"),
    ("mtp*", "flags mtp errors"),
    ("*gumbel*", "gumbel_topk corruption"),
    ("*philox*", "corruption default_device gumbel_topk"),
    ("corruption/_topk.py", "gumbel_topk corruption_levels"),
    ("corruption/_rules.py", "corruption corruption_levels corruption_compile"),
    ("corruption/_seeds.py", "sources corruption default_device"),
    ("*corrupt*", "flags sources mask_values corruption padding corruption_levels corruption_statistics gumbel_topk"),
    ("losses/draft_distillation.py", "draft_distillation draft_pairs errors losses any_bad_argument -k 'not triton'"),
    ("losses/draft_sampling.py", "draft_sampling draft_blocks any_bad_argument losses"),
    (
        "losses/*",
        "flags mask_values target_range errors api reduction losses draft_distillation draft_blocks draft_pairs"
        " laws packed any_bad_argument",
    ),
    ("_graph/_changing.py", "compile corruption_compile"),
    ("_graph/_custom_ops.py", "graph compile corruption_compile"),
    ("_checks/_target_range.py", "target_range mask_values errors"),
    ("_checks/_compiled.py", "compile -k check"),
    ("_graph/_plain.py", "without_values torch_func mask_values compile"),
    ("head/_module.py", "head losses"),
    ("head/_parameters.py", "mtp"),
    ("ops/token_log_probs.py", "errors token_log_probs"),
    ("backends/torch/_nll.py", "token_nll linear_nll backends cases -k 'not triton'"),
    ("backends/torch/_blocks.py", "backends losses token_nll row_stats -k 'not triton'"),
    ("rows/_chain_rule.py", "token_nll row_stats soft_embedding -k 'not triton'"),
    ("*_stats.py", "flags errors row_stats cases token_log_probs row_objective soft_embedding -k 'not triton'"),
    ("rows/_fused.py", "second_order flags linear_nll cases graph -k 'not triton'"),
    ("rows/_kept_gradients.py", "second_order linear_nll row_objective divergence cases compile -k 'not triton'"),
    ("_graph/_opaque.py", "without_values graph token_nll -k 'not triton'"),
    ("rows/_active_rows.py", "linear_nll num_active cases rows -k 'not triton'"),
    (
        "_checks/__init__.py",
        "flags target_range errors mask_values row_objective extra gumbel_topk transform losses linear_nll"
        " -k 'not triton'",
    ),
    ("rows/_chunks.py", "linear_nll extra compile -k 'not triton'"),
    ("*soft_embedding.py", "soft_embedding distributed -k 'soft_embedding and not triton'"),
    ("ops/*nll.py", "flags errors token_nll linear_nll cases num_active extra graph transform compile -k 'not triton'"),
)
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


def judges_of(file: str) -> list[str]:
    """Return the arguments of pytest for a path within the package."""
    stem, folder = Path(file).stem.lstrip("_"), file.partition("/")[0]
    of_op = [path.stem.removeprefix("test_") for path in ROOT.glob(f"tests/ops/test_*{stem}.py")]
    if len(of_op) == 1 and folder in ("ops", "rows", "backends"):
        other = "" if file.startswith("backends/triton/") else " and not triton"
        usual = f"{of_op[0]} {OF_CASES} -k '{of_op[0]}{other}'"
    else:
        usual = EVERY_ROW_OP if folder in ("_graph", "_checks", "rows", "backends") else stem
    arguments = next((arguments for pattern, arguments in JUDGES if fnmatch.fnmatch(file, pattern)), usual)
    stems, *options = re.split("(?= -k )", arguments)
    found = [path for stem in stems.split() for path in sorted(ROOT.glob(f"tests/*/test_{stem}.py"))]
    paths = [str(path.relative_to(ROOT)) for path in found if path.parent.name != "reference"]
    return [*paths, *shlex.split("".join(options))]


class Job(NamedTuple):
    """Tests to run on a file with content ``source``. Without a mutant, the job checks that these tests pass."""

    file: str
    source: bytes
    tests: tuple[str, ...]
    mutant: Mutant | None = None


class Workplace:
    """A copy of the source tree in which a separate process runs one job at a time."""

    def __init__(self, root: Path, folder: Path):
        self.folder, self.log = folder, folder.with_suffix(".log")
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
        self.process = multiprocessing.get_context("fork").Process(target=self._run_tests, args=(job.tests,))
        self.process.start()

    def _run_tests(self, tests: Sequence[str]) -> None:
        os.setsid()
        output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(self.folder)
        sys.path[:] = [str(self.folder), *(p for p in sys.path if p not in ("", str(ROOT)))]
        sys.modules.pop("tools")
        os.environ["PYTHONPATH"] = str(self.folder)  # for processes that tests start
        os.environ["STOP_AT_FIRST_FAILURE"] = "1"  # read by the distributed tests
        options = ["-x", "-q", "--tb=short", "--disable-warnings", "-p", "no:cacheprovider", "-p", "no:xdist"]
        code = pytest.main(["-m", "not exhaustive", *tests, *options])
        sys.stdout.flush()
        os._exit(code)

    def verdict(self, longest: float) -> str | None:
        """Return the outcome of the job, or None while it runs."""
        self.seconds = time.monotonic() - self.began
        if self.process.is_alive() and self.seconds < longest:
            return None
        late = self.process.is_alive()
        if late and self.process.pid:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.path.write_bytes(self.original)
        self.job = None
        return "timeout" if late else "survived" if self.process.exitcode == pytest.ExitCode.OK else "killed"


def done(jobs: list[Job], places: list[Workplace], longest: dict[tuple[str, ...], float], label: str) -> Iterator[Any]:
    """Yield (job, verdict, workplace) of each job when it ends."""
    waiting = jobs[::-1]
    with tqdm(total=len(jobs), desc=label, disable=None) as bar:
        while waiting or any(place.job for place in places):
            for place in places:
                job = place.job
                if job and (verdict := place.verdict(longest.get(job.tests, DEADLINE))):
                    bar.update()
                    yield job, verdict, place
                if not place.job and waiting:
                    place.start(waiting.pop())
            time.sleep(0.02)


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
    add(
        "--out",
        type=Path,
        default=Path("mutants.jsonl"),
        help="results, one line per mutant; these are not tested again",
    )
    add("--tests", help="tests to run instead of JUDGES, such as 'tests/mtp/test_mtp.py -k pipeline'")
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
    jobs, entries = [], {}
    for m in picked:
        entry = described(m, sources[m.file])
        entries[m] = known.get(entry["key"], entry)
        if entry["key"] not in known:
            tests = shlex.split(options.tests) if options.tests else judges_of(m.file)
            jobs.append(Job(m.file, mutated(sources[m.file], m), tuple(tests), m))
    for name in ("torch", "torch._dynamo", "numpy", "hypothesis", "triton.language") if jobs else ():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        places = [Workplace(options.root, Path(folder, str(k))) for k in range(options.jobs)]
        longest: dict[tuple[str, ...], float] = {}
        unbroken = {job.tests: Job(job.file, sources[job.file], job.tests) for job in jobs}
        for job, verdict, place in done(list(unbroken.values()), places, longest, "unbroken"):
            if verdict != "survived":
                raise SystemExit(
                    f"{shlex.join(job.tests)}: {verdict} without a mutation\n{place.log.read_text()[-3000:]}"
                )
            longest[job.tests] = 30 + 3 * place.seconds
        with options.out.open("a") as out:
            for job, verdict, place in done(jobs, places, longest, "mutants"):
                entries[job.mutant] |= {"verdict": verdict, "seconds": round(place.seconds, 1)}
                print(json.dumps(entries[job.mutant]), file=out, flush=True)
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
