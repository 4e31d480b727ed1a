"""Float64 gradients of every op pass ``torch.autograd.gradcheck``, which compares them with finite differences.

The parity tests compare gradients with those of the oracle, whose own gradients tests/reference compares so.
"""

import pytest
import torch

from dllm_kernels import ops
from dllm_kernels.ops import LinearLogits
from tests.conftest import DEVICE

V, D = 7, 3
IDS = torch.tensor([[0, 4, -100]], device=DEVICE)
MIX, WEIGHTS, TEACHER, H, U, HEAD, BIAS, COLUMNS = (
    torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(DEVICE)
    for shape in [(1, 3), (1, 3), (1, 3, V), (1, 3, D), (V, 2), (V, D), (V,), (1, 3, 2)]
)
TRANSFORM = {"softcap": 2.0, "scale": 1.5, "skip_id": 1}


def stats(out):
    return tuple(t for t in (out.log_probs, out.lse, out.entropy, out.mix) if t is not None)


def objective(row):
    return row.log_probs.exp() * row.entropy + row.lse.square()


STATS = {"entropy": True, "mix": (MIX.abs(), WEIGHTS.abs())}
TOP = TEACHER[..., 2:].topk(2).indices + 2, TEACHER.log_softmax(-1)[..., 2:].topk(2).values
KINDS = {"kl": 0.5, "jsd": 1.0, "rkl": 0.3, "soft_ce": 0.2}
OPS = {
    "token_nll": lambda z, **o: ops.token_nll(z, IDS, **o).nll,
    "weighted_nll": lambda z, **o: ops.weighted_nll(z, IDS, WEIGHTS, **o).loss,
    "row_stats": lambda z, **o: stats(ops.row_stats(z, IDS, **STATS, **o)),
    "row_objective": lambda z, **o: ops.row_objective(z, IDS.clamp(min=0), objective, entropy=True, **o).loss,
    "token_log_probs": lambda z, scale=1.0, **o: ops.token_log_probs(z, IDS, temperature=1 / scale, **o).log_probs,
    "divergence": lambda z, **o: ops.divergence(z, TEACHER, WEIGHTS, kind=KINDS, **o).loss,
    "topk_divergence": lambda z, **o: ops.topk_divergence(z, *TOP, WEIGHTS, reduction="none", **o).loss,
}
# One value per row, because the backward pass of a sum runs only once. Teacher and draft are both records, or neither.
OF_HEAD = {name: OPS[name] for name in ("token_nll", "row_stats", "topk_divergence")} | {
    "divergence": lambda z, **o: ops.divergence(z, LinearLogits(H, HEAD), WEIGHTS, kind=KINDS, reduction="none", **o)[0]
}


def leaves(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("transform", [{}, TRANSFORM], ids=["", "transformed"])
@pytest.mark.parametrize("name", OPS)
def test_logits(name, transform):
    assert torch.autograd.gradcheck(lambda z: OPS[name](z, backend="torch", **transform), leaves(TEACHER.roll(1)))


@pytest.mark.everyday(2)
@pytest.mark.parametrize("name", OPS)
def test_logits_through_kernels(name):
    """With ``fast_mode``, gradcheck compares one projection of the Jacobian, by few launches."""
    check = torch.autograd.gradcheck
    assert check(lambda z: OPS[name](z, backend="triton"), leaves(TEACHER.roll(1)), fast_mode=True)


@pytest.mark.parametrize("trained", ["rows", "rows and head"])
@pytest.mark.parametrize("transform", [{}, TRANSFORM], ids=["", "transformed"])
@pytest.mark.parametrize("name", OF_HEAD)
def test_hidden_states(name, transform, trained):
    """With a frozen head, the forward pass computes the gradients of the rows."""
    frozen = [HEAD, BIAS, U] if trained == "rows" else []

    def function(h, u, *head):
        w, bias, U = head or frozen
        return OF_HEAD[name](LinearLogits(h, w, bias, (u, U), chunk_size=2), backend="torch", **transform)

    given = [H, COLUMNS, *([] if frozen else [HEAD, BIAS, U])]
    assert torch.autograd.gradcheck(function, leaves(*given), fast_mode=True)
