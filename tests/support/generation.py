"""Generation of small batches, and the oracle's tokens of each row, for the tests of ``diffusion_generate``."""

import numpy as np
import pytest
import torch
from torch import nn

import reference
from dllm_kernels import diffusion_generate
from tests.conftest import DEVICE
from tests.support.uniforms import uniforms

D, V, MASK, N = 8, 21, 20, 6
PROMPTS = ([1, 2, 3], [4], [5, 6])
SEEDS = torch.tensor([3, -7, 2**61], device=DEVICE)


class Encoder(nn.Module):
    """A model of each token, its position from the end, and the mean of all tokens that are not padding."""

    def __init__(self, shift=0, width=D, vocabulary=V):
        super().__init__()
        self.embedding, self.lm_head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.places, self.shift = nn.Parameter(torch.randn(N, width)), shift
        self.seen = []

    def forward(self, ids, attention_mask=None):
        self.seen.append((ids.clone(), attention_mask))
        return self.lm_head(self.body(ids, attention_mask))

    def body(self, ids, attention_mask=None):
        x = self.embedding(ids)
        x = torch.cat([x[:, :-N], x[:, -N:] + self.places], 1)
        on = torch.ones_like(ids) if attention_mask is None else attention_mask
        mean = (x * (on[..., None] != 0)).sum(1, keepdim=True) / on.sum(1)[:, None, None]
        return torch.tanh(x + 2 * mean).roll(-self.shift, 1)


def model_of(seed=0, **sizes):
    torch.manual_seed(seed)
    return Encoder(**sizes).to(DEVICE, torch.float64)


def padded(prompts=PROMPTS, before=0):
    """Return left-padded prompts with their mask."""
    P = before + max(map(len, prompts))
    ids = [[0] * (P - len(p)) + p for p in prompts]
    on = [[0] * (P - len(p)) + [1] * len(p) for p in prompts]
    return [torch.tensor(t, dtype=torch.int64, device=DEVICE).view(len(prompts), P) for t in (ids, on)]


def generate(model, ids, on=None, **options):
    options = {"mask_token_id": MASK, "max_new_tokens": N, "steps": 4, "attention_mask": on, **options}
    return diffusion_generate(model, ids, **options)


def children(seed, count):
    """Return the child seeds of a seed, words of NumPy's stream under the key (seed, 1)."""
    return np.random.Philox(key=seed % 2**64 + (1 << 64)).random_raw(count).view(np.int64)


def draws_of_positions(seed):
    return np.random.Philox(key=seed % 2**64, counter=2**32 - 1).random_raw(8).view("<u4").astype(np.float64)


def noise_of(seed, most):
    """Return the oracle's uniforms and the scores of random remasking, of one row.

    A block of more than ``most`` columns begins in the prompt. Each of its tokens has a seed.
    """
    order, *of_steps = children(seed, 1 + 16).tolist()

    def uniform(step, width):
        if width > most:
            return uniforms(torch.from_numpy(children(of_steps[step], width)), torch.zeros(width, dtype=torch.int64), V)
        return uniforms(torch.full((width,), of_steps[step]), torch.arange(width), V)

    def place_uniform(step, width):
        return torch.from_numpy((draws_of_positions(of_steps[step])[:width] + 0.5) * 2.0**-32)

    order = torch.from_numpy(draws_of_positions(order))
    return {"uniform": uniform, "place_uniform": place_uniform, "order": order}


def expected(model, prompt, seed, **options):
    options = {"mask_token_id": MASK, "max_new_tokens": N, "steps": 4, **options}
    return reference.diffusion_generate(
        lambda ids: model(ids[None].to(DEVICE))[0].cpu(), torch.tensor(prompt, dtype=torch.int64), **options,
        **noise_of(seed, options.get("block_size") or N),
    )  # fmt: skip


TRUNCATIONS = ({}, {"top_k": 4}, {"top_p": 0.83, "min_p": 0.03})
PLANS = (
    {"steps": 6}, {"steps": 4}, {"steps": 4, "block_size": 3}, {"steps": 3, "block_size": 4}, {"steps": 1},
    {"steps": 6, "block_size": 4},
)  # fmt: skip
CHOICES = (
    *({"remasking": name} for name in ("confidence", "random", "margin", "entropy")),
    *({"remasking": name, "position_temperature": 0.2} for name in ("confidence", "margin", "entropy")),
    {"threshold": 0.2}, {"threshold": 0.1, "remasking": "margin"},
)  # fmt: skip
EOS = tuple(range(5, 13))  # of many tokens, so that most rows predict some in most steps


def assert_rows_as_expected(out, model, prompts, **options):
    """Compare each row of a batch with left padding with the oracle's row alone."""
    P, first_new = out.ids.shape[1] - options.get("max_new_tokens", N), not options.get("infill", False)
    for row, (prompt, seed) in enumerate(zip(prompts, SEEDS.tolist(), strict=False)):
        tokens, log_probs, steps = expected(model, prompt, seed, **options)
        before = P if first_new else P - len(prompt)
        assert out.ids[row, before:].tolist() == tokens
        assert out.step_map[row].tolist() == [-1] * before + steps
        exact = torch.tensor([0.0] * before + log_probs, dtype=torch.float64, device=DEVICE)
        torch.testing.assert_close(out.log_probs[row], exact)
        assert torch.equal(out.generated[row], out.step_map[row] >= 0)


class _Around(nn.Module):
    """A model around another, as PEFT takes it."""

    def __init__(self, model):
        super().__init__()
        self.config, self.model = {"model_type": "custom"}, model


OF_PEFT = {
    "LoRA": {"target_modules": ["lm_head"]},
    "trained copy": {"target_modules": ["embedding"], "modules_to_save": ["lm_head"]},
    "trained rows": {"target_modules": ["embedding"], "trainable_token_indices": {"lm_head": [5, MASK]}},
}


def adapt(model, head):
    """Let PEFT train the head of a model in one of the ways of ``OF_PEFT``."""
    peft = pytest.importorskip("peft")
    peft.get_peft_model(_Around(model), peft.LoraConfig(r=2, init_lora_weights=False, **OF_PEFT[head]))
    for name, p in model.named_parameters():
        if "delta" in name or "modules_to_save" in name:
            nn.init.normal_(p)
