"""Float64 gradients of every op pass ``torch.autograd.gradcheck``, which compares them with finite differences.

The parity tests compare gradients with those of the oracle, whose own gradients tests/reference compares so.
"""

import pytest
import torch

from tests.conftest import DEVICE
from tests.support.inputs import Source
from tests.support.op_cases import OP_BY_NAME, Rows

V, D = 7, 3
TRANSFORM = {"softcap": 2.0, "scale": 1.5, "skip_id": 1}
IDS = torch.tensor([[2, 4, 5]], device=DEVICE)
ROWS = Rows.of(IDS, IDS != 4, torch.tensor([[0.3, 0.7, 0.9]], dtype=torch.float64, device=DEVICE))
# One value per row, because the backward pass of a sum from a head runs only once.
OF_ROWS = ["token_nll", "row_stats", "token_log_probs", "topk_divergence, rows without a tail"]
# Whose teacher does not depend on the student; that of a record has its head, so that it is tested with a frozen one.
NAMES = [*OF_ROWS, "weighted_nll", "row_objective", "topk_divergence", "divergence, other teacher"]
transforms = pytest.mark.parametrize("transform", [{}, TRANSFORM], ids=["", "transformed"])


def gradcheck(name, source, transform=None, **options):
    case = OP_BY_NAME[name]
    given = case.accepted(**transform or {})

    def function(*leaves):
        return tuple(case.values(case(source.argument(*leaves), ROWS, backend=source.backend, **given)))

    leaves = [leaf.requires_grad_() for leaf in source.leaves((1, 3), V, torch.float64, D=D, size=1.0)]
    assert torch.autograd.gradcheck(function, leaves, **options)


@transforms
@pytest.mark.parametrize("name", NAMES)
def test_logits(name, transform):
    gradcheck(name, Source("stored", "torch"), transform)


@pytest.mark.everyday(2)
@pytest.mark.parametrize("name", NAMES)
def test_logits_through_kernels(name):
    """With ``fast_mode``, gradcheck compares one projection of the Jacobian, by few launches."""
    gradcheck(name, Source("stored", "triton"), fast_mode=True)


@transforms
@pytest.mark.parametrize("kind", ["frozen", "low rank"])
@pytest.mark.parametrize("name", OF_ROWS)
def test_hidden_states(name, kind, transform):
    """With a frozen head, the forward pass computes the gradients of the rows."""
    gradcheck(name, Source(kind, "torch", chunk_size=2), transform, fast_mode=True)
