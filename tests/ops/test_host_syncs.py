"""Host syncs of the ops with a head, those of the table in docs/develop/decisions.md."""

import pytest
import torch

from dllm_kernels import ops
from tests.support.op_cases import OP_CASES, Rows, name_of
from tests.support.recorded import ReadBack

N, D, V = 6, 16, 64


CASES = [case for case in OP_CASES if case.syncs]


def check_syncs(case, trained, bounded, reset, **options):
    """Run forward and backward on the default device; ``reset()`` returns the number of syncs since its last call."""
    forward, *backward = case.syncs
    h, w = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=trained)
    ids = torch.arange(N)
    r = Rows.of(ids, ids >= 0, torch.ones(N))
    reset()
    out = case(ops.LinearLogits(h, w, num_active=N if bounded else None), r, **options)
    assert reset() == (0 if bounded else forward)
    torch.autograd.backward([t.sum() for t in case.values(out)])
    assert reset() == (0 if bounded else backward[trained])


@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_host_syncs(case, trained, bounded, device):
    """``tests/support/mock_gpu_checks.py`` repeats it on a mock GPU, which raises at any other sync."""
    with ReadBack() as read_back:

        def reset():
            count, read_back.count = read_back.count, 0
            return count

        with torch.device(device):
            check_syncs(case, trained, bounded, reset, backend="triton")
