"""Cost of a small call in torch operations, and bits that do not depend on the split of rows into blocks."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_kernels.losses import MDLMCrossEntropyLoss
from dllm_kernels.losses._model_output import LOGITS, ModelOutput
from dllm_kernels.ops import row_stats, token_log_probs, token_nll, weighted_nll
from dllm_kernels.rows._options import Options
from tests.support.parity import small_blocks

N, V = 9, 37


class Counted(TorchDispatchMode):
    """Count the operations that run under it."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(call):
    call()  # work that is done only once
    with Counted() as seen:
        call()
    return seen.count


def rows(dtype):
    """Draw logits with every kind of row, ids and active rows; NaN only in inactive rows."""
    torch.manual_seed(0)
    logits, ids = (3 * torch.randn(N, V, device="cpu")).to(dtype), torch.randint(V, (N,), device="cpu")
    active = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1, 0], device="cpu")
    logits[2] = math.nan
    logits[3, 5:9] = logits[3].max()
    ids[3] = 6
    logits[4, ::2] = -math.inf
    ids[4] = 1
    return logits, ids, active


def of_one_row(row, logits=None, target=None):
    """Return the inputs with other logits, or another id, in one row."""

    def changed(x, ids, active):
        at = torch.tensor([row], device="cpu")
        x = x if logits is None else x.index_fill(0, at, logits)
        return x, ids if target is None else ids.index_fill(0, at, target), active

    return changed


SPECIAL = {
    "nothing": lambda x, ids, active: (x, ids, active),
    "all active": lambda x, ids, active: (x.nan_to_num(0, neginf=-1.0), ids, torch.ones_like(active)),
    "impossible target": of_one_row(1, target=V),
    "no target": of_one_row(1, target=-100),
    "NaN": of_one_row(1, math.nan),
    "minus infinity": of_one_row(6, -math.inf),
    "improbable target": of_one_row(4, target=0),
    "nothing active": lambda x, ids, active: (x, ids, torch.zeros_like(active)),
    "columns apart": lambda x, ids, active: (x.t().contiguous().t(), ids, active),
}


def run_nll(x, ids, active):
    out = token_nll(x, ids, active=active, with_lse=True, backend="torch")
    return out.nll, out.lse


def run_weighted(x, ids, active):
    out = weighted_nll(x, ids, active * 0.3, backend="torch")
    return out.loss, out.nll


def run_weighted_with_lse(x, ids, active):
    out = weighted_nll(x, ids, active * 0.3, with_lse=True, backend="torch")
    return out.loss, out.nll, out.lse


def run_stats(x, ids, active):
    return row_stats(x, torch.stack([ids, ids], -1), entropy=True, active=active, backend="torch")[:3]


def run_log_probs(x, ids, active):
    return token_log_probs(x, ids, active=active, backend="torch")[:1]


def run_every_token(x, ids, _):
    return token_log_probs(x.nan_to_num(0), ids, with_entropy=True, backend="torch")


def run_loss(x, ids, active):
    loss, p_mask = MDLMCrossEntropyLoss(backend="torch"), torch.full((1, N), 0.3, device="cpu")
    out = loss(x[None], ids[None], active[None], p_mask, torch.ones_like(active)[None], num_diffusion_tokens=7)
    return out.weight_sum, out.total_loss  # total_loss, the second one, has an upstream gradient of 2


OPS = (run_nll, run_weighted, run_weighted_with_lse, run_stats, run_log_probs, run_every_token, run_loss)


def outputs(op, x, *others):
    """Return all outputs, and the gradient of a weighted sum of them."""
    x = x.detach().requires_grad_()
    found = op(x, *others)
    total = sum((k + 1) * t.sum() for k, t in enumerate(found) if t.requires_grad)
    return [*(t.detach() for t in found), *torch.autograd.grad(total, x)]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.covering(2, most=2)
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_one_block_gives_the_bits_of_one_row_per_block(op, dtype, special, monkeypatch):
    inputs = SPECIAL[special](*rows(dtype))
    one_block = outputs(op, *inputs)
    small_blocks(monkeypatch)
    for got, expected in zip(one_block, outputs(op, *inputs), strict=True):
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("output", ["lse", "entropy"])
def test_a_row_without_an_id_or_a_gradient_may_have_any_value(output, value):
    logits, ids = torch.randn(3, V, device="cpu"), torch.tensor([4, -100, 2], device="cpu")
    logits[1] = value
    logits.requires_grad_()
    found = getattr(row_stats(logits, ids, entropy=True, backend="torch"), output)
    (grad,) = torch.autograd.grad(found[[0, 2]].sum(), logits)
    assert (grad[1] == 0).all()
    assert grad.isfinite().all()
    assert grad[[0, 2]].count_nonzero() == 2 * V


@pytest.mark.parametrize("op", [run_nll, run_loss])
def test_backward_of_a_small_call_rejects_logits_changed_in_place(op):
    logits, ids, active = rows(torch.float32)
    x = logits.requires_grad_() * 1.0
    found = op(x, ids, active)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(t.sum() for t in found).backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_weights_of_a_small_loss_are_constants_in_the_dtype_of_sums(dtype):
    logits, ids, active = rows(torch.float32)
    model_output, weights = ModelOutput(LOGITS, Options(backend="torch"), logits), active.to(dtype)
    out = model_output.weighted(ids, weights.requires_grad_(dtype.is_floating_point))
    expected = model_output.weighted(ids, active.float())
    assert out.loss.dtype == out.nll.dtype == torch.float32
    assert torch.equal(out.loss, expected.loss)
    assert not out.loss.requires_grad


def test_a_small_loss_takes_any_number_of_backward_passes_and_no_second_derivative():
    logits, ids, active = rows(torch.float32)
    x = logits.requires_grad_()
    loss = run_loss(x, ids, active)[1]
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first.nan_to_num(), second.nan_to_num())
    assert first[0].count_nonzero() == V
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()
    assert torch.autograd.grad(loss * 0.0, x)[0].count_nonzero() == 0


def test_operations_of_small_calls():
    """Limits are slightly above the current numbers. Plain PyTorch needs 2, some 20, and some 40 for a masked loss."""
    logits, ids = torch.randn(1, 1, 100, device="cpu"), torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    assert operations(lambda: token_log_probs(logits, ids, backend="torch")) <= 20

    def both():
        out = token_log_probs(x, ids, with_entropy=True, backend="torch")
        (out.log_probs + out.entropy).sum().backward()

    x = logits.clone().requires_grad_()
    assert operations(both) <= 97
    logits, ids = torch.randn(2, 64, 1000, device="cpu", requires_grad=True), torch.zeros(2, 64, dtype=torch.int64)
    noise, p_mask = torch.arange(128).view(2, 64) % 2 == 0, torch.full((2, 64), 0.5)
    loss = MDLMCrossEntropyLoss(backend="torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        count = operations(lambda: loss(logits, ids, noise, p_mask, torch.ones_like(noise)).total_loss.backward())
    finally:
        torch.set_num_threads(before)
    assert count <= 70
