"""Tensors without values (meta device, FakeTensorMode): results have the right shape, dtype and device."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dllm_kernels import MDLMCrossEntropyLoss, ops

V, D = 7, 5
OPS = {
    "token_nll": lambda x, h, w, ids, p: ops.token_nll(x, ids, with_lse=True, with_correct=True, with_ids=True),
    "weighted_nll": lambda x, h, w, ids, p: ops.weighted_nll(x, ids, p),
    "row_stats": lambda x, h, w, ids, p: ops.row_stats(x, ids, entropy=True, mix=(p, p), with_ids=True),
    "token_log_probs": lambda x, h, w, ids, p: ops.token_log_probs(x, ids, with_entropy=True),
    "linear_token_nll": lambda x, h, w, ids, p: ops.linear_token_nll(h, w, ids),
    "weighted_linear_nll": lambda x, h, w, ids, p: ops.weighted_linear_nll(h, w, ids, p, with_ids=True),
    "linear_row_stats": lambda x, h, w, ids, p: ops.linear_row_stats(h, w, ids.unsqueeze(-1), entropy=True),
    "divergence": lambda x, h, w, ids, p: ops.divergence(x, 2 * x.detach(), p),
    "linear_divergence": lambda x, h, w, ids, p: ops.linear_divergence(h, w, 2 * h.detach(), p),
    "mdlm": lambda x, h, w, ids, p: MDLMCrossEntropyLoss()(x, ids, p > 0, p, p > 0),
}


def results(op, device):
    """Return the results of forward and, if anything is differentiable, of backward."""
    leaves = [torch.randn(s, device=device, requires_grad=True) for s in ((2, 3, V), (2, 3, D), (V, D))]
    ids, p = torch.zeros(2, 3, dtype=torch.long, device=device), torch.full((2, 3), 0.5, device=device)
    out = [t for t in op(*leaves, ids, p) if t is not None]
    total = sum(t.sum() for t in out if t.requires_grad)
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [(t.shape, t.dtype) if t is not None else None for t in (*out, *grads)], {t.device.type for t in out}


@pytest.mark.parametrize("name", OPS)
def test_on_the_meta_device(name):
    shapes, devices = results(OPS[name], "meta")
    assert devices == {"meta"}
    assert shapes == results(OPS[name], "cpu")[0]


@pytest.mark.parametrize("name", OPS)
def test_of_fake_tensors(name):
    with FakeTensorMode():
        shapes, _ = results(OPS[name], "cpu")
    assert shapes == results(OPS[name], "cpu")[0]
