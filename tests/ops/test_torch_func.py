"""Within a transform of ``torch.func`` every op and loss raises an error that says what to use."""

import pytest
import torch
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import dllm_kernels as ours
from dllm_kernels.losses import DFlashDecayLoss, MDLMCrossEntropyLoss
from dllm_kernels.ops import LinearLogits, token_nll
from tests.conftest import DEVICE
from tests.support.inputs import map_rows
from tests.support.op_cases import DIFFERENTIABLE, Rows
from tests.support.routines import FIRSTS, OTHERS

N, V, D = 5, 11, 4
IDS = torch.tensor([1, 0, 9, 3, -100], device=DEVICE)
R = Rows.of(IDS.clamp(min=0), IDS >= 0, torch.linspace(0.1, 1, N, device=DEVICE))
ONES = torch.ones(1, N, device=DEVICE)
OPS = {case.name: lambda x, case=case, **o: case.total(x, R, **o) for case in DIFFERENTIABLE} | {
    "mdlm": lambda x, **o: MDLMCrossEntropyLoss(**o)(as_batch(x), IDS[None], ONES, ONES, ONES).total_loss,
    "dflash": lambda x, **o: DFlashDecayLoss(**o)(as_batch(x), IDS[None], ONES).total_loss,
}


def as_batch(x):
    return map_rows(x, lambda t: t[None])


def of_head(op):
    return lambda h, w, **options: op(LinearLogits(h, w), **options)


ALL = [pytest.param(op, 1, id=name) for name, op in OPS.items()] + [
    pytest.param(of_head(op), 2, id=f"{name} of hidden states") for name, op in OPS.items()
]
every_op = pytest.mark.parametrize(("op", "count"), ALL)


def inputs(count, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = [(N, V)] if count == 1 else [(N, D), (V, D)]
    return [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]


def batched(x, loss):
    return torch.autograd.grad(loss, x, torch.ones(2, device=DEVICE, dtype=loss.dtype), is_grads_batched=True)


TRANSFORMS = {
    "grad": lambda op, args: grad(op, 0)(*args),
    "grad_and_value": lambda op, args: grad_and_value(op, 0)(*args),
    "vjp": lambda op, args: vjp(op, *args),
    "jvp": lambda op, args: jvp(op, tuple(args), tuple(args)),
    "vmap": lambda op, args: vmap(op, (0, *[None for _ in args[1:]]))(args[0].expand(2, *args[0].shape), *args[1:]),
    "jacrev": lambda op, args: jacrev(op)(*args),
    "jacfwd": lambda op, args: jacfwd(op)(*args),
    "hessian": lambda op, args: hessian(op)(*args),
    "is_grads_batched": lambda op, args: batched(args[0].requires_grad_(), op(*args)),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("transform", TRANSFORMS)
@every_op
def test_every_transform_raises_and_says_what_to_use(op, count, transform):
    match = r"does not support the transforms of torch\.func .*: use backward or torch\.autograd\.grad"
    with pytest.raises(NotImplementedError, match=match):
        TRANSFORMS[transform](op, inputs(count))


def test_a_transform_of_what_follows_an_op():
    """The restriction is on ops inside a transform, not on their results."""
    x = inputs(1)[0].requires_grad_()
    nll = token_nll(x, IDS).nll
    assert torch.equal(grad(lambda t: (2 * t).sum())(nll.detach()), torch.full_like(nll, 2))


# of ids [2, 5], masks [2, 5] and seeds [2]
OF_NOISE = {
    **{
        name: lambda ids, mask, seeds, call=call: call(ids, mask, seeds=seeds)
        for name, call in {**FIRSTS, **OTHERS}.items()
    },
    "sample_anchors": lambda ids, mask, seeds: ours.sample_anchors(mask, 2, 3, seeds=seeds),
    "sample_prefix": lambda ids, mask, seeds: ours.sample_prefix((2, 3), 4, 0.5, seeds=seeds),
    "policy_views": lambda ids, mask, seeds: tuple(ours.policy_views(ids, mask, 9, "coupled", seeds=seeds)),
}


@pytest.mark.parametrize("function", OF_NOISE.values(), ids=OF_NOISE)
def test_noise_has_no_vmap(function):
    ids = torch.randint(0, 9, (3, 2, 5), device="cpu")
    with pytest.raises(NotImplementedError, match=r"^dllm_kernels does not support the transforms of torch\.func"):
        vmap(function)(ids, ids > 2, ids[..., 0])
