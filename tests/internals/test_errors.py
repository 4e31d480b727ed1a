"""Validation that happens before any row op runs."""

import functools

from dllm_kernels import HybridDiffusionLLMLoss
from dllm_kernels.ops import WeightedNLL
from tests.ops.test_errors import FLOATS, META, ON, Call, X, Y, all_on, probable, raises
from tests.support.recorded import record_ops


@probable
def test_no_value_is_read_on_another_device(case, monkeypatch):
    """A meta tensor has no values to read. The primitive is replaced, because it has no kernel for meta tensors."""
    seen = record_ops(monkeypatch.setattr, WeightedNLL(ON, ON))
    call = Call(case, "logits")
    on = {name: t.to(META) for name, t in (call.arguments | all_on(call)).items()}
    call(**(on | {"p_mask": on["p_mask"] * 2}))
    assert seen[0].call.weights.device == META
    message = "p_mask must hold probabilities, got bool"
    raises(ValueError, message, call, **(on | {"p_mask": on["p_mask"].bool()}))


def test_the_ar_branch_of_hybrid_is_checked_before_any_kernel_runs(monkeypatch):
    runs = record_ops(monkeypatch.setattr)
    call = functools.partial(HybridDiffusionLLMLoss(), X, Y, ON, ON, ON, ON)
    raises(ValueError, f"causal_logits must have dtype {FLOATS}, got int64", call, causal_logits=X.long())
    raises(
        ValueError,
        "causal_logits must have shape (2, 3, 5) to go with target_ids of shape (2, 3), got (2, 2, 5)",
        call, causal_logits=X[:, :2],
    )  # fmt: skip
    assert not runs
