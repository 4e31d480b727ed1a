"""The row ops that a loss over several depths runs."""

import pytest

from dllm_kernels.losses import _model_output
from dllm_kernels.mtp import (
    FusedLinearCrossEntropy,
    calculate_mtp_loss,
)
from tests.mtp.test_mtp import B, D, H, Model, S, hiddens, labels_with_padding


@pytest.mark.parametrize("return_per_depth", [False, True])
def test_all_depths_go_through_one_call(monkeypatch, return_per_depth):
    calls = []
    inner = _model_output.run
    monkeypatch.setattr(
        _model_output, "run", lambda op, job, o: calls.append((op.name, job.x.shape)) or inner(op, job, o)
    )
    calculate_mtp_loss(
        FusedLinearCrossEntropy(),
        mtp_per_depth_h=hiddens(),
        labels=labels_with_padding(),
        model=Model(),
        return_per_depth=return_per_depth,
    )
    assert calls == [("linear_token_nll" if return_per_depth else "weighted_linear_nll", (D, B, S, H))]
