"""The mean embedding of a row's distribution: parity, bumps, cost, inactive rows, bad input."""

import math
import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import reference
from dllm_kernels import soft_embedding
from tests.conftest import DEVICE
from tests.support.parity import assert_as_good_as_plain, largest_error, reduction_sizes
from tests.support.rows import of_each_backend

B, L, V, D, E = 2, 6, 37, 5, 4
NAN = math.nan
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TRANSFORMS = ({}, {"scale": 1.7}, {"skip_id": 3}, {"softcap": 2.0, "scale": 0.6, "skip_id": 3})
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def draw(dtype, seed=0):
    """Draw (hidden, head, embedding, bias) and (bump, ids); one row has no id."""
    torch.manual_seed(seed)
    tensors = [torch.randn(s).to(DEVICE, dtype) for s in ((B, L, D), (V, D), (V, E), (V,))]
    ids = torch.randint(4, V, (B, L))
    ids[1, 2] = -100
    return tensors, (3 * torch.randn(B, L).to(DEVICE), ids.to(DEVICE))


def judge(ours, theirs, dtype, label=""):
    """Compare two functions of (hidden, head, embedding, bias), bump and ids."""
    draws = [draw(dtype, seed) for seed in range(6)]
    got = [ours(*tensors, *bumps) for tensors, bumps in draws[:2]]
    exact = [theirs(*(t.double() for t in tensors), *bumps) for tensors, bumps in draws]
    plain = [theirs(*tensors, *bumps) for tensors, bumps in draws]
    assert all(g.dtype == dtype and not g.requires_grad for g in got)
    assert_as_good_as_plain(got, exact, largest_error(plain, exact), label, reduction_sizes(draws[0][0]))


@pytest.mark.everyday(2)
@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("chunk", [1, 5, 100, None])
@pytest.mark.parametrize("bumped", [False, True])
def test_parity(bumped, chunk, transform, dtype, path):
    if dtype == torch.bfloat16 and path == "triton" and DEVICE == "cpu":
        pytest.skip("the interpreter truncates to bfloat16 where a GPU rounds")

    def ours(h, w, e, b, bump, ids):
        bumps = {"bump": bump, "bump_ids": ids} if bumped else {}
        return soft_embedding(h, w, e, bias=b, chunk_size=chunk, backend=path, **bumps, **transform)

    def theirs(h, w, e, b, bump, ids):
        return reference.soft_embedding(h, w, e, b, *((bump, ids) if bumped else ()), **transform)

    judge(ours, theirs, dtype)


def test_by_hand():
    """With odds (1, 2, 1), the mean of 10, 20 and 30 is 20. A bump of ln 6 of the last makes the odds (1, 2, 6)."""
    head = torch.tensor([[0.0], [math.log(2.0)], [0.0]], device=DEVICE)
    table = torch.tensor([[10.0], [20.0], [30.0]], device=DEVICE)
    one = torch.ones(1, 1, device=DEVICE)
    assert soft_embedding(one, head, table).item() == pytest.approx(20)
    last = torch.tensor([2], device=DEVICE)
    assert soft_embedding(one, head, table, bump=math.log(6), bump_ids=last).item() == pytest.approx(230 / 9)
    assert soft_embedding(one, head, table, bump=math.log(6), bump_ids=last - 102).item() == pytest.approx(20)


@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("transform", TRANSFORMS[::3], ids=str)
@pytest.mark.parametrize("bump", [0.0, 90.0, 1e30, -20.0, -1e30])
def test_a_bump_of_any_size(bump, transform, backend):
    (h, w, e, b), (_, ids) = draw(torch.float64)
    got = soft_embedding(h, w, e, bias=b, bump=bump, bump_ids=ids, backend=backend, **transform)
    bumps = torch.full((B, L), bump, dtype=torch.float64, device=DEVICE)
    torch.testing.assert_close(got, reference.soft_embedding(h, w, e, b, bumps, ids, **transform))
    if bump > 1e3:
        there = ids != -100
        torch.testing.assert_close(got[there], e[ids[there]])


@pytest.mark.everyday(2)
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("transform", [{}, {"scale": 1.7}, {"skip_id": 3}, {"softcap": 60.0, "scale": 0.9}], ids=str)
def test_a_near_certain_token_with_a_bump_far_below_0(transform, path):
    """The token has probability 1 - 1e-7, or one that float32 or float64 cannot distinguish from 1.

    The bound is the usual one.
    """
    table, ids = torch.eye(V, device=DEVICE), torch.tensor([4], device=DEVICE)
    for t in (-5.0, -20.0, -100.0, -math.inf, 5.0):
        bump = torch.tensor([t], device=DEVICE)
        for seed, ahead in enumerate((0.0, 10.0, 20.0, 45.0, 90.0)):
            torch.manual_seed(seed)
            h = torch.randn(1, V, device=DEVICE)
            h[0, 4] += ahead
            exact, plain = (
                reference.soft_embedding(h.to(d), table.to(d), table.to(d), None, bump.to(d), ids, **transform)
                for d in (torch.float64, torch.float32)
            )
            got = soft_embedding(h, table, table, bump=bump, bump_ids=ids, backend=path, **transform)
            assert_as_good_as_plain([got], [exact], largest_error([plain], [exact]), f"{t}, {ahead}", {V})
            torch.testing.assert_close(got.sum(), torch.ones_like(got.sum()), rtol=1e-5, atol=0)


@pytest.mark.everyday(2)
@of_each_backend
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_bump_of_the_only_token(softcap, path):
    """The row has no other token, so the token has probability 1 for any bump."""
    h, table = torch.randn(3, D, device=DEVICE), torch.randn(1, E, device=DEVICE)
    zeros = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    alone = torch.full((V,), -math.inf, device=DEVICE)
    alone[7] = 1.5
    for t in (-100.0, 0.0, 100.0):
        options = {"bump": t, "backend": path, "softcap": softcap}
        got = soft_embedding(h, torch.randn(1, D, device=DEVICE), table, bump_ids=zeros, **options)
        torch.testing.assert_close(got, table.expand(3, E))
        if softcap is None:
            e = torch.randn(V, E, device=DEVICE)
            got = soft_embedding(h, torch.zeros(V, D, device=DEVICE), e, bias=alone, bump_ids=zeros + 7, **options)
            torch.testing.assert_close(got, e[7].expand(3, E))


@pytest.mark.usefixtures("unchecked")
def test_ids_out_of_range_are_nan_in_their_own_row(backend):
    (h, w, e, _), (bump, ids) = draw(torch.float32)
    ids[0, :4] = torch.tensor([V, -1, -101, 3])
    got = soft_embedding(h, w, e, bump=bump, bump_ids=ids, skip_id=3, chunk_size=5, backend=backend)
    expected = reference.soft_embedding(h, w, e, None, bump, ids, skip_id=3)
    assert torch.equal(got.isnan(), expected.isnan())
    assert got[0, :4].isnan().all()
    assert got[0, 4:].isfinite().all()
    with pytest.raises(IndexError, match=r"^bump_ids"):
        soft_embedding(h, w, e, bump=bump, bump_ids=ids, check_targets=True, backend=backend)


@pytest.mark.everyday(2)
def test_special_rows(path):
    """Logits are the bias.

    A logit of -inf has probability 0. Only rows of -inf alone or with a NaN are NaN, also with a bump.
    """
    x = torch.randn(5, V, device=DEVICE)
    x[0, ::2], x[1], x[2, 7], x[3, 7] = -math.inf, -math.inf, NAN, math.inf
    table = torch.randn(V, E, device=DEVICE)
    for row in x:
        one = torch.zeros(2, D, device=DEVICE)
        got = soft_embedding(one, torch.zeros(V, D, device=DEVICE), table, bias=row, backend=path)
        torch.testing.assert_close(got, (torch.softmax(row, -1) @ table).expand(2, E), equal_nan=True)
        for at in (4, 7):
            ids = torch.full((2,), at, device=DEVICE)
            got = soft_embedding(
                one, torch.zeros(V, D, device=DEVICE), table, bias=row, bump=-9.0, bump_ids=ids, backend=path
            )
            p = torch.softmax(row - 9 * torch.nn.functional.one_hot(ids[0], V), -1)
            torch.testing.assert_close(got, (p @ table).expand(2, E), equal_nan=True)


@pytest.mark.everyday(2)
@pytest.mark.covering(1)
@of_each_backend
@pytest.mark.parametrize("num_active", [None, 8, 9])
def test_inactive_rows_cost_nothing_and_are_zeros(num_active, path):
    (h, w, e, b), (bump, ids) = draw(torch.float32)
    active = (torch.arange(B * L, device=DEVICE) % 3 != 0).view(B, L)
    expected = reference.soft_embedding(h, w, e, b, bump, ids, active)
    h[~active], bump[~active], ids[~active] = NAN, NAN, 10**9
    options = {"bias": b, "bump": bump, "bump_ids": ids, "chunk_size": 3, "backend": path}
    with FlopCounterMode(display=False) as counter:
        got = soft_embedding(h, w, e, active=active, num_active=num_active, **options)
    torch.testing.assert_close(got, expected)
    assert not got[~active].any()
    rows = num_active or 8
    assert counter.get_total_flops() == 2 * rows * V * (D + E)  # two products
    assert soft_embedding(h, w, e, active=active, num_active=7, **options).isnan().all()


@pytest.mark.parametrize("tied", [False, True])
def test_autocast(tied):
    (h, w, e, _), _ = draw(torch.float32)
    e = w if tied else e
    narrow = soft_embedding(h.bfloat16(), w.bfloat16(), e.bfloat16())
    with torch.autocast(DEVICE, torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            head = w.to(dtype)
            assert torch.equal(soft_embedding(h, head, head if tied else e), narrow)
        with pytest.raises(ValueError, match=r"^embedding must have the dtype of hidden, torch\.float32"):
            soft_embedding(h, w, e.double())


def test_bad_input():
    (h, w, e, b), (bump, ids) = (tuple(t.cpu() for t in ts) for ts in draw(torch.float32))

    def raises(error, message, *args, **options):
        with pytest.raises(error, match="^" + re.escape(message)):
            soft_embedding(*args, **options)

    raises(TypeError, "hidden must be a torch.Tensor, got list", [1.0], w, e)
    raises(TypeError, "head must be a torch.Tensor, got NoneType; pass hidden states and the head, or ", h, None, e)
    raises(TypeError, "embedding must be a torch.Tensor, got NoneType", h, w, None)
    raises(
        ValueError, "hidden must have shape [..., 5] to go with head [V, D] = (37, 5), got (2, 6, 4)", h[..., 1:], w, e
    )
    shape = "embedding must have shape (37, E) with E >= 1, as many rows as head, got "
    raises(ValueError, shape + "(36, 4)", h, w, e[1:])
    raises(ValueError, shape + "(37,)", h, w, e[:, 0])
    raises(ValueError, shape + "(37, 0)", h, w, e[:, :0])
    dtype = "embedding must have the dtype of hidden, torch.float32, unless torch.autocast is on, got torch.bfloat16"
    raises(ValueError, dtype, h, w, e.bfloat16())
    raises(ValueError, "embedding must have dtype float16, bfloat16, float32, float64, got int64", h, w, e.long())
    raises(ValueError, "bump and bump_ids must both be given or neither, got bump alone", h, w, e, bump=1.0)
    raises(ValueError, "bump and bump_ids must both be given or neither, got bump_ids alone", h, w, e, bump_ids=ids)
    raises(TypeError, "bump must be a number or a tensor, got str", h, w, e, bump="high", bump_ids=ids)
    raises(ValueError, "bump must be finite in torch.float32, got inf", h, w, e, bump=math.inf, bump_ids=ids)
    message = "bump must have shape (2, 6) (that of hidden without its last dimension), got (2, 5)"
    raises(ValueError, message, h, w, e, bump=bump[:, 1:], bump_ids=ids)
    raises(ValueError, "bump must be on cpu like hidden, got meta", h, w, e, bump=bump.to("meta"), bump_ids=ids)
    message = "bump_ids must have shape (2, 6) (that of hidden without its last dimension), got (2, 5)"
    raises(ValueError, message, h, w, e, bump=1.0, bump_ids=ids[:, 1:])
    raises(ValueError, "bias must have shape (37,)", h, w, e, bias=b[1:])
    raises(ValueError, "active must have shape (2, 6)", h, w, e, active=ids[:, 1:])
    raises(ValueError, "chunk_size must be at least 1, got 0", h, w, e, chunk_size=0)
    raises(ValueError, "skip_id must lie in [0, 37), got 37", h, w, e, skip_id=37)
    alone = "skip_id must leave a column to choose, got 0 and a head of one column"
    raises(ValueError, alone, h, w[:1], e[:1], skip_id=0)
    raises(ValueError, "backend must be one of", h, w, e, backend="cuda")
    raises(TypeError, "extra must be a tuple of two tensors (u, U), got torch.Tensor", h, w, e, extra=e)
