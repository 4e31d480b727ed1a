"""The record of logits that a head makes: traced by Dynamo, checkpointed, and composed with the transform of an op."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dllm_kernels import MDLMCrossEntropyLoss
from dllm_kernels.ops import LinearLogits
from tests.conftest import DEVICE, every_time
from tests.support.op_cases import FIRST_OPS, OpCase, Rows

N, V, D, R = 12, 31, 8, 3
IDS = torch.arange(N, device=DEVICE) % V
MASK = (IDS % 3 > 0).unsqueeze(0)


def parameters(trains):
    torch.manual_seed(0)
    shapes = (1, N, D), (V, D), (V,), (1, N, R), (V, R)
    leaves = [torch.randn(shape, device=DEVICE) for shape in shapes]
    return [leaf.requires_grad_(train == "1") for leaf, train in zip(leaves, trains, strict=True)]


def record(tensors, **fields):
    hidden, weight, bias, u, U = tensors
    return LinearLogits(hidden, weight, bias, (u, U), **fields)


def mdlm(logits):
    p = torch.full(MASK.shape, 0.5, device=DEVICE)
    return MDLMCrossEntropyLoss()(logits, IDS[None], MASK, p, torch.ones_like(p)).total_loss


ROWS = Rows.of(IDS[None] % (V - 1), MASK, torch.linspace(0.1, 1, N, device=DEVICE)[None])
LOSSES = {case.name: partial(OpCase.total, case, r=ROWS) for case in FIRST_OPS if case.differentiable} | {"MDLM": mdlm}


def value_and_gradients(loss, tensors):
    value = loss(tensors)
    value.backward()
    gradients = [t.grad for t in tensors if t.requires_grad]
    for t in tensors:
        t.grad = None
    return value.detach(), *gradients


CALLS = [(name, around) for name in LOSSES for around in ("compiled", "checkpoint", "reentrant checkpoint")]
COMPILED = "token_nll", "weighted_nll", "row_stats", "MDLM"
QUICK = [(name, around) for name, around in CALLS if around != "compiled" or name in COMPILED]


@pytest.mark.covering(2, most=2)
@pytest.mark.parametrize("trains", every_time(["11111"], ["11111", "10011", "10010"]))
@pytest.mark.parametrize(("name", "around"), every_time(QUICK, CALLS))
def test_a_record_passes_through(name, around, trains):
    def loss(tensors):
        return LOSSES[name](record(tensors, softcap=3.0, chunk_size=5, num_active=N))

    def within(tensors):
        if around == "compiled":
            torch._dynamo.reset()
            compiled = torch.compile(LOSSES[name], backend="aot_eager", fullgraph=True)
            return compiled(record(tensors, softcap=3.0, chunk_size=5, num_active=N))
        reentrant = around.startswith("reentrant")
        return checkpoint(lambda *t: loss(t), *tensors, use_reentrant=reentrant)

    tensors = parameters(trains)
    for expected, found in zip(value_and_gradients(loss, tensors), value_and_gradients(within, tensors), strict=True):
        torch.testing.assert_close(found, expected)
