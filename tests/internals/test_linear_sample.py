"""Samples: their memory, and their scores on every code path."""

import pytest
import torch

from benchmarks.measure import peak_memory
from dllm_kernels import linear_sample
from dllm_kernels.backends.torch import _blocks, _sample
from dllm_kernels.corruption import _noise
from dllm_kernels.corruption._noise import Noise
from dllm_kernels.rows._transform import NO_TRANSFORM
from tests.conftest import DEVICE

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_columns_excluded_by_bounds_on_a_cpu_do_not_win():
    """Computing all scores of the row, as other devices do, gives the same largest score, to the bit."""
    spreads = torch.tensor([0.0, 1.0, 5.0, 40.0, 1e4]).repeat(40)
    x = torch.randn(200, 300) * spreads[:, None]
    noise = Noise(torch.arange(200), torch.arange(200) % 7, 5)
    score, ids = _sample.sample(x, NO_TRANSFORM, noise)
    every = _sample._scores(x.double(), _noise.high(noise, 300), _noise.low(noise, 300))
    assert every.dtype == torch.float64
    assert torch.equal(ids, every.argmax(1))
    assert torch.equal(score, every.amax(1))


def test_the_kernel_finds_the_same_scores():
    """The scores are equal to the bit: the kernel's largest score holds all 48 bits of a uniform."""
    kernel = pytest.importorskip("dllm_kernels.backends.triton.sample")
    torch.manual_seed(0)
    x = (torch.randn(4, 300) * torch.tensor([0.0, 1.0, 5.0, 40.0])[:, None]).to(DEVICE)
    noise = Noise(torch.arange(4, device=DEVICE) - 2, torch.arange(4, device=DEVICE) * 2, 5)
    every = _sample._scores(x.double(), _noise.high(noise, 300), _noise.low(noise, 300))
    score, ids = kernel.sample(x, NO_TRANSFORM, noise)
    assert torch.equal(ids, every.argmax(1))
    assert torch.equal(score, every.amax(1))


@pytest.mark.everyday(1)
@pytest.mark.skipif(DEVICE != "cpu", reason="measures the CPU's allocator")
@pytest.mark.parametrize("return_top", [None, 4])
def test_two_chunks_of_logits_at_most(return_top, monkeypatch):
    monkeypatch.undo()  # poisoning fresh memory allocates nothing, but takes time
    N, many, wide, chunk = 512, 16384, 8, 128
    torch.manual_seed(0)
    h, w = torch.randn(N, wide), torch.randn(many, wide)

    def run(_):
        linear_sample(h, w, seeds=torch.tensor(1), return_top=return_top, chunk_size=chunk)

    run(0)
    logits = chunk * many * 4
    assert _blocks.partition(chunk, many, torch.float32, h.is_cpu)[1] < chunk
    assert logits <= peak_memory(run, "cpu") <= 2 * logits
