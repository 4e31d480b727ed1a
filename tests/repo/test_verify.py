"""The comparison with float64 before measurements on a GPU: it passes, and detects errors."""

import json
import math
import types

import pytest

from benchmarks import measure, variants, verify
from benchmarks.shapes import TOY_LOGITS
from dllm_kernels import corruption, ops
from tests.support.parity import Spoilt

NAMES = ["trained head", "logits", "policy", "frozen head", "float32 logits", "corruption", "samples"]


@pytest.fixture
def check(monkeypatch, tmp_path):
    """Return a function: (name, replacements of ops) -> findings of that check, in bfloat16 on the torch path."""
    argv = ["--size", "toy", "--device", "cpu", "--dtype", "bfloat16", "--backend", "torch"]
    argv += ["--out", str(tmp_path / "v.json")]

    def run(name, **replaced):
        options = measure.parse(measure.arguments("verify"), argv)
        monkeypatch.setattr(verify, "ops", types.SimpleNamespace(**{**vars(ops), **replaced}))
        real = verify.checks
        monkeypatch.setattr(verify, "checks", lambda o: {name: real(o)[name]})
        return verify.run(options)

    return run


def test_the_uncertain_product_comes_first():
    assert list(verify.checks(measure.parse(measure.arguments("verify"), ["--size", "toy"]))) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_correct_results_pass(name, check, tmp_path):
    findings = check(name)
    assert len(findings) >= (3 if name == "float32 logits" else 4)
    assert all(f.passed for f in findings), [f for f in findings if not f.passed]
    written = json.loads((tmp_path / "v.json").read_text())
    assert written["complete"]
    assert [f["passed"] for f in written["findings"]] == [True] * len(findings)


def column(grad):
    grad.flatten(0, -2)[3, 7] *= 1.05


def last_row(grad):
    grad.flatten(0, -2)[-1] *= 1.1


def row_of_the_head(grad):
    """A larger fault. With torch 2.11, plain PyTorch's worst row may err by 5 %, and verify then allows 10 %."""
    grad[-1] *= 1.2


def unwritten(grad):
    grad.flatten(0, -2)[5, 4] = math.nan


def spoilt(op, place, change):
    """Return the op with a change of the gradient of its tensor at this position."""

    def run(*arguments, **options):
        arguments = [Spoilt.apply(a, change) if i == place else a for i, a in enumerate(arguments)]
        return getattr(ops, op)(*arguments, **options)

    return {op: run}


def nll_of_a_row(op):
    def run(*arguments, **options):
        out = getattr(ops, op)(*arguments, **options)
        nll = out.nll.clone()
        nll[out.nll.argmax()] *= 1.05
        return out._replace(nll=nll)

    return {op: run}


def other_entropy(*arguments, **options):
    out = ops.token_log_probs(*arguments, **options)
    return out._replace(entropy=out.entropy * 1.001)


def different_each_time(op):
    calls = []

    def run(x, *arguments, **options):
        calls.append(None)
        return getattr(ops, op)(x if len(calls) == 1 else x * (1 + 2**-7), *arguments, **options)

    return {op: run}


def rounded(*arguments, logits_dtype, **options):
    return ops.weighted_linear_nll(*arguments, **options)


def raising(*arguments, **options):
    raise RuntimeError("no kernel image")


FAULTS = {
    "rounded logits": ("float32 logits", {"weighted_linear_nll": rounded}, "nll"),
    "a column of a row": ("logits", spoilt("weighted_nll", 0, column), "gradient"),
    "a number that nobody wrote": ("logits", spoilt("weighted_nll", 0, unwritten), "gradient"),
    "an NLL": ("logits", nll_of_a_row("weighted_nll"), "nll"),
    "a column of a policy's row": ("policy", spoilt("token_log_probs", 0, column), "gradient"),
    "an entropy": ("policy", {"token_log_probs": other_entropy}, "entropy"),
    "a row of a frozen head's": (
        "frozen head", spoilt("weighted_linear_nll", 0, last_row), "gradient of hidden, worst row",
    ),
    "a row of the head": (
        "trained head", spoilt("weighted_linear_nll", 1, row_of_the_head), "gradient of head, worst row",
    ),
    "an NLL from hidden states": ("frozen head", nll_of_a_row("weighted_linear_nll"), "nll"),
    "bits of a second call": (
        "trained head", different_each_time("weighted_linear_nll"), "elements that differ between two calls",
    ),
    "an exception": ("frozen head", {"weighted_linear_nll": raising}, "RuntimeError: no kernel image"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, check):
    name, replaced, quantity = FAULTS[fault]
    failed_quantities = {f.quantity for f in check(name, **replaced) if not f.passed}
    assert quantity in failed_quantities


def test_a_mask_that_differs_by_a_position_is_found(check, monkeypatch):
    real = corruption.corrupt_blockwise

    def moved(*arguments, backend, **options):
        found = real(*arguments, backend=backend, **options)
        if next(calls):
            found[1][0, 0] ^= True
        return found

    calls = iter([True, False, False])  # on the device, there again, in NumPy
    monkeypatch.setattr(corruption, "corrupt_blockwise", moved)
    failed_quantities = [f for f in check("corruption") if not f.passed]
    assert [(f.check.split()[0], f.error) for f in failed_quantities] == [("blockwise", 1), ("blockwise", 1)]


@pytest.mark.everyday(1)
@pytest.mark.parametrize("kernel", variants.CANDIDATES)
def test_a_candidate_of_a_kernel_computes_the_same(kernel):
    argv = ["--size", "toy", "--device", "cpu", "--samples", "1", "--warmup", "0", "--cache", "hot"]
    options = measure.parse(measure.arguments("variants"), argv)
    results = variants.of_kernel(kernel, TOY_LOGITS, options)
    assert [r.name for r in results] == [*variants.CANDIDATES[kernel]]
    assert results[0].error == 0
    assert all(r.error < 1e-6 for r in results)
    assert all(r.timing is not None for r in results)
