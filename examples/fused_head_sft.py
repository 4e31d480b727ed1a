"""Loops of LLaDA, dllm, Dream and block diffusion, unchanged, without the logits: python examples/fused_head_sft.py."""

import torch
import torch.nn.functional as F
from torch import nn

from dllm_kernels import corrupt_uniform, fused_head

MASK, VOCABULARY, BLOCK = 63, 64, 8


class Denoiser(nn.Module):
    """Small bidirectional transformer that returns logits, or its own loss if it gets labels."""

    def __init__(self, width=32):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.tokens, self.layers = nn.Embedding(VOCABULARY, width), nn.TransformerEncoder(layer, 1, None, False)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids, labels=None):  # noqa: D102
        logits = self.lm_head(self.layers(self.tokens(ids)))
        return logits if labels is None else F.cross_entropy(logits.float().view(-1, VOCABULARY), labels.view(-1))


def llada(model, ids, noisy, masked, p_mask):
    """LLaDA: cross-entropy of the masked positions, selected from the logits."""
    logits = model(noisy)
    token_loss = F.cross_entropy(logits[masked], ids[masked], reduction="none") / p_mask[masked]
    return token_loss.sum() / ids.numel()


def dllm(model, ids, noisy, masked, p_mask):
    """Dllm: cross-entropy of all positions, times weights, over all supervised tokens."""
    token_loss = F.cross_entropy(model(noisy).transpose(1, 2), ids, reduction="none")
    return (token_loss * masked.to(token_loss.dtype) / p_mask).sum() / ids.numel()


def dream(model, ids, noisy, masked, p_mask):
    """Dream and Fast-dLLM: row i predicts token i + 1, so the logits are shifted to the right."""
    logits = model(noisy)
    logits = torch.cat([logits[:, :1], logits[:, :-1]], dim=1)
    token_loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), ids.reshape(-1), reduction="none").view_as(ids)
    return (token_loss / p_mask)[masked].sum() / ids.numel()


def block_diffusion(model, ids, noisy, masked, p_mask):
    """Block diffusion: noisy tokens beside clean ones, and only the noisy half of the logits."""
    logits = model(torch.cat([noisy, ids], dim=1))[:, : ids.shape[1]]
    labels = ids.masked_fill(~masked, -100).flatten()
    token_loss = nn.CrossEntropyLoss(reduction="none")(logits.flatten(0, 1), labels).view_as(ids)
    return (token_loss.unflatten(1, (-1, BLOCK)).sum(-1) / p_mask.unflatten(1, (-1, BLOCK))[..., 0]).mean()


def of_the_model(model, ids, noisy, masked, p_mask):
    """Compute the loss in the forward of the model, as Hugging Face models do."""
    return model(noisy, labels=ids.masked_fill(~masked, -100))


def main(loss_of=llada, steps=20):
    """Train and return the losses."""
    torch.manual_seed(0)
    model, ids, losses = Denoiser(), torch.randint(0, 8, (4, 32)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with fused_head(model, on_logits="raise"):  # the only change
        for _ in range(steps):
            loss = loss_of(model, ids, *corrupt_uniform(ids, torch.ones_like(ids), MASK, eps=0.2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    print(f"{loss_of.__name__}: {losses[0]:.3f} before, {losses[-1]:.3f} after")
    return losses


if __name__ == "__main__":
    for each in (llada, dllm, dream, block_diffusion, of_the_model):
        main(each)
