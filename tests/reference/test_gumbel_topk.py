"""The oracle of Gumbel top-k: scores chosen by hand, and every edge of k."""

import math

import pytest
import torch

from reference import batched_gumbel_topk, gumbel_topk
from reference.gumbel_topk import draw_uniform

INF = math.inf


def uniform_for(*gumbels):
    """Compute the draws u whose Gumbel noise -log(-log u) is given: u = exp(-exp(-g))."""
    return torch.tensor([math.exp(-math.exp(-g)) for g in gumbels], dtype=torch.float64)


def chosen(mask):
    return mask.nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("k", "expected"), [(0, []), (1, [1]), (2, [0, 1]), (3, [0, 1, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])]
)
def test_the_k_largest_scores(k, expected):
    # equal weights, noise 0.5, 1, -1, 0
    mask = gumbel_topk(torch.zeros(4), k, uniform_for(0.5, 1.0, -1.0, 0.0))
    assert mask.dtype == torch.bool
    assert chosen(mask) == expected


def test_score_is_log_weight_plus_noise():
    # 1 + 0 < 0 + 1.5 < 2 - 0.25
    log_w = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    u = uniform_for(0.0, 1.5, -0.25)
    assert [chosen(gumbel_topk(log_w, k, u)) for k in (1, 2)] == [[2], [1, 2]]


def test_ties_go_to_the_lowest_index():
    u = uniform_for(0.0, 0.0, 0.0, 0.0)
    assert chosen(gumbel_topk(torch.zeros(4), 2, u)) == [0, 1]
    assert chosen(gumbel_topk(torch.tensor([0.0, 1.0, 0.0, 1.0]), 3, u)) == [0, 1, 3]
    assert chosen(gumbel_topk(torch.zeros(5000), 1234, torch.full((5000,), 0.5))) == list(range(1234))


def test_minus_inf_is_never_chosen_even_when_k_is_beyond_the_rest():
    log_w = torch.tensor([-INF, 0.0, -INF, -5.0])
    u = uniform_for(9.0, 0.0, 9.0, 0.0)
    assert [chosen(gumbel_topk(log_w, k, u)) for k in (1, 2, 3, 4)] == [[1], [1, 3], [1, 3], [1, 3]]
    assert chosen(gumbel_topk(torch.full((3,), -INF), 2)) == []


def test_a_weight_so_small_that_its_score_is_the_lowest_still_counts_as_finite():
    # u = 0 has score -inf. The position can still be chosen, unlike the one of weight 0 before it.
    u = torch.tensor([0.5, 0.0, 0.5])
    assert chosen(gumbel_topk(torch.tensor([-INF, 0.0, 0.0]), 2, u)) == [1, 2]


def test_batched_has_its_own_k_in_each_row():
    u = torch.stack([uniform_for(0.5, 1.0, -1.0)] * 4)
    log_w = torch.zeros(4, 3)
    log_w[3, 1] = -INF
    mask = batched_gumbel_topk(log_w, torch.tensor([0, 1, 2, 3]), u)
    assert [chosen(row) for row in mask] == [[], [1], [0, 1], [0, 2]]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_empty(shape):
    mask = batched_gumbel_topk(torch.zeros(shape), torch.ones(shape[0], dtype=torch.long))
    assert mask.shape == shape
    assert not mask.any()


def test_draws_come_from_the_generator():
    log_w, k = torch.zeros(3, 20), torch.tensor([4, 5, 6])

    def draw(seed):
        return batched_gumbel_topk(log_w, k, generator=torch.Generator().manual_seed(seed))

    assert draw(1).equal(draw(1))
    assert not draw(1).equal(draw(2))
    assert draw(3).sum(1).tolist() == [4, 5, 6]
    torch.manual_seed(5)
    first = gumbel_topk(log_w[0], 4)
    torch.manual_seed(5)
    assert first.equal(gumbel_topk(log_w[0], 4))


def test_draws_lie_strictly_inside_the_unit_interval(monkeypatch):
    ends = torch.tensor([0.0, 1.0 - 2.0**-24])
    monkeypatch.setattr(torch, "rand", lambda *args, **options: ends.clone())
    u = draw_uniform((2,), torch.device("cpu"), None)
    assert ((u > 0) & (u < 1)).all()
    assert (-torch.log(-torch.log(u))).isfinite().all()
