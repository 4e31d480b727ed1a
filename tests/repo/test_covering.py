"""Which tests run, and their seeds: cases of a test marked ``covering``, tests for a GPU, a run without any test."""

import itertools
import random
import re
import zlib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

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


def test_a_balanced_subset_is_as_small_and_has_more_combinations():
    every = list(cases())
    for strength in (1, 2):
        plain, balanced = (covering(every, strength, balanced=b) for b in (False, True))
        assert len(balanced) <= len(plain)
        pairs = [
            sum(
                len(combinations(names, [item.callspec.params for item in some]))
                for names in itertools.combinations(VALUES, strength + 1)
            )
            for some in (plain, balanced)
        ]
        assert pairs[0] < pairs[1]


def test_chosen_cases_are_not_covered_again():
    every = list(cases())
    first = covering(every, 1)
    more = covering(every, 2, first)
    assert not {id(item) for item in first} & {id(item) for item in more}
    assert len(more) < len(covering(every, 2))
    assert covering(every, 2, [*first, *more]) == []


def collected(mark, every_case=False, exhaustive=False, markexpr=""):
    """Return the parameters of the cases that are collected, and which of them run every day; ``V=4`` needs the option.

    Cases on the path through Triton run with the exhaustive half.
    """
    calls = [SimpleNamespace(params=case.callspec.params, marks=[]) for case in cases()]
    for call in calls:
        call.marks += [pytest.mark.every_case.mark] if call.params["V"] == 4 else []
        call.marks += [pytest.mark.exhaustive.mark] if call.params["path"] == ["triton"] else []
    marks = {"covering": mark and mark.mark, "exhaustive": exhaustive}
    conftest.pytest_generate_tests(
        SimpleNamespace(
            _calls=calls,
            definition=SimpleNamespace(get_closest_marker=marks.get),
            config=options(every_case, markexpr),
        )
    )
    everyday = [call.params for call in calls if "exhaustive" not in {mark.name for mark in call.marks}]
    return [call.params for call in calls], everyday


def combinations(names, cases):
    return {tuple(repr(params[name]) for name in names) for params in cases}


@pytest.mark.parametrize(
    ("args", "most", "strength", "kept", "everyday"),
    [((1,), {}, 3, 24, 3), ((1,), {"most": 2}, 2, 16, 3), ((1,), {"most": 4}, 4, 36, 3), ((), {"most": 2}, 2, 14, 8)],
    ids=str,
)
@pytest.mark.parametrize("exhaustive", [False, True])
def test_each_half_runs_a_subset_of_the_cases(args, most, strength, kept, everyday, exhaustive):
    mark = pytest.mark.covering(*args, **most)
    some, frequent = collected(mark, exhaustive=exhaustive)
    every, _ = collected(mark, every_case=True, exhaustive=exhaustive)
    assert len(every) == len(list(cases()))
    assert 4 <= len(some) <= kept
    assert len(frequent) <= (0 if exhaustive and args else everyday)
    assert all(params["path"] == ["torch"] for params in frequent)
    assert all(params["V"] != 4 for params in some)
    of_the_day, _ = collected(mark, exhaustive=exhaustive, markexpr="not exhaustive")
    assert of_the_day == frequent or (not frequent and len(of_the_day) == 1)
    usual = [params for params in every if params["V"] != 4]
    for names in itertools.combinations(VALUES, strength):
        assert combinations(names, some) == combinations(names, usual)


def test_a_case_for_the_option_alone_is_omitted_without_a_mark_of_the_test():
    assert [len(found) for found in collected(None)] == [36, 18]
    assert [len(found) for found in collected(None, every_case=True)] == [48, 24]


def options(every_case=False, markexpr=""):
    return SimpleNamespace(option=SimpleNamespace(every_case=every_case, markexpr=markexpr))


def test_a_test_for_the_option_alone_is_omitted_without_the_option():
    every = [Mock(get_closest_marker=lambda name, mark=mark: name == mark or None) for mark in ("every_case", "slow")]
    for every_case in (False, True):
        kept = list(every)
        conftest.pytest_collection_modifyitems(options(every_case), kept)
        assert kept == (every if every_case else every[1:])


def test_only_a_mark_makes_a_test_one_for_a_gpu(monkeypatch):
    """The keywords of a test contain the names of its folders, too."""
    monkeypatch.setattr(conftest, "DEVICE", "cpu")
    skipped = []
    for marks in ([], ["gpu"]):
        item = Mock(keywords={"gpu": True, "tests": True}, add_marker=skipped.append)
        item.get_closest_marker = lambda name, marks=marks: name in marks or None
        conftest.pytest_collection_modifyitems(options(), [item])
        assert len(skipped) == len(marks)


def test_a_group_is_a_file_whose_tests_share_what_is_made_once():
    def group(nodeid):
        found = conftest.GROUPS.match(nodeid)
        return found and found[0]

    assert group("tests/distributed/test_distributed.py::test_a[x]") == "tests/distributed/"
    assert group("tests/repo/test_demo.py::test_a") == "tests/repo/test_demo.py"
    assert group("tests/ops/test_token_nll.py::test_a") is None
    shared = {
        path for path in Path(__file__).parents[1].glob("*/test_*.py") if re.search(r'\bonce\(f?"', path.read_text())
    }
    assert len(shared) == 2
    assert all(group(f"tests/{path.parent.name}/{path.name}") for path in shared)


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


def test_a_test_is_seeded_by_its_id(request):
    drawn = [torch.rand(()).item(), np.random.random(), random.random()]
    seed = zlib.crc32(request.node.nodeid.encode())
    of_torch = torch.rand((), generator=torch.Generator().manual_seed(seed)).item()
    assert drawn == [of_torch, np.random.RandomState(seed).random(), random.Random(seed).random()]
