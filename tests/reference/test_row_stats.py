"""The oracle of the row statistics: numbers worked out by hand, gradcheck, and bad rows and columns.

Logits are logarithms of small integer odds: odds (1, 2, 1) are the probabilities (1/4, 1/2, 1/4).
"""

import math
from pathlib import Path

import pytest
import torch

from reference import RowStats, linear_row_stats, row_stats

LN2, LN3 = math.log(2.0), math.log(3.0)
NAN, INF = math.nan, math.inf
DOUBLE = {"dtype": torch.float64}


def from_odds(*rows):
    return torch.tensor(rows, **DOUBLE).log()


def mixture(a, b):
    return torch.tensor(a, **DOUBLE), torch.tensor(b, **DOUBLE)


def values(*numbers):
    return torch.tensor(numbers, **DOUBLE)


def close(got, *expected):
    torch.testing.assert_close(got, values(*expected), equal_nan=True)


def test_values():
    out = row_stats(
        from_odds((1, 2, 1), (1, 1, 2)), torch.tensor([[1, 0], [-100, 2]]), mixture([0.25, 0.0], [1.0, 4.0])
    )
    # log(1/2), log(1/4); none, log(1/2)
    torch.testing.assert_close(out.log_probs, values(-LN2, -2 * LN2, 0, -LN2).view(2, 2))
    close(out.lse, 2 * LN2, 2 * LN2)
    close(out.entropy, 1.5 * LN2, 1.5 * LN2)  # 2 * 1/4 * 2 ln 2 + 1/2 ln 2
    # log(1/2) + log(3/4) + log(1/2) = ln 3 - 4 ln 2; log(1) + log(1) + log(2)
    close(out.mix, LN3 - 4 * LN2, LN2)
    assert out.correct.tolist() == [True, False]
    assert out.ids.tolist() == [1, 2]


def test_the_transform():
    logits = torch.tensor([[0.0, 3.0, 100.0, 1.0]], **DOUBLE)
    out = row_stats(logits, torch.tensor([1]), mixture([1.0], [1.0]), softcap=2.0, scale=0.5, skip_id=2)
    plain = row_stats(torch.tanh(logits[:, [0, 1, 3]] / 2), torch.tensor([1]), mixture([1.0], [1.0]))
    assert out.ids.tolist() == [1]
    for got, expected in zip(out, plain, strict=True):
        torch.testing.assert_close(got, expected)


def test_an_id_out_of_range_or_skipped_is_nan_in_its_entry():
    ids = torch.tensor([[0, 3], [-1, 1], [2, 1]])
    out = row_stats(from_odds((1, 1, 1), (1, 1, 1), (1, 1, 1)), ids, skip_id=2)
    torch.testing.assert_close(out.log_probs, values(-LN2, NAN, NAN, -LN2, NAN, -LN2).view(3, 2), equal_nan=True)
    close(out.entropy, LN2, LN2, LN2)
    assert out.correct.tolist() == [True, False, False]
    assert out.ids.tolist() == [0, 0, 0]


def test_impossible_columns():
    logits = torch.tensor([[-INF, 0.0, 0.0]], **DOUBLE, requires_grad=True)
    out = row_stats(logits, torch.tensor([1]), mixture([0.5], [1.0]))
    close(out.entropy, LN2)
    close(out.mix, -LN2)  # log(1/2) + log(1) + log(1)
    (grad,) = torch.autograd.grad(out.entropy + out.mix + out.log_probs, logits)
    close(grad[0], 0.0, 0.5, -0.5)
    assert row_stats(logits, torch.tensor([1]), mixture([0.0], [1.0])).mix.item() == -INF


def test_inactive_rows_are_inert_and_bad_rows_affect_only_themselves():
    logits = torch.tensor([[NAN, 0.0], [NAN, 0.0], [-INF, -INF], [0.0, 0.0]], **DOUBLE, requires_grad=True)
    out = row_stats(logits, torch.tensor([0, 1, 1, 0]), mixture([1.0] * 4, [2.0] * 4), torch.tensor([0, 1, 1, 1]))
    close(out.log_probs, 0, NAN, NAN, -LN2)
    close(out.lse, 0, NAN, -INF, LN2)
    close(out.entropy, 0, NAN, NAN, LN2)
    close(out.mix, 0, NAN, NAN, 2 * LN2)
    assert out.correct.tolist() == [False, False, False, True]
    assert out.ids.tolist() == [-100, 0, 0, 0]
    (grad,) = torch.autograd.grad(sum(t.sum() for t in out if t.requires_grad), logits)
    assert grad[0].tolist() == [0, 0]
    assert grad[1:3].isnan().all()
    close(grad[3], 1.0, 0.0)  # lse (1/2, 1/2) and log p (1/2, -1/2); entropy and mix are at their greatest


def test_without_a_probabilities_that_round_to_zero_count():
    logits = torch.tensor([[0.0, -300.0]])
    out = row_stats(logits, torch.tensor([0]), (torch.tensor([0.0]), torch.tensor([2.0])))
    torch.testing.assert_close(out.mix, torch.tensor([2 * LN2 - 300]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_computed_in_float32_at_least(dtype):
    out = row_stats(torch.randn(2, 3, dtype=dtype), torch.zeros(2, dtype=torch.long), (torch.ones(2), torch.ones(2)))
    assert {t.dtype for t in out if t.is_floating_point()} == {torch.promote_types(dtype, torch.float32)}


def test_of_hidden_states():
    hidden, weight, bias = torch.randn(2, 3), torch.randn(5, 3), torch.randn(5)
    ids, active = torch.tensor([[1, 4], [2, 0]]), torch.tensor([True, False])
    out = linear_row_stats(hidden, weight, ids, bias, active=active, skip_id=3)
    expected = row_stats(hidden @ weight.T + bias, ids, active=active, skip_id=3)
    for got, want in zip(out, expected, strict=True):
        assert want is None or torch.allclose(got, want)


def test_gradcheck():
    logits = torch.randn(4, 5, **DOUBLE, requires_grad=True)
    ids = torch.tensor([[0, 1], [4, 4], [-100, 2], [3, -100]])
    mix, active = mixture([0.0, 0.5, 2.0, 1.0], [1.0, 0.0, 3.0, 1.0]), torch.tensor([1, 1, 1, 0])
    for transform in ({}, {"skip_id": 3}, {"softcap": 1.5, "scale": 0.7, "skip_id": 3}):
        used = torch.where(ids == 3, 2, ids)

        def floating(x, i, t):
            return [o for o in row_stats(x, i, mix, active, **t) if o.is_floating_point()]

        assert all(o.requires_grad for o in floating(logits, used, transform))
        assert torch.autograd.gradcheck(floating, (logits, used, transform))


def test_every_output_has_numbers():
    assert [name for name in RowStats._fields if f"out.{name}" not in Path(__file__).read_text()] == []
