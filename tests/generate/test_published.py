"""The tokens of published samplers, written as there, over logits of all tokens: LLaDA, Dream and Fast-dLLM."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.conftest import DEVICE
from tests.generate.test_generate import MASK, D, N, V, generate

B = 5


class Placed(nn.Module):
    """A model of each token, its column, and the mean of all tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.embedding, self.lm_head, self.seen = nn.Embedding(V, D), nn.Linear(D, V), []
        self.places = nn.Parameter(torch.randn(16, D))

    def forward(self, ids):
        self.seen.append(ids)
        x = self.embedding(ids) + self.places[: ids.shape[1]]
        return self.lm_head(torch.tanh(x + 2 * x.mean(1, keepdim=True)))


@pytest.fixture(scope="module")
def model():
    return Placed().to(DEVICE, torch.float64)


def prompts(holes=False):
    torch.manual_seed(2)
    ids = torch.randint(0, MASK, (B, 4), device=DEVICE)
    return ids.masked_fill(torch.arange(4, device=DEVICE) % 2 == 1, MASK) if holes else ids


@torch.no_grad()
def llada(model, prompt, steps, block_length, cfg_scale=0.0, eos=()):
    """``generate`` of LLaDA, low-confidence remasking at temperature 0; ``eos``: their confidence is 0."""
    x = F.pad(prompt, (0, N), value=MASK)
    prompt_index = x != MASK
    for num_block in range(N // block_length):
        block_end = prompt.shape[1] + (num_block + 1) * block_length
        block_steps = steps // (N // block_length)
        for i in range(block_steps):
            mask_index = x == MASK
            un_x = x.clone()
            un_x[prompt_index] = MASK
            logits, un_logits = torch.chunk(model(torch.cat([x, un_x], dim=0)), 2, dim=0)
            logits = un_logits + (cfg_scale + 1) * (logits - un_logits)
            logits[:, :, MASK] = -torch.inf  # ours never predicts MASK
            x0 = logits.argmax(-1)
            x0_p = F.softmax(logits, dim=-1).gather(-1, x0[..., None])[..., 0]
            for token in eos:
                x0_p[x0 == token] = 0
            x0_p[:, block_end:] = -torch.inf
            x0 = torch.where(mask_index, x0, x)
            confidence = torch.where(mask_index, x0_p, -torch.inf)
            k = block_length // block_steps + (i < block_length % block_steps)
            for j in range(len(x)):
                select_index = confidence[j].sort(descending=True, stable=True).indices[:k]
                x[j, select_index] = x0[j, select_index]
    return x


@torch.no_grad()
def dream(model, prompt, steps, alg):
    """``_sample`` of Dream at temperature 0 without ``alg_temp``; holes of the prompt are decoded, too."""
    x = F.pad(prompt, (0, N), value=MASK)
    for i in range(steps):
        mask_index = x == MASK
        logits = model(x)[mask_index]
        logits[:, MASK] = -torch.inf
        probs = torch.softmax(logits, dim=-1)
        confidence, x0 = probs.max(dim=-1)
        if alg == "margin":
            sorted_probs, _ = torch.sort(probs, dim=-1, descending=True)
            confidence = sorted_probs[:, 0] - sorted_probs[:, 1]
        if alg == "entropy":
            confidence = torch.sum(probs * torch.log(probs + 1e-300), dim=-1)
        full_confidence = torch.full_like(x, -torch.inf, dtype=logits.dtype)
        full_confidence[mask_index] = confidence
        x_ = torch.zeros_like(x) + MASK
        x_[mask_index] = x0.clone()
        number_transfer_tokens = -(-int(mask_index[0].sum()) // (steps - i))
        _, transfer_index = torch.topk(full_confidence, number_transfer_tokens)
        row_indices = torch.arange(len(x), device=x.device)[:, None]
        x[row_indices, transfer_index] = x_[row_indices, transfer_index]
    return x


@torch.no_grad()
def fast_dllm(model, prompt, block_length, threshold):
    """``generate`` of Fast-dLLM with a threshold, at temperature 0, without a cache; return also the model calls."""
    x, nfe = F.pad(prompt, (0, N), value=MASK), 0
    for num_block in range(N // block_length):
        block_end = prompt.shape[1] + (num_block + 1) * block_length
        while (x[:, :block_end] == MASK).any():
            nfe += 1
            mask_index = x == MASK
            mask_index[:, block_end:] = 0
            logits = model(x)
            logits[:, :, MASK] = -torch.inf
            x0 = logits.argmax(-1)
            x0_p = F.softmax(logits, dim=-1).gather(-1, x0[..., None])[..., 0]
            confidence = torch.where(mask_index, x0_p, -torch.inf)
            transfer_index = torch.zeros_like(x0, dtype=torch.bool)
            num_transfer_tokens = mask_index.sum(dim=1)
            for j in range(len(x)):
                select_index = torch.topk(confidence[j], k=int(num_transfer_tokens[j])).indices
                transfer_index[j, select_index] = True
                for k in range(1, int(num_transfer_tokens[j])):
                    if confidence[j, select_index[k]] < threshold:
                        transfer_index[j, select_index[k]] = False
            x[transfer_index] = x0[transfer_index]
    return x, nfe


@pytest.mark.parametrize(("steps", "block_size"), [(6, 3), (4, 6), (3, 2)])
@pytest.mark.parametrize("options", [{}, {"cfg_scale": 1.5}, {"cfg_scale": 0.5, "eos": range(6, 14)}], ids=str)
def test_llada(model, steps, block_size, options):
    eos = list(options.get("eos", ()))
    ours = {"cfg_scale": options.get("cfg_scale", 0.0)} | ({"eos_token_id": eos, "delay_eos": True} if eos else {})
    out = generate(model, prompts(), steps=steps, block_size=block_size, **ours)
    expected = llada(model, prompts(), steps, block_size, **options)
    kept = out.generated if eos else torch.ones_like(out.generated)
    assert torch.equal(out.ids.where(kept, -1), expected.where(kept, -1))


@pytest.mark.parametrize("alg", ["confidence", "margin", "entropy"])
@pytest.mark.parametrize("holes", [False, True])
def test_dream(model, alg, holes):
    expected = dream(model, prompts(holes), N - 1, alg)
    assert torch.equal(generate(model, prompts(holes), steps=N - 1, remasking=alg, infill=holes).ids, expected)


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.2, 1.0])
@pytest.mark.parametrize("holes", [False, True])
def test_fast_dllm(model, threshold, holes):
    expected, calls = fast_dllm(model, prompts(holes), 3, threshold)
    model.seen.clear()
    options = {"block_size": 3, "steps": None, "infill": holes}
    assert torch.equal(generate(model, prompts(holes), threshold=threshold, **options).ids, expected)
    assert len(model.seen) == calls
    bounded = generate(model, prompts(holes), threshold=threshold, **options | {"steps": 4})
    assert int(bounded.step_map.max()) < 4
    assert bounded.generated[:, 4:].all()
