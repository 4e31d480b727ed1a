"""The subset of cases of a test marked ``covering`` that runs every day."""

import itertools
from types import SimpleNamespace

import pytest

from tests.conftest import covering

VALUES = {
    "dtype": ["half", "single", "double"],
    "path": [["torch"], ["triton"]],
    "V": [1, 2, 3, 4],
    "whole": [True, False],
}


def cases():
    for values in itertools.product(*VALUES.values()):
        yield SimpleNamespace(callspec=SimpleNamespace(params=dict(zip(VALUES, values, strict=True))))


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 14), (4, 48)])
def test_any_parameters_of_the_strength_take_all_combinations(strength, most):
    chosen = [item.callspec.params for item in covering(list(cases()), strength)]
    assert len(chosen) <= most
    for names in itertools.combinations(VALUES, strength):
        for values in itertools.product(*(VALUES[name] for name in names)):
            assert any(all(params[n] == v for n, v in zip(names, values, strict=True)) for params in chosen)


def test_chosen_cases_are_not_covered_again():
    every = list(cases())
    first = covering(every, 1)
    more = covering(every, 2, first)
    assert not {id(item) for item in first} & {id(item) for item in more}
    assert len(more) < len(covering(every, 2))
    assert covering(every, 2, [*first, *more]) == []
