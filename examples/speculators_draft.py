"""speculators' loss and metrics for a block drafter, from hidden states; the full logits are never materialised.

``speculators_metrics`` replaces ``compute_metrics`` in the drafter's forward, where ``core.py`` computes the logits of
draft and verifier. In this example, a small drafter learns the predictions of a verifier on counting sequences.

python examples/speculators_draft.py
"""

import sys

import torch
from torch import nn

from dllm_kernels.integrations.speculators import speculators_metrics

V, D, BLOCK, BLOCKS = 64, 32, 8, 16


class Drafter(nn.Module):
    """Map the anchor of each block and the position in the block to a hidden state."""

    def __init__(self):
        super().__init__()
        self.anchor, self.place = nn.Embedding(V, D), nn.Embedding(BLOCK, D)
        self.layers = nn.Sequential(nn.Linear(2 * D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, anchors):  # noqa: D102
        rows = torch.cat([self.anchor(anchors).repeat_interleave(BLOCK, 0), self.place.weight.repeat(BLOCKS, 1)], 1)
        return self.layers(rows)[None]


def main(steps=300, weighting="fixed-exp-decay"):
    """Train and return the acceptance rate in the first and in the last step."""
    torch.manual_seed(0)
    verifier = torch.randn(V, D)  # the hidden state with which it predicts each token
    head, drafter = 2 * verifier / D**0.5, Drafter()  # the head is frozen and shared by both models
    optimizer, rates = torch.optim.Adam(drafter.parameters(), lr=3e-3), []
    for _ in range(steps):
        anchors = torch.randint(0, V, (BLOCKS,))
        tokens = (anchors[:, None] + torch.arange(BLOCK)) % V  # the first row of a block is the anchor
        teacher_hidden, loss_mask = verifier[tokens].view(1, -1, D), torch.ones(1, BLOCKS * BLOCK)
        loss, metrics = speculators_metrics(
            drafter(anchors), head, teacher_hidden, loss_mask, BLOCK,
            loss_config={"kl_div": 1.0}, per_position_loss_weight=weighting, acceptance=True,
        )  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.append((metrics["accept_rate_sum"] / metrics["accept_rate_total"]).item())
    print(f"acceptance rate: {rates[0]:.2f} in the first step, {rates[-1]:.2f} in the last")
    return rates[0], rates[-1]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
