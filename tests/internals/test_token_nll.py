"""Token NLL: rows that are read, copies that are avoided, memory, and the choice of a backend."""

import pytest
import torch

from benchmarks.measure import peak_memory
from dllm_kernels.backends.torch import _blocks
from dllm_kernels.ops import token_nll
from dllm_kernels.rows import _setup
from tests.conftest import DEVICE
from tests.ops.test_token_nll import inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_a_slice_of_a_batch_is_not_copied(backend):
    """Rows are addressed by batch and position strides."""
    from dllm_kernels.rows._interface import as_blv

    x = torch.randn(6, 8, 37, device=DEVICE)
    for view in (x[1:5], x[:, 1:], x[::2, :-1], x[:, :, 3:], x[2], x.view(2, 3, 8, 37)):
        assert as_blv(view).data_ptr() == view.data_ptr()


@pytest.mark.everyday(1)
@pytest.mark.skipif(DEVICE != "cpu", reason="counts the allocations of the CPU")
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_peak_memory_is_one_gradient(dtype, inplace, monkeypatch):
    """There is no float32 copy and no saved softmax. With the gradient in place, nothing of that size is allocated."""
    monkeypatch.undo()
    N, V = 1024, 16384
    leaf = torch.randn(N, V).to(dtype).requires_grad_()
    targets, active = torch.randint(0, V, (N,)), torch.arange(N) % 2

    def run(_):
        token_nll(leaf, targets, active=active, inplace_backward=inplace).nll.sum().backward()
        leaf.grad = None

    run(0)
    threads, size = _blocks.partition(N, V, torch.float32, leaf.is_cpu)
    blocks = threads * size * V * (4 if dtype == torch.float32 else 6)  # one in float32, one as gathered
    peak = peak_memory(run, "cpu")
    assert peak <= leaf.nbytes * (not inplace) + blocks + 256 * N
    assert blocks + 256 * N < leaf.nbytes / 2


def test_the_forward_pass_reads_only_active_rows(monkeypatch):
    """This tests the torch path. For Triton's kernels, only NaN in inactive rows tests it."""
    logits, targets = inputs((2, 4))
    seen = []
    load = _blocks.RowGather.load
    monkeypatch.setattr(_blocks.RowGather, "load", lambda *args: seen.append(load(*args).clone()) or load(*args))
    active = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1]], device=DEVICE)
    targets[0, [1, 2]], targets[1, 3] = torch.tensor([1, -100], device=DEVICE), 2
    token_nll(logits, targets, active=active, with_correct=True, backend="torch")
    assert torch.equal(torch.cat(seen), logits.flatten(0, 1)[[1, 7]])


def test_the_environment_chooses_the_backend(monkeypatch):
    logits, targets = inputs()
    used = []
    rows = _setup.row_primitives
    monkeypatch.setattr(_setup, "row_primitives", lambda triton: used.append(triton) or rows(triton))
    monkeypatch.delenv("DLLM_KERNELS_BACKEND", raising=False)
    token_nll(logits, targets)
    monkeypatch.setenv("DLLM_KERNELS_BACKEND", "triton")
    token_nll(logits, targets)
    token_nll(logits, targets, backend="torch")
    monkeypatch.setenv("DLLM_KERNELS_BACKEND", "torch")
    token_nll(logits, targets, backend="triton")
    assert used == [DEVICE == "cuda", True, False, True]
