"""speculators' DFlash model and training step with this package's losses, after one line: ``patch()``.

The model computes the logits of draft and verifier and calls the loss that its configuration names.
``from_hidden_states`` replaces both LM heads by identities, so that the backbone returns hidden states, not logits.

pip install speculators==0.9.0; python examples/speculators_patch.py
"""

import sys

import torch
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from transformers import Qwen3Config

from dllm_kernels.integrations import speculators

V, D, LENGTH, BLOCK, ANCHORS = 64, 32, 48, 4, 8


def make_draft():
    """Build a one-layer draft with the embedding and heads of the verifier, which training freezes."""
    layer = Qwen3Config(
        vocab_size=V, hidden_size=D, intermediate_size=2 * D, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=D // 2, attn_implementation="eager",
    )  # fmt: skip
    options = {"block_size": BLOCK, "aux_hidden_state_layer_ids": [0], "mask_token_id": V - 1}
    model = DFlashDraftModel(DFlashSpeculatorConfig(transformer_layer_config=layer, draft_vocab_size=V, **options))
    embedding = torch.randn(V, D)
    for frozen in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
        frozen.weight.data.copy_(embedding)
    return model


def make_batch(model):
    """Build counting tokens, and hidden states of a verifier that predicts the next token."""
    tokens = (torch.randint(0, V, (1, 1)) + torch.arange(LENGTH)) % (V - 1)
    known, expected = (model.embed_tokens(t).detach() for t in (tokens, (tokens + 1) % (V - 1)))
    names = "input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask", "document_ids"
    return dict(
        zip(names, (tokens, known, expected, torch.ones(1, LENGTH), torch.zeros(1, LENGTH).long()), strict=True)
    )


def from_logits(model, batch, **options):
    """Return loss and metrics of the step of speculators."""
    return model(**batch, max_anchors=ANCHORS, **options)[1:]


def from_hidden_states(model, batch, **options):
    """Return loss and metrics of the same step, without materialising the full logits."""
    heads = model.lm_head, model.verifier_lm_head
    model.lm_head = model.verifier_lm_head = torch.nn.Identity()
    try:
        hidden, _, teacher, mask, _ = model._backbone_forward(**batch, max_anchors=ANCHORS)
    finally:
        model.lm_head, model.verifier_lm_head = heads
    return speculators.speculators_metrics(hidden, heads[0].weight, teacher, mask, BLOCK, **options)


def main(steps=60, loss="kl_div", implementation="fused", step=from_logits):
    """Train and return the loss of every step."""
    torch.manual_seed(0)
    model = make_draft()
    config = {"loss_config": resolve_loss_config(loss, implementation)}  # call patch() first: "fused" needs it on a CPU
    optimizer, losses = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3), []
    for _ in range(steps):
        value, _ = step(model, make_batch(model), **config)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


if __name__ == "__main__":
    print(speculators.patch())
    losses = main(*map(int, sys.argv[1:]))
    print(f"loss: {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last")
