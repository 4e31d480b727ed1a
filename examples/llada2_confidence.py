"""LLaDA2's confidence-aware loss: cross-entropy plus the entropy of the tokens that are already predicted correctly.

    loss = sum_i w_i nll_i + lambda sum_{i correct} w_i H_i

The second term sharpens correct predictions, so that more tokens can be decoded in parallel. Both terms come from one
pass. The logits are computed once: two matrix products with a frozen head, three with a trainable head.

python examples/llada2_confidence.py
"""

import sys

import torch
from torch import nn

from dllm_kernels import corrupt_uniform
from dllm_kernels.ops import linear_row_objective

V, MASK, L = 33, 32, 16


def confidence(stats, weights, strength):
    """Return w nll for each row, plus lambda w H if the target is the argmax."""
    return weights * (-stats.log_probs + strength * torch.where(stats.correct, stats.entropy, 0.0))


def loss_of(hidden, head, ids, noise_mask, p_mask, strength=0.5):
    """Sum over the masked tokens with weights 1 / p, divided by the number of tokens."""
    weights = noise_mask / p_mask / ids.numel()
    return linear_row_objective(
        hidden, head, ids, confidence, weights, torch.full_like(weights, strength), active=noise_mask,
        entropy=True, with_correct=True, skip_id=MASK,
    )  # fmt: skip


class Denoiser(nn.Module):
    """Convolutional denoiser over both neighbours; its forward returns hidden states."""

    def __init__(self, width=48):
        super().__init__()
        self.embed = nn.Embedding(V, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(3))
        self.lm_head = nn.Linear(width, V, bias=False)

    def forward(self, ids):  # noqa: D102
        x = self.embed(ids).transpose(1, 2)
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.transpose(1, 2)


def main(steps=150, strength=1.0):
    """Train with and without the second term; return the mean held-out entropy of the correct tokens for both."""
    entropies = []
    for weight in (0.0, strength):
        torch.manual_seed(0)
        model = Denoiser()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for step in range(steps + 1):
            B = 32 if step < steps else 512  # the last batch is only evaluated
            ids = (torch.randint(0, MASK, (B, 1)) + torch.arange(L)) % MASK  # sequences that count up
            seeds = step * 32 + torch.arange(B)
            noisy, noise_mask, p_mask = corrupt_uniform(ids, torch.ones(B, L), MASK, eps=0.1, seeds=seeds)
            out = loss_of(model(noisy), model.lm_head.weight, ids, noise_mask, p_mask, weight)
            if step < steps:
                optimizer.zero_grad()
                out.loss.backward()
                optimizer.step()
        entropy, correct = out.entropy[out.correct].mean().item(), (out.correct.sum() / noise_mask.sum()).item()
        entropies.append(entropy)
        print(f"lambda {weight}: entropy of correct tokens {entropy:.3f}, correct {correct:.0%}")
    return entropies


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
