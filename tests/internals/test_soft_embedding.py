"""Memory of the mean embedding."""

import pytest
import torch

from benchmarks.measure import peak_memory
from dllm_kernels import soft_embedding
from dllm_kernels.backends.torch import _blocks
from tests.conftest import DEVICE
from tests.support.memory import copied_by_products

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.everyday(1)
@pytest.mark.skipif(DEVICE != "cpu", reason="measures the CPU's allocator")
@pytest.mark.covering(1)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_memory_is_one_chunk_of_logits(dtype, softcap, monkeypatch):
    monkeypatch.undo()  # poisoning fresh memory allocates nothing, but takes time
    N, many, wide, chunk = 512, 16384, 8, 128
    torch.manual_seed(0)
    h, w = torch.randn(N, wide).to(dtype), torch.randn(many, wide).to(dtype)
    ids = torch.randint(0, many, (N,))

    def run(_):
        soft_embedding(h, w, w, bump=2.0, bump_ids=ids, softcap=softcap, chunk_size=chunk)

    run(0)
    logits, out = chunk * many * dtype.itemsize, N * wide * dtype.itemsize
    threads, size = _blocks.partition(chunk, many, torch.float32, h.is_cpu)
    blocks = threads * size * many * 4
    copies = copied_by_products(chunk, many, wide, dtype)
    assert logits <= peak_memory(run, "cpu") <= logits + out + copies + 2 * blocks + 200 * N
    assert 2 * blocks + 200 * N < chunk * many * 4  # so a float32 copy of the chunk would exceed the bound
