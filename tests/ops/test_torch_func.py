"""``torch.func.grad``, ``grad_and_value`` and ``vjp`` return the gradients of ``backward``; other transforms raise."""

import pytest
import torch
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

from dllm_kernels.losses import DFlashDecayLoss, MDLMCrossEntropyLoss
from dllm_kernels.ops import (
    divergence,
    linear_divergence,
    linear_row_objective,
    linear_row_stats,
    linear_token_nll,
    linear_topk_divergence,
    row_objective,
    row_stats,
    soft_embedding,
    token_log_probs,
    token_nll,
    topk_divergence,
    weighted_linear_nll,
    weighted_nll,
)
from tests.conftest import DEVICE

N, V, D = 5, 11, 4
IDS = torch.tensor([1, 0, 10, 3, -100], device=DEVICE)
KNOWN = IDS.clamp(min=0)
WEIGHTS = torch.tensor([0.5, 0.0, 2.0, 1.0, 1.0], device=DEVICE)
TOP, LOG_Q = torch.stack([IDS, (KNOWN + 1) % V], -1), torch.full((N, 2), -1.5, device=DEVICE)
ONES = torch.ones(1, N, device=DEVICE)


def sharpened(stats):
    return stats.log_probs.exp() * stats.entropy


OF_LOGITS = {
    "token_nll": lambda x, **o: token_nll(x, IDS, **o).nll,
    "weighted_nll": lambda x, **o: weighted_nll(x, IDS, WEIGHTS, **o).loss,
    "row_stats": lambda x, **o: row_stats(x, IDS, entropy=True, mix=(WEIGHTS, WEIGHTS), **o).mix,
    "token_log_probs": lambda x, **o: token_log_probs(x, IDS, **o).log_probs,
    "divergence": lambda x, **o: divergence(x, x.detach().flip(0), WEIGHTS, **o).loss,
    "row_objective": lambda x, **o: row_objective(x, IDS, sharpened, entropy=True, **o).loss,
    "topk_divergence": lambda x, **o: topk_divergence(x, TOP, LOG_Q, WEIGHTS, **o).loss,
    "mdlm": lambda x, **o: MDLMCrossEntropyLoss(**o)(x[None], IDS[None], ONES, ONES, ONES).total_loss,
}
OF_HIDDEN = {
    "linear_token_nll": lambda h, w, **o: linear_token_nll(h, w, IDS, **o).nll,
    "weighted_linear_nll": lambda h, w, **o: weighted_linear_nll(h, w, IDS, WEIGHTS, **o).loss,
    "linear_row_stats": lambda h, w, **o: linear_row_stats(h, w, IDS, **o).lse,
    "token_log_probs": lambda h, w, **o: token_log_probs(h, IDS, weight=w, **o).log_probs,
    "linear_divergence": lambda h, w, **o: linear_divergence(h, w, h.detach().flip(0), WEIGHTS, **o).loss,
    "linear_divergence, rows": lambda h, w, **o: (
        linear_divergence(h, w, h.detach().flip(0), WEIGHTS, reduction="none", **o).loss
    ),
    "linear_row_objective": lambda h, w, **o: linear_row_objective(h, w, IDS, sharpened, entropy=True, **o).loss,
    "linear_topk_divergence": lambda h, w, **o: linear_topk_divergence(h, w, TOP, LOG_Q, WEIGHTS, **o).loss,
    "dflash": lambda h, w, **o: DFlashDecayLoss(**o).forward_fused(h[None], w, IDS[None], ONES).total_loss,
}
ALL = [pytest.param(f, 1, id=name) for name, f in OF_LOGITS.items()] + [
    pytest.param(f, 2, id=f"{name} of hidden states") for name, f in OF_HIDDEN.items()
]
every_op = pytest.mark.parametrize(("op", "count"), ALL)


def inputs(count, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = [(N, V)] if count == 1 else [(N, D), (V, D)]
    return [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]


def assert_same(op, got, expected):
    """Assert equal bits, except for objectives: in a transform, they are ``linear_row_stats`` and ``fn``."""
    bits = op not in (OF_HIDDEN["linear_row_objective"], OF_HIDDEN["linear_topk_divergence"])
    torch.testing.assert_close(got, expected, **({"rtol": 0, "atol": 0} if bits else {}))


def by_backward(op, args, upstream=None, trained=None, **options):
    """Return (value, gradients of the first ``trained`` inputs)."""
    leaves = [t.clone().requires_grad_(trained is None or i < trained) for i, t in enumerate(args)]
    value = op(*leaves, **options)
    upstream = torch.ones_like(value) if upstream is None else upstream
    return value.detach(), torch.autograd.grad(value, [leaf for leaf in leaves if leaf.requires_grad], upstream)


@pytest.mark.everyday(6)
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@every_op
def test_values_and_gradients_equal_those_of_backward(op, count, dtype, backend):
    args = inputs(count, dtype)
    value, expected = by_backward(op, args, backend=backend)
    _, frozen = by_backward(op, args, trained=1, backend=backend)
    found, got = grad_and_value(lambda *a: op(*a, backend=backend).sum(), argnums=tuple(range(count)))(*args)
    assert_same(op, got, value.sum())
    assert_same(op, found, expected)
    assert_same(op, grad(lambda *a: op(*a, backend=backend).sum())(*args), frozen[0])
    upstream = torch.rand(value.shape, device=DEVICE, dtype=value.dtype)
    _, expected = by_backward(op, args, upstream, backend=backend)
    got, backward = vjp(lambda *a: op(*a, backend=backend), *args)
    assert_same(op, got, value)
    assert_same(op, backward(upstream), expected)


@pytest.mark.parametrize("op", [pytest.param(f, id=name) for name, f in OF_HIDDEN.items()])
def test_an_input_that_only_the_enclosing_backward_differentiates(op):
    """``backward`` of the value that the transform returns reaches the head.

    The transform itself does not differentiate it.
    """
    hidden, head = inputs(2)
    _, (_, expected) = by_backward(op, (hidden, head))
    head.requires_grad_()
    _, value = grad_and_value(lambda h, w: op(h, w).sum())(hidden, head)
    value.backward()
    assert_same(op, head.grad, expected)


@every_op
def test_a_second_derivative_is_an_error(op, count):
    def first(*a):
        return grad(lambda *b: op(*b).sum())(*a).square().sum()

    args = inputs(count)
    for second in (grad(first), lambda *a: torch.autograd.grad(first(*(t.requires_grad_() for t in a)), a)):
        with pytest.raises(RuntimeError, match="no second derivative; for a second-order term use"):
            second(*args)


NO_VMAP = r"^dllm_kernels has no batching rule for torch\.func\.vmap, .*: call the op on the whole batch"
NO_FORWARD = r"^dllm_kernels has no forward-mode derivatives"
REFUSED = {
    "vmap": (lambda op, x, *w: vmap(lambda x: op(x, *w))(torch.stack([x, x])), NO_VMAP),
    "vmap of grad": (lambda op, x, *w: vmap(grad(lambda x: op(x, *w).sum()))(torch.stack([x, x])), NO_VMAP),
    "jacrev": (lambda op, x, *w: jacrev(op)(x, *w), NO_VMAP),
    "jvp": (lambda op, x, *w: jvp(lambda x: op(x, *w), (x,), (x,)), NO_FORWARD),
    "jvp of grad": (lambda op, x, *w: jvp(grad(lambda x: op(x, *w).sum()), (x,), (x,)), NO_FORWARD),
    "jacfwd": (lambda op, x, *w: jacfwd(op)(x, *w), NO_FORWARD),
    "hessian": (lambda op, x, *w: hessian(lambda x: op(x, *w).sum())(x), NO_FORWARD),
}


@pytest.mark.everyday(40)
@pytest.mark.parametrize("transform", REFUSED)
@every_op
def test_every_other_transform_raises_with_advice(op, count, transform):
    call, message = REFUSED[transform]
    with pytest.raises(NotImplementedError, match=message):
        call(op, *inputs(count))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: vmap(lambda ids: token_nll(x, ids).nll)(torch.stack([IDS, IDS])),
        lambda x: vmap(lambda ids: token_log_probs(x, ids).log_probs)(torch.stack([KNOWN, KNOWN])),
        lambda x: vmap(lambda weights: weighted_nll(x, IDS, weights).loss)(torch.stack([WEIGHTS, WEIGHTS])),
        lambda x: vmap(lambda teacher: divergence(x, teacher).loss)(torch.stack([x, x])),
        lambda x: vmap(
            lambda p: MDLMCrossEntropyLoss()(x[None], IDS[None], ONES, p, ONES).total_loss
        )(torch.stack([ONES, ONES])),
        lambda x: vmap(lambda h: soft_embedding(h, x.t(), x.t()))(torch.ones(2, 3, N, device=DEVICE)),
    ],
    ids=["ids", "ids of tokens", "weights", "teacher", "p_mask", "soft_embedding"],
)  # fmt: skip
def test_vmap_over_any_tensor_is_an_error(call):
    with pytest.raises(NotImplementedError, match=NO_VMAP):
        call(*inputs(1))


def test_vmap_over_a_tensor_that_the_op_does_not_take():
    (x,) = inputs(1)
    factors = torch.rand(2, N, device=DEVICE)
    assert torch.equal(vmap(lambda factor: factor * token_nll(x, IDS).nll)(factors), factors * token_nll(x, IDS).nll)


def test_weights_are_not_differentiated():
    (x,) = inputs(1)
    with pytest.raises(ValueError, match=r"^weights must not require a gradient"):
        grad(lambda weights: weighted_nll(x, IDS, weights).loss)(WEIGHTS)
    with pytest.raises(NotImplementedError, match=NO_FORWARD):
        jvp(lambda weights: weighted_nll(x, IDS, weights).loss, (WEIGHTS,), (WEIGHTS,))


def test_the_gradient_does_not_overwrite_the_logits():
    with pytest.raises(
        ValueError, match=r"^inplace_backward must be False under torch\.compile and torch\.func, got True"
    ):
        grad(lambda x: token_nll(x, IDS, inplace_backward=True).nll.sum())(*inputs(1))


def test_a_vjp_function_runs_once_if_the_gradient_is_computed_in_forward():
    _, backward = vjp(lambda h, w: weighted_linear_nll(h, w, IDS, WEIGHTS).loss, *inputs(2))
    one = torch.ones((), device=DEVICE)
    backward(one)
    with pytest.raises(RuntimeError, match=r"^weighted_linear_nll computes its gradients in the forward pass"):
        backward(one)
