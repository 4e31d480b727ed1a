"""Within a transform of ``torch.func`` every op and loss raises an error that says what to use."""

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
