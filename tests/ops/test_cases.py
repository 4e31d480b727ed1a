"""Every op has a case in ``tests/support/op_cases.py``, which describes its results."""

import inspect
from pathlib import Path

import pytest
import torch

from dllm_kernels import ops
from tests.conftest import DEVICE
from tests.support.inputs import Source
from tests.support.op_cases import FIRST_OPS, OF_EVERY_KIND, OP_CASES, Rows, name_of, results


def test_every_op_has_a_case():
    functions = {name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))}
    missing = functions - {name for case in FIRST_OPS for name in (case.name, case.older)}
    assert not missing, f"no OpCase in tests/support/op_cases.py has the name of {', '.join(sorted(missing))}"
    assert {case.op for case in OP_CASES} == {case.op for case in FIRST_OPS}


def test_every_file_of_an_op_has_tests_of_its_own():
    here = Path(__file__).parent
    files = Path(ops.__file__).parent.glob("[a-z]*.py")
    missing = [file.name for file in files if not (here / f"test_{file.name}").exists()]
    assert not missing, f"add tests/ops/test_<op>.py for {missing} of dllm_kernels/ops"


@pytest.mark.parametrize(("kind", "case"), OF_EVERY_KIND, ids=name_of)
def test_the_results_that_a_case_names_are_differentiable(kind, case):
    leaves = [leaf.requires_grad_() for leaf in Source(kind).leaves((2, 3), 11)]
    out = results(case(Source(kind).argument(*leaves), Rows.drawn(2, 3, V=11, device=DEVICE)))
    assert {name for name, t in out.items() if t.requires_grad} == set(case.differentiable)


@pytest.mark.parametrize("case", [case for case in OP_CASES if case.oracle], ids=name_of)
def test_the_oracle_of_a_case_has_its_results(case):
    logits, r = torch.randn(2, 3, 11, dtype=torch.float64, device=DEVICE), Rows.drawn(2, 3, V=11, device=DEVICE)
    torch.testing.assert_close(case.values(case(logits, r)), case.oracle(logits, r), check_dtype=False)
