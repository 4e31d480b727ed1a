"""Objectives of row statistics, compared with float64 autograd of the oracle; the logits are computed only once."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import reference
from dllm_kernels.ops import linear_row_objective, linear_row_stats, row_objective
from tests.conftest import DEVICE
from tests.support.parity import assert_equal_but_for_contraction, assert_parity

V, D = 23, 6


def clipped(stats, old, ref, advantages):
    """Compute GRPO's clipped ratio with a k3 penalty."""
    ratio = (stats.log_probs - old).exp()
    away = ref - stats.log_probs
    return 0.04 * (away.exp() - away - 1) - torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def focal(stats, weights, *_):
    return -weights.abs() * (1 - stats.log_probs.exp()).square() * stats.log_probs


def entropy_of_correct(stats, weights, *_):
    return torch.where(stats.correct, stats.entropy, 0.0) * weights.abs() + 0.1 * stats.entropy


def weighted(stats, weights, *_):
    return -weights * stats.log_probs


def margin(stats, weights, *_):
    """Combine two ids and the logsumexp."""
    return (
        weights * torch.nn.functional.softplus(stats.log_probs[:, 1] - stats.log_probs[:, 0])
        + 0.01 * stats.lse.square()
    )


OBJECTIVES = {f.__name__: f for f in (clipped, focal, entropy_of_correct, weighted, margin)}
objectives = pytest.mark.parametrize("fn", OBJECTIVES.values(), ids=OBJECTIVES)


def ids_for(fn, *rows, V=V):
    ids = torch.randint(0, V, (*rows, 2) if fn is margin else rows, device=DEVICE)
    ids.view(-1)[1] = -100
    return ids


def draw_inputs(fn, dtype, *rows, seed=0, V=V):
    torch.manual_seed(seed)
    aux = [torch.randn(*rows, device=DEVICE, dtype=torch.promote_types(dtype, torch.float32)) - 2 for _ in range(3)]
    active = torch.rand(rows, device=DEVICE) < 0.7
    active[..., 0] = True
    return ids_for(fn, *rows, V=V), aux, active


def options(fn):
    return {"entropy": fn is entropy_of_correct, "with_correct": fn is entropy_of_correct}


def logits_draw(fn, dtype):
    def draw(seed):
        torch.manual_seed(seed + 100)
        return [torch.randn(2, 5, V, device=DEVICE).to(dtype)], torch.tensor(0.7, device=DEVICE)

    return draw


def hidden_draw(dtype):
    def draw(seed):
        torch.manual_seed(seed + 100)
        leaves = [torch.randn(s, device=DEVICE).to(dtype) for s in ((2, 5, D), (V, D), (V,))]
        return leaves, torch.tensor(0.7, device=DEVICE)

    return draw


@pytest.mark.everyday(1)
@objectives
@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("transform", [{}, {"softcap": 4.0, "scale": 0.7, "skip_id": 3}], ids=["", "transformed"])
def test_parity_from_logits(fn, dtype, transform, backend):
    ids, aux, active = draw_inputs(fn, dtype, 2, 5)
    ids = ids.masked_fill(ids == transform.get("skip_id"), 4) if transform else ids

    def ours(x):
        return row_objective(x, ids, fn, *aux, active=active, backend=backend, **options(fn), **transform).loss

    def oracle(x):
        return reference.row_objective(x, ids, fn, *(t.to(x) for t in aux), active=active, **transform)

    assert_parity(ours, oracle, logits_draw(fn, dtype))


@pytest.mark.everyday(5)
@objectives
@pytest.mark.covering(2, most=2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("chunk_size", "num_active"), [(3, None), (None, None), (4, 10)])
def test_parity_from_hidden_states(fn, dtype, chunk_size, num_active, backend):
    ids, aux, active = draw_inputs(fn, dtype, 2, 5)
    sizes = {"chunk_size": chunk_size, "num_active": num_active}

    def ours(h, w, b):
        return linear_row_objective(
            h, w, ids, fn, *aux, bias=b, active=active, backend=backend, **options(fn), **sizes
        ).loss

    def oracle(h, w, b):
        return reference.linear_row_objective(h, w, ids, fn, *(t.to(h.dtype) for t in aux), bias=b, active=active)

    assert_parity(ours, oracle, hidden_draw(dtype))


def test_float16_rows_of_high_and_low_weight_in_one_chunk(backend):
    """The gradient of each row keeps its precision, whatever the weights of previous chunks and neighbouring rows."""
    weights = torch.logspace(0, -6, 14, device=DEVICE)[[1, 2, 3, 4, 11, 5, 6, 7, 8, 12, 9, 10, 13, 0]]
    h, w = (torch.randn(shape, device=DEVICE).half().requires_grad_() for shape in ((14, D), (V, D)))
    targets = torch.randint(0, V, (14,), device=DEVICE)
    out = linear_row_objective(h, w, targets, weighted, weights, chunk_size=5, backend=backend)
    grads = torch.autograd.grad(out.loss, (h, w))
    leaves = [t.detach().double().requires_grad_() for t in (h, w)]
    exact = torch.autograd.grad(reference.linear_row_objective(*leaves, targets, weighted, weights.double()), leaves)
    for got, want in zip(grads, exact, strict=True):
        error = (got.double() - want).abs().amax(1) / want.abs().amax(1).clamp(min=torch.finfo(torch.float16).tiny)
        assert error.max() <= 2 * torch.finfo(torch.float16).eps


@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_an_objective_that_writes_into_the_statistics(form):
    h, w, ids = torch.randn(4, D, device=DEVICE), torch.randn(V, D, device=DEVICE), torch.arange(4, device=DEVICE)

    def run(fn):
        if form == "logits":
            return row_objective(h @ w.t(), ids, fn, entropy=True)
        return linear_row_objective(h, w, ids, fn, entropy=True, chunk_size=3)

    out, changed = run(lambda s: 2 * s.log_probs), run(lambda s: s.log_probs.mul_(2))
    for a, b in zip(out, changed, strict=True):
        torch.testing.assert_close(a, b)
    changed.value.zero_()
    torch.testing.assert_close(changed.log_probs, out.log_probs)


@objectives
def test_outputs_beside_the_loss(fn):
    """Further outputs are detached, 0 in inactive rows, and equal from logits and from hidden states."""
    ids, aux, active = draw_inputs(fn, torch.float64, 2, 5)
    (h, w, b), _ = hidden_draw(torch.float64)(0)
    h.requires_grad_()
    fused = linear_row_objective(h, w, ids, fn, *aux, bias=b, active=active, chunk_size=3, **options(fn))
    plain = row_objective(h @ w.t() + b, ids, fn, *aux, active=active, **options(fn))
    stats = linear_row_stats(h, w, ids, bias=b, active=active, chunk_size=3, **options(fn))
    for name in plain._fields:
        got, want = getattr(fused, name), getattr(plain, name)
        torch.testing.assert_close(got, want)
        assert got is None or name == "loss" or not (got.requires_grad or want.requires_grad)
    assert_equal_but_for_contraction(fused.log_probs, stats.log_probs.detach())
    assert (fused.value[~active] == 0).all()
    torch.testing.assert_close(fused.value.sum(), fused.loss.detach())


@pytest.mark.parametrize(("trains", "products"), [((), 1), ((0,), 2), ((1,), 2), ((0, 1), 3)])
def test_the_logits_are_computed_once(trains, products, backend):
    ids, aux, active = draw_inputs(clipped, torch.float32, 9)
    h, w = torch.randn(9, D, device=DEVICE), torch.randn(V, D, device=DEVICE)
    for i in trains:
        (h, w)[i].requires_grad_()
    with FlopCounterMode(display=False) as counter:
        loss = linear_row_objective(h, w, ids, clipped, *aux, active=active, backend=backend).loss
        if trains:
            loss.backward()
    assert counter.get_total_flops() == products * 2 * int(active.sum()) * w.numel()


def test_a_second_backward_raises_with_advice():
    ids, aux, _ = draw_inputs(focal, torch.float32, 4)
    h = torch.randn(4, D, device=DEVICE, requires_grad=True)
    loss = linear_row_objective(h, torch.randn(V, D, device=DEVICE), ids, focal, *aux).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"linear_row_objective computes its gradients .* use linear_row_stats"):
        loss.backward()


def test_inactive_rows_have_no_effect():
    """NaN in inactive rows has no effect, nor have non-finite values of the objective for all-zero statistics."""
    ids, _, active = draw_inputs(focal, torch.float32, 9)
    h, w = torch.randn(9, D, device=DEVICE), torch.randn(V, D, device=DEVICE, requires_grad=True)
    h[~active] = math.nan

    def log_of_nll(stats, *_):
        return (-stats.log_probs).log()

    ids = ids.clamp(min=0)
    for out in (
        linear_row_objective(h.requires_grad_(), w, ids, log_of_nll, active=active),
        row_objective(h @ w.t(), ids, log_of_nll, active=active),
    ):
        grads = torch.autograd.grad(out.loss, [h, w])
        assert out.loss.isfinite()
        assert grads[0][active].isfinite().all()
    assert linear_row_objective(h, w, ids, log_of_nll, active=active & False).loss == 0


FORMS = {
    "logits": lambda fn, *aux, **o: row_objective(torch.zeros(3, V), torch.tensor([1, 2, 3]), fn, *aux, **o),
    "hidden": lambda fn, *aux, **o: linear_row_objective(
        torch.zeros(3, D, requires_grad=True), torch.zeros(V, D), torch.tensor([1, 2, 3]), fn, *aux, **o
    ),
}
ONES = torch.ones(3)
BAD = [
    (("focal",), {}, TypeError, r"fn must be a function of the row statistics, got str$"),
    ((focal, 1.0), {}, TypeError, r"aux\[0\] must be a torch.Tensor, got float$"),
    ((focal, ONES, torch.ones(4)), {}, ValueError, r"aux\[1\] must have shape \(3, '\*'\)"),
    ((focal, ONES.clone().requires_grad_()), {}, ValueError, r"aux\[0\] must not require a gradient"),
    ((lambda s: s.lse.sum(),), {}, ValueError, r"fn must return one number for each of its 3 rows"),
    ((lambda s: 1.0,), {}, TypeError, r"fn must return a floating tensor, got float$"),
    ((lambda s: s.lse > 0,), {}, TypeError, r"fn must return a floating tensor"),
    ((focal, ONES), {"entropy": "yes"}, TypeError, r"entropy must be a bool, got str$"),
    ((focal, ONES), {"backend": "cuda"}, ValueError, r"backend must be one of auto, triton, torch, got 'cuda'$"),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("arguments", "options", "error", "message"), BAD)
def test_bad_input(arguments, options, error, message, form):
    with pytest.raises(error, match=f"^{message}"):
        FORMS[form](*arguments, **options)


def test_a_closure_over_a_tensor_that_requires_a_gradient():
    temperature = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match=r"^fn must not use a tensor that requires a gradient"):
        FORMS["hidden"](lambda s: s.log_probs / temperature)


@pytest.mark.parametrize("inside", [False, True], ids=["of the value", "of the whole row"])
def test_a_closure_that_alone_requires_a_gradient(inside):
    """Neither the hidden states nor the head require one, so that nothing else would show that it is lost."""
    temperature = torch.ones((), requires_grad=True)
    h, w, ids = torch.zeros(3, D), torch.zeros(V, D), torch.tensor([1, 2, 3])

    def fn(stats):
        return stats.log_probs.detach() / temperature if inside else stats.log_probs + torch.zeros(3) * temperature

    with pytest.raises(ValueError, match=r"^fn must not use a tensor that requires a gradient"):
        linear_row_objective(h, w, ids, fn)
    row_objective(h @ w.t(), ids, fn).loss.backward()  # from logits, it receives the gradient
    assert temperature.grad is not None
    with torch.no_grad():
        assert linear_row_objective(h, w, ids, fn).loss.isfinite()


def test_a_constant_has_a_gradient_of_0():
    h, w, ids = torch.randn(3, D, requires_grad=True), torch.randn(V, D, requires_grad=True), torch.tensor([1, 2, 3])
    out = linear_row_objective(h, w, ids, lambda s: torch.ones_like(s.log_probs))
    assert out.loss.item() == 3
    assert out.correct is None
    assert not any(g.any() for g in torch.autograd.grad(out.loss, (h, w), materialize_grads=True))
