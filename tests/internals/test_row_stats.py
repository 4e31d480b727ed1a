"""Memory of row statistics."""

import pytest
import torch

from benchmarks.measure import peak_memory
from dllm_kernels.backends.torch import _blocks
from dllm_kernels.ops import row_stats
from tests.conftest import DEVICE
from tests.ops.test_row_stats import differentiable, options

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.skipif(DEVICE != "cpu", reason="counts the allocations of the CPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_peak_memory_is_one_gradient(dtype, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(_blocks, "COMMON_BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(_blocks, "BLOCK_BYTES", 1 << 16)
    N, V = 256, 4096
    logits = torch.randn(N, V).to(dtype).requires_grad_()
    ids, kwargs = options((N,), V, 2)

    def step(_):
        out = differentiable(row_stats(logits, ids, entropy=True, backend="torch", **kwargs))
        torch.autograd.backward(out, [torch.ones_like(t) for t in out])
        logits.grad = None

    step(0)
    assert peak_memory(step, "cpu") <= logits.nbytes + 20 * (1 << 16)
