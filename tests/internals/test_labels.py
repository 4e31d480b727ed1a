"""Labels of the Hugging Face collator on a GPU, where a check of their values would be a host sync."""

import pytest
import torch

import dllm_kernels
from dllm_kernels._graph import _plain
from dllm_kernels.integrations.transformers import mdlm_loss_func, unpack_labels


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
