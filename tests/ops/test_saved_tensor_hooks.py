"""The caller's hooks of saved tensors: activation checkpoints, selective ones, and offloading to the CPU."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dllm_kernels.ops import LinearLogits, linear_token_nll, weighted_linear_nll
from dllm_kernels.policy import nll_weights
from tests.conftest import DEVICE
from tests.support.op_cases import DIFFERENTIABLE, Rows

N, V, D = 10, 23, 6


def around(name):
    """Return a function that calls another one under the named hooks of saved tensors."""
    if name == "save_on_cpu":

        def call(function, *leaves):
            with torch.autograd.graph.save_on_cpu():
                return function(*leaves)

        return call
    contexts = {}
    if name == "selective":
        products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.tanh.default]
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, products)
    return partial(checkpoint, use_reentrant=False, **contexts)


def weighted_by_policy(h, w, ids):
    with torch.no_grad():
        log_probs = -linear_token_nll(h, w, ids).nll
    weights = nll_weights(lambda p: p.exp().square().sum(), log_probs)
    return weighted_linear_nll(h, w, ids, weights, chunk_size=2).loss


def of_case(case, h, w, ids):
    r = Rows.of(ids, ids % 3 > 0, (ids + 1) / N)
    return sum(t.square().sum() for t in case.values(case(LinearLogits(h, w, chunk_size=2), r)))


LOSSES = {case.name: partial(of_case, case) for case in DIFFERENTIABLE} | {"nll_weights": weighted_by_policy}


@pytest.mark.everyday(6)
@pytest.mark.covering(most=2)
@pytest.mark.parametrize("trains_head", [False, True])
@pytest.mark.parametrize("hooks", ["checkpoint", "selective", "save_on_cpu"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_body_runs_once_in_forward_and_once_in_backward(loss, hooks, trains_head):
    """Graphs that a call builds and differentiates inside are not those that the caller's hooks are for."""
    h, w = torch.randn(N, D, device=DEVICE), torch.randn(V, D, device=DEVICE)
    ids, runs = torch.arange(N, device=DEVICE), []

    def body(h, w):
        runs.append(1)
        return loss(h.tanh(), w, ids)

    results = []
    for call, in_backward in ((body, 0), (partial(around(hooks), body), int(hooks != "save_on_cpu"))):
        runs.clear()
        leaves = [h.clone().requires_grad_(), w.clone().requires_grad_(trains_head)]
        value = call(*leaves)
        assert len(runs) == 1
        value.backward()
        assert len(runs) == 1 + in_backward
        results.append([value.detach(), *(leaf.grad for leaf in leaves if leaf.requires_grad)])
    for expected, got in zip(*results, strict=True):
        assert torch.equal(got, expected)
