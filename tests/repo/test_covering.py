"""A subset of the cases of a test covers their values, in both halves, and a run without any test fails."""

import itertools
from types import SimpleNamespace

import pytest

from tests import conftest

VALUES = {
    "dtype": ["half", "single", "double"],
    "path": [["torch"], ["triton"]],
    "V": [1, 2, 3, 4],
    "whole": [True, False],
}


def cases():
    for values in itertools.product(*VALUES.values()):
        yield SimpleNamespace(params=dict(zip(VALUES, values, strict=True)), marks=[])


def covers(chosen, strength):
    return all(
        any(all(case.params[n] == v for n, v in zip(names, values, strict=True)) for case in chosen)
        for names in itertools.combinations(VALUES, strength)
        for values in itertools.product(*(VALUES[name] for name in names))
    )


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 14), (4, 48)])
def test_any_parameters_of_the_strength_take_all_combinations(strength, most, balanced):
    chosen = conftest.covering(list(cases()), strength, balanced=balanced)
    assert len(chosen) <= most
    assert covers(chosen, strength)


@pytest.mark.parametrize("markexpr", ["", "not exhaustive"])
def test_each_half_runs_a_subset_of_the_cases(markexpr):
    calls, mark = list(cases()), pytest.mark.covering(1, most=2).mark
    definition = SimpleNamespace(get_closest_marker={"covering": mark}.get)
    config = SimpleNamespace(option=SimpleNamespace(every_case=False, markexpr=markexpr))
    conftest.pytest_generate_tests(SimpleNamespace(_calls=calls, definition=definition, config=config))
    everyday = [case for case in calls if not case.marks]
    assert covers(everyday, 1)
    assert len(everyday) <= 4
    assert (calls == everyday) if markexpr else (covers(calls, 2) and len(calls) <= 16)


@pytest.mark.parametrize(("stats", "status"), [({}, 5), ({"skipped": [1]}, 5), ({"passed": [1]}, 0)])
def test_a_run_without_any_executed_test_is_no_success(stats, status, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    reporter = SimpleNamespace(stats=stats, write_line=lambda *_, **__: None)
    plugins = SimpleNamespace(get_plugin=lambda _: reporter)
    config = SimpleNamespace(pluginmanager=plugins, option=SimpleNamespace(collectonly=False))
    session = SimpleNamespace(config=config, exitstatus=0)
    conftest.pytest_sessionfinish(session, 0)
    assert session.exitstatus == status
