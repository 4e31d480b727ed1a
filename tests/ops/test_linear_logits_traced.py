"""The record of logits that a head makes: traced by Dynamo, checkpointed, and composed with the transform of an op."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dllm_kernels import MDLMCrossEntropyLoss
from dllm_kernels.ops import LinearLogits, row_stats, token_nll, weighted_nll
from tests.conftest import DEVICE

N, V, D, R = 12, 31, 8, 3
IDS = torch.arange(N, device=DEVICE) % V
MASK = (IDS % 3 > 0).unsqueeze(0)


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    shapes = (1, N, D), (V, D), (V,), (1, N, R), (V, R)
    return [torch.randn(shape, dtype=dtype, device=DEVICE, requires_grad=True) for shape in shapes]


def record(tensors, **fields):
    hidden, weight, bias, u, U = tensors
    return LinearLogits(hidden, weight, bias, (u, U), **fields)


def mdlm(logits):
    p = torch.full(MASK.shape, 0.5, device=DEVICE)
    return MDLMCrossEntropyLoss()(logits, IDS[None], MASK, p, torch.ones_like(p)).total_loss


LOSSES = {
    "token_nll": lambda z: token_nll(z, IDS[None], active=MASK).nll.square().sum(),
    "weighted_nll": lambda z: weighted_nll(z, IDS[None], MASK.float()).loss,
    "row_stats": lambda z: row_stats(z, IDS[None], entropy=True).entropy.sum(),
    "MDLM": mdlm,
}


def value_and_gradients(loss, tensors):
    value = loss(tensors)
    value.backward()
    gradients = [t.grad for t in tensors]
    for t in tensors:
        t.grad = None
    return value.detach(), *gradients


@pytest.mark.parametrize("around", ["compiled", "checkpoint", "reentrant checkpoint"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_record_passes_through(name, around):
    def loss(tensors):
        return LOSSES[name](record(tensors, softcap=3.0, chunk_size=5, num_active=N))

    def within(tensors):
        if around == "compiled":
            torch._dynamo.reset()
            compiled = torch.compile(LOSSES[name], backend="aot_eager", fullgraph=True)
            return compiled(record(tensors, softcap=3.0, chunk_size=5, num_active=N))
        reentrant = around.startswith("reentrant")
        return checkpoint(lambda *t: loss(t), *tensors, use_reentrant=reentrant)

    tensors = parameters()
    for expected, found in zip(value_and_gradients(loss, tensors), value_and_gradients(within, tensors), strict=True):
        torch.testing.assert_close(found, expected)
