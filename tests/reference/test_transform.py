"""The oracle of the transform: numbers worked out by hand, and gradcheck."""

import math

import pytest
import torch

from reference import possible_targets, token_nll, transformed

ATANH_HALF = 0.5 * math.log(3.0)  # tanh of it is 1/2


def test_values():
    x = torch.tensor([[0.0, 4 * ATANH_HALF, -4 * ATANH_HALF, math.inf, -math.inf]], dtype=torch.float64)
    expected = torch.tensor([[0.0, 2.0, -2.0, 4.0, -4.0]], dtype=torch.float64)
    torch.testing.assert_close(transformed(x, softcap=4.0), expected)
    torch.testing.assert_close(transformed(x, softcap=4.0, scale=0.5), expected / 2)
    torch.testing.assert_close(transformed(x[:, :3], scale=0.5), x[:, :3] / 2)
    assert torch.equal(transformed(x), x)


def test_the_skipped_column_is_minus_infinity_for_any_value():
    for skipped_value in (0.0, math.nan, math.inf):
        x = torch.tensor([1.0, skipped_value, 1.0], dtype=torch.float64, requires_grad=True)
        nll = token_nll(transformed(x, softcap=3.0, scale=2.0, skip_id=1), torch.tensor(0))
        torch.testing.assert_close(nll, torch.tensor(math.log(2.0), dtype=torch.float64))  # uniform over the other two
        (grad,) = torch.autograd.grad(nll, x)
        assert grad[1] == 0
        assert grad.isfinite().all()


def test_a_skipped_target_is_out_of_range():
    targets = torch.tensor([0, 3, -100, 3], dtype=torch.int16)
    assert possible_targets(targets, 3).tolist() == [0, -1, -100, -1]
    assert possible_targets(targets).tolist() == [0, 3, -100, 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_computed_in_float32_at_least(dtype):
    assert transformed(torch.ones(3, dtype=dtype), softcap=2.0).dtype == torch.promote_types(dtype, torch.float32)


def test_gradcheck():
    x = (3 * torch.randn(4, 7, dtype=torch.float64)).requires_grad_()
    targets = torch.tensor([0, 1, 4, 6])
    torch.autograd.gradcheck(lambda x: token_nll(transformed(x, 2.0, 0.7, 3), targets), x)
