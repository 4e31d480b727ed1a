"""The oracle of corruption: its own draws, and the functions that corrupt nothing.

The results of the routines that were worked out by hand are in ``tests/support/routines.py``.
"""

import inspect
import math

import pytest
import torch

import reference.corruption
from reference import complementary, corrupt_uniform_random, sample_level
from tests.support.routines import ROUTINES

OF_GENERATORS = {
    name: case
    for name, case in ROUTINES.items()
    if "generator" in inspect.signature(getattr(reference.corruption, case.routine)).parameters
}


@pytest.mark.parametrize("case", OF_GENERATORS.values(), ids=OF_GENERATORS)
def test_draws_come_from_the_generator_alone_or_from_torchs_own(case):
    ids = torch.arange(120).reshape(4, 30)
    every = torch.ones(4, 30)
    arguments = case.constants() | {"vocab_size": 90} if "vocab_size" in case.parameters else case.constants()

    def corrupt(generator, supervised=every):
        given = {**arguments, **case.inputs(ids), "generator": generator}
        return getattr(reference.corruption, case.routine)(ids, supervised, **given)

    def draw(seed, supervised=every):
        state = torch.get_rng_state()
        out = corrupt(torch.Generator().manual_seed(seed), supervised)
        assert torch.get_rng_state().equal(state)
        return out

    first = draw(1)
    for again in (draw(1), draw(1, None if case.takes_no_mask else every)):  # no mask supervises everything
        assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    assert not first[1].equal(draw(2)[1])
    torch.manual_seed(7)
    first = corrupt(None)
    torch.manual_seed(7)
    assert all(a.equal(b) for a, b in zip(first, corrupt(None), strict=True))


def test_uniform_random_tokens_cover_the_vocabulary():
    # t = 1 here: every position is replaced. 4000 tokens over 5: each within 5.5 standard deviations of a
    # binomial with p = 1/5, a false alarm below 5 * 4e-8 < 1e-6.
    clean, generator = torch.full((1, 4000), 7), torch.Generator().manual_seed(0)
    out = corrupt_uniform_random(clean, None, 5, eps=0.0, t_uniform=torch.ones(1), generator=generator)
    counts = torch.bincount(out.noisy_input_ids[0], minlength=5)
    assert counts.shape == (5,)
    assert (counts - 800).abs().max() < 5.5 * math.sqrt(4000 * 0.2 * 0.8)


def test_levels_by_hand():
    u = torch.tensor([0.25, 0.5, 0.75, 0.0])
    assert sample_level(4, uniform=u).tolist() == u.tolist()
    assert sample_level(4, "antithetic", uniform=u).tolist() == [0.25, 0.75, 0.75, 0.25]
    assert sample_level(4, "stratified", uniform=u).tolist() == [0.25, 0.5, 0.75, 0.0]
    assert sample_level(4, "stratified", 0.5, 1.0, uniform=u).tolist() == [0.625, 0.75, 0.875, 0.5]


def test_complementary_by_hand():
    noise, supervised = torch.tensor([[1, 0, 0, 1]]), torch.tensor([[1, 1, 0, 0]])
    assert complementary(noise, supervised).tolist() == [[False, True, False, False]]
