"""Host syncs of the ops with a head, those of the table in docs/develop/decisions.md."""

import pytest
import torch

from dllm_kernels import ops
from tests.support.recorded import ReadBack

N, D, V = 6, 16, 64


def log_probs(stats):
    return stats.log_probs


def detached(x):
    return x._replace(hidden=x.hidden.detach())


def log_q(x):
    return -1 - x.hidden[:, :1].detach().abs()


# name -> (call with logits as a record, ids and a mask; syncs of forward; of backward with a frozen, a trained head)
SYNCS = {
    "weighted_nll": (lambda x, ids, on, **o: ops.weighted_nll(x, ids, on, **o), 1, 0, 0),
    "token_nll": (lambda x, ids, on, **o: ops.token_nll(x, ids, **o), 1, 0, 1),
    "row_stats": (lambda x, ids, on, **o: ops.row_stats(x, ids, **o), 0, 1, 1),
    "row_stats, active": (lambda x, ids, on, **o: ops.row_stats(x, ids, active=on, **o), 1, 1, 1),
    "token_log_probs": (lambda x, ids, on, **o: ops.token_log_probs(x, ids, **o), 1, 1, 1),
    "row_objective": (lambda x, ids, on, **o: ops.row_objective(x, ids, log_probs, **o), 0, 0, 0),
    "row_objective, active": (lambda x, ids, on, **o: ops.row_objective(x, ids, log_probs, active=on, **o), 1, 0, 0),
    "divergence": (lambda x, ids, on, **o: ops.divergence(x, detached(x), **o), 0, 0, 0),
    "divergence, weights": (lambda x, ids, on, **o: ops.divergence(x, detached(x), on, **o), 1, 0, 0),
    "divergence, rows": (lambda x, ids, on, **o: ops.divergence(x, detached(x), reduction="none", **o), 0, 0, 1),
    "topk_divergence": (lambda x, ids, on, **o: ops.topk_divergence(x, ids[:, None], log_q(x), **o), 1, 0, 0),
    "topk_divergence, rows": (
        lambda x, ids, on, **o: ops.topk_divergence(x, ids[:, None], log_q(x), reduction="none", **o), 1, 1, 1
    ),
    "soft_embedding": (lambda x, ids, on, **o: (ops.soft_embedding(x, None, x.weight, **o),), 0, 0, 0),
    "soft_embedding, active": (
        lambda x, ids, on, **o: (ops.soft_embedding(x, None, x.weight, active=on, **o),), 1, 0, 0
    ),
    "linear_sample": (lambda x, ids, on, **o: ops.linear_sample(x, seeds=ids, **o), 0, 0, 0),
    "linear_sample, active": (lambda x, ids, on, **o: ops.linear_sample(x, seeds=ids, active=on, **o), 1, 0, 0),
}  # fmt: skip


def check_syncs(name, trained, bounded, reset, **options):
    """Run forward and backward on the default device; ``reset()`` returns the number of syncs since its last call."""
    call, forward, *backward = SYNCS[name]
    h, w = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=trained)
    ids, on = torch.arange(N), torch.ones(N)
    reset()
    out = call(ops.LinearLogits(h, w, num_active=N if bounded else None), ids, on, **options)
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
