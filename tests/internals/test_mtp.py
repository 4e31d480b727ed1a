"""The row ops that a loss over several depths runs."""

import pytest

from dllm_kernels.mtp import FusedLinearCrossEntropy, calculate_mtp_loss
from tests.mtp.test_mtp import B, D, H, Model, S, hiddens, labels_with_padding
from tests.support.recorded import record_ops


@pytest.mark.parametrize("return_per_depth", [False, True])
def test_all_depths_go_through_one_call(monkeypatch, return_per_depth):
    calls = record_ops(monkeypatch.setattr)
    calculate_mtp_loss(
        FusedLinearCrossEntropy(),
        mtp_per_depth_h=hiddens(),
        labels=labels_with_padding(),
        model=Model(),
        return_per_depth=return_per_depth,
    )
    assert [(run.op, run.call.x.shape) for run in calls] == [
        ("token_nll" if return_per_depth else "weighted_nll", (D, B, S, H))
    ]
