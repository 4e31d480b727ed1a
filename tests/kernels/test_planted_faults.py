"""Faults planted into kernels, which the executor of PTX finds: ``make ptx`` runs these tests."""

import contextlib
import importlib.util
import inspect
import pkgutil
import re

import pytest
import torch

from tests.conftest import EXECUTED

if not EXECUTED:
    pytest.skip("kernels are executed as PTX by `make ptx`", allow_module_level=True)

import triton
import triton.language as tl

from dllm_kernels import ops
from dllm_kernels.backends import triton as kernels
from dllm_kernels.backends.triton import _math
from tests.kernels.test_ptx import fault
from tools.ptx import memory

V, BLOCK = 1003, 1024


@triton.jit
def _beyond(x_ptr, out_ptr, n, WRONG: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n + WRONG, other=0.0)
    tl.store(out_ptr + i, x, mask=i < n)


@triton.jit
def _mask(x_ptr, out_ptr, n, WRONG: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, x, mask=(i < n) | WRONG)


@triton.jit
def _in_place(x_ptr, out_ptr, n, WRONG: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.load(x_ptr)
    if not WRONG:
        tl.debug_barrier()
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(x_ptr + i, x - first, mask=i < n)


@triton.jit
def _neighbours(x_ptr, out_ptr, n, WRONG: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * (BLOCK // 4 - WRONG) + tl.arange(0, BLOCK // 4)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, x + tl.program_id(0), mask=i < n)


@triton.jit
def _one_place(x_ptr, out_ptr, n, WRONG: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + (0 * i if WRONG else i), i.to(tl.float32), mask=i < n)


@triton.jit
def _sum_of_products(x_ptr, out_ptr, n, WRONG: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK // 8)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr, tl.sum(x * (x + 1), 0) if WRONG else _math.total(x * (x + 1)))


@triton.jit
def _scratch(x_ptr, out_ptr, n, WRONG: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    if not WRONG:
        tl.store(out_ptr + i, i.to(tl.float32), mask=i < n)
    tl.store(x_ptr + i, tl.load(out_ptr + i, mask=i < n), mask=i < n)


FAULTS = {
    _beyond: "outside of the tensor", _mask: "outside of the tensor", _in_place: "any order", _neighbours: "any order",
    _one_place: "different values", _sum_of_products: "different values", _scratch: "nobody wrote",
}  # fmt: skip
OLDER = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
of_newer = pytest.mark.skipif(
    OLDER, reason="older compilers let one thread store the sum, or do not fuse the products into it"
)


@pytest.mark.parametrize(
    "kernel", [pytest.param(k, id=k.__name__, marks=of_newer if k is _sum_of_products else ()) for k in FAULTS]
)
def test_a_planted_fault_is_found(kernel, monkeypatch):
    """The same kernel without the fault passes."""
    monkeypatch.setattr(memory, "FIRST_STAYS", False)
    torch.manual_seed(0)
    for wrong in (False, True):
        x, out = torch.randn(V + 24)[:V], torch.empty(V + 24)[:V]
        with fault(FAULTS[kernel]) if wrong else contextlib.nullcontext():
            programs = 4 if kernel is _neighbours else 1
            kernel[(programs,)](x, out, V, WRONG=wrong, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=True)


def of_rows(function, *leaves, **options):
    """Call an op on rows that cover a tile and a part of one, and its backward pass."""
    leaves = [leaf.requires_grad_() for leaf in leaves]
    function(*(leaf * 1 for leaf in leaves), **options, backend="triton")[0].sum().backward()


HIDDEN, HEAD = torch.randn(3, 8), torch.randn(V, 8)
IDS, WEIGHTS = torch.tensor([0, 5, V - 1]), torch.tensor([1.0, 2.0, 0.5])
# Kernels with a barrier, and a call that needs it. In the kernels with keys in memory, the barriers of a reduction
# would do, too. ``tests/support/mock_gpu_checks.py`` looks for theirs in the code.
KEYS_IN_MEMORY = {"_corrupt_topk_long", "_gumbel_topk_long"}
WITH_BARRIER = {
    "_token_nll_bwd": lambda: of_rows(ops.token_nll, torch.randn(3, V), targets=IDS, inplace_backward=True),
    "_linear_nll_rows": lambda: of_rows(ops.weighted_linear_nll, HIDDEN, HEAD, targets=IDS, weights=WEIGHTS),
    "_row_stats_bwd": lambda: of_rows(ops.linear_row_stats, HIDDEN, HEAD, ids=IDS),
    "_divergence_rows": lambda: of_rows(
        lambda h, w, **o: ops.linear_divergence(h, w, HIDDEN.detach(), WEIGHTS, kind={"ce": 0.5}, **o), HIDDEN, HEAD,
        targets=IDS,
    ),
}  # fmt: skip


def barriers():
    """Yield (module, kernel, position in the source) of each barrier in the package."""
    for info in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{info.name}")
        source = inspect.getsource(module)
        for found in re.finditer(r"tl\.debug_barrier\(\)", source):
            yield module, re.findall(r"^def (\w+)", source[: found.start()], re.MULTILINE)[-1], found


def test_every_barrier_of_the_package_is_removed_once():
    assert sorted(kernel for _, kernel, _ in barriers()) == sorted({*WITH_BARRIER} | KEYS_IN_MEMORY)


@pytest.mark.parametrize(
    ("module", "kernel", "barrier"), [pytest.param(*b, id=b[1]) for b in barriers() if b[1] in WITH_BARRIER]
)
def test_a_barrier_that_is_removed_is_missed(module, kernel, barrier, tmp_path, monkeypatch):
    source = inspect.getsource(module)
    path = tmp_path / "without.py"
    path.write_text(source[: barrier.start()] + "pass" + source[barrier.end() :])
    spec = importlib.util.spec_from_file_location("without", path)
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)
    monkeypatch.setattr(module, kernel, getattr(without, kernel))
    with fault("any order"):
        WITH_BARRIER[kernel]()
