"""Distributions of drawn tokens and positions, by chi-square against probabilities computed from logits."""

import itertools

import pytest
import torch
from torch import nn

import reference
from dllm_kernels import diffusion_generate
from tests.conftest import DEVICE
from tests.ops.test_linear_sample import critical

P, D = 2, 16
SMALL, LARGE = (40, 4_000), (1_000, 100_000)  # vocabulary, and rows
pytestmark = pytest.mark.many_draws


class Fixed(nn.Module):
    """Logits that depend on the column and, with guidance, on whether the prompt is there, but on no decoded token."""

    def __init__(self, V, columns):
        super().__init__()
        torch.manual_seed(V)
        self.places, self.prompt = torch.randn(columns, D, device=DEVICE), torch.randn(D, device=DEVICE)
        self.lm_head = nn.Linear(D, V, device=DEVICE)
        self.mask = V - 1

    def forward(self, ids):
        there = (ids[:, :1] != self.mask).float()
        return self.lm_head(self.places.expand(len(ids), -1, -1) + (there * self.prompt)[:, None])

    @torch.no_grad()
    def logits(self, there=True):
        hidden = (self.places + there * self.prompt)[P:].double()
        return nn.functional.linear(hidden, self.lm_head.weight.double(), self.lm_head.bias.double())


def generate(model, B, N, **options):
    prompts = torch.zeros(B, P, dtype=torch.int64, device=DEVICE)
    seeds = torch.arange(B, device=DEVICE) + 5
    return diffusion_generate(model, prompts, mask_token_id=model.mask, max_new_tokens=N, seeds=seeds, **options)


def assert_as_likely(counts, p):
    """Chi-square of ``counts`` under probabilities; those of fewer than five expected draws are counted together."""
    expected = counts.sum() * p
    assert not counts[p == 0].any()
    enough = expected >= 5
    counts, expected = (torch.cat([t[enough], t[~enough].sum()[None]]) for t in (counts.double(), expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert len(counts) > 2
    assert float(((counts - expected) ** 2 / expected).sum()) < critical(len(counts) - 1)


ALL = {"cfg_scale": 0.5, "suppress_ids": 7, "top_p": 0.9}


@pytest.mark.parametrize(
    ("V", "B", "options"),
    [(*SMALL, {"suppress_ids": range(3, 20)}), (*SMALL, ALL), pytest.param(*LARGE, ALL, marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_tokens(V, B, options):
    model, T, w = Fixed(V, P + 1), 0.8, options.get("cfg_scale", 0.0)
    z = (1 + w) * model.logits() - w * model.logits(there=False)
    z[:, [model.mask, *torch.tensor(options.get("suppress_ids", [])).view(-1).tolist()]] = -torch.inf
    log_p = reference.truncated(z / T, top_p=options.get("top_p")).log_softmax(-1)[0]
    out = generate(model, B, 1, steps=1, temperature=T, **options)
    assert_as_likely(torch.bincount(out.ids[:, P], minlength=V), log_p.exp())
    torch.testing.assert_close(out.log_probs[:, P], log_p[out.ids[:, P]].float(), rtol=1e-4, atol=1e-4)


SMALL_CASES = [(*SMALL, "confidence", 1), (*SMALL, "margin", 2), (*SMALL, "entropy", 1)]
T_OF = {"confidence": 0.1, "margin": 0.1, "entropy": 0.5}
LARGE_CASES = [
    pytest.param(*LARGE, name, per_step, marks=pytest.mark.every_case) for name in T_OF for per_step in (1, 2)
]
LARGE_CASES[0] = pytest.param(*LARGE, "confidence", 1, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(("V", "B", "remasking", "per_step"), [*SMALL_CASES, *LARGE_CASES])
def test_positions(V, B, remasking, per_step):
    """Positions are drawn without replacement, within a step and over steps."""
    N, t = 4, T_OF[remasking]
    model = Fixed(V, P + N)
    log_p = model.logits().index_fill(-1, torch.tensor(model.mask, device=DEVICE), -torch.inf).log_softmax(-1)
    p, two = log_p.exp(), log_p.exp().topk(2).values
    score = {
        "confidence": two[:, 0], "margin": two[:, 0] - two[:, 1],
        "entropy": torch.where(p == 0, 0.0, p * log_p).sum(-1),
    }[remasking]  # fmt: skip
    weight = torch.softmax(score / t, 0).tolist()
    out = generate(model, B, N, steps=N // per_step, remasking=remasking, position_temperature=t)
    assert torch.equal(out.ids[:, P:], p.argmax(-1).expand(B, -1))
    # The steps of all positions as one number. Its probability is the sum over the orders that give these steps.
    digits = (N // per_step) ** torch.arange(N, device=DEVICE)
    expected = torch.zeros((N // per_step) ** N, dtype=torch.float64, device=DEVICE)
    for order in itertools.permutations(range(N)):
        chance, left = 1.0, 1.0
        for i in order:
            chance, left = chance * weight[i] / left, left - weight[i]
        expected[sum(int(digits[i]) * (place // per_step) for place, i in enumerate(order))] += chance
    torch.testing.assert_close(float(expected.sum()), 1.0)
    found = (out.step_map[:, P:] * digits).sum(1)
    assert_as_likely(torch.bincount(found, minlength=len(expected)), expected)
