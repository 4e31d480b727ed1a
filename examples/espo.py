"""ESPO (arXiv 2512.03759): one clipped ratio of each sequence's ELBO, its exact gradient with one view in memory.

A score is a sum over all views, so a plain backward pass needs the activations of all views. Here, a first pass
computes the log-probabilities without a graph, and their derivatives become the weights of each token's NLL. Every view
then runs forward and backward separately. This takes 3 matrix products of the LM head if it is frozen, and 4 if it
trains.

    python examples/espo.py
"""

import copy
import sys

import torch
from torch import nn

from dllm_kernels import PolicyObjective, nll_weights, policy_views
from dllm_kernels.ops import linear_sample, token_log_probs, weighted_linear_nll

V, MASK, PROMPT, L, GROUP, PAIRS = 12, 11, 2, 10, 32, 4
BEHIND = torch.arange(L) >= PROMPT
OBJECTIVE = PolicyObjective(clip_low=0.2, clip_high=0.2, kl="k2", kl_coef=0.02)


class Policy(nn.Module):
    """Stand-in for a denoiser; its forward returns hidden states."""

    def __init__(self, width=32):
        super().__init__()
        self.embed, self.place = nn.Embedding(V, width), nn.Parameter(torch.randn(L, width))
        self.mix, self.lm_head = nn.Linear(width, width), nn.Linear(width, V, bias=False)

    def forward(self, ids):  # noqa: D102
        x = self.embed(ids) + self.place
        return x + self.mix(x + x.mean(-2, keepdim=True)).tanh()


@torch.no_grad()
def log_probs(policy, views, ids):
    """Return the log-probabilities of all views, computed one view at a time."""
    options, rows = {"weight": policy.lm_head.weight, "skip_id": MASK}, zip(views.noisy, views.scored, strict=True)
    return torch.stack([token_log_probs(policy(noisy), ids, active=on, **options).log_probs for noisy, on in rows])


def backward(policy, old_policy, reference, ids, rewards, seeds):
    """Accumulate the gradient of the mean loss over the sequences; return the loss."""
    views = policy_views(ids, BEHIND.expand_as(ids), MASK, "count", num=PAIRS, seeds=seeds)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    old, ref = (views.sequence_scores(log_probs(p, views, ids), mean=True) for p in (old_policy, reference))

    def loss_of(log_probs):
        return OBJECTIVE(views.sequence_scores(log_probs, mean=True), old, advantages, ref).mean()

    now = log_probs(policy, views, ids)
    for noisy, weights in zip(views.noisy, nll_weights(loss_of, now), strict=True):
        weighted_linear_nll(policy(noisy), policy.lm_head.weight, ids, weights, skip_id=MASK).loss.backward()
    return loss_of(now)


def main(steps=40):
    """Train with the fraction of even tokens as the reward; return the mean reward of each step."""
    torch.manual_seed(0)
    policy, means = Policy(), []
    reference, optimizer = copy.deepcopy(policy), torch.optim.Adam(policy.parameters(), lr=1e-2)
    for step in range(steps):
        seeds, prompts = 2 * GROUP * step + torch.arange(GROUP), torch.randint(0, MASK, (GROUP, L))
        hidden, old_policy = policy(prompts.masked_fill(BEHIND, MASK)), copy.deepcopy(policy)
        ids = torch.where(BEHIND, linear_sample(hidden, policy.lm_head.weight, seeds=seeds, skip_id=MASK).ids, prompts)
        rewards = (ids[:, PROMPT:] % 2 == 0).float().mean(1)
        for again in range(2):  # in the second update, the ratios are no longer 1
            optimizer.zero_grad()
            backward(policy, old_policy, reference, ids, rewards, seeds + again * GROUP)
            optimizer.step()
        means.append(rewards.mean().item())
    return means


if __name__ == "__main__":
    print("mean reward of each step:", *(f"{reward:.2f}" for reward in main(*map(int, sys.argv[1:]))))
