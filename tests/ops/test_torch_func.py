"""Within a transform of ``torch.func`` every op and loss raises an error that says what to use."""

import pytest
import torch
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import dllm_kernels as ours
from dllm_kernels.losses import DFlashDecayLoss, MDLMCrossEntropyLoss
from dllm_kernels.ops import (
    LinearLogits,
    divergence,
    row_objective,
    row_stats,
    token_log_probs,
    token_nll,
    topk_divergence,
    weighted_nll,
)
from tests.conftest import DEVICE
from tests.support.inputs import detached, map_rows
from tests.support.routines import FIRSTS, OTHERS

N, V, D = 5, 11, 4
IDS = torch.tensor([1, 0, 10, 3, -100], device=DEVICE)
KNOWN = IDS.clamp(min=0)
WEIGHTS = torch.tensor([0.5, 0.0, 2.0, 1.0, 1.0], device=DEVICE)
TOP, LOG_Q = torch.stack([IDS, (KNOWN + 1) % V], -1), torch.full((N, 2), -1.5, device=DEVICE)
ONES = torch.ones(1, N, device=DEVICE)


def sharpened(stats):
    return stats.log_probs.exp() * stats.entropy


OPS = {
    "token_nll": lambda x, **o: token_nll(x, IDS, **o).nll,
    "weighted_nll": lambda x, **o: weighted_nll(x, IDS, WEIGHTS, **o).loss,
    "row_stats": lambda x, **o: row_stats(x, IDS, entropy=True, mix=(WEIGHTS, WEIGHTS), **o).mix,
    "token_log_probs": lambda x, **o: token_log_probs(x, IDS, **o).log_probs,
    "divergence": lambda x, **o: divergence(x, constant(x), WEIGHTS, **o).loss,
    "divergence, rows": lambda x, **o: divergence(x, constant(x), WEIGHTS, reduction="none", **o).loss,
    "row_objective": lambda x, **o: row_objective(x, IDS, sharpened, entropy=True, **o).loss,
    "topk_divergence": lambda x, **o: topk_divergence(x, TOP, LOG_Q, WEIGHTS, **o).loss,
    "mdlm": lambda x, **o: MDLMCrossEntropyLoss(**o)(as_batch(x), IDS[None], ONES, ONES, ONES).total_loss,
    "dflash": lambda x, **o: DFlashDecayLoss(**o)(as_batch(x), IDS[None], ONES).total_loss,
}


def as_batch(x):
    return map_rows(x, lambda t: t[None])


def constant(x):
    return map_rows(detached(x), lambda t: t.flip(0))


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


TRANSFORMS = {
    "grad": lambda op, args: grad(op, 0)(*args),
    "grad_and_value": lambda op, args: grad_and_value(op, 0)(*args),
    "vjp": lambda op, args: vjp(op, *args),
    "jvp": lambda op, args: jvp(op, tuple(args), tuple(args)),
    "vmap": lambda op, args: vmap(op, (0, *[None for _ in args[1:]]))(args[0].expand(2, *args[0].shape), *args[1:]),
    "jacrev": lambda op, args: jacrev(op)(*args),
    "jacfwd": lambda op, args: jacfwd(op)(*args),
    "hessian": lambda op, args: hessian(op)(*args),
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
