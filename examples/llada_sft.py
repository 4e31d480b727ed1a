"""Supervised fine-tuning as in LLaDA: chat data, prompts that are never masked, supervised EOS padding.

python examples/llada_sft.py

The loss follows the LLaDA guidelines. For each answer, nll / p is summed over the masked tokens and divided by the
length of the answer with its EOS padding. The loss is the batch mean. No download: chats are sums, tokens are bytes.
"""

import random
import sys

import torch
from torch import nn

from dllm_kernels import DLLMCollator, corrupt_uniform
from dllm_kernels.ops import weighted_linear_nll

EOS, USER, ASSISTANT, MASK, VOCABULARY = 256, 257, 258, 259, 260


class Denoiser(nn.Module):
    """Small bidirectional transformer whose forward returns hidden states."""

    def __init__(self, width=64, length=64):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids):  # noqa: D102
        return self.layers(self.tokens(ids) + self.places.weight[: ids.shape[1]])


def chat(source):
    """Build a sample: user turn and role tokens are the prompt, assistant turn and EOS the answer."""
    a, b = source.randrange(10), source.randrange(10)
    prompt = [USER, *f"{a}+{b}=".encode(), ASSISTANT]
    answer = [*f"{a + b}".encode(), EOS]
    ids, mask = prompt + answer, [0] * len(prompt) + [1] * len(answer)
    return {"input_ids": ids, "loss_mask": mask, "attention_mask": [1] * len(ids)}


def loss_of(model, batch, seeds):
    """Compute the loss of the guidelines; a new normalisation only needs row weights."""
    ids, loss_mask = batch["input_ids"], batch["loss_mask"]
    noisy, noise_mask, p_mask = corrupt_uniform(ids, loss_mask, MASK, eps=1e-3, seeds=seeds)
    answer_lengths = loss_mask.sum(1, keepdim=True)
    weights = noise_mask / p_mask / answer_lengths / len(ids)
    return weighted_linear_nll(model(noisy), model.lm_head.weight, ids, weights).loss


def main(steps=300):
    """Train and return the loss on held-out chats before and after training."""
    torch.manual_seed(0)
    model, source = Denoiser(), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    collate = DLLMCollator(pad_token_id=EOS, pad_seq_len_divisible=4, supervise_padding=True)
    held_out = collate([chat(source) for _ in range(256)])

    def evaluate():
        with torch.no_grad():
            return loss_of(model, held_out, torch.arange(256)).item()

    before = evaluate()
    for step in range(steps):
        batch = collate([chat(source) for _ in range(32)])
        loss = loss_of(model, batch, seeds=1000 + 32 * step + torch.arange(32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = evaluate()
    print(f"held out: {before:.3f} before, {after:.3f} after {steps} steps")
    return before, after


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
