"""The default dtype changes no result: bfloat16 would round a count, and float64 would widen what the caller stores."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from dllm_kernels import PolicyLoss, PolicyObjective, eubo, policy_views
from tests.conftest import DEVICE
from tests.ops.test_changing_arguments import CALLS, CLASSES, Step, draw_case, evaluate, step_of
from tests.support.defaults import default_dtype

DTYPES = [torch.bfloat16, torch.float64]


def policy(rows, head, ids, masks, old, advantages):
    """Return log-probs, scores and all metrics of views whose every row has an odd number of tokens."""
    views = policy_views(ids, masks, 2, "elbo", num=3, seeds=torch.arange(len(ids), device=DEVICE))
    loss = PolicyLoss(PolicyObjective(kl="k2", kl_coef=0.1))
    out = loss.forward_fused(rows, head, ids, views, old, advantages, old / 2)
    log_probs = rows.sum(-1)
    return [t for t in out if t is not None], eubo(log_probs, views), views.sequence_scores(log_probs, mean=True)


def draw_policy(step):
    ids, masks = step.ids(), torch.ones(step.shape, device=DEVICE)
    rows, head = torch.randn(3, *step.shape, 8, device=DEVICE, requires_grad=True), step.head()
    given = {"ids": ids, "masks": masks, "old": -step.floats().abs(), "advantages": step.floats()[:, 0]}
    return {"rows": rows, "head": head, **given}


EVERY = {
    **CALLS,
    **{case.name: (step_of(case, "hidden"), draw_case(case, "hidden")) for case in CLASSES},
    "policy": (policy, draw_policy),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_results_and_gradients(name, dtype):
    function, draw = EVERY[name]
    expected, arguments = evaluate(function, draw(Step(0))), draw(Step(0))
    with default_dtype(dtype):
        got = evaluate(function, arguments)
    assert [t.dtype for t in tree_leaves(got)] == [t.dtype for t in tree_leaves(expected)]
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
