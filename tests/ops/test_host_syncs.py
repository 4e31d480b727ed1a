"""Host syncs of the ops from hidden states, those of the table in docs/develop/decisions.md."""

import pytest
import torch

from dllm_kernels import ops
from tests.support.recorded import ReadBack

N, D, V = 6, 16, 64
# name -> (call with hidden states, head, ids and a mask; syncs of forward; of backward with a frozen, a trained head)
SYNCS = {
    "weighted_linear_nll": (lambda h, w, ids, on, **o: ops.weighted_linear_nll(h, w, ids, on, **o), 1, 0, 0),
    "linear_token_nll": (lambda h, w, ids, on, **o: ops.linear_token_nll(h, w, ids, **o), 1, 0, 1),
    "linear_row_stats": (lambda h, w, ids, on, **o: ops.linear_row_stats(h, w, ids, **o), 0, 1, 1),
    "linear_row_stats, active": (lambda h, w, ids, on, **o: ops.linear_row_stats(h, w, ids, active=on, **o), 1, 1, 1),
    "token_log_probs": (lambda h, w, ids, on, **o: ops.token_log_probs(h, ids, weight=w, **o), 1, 1, 1),
    "linear_row_objective": (
        lambda h, w, ids, on, **o: ops.linear_row_objective(h, w, ids, lambda s: s.log_probs, **o), 0, 0, 0
    ),
    "linear_row_objective, active": (
        lambda h, w, ids, on, **o: ops.linear_row_objective(h, w, ids, lambda s: s.log_probs, active=on, **o), 1, 0, 0
    ),
    "linear_divergence": (lambda h, w, ids, on, **o: ops.linear_divergence(h, w, h.detach(), **o), 0, 0, 0),
    "linear_divergence, weights": (
        lambda h, w, ids, on, **o: ops.linear_divergence(h, w, h.detach(), on, **o), 1, 0, 0
    ),
    "linear_divergence, rows": (
        lambda h, w, ids, on, **o: ops.linear_divergence(h, w, h.detach(), reduction="none", **o), 0, 0, 1
    ),
    "linear_topk_divergence": (
        lambda h, w, ids, on, **o: ops.linear_topk_divergence(h, w, ids[:, None], -1 - h[:, :1].detach().abs(), **o),
        1, 0, 0,
    ),
    "linear_topk_divergence, rows": (
        lambda h, w, ids, on, **o: ops.linear_topk_divergence(
            h, w, ids[:, None], -1 - h[:, :1].detach().abs(), reduction="none", **o
        ),
        1, 1, 1,
    ),
    "soft_embedding": (lambda h, w, ids, on, **o: (ops.soft_embedding(h, w, w, **o),), 0, 0, 0),
    "soft_embedding, active": (lambda h, w, ids, on, **o: (ops.soft_embedding(h, w, w, active=on, **o),), 1, 0, 0),
    "linear_sample": (lambda h, w, ids, on, **o: ops.linear_sample(h, w, seeds=ids, **o), 0, 0, 0),
    "linear_sample, active": (lambda h, w, ids, on, **o: ops.linear_sample(h, w, seeds=ids, active=on, **o), 1, 0, 0),
}  # fmt: skip


def check_syncs(name, trained, bounded, reset, **options):
    """Run forward and backward on the default device; ``reset()`` returns the number of syncs since its last call."""
    call, forward, *backward = SYNCS[name]
    h, w = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=trained)
    ids, on = torch.arange(N), torch.ones(N)
    reset()
    out = call(h, w, ids, on, num_active=N if bounded else None, **options)
    assert reset() == (0 if bounded else forward)
    losses = [t.sum() for t in out if t is not None and t.requires_grad]
    torch.autograd.backward(losses)
    assert reset() == (0 if bounded else backward[trained])


@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", SYNCS)
def test_host_syncs(name, trained, bounded, device):
    """``tests/support/mock_gpu_checks.py`` repeats it on a mock GPU, which raises at any other sync."""
    with ReadBack() as read_back:

        def reset():
            count, read_back.count = read_back.count, 0
            return count

        with torch.device(device):
            check_syncs(name, trained, bounded, reset, backend="triton")
