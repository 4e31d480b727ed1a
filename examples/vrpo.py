"""VRPO (LLaDA 1.5, arXiv 2505.19223): DPO on differences of ELBOs, with the same masks for policy and reference.

An estimate of an ELBO is random, and its noise enters the loss. Policy and reference therefore use the same views (the
paper's antithetic sampling). Every view has a separate level, which is the paper's optimal use of a budget of views.

    python examples/vrpo.py
"""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn

from dllm_kernels import linear_sample, policy_views, token_log_probs

V, MASK, PROMPT, L, PAIRS, VIEWS, BETA = 12, 11, 2, 10, 32, 8, 0.2
BEHIND = torch.arange(L) >= PROMPT


class Policy(nn.Module):
    """Stand-in for a denoiser; its forward returns hidden states."""

    def __init__(self, width=32):
        super().__init__()
        self.embed, self.place = nn.Embedding(V, width), nn.Parameter(torch.randn(L, width))
        self.mix, self.lm_head = nn.Linear(width, width), nn.Linear(width, V, bias=False)

    def forward(self, ids):  # noqa: D102
        x = self.embed(ids) + self.place
        return x + self.mix(x + x.mean(-2, keepdim=True)).tanh()


def elbo(policy, views, ids):
    """Estimate the ELBO of each completion."""
    options = {"weight": policy.lm_head.weight, "active": views.scored, "skip_id": MASK}
    return views.sequence_scores(token_log_probs(policy(views.noisy), ids.expand_as(views.noisy), **options).log_probs)


def preference_loss(policy, reference, chosen, rejected, seeds):
    """Compute the DPO loss of pairs ``[B, L]``; the two completions of a pair also have the same seed."""
    ids, seeds = torch.cat([chosen, rejected]), torch.cat([seeds, seeds])
    views = policy_views(ids, BEHIND.expand_as(ids), MASK, "elbo", num=VIEWS, seeds=seeds)
    with torch.no_grad():
        ref = elbo(reference, views, ids)
    better, worse = (elbo(policy, views, ids) - ref).chunk(2)
    return -F.logsigmoid(BETA * (better - worse)).mean()


def main(steps=40):
    """Train to prefer completions with more even tokens; return the mean fraction of even tokens in samples."""
    torch.manual_seed(0)
    policy, means = Policy(), []
    reference, optimizer = copy.deepcopy(policy), torch.optim.Adam(policy.parameters(), lr=1e-2)
    for step in range(steps):
        seeds = 2 * PAIRS * step + torch.arange(2 * PAIRS)
        prompts = torch.randint(0, MASK, (PAIRS, L)).repeat(2, 1)
        hidden = policy(prompts.masked_fill(BEHIND, MASK))
        ids = torch.where(BEHIND, linear_sample(hidden, policy.lm_head.weight, seeds=seeds, skip_id=MASK).ids, prompts)
        rewards = (ids[:, PROMPT:] % 2 == 0).float().mean(1)
        (one, other), (of_one, of_other) = ids.chunk(2), rewards.chunk(2)
        first = (of_one >= of_other)[:, None]
        chosen, rejected = torch.where(first, one, other), torch.where(first, other, one)
        optimizer.zero_grad()
        preference_loss(policy, reference, chosen, rejected, seeds[:PAIRS]).backward()
        optimizer.step()
        means.append(rewards.mean().item())
    return means


if __name__ == "__main__":
    print("mean reward of each step:", *(f"{reward:.2f}" for reward in main(*map(int, sys.argv[1:]))))
