"""torch.compile without graph breaks: losses, changing numbers, and checks of targets."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from dllm_kernels.losses import MDLMCrossEntropyLoss, SCDDLoss
from dllm_kernels.mtp import FusedLinearCrossEntropy, MaskedCrossEntropy, MTPLossConfig, calculate_mtp_loss
from dllm_kernels.ops import (
    linear_row_stats,
    linear_token_nll,
    token_log_probs,
    token_nll,
    weighted_linear_nll,
    weighted_nll,
)
from tests.conftest import DEVICE, usually
from tests.support.cases import BY_NAME, FEWER, FIRSTS, LOSSES, MASK_ID

V, D = 19, 8
# One case with counts for each loss; its other cases run the same code.
COUNTED = {case.loss: case for case in reversed(LOSSES) if case.counts and not case.variant}


def contained(case):
    """Return whether ``tests/ops/test_changing_arguments.py`` compiles the code of the case.

    It compiles each loss without settings, with changing counts, which replace a denominator that is not counted in
    the call.
    """
    return (case in FIRSTS and case.name != "row_stats") or (
        case is COUNTED.get(case.loss) or (case.loss in COUNTED and not case.counts and not case.counted_locally)
    )


VARIANTS = [case for case in FEWER if not contained(case)]
# Weights of other positions, a shift and a transform, which another of these cases has, too.
ALIKE = ("dflash, one block", "dflash, no decay", "mdlm, shift", "mdlm, counted, scale skip_id")
# Otherwise Dynamo's copies of a function's guards accumulate over the cases.
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def make_step(case, form, inputs):
    """Build a small training step: a layer, the loss, a weighted sum of its rows."""

    def logits_step(h, w, b):
        return case.logits_form(F.linear(h.tanh(), w, b), inputs).square().sum()

    def hidden_step(h, w, b):
        return case.hidden_form(h.tanh(), w, b, inputs, chunk_size=5).square().sum()

    return logits_step if form == "logits" else hidden_step


def draw(case):
    torch.manual_seed(0)
    inputs = {name: t.to(DEVICE) for name, t in case.draw(2, 6, V).items()}
    leaves = [torch.randn(s, device=DEVICE) for s in ((2, 6 * case.width, D), (V, D), (V,))]
    return inputs, leaves


def assert_compiled_equals_eager(step, leaves, backend, frozen=(), **options):
    results = []
    for function in (step, torch.compile(step, backend=backend, fullgraph=True, **options)):
        fresh = [leaf.detach().clone().requires_grad_(i not in frozen) for i, leaf in enumerate(leaves)]
        value = function(*fresh)
        value.backward()
        results.append([value.detach(), *(leaf.grad for leaf in fresh)])
    for eager, compiled in zip(*results, strict=True):
        if eager is None:
            assert compiled is None
        else:
            assert compiled.dtype == eager.dtype
            torch.testing.assert_close(compiled, eager)


@pytest.mark.everyday(1)
@pytest.mark.covering(1, most=1)  # the exhaustive tests of changing lengths cover both forms
@pytest.mark.parametrize("form", ["logits", "hidden"])
@pytest.mark.parametrize("name", usually([c.name for c in VARIANTS if c.name not in ALIKE], [c.name for c in VARIANTS]))
def test_every_loss_is_one_graph_forward_and_backward(name, form):
    inputs, leaves = draw(BY_NAME[name])
    assert_compiled_equals_eager(make_step(BY_NAME[name], form, inputs), leaves, "aot_eager")


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [BY_NAME["hybrid"], BY_NAME["dflash"]], ids=lambda case: case.name)
def test_all_outputs_of_a_loss_are_graph_outputs(case):
    """On torch 2.11, a named tuple from ``_replace`` would arrive empty."""
    inputs, (h, w, b) = draw(case)
    compiled = torch.compile(partial(case.output, "hidden"), backend="aot_eager", fullgraph=True)
    for reduction in ("total", "none"):
        arguments = case.arguments("hidden", h, inputs, (w, b))
        expected, got = (
            output_of(arguments, reduction=reduction) for output_of in (partial(case.output, "hidden"), compiled)
        )
        assert (type(got), len(got)) == (type(expected), len(expected))
        torch.testing.assert_close(tuple(got), tuple(expected))


@pytest.mark.exhaustive
def test_through_inductor():
    case = BY_NAME["hybrid"]  # which has more operations of its own than other losses
    inputs, leaves = draw(case)
    assert_compiled_equals_eager(make_step(case, "logits", inputs), leaves, "inductor")


@pytest.mark.exhaustive
def test_inputs_that_are_not_contiguous():
    """The strides of the traced gradient equal those of the returned gradient."""
    case = BY_NAME["weighted_nll"]
    inputs, (h, w, b) = draw(case)
    targets, weights = inputs["targets"].flatten(), inputs["weights"].flatten()

    def step(h, w, b):
        return weighted_linear_nll(h.t(), w.t(), targets, weights, bias=b, chunk_size=5).loss

    def rows(h, w, b):
        return linear_token_nll(h.t(), w.t(), targets, bias=b, chunk_size=5).nll.square().sum()

    leaves = [h.flatten(0, 1).t().contiguous(), w.t().contiguous(), b]
    for function in (step, rows):
        assert_compiled_equals_eager(function, leaves, "inductor" if function is step else "aot_eager")
        assert_compiled_equals_eager(function, leaves, "aot_eager", frozen=(1, 2))


def assert_few_graphs(step, draws, most):
    """Assert no graph break, at most ``most`` graphs, and in each step the value and gradients of eager mode."""
    counters.clear()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for leaves, rest in draws:
        results = []
        for function in (step, compiled):
            fresh = [leaf.detach().clone().requires_grad_() for leaf in leaves]
            value = function(*fresh, *rest)
            results.append((value.detach(), *torch.autograd.grad(value, fresh, materialize_grads=True)))
        torch.testing.assert_close(*results)
    assert not counters["graph_break"]
    assert 1 <= counters["stats"]["unique_graphs"] <= most


@pytest.mark.exhaustive  # for ints that are read on the host, NumPy's are equivalent to Python's
def test_counts_of_numpy():
    """Dynamo converts them to arrays of any dtype, so one graph serves all values."""
    case = BY_NAME["mdlm, counted"]

    def step(h, w, b, inputs):
        return case.logits_form(F.linear(h, w, b), inputs).square().sum()

    def draws():
        torch.manual_seed(0)
        for k in range(6):
            L = 3 * (2 + k % 4)
            inputs = {name: t.to(DEVICE) for name, t in case.draw(2, L, V).items()}
            inputs |= {name: np.int64(5 + 3 * k) for name in case.counts}
            yield [torch.randn(s, device=DEVICE) for s in ((2, L, D), (V, D), (V,))], [inputs]

    assert_few_graphs(step, draws(), 2)


# 1, which omits the scale, comes first, second, or later
FACTORS = {first: [*first, 0.3, 0.45, 1.0, 0.6] for first in ((0.7,), (1.0,), (0.7, 1.0))}
# Above the single pair of compiled ops, all public functions do the same.
CHANGING = {
    "scale": lambda h, w, ids, scale: weighted_nll(h @ w.t(), ids, ids + 1.0, scale=scale).loss,
    "softcap": lambda h, w, ids, softcap: linear_row_stats(h, w, ids, mix=(ids + 1.0, ids + 2.0), softcap=softcap).mix,
    "temperature": lambda h, w, ids, t: token_log_probs(h @ w.t(), ids, temperature=t).log_probs,
}


def numbers_that_change(values):
    torch.manual_seed(0)
    leaves = [torch.randn(5, D, device=DEVICE), torch.randn(V, D, device=DEVICE)]
    return ((leaves, [torch.tensor([0, 3, 1, 5, 18], device=DEVICE), value]) for value in values)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("factor", "first"), list(zip(CHANGING, FACTORS, strict=True)), ids=str)
def test_a_factor_that_changes_from_step_to_step(factor, first):
    """One graph serves the first value, and a second one serves all others."""
    if factor == "temperature" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("torch 2.11 makes a graph of each value of x * (1 / temperature) by itself")

    def step(h, w, ids, value):
        return CHANGING[factor](h, w, ids, value).square().sum()

    assert_few_graphs(step, numbers_that_change(FACTORS[first]), 2)


TEMPERED = {"mdlm": MDLMCrossEntropyLoss, "scdd, counted": lambda: SCDDLoss(MASK_ID, num_timesteps=10)}


@pytest.mark.exhaustive
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("values", [FACTORS[1.0,], FACTORS[0.7, 1.0]], ids=str)
@pytest.mark.parametrize("attribute", ["scale", "softcap"])
@pytest.mark.parametrize("form", ["logits", "hidden"])
@pytest.mark.parametrize("name", TEMPERED)
def test_a_factor_of_a_loss_that_changes_from_step_to_step(name, form, attribute, values):
    loss, inputs, leaves = TEMPERED[name](), *draw(BY_NAME[name])
    setattr(loss, attribute, values[0])

    def step(h, w, b, value):
        if form == "logits":
            return loss(F.linear(h, w, b), **inputs).total_loss
        return loss.forward_fused(h, w, lm_head_bias=b, **inputs).total_loss

    def draws():
        for value in values:
            setattr(loss, attribute, value)
            yield leaves, [value]

    assert_few_graphs(step, draws(), 2)


@pytest.mark.exhaustive
def test_a_factor_out_of_range_in_a_graph_of_changing_ones():
    compiled = torch.compile(lambda x, ids, s: token_nll(x, ids, scale=s).nll, backend="aot_eager", fullgraph=True)
    x, ids = torch.randn(3, V, device=DEVICE), torch.tensor([0, 1, 2], device=DEVICE)
    for scale in (0.5, 0.7, 0.9):
        compiled(x, ids, scale)
    with pytest.raises(Exception, match="scale must be positive"):
        compiled(x, ids, -1.0)


def error_message(step, *arguments):
    with pytest.raises(IndexError) as caught:
        step(*arguments)
    return str(caught.value)


def assert_targets_are_checked(case, form, grad, compiler, monkeypatch):
    monkeypatch.setenv("DLLM_KERNELS_CHECK", "1")
    counters.clear()
    inputs, leaves = draw(case)

    def step(h, w, b, targets):
        return make_step(case, form, inputs | {case.targets: targets})(h, w, b)

    compiled = torch.compile(step, backend=compiler, fullgraph=True)
    good = inputs[case.targets]
    bad = good.clone()
    bad[1] = V  # the first one that counts is named
    arguments = [leaf.requires_grad_(grad) for leaf in leaves]
    torch.testing.assert_close(compiled(*arguments, good), step(*arguments, good))
    message = error_message(compiled, *arguments, bad)
    assert f"[0, {V}) or be -100, got {V} at position (1, " in message
    assert message == error_message(step, *arguments, bad)
    torch.testing.assert_close(compiled(*arguments, good), step(*arguments, good))
    assert not counters["graph_break"]


@pytest.mark.exhaustive
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("form", ["logits", "hidden"])
# in eager mode, all of them: tests/ops/test_errors.py
@pytest.mark.parametrize("name", usually(["row_stats", "hybrid"], [case.name for case in FIRSTS]))
def test_targets_are_checked_in_one_graph(name, form, grad, monkeypatch):
    """The check is part of the compiled step: it runs in each step, with the same message as in eager mode."""
    assert_targets_are_checked(BY_NAME[name], form, grad, "aot_eager", monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("form", "grad"), [("logits", True), ("hidden", False)])
def test_targets_are_checked_through_inductor(form, grad, monkeypatch):
    assert_targets_are_checked(BY_NAME["mdlm"], form, grad, "inductor", monkeypatch)


@pytest.mark.exhaustive
def test_check_targets_in_a_graph_follows_the_argument(monkeypatch):
    monkeypatch.setenv("DLLM_KERNELS_CHECK", "1")
    x, bad = torch.randn(2, V, device=DEVICE), torch.tensor([1, V], device=DEVICE)
    options = {"backend": "aot_eager", "fullgraph": True}
    unchecked = torch.compile(lambda x, y: token_nll(x, y, check_targets=False).nll, **options)
    assert unchecked(x, bad).isnan().tolist() == [False, True]
    monkeypatch.delenv("DLLM_KERNELS_CHECK")
    checked = torch.compile(lambda x, y: token_nll(x, y, check_targets=True).nll, **options)
    assert error_message(checked, x, bad).endswith("got 19 at position (1,)")


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(D, V, bias=False, device=DEVICE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("base", usually([FusedLinearCrossEntropy], [MaskedCrossEntropy, FusedLinearCrossEntropy]))
def test_mtp_with_losses_created_inside_the_graph(base):
    """``tests/ops/test_changing_arguments.py`` has the same functions without settings."""
    model, fused = Head(), base is FusedLinearCrossEntropy
    rest = [model.lm_head.weight] if fused else []

    def step(first, second, labels):
        main = first if fused else model.lm_head(first)
        loss = base(ignore_index=3)(main, labels, *rest) + base(reduction="mean")(main, labels, *rest)
        loss += calculate_mtp_loss(
            base(reduction="mean"), mtp_per_depth_h=[first, second], labels=labels, model=model,
            cu_seqlens=torch.tensor([0, 2, 5], device=DEVICE), return_per_depth=True,
        ).per_depth_losses[1]  # fmt: skip
        packing = (torch.arange(labels.shape[1], device=DEVICE) // 4).int().expand(labels.shape)
        output = main if fused else (main, second, packing)
        return loss + MTPLossConfig(scaling_factor=0.3).build(base(), model)(output, labels)

    def draws():
        torch.manual_seed(0)
        for L in (6, 7, 9):
            leaves = [torch.randn(2, L, D, device=DEVICE) for _ in range(2)]
            yield leaves, [torch.randint(0, V, (2, L), device=DEVICE)]

    assert_few_graphs(step, draws(), 2)


@pytest.mark.exhaustive
def test_layouts_of_labels_in_a_graph():
    def step(x, labels, mask):
        loss = MaskedCrossEntropy()
        flat = loss(x.flatten(0, 1), labels, mask) + 2 * loss(x, labels.flatten(), mask)
        return flat + 3 * loss(x, labels.unflatten(1, (3, -1)), mask)  # merged in part

    def draws():
        torch.manual_seed(0)
        for L in (6, 9, 12):
            labels = torch.randint(0, V, (2, L), device=DEVICE)
            yield [torch.randn(2, L, V, device=DEVICE)], [labels.to(torch.uint8), labels % 3]

    assert_few_graphs(step, draws(), 2)


@pytest.mark.exhaustive
def test_a_compiled_function_works_with_and_without_grad():
    targets = torch.tensor([1, 2], device=DEVICE)
    compiled = torch.compile(lambda x: token_nll(x, targets).nll.sum(), backend="aot_eager", fullgraph=True)
    x = torch.randn(2, V, device=DEVICE, requires_grad=True)
    with torch.no_grad():
        without = compiled(x)
    assert not without.requires_grad
    value = compiled(x)
    value.backward()
    assert value == without
    assert x.grad is not None


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["logits", "hidden"])
@pytest.mark.parametrize("name", ["token_nll", "mdlm", "hybrid", "dflash"])
def test_on_a_gpu(name, form):
    case = BY_NAME[name]
    inputs, leaves = draw(case)
    assert_compiled_equals_eager(make_step(case, form, inputs), leaves, "inductor")


@pytest.mark.gpu
def test_with_cuda_graphs_of_inductor():
    case = BY_NAME["mdlm"]
    inputs, leaves = draw(case)
    assert_compiled_equals_eager(make_step(case, "logits", inputs), leaves, "inductor", mode="reduce-overhead")
