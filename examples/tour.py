"""A training step of a diffusion LM in three forms, with equal loss and gradient: python -m examples.tour.

Prints loss, peak memory and time of the plain loop, of the same loop under ``fused_head``, and of a loss class from
hidden states. It takes about ten seconds on a CPU and uses random tokens and a model that is little more than its head.
"""

import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.measure import Candidate, peak_memory, without_gradients
from dllm_kernels import MDLMCrossEntropyLoss, corrupt_uniform, fused_head


class Denoiser(nn.Module):
    """Stand-in for a model with an LM head."""

    def __init__(self, vocabulary, width):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)

    def hidden(self, ids):
        """Return hidden states ``[B, L, D]``."""
        x = self.embed(ids)
        return torch.tanh(x + x.mean(1, keepdim=True))

    def forward(self, ids):  # noqa: D102
        return self.lm_head(self.hidden(ids))


def main(vocabulary=32_000, length=192, width=128, repeats=2):
    """Print the table; return name -> (loss, gradient of the head, peak memory in bytes, seconds)."""
    torch.manual_seed(0)
    model, mask_id = Denoiser(vocabulary, width), vocabulary - 1
    ids = torch.randint(0, mask_id, (2, length))
    noisy, masked, p = corrupt_uniform(ids, torch.ones_like(ids), mask_id, level=torch.tensor([0.4, 0.6]))

    def plain_loop():
        """Compute logits, the NLL of all rows, and the mean with the weights 1 / p."""
        nll = F.cross_entropy(model(noisy).transpose(1, 2), ids, reduction="none")
        return (nll * masked / p).sum() / ids.numel()

    def same_loop_fused():
        with fused_head(model, on_logits="raise"):
            return plain_loop()

    def loss_class():
        loss_fn, hidden, on = MDLMCrossEntropyLoss(), model.hidden(noisy), torch.ones_like(ids)
        head = model.lm_head.weight
        return loss_fn.forward_fused(hidden, head, ids, masked, p, on, num_diffusion_tokens=ids.numel()).total_loss

    print(f"{ids.numel()} tokens, vocabulary {vocabulary:,}, width {width}, forward and backward on a CPU\n")
    print(f"{'':24}{'loss':>10}{'gradient':>12}{'peak memory':>14}{'time':>10}")
    found = {}
    for form in (plain_loop, same_loop_fused, loss_class):
        step = Candidate(lambda _, form=form: form().backward(), without_gradients(model.parameters()))
        peak, seconds = peak_memory(step, "cpu"), []
        for _ in range(repeats):
            step.prepare(0)
            start = time.perf_counter()
            step.run(0)
            seconds.append(time.perf_counter() - start)
        loss, grad = form().item(), model.lm_head.weight.grad
        name = form.__name__.replace("_", " ")
        found[name] = (loss, grad, peak, min(seconds))
        print(f"{name:24}{loss:10.5f}{grad.norm():12.6f}{peak / 2**20:10.0f} MiB{found[name][3]:8.2f} s", flush=True)
    print("\nLoss and gradient agree up to rounding. The gradient of the head is part of every peak.")
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
