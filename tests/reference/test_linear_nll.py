"""The oracle of the linear path: a head whose logits are known in closed form, gradcheck, and bad rows.

With hidden states (1,) and (2,) and the head (0, ln 2, 0) the odds are (1, 2, 1) and (1, 4, 1).
"""

import math

import pytest
import torch

from reference import argmax_match, linear_logits, linear_token_nll, weighted_linear_nll

LN2 = math.log(2.0)
NAN = math.nan


def head():
    return torch.tensor([[0.0], [LN2], [0.0]], dtype=torch.float64, requires_grad=True)


def states(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None].requires_grad_()


def test_values():
    nll = linear_token_nll(states(1.0, 2.0), head(), torch.tensor([1, 0]))
    assert nll.tolist() == pytest.approx([LN2, math.log(6)])  # ln 4/2, ln 6/1


def test_bias():
    bias = torch.tensor([LN2, 0.0, 2 * LN2], dtype=torch.float64)
    nll = linear_token_nll(states(1.0, 0.0), head(), torch.tensor([2, 1]), bias)
    assert nll.tolist() == pytest.approx([LN2, math.log(7)])  # odds (2, 2, 4): ln 8/4; odds (2, 1, 4): ln 7/1


def test_rows_without_loss_are_inert_in_every_gradient_even_when_they_hold_nan():
    hidden, weight = states(1.0, NAN, NAN, math.inf), head()
    bias = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([1, 0, -100, 99])
    weighted_linear_nll(hidden, weight, targets, torch.tensor([1.0, 0.0, 1.0, 0.0]), bias).backward()
    linear_token_nll(hidden, weight, targets, bias, active=torch.tensor([1, 0, 1, 0])).sum().backward()
    # twice (1/4, -1/2, 1/4) from the first row alone
    assert hidden.grad.flatten().tolist() == pytest.approx([-LN2, 0.0, 0.0, 0.0])
    assert weight.grad.flatten().tolist() == pytest.approx([0.5, -1.0, 0.5])
    assert bias.grad.tolist() == pytest.approx([0.5, -1.0, 0.5])


def test_logits_are_rounded_to_the_dtype_of_the_inputs_before_ties_are_compared():
    hidden = torch.tensor([[1.0, 2.0**-9]])
    weight = torch.tensor([[1.0, 0.0], [1.0, 1.0]])  # logits 1 and 1 + 2**-9; bfloat16 steps by 2**-7 there
    target = torch.tensor([1])
    assert argmax_match(linear_logits(hidden, weight), target).item()
    rounded = linear_logits(hidden.bfloat16(), weight.bfloat16())
    assert rounded.dtype == torch.bfloat16
    assert rounded.tolist() == [[1.0, 1.0]]
    assert not argmax_match(rounded, target).item()
    nll = linear_token_nll(hidden.bfloat16(), weight.bfloat16(), target)
    assert nll.dtype == torch.float32
    assert nll.item() == pytest.approx(LN2)


def test_a_second_part_adds_its_own_product():
    """u = 2 and U = (0, 0, ln 2) change the odds of the first row from (1, 2, 1) to (1, 2, 4).

    The other rows are unchanged.
    """
    hidden, weight, second = states(1.0, 2.0), head(), torch.tensor([[0.0], [0.0], [LN2]], dtype=torch.float64)
    u = states(2.0, 0.0)
    second.requires_grad_()
    logits = linear_logits(hidden, weight, extra=(u, second))
    assert logits.exp().flatten().tolist() == pytest.approx([1, 2, 4, 1, 4, 1])
    nll = linear_token_nll(hidden, weight, torch.tensor([2, 0]), extra=(u, second))
    assert nll.tolist() == pytest.approx([math.log(7 / 4), math.log(6)])
    loss = weighted_linear_nll(hidden, weight, torch.tensor([2, 0]), torch.tensor([7.0, 0.0]), extra=(u, second))
    loss.backward()
    assert loss.item() == pytest.approx(7 * math.log(7 / 4))
    # the logits' gradient of the first row is 7 (1/7, 2/7, 4/7 - 1) = (1, 2, -3)
    assert u.grad.flatten().tolist() == pytest.approx([-3 * LN2, 0])
    assert second.grad.flatten().tolist() == pytest.approx([2, 4, -6])
    assert weight.grad.flatten().tolist() == pytest.approx([1, 2, -3])


def test_a_row_without_loss_is_inert_in_the_second_part_too():
    second = torch.ones(3, 1, dtype=torch.float64, requires_grad=True)
    u = states(1.0, NAN)
    targets, weights = torch.tensor([1, 0]), torch.tensor([1.0, 0.0])
    weighted_linear_nll(states(1.0, 1.0), head(), targets, weights, extra=(u, second)).backward()
    assert second.grad.isfinite().all()
    assert u.grad[1] == 0


def test_gradcheck():
    hidden, weight, bias = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in [(4, 3), (5, 3), (5,)]
    )
    targets, weights = torch.tensor([0, 4, -100, 2]), torch.tensor([0.5, 0.0, 1.0, -2.0])
    inputs = (hidden, weight, bias)
    assert torch.autograd.gradcheck(lambda h, w, b: linear_token_nll(h, w, targets, b), inputs)
    assert torch.autograd.gradcheck(lambda h, w, b: weighted_linear_nll(h, w, targets, weights, b), inputs)
