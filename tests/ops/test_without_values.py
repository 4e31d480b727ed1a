"""Tensors without values (meta device, FakeTensorMode): results have the right shape, dtype and device."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dllm_kernels import MDLMCrossEntropyLoss, ops
from tests.support.inputs import KINDS, detached, map_rows

V, D = 7, 5
OPS = {
    "token_nll": lambda x, ids, p: ops.token_nll(x, ids, with_lse=True, with_correct=True, with_ids=True),
    "weighted_nll": lambda x, ids, p: ops.weighted_nll(x, ids, p, with_ids=True),
    "row_stats": lambda x, ids, p: ops.row_stats(x, ids, entropy=True, mix=(p, p), with_ids=True),
    "row_stats of two ids": lambda x, ids, p: ops.row_stats(x, torch.stack([ids, ids], -1), entropy=True),
    "token_log_probs": lambda x, ids, p: ops.token_log_probs(x, ids, with_entropy=True),
    "divergence": lambda x, ids, p: ops.divergence(x, map_rows(detached(x), lambda t: 2 * t), p),
    "mdlm": lambda x, ids, p: MDLMCrossEntropyLoss()(x, ids, p > 0, p, p > 0),
}


def results(name, kind, device):
    """Return the results of forward and, if anything is differentiable, of backward."""
    shapes = ((2, 3, V),) if kind == "stored" else ((2, 3, D), (V, D))
    leaves = [torch.randn(s, device=device, requires_grad=True) for s in shapes]
    ids, p = torch.zeros(2, 3, dtype=torch.long, device=device), torch.full((2, 3), 0.5, device=device)
    x = leaves[0] if kind == "stored" else ops.LinearLogits(*leaves)
    out = [t for t in OPS[name](x, ids, p) if t is not None]
    total = sum(t.sum() for t in out if t.requires_grad)
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [(t.shape, t.dtype) if t is not None else None for t in (*out, *grads)], {t.device.type for t in out}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPS)
def test_on_the_meta_device_and_of_fake_tensors(name, kind):
    expected, _ = results(name, kind, "cpu")
    shapes, devices = results(name, kind, "meta")
    assert devices == {"meta"}
    assert shapes == expected
    with FakeTensorMode():
        shapes, _ = results(name, kind, "cpu")
    assert shapes == expected
