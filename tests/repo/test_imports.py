"""Imports go in one direction: losses, mtp, corruption -> ops -> rows -> backends -> triton.

The oracle is separate.
"""

import ast
import functools
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dllm_kernels"


@functools.cache
def statements(path):
    """Return (whether at the top level of the file, module, names imported from it) for every import of a file."""
    tree, found = ast.parse(path.read_text()), []
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(id(node) in top, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append((id(node) in top, node.module, [alias.name for alias in node.names]))
    return found


def imports(path):
    """Yield (module, whether at the top level of the file) for every module or name that a file imports."""
    for at_top, module, names in statements(path):
        yield from ((name, at_top) for name in (module, *(f"{module}.{name}" for name in names)))


def files(*parts):
    place = PACKAGE.joinpath(*parts)
    assert place.exists(), f"{place}: there would be nothing to check"
    return [place] if place.suffix == ".py" else sorted(place.rglob("*.py"))


def within(module, *packages):
    return any(module == p or module.startswith(p + ".") for p in packages)


def all_files():
    return sorted(PACKAGE.rglob("*.py"))


def layer(path):
    """Return the top-level folder or module of the file, or the entry of ``LAYERS`` for this file or folder in it."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "/".join(parts[:2]) if "/".join(parts[:2]) in SEPARATE else parts[0]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("packages", "layers"),
    [
        (("triton",), {"backends/triton"}),
        (("torch.distributed",), {"distributed", "integrations"}),
        (("nemo_automodel", "transformers", "dllm_kernels.integrations"), {"integrations"}),
    ],
    ids=["triton", "torch.distributed", "frameworks"],
)
def test_external_packages_are_imported_by_their_layers_only(packages, layers):
    found = {(layer(path), str(path), m) for path in all_files() for m, _ in imports(path) if within(m, *packages)}
    assert found, f"nobody imports {packages}: there would be nothing to check"
    assert not [(path, m) for name, path, m in found if name not in layers]


def home(module):
    """Return the file of a module of the package, or None for a name within a module or for another package."""
    base = ROOT.joinpath(*module.split("."))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.exists()), None)


@functools.cache
def import_graph():
    """Map every file of the package to the files that it imports, at the top or inside a function.

    ``from package import name`` imports the file of ``name`` if it is a module, otherwise the package's own file.
    """
    graph = {}
    for path in all_files():
        homes = set()
        for _, module, names in statements(path):
            if within(module, "dllm_kernels"):
                homes |= {home(f"{module}.{name}") or home(module) for name in names} if names else {home(module)}
        graph[path] = homes - {path, None}
    return graph


INTERFACE = (
    "_transform",
    "_dtypes",
    "_truncation",
    "_interface",
    "_stats_interface",
    "_divergence",
    "_divergence_kinds",
)
NOISE = ("_philox", "_rules", "_noise", "_gumbel", "_seeds")
# From the bottom up. A file imports from its own layer and from lower ones. CONTRIBUTING.md describes each layer.
LAYERS = (
    ("_graph",),
    ("_checks",),
    ("head/_module",),
    tuple(f"corruption/{name}" for name in NOISE),
    tuple(f"rows/{name}" for name in INTERFACE),
    ("backends/triton",),
    ("backends/torch",),
    ("rows/_chain_rule", "rows/_primitives"),
    ("rows", "backends", "corruption/_corrupt", "corruption/_topk"),
    ("distributed",),
    ("head", "corruption/_gumbel_topk"),
    ("ops",),
    ("losses",),
    ("mtp", "corruption", "collate"),
    ("policy",),
    ("deferred",),
    ("fused", "generate"),
    ("__init__",),
    ("integrations", "report"),
)
SEPARATE = {name for names in LAYERS for name in names if "/" in name}


def layer_index(path):
    return next(i for i, names in enumerate(LAYERS) if layer(path) in names)


def test_no_file_imports_from_a_higher_layer():
    up = [(a, b) for a, imported in import_graph().items() for b in imported if layer_index(b) > layer_index(a)]
    assert not up


def test_no_import_cycles():
    """Includes lazy imports.

    Files that import no other file are removed repeatedly; any remaining file is in a cycle.
    """
    remaining = dict(import_graph())
    while ready := [path for path, imported in remaining.items() if not imported & remaining.keys()]:
        for path in ready:
            del remaining[path]
    assert not {path.name: [p.name for p in imported & remaining.keys()] for path, imported in remaining.items()}


def test_contributing_names_the_layers_in_their_order():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    layout = text[text.index("dllm_kernels/") : text.index("reference/")]
    named = [name for names in reversed(LAYERS) for name in names if "/" not in name]
    places = [layout.index(f"  {name}") for name in named]
    assert places == sorted(places)


ROOMS = ("reference", "dllm_kernels", "benchmarks", "tools", "examples", "tests")


@pytest.mark.everyday(2)
@pytest.mark.parametrize("room", ROOMS[:-2])
def test_the_package_imports_no_folder_beside_it_and_benchmarks_no_tool(room):
    above = ROOMS[ROOMS.index(room) + 1 :]
    sources = sorted((ROOT / room).rglob("*.py"))
    assert sources
    assert not [(str(path), m) for path in sources for m, _ in imports(path) if within(m, *above)]


def test_row_ops_and_corruption_share_only_random_numbers():
    noise = [f"dllm_kernels.corruption.{name}" for name in NOISE]
    for path in files("corruption"):
        assert not [m for m, _ in imports(path) if within(m, "dllm_kernels.rows", "dllm_kernels.backends.torch")], path
    for path in (*files("rows"), *files("backends", "torch")):
        of_corruption = [m for m, _ in imports(path) if within(m, "dllm_kernels.corruption")]
        assert all(m == "dllm_kernels.corruption" or within(m, *noise) for m in of_corruption), path


def test_kernels_and_the_code_of_dtensors_are_imported_lazily():
    folders = ("ops", "rows", "corruption", "backends", "_graph", "_checks")
    for path in (path for folder in folders for path in files(folder)):
        for module, at_top in imports(path):
            assert not (at_top and within(module, "dllm_kernels.distributed")), (path, module)
            if layer(path) != "backends/triton":
                assert not (at_top and within(module, "dllm_kernels.backends.triton")), (path, module)


def test_kernels_import_only_each_other_their_interface_and_random_numbers():
    interface = (*(f"rows.{name}" for name in INTERFACE), *(f"corruption.{name}" for name in NOISE))
    allowed = [f"dllm_kernels.{module}" for module in ("backends.triton", "_checks._backend", *interface)]
    for path in files("backends", "triton"):
        for module, _ in imports(path):
            assert (
                not within(module, "dllm_kernels")
                or module in ("dllm_kernels.corruption", "dllm_kernels.rows")
                or (within(module, *allowed))
            ), (path, module)


def test_losses_and_similar_modules_import_nothing_below_ops():
    for path in all_files():
        if layer(path) in ("losses", "mtp", "corruption", "collate", "policy"):
            for module, at_top in imports(path):
                assert not within(module, "dllm_kernels.backends.triton"), (path, module)
                if within(module, "dllm_kernels.distributed"):
                    assert not at_top, (path, module)


def test_kernels_use_no_modules():
    for path in files("backends", "triton"):
        assert "nn.Module" not in path.read_text(), path


def test_the_oracle_imports_nothing_of_the_package():
    allowed = {"torch", "reference", *sys.stdlib_module_names}
    for path in sorted((ROOT / "reference").rglob("*.py")):
        for module, _ in imports(path):
            assert module.split(".")[0] in allowed, (path, module)


PRIVATE = re.compile(r"dllm_kernels(\.\w+)*\.(_[a-z]\w*|(backends|deferred|head|rows)\b)(\.\w+)*")


def test_only_tests_of_kernels_and_internals_import_private_modules():
    """The other tests hold for any implementation of the public functions."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.relative_to(ROOT / "tests").parts[0] not in ("kernels", "internals", "support"):
            assert not [module for module, _ in imports(path) if PRIVATE.fullmatch(module)], path


FORKED = """
import gc, os, sys, time
start = time.process_time()
import torch
TORCH = time.process_time() - start
gc.freeze()  # torch's objects: looking through them is not what an import costs, and copies their pages in a child
for code in sys.argv[1:]:
    child = os.fork()
    if not child:
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit("the first of these that failed:\\n" + code)
"""


def run(*codes):
    """Return the output of programs, run in turn in processes that have imported only torch (in TORCH seconds)."""
    done = subprocess.run([sys.executable, "-c", FORKED, *codes], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from dllm_kernels import DFlashDecayLoss, MDLMCrossEntropyLoss, corrupt_blockwise
ids, ones = torch.randint(0, 9, (2, 8)), torch.ones(2, 8)
noisy, noise, p = corrupt_blockwise(ids, ones, 9, block_size=4)
logits = torch.randn(2, 8, 10, requires_grad=True)
MDLMCrossEntropyLoss()(logits, ids, noise, p, ones).total_loss.backward()
hidden, head = torch.randn(2, 8, 4, requires_grad=True), torch.randn(10, 4)
DFlashDecayLoss().forward_fused(hidden, head, ids, ones).total_loss.backward()
try:
    MDLMCrossEntropyLoss(backend="triton")(logits, ids, noise, p, ones)
except ValueError as error:
    assert "triton is not installed" in str(error), error
else:
    raise AssertionError("an explicit choice of triton was switched silently")
"""

LOADED = """
import sys, torch
before = set(sys.modules)
import dllm_kernels
print(" ".join(sorted({m.split(".")[0] for m in set(sys.modules) - before})))
print({"torch.distributed.tensor", "dllm_kernels.deferred._head"} & set(sys.modules) - before)
"""

IMPORTED = """
import gc, sys, time, torch
sys.pycache_prefix, sys.dont_write_bytecode = {folder!r}, False
gc.disable()
start = time.process_time()
import dllm_kernels
print(time.process_time() - start, TORCH)
"""


@pytest.mark.exhaustive
def test_the_import_is_lazy_and_fast(tmp_path):
    """Importing loads and needs neither Triton nor a framework, and takes under a twentieth of torch's import time.

    The time is that of imports after the first one, because Python caches bytecode. It is processor time, so that other
    processes do not count, without the garbage collector, which visits all objects of torch and starts after a number
    of allocations. It is some 40 ms if torch takes 1 s; a slow or shared processor affects both. The time of torch is
    the median of three processes, because one import may run while the processor is slow or fast. A share above the
    bound is measured again.
    """
    tops, loaded = run(LOADED, WITHOUT_TRITON).splitlines()
    assert not {"triton", "transformers", "nemo_automodel"} & set(tops.split())
    assert loaded == "set()"
    shares = [share_of_torch(tmp_path)]
    shares += [share_of_torch(tmp_path) for _ in range(3) if min(shares) >= 0.05]
    assert min(shares) < 0.05, shares


def share_of_torch(folder):
    imported = IMPORTED.format(folder=str(folder))
    times = [[*map(float, line.split())] for _ in range(3) for line in run(*[imported] * 6).splitlines()]
    assert len(times) == 18
    ours, torchs = zip(*times, strict=True)
    return min(ours) / statistics.median(torchs)


PRIVATE_OF_TORCH = re.compile(r"(?<![.\w])torch(\.\w+)*\.(_[a-z]\w*|_C)\b|Tensor\._make|\._cdata\b")


def test_one_file_reads_private_names_of_torch():
    """A framework's recompilation (``torch._dynamo`` in ``sys.modules``) is looked up by name, not imported."""
    for path in all_files():
        if path != PACKAGE / "_graph" / "_private.py":
            code = [line.split("#")[0] for line in ast.unparse(ast.parse(path.read_text())).splitlines()]
            found = [line for line in code if PRIVATE_OF_TORCH.search(line.replace("torch._dynamo", ""))]
            assert not found, path
