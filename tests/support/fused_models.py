"""A small model, and one whose head PEFT has adapted, for the tests of ``fused_head``."""

import pytest
import torch
from torch import nn

from tests.conftest import DEVICE

B, L, D, V = 2, 6, 8, 23


class Model(nn.Module):
    """``size``: factor of the hidden states; ``after``: function of the logits."""

    def __init__(self, *, bias=False, size=1.0, after=None):
        super().__init__()
        self.body, self.layer, self.lm_head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V, bias=bias)
        self.size, self.after = size, after
        self.to(DEVICE)

    def forward(self, ids):
        z = self.lm_head(self.size * torch.tanh(self.layer(self.body(ids))))
        return z if self.after is None else self.after(z)


class Adapted(nn.Module):
    """``off(ids)``: the logits without the adapter."""

    def __init__(self, *, bias=False, size=1.0, **options):
        super().__init__()
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=3, target_modules=["lm_head"], init_lora_weights=False, **options)
        self.peft = peft.get_peft_model(Model(bias=bias, size=size), config)
        self.lm_head = self.peft.base_model.model.lm_head
        self.to(DEVICE)

    def forward(self, ids):
        return self.peft(ids)

    def off(self, ids):
        with self.peft.disable_adapter():
            return self.peft(ids)


def frozen(**options):
    """Return a model whose head does not train."""
    model = Model(**options)
    model.lm_head.requires_grad_(False)
    return model
