"""Policy gradient of a masked diffusion LM over pairs of complementary masks; the score is not that of coupled-GRPO.

Each token after the prompt is masked in one row of its pair. Its ratio uses its log-probability in this row.
coupled-GRPO (DiffuCoder, arXiv 2506.20639) takes one ratio of a sum of two log-probabilities instead: with every token
masked, weighted 1/2, and in the row that masks the token, weighted 1 / (2 t) or 1 / (2 (1 - t)) at level t.

python examples/policy_gradient.py
"""

import copy
import sys

import torch
from torch import nn

from dllm_kernels import complementary, corrupt_uniform, linear_row_objective, sample_level, token_log_probs

V, MASK, PROMPT, L, GROUP = 12, 11, 2, 10, 32
BEHIND = torch.arange(L) >= PROMPT


class Policy(nn.Module):
    """Stand-in for a denoiser; its forward returns hidden states."""

    def __init__(self, width=32):
        super().__init__()
        self.embed, self.place = nn.Embedding(V, width), nn.Parameter(torch.randn(L, width))
        self.mix, self.lm_head = nn.Linear(width, width), nn.Linear(width, V, bias=False)

    def forward(self, ids):  # noqa: D102
        x = self.embed(ids) + self.place
        return x + self.mix(x + x.mean(1, keepdim=True)).tanh()


def grpo(stats, old, ref, advantage, weight, clip=0.2, beta=0.02):
    """Return the clipped-ratio loss and k3 penalty of each token; called with the rows of one chunk at a time."""
    ratio = (stats.log_probs - old).exp()
    k3 = (ref - stats.log_probs).exp() - (ref - stats.log_probs) - 1
    return (beta * k3 - torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)) * weight


def update(policy, old_policy, reference, completions, rewards, seeds):
    """Compute the loss of one update: the mean over completions of the mean over their tokens."""
    supervised, level = BEHIND.expand_as(completions), sample_level(GROUP, low=0.2, high=0.8, seeds=seeds)
    noisy, mask, _ = corrupt_uniform(completions, supervised, MASK, level=level, seeds=seeds)
    other = complementary(mask, supervised)
    noisy = torch.cat([noisy, torch.where(other, MASK, completions)])  # both masked copies form one batch
    ids, options = torch.cat([completions, completions]), {"active": torch.cat([mask, other]), "skip_id": MASK}
    with torch.no_grad():  # one matrix product each, nothing saved for backward
        old = token_log_probs(old_policy(noisy), ids, weight=old_policy.lm_head.weight, **options).log_probs
        ref = token_log_probs(reference(noisy), ids, weight=reference.lm_head.weight, **options).log_probs
    advantage = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).repeat(2)[:, None].expand_as(old)
    aux = (old, ref, advantage, torch.full_like(old, 1 / (GROUP * (L - PROMPT))))
    return linear_row_objective(policy(noisy), policy.lm_head.weight, ids, grpo, *aux, **options).loss


def main(steps=40):
    """Train on the fraction of even tokens as the reward; return the mean reward of each step."""
    torch.manual_seed(0)
    policy, means = Policy(), []
    reference, optimizer = copy.deepcopy(policy), torch.optim.Adam(policy.parameters(), lr=1e-2)
    for step in range(steps):
        completions = torch.randint(0, MASK, (GROUP, L))
        with torch.no_grad():  # sample all tokens after the prompt at once
            p = policy.lm_head(policy(completions.masked_fill(BEHIND, MASK)))[..., :MASK].softmax(-1)
        completions[:, PROMPT:] = torch.multinomial(p.flatten(0, 1), 1).view(GROUP, L)[:, PROMPT:]
        rewards = (completions[:, PROMPT:] % 2 == 0).float().mean(1)
        old_policy = copy.deepcopy(policy)
        for again in range(2):  # in the second update, the ratios are no longer 1
            seeds = (2 * step + again) * GROUP + torch.arange(GROUP)
            optimizer.zero_grad()
            update(policy, old_policy, reference, completions, rewards, seeds).backward()
            optimizer.step()
        means.append(rewards.mean().item())
    return means


if __name__ == "__main__":
    print("mean reward of each step:", *(f"{reward:.2f}" for reward in main(*map(int, sys.argv[1:]))))
