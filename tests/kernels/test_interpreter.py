"""The faster interpreter is bit-identical to Triton's, for every kernel."""

import contextlib
import functools
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import INTERPRETED
from tests.support.parity import poison_empty, small_tiles

if not INTERPRETED:
    pytest.skip("kernels are compiled here", allow_module_level=True)

import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import GridExecutor, InterpreterError

from dllm_kernels import corruption, ops
from dllm_kernels._backends import triton as kernels
from dllm_kernels._backends._divergence import DivergenceRequest
from dllm_kernels._backends.triton import _tiles, divergence
from dllm_kernels._core._divergence_spec import checked_spec
from tests.kernels.test_bounds import RUNS, B, N, V
from tests.support import interpreter


class Unguarded:
    """Stand-in for ``Guarded`` with ordinary memory."""

    copy = staticmethod(lambda t: t)


def backward_of_a_multiple(_):
    h, w = (torch.randn(s, requires_grad=True) for s in ((N, 6), (V, 6)))
    (3 * ops.weighted_linear_nll(h, w, torch.arange(N), torch.rand(N), backend="triton").loss).backward()


def token_nll_in_place(_):
    x = torch.randn(N, V, requires_grad=True)
    nll = ops.token_nll(x * 1, torch.arange(N), inplace_backward=True, backend="triton").nll
    nll.sum().backward()


def linear_row_stats(_):
    h, w = (torch.randn(s, requires_grad=True) for s in ((N, 6), (V, 6)))
    mix = torch.rand(N), torch.rand(N) + 0.1
    out = ops.linear_row_stats(h, w, torch.arange(N), entropy=True, mix=mix, chunk_size=2, backend="triton")
    sum(t.sum() for t in out[:4] if t is not None).backward()


def divergence_without_teacher_rows(_):
    """In place: every row of the student refers to a row that the teacher does not have."""
    z, no_rows, known = torch.randn(1, N, V), torch.empty(1, 0, V), torch.zeros(N, dtype=torch.int64)
    divergence.divergence(z, DivergenceRequest(checked_spec("kl"), no_rows, torch.ones(N), known), with_grad=True)


CALLS = RUNS | {
    "divergence, no row of the teacher": divergence_without_teacher_rows,
    "token_nll, in place": token_nll_in_place,
    "linear_row_stats, in place": linear_row_stats,
    "corrupt_blockwise, keys in memory": RUNS["corrupt_blockwise"],
    "gumbel_topk, keys in memory": RUNS["gumbel_topk"],
    "weighted_linear_nll, times 3": backward_of_a_multiple,
    "sample_level": lambda _: corruption.sample_level(B, seeds=torch.arange(B), backend="triton"),
}


def launches(name, monkeypatch):
    """Return the kernel of each launch of a call, and the bits of its tensors afterwards."""
    found, call = [], GridExecutor.__call__

    def launch(self, *arguments, **options):
        call(self, *arguments, **options)
        tensors = [t for t in (*arguments, *options.values()) if torch.is_tensor(t)]
        found.append((self.fn.__name__, [t.detach().contiguous().view(-1).view(torch.uint8).clone() for t in tensors]))

    with monkeypatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launch)
        patch.setenv("DLLM_KERNELS_CHECK", "0")  # the calls have targets out of range
        small_tiles(patch, splits=3 if "split" in name else 1)
        poison_empty(patch)
        if "in memory" in name:
            patch.setattr(_tiles, "select", lambda *_: _tiles.SelectTile(1, 8, 1, True))
        torch.manual_seed(0)
        CALLS[name](Unguarded)
    return found


def kernels_in_sources():
    """Return the names before ``[grid](...)`` in the launchers."""
    sources = [Path(m.module_finder.path, f"{m.name}.py").read_text() for m in pkgutil.iter_modules(kernels.__path__)]
    return {name for source in sources for name in re.findall(r"(\w+)\[(?:grid|programs|\(.*\))\]\(", source)}


def assert_same_bits(name, monkeypatch):
    """Compare the quick interpreter with Triton's own, and return the kernels that the call launches."""
    quick = launches(name, monkeypatch)
    with interpreter.tritons_own():
        own = launches(name, monkeypatch)
    assert [kernel for kernel, _ in quick] == [kernel for kernel, _ in own], name
    for (kernel, ours), (_, theirs) in zip(quick, own, strict=True):
        assert len(ours) > 0
        assert all(map(torch.equal, ours, theirs)), (name, kernel)
    return {kernel for kernel, _ in quick}


@triton.jit
def _equal_constants(x_ptr, out_ptr):
    at = tl.arange(0, 4)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, x * 0.0)
    tl.store(out_ptr + 4 + at, x * -0.0)
    tl.store(out_ptr + 8 + at, x * 0)
    tl.store(out_ptr + 12 + at, x * 1.0 + at * 1)


def test_constants_that_compare_equal_are_different_operands():
    """The quick interpreter creates a constant operand once per type, and 0.0 is equal to -0.0."""
    x, found = torch.tensor([-1.5, -0.0, 0.0, 2.0]), []
    for context in (contextlib.nullcontext, interpreter.tritons_own):
        found.append(torch.empty(16))
        with context():
            _equal_constants[(1,)](x, found[-1])
    quick, own = (out.view(torch.int32) for out in found)
    assert torch.equal(quick, own)  # Triton 3.6 drops the sign of -0.0 itself


@pytest.mark.everyday(1)
@pytest.mark.parametrize("name", ["token_nll, split rows", "weighted_linear_nll, torch.float32", "corrupt_mix"])
def test_a_kernel_leaves_the_same_bits(name, monkeypatch):
    assert assert_same_bits(name, monkeypatch)


@pytest.mark.exhaustive  # Triton's own interpreter is slow
@pytest.mark.every_case  # of the calls above; run it when a version of Triton is added to KNOWN
def test_every_kernel_leaves_the_same_bits(monkeypatch):
    launched = set().union(*(assert_same_bits(name, monkeypatch) for name in CALLS))
    assert launched == kernels_in_sources()


@pytest.mark.everyday(1)
@pytest.mark.parametrize("name", CALLS)
def test_no_program_touches_what_another_one_writes(name, monkeypatch):
    with interpreter.programs_apart() as separate:
        kernels_of_call = {kernel for kernel, _ in launches(name, monkeypatch)}
    assert separate == kernels_of_call != set()


@triton.jit
def _neighbours(x_ptr, out_ptr, first, STEP: tl.constexpr):
    n = tl.program_id(0)
    tl.store(out_ptr + n * STEP, tl.load(x_ptr + first + n))


@pytest.mark.parametrize(
    ("first", "in_place", "step", "race"),
    [(0, True, 1, False), (1, True, 1, True), (1, False, 1, False), (0, False, 0, True)],
)
def test_programs_that_share_an_address_are_found(first, in_place, step, race):
    x = torch.zeros(4)
    expected = pytest.raises(AssertionError, match="programs of _neighbours") if race else contextlib.nullcontext()
    with expected, interpreter.programs_apart():
        _neighbours[(3,)](x, x if in_place else torch.zeros(3), first, STEP=step)


@triton.jit
def _doubled(x):
    return tl.sum(x, 0) * 2


@triton.jit
def _at(out_ptr, n, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    for k in range(n):
        tl.store(out_ptr + k, _doubled(i * n))


def test_a_launch_restores_what_it_replaced():
    owners = tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.block_type, TritonSemantic, interpreter.triton_interpreter
    before = [dict(vars(owner)) for owner in owners]
    out = torch.zeros(3, dtype=torch.int32)
    for _ in range(2):
        _at[(1,)](out, 3, SIZE=4)
        assert out.tolist() == [36, 36, 36]
        assert [dict(vars(owner)) for owner in owners] == before


def test_a_failed_launch_restores_what_it_replaced():
    with pytest.raises(InterpreterError):
        _at[(1,)](torch.zeros(3), None, SIZE=4)
    test_a_launch_restores_what_it_replaced()


def test_unknown_internals_are_not_patched(monkeypatch):
    monkeypatch.setattr(interpreter.triton_interpreter, "_patch_lang", interpreter.THEIRS)
    monkeypatch.setattr(interpreter, "KNOWN", {})
    interpreter.install()
    assert interpreter.triton_interpreter._patch_lang is interpreter.THEIRS


def test_unknown_types_are_created_by_triton(monkeypatch):
    monkeypatch.setattr(interpreter, "KNOWN_TYPES", {})
    monkeypatch.setattr(interpreter.triton_interpreter, "_patch_lang", interpreter.patched_once())
    monkeypatch.setattr(tl.block_type, "__init__", counted_init := counted(tl.block_type.__init__))
    test_a_launch_restores_what_it_replaced()
    assert counted_init.calls > 0


def counted(function):
    @functools.wraps(function)
    def call(*arguments):
        call.calls += 1
        return function(*arguments)

    call.calls = 0
    return call


@triton.jit
def _far(out_ptr, n):
    tl.store(out_ptr + tl.program_id(0) * n * 0, 1)


@pytest.mark.indices
def test_an_index_that_leaves_32_bits_is_an_error():
    out = torch.zeros(1, dtype=torch.int32)
    _far[(2,)](out, 2**30)
    with pytest.raises(InterpreterError, match="int32 overflow"):
        _far[(5,)](out, 2**30)


def test_overflow_is_not_checked_without_the_mark():
    _far[(5,)](torch.zeros(1, dtype=torch.int32), 2**30)


@triton.jit(do_not_specialize=["skipped"], do_not_specialize_on_alignment=["out_ptr"])
def _less_products(x_ptr, out_ptr, V, skipped, KIND: tl.constexpr):
    v = tl.arange(0, 16)
    x = tl.load(x_ptr + v, mask=v < V)
    tl.store(out_ptr + v, x * x - x, mask=v < V)


def launched(*, kind=0, V=16, skipped=16, x_at=0, out_at=0):
    torch.manual_seed(0)
    x, out = torch.empty(20)[x_at : x_at + 16].copy_(torch.randn(16)), torch.zeros(20)[out_at : out_at + 16]
    _less_products[(1,)](x, out, V, skipped, KIND=kind)
    return out


ROOT = Path(__file__).parents[2]
COMPARE_BITS = [
    *("kernels/test_divergence_kernel.py", "kernels/test_batch_invariance.py"),
    *("ops/test_token_nll.py", "ops/test_row_objective.py", "ops/test_transform.py"),
]


@pytest.mark.exhaustive
def test_no_test_asks_two_specialisations_for_equal_bits():
    """Each specialisation fuses other sums of products, as compiled kernels may."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.contraction", "-p", "no:cacheprovider"]
    command += ["-m", "not exhaustive", *(f"tests/{file}" for file in COMPARE_BITS)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout  # it is not 0 if no test is left


@pytest.mark.parametrize(
    ("changed", "number"),
    [({}, 1), ({"kind": 1}, 2), ({"V": 15}, 2), ({"skipped": 15}, 1), ({"x_at": 1}, 2), ({"out_at": 1}, 1)],
    ids=str,
)
def test_specialisations_are_those_of_the_compiler(changed, number):
    with interpreter.products_fused_by_specialisation() as specialisations:
        first, second = launched(), launched(**changed)
    assert len(specialisations) == number
    assert number > 1 or torch.equal(first, second)


def test_some_specialisations_fuse_and_others_do_not():
    rounded = launched()
    with interpreter.products_fused():
        fused = launched()
    with interpreter.products_fused_by_specialisation():
        found = [launched(kind=kind) for kind in range(8)]
    assert not torch.equal(fused, rounded)
    assert all(torch.equal(x, rounded) or torch.equal(x, fused) for x in found)
    assert 0 < sum(torch.equal(x, fused) for x in found) < 8
