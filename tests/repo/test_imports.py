"""Imports go in one direction: losses, mtp, corruption -> ops -> _core -> _backends -> triton; the oracle is apart."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dllm_kernels"


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


def imports(path):
    """(module, whether at the top level of the file) for every import of a file."""
    tree = parsed(path)
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module, id(node) in top
            yield from ((f"{node.module}.{alias.name}", id(node) in top) for alias in node.names)


def files(*parts):
    place = PACKAGE.joinpath(*parts)
    assert place.exists(), f"{place}: there would be nothing to check"
    return [place] if place.suffix == ".py" else sorted(place.rglob("*.py"))


def within(module, *packages):
    return any(module == p or module.startswith(p + ".") for p in packages)


def everything():
    return sorted(PACKAGE.rglob("*.py"))


def layer(path):
    """The folder or module at the top of the package; a backend, or a module of their interface, is one of its own."""
    first, *others = path.relative_to(PACKAGE).parts
    return f"{first}/{others[0]}".removesuffix(".py") if first == "_backends" else first.removesuffix(".py")


@pytest.mark.parametrize(
    ("packages", "layers"),
    [
        (("triton",), {"_backends/triton"}),
        (("torch.distributed",), {"distributed", "integrations"}),
        (("nemo_automodel", "transformers", "dllm_kernels.integrations"), {"integrations"}),
    ],
    ids=["triton", "torch.distributed", "frameworks"],
)
def test_who_imports_what_is_outside(packages, layers):
    found = {(layer(path), str(path), m) for path in everything() for m, _ in imports(path) if within(m, *packages)}
    assert found, f"nobody imports {packages}: there would be nothing to check"
    assert not [(path, m) for name, path, m in found if name not in layers]


def home(module):
    """The file of a module of the package, or None: of a name that a module holds, or of others' packages."""
    base = ROOT.joinpath(*module.split("."))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.exists()), None)


def import_graph():
    """Every file of the package with the files that it imports, at the top or inside a function.

    ``from package import name`` is an import of the package's own file only where name is no module of it.
    """
    graph = {}
    for path in everything():
        homes = set()
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import):
                homes |= {home(alias.name) for alias in node.names if within(alias.name, "dllm_kernels")}
            elif isinstance(node, ast.ImportFrom) and within(node.module, "dllm_kernels"):
                homes |= {home(f"{node.module}.{alias.name}") or home(node.module) for alias in node.names}
        graph[path] = homes - {path, None}
    return graph


# From the ground up; a file imports from its own layer and from those below. CONTRIBUTING.md says what each is for.
LAYERS = (
    ("_utils",),
    ("_random",),
    tuple(f"_backends/{name}" for name in ("_rows", "_row_stats", "_divergence", "_backend", "__init__")),
    ("_backends/triton",),
    ("_backends/torch",),
    ("_backends/_primitives",),
    ("_core", "_corruption"),
    ("ops",),
    ("distributed",),
    ("losses",),
    ("mtp", "corruption", "collate"),
    ("policy",),
    ("__init__",),
    ("integrations", "report"),
)


def floor(path):
    return next(i for i, names in enumerate(LAYERS) if layer(path) in names)


def test_no_import_runs_up():
    up = [(a, b) for a, imported in import_graph().items() for b in imported if floor(b) > floor(a)]
    assert not up


def test_no_circle_of_imports():
    """Lazy imports included: what is left when files that import nothing more are taken away, again and again."""
    left = import_graph()
    while ready := [path for path, imported in left.items() if not imported & left.keys()]:
        for path in ready:
            del left[path]
    assert not {path.name: [p.name for p in imported & left.keys()] for path, imported in left.items()}


def test_contributing_names_the_layers_in_their_order():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    layout = text[text.index("dllm_kernels/") : text.index("reference/")]
    named = [name for names in reversed(LAYERS) for name in names if not name.startswith("_backends/_")]
    places = [layout.index(f"  {name}") for name in named]
    assert places == sorted(places)


ROOMS = ("reference", "dllm_kernels", "benchmarks", "tools", "examples", "tests")


@pytest.mark.parametrize("room", ROOMS[:-2])
def test_the_package_knows_no_room_around_it_and_benchmarks_no_tool(room):
    above = ROOMS[ROOMS.index(room) + 1 :]
    sources = sorted((ROOT / room).rglob("*.py"))
    assert sources
    assert not [(str(path), m) for path in sources for m, _ in imports(path) if within(m, *above)]


def test_row_ops_and_corruption_do_not_import_each_other():
    row_ops = ("dllm_kernels._core", "dllm_kernels._backends.torch")
    for path in files("_corruption"):
        assert not [m for m, _ in imports(path) if within(m, *row_ops)], path
    for path in (*files("_core"), *files("_backends", "torch")):
        assert not [m for m, _ in imports(path) if within(m, "dllm_kernels._corruption")], path
        random = [m for m, _ in imports(path) if within(m, "dllm_kernels._random")]
        assert bool(random) == (path.name == "_sample.py"), path  # draws tokens


def test_kernels_are_imported_lazily_and_distributed_is_not_named_below_it():
    folders = ("ops", "_core", "_corruption", "_backends", "_random", "_utils")
    for path in (path for folder in folders for path in files(folder)):
        for module, at_top in imports(path):
            assert not within(module, "dllm_kernels.distributed"), (path, module)
            if layer(path) != "_backends/triton":
                assert not (at_top and within(module, "dllm_kernels._backends.triton")), (path, module)


def test_kernels_import_only_each_other_their_interface_random_numbers_and_the_dtype_of_sums():
    of_backends = [f"_backends.{name}" for name in ("triton", "_backend", "_rows", "_row_stats", "_divergence")]
    modules = (*of_backends, "_random", "_utils._transform", "_utils._dtypes")
    allowed = [f"dllm_kernels.{module}" for module in modules]
    for path in files("_backends", "triton"):
        for module, _ in imports(path):
            assert not within(module, "dllm_kernels") or within(module, *allowed), (path, module)


def test_losses_and_their_like_do_not_reach_past_ops():
    for path in everything():
        if layer(path) in ("losses", "mtp", "corruption", "collate", "policy"):
            for module, at_top in imports(path):
                assert not within(module, "dllm_kernels._backends.triton"), (path, module)
                if within(module, "dllm_kernels.distributed"):
                    assert not at_top, (path, module)


def test_kernels_know_no_modules():
    for path in files("_backends", "triton"):
        assert "nn.Module" not in path.read_text(), path


def test_the_oracle_stands_alone():
    allowed = {"torch", "reference", *sys.stdlib_module_names}
    for path in sorted((ROOT / "reference").rglob("*.py")):
        for module, _ in imports(path):
            assert module.split(".")[0] in allowed, (path, module)


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
    """What programs print, run in turn, each in a process that has imported torch (in TORCH seconds) alone."""
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
print("torch.distributed.tensor" in set(sys.modules) - before)
"""

IMPORTED = """
import sys, time, torch
sys.pycache_prefix, sys.dont_write_bytecode = {folder!r}, False
start = time.process_time()
import dllm_kernels
print((time.process_time() - start) / TORCH)
"""


def test_what_importing_loads_and_takes(tmp_path):
    """Neither Triton nor a framework is loaded, nor are they needed; it takes under a twentieth of what torch takes.

    That from the second time on, as Python caches bytecode, in processor time: what others do meanwhile is not counted.
    Some 50 ms where torch takes 1 s; a processor that is slow or shared is so for both.
    """
    imported = IMPORTED.format(folder=str(tmp_path))
    tops, distributed, *shares = run(LOADED, *[imported] * 8, WITHOUT_TRITON).splitlines()
    assert not {"triton", "transformers", "nemo_automodel"} & set(tops.split())
    assert distributed == "False"
    assert min(map(float, shares)) < 0.05
    assert len(shares) == 8
