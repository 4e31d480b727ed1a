"""Objectives of row statistics, compared with float64 autograd of the oracle; the logits are computed only once."""

import pytest
import torch

import reference
from dllm_kernels.ops import linear_row_objective, row_objective, row_stats
from tests.conftest import DEVICE
from tests.support.inputs import EVERY_KIND, KINDS, Source, exact
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


def drawn(source, dtype):
    return lambda seed: (source.leaves((2, 5), V, dtype, D=D, seed=seed + 100, size=1.0), torch.tensor(0.7).to(DEVICE))


@pytest.mark.everyday(7)
@objectives
@pytest.mark.covering(2, most=2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("transform", [{}, {"softcap": 4.0, "scale": 0.7, "skip_id": 3}], ids=["", "transformed"])
@pytest.mark.parametrize(("chunk_size", "num_active"), [(3, None), (None, None), (4, 10)])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_parity(kind, fn, dtype, transform, chunk_size, num_active, backend):
    ids, aux, active = draw_inputs(fn, dtype, 2, 5)
    ids = ids.masked_fill(ids == transform.get("skip_id"), 4) if transform else ids
    source = Source(kind, backend, chunk_size=chunk_size, num_active=num_active)

    def ours(*x):
        options_ = {"active": active, "backend": backend, **options(fn), **transform}
        return row_objective(source.argument(*x), ids, fn, *aux, **options_).loss

    def oracle(*x):
        cast = (t.to(x[0]) for t in aux)
        return reference.row_objective(source.logits(*x), ids, fn, *cast, active=active, **transform)

    assert_parity(ours, oracle, drawn(source, dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_an_objective_that_writes_into_the_statistics(kind):
    x, ids = exact(kind, torch.randn(4, V, device=DEVICE), chunk_size=3), torch.arange(4, device=DEVICE)
    out, changed = (
        row_objective(x, ids, fn, entropy=True) for fn in (lambda s: 2 * s.log_probs, lambda s: s.log_probs.mul_(2))
    )
    for a, b in zip(out, changed, strict=True):
        torch.testing.assert_close(a, b)
    changed.value.zero_()
    torch.testing.assert_close(changed.log_probs, out.log_probs)


@objectives
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_beside_the_loss(kind, fn):
    """Further outputs are detached, 0 in inactive rows, and those of ``row_stats``."""
    ids, aux, active = draw_inputs(fn, torch.float64, 2, 5)
    x = exact(kind, torch.randn(2, 5, V, device=DEVICE, dtype=torch.float64).requires_grad_(), chunk_size=3)
    out = row_objective(x, ids, fn, *aux, active=active, **options(fn))
    stats = row_stats(x, ids, active=active, **options(fn))
    for name in out._fields:
        got = getattr(out, name)
        assert got is None or name == "loss" or not got.requires_grad
        if got is not None and hasattr(stats, name):
            assert_equal_but_for_contraction(got, getattr(stats, name).detach())
    assert (out.correct is None) == (stats.correct is None)
    plain = [t[active] if t is not None else None for t in stats]
    expected = fn(type(stats)(*plain), *(t[active] for t in aux))
    torch.testing.assert_close(out.value[active], expected.detach())
    assert (out.value[~active] == 0).all()
    torch.testing.assert_close(out.value.sum(), out.loss.detach())


ONES, IDS = torch.ones(3), torch.tensor([1, 2, 3])
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
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("arguments", "options", "error", "message"), BAD)
def test_bad_input(arguments, options, error, message, kind):
    with pytest.raises(error, match=f"^{message}"):
        row_objective(exact(kind, torch.zeros(3, V, requires_grad=True)), IDS, *arguments, **options)


def test_a_closure_over_a_tensor_that_requires_a_gradient():
    temperature, x = torch.ones((), requires_grad=True), torch.zeros(3, V, requires_grad=True)
    with pytest.raises(ValueError, match=r"^fn must not use a tensor that requires a gradient"):
        row_objective(exact("head", x), IDS, lambda s: s.log_probs / temperature)


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


@pytest.mark.parametrize("kind", KINDS)
def test_fn_receives_the_predicted_ids(kind, backend):
    x, targets = torch.randn(2, 5, V, device=DEVICE), torch.randint(1, V, (2, 5), device=DEVICE)
    options = {"active": torch.tensor([[1, 1, 0, 1, 1]] * 2, device=DEVICE), "skip_id": 0}
    logits, rows = exact(kind, x, chunk_size=3), lambda stats: stats.log_probs * stats.ids
    out = row_objective(logits, targets, rows, with_ids=True, backend=backend, **options)
    expected = reference.row_stats(x, targets, **options)
    assert torch.equal(out.ids, expected.ids)
    torch.testing.assert_close(out.value, expected.log_probs * expected.ids)


def test_a_constant_has_a_gradient_of_0():
    h, w, ids = torch.randn(3, D, requires_grad=True), torch.randn(V, D, requires_grad=True), torch.tensor([1, 2, 3])
    out = linear_row_objective(h, w, ids, lambda s: torch.ones_like(s.log_probs))
    assert out.loss.item() == 3
    assert out.correct is None
    assert not any(g.any() for g in torch.autograd.grad(out.loss, (h, w), materialize_grads=True))
