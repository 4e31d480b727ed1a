"""Laws that hold for every op and loss and for any inputs; hypothesis searches for counterexamples."""

import math

import pytest
import torch
from hypothesis import strategies as st

from tests.conftest import DEVICE, drawn
from tests.support.cases import BY_NAME, CASES, FIRSTS, upstream_for
from tests.support.parity import assert_as_good_as_plain, reduction_sizes, value_and_grads

V, D = 11, 4
EPS = torch.finfo(torch.float32).eps

seeds = st.integers(0, 2**16)
sizes = st.tuples(st.integers(1, 3), st.sampled_from([3, 6, 9]))  # B, L: whole blocks of DFlash
forms = st.sampled_from(["logits", "hidden"])
scales = st.floats(-3, 3, width=16)  # in float64, some would be so small that their products are subnormal
garbage = st.sampled_from([math.nan, math.inf, -math.inf, 1e38, 0.0])


def cases(selection=CASES):
    """Parametrize with cases and numbers of examples.

    Some of the first cases of each loss run every day, with 6 examples, and the first of each of its kinds in ``make
    test-exhaustive``, with 10. Variants differ from one of these in numbers alone; ``make test-every-case`` runs them.
    """

    def parametrized(test):
        everyday = [c for c in selection if c in FIRSTS][::3]
        pairs = [*((c, 6) for c in everyday), *((c, 10) for c in selection)]
        marks = {6: (), 10: (pytest.mark.exhaustive,)}
        every = [
            pytest.param(c, n, marks=[*marks[n], *([pytest.mark.every_case] if c.variant else [])], id=f"{n}-{c.name}")
            for c, n in pairs
        ]
        return pytest.mark.parametrize(("case", "examples"), every)(test)

    return parametrized


def draw(case, seed, size, dtype=torch.float32):
    """Draw small inputs and the leaves of either form."""
    torch.manual_seed(seed)
    B, L = size
    inputs = {name: t.to(DEVICE) for name, t in case.draw(B, L, V).items()}
    logits = 3 * torch.randn(B, L * case.width, V, dtype=dtype, device=DEVICE)
    hidden = [torch.randn(s, dtype=dtype, device=DEVICE) for s in ((B, L * case.width, D), (V, D), (V,))]
    return inputs, {"logits": [logits], "hidden": hidden}


def value_of(case, form, inputs, chunk=4):
    if form == "logits":
        return lambda x: case.logits_form(x, inputs, backend="torch")
    return lambda h, w, b: case.hidden_form(h, w, b, inputs, chunk_size=chunk, backend="torch")


def ones_like_value(case, size):
    return torch.ones((size[0], size[1] * case.width) if case.per_row else (), device=DEVICE)


def rows_with_gradient(case, inputs, logits):
    """Return the positions of the logits on which the value depends, which have a gradient in the oracle."""
    x = logits.double().requires_grad_()
    (grad,) = torch.autograd.grad(case.oracle(x, inputs).sum(), x)
    return grad.ne(0).any(-1)


@cases()
@drawn(exhaustive=None, seed=seeds, size=sizes, form=forms, value=garbage)
def test_rows_without_weight_are_inert_for_any_values(case, seed, size, form, value):
    inputs, leaves = draw(case, seed, size)
    idle = ~rows_with_gradient(case, inputs, leaves["logits"][0])
    function, upstream = value_of(case, form, inputs), ones_like_value(case, size)
    expected = value_and_grads(function, leaves[form], upstream)
    leaves[form][0][idle] = value
    got = value_and_grads(function, leaves[form], upstream)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    assert got[1][idle].eq(0).all()


@cases([case for case in CASES if case.linear_in])
@drawn(exhaustive=None, seed=seeds, size=sizes, form=forms, a=scales, b=scales)
def test_linear_in_the_weights(case, seed, size, form, a, b):
    inputs, leaves = draw(case, seed, size, torch.float64)
    name = case.linear_in
    if name.endswith("mask"):  # which must not be negative
        a, b = abs(a), abs(b)
    first = inputs[name].double()
    second = torch.rand_like(first)
    v1, v2, both, terms = (
        value_of(case, form, inputs | {name: weights})(*leaves[form])
        for weights in (first, second, a * first + b * second, (a * first).abs() + (b * second).abs())
    )
    assert_as_good_as_plain([both], [a * v1 + b * v2, terms], 0.0, sizes=reduction_sizes(leaves[form]))


@cases([case for case in CASES if not case.transform])  # otherwise the transformed logits differ in rounding
@drawn(exhaustive=None, seed=seeds, size=sizes, shift=st.floats(-1e3, 1e3))
def test_adding_a_constant_to_a_row_changes_nothing(case, seed, size, shift):
    inputs, leaves = draw(case, seed, size, torch.float64)
    (logits,) = (leaf.mul(1024).round() / 1024 for leaf in leaves["logits"])  # so that the shifted logits are exact
    function, upstream = value_of(case, "logits", inputs), ones_like_value(case, size)
    shifts = (1024 * shift * torch.rand(*logits.shape[:-1], 1, dtype=torch.float64, device=DEVICE)).round() / 1024
    expected = value_and_grads(function, [logits], upstream)
    for a, b in zip(value_and_grads(function, [logits + shifts], upstream), expected, strict=True):
        assert_as_good_as_plain([a], [b], 0.0, sizes=reduction_sizes([logits]))


@cases()
@drawn(exhaustive=None, seed=seeds, size=sizes, form=forms)
def test_inputs_are_never_modified(case, seed, size, form):
    inputs, leaves = draw(case, seed, size)
    tensors = [*inputs.values(), *leaves[form]]
    before = [t.clone() for t in tensors]
    versions = [t._version for t in tensors]
    live = [leaf.requires_grad_() for leaf in leaves[form]]
    value = value_of(case, form, inputs)(*live)
    value.sum().backward()
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    assert [t._version for t in tensors] == versions


@cases()
@drawn(exhaustive=None, seed=seeds, size=sizes, form=forms, chunk=st.integers(1, 40))
def test_both_forms_equal_the_oracle_for_any_sizes(case, seed, size, form, chunk):
    inputs, leaves = draw(case, seed, size, torch.float64)
    upstream = upstream_for(case, *size)
    project = torch.nn.functional.linear if form == "hidden" else lambda x: x
    expected = value_and_grads(lambda *x: case.oracle(project(*x), inputs), leaves[form], upstream)
    for a, b in zip(
        value_and_grads(value_of(case, form, inputs, chunk), leaves[form], upstream), expected, strict=True
    ):
        torch.testing.assert_close(a, b)


@drawn(seed=seeds, size=sizes)
def test_nll_is_at_least_zero_and_softmax_gradients_sum_to_zero(seed, size):
    case = BY_NAME["token_nll"]
    inputs, leaves = draw(case, seed, size)
    nll, grad = value_and_grads(value_of(case, "logits", inputs), leaves["logits"], ones_like_value(case, size))
    assert (nll >= -EPS).all()
    assert grad.sum(-1).abs().max() <= V * EPS
