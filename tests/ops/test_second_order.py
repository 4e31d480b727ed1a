"""Double backward raises an error for every op and every input."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from dllm_kernels import MDLMCrossEntropyLoss
from dllm_kernels.ops import LinearLogits, weighted_linear_nll
from tests.conftest import DEVICE, usually
from tests.support.inputs import map_rows
from tests.support.op_cases import DIFFERENTIABLE, Rows

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

N, V, D = 5, 11, 4
IDS = torch.tensor([1, 0, 9, 3, 3], device=DEVICE)
ROWS = torch.ones(1, N, device=DEVICE)
R = Rows.of(IDS, IDS >= 0, IDS + 1.0)
OPS = {case.name: lambda x, case=case, **o: case.total(x, R, **o) for case in DIFFERENTIABLE} | {
    "loss, nll": lambda x, **o: MDLMCrossEntropyLoss(**o)(
        map_rows(x, lambda t: t[None]), IDS[None], ROWS, ROWS, ROWS
    ).total_loss,
}  # fmt: skip
INSTEAD = {case.name: case.instead for case in DIFFERENTIABLE} | {"loss, nll": "cross_entropy"}
ALL = [(form, name) for form in ("stored", "head", "frozen") for name in OPS]


def build(form, name, **options):
    """Return (previous layer, input of the op, value of the op)."""
    torch.manual_seed(0)
    layer = torch.randn(D, D, device=DEVICE, requires_grad=True)
    head = torch.randn(V, D, device=DEVICE, requires_grad=form != "frozen")
    hidden = torch.randn(N, D, device=DEVICE) @ layer
    x = F.linear(hidden, head) if form == "stored" else hidden
    return layer, x, OPS[name](x if form == "stored" else LinearLogits(x, head), **options)


def op_of(form, name, head, **options):
    """Return the op as a function of the logits or the hidden states."""
    return lambda x: OPS[name](x if form == "stored" else LinearLogits(x, head), **options)


DERIVATIVES = {
    "grad": lambda total, leaf: torch.autograd.grad(total, [leaf]),
    "backward": lambda total, leaf: total.backward(inputs=[leaf]),
    "backward of all": lambda total, _: total.backward(),
}


@pytest.mark.everyday(8)
@pytest.mark.covering(most=2)
@pytest.mark.parametrize("ask", DERIVATIVES)
@pytest.mark.parametrize(("form", "name"), ALL)
def test_a_penalty_on_a_gradient_raises_for_every_input(form, name, ask, backend):
    """With a constant upstream gradient, autograd's own check would pass, and only the value would have a gradient."""
    layer, x, value = build(form, name, backend=backend)
    (g,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    total = value.sum() + 10 * g.pow(2).sum()
    advice = rf"no second derivative; .*torch\.(nn\.functional\.)?{INSTEAD[name]}"
    with pytest.raises(RuntimeError, match=advice) as raised:
        DERIVATIVES[ask](total, layer)
    assert ("linear(" in str(raised.value)) == (form != "stored")  # for forms in which the caller has no logits


@pytest.mark.parametrize(("form", "name"), ALL)
def test_the_gradient_has_no_derivative_in_the_row_weights(form, name):
    _, x, value = build(form, name, backend="torch")
    weight = torch.rand(value.shape, device=DEVICE, requires_grad=True)
    (g,) = torch.autograd.grad((weight * value).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(g.sum(), [weight])


@pytest.mark.parametrize(("form", "name"), ALL)
def test_a_gradient_with_create_graph_is_unchanged(form, name):
    """Uses that do not differentiate the gradient still work, such as a product with an unrelated parameter."""
    _, x, value = build(form, name, backend="torch")
    (plain,) = torch.autograd.grad(value.sum(), x)
    _, x, value = build(form, name, backend="torch")
    (g,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    assert torch.equal(g, plain)
    other = torch.zeros_like(g, requires_grad=True)
    (of_other,) = torch.autograd.grad((g * other).sum(), [other])
    assert torch.equal(of_other, plain)


@pytest.mark.parametrize(("form", "name"), ALL)
def test_a_derivative_in_forward_mode_is_an_error_and_not_0(form, name):
    """An error is raised even if no input requires a gradient, in which case no autograd function could raise it."""
    x, head = torch.randn(N, V if form == "stored" else D, device=DEVICE), torch.randn(V, D, device=DEVICE)
    op = op_of(form, name, head)
    with forward_ad.dual_level():
        op(x)  # without a tangent
        with pytest.raises(NotImplementedError, match=r"no forward-mode derivatives .*: use backward"):
            op(forward_ad.make_dual(x, x))
        if form != "stored":
            with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
                op_of(form, name, forward_ad.make_dual(head, head))(x)


COMPILED = [
    *[(form, name, False) for form, name in ALL if name != "loss, nll"],
    ("head", "weighted_nll", True),
    ("frozen", "weighted_nll", True),
]
RAISING = [("stored", "token_nll", False), ("head", "row_stats", False), ("frozen", "weighted_nll", True)]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("form", "name", "half"), usually(RAISING, COMPILED))
def test_a_second_derivative_of_a_compiled_op_is_an_error(form, name, half):
    """AOTAutograd raises for every compiled backward pass; without it (backend="eager") the error would be lost.

    Before torch 2.12 it returns a gradient without a graph if the backward pass reads no input.
    """
    torch.compiler.reset()
    dtype = torch.float16 if half else torch.float32
    x = torch.randn(N, V if form == "stored" else D, device=DEVICE, dtype=dtype, requires_grad=True)
    head = torch.randn(V, D, device=DEVICE, dtype=dtype, requires_grad=form == "head")
    op = op_of(form, name, head)
    value = torch.compile(op, backend="aot_eager", fullgraph=True)(x).sum()
    (g,) = torch.autograd.grad(value, [x], create_graph=True)
    (plain,) = torch.autograd.grad(op(x).sum(), [x])
    assert torch.equal(g, plain)
    if not g.requires_grad:
        assert TORCH < (2, 12)
        pytest.skip("torch returns a gradient without a graph")
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        (value + 10 * g.pow(2).sum()).backward()


@pytest.mark.exhaustive
def test_a_compiled_op_keeps_no_input():
    """``weighted_linear_nll`` saves gradients and weights, as in eager mode; hidden states and head may be freed."""
    torch.compiler.reset()
    hidden, head = torch.randn(N, D, device=DEVICE, requires_grad=True), torch.randn(V, D, device=DEVICE)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        torch.compile(weighted_linear_nll, backend="aot_eager", fullgraph=True)(hidden, head, IDS, IDS + 1.0)
    assert saved
    theirs = {t.untyped_storage().data_ptr() for t in (hidden, head)}
    assert not any(t.numel() and t.untyped_storage().data_ptr() in theirs for t in saved)


@pytest.mark.parametrize(("form", "name"), ALL)
def test_within_an_activation_checkpoint(form, name):
    """A checkpoint recomputes the saved tensors, and returns each only once."""
    x = torch.randn(N, V if form == "stored" else D, device=DEVICE, requires_grad=True)
    head = torch.randn(V, D, device=DEVICE, requires_grad=form == "head")
    op = op_of(form, name, head, backend="torch")
    out = torch.utils.checkpoint.checkpoint(lambda x: op(x).sum(), x, use_reentrant=False)
    (g,) = torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(g.sum(), [x])
