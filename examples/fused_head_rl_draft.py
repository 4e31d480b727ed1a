"""A GRPO step and the loss of a DFlash draft from logits, unchanged, without the logits.

python examples/fused_head_rl_draft.py
"""

import torch
import torch.nn.functional as F
from torch import nn

from dllm_kernels import fused_head

VOCABULARY, BLOCK = 64, 4


class Model(nn.Module):
    """Smallest model with an LM head."""

    def __init__(self, width=32):
        super().__init__()
        self.tokens, self.lm_head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids):  # noqa: D102
        return self.lm_head(torch.tanh(self.tokens(ids)))


def selective_log_softmax(logits, index):
    """Log-probabilities of the chosen tokens, as GRPO trainers compute them."""
    selected = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    return selected - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


def grpo(model, ids, completion_mask, old, advantages, temperature=0.9):
    """Clipped policy gradient."""
    logits = model(ids)[:, :-1] / temperature
    ratio = torch.exp(selective_log_softmax(logits, ids[:, 1:]) - old)
    clipped = ratio.clamp(0.8, 1.2)
    token_loss = -torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
    return (token_loss * completion_mask).sum() / completion_mask.sum()


def dflash(draft, noise_ids, target_ids, block_mask, gamma=7.0):
    """Cross-entropy of drafted blocks ``[B, blocks, k, V]`` with a decay within each block."""
    B, blocks, k = target_ids.shape
    logits = draft(noise_ids).view(B, blocks, k + 1, VOCABULARY)[:, :, 1:]  # without the anchor of each block
    decay = torch.exp(-torch.arange(k) / gamma)
    token_loss = F.cross_entropy(logits.flatten(0, 2), target_ids.flatten(), reduction="none").view_as(target_ids)
    weights = block_mask * decay
    accuracy = (logits.argmax(-1) == target_ids).float().mean()
    return (token_loss * weights).sum() / weights.sum(), accuracy


def main(steps=10):
    """Train both and return the first and last losses."""
    torch.manual_seed(0)
    policy, draft = Model(), Model()
    ids, mask = torch.randint(0, VOCABULARY, (4, 17)), (torch.rand(4, 16) < 0.7).float()
    blocks, valid = torch.randint(0, VOCABULARY, (2, 4, BLOCK - 1)), torch.ones(2, 4, BLOCK - 1)
    noise, advantages = torch.randint(0, VOCABULARY, (2, 4 * BLOCK)), torch.randn(4)
    optimizer = torch.optim.AdamW([*policy.parameters(), *draft.parameters()], lr=1e-2)
    losses = []
    with fused_head(policy, on_logits="raise"), fused_head(draft, on_logits="raise"):
        with torch.no_grad():
            old = selective_log_softmax(policy(ids)[:, :-1] / 0.9, ids[:, 1:])
        for _ in range(steps):
            draft_loss, _ = dflash(draft, noise, blocks, valid)
            loss = grpo(policy, ids, mask, old, advantages)
            optimizer.zero_grad()
            (loss + draft_loss).backward()
            optimizer.step()
            losses.append((loss.item(), draft_loss.item()))
    print(f"policy, draft: {losses[0]} before, {losses[-1]} after {steps} steps")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
