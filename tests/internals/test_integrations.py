"""Integrations: labels and ranks of a collator, models without hidden states, and TRL with a frozen head."""

import math
import multiprocessing
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import dllm_kernels
from dllm_kernels._graph import _plain
from dllm_kernels.integrations import _attention
from dllm_kernels.integrations.transformers import MaskedDiffusionCollator, mdlm_loss_func, unpack_labels
from dllm_kernels.integrations.trl import _log_probs
from dllm_kernels.ops import LinearLogits


@pytest.mark.parametrize("loss", [None, dllm_kernels.BlockDiffusionCrossEntropyLoss(), lambda *masks: masks[3]])
def test_labels_that_cannot_be_read_give_a_nan_loss(monkeypatch, loss):
    """Reading labels on a GPU would be a host sync, so the loss shows that they are not packed."""
    monkeypatch.setattr(_plain, "readable_without_sync", lambda t: False)
    labels = torch.tensor([[-100, 3, -100, 7]])
    targets, noise, p, supervised = unpack_labels(labels)
    assert torch.equal(noise, supervised)
    assert p.tolist() == [[0, 1, 0, 1]]
    assert targets.tolist() == [[-100, 2**31 - 1, -100, 2**31 - 1]]
    assert mdlm_loss_func((torch.zeros(1, 4, 13),), labels, loss=loss).isnan()


def test_a_worker_has_the_rank_of_the_process_that_spawned_it(monkeypatch):
    """A worker forked by a process that received the collator has the rank of its own environment."""
    collator = MaskedDiffusionCollator(5)
    collator._parent = 7, 3
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: SimpleNamespace())
    for parent, rank in ((7, 3), (8, 2)):
        monkeypatch.setattr(multiprocessing, "parent_process", lambda pid=parent: SimpleNamespace(pid=pid))
        assert collator._rank() == rank


def test_a_model_without_hidden_states_may_depend_on_every_token():
    ids = {"input_ids": torch.arange(4)[None]}
    assert _attention.dependence(torch.nn.Linear(1, 1), ids, lambda *_: None) == (True, True)


@pytest.mark.parametrize("world", [1, 2])
def test_a_result_of_another_rank_counts(monkeypatch, world):
    def other_rank(flags, op):
        assert (world, op) == (2, dist.ReduceOp.MAX)
        flags.copy_(torch.maximum(flags, torch.tensor([0, 0, 1])))

    for name, value in (("is_initialized", True), ("get_world_size", world)):
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(dist, "all_reduce", other_rank)
    assert _attention.on_any_rank(torch.device("cpu"), True, torch.tensor(False), False) == [True, False, world == 2]


def test_a_test_of_attention_reshards_the_parameters_it_gathered(monkeypatch):
    Sharded = type("Sharded", (torch.nn.Linear,), {"reshard": lambda module: resharded.append(module)})
    resharded, model = [], torch.nn.Sequential(Sharded(2, 2), torch.nn.Linear(2, 2))
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", SimpleNamespace(FSDPModule=Sharded))
    with _attention.unchanged(model, torch.device("cpu")):
        assert not resharded
    assert resharded == [model[0]]


N, D, V = 6, 5, 37
TARGETS = torch.tensor([1, -100, 3, 4, 5, 6])
ON = torch.tensor([True, True, False, False, True, True])
WITHOUT = [1, 2, 3]  # rows without a target, and inactive ones
HARMFUL = torch.tensor([0.5, math.inf, math.nan, -math.inf, 1.0, 2.0])


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_upstream_gradient_stays_out_of_rows_without_a_gradient(trained, entropy, dtype):
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, D, dtype=dtype), torch.randn(V, D, dtype=dtype).requires_grad_(trained)
    found = []
    for upstream in (HARMFUL, HARMFUL.index_fill(0, torch.tensor(WITHOUT), 0.0)):
        leaf = hidden.clone().requires_grad_()
        log_probs, of_rows, _ = _log_probs(LinearLogits(leaf, weight), TARGETS, active=ON, entropy=entropy)
        outputs = [log_probs, *([of_rows] if entropy else [])]
        found.append(torch.autograd.grad(outputs, leaf, [upstream, torch.zeros(N)][: len(outputs)])[0])
    assert torch.equal(*found)
    assert found[0].isfinite().all()
