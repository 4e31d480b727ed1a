"""torch's own checks of the linear ops with a head of two parts."""

import pytest
import torch

from dllm_kernels._core._inputs import NeedsGrad, RowInputs
from dllm_kernels._core._nll import LINEAR_TOKEN_NLL, WEIGHTED_LINEAR_NLL
from dllm_kernels._core._plan import Options, Plan
from dllm_kernels._core._stats import ROW_STATS
from tests.conftest import DEVICE
from tests.ops.test_extra import D, R, V
from tests.support.opcheck import opcheck

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.everyday(1)
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("trains", [(1, 1, 1, 1, 1), (1, 0, 0, 1, 0), (0, 0, 0, 0, 1)], ids=str)
@pytest.mark.parametrize("op", [WEIGHTED_LINEAR_NLL, LINEAR_TOKEN_NLL, ROW_STATS], ids=lambda op: op.name)
def test_opcheck_of_a_head_of_two_parts(op, trains):
    torch.manual_seed(0)
    leaves = [torch.randn(shape, device=DEVICE) for shape in ((5, D), (V, D), (V,), (5, R), (V, R))]
    leaves = [leaf.requires_grad_(bool(train)) for leaf, train in zip(leaves, trains, strict=True)]
    targets = torch.tensor([0, 3, -100, 5, 18], device=DEVICE)
    marks = torch.where(targets == -100, -100, 0)
    inputs = RowInputs(
        leaves[0], targets.unsqueeze(1), *leaves[1:], targets=marks if op is ROW_STATS else targets,
        weights=torch.rand(5, device=DEVICE),
    )  # fmt: skip
    options = Options(with_correct=True, chunk_size=2)
    opcheck(op, inputs, Plan(torch.float32, False, options, NeedsGrad(*map(bool, trains)), from_hidden=True))
