"""``reduction="none"``: the contribution of each row, for trainers with custom denominators."""

import math
from dataclasses import replace
from itertools import cycle

import pytest
import torch
import torch.nn.functional as F

from dllm_kernels import BlockDiffusionCrossEntropyLoss, IDLMLoss
from tests.conftest import DEVICE, usually
from tests.support.cases import BY_NAME, FIRSTS, LOSSES, ROWS

V, D = 19, 8
CLASSES = [case for case in ROWS if isinstance(case.loss, type)]
forms = pytest.mark.parametrize("form", ["logits", "hidden"])


def leaves_of(case, form, B=2, L=6):
    shapes = [(B, L * case.width, V)] if form == "logits" else [(B, L * case.width, D), (V, D), (V,)]
    return [torch.randn(shape, device=DEVICE).requires_grad_() for shape in shapes]


def output_and_grads(case, form, leaves, inputs, value):
    rows, *head = leaves
    out = case.output(form, case.arguments(form, rows, inputs, tuple(head)))
    return out, torch.autograd.grad(value(out), leaves, retain_graph=True)


@forms
@pytest.mark.parametrize("case", CLASSES, ids=lambda case: case.name)
def test_the_loss_is_unchanged_by_returning_its_rows(case, form):
    inputs = {name: t.to(DEVICE) for name, t in case.draw(2, 6, V).items()}
    leaves = leaves_of(case, form)
    plain = replace(case, settings=case.settings | {"reduction": "total"})
    (expected, grads), (out, row_output) = (
        output_and_grads(c, form, leaves, inputs, lambda out: out.total_loss) for c in (plain, case)
    )
    assert expected.row_losses is expected.row_weights is None
    torch.testing.assert_close(out[:6], expected[:6])
    torch.testing.assert_close(row_output, grads)
    assert not out.dllm_loss.requires_grad
    assert out.row_losses.shape == out.row_weights.shape == leaves[0].shape[:2]
    assert out.row_losses.requires_grad
    assert not out.row_weights.requires_grad
    torch.testing.assert_close(out.row_weights.sum(), out.weight_sum)
    assert out.row_losses[out.row_weights == 0].eq(0).all()


@forms
@pytest.mark.parametrize("case", [case for case in CLASSES if "balanced" not in case.name], ids=lambda case: case.name)
def test_an_upstream_gradient_of_zero_leaves_out_a_sequence_that_holds_nan(case, form):
    inputs, leaves = {name: t.to(DEVICE) for name, t in case.draw(2, 6, V).items()}, leaves_of(case, form)
    upstream, grads = torch.ones(2, 6 * case.width, device=DEVICE), []
    upstream[0] = 0
    for filling in (math.nan, 1.0):
        leaves[0].data[0] = filling
        grads.append(output_and_grads(case, form, leaves, inputs, lambda out: (out.row_losses * upstream).sum())[1])
    torch.testing.assert_close(*grads)


@forms
@pytest.mark.parametrize("case", [case for case in CLASSES if case.counts], ids=lambda case: case.name)
def test_rows_are_not_divided(case, form):
    inputs, leaves = {name: t.to(DEVICE) for name, t in case.draw(2, 6, V).items()}, leaves_of(case, form)
    once, again = (
        case.output(form, case.arguments(form, leaves[0], inputs | dict.fromkeys(case.counts, n), tuple(leaves[1:])))
        for n in (3, 50)
    )
    assert torch.equal(once.row_losses, again.row_losses)
    assert not torch.equal(once.total_loss, again.total_loss)


def drawn(name, B=2, L=6):
    torch.manual_seed(0)
    return BY_NAME[name].draw(B, L, V), torch.randn(B, L, D), torch.randn(V, D)


@forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_rounded_row_keeps_its_gradient_and_its_infinity(form, dtype):
    i, h, w = drawn("mdlm")
    i["target_ids"] = i["target_ids"].clamp(min=0)
    on, results = torch.ones(2, 6), []
    for upcast in (True, False):
        leaf = (h if form == "hidden" else F.linear(h, w)).to(dtype).requires_grad_()
        loss = BlockDiffusionCrossEntropyLoss(upcast, reduction="none")
        args = i["target_ids"], on, on, on
        out = loss.forward_fused(leaf, w.to(dtype), *args) if form == "hidden" else loss(leaf, *args)
        upstream = 1 + torch.arange(12.0).view(2, 6) / 1000  # which a cast of the gradient would round
        results.append((out.row_losses.detach(), *torch.autograd.grad(out.row_losses, leaf, upstream)))
    (exact, gradient), (rounded, other) = results
    assert torch.equal(rounded, exact.to(dtype).float())
    assert torch.equal(other, gradient)
    x = torch.zeros(1, 2, V, dtype=dtype)
    x[0, 0, 3] = -math.inf
    out = BlockDiffusionCrossEntropyLoss(False, reduction="none")(x, torch.full((1, 2), 3), *[torch.ones(1, 2)] * 3)
    assert out.row_losses.tolist() == [[math.inf, torch.tensor(V).log().to(dtype).item()]]


@forms
def test_a_copy_of_weight_0_is_not_read(form):
    i, x, eye = BY_NAME["idlm"].draw(2, 6, V), torch.randn(2, 12, V), torch.eye(V)
    x[:, 6:] = math.nan
    losses = IDLMLoss(0.0, reduction="none"), IDLMLoss(0.0)
    out, total = (f(x, **i, seq_len=6) if form == "logits" else f.forward_fused(x, eye, **i, seq_len=6) for f in losses)
    torch.testing.assert_close([out.total_loss, total.dllm_loss], [total.total_loss] * 2)
    assert out.row_losses[:, 6:].eq(0).all()
    assert out.row_weights[:, 6:].eq(0).all()


@forms
def test_rows_with_an_undefined_balance_and_an_upstream_gradient_of_zero_get_no_gradient(form):
    """A target that cannot be predicted makes the balance NaN, the weight of the rows of the clean copy."""
    i, leaves = BY_NAME["idlm"].draw(2, 6, V), leaves_of(BY_NAME["idlm"], form)
    i["answer_mask"], i["valid_mask"], i["target_ids"] = torch.ones(2, 6), torch.ones(2, 6), torch.full((2, 6), 3)
    i["target_ids"][0, 5] = 7
    i, loss = {name: t.to(DEVICE) for name, t in i.items()}, IDLMLoss(auto_balance=True, skip_id=7, reduction="none")
    out = loss(*leaves, **i, seq_len=6) if form == "logits" else loss.forward_fused(*leaves[:2], **i, seq_len=6)
    assert out.row_weights[:, 6:11].isnan().all()
    (grad,) = torch.autograd.grad(out.row_losses[:, :4].sum(), leaves[0])
    assert not grad.isnan().any()
    assert grad[:, :4].any(-1).all()
    assert not grad[:, 4:].any()


def test_rows_after_the_diffusion_part_are_omitted_without_an_ar_part():
    case = BY_NAME["hybrid, one tensor, rows"]
    i, x = BY_NAME["mdlm"].draw(2, 6, V), torch.randn(2, 9, V)
    out, cut = (case.loss(**case.settings)(y, **i) for y in (x, x[:, :6]))
    torch.testing.assert_close(out, cut)
    assert out.row_losses.shape == (2, 6)


NOT_ONE = ("mean", None, True)
MESSAGE = "^reduction must be one of total, none, got "


@pytest.mark.parametrize("value", NOT_ONE, ids=str)
@pytest.mark.parametrize("case", [case for case in FIRSTS if case in LOSSES], ids=lambda case: case.name)
def test_an_unknown_reduction_is_rejected_also_when_assigned(case, value):
    inputs = {name: t.to(DEVICE) for name, t in case.draw(2, 6, V).items()}
    for form in ("logits", "hidden"):
        rows, *head = leaves_of(case, form)
        arguments = case.arguments(form, rows, inputs, tuple(head))
        with pytest.raises(ValueError, match=MESSAGE):
            case.output(form, arguments, reduction=value)
        if isinstance(case.loss, type):
            loss = case.loss(**case.settings)
            loss.reduction = value
            with pytest.raises(ValueError, match=MESSAGE):
                case._of(loss, form)(**arguments)


# Other losses have the code of these, of the logged rows in tests/ops/test_compile.py, or of their summed form.
COMPILED = usually(["distillation, rows", "idlm, rows", "scdd, counted, rows"], [case.name for case in ROWS])
COMPILED = [pytest.param(*p.values, form, marks=p.marks) for p, form in zip(COMPILED, cycle(("hidden", "logits")))]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "form"), COMPILED)
def test_rows_of_a_compiled_step(name, form):
    """A trainer normalises the rows itself, in one graph with the loss."""
    torch.compiler.reset()
    case = BY_NAME[name]
    torch.manual_seed(0)
    inputs, leaves = case.draw(2, 6, V), leaves_of(case, form)

    def step(rows, *head):
        out = case.output(form, case.arguments(form, rows, inputs, head))
        losses = out if isinstance(out, torch.Tensor) else out.row_losses
        return (losses.sum(1) / (losses != 0).sum(1).clamp(min=1)).mean()

    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        value = function(*leaves)
        results.append((value.detach(), *torch.autograd.grad(value, leaves)))
    torch.testing.assert_close(*results)
    torch.compiler.reset()
