"""The ``compute_loss`` of the dllm library's MDLM trainer with this package's corruption and loss.

Options: the schedule of the masking fraction and its weight, the normalisation, and right-shifted logits. Right-shifted
logits are for models that were trained autoregressively and predict the next token.

python examples/dllm_mdlm.py
"""

import math

import torch
from torch import nn

from dllm_kernels import corrupt_uniform, sample_level
from dllm_kernels.ops import weighted_linear_nll


def linear(t):
    """Linear schedule ``alpha = 1 - t``; returns alpha and the weight -alpha' / (1 - alpha)."""
    return 1 - t, 1 / t


def cosine(t):
    """Cosine schedule ``alpha = 1 - cos(pi / 2 (1 - t))``; returns alpha and its weight."""
    angle = math.pi / 2 * (1 - t)
    return 1 - angle.cos(), math.pi / 2 * angle.tan()


def compute_loss(
    model, inputs, mask_id, *, schedule=linear, loss_weight="scheduler", loss_norm="token", right_shift=False,
    time_epsilon=1e-3, seeds=None,
):  # fmt: skip
    """Compute the loss of ``input_ids`` and ``labels`` [B, L]; a label of -100 is neither masked nor scored."""
    ids, scored = inputs["input_ids"], inputs["labels"] != -100
    B = len(ids)
    t = sample_level(B, method="uniform", low=time_epsilon, seeds=seeds)
    alpha, weight = schedule(t)
    noisy, noise_mask, _ = corrupt_uniform(ids, scored, mask_id, level=1 - alpha, seeds=seeds)

    hidden = model(noisy)  # [B, L, D]; for a Hugging Face model, last_hidden_state
    if right_shift:  # shift the hidden states: a row has D values, not V
        hidden = torch.cat([hidden[:, :1], hidden[:, :-1]], 1)

    weights = noise_mask.float()
    if loss_weight == "scheduler":
        weights = weights * weight[:, None]
    counts = {"token": scored.sum(), "sequence": scored.sum(1, keepdim=True) * B, "batch": torch.tensor(B)}
    weights = weights / counts[loss_norm].clamp(min=1)
    return weighted_linear_nll(hidden, model.lm_head.weight, ids, weights).loss


class Model(nn.Module):
    """Stand-in for a backbone with an LM head."""

    def __init__(self, V=50, D=32):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)

    def forward(self, ids):  # noqa: D102
        return self.embed(ids) + self.embed(ids).mean(1, keepdim=True)


def main():
    """Print and return the loss of one batch for each schedule and normalisation."""
    torch.manual_seed(0)
    ids = torch.randint(0, 49, (4, 16))
    inputs = {"input_ids": ids, "labels": ids.masked_fill(torch.arange(16) < 4, -100)}
    model, losses = Model(), {}
    for schedule in (linear, cosine):
        for norm in ("token", "sequence", "batch"):
            losses[schedule.__name__, norm] = compute_loss(model, inputs, 49, schedule=schedule, loss_norm=norm).item()
            print(f"{schedule.__name__:8} {norm:10} {losses[schedule.__name__, norm]:.3f}")
    return losses


if __name__ == "__main__":
    main()
