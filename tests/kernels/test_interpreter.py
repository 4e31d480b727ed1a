"""The faster interpreter is bit-identical to Triton's, for every kernel."""

import contextlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import INTERPRETED
from tests.support.parity import poison_empty

if not INTERPRETED:
    pytest.skip("kernels are compiled here", allow_module_level=True)

import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import GridExecutor, InterpreterError

from tests.kernels.test_bounds import CALLS, call
from tests.support import interpreter, one_kernel
from tools.kernel_files import SOURCES, every_kernel


def launches(name, monkeypatch):
    """Return the kernel of each launch of a call, and the bits of its tensors afterwards."""
    found, execute = [], GridExecutor.__call__

    def launch(self, *arguments, **options):
        execute(self, *arguments, **options)
        tensors = [t for t in (*arguments, *options.values()) if torch.is_tensor(t)]
        found.append((self.fn.__name__, [t.detach().contiguous().view(-1).view(torch.uint8).clone() for t in tensors]))

    with monkeypatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launch)
        poison_empty(patch)
        call(name, patch)
    return found


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
@pytest.mark.parametrize("name", ["token_nll, split rows", "weighted_nll, head, torch.float16", "mix"])
def test_a_kernel_leaves_the_same_bits(name, monkeypatch):
    assert assert_same_bits(name, monkeypatch)


@pytest.mark.exhaustive  # Triton's own interpreter is slow
@pytest.mark.every_case  # of the calls above; run it when a version of Triton is added to KNOWN
def test_every_kernel_leaves_the_same_bits(monkeypatch):
    launched = set().union(*(assert_same_bits(name, monkeypatch) for name in CALLS))
    assert launched == every_kernel()


def test_make_kernel_knows_every_file_of_kernels_and_every_kernel():
    found = {stem: one_kernel.chosen(stem.removeprefix("_")) for stem in SOURCES}
    assert {kernel for kernels, _, _ in found.values() for kernel in kernels} == every_kernel()
    assert one_kernel.chosen("linear_sample")[1:] == (["row_stats", "sample"], ["linear_sample"])
    with pytest.raises(SystemExit, match=r"file of kernels .*'row_stats'.* or an op .*'corrupt_mix'.*, got 'nll'"):
        one_kernel.chosen("nll")


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


def test_unknown_internals_are_not_patched(monkeypatch):
    monkeypatch.setattr(interpreter.triton_interpreter, "_patch_lang", interpreter.THEIRS)
    monkeypatch.setattr(interpreter, "KNOWN", {})
    interpreter.install()
    assert interpreter.triton_interpreter._patch_lang is interpreter.THEIRS


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


@pytest.mark.parametrize("sizes", [(15, 16), (16, 15)])
def test_an_access_outside_of_the_tensors_is_an_error(sizes):
    x, out = map(torch.ones, sizes)
    _less_products[(1,)](x, out, min(sizes), 0, KIND=0)
    with pytest.raises(InterpreterError, match="memory outside of its tensors"):
        _less_products[(1,)](x, out, max(sizes), 0, KIND=0)


@triton.jit
def _kept(x_ptr, out_ptr, n):
    i = tl.arange(0, 8)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n))


def test_masked_lanes_without_a_value_hold_any():
    for dtype, masked in ((torch.float32, [7.0, math.nan]), (torch.int64, [1, 2**63 - 1, 1])):
        out = torch.zeros(8, dtype=dtype)
        _kept[(1,)](torch.zeros(2, dtype=dtype), out, 2)
        torch.testing.assert_close(out[2:], torch.tensor((masked * 4)[2:8], dtype=dtype), equal_nan=True)


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
