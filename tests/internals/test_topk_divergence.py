"""Divergences to a teacher known at K ids: blocks of rows, and what is checked on a CPU only."""

import importlib

import pytest
import torch

from dllm_kernels.ops import linear_topk_divergence, topk_divergence
from dllm_kernels.rows import _rest
from tests.conftest import DEVICE
from tests.ops.test_topk_divergence import V, teacher

public = importlib.import_module("dllm_kernels.ops.topk_divergence")  # the package exports the function of this name


def test_blocks_of_rows_do_not_change_the_result(backend, monkeypatch):
    ids, log_q, weights = teacher(8, 2, 5)
    for x in (torch.randn(2, 5, V, device=DEVICE), torch.randn(5, 2, V, device=DEVICE).transpose(0, 1)):
        one = topk_divergence(x, ids, log_q, weights, backend=backend)
        with monkeypatch.context() as patch:
            patch.setattr(_rest, "BLOCK_ELEMENTS", 3 * V)
            many = topk_divergence(x, ids, log_q, weights, backend=backend)
        torch.testing.assert_close(many, one, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_a_repeated_id_is_nan_where_values_cannot_be_read(form, backend, monkeypatch):
    """On a GPU, and under torch.compile, the row is NaN; other rows and missing entries are not affected."""
    monkeypatch.setattr(public, "readable_without_sync", lambda _: False)
    ids, log_q = torch.tensor([[1, 2, 1], [3, -100, -100], [4, 5, 6]], device=DEVICE), torch.full((3, 3), -2.0)
    z, log_q = torch.randn(3, V, device=DEVICE), log_q.to(DEVICE)
    x = z.clone().requires_grad_()
    if form == "logits":
        out = topk_divergence(x, ids, log_q, backend=backend)
    else:
        eye = torch.eye(V, device=DEVICE)
        out = linear_topk_divergence(x, eye, ids, log_q, reduction="none", backend=backend)
    assert out.value.isnan().tolist() == [True, False, False]
    (grad,) = torch.autograd.grad(out.loss.sum(), x)
    assert grad[0].isnan().all()
    assert grad[1:].isfinite().all()
