"""Row weights of MDLM and the hybrid loss: the bits of the kernel, values that must not spread, other callers."""

import math

import pytest
import torch

from dllm_kernels import HybridDiffusionLLMLoss, MDLMCrossEntropyLoss
from dllm_kernels.rows._primitives import row_primitives
from tests.conftest import DEVICE
from tests.support.parity import values_at

B, L, V = 3, 700, 5  # more positions than a program of the kernel has
DTYPES = (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64)
NUMBERS = ((None, None), (0.3, 7), (2, 2**25 + 1), (None, 0), (0.3, 0.3))  # factor, denominator


def drawn(mask=torch.bool, p=torch.float32, view=torch.Tensor.detach):
    """Draw masks and p, with NaN outside of the masks, 0 and 1e-12 and NaN inside."""
    torch.manual_seed(0)
    noise, loss = ((torch.rand(B, L + 3) < 0.6) for _ in range(2))
    p_mask = torch.rand(B, L + 3).where(noise & loss, torch.tensor(math.nan))
    used = (noise & loss).nonzero()
    for place, value in zip(used[:3], (0.0, 1e-12, math.nan), strict=True):
        p_mask[tuple(place)] = value
    return tuple(view(t).to(DEVICE) for t in (p_mask.to(p), noise.to(mask), loss.to(mask)))


def expected(p_mask, noise, loss, factor, count, dtype):
    """Compute the weights one correctly rounded operation at a time, on a CPU."""
    p_mask, noise, loss = (t.cpu() for t in (p_mask, noise, loss))
    weights = torch.where(noise.bool() & loss.bool(), 1 / p_mask.to(dtype).clamp(min=1e-8), 0.0)
    weights = weights if factor is None else factor * weights
    return weights, weights if count is None else weights / torch.tensor(max(count, 1), dtype=dtype)


def assert_same(found, wanted):
    for i, (ours, exact) in enumerate(zip(found, wanted, strict=True)):
        assert (ours.shape, ours.dtype) == (exact.shape, exact.dtype), f"result {i}"
        differ = (ours.cpu() != exact) & ~(ours.cpu().isnan() & exact.isnan())
        assert not bool(differ.any()), f"result {i}: {values_at(ours, exact, differ)}"


def fused():
    pytest.importorskip("triton")
    return row_primitives(True).mdlm_weights


VIEWS = {
    "whole": lambda t: t[:, :L].contiguous(),
    "shifted": lambda t: t[:, 3:],
    "flat": lambda t: t.view(-1)[5:][None],
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mask", DTYPES, ids=str)
def test_the_kernel_rounds_every_operation_separately(mask, dtype, view):
    given = drawn(mask, torch.float64 if mask == torch.int64 else torch.float32, VIEWS[view])
    for factor, count in NUMBERS:
        wanted = expected(*given, factor, count, dtype)
        assert_same(fused()(*given, factor, count, dtype), wanted)
        on_device = [
            None if n is None else torch.tensor(n, dtype=torch.float64, device=DEVICE) for n in (factor, count)
        ]
        assert_same(fused()(*given, *on_device, dtype), wanted)


def test_a_nan_as_the_count_gives_nan():
    weights, divided = fused()(*drawn(), None, torch.tensor(math.nan, device=DEVICE), torch.float32)
    assert divided.isnan().all()
    assert not weights[0].isnan().all()


def test_no_position():
    empty = [t[:, :0] for t in drawn()]
    assert [t.shape for t in fused()(*empty, 0.5, 3, torch.float32)] == [(B, 0)] * 2


def call(loss, x, **masks):
    return loss(x, torch.zeros(x.shape[:2], dtype=torch.long, device=DEVICE), **masks, num_diffusion_tokens=9)


@pytest.mark.everyday(2)
@pytest.mark.parametrize("alpha", [None, 0.3, torch.tensor([0.3], dtype=torch.float64)], ids=str)
def test_the_weights_of_a_loss(alpha, backend):
    p_mask, noise, loss_mask = drawn(view=lambda t: t[:, 3:43])
    p_mask = p_mask.nan_to_num(0.5).where(noise & loss_mask, torch.tensor(math.nan, device=DEVICE))
    options = {"reduction": "none", "backend": backend}
    loss = MDLMCrossEntropyLoss(**options) if alpha is None else HybridDiffusionLLMLoss(alpha, **options)
    x = torch.randn(*noise.shape, V, device=DEVICE)
    x[~(noise & loss_mask)] = math.nan
    out = call(loss, x, noise_mask=noise, p_mask=p_mask, loss_mask=loss_mask)
    factor = alpha if alpha is None else torch.tensor(0.3)
    weights, _ = expected(p_mask, noise, loss_mask, factor, None, torch.float32)
    assert_same([out.row_weights], [weights])
    assert out.total_loss.isfinite()
