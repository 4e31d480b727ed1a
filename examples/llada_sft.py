"""Supervised fine-tuning as LLaDA does it: chat data, prompts that are never masked, EOS as padding that is learnt.

python examples/llada_sft.py

The loss is that of the LLaDA guidelines: for each answer the sum of nll / p over its masked tokens, divided by its length
(its EOS padding included), then the mean over the batch. No download: the chats are small sums, the tokens are bytes.
"""

import random
import sys

import torch
from torch import nn

from dllm_kernels import DLLMCollator, corrupt_uniform
from dllm_kernels.ops import weighted_linear_nll

EOS, USER, ASSISTANT, MASK, VOCABULARY = 256, 257, 258, 259, 260


class Denoiser(nn.Module):
    """A small bidirectional transformer; its forward gives hidden states."""

    def __init__(self, width=64, length=64):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids):  # noqa: D102
        return self.layers(self.tokens(ids) + self.places.weight[: ids.shape[1]])


def chat(source):
    """One sample: the user's turn and the role tokens are the prompt, the assistant's turn and its EOS the answer."""
    a, b = source.randrange(10), source.randrange(10)
    prompt = [USER, *f"{a}+{b}=".encode(), ASSISTANT]
    answer = [*f"{a + b}".encode(), EOS]
    ids, mask = prompt + answer, [0] * len(prompt) + [1] * len(answer)
    return {"input_ids": ids, "loss_mask": mask, "attention_mask": [1] * len(ids)}


def loss_of(model, batch, seeds):
    """The guidelines' loss; the row weights are all that a new normalisation takes."""
    ids, loss_mask = batch["input_ids"], batch["loss_mask"]
    noisy, noise_mask, p_mask = corrupt_uniform(ids, loss_mask, MASK, eps=1e-3, seeds=seeds)
    answer_lengths = loss_mask.sum(1, keepdim=True)
    weights = noise_mask / p_mask / answer_lengths / len(ids)
    return weighted_linear_nll(model(noisy), model.lm_head.weight, ids, weights).loss


def main(steps=300):
    """Train; returns the loss on held-out chats before and after."""
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
