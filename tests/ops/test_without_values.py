"""Tensors without values (meta device, FakeTensorMode): results have the right shape, dtype and device."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from dllm_kernels import MDLMCrossEntropyLoss
from dllm_kernels.ops import LinearLogits
from tests.support.inputs import KINDS
from tests.support.op_cases import OF_EVERY_KIND, Rows

V, D = 7, 5
CALLS = {(case.name, kind): case for kind, case in OF_EVERY_KIND} | {
    ("mdlm", kind): lambda x, r: MDLMCrossEntropyLoss()(x, r.ids, r.mask, r.positive, r.mask) for kind in KINDS
}


def results(name, kind, dtype, device):
    """Return the results of forward and, if anything is differentiable, of backward."""
    shapes = ((2, 3, V),) if kind == "stored" else ((2, 3, D), (V, D))
    leaves = [torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]
    ids = torch.zeros(2, 3, dtype=torch.long, device=device)
    r = Rows.of(ids, ids == 0, torch.full((2, 3), 0.5, device=device))
    x = leaves[0] if kind == "stored" else LinearLogits(*leaves)
    out = [t for t in tree_leaves(CALLS[name, kind](x, r)) if t is not None]
    totals = [t.sum() for t in out if t.requires_grad]
    grads = torch.autograd.grad(totals, leaves, allow_unused=True) if totals else ()
    return [(t.shape, t.dtype) if t is not None else None for t in (*out, *grads)], {t.device.type for t in out}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "kind"), CALLS)
def test_on_the_meta_device_and_of_fake_tensors(name, kind, dtype):
    expected, _ = results(name, kind, dtype, "cpu")
    shapes, devices = results(name, kind, dtype, "meta")
    assert devices == {"meta"}
    assert shapes == expected
    with FakeTensorMode():
        shapes, _ = results(name, kind, dtype, "cpu")
    assert shapes == expected
