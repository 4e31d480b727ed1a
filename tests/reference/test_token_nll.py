"""The oracle itself: numbers worked out by hand, gradcheck, and bad rows.

Logits are logarithms of small integer odds: odds (1, 2, 1) are the probabilities (1/4, 1/2, 1/4).
"""

import math

import pytest
import torch

from reference import argmax_match, compute_per_token_nll, predicted_ids, token_lse, token_nll, weighted_nll
from tests.support.parity import assert_as_good_as_plain, reduction_sizes

LN2 = math.log(2.0)
NAN, INF = math.nan, math.inf


def from_odds(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def logits_with_grad(*rows):
    return torch.tensor(rows, dtype=torch.float64, requires_grad=True)


def test_values():
    logits = from_odds((1, 2, 1), (1, 2, 1), (1, 6, 1)) + torch.tensor([[0.0], [5.0], [-300.0]])
    # -log(2/4) = ln 2; -log(1/4) = 2 ln 2 after a shift by 5; -log(1/8) = 3 ln 2 after a shift by -300
    expected = torch.tensor([LN2, 2 * LN2, 3 * LN2], dtype=torch.float64)
    torch.testing.assert_close(token_nll(logits, torch.tensor([1, 0, 2])), expected)


@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 1, 3)])
def test_any_leading_shape(shape):
    logits = torch.zeros(*shape, 4)
    nll = token_nll(logits, torch.ones(shape, dtype=torch.long))
    torch.testing.assert_close(nll, torch.full(shape, 2 * LN2))  # uniform over four: ln 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_computed_in_float32_at_least_and_gradient_in_the_input_dtype(dtype):
    logits = (4 * torch.randn(6, 33)).to(dtype).requires_grad_()
    targets = torch.arange(6)
    nll = token_nll(logits, targets)
    assert nll.dtype == torch.promote_types(dtype, torch.float32)
    exact = token_nll(logits.detach().double(), targets)
    assert_as_good_as_plain([nll.detach()], [exact], 0.0, sizes=reduction_sizes([logits]))
    nll.sum().backward()
    assert logits.grad.dtype == dtype


def test_huge_logits_do_not_overflow():
    logits = torch.tensor([[1e4, 0.0], [1e4, 0.0], [-1e4, -1e4]])
    # log(e^10000 + 1) - 10000 = 0; 10000 - 0; ln 2
    torch.testing.assert_close(token_nll(logits, torch.tensor([0, 1, 0])), torch.tensor([0.0, 1e4, LN2]))


@pytest.mark.parametrize("targets_dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
def test_ignored_target_has_no_loss_and_no_gradient_for_any_values_in_its_row(targets_dtype):
    logits = logits_with_grad([NAN, INF, -INF], [0.0, LN2, 0.0])
    nll = token_nll(logits, torch.tensor([-100, 1], dtype=targets_dtype))
    nll.sum().backward()
    torch.testing.assert_close(nll, torch.tensor([0.0, LN2], dtype=torch.float64))
    expected = torch.tensor([[0.0, 0.0, 0.0], [0.25, -0.5, 0.25]], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, expected)


def test_another_ignore_index_frees_minus_100_and_takes_its_own():
    nll = token_nll(from_odds((1, 1), (1, 1), (1, 1)), torch.tensor([0, 1, -100]), ignore_index=0)
    torch.testing.assert_close(nll, torch.tensor([0.0, LN2, NAN], dtype=torch.float64), equal_nan=True)


def test_a_uint8_target_of_156_is_not_minus_100():
    nll = token_nll(torch.zeros(1, 256), torch.tensor([156], dtype=torch.uint8))
    torch.testing.assert_close(nll, torch.tensor([8 * LN2]))  # uniform over 256


@pytest.mark.parametrize("target", [-1, -99, -101, 3, 10**9])
def test_target_out_of_range_gives_nan_in_its_own_row_only(target):
    logits = logits_with_grad([0.0, LN2, 0.0], [0.0, LN2, 0.0])
    nll = token_nll(logits, torch.tensor([target, 1]))
    torch.testing.assert_close(nll, torch.tensor([NAN, LN2], dtype=torch.float64), equal_nan=True)
    nll.sum().backward()
    assert logits.grad[0].isnan().all()
    torch.testing.assert_close(logits.grad[1], torch.tensor([0.25, -0.5, 0.25], dtype=torch.float64))


def test_minus_inf_logits_are_probability_zero():
    logits = logits_with_grad([0.0, -INF, 0.0], [0.0, -INF, 0.0])
    nll = token_nll(logits, torch.tensor([0, 1]))
    assert nll.tolist() == pytest.approx([LN2, INF])  # two equal ones are left; an impossible target
    nll[0].backward()
    torch.testing.assert_close(logits.grad[0], torch.tensor([-0.5, 0.0, 0.5], dtype=torch.float64))


@pytest.mark.parametrize("bad", [[NAN, 0.0, 0.0], [-INF, -INF, -INF], [INF, 0.0, 0.0]])
def test_a_row_without_a_distribution_is_nan_in_its_own_row_only(bad):
    logits = logits_with_grad(bad, [0.0, LN2, 0.0])
    nll = token_nll(logits, torch.tensor([1, 1]))
    assert nll.isnan().tolist() == [True, False]
    nll.sum().backward()
    torch.testing.assert_close(logits.grad[1], torch.tensor([0.25, -0.5, 0.25], dtype=torch.float64))


@pytest.mark.parametrize("mask", [torch.tensor([False, True]), torch.tensor([0, 2]), torch.tensor([0.0, 0.5])])
def test_inactive_rows_are_inert_even_when_they_hold_nan_or_a_bad_target(mask):
    logits = logits_with_grad([NAN, INF, 0.0], [0.0, LN2, 0.0])
    targets = torch.tensor([77, 1])
    nll = token_nll(logits, targets, active=mask)
    nll.sum().backward()
    torch.testing.assert_close(nll, torch.tensor([0.0, LN2], dtype=torch.float64))
    assert logits.grad[0].tolist() == [0.0, 0.0, 0.0]
    assert token_lse(logits, active=mask).tolist() == pytest.approx([0.0, 2 * LN2])
    assert argmax_match(logits, targets, active=mask).tolist() == [False, True]


def test_lse():
    logits = from_odds((1, 2, 1), (3, 0, 5), (0, 0, 0))
    assert token_lse(logits).tolist() == pytest.approx([math.log(4), math.log(8), -INF])


def test_argmax_match_lowest_index_wins_a_tie():
    logits = torch.tensor([[1.0, 3.0, 3.0], [1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-INF, -INF, 0.0]])
    assert argmax_match(logits, torch.tensor([1, 2, 0, 2])).tolist() == [True, False, True, True]
    assert predicted_ids(logits, torch.tensor([1, 0, 1, 1])).tolist() == [1, -100, 0, 2]


def test_argmax_match_compares_logits_as_rounded_to_their_dtype():
    wide = torch.tensor([[1.0, 1.001]])  # bfloat16 steps by 2**-7 above 1, so both round to 1
    assert argmax_match(wide, torch.tensor([1])).item()
    assert not argmax_match(wide.bfloat16(), torch.tensor([1])).item()


@pytest.mark.parametrize(
    ("row", "target"), [([9.0, 0.0], -100), ([9.0, 0.0], 5), ([9.0, NAN], 0), ([NAN, 9.0], 0), ([-INF, -INF], 0)]
)
def test_ignored_and_nan_rows_are_never_correct(row, target):
    assert not argmax_match(torch.tensor([row]), torch.tensor([target])).item()


@pytest.mark.parametrize("row", [[9.0, NAN, 9.0], [NAN, 9.0, 0.0], [-INF] * 3, [0.0, INF, 0.0]])
def test_the_predicted_id_of_a_row_without_a_softmax_is_the_lowest_that_is_not_skipped(row):
    assert predicted_ids(torch.tensor([row])).item() == 0
    assert predicted_ids(torch.tensor([row]), skip_id=0).item() == 1


def test_weighted_nll():
    logits = from_odds((1, 2, 1), (1, 2, 1), (1, 6, 1)).requires_grad_()
    weights = torch.tensor([2.0, 0.0, 0.5], requires_grad=True)
    loss = weighted_nll(logits, torch.tensor([1, 0, 2]), weights)
    assert loss.item() == pytest.approx(2 * LN2 + 1.5 * LN2)  # 2 * ln 2 + 0 + 0.5 * ln 8
    loss.backward()
    expected = [[0.5, -1.0, 0.5], [0.0, 0.0, 0.0], [1 / 16, 6 / 16, -7 / 16]]
    torch.testing.assert_close(logits.grad, torch.tensor(expected, dtype=torch.float64))
    assert weights.grad is None  # the weights are constants


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_weights_of_any_dtype_and_zero_weight_rows_are_inert(dtype):
    logits = logits_with_grad([NAN, NAN, NAN], [0.0, LN2, 0.0])
    loss = weighted_nll(logits, torch.tensor([0, 1]), torch.tensor([0, 1]).to(dtype))
    loss.backward()
    assert loss.item() == pytest.approx(LN2)
    assert logits.grad[0].tolist() == [0.0, 0.0, 0.0]


def test_all_weights_zero_gives_a_zero_that_carries_a_zero_gradient():
    logits = logits_with_grad([NAN, 1.0], [INF, 2.0])
    loss = weighted_nll(logits, torch.tensor([0, 1]), torch.zeros(2))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_without_the_upcast_each_nll_is_rounded_to_the_logits_dtype():
    logits, targets, weights = torch.zeros(1, 2, dtype=torch.bfloat16), torch.tensor([0]), torch.tensor([2.0])
    # ln 2 = 177.45 * 2**-8, and bfloat16 steps by 2**-8 in [0.5, 1): it rounds to 177 / 256
    rounded = weighted_nll(logits, targets, weights, fp32_upcast=False)
    assert rounded.item() == 2 * 177 / 256
    assert rounded.dtype == torch.float32
    assert weighted_nll(logits, targets, weights).item() == pytest.approx(2 * LN2)


def test_compute_per_token_nll():
    nll = compute_per_token_nll(torch.zeros(2, 3, 8), torch.tensor([[0, 7, -100], [1, 2, 3]]))
    torch.testing.assert_close(nll, 3 * LN2 * torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]))


def test_gradcheck():
    logits = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 3, -100, 1, 2])
    active = torch.tensor([1, 1, 1, 0, 1])
    weights = torch.tensor([0.5, 0.0, 3.0, 1.0, -2.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: token_nll(x, targets, active=active), logits)
    assert torch.autograd.gradcheck(lambda x: weighted_nll(x, targets, weights), logits)
    assert torch.autograd.gradcheck(token_lse, logits)
