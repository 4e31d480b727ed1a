"""Transforms of the logits: each step and all of them, on every path, against autograd through the plain formula."""

import inspect
import math

import pytest
import torch

import reference
from dllm_kernels import FusedLinearCrossEntropy, MaskedCrossEntropy, compute_per_token_nll
from dllm_kernels.ops import token_nll, weighted_nll
from tests.conftest import DEVICE
from tests.support.cases import PLAIN
from tests.support.inputs import SOURCES, on_source, skip_unjudged
from tests.support.parity import assert_as_good_as_plain, assert_parity, same, value_and_grads
from tests.support.rows import (
    LAYOUTS,
    PATHS,
    SPREAD,
    around_a_transform,
    between_ordinary_rows,
    extreme_rows,
    laid_out,
    of_each_backend,
    on_path,
)

NAN, INF = math.nan, math.inf
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
V, D = 53, 8
STEPS = (
    {"softcap": 4.0},
    {"scale": 1 / 0.7},
    {"skip_id": 17},
    {"softcap": 2.5, "scale": 1.9, "skip_id": 0},
    {"softcap": 1e4, "scale": 0.3, "skip_id": V - 1},
)
pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(params=[path for path in PATHS if "threads" not in path])  # without effect on the formula
def path(request, monkeypatch):
    return on_path(request.param, monkeypatch)


@pytest.fixture(params=[source for source in SOURCES if "threads" not in source[1]], ids="-".join)
def source(request, monkeypatch):
    return on_source(request.param, monkeypatch, chunk_size=3)


def drawn(steps, shape=(7,), seed=0):
    """Draw logits of the size of the cap, targets other than the skipped column, and one upstream gradient per row."""
    torch.manual_seed(seed)
    logits, targets = 4 * torch.randn(*shape, V), torch.randint(0, V, shape)
    skip = steps.get("skip_id", -1)
    targets = torch.where(targets == skip, (skip + 1) % V, targets)
    targets[..., 0] = -100
    return logits.to(DEVICE), targets.to(DEVICE), torch.randn(shape, device=DEVICE)


def names(value):
    return " ".join(value) if isinstance(value, dict) else str(value)


@pytest.mark.everyday(4)
@pytest.mark.covering(2, most=2)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("steps", STEPS, ids=names)
def test_parity(steps, dtype, weighted, source):
    skip_unjudged(source, dtype)
    _, targets, weights = drawn(steps)

    def ours(*x):
        if weighted:
            return weighted_nll(source.argument(*x), targets, weights, backend=source.backend, **steps).loss
        return token_nll(source.argument(*x), targets, backend=source.backend, **steps).nll

    def plain(*x):
        nll = reference.token_nll(reference.transformed(source.logits(*x), **steps), targets)
        return (nll * weights).sum() if weighted else nll

    def draw(seed):
        return source.leaves((7,), V, dtype, D=D, seed=seed), torch.randn(() if weighted else (7,), device=DEVICE)

    assert_parity(ours, plain, draw)


@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("kind", [*SPREAD, *LAYOUTS])
@pytest.mark.parametrize("transformed", [False, True])
def test_rows_far_apart_and_anywhere_in_memory(kind, transformed, path):
    """Test logits of 37 columns with the kinds of rows that are tested for every row op."""
    steps = {"softcap": 2.5, "scale": 1.9, "skip_id": 0} if transformed else {}
    x = laid_out(kind) if kind in LAYOUTS else SPREAD[kind](4 * torch.randn(6, 37))
    x = x.to(DEVICE)
    targets = torch.randint(0, x.shape[-1], x.shape[:-1], device=DEVICE).clamp(min=min(1, x.shape[-1] - 1))
    if kind == "one column":
        steps.pop("skip_id", None)
    upstream = torch.randn(targets.shape, device=DEVICE)
    leaf = x.detach().requires_grad_()
    nll, lse, correct, ids = token_nll(
        leaf, targets, with_lse=True, with_correct=True, with_ids=True, backend=path, **steps
    )
    (grad,) = torch.autograd.grad(nll, leaf, upstream)
    oracle = value_and_grads(
        lambda x: reference.token_nll(reference.transformed(x, **steps), targets), [x.double()], upstream.double()
    )
    torch.testing.assert_close(nll.detach(), oracle[0].float())
    torch.testing.assert_close(grad, oracle[1].float())
    z = reference.transformed(x, **steps)
    torch.testing.assert_close(lse, reference.token_lse(z))
    assert same(correct, reference.argmax_match(z, targets), "correct")
    assert same(ids, reference.predicted_ids(z, skip_id=steps.get("skip_id")), "ids")


@pytest.mark.everyday(1)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("steps", [{"softcap": 5.0, "skip_id": 17}, {"scale": 0.5, "skip_id": 17}, STEPS[0]], ids=names)
def test_special_rows(steps, dtype, path):
    rows = extreme_rows(V) | around_a_transform(V, 17, 200.0 if "softcap" in steps else 4.0)
    names, logits, targets = between_ordinary_rows(rows, dtype)
    x = logits.clone().requires_grad_()
    out = token_nll(x, targets, with_lse=True, with_correct=True, with_ids=True, backend=path, **steps)
    (grad,) = torch.autograd.grad(out.nll.sum(), x)
    possible = reference.possible_targets(targets, steps.get("skip_id"))

    def oracle(x):
        return reference.token_nll(reference.transformed(x, **steps), possible)

    ones = torch.ones(len(targets), device=DEVICE)
    exact, plain = (value_and_grads(oracle, [logits.to(t)], ones) for t in (torch.float64, logits.dtype))
    for i, name in enumerate(names):
        for ours, e, p in ((out.nll.detach(), exact[0], plain[0]), (grad, exact[1], plain[1])):
            error = (p[i].double() - e[i]).abs().nan_to_num(0, 0, 0).max().item()
            if ours is grad and e[i].isnan().any():  # it is unspecified which columns besides the skipped one are NaN
                assert ours[i].isnan().any(), name
            else:
                assert_as_good_as_plain([ours[i]], [e[i]], error, name, sizes={V})
    transformed = reference.transformed(logits, **steps)
    assert same(out.correct, reference.argmax_match(transformed, possible), "correct")
    assert same(out.ids, reference.predicted_ids(transformed, skip_id=steps.get("skip_id")), "ids")
    fine = ~exact[0].isnan()
    torch.testing.assert_close(out.lse[fine], reference.token_lse(transformed[fine]))
    if "skip_id" in steps:
        assert grad[:, 17].eq(0).all()


@pytest.mark.everyday(2)
@pytest.mark.covering(1, most=2)
@of_each_backend
@pytest.mark.parametrize("skip_id", [0, 1, 15, 16, 31, V - 2, V - 1])
@pytest.mark.parametrize("offset", [0, 3])
def test_the_skipped_column_anywhere_in_a_row_that_begins_anywhere(skip_id, offset, path):
    """The column is the first or last of a tile, or among the ragged columns at either end."""
    memory = torch.full((5, V + 7), NAN, device=DEVICE)
    x = memory[:, offset : offset + V]
    x.copy_(drawn({})[0][:5])
    targets = torch.full((5,), (skip_id + 2) % V, device=DEVICE)
    x[:, skip_id] = 50.0
    steps = {"softcap": 6.0, "skip_id": skip_id}
    ours = value_and_grads(lambda x: token_nll(x, targets, backend=path, **steps).nll, [x], torch.ones(5))
    view = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(token_nll(view, targets, backend=path, **steps).nll.sum(), view)
    plain = value_and_grads(
        lambda x: reference.token_nll(reference.transformed(x, **steps), targets), [x], torch.ones(5)
    )
    torch.testing.assert_close(ours[0], plain[0])
    torch.testing.assert_close(ours[1], plain[1])
    torch.testing.assert_close(grad, plain[1])


@pytest.mark.everyday(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_small_logits_under_a_large_cap_keep_their_precision(dtype, path):
    """Computing tanh as 1 - 2 / (exp(2u) + 1) would be off by the rounding of the cap."""
    cap = 1e6
    x = (4 * torch.randn(5, V, device=DEVICE)).to(dtype)
    targets = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    got = value_and_grads(lambda x: token_nll(x, targets, softcap=cap, backend=path).nll, [x], torch.ones(5))
    exact = value_and_grads(
        lambda x: reference.token_nll(reference.transformed(x, cap), targets), [x.double()], torch.ones(5)
    )
    for g, e in zip(got, exact, strict=True):
        assert_as_good_as_plain([g], [e], 0.0, sizes={V})


@pytest.mark.parametrize("steps", [{"softcap": 1.0}, {"scale": 1.5}, {"scale": 1.5, "skip_id": 2}], ids=names)
def test_slopes_keep_their_precision(steps):
    """Far beyond a cap, computing 1 - tanh^2, as plain PyTorch does, would be off by the rounding of 1."""
    pytest.importorskip("triton")
    x, y = torch.tensor([[0.0, 6.0, -8.0, 12.0]], device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    ours = value_and_grads(lambda x: token_nll(x, y, **steps, backend="triton").nll, [x], one)
    exact = value_and_grads(lambda x: reference.token_nll(reference.transformed(x, **steps), y), [x.double()], one)
    torch.testing.assert_close(ours[1].double(), exact[1], rtol=1e-5, atol=0)


@pytest.mark.usefixtures("unchecked")
def test_a_skipped_target_of_a_row_that_does_not_count(path):
    logits, targets, weights = drawn({"skip_id": 9})
    targets[3], weights[3] = 9, 0
    assert weighted_nll(logits, targets, weights, skip_id=9, backend=path).loss.isfinite()
    ignored = token_nll(logits, targets, skip_id=9, ignore_index=9, backend=path).nll
    assert ignored[3] == 0


@pytest.mark.everyday(2)
def test_in_place_backward(path):
    logits, targets, upstream = drawn(STEPS[3])
    expected = value_and_grads(lambda x: token_nll(x, targets, backend=path, **STEPS[3]).nll, [logits], upstream)
    x = logits.clone().requires_grad_()
    nll = token_nll(x, targets, inplace_backward=True, backend=path, **STEPS[3]).nll
    (grad,) = torch.autograd.grad(nll, x, upstream)
    assert grad.data_ptr() == x.data_ptr()
    assert torch.equal(grad, expected[1])


def everything(**steps):
    """Build a call of every op and loss in either form, and of everything else that takes a transform."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 6, V), torch.randint(20, V, (2, 6))
    for case in PLAIN:
        takes = inspect.signature(case.functions[0]).parameters
        if not (steps.keys() <= takes.keys() or "options" in takes):
            continue  # a loss that skips a column by itself, or an op that takes the transform of a record alone
        inputs = case.draw(2, 6, V)
        inputs[case.targets] = torch.randint(20, V, inputs[case.targets].shape)
        yield lambda case=case, i=inputs: case.logits_form(torch.randn(2, 6 * case.width, V), i, **steps)
        yield lambda case=case, i=inputs: case.hidden_form(
            torch.randn(2, 6 * case.width, D), torch.randn(V, D), None, i, **steps
        )
    yield lambda: compute_per_token_nll(x, y, **steps)
    yield lambda: MaskedCrossEntropy(**steps)(x, y)
    if "softcap" not in steps:
        yield lambda: FusedLinearCrossEntropy(**steps)(torch.randn(2, 6, D), y, torch.randn(V, D))


BAD = [
    ({"softcap": 0.0}, ValueError, r"softcap must be positive, from 1e-18 to 1e[+]18, got 0.0"),
    ({"softcap": -3}, ValueError, r"softcap must be positive, from 1e-18 to 1e[+]18, got -3"),
    ({"softcap": INF}, ValueError, r"softcap must be positive, from 1e-18 to 1e[+]18, got inf"),
    ({"softcap": NAN}, ValueError, r"softcap must be positive, from 1e-18 to 1e[+]18, got nan"),
    ({"softcap": "30"}, TypeError, "softcap must be a number or None, got str"),
    ({"softcap": True}, TypeError, "softcap must be a number or None, got bool"),
    ({"scale": -1.0}, ValueError, r"scale must be positive, from 1e-18 to 1e[+]18, got -1.0"),
    ({"scale": 0}, ValueError, r"scale must be positive, from 1e-18 to 1e[+]18, got 0"),
    ({"scale": torch.ones((), requires_grad=True)}, TypeError, "scale must be a number or None, got torch.Tensor"),
    ({"skip_id": V}, ValueError, r"skip_id must lie in \[0, 53\), got 53"),
    ({"skip_id": -1}, ValueError, "skip_id must not be negative, got -1"),
    ({"skip_id": True}, TypeError, "skip_id must be an int or None, got bool"),
    ({"skip_id": 3.0}, TypeError, "skip_id must be an int or None, got float"),
]


@pytest.mark.parametrize(("steps", "error", "message"), BAD)
def test_bad_transforms_are_rejected_by_every_loss(steps, error, message):
    for call in everything(**steps):
        with pytest.raises(error, match=message):
            call()


def test_numbers_of_any_kind_are_accepted():
    import numpy as np

    for call in everything(scale=np.float32(0.5), skip_id=np.int64(3)):
        call()
