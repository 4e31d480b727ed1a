"""Which tests run: the subset of cases of a test marked ``covering``, tests for a GPU, and a run without any test."""

import itertools
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests import conftest
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


def test_only_a_mark_makes_a_test_one_for_a_gpu(monkeypatch):
    """The keywords of a test contain the names of its folders, too."""
    monkeypatch.setattr(conftest, "DEVICE", "cpu")
    skipped = []
    for marks in ([], ["gpu"]):
        item = Mock(keywords={"gpu": True, "tests": True}, add_marker=skipped.append)
        item.get_closest_marker = lambda name, marks=marks: name in marks or None
        conftest.pytest_collection_modifyitems([item])
        assert len(skipped) == len(marks)


@pytest.mark.parametrize(
    ("stats", "status"), [({}, 5), ({"skipped": [1]}, 5), ({"passed": [1]}, 0), ({"xfailed": [1], "skipped": [1]}, 0)]
)
def test_a_run_without_any_executed_test_is_no_success(stats, status, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    reporter = SimpleNamespace(stats=stats, write_line=lambda *_, **__: None)
    plugins = SimpleNamespace(get_plugin=lambda _: reporter)
    config = SimpleNamespace(pluginmanager=plugins, option=SimpleNamespace(collectonly=False))
    session = SimpleNamespace(config=config, exitstatus=0)
    conftest.pytest_sessionfinish(session, 0)
    assert session.exitstatus == status
