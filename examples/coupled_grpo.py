"""coupled-GRPO (DiffuCoder, arXiv 2506.20639): clipped ratios and a k3 penalty of tokens that three views score.

The score of a token is half of the sum of two terms. The first is its log-probability with every completion token
masked. The second is its log-probability under the one of two complementary masks that hides it, divided by the
probability of being hidden there. Old, current and reference policy use the same seeds and therefore the same masks.

    python examples/coupled_grpo.py
"""

import copy
import sys

import torch
from torch import nn

from dllm_kernels import PolicyLoss, PolicyObjective, linear_sample, policy_views, token_log_probs

V, MASK, PROMPT, L, GROUP = 12, 11, 2, 10, 32
BEHIND = torch.arange(L) >= PROMPT
LOSS = PolicyLoss(PolicyObjective(clip_low=0.2, clip_high=0.2, kl="k3", kl_coef=0.02))


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
def sample(policy, prompts, seeds):
    """Draw all tokens after the prompt at once."""
    drawn = linear_sample(policy(prompts.masked_fill(BEHIND, MASK)), policy.lm_head.weight, seeds=seeds, skip_id=MASK)
    return torch.where(BEHIND, drawn.ids, prompts)


@torch.no_grad()
def scores(policy, views, completions):
    """Score each token with one matrix product; nothing is saved for backward."""
    ids, options = completions.expand_as(views.noisy), {"active": views.scored, "skip_id": MASK}
    return views.token_scores(
        token_log_probs(policy(views.noisy), ids, weight=policy.lm_head.weight, **options).log_probs
    )


def update(policy, old_policy, reference, completions, rewards, seeds):
    """Compute the loss of one update: the mean over all tokens."""
    views = policy_views(completions, BEHIND.expand_as(completions), MASK, "coupled", seeds=seeds)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    old, ref = scores(old_policy, views, completions), scores(reference, views, completions)
    hidden, head = policy(views.noisy), policy.lm_head.weight
    return LOSS.forward_fused(hidden, head, completions, views, old, advantages, ref, skip_id=MASK)


def main(steps=40):
    """Train with the fraction of even tokens as the reward; return the mean reward of each step."""
    torch.manual_seed(0)
    policy, means = Policy(), []
    reference, optimizer = copy.deepcopy(policy), torch.optim.Adam(policy.parameters(), lr=1e-2)
    for step in range(steps):
        seeds = 2 * GROUP * step + torch.arange(GROUP)
        completions = sample(policy, torch.randint(0, MASK, (GROUP, L)), seeds)
        rewards, old_policy = (completions[:, PROMPT:] % 2 == 0).float().mean(1), copy.deepcopy(policy)
        for again in range(2):  # in the second update, the ratios are no longer 1
            optimizer.zero_grad()
            update(policy, old_policy, reference, completions, rewards, seeds + again * GROUP).loss.backward()
            optimizer.step()
        means.append(rewards.mean().item())
    return means


if __name__ == "__main__":
    print("mean reward of each step:", *(f"{reward:.2f}" for reward in main(*map(int, sys.argv[1:]))))
