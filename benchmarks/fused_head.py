"""Training loops from logits under ``fused_head``, compared with the same loops without it.

Each loop runs forward and backward with a trained head, half of the positions masked. The functions of the loops name
the code bases that write them. The floor counts the three matrix products on the active rows at the rate of a square
product.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import measure
from benchmarks.record import report
from benchmarks.shapes import LOOPS, Shape
from dllm_kernels import fused_head

PLAIN, OURS = "plain", "ours"
SHARE = 0.5
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Head(nn.Module):
    """Model that consists of its LM head."""

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__()
        factory = {"device": options.device, "dtype": options.dtype}
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False, **factory)

    def forward(self, hidden: torch.Tensor) -> Any:
        """Return logits, deferred ones under ``fused_head``."""
        return self.lm_head(hidden)


def masked_rows(logits: Any, ids: torch.Tensor, p: torch.Tensor) -> Any:
    """Compute the loss of LLaDA; ``p`` is 0 at positions that are not masked."""
    masked = p > 0
    token_loss = F.cross_entropy(logits[masked], ids[masked], reduction="none") / p[masked]
    return token_loss.sum() / ids.numel()


def all_rows(logits: Any, ids: torch.Tensor, p: torch.Tensor) -> Any:
    """Compute the loss of dllm."""
    token_loss = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    return (token_loss * torch.where(p > 0, 1 / p, 0.0)).sum() / ids.numel()


def chosen(logits: Any, ids: torch.Tensor, p: torch.Tensor) -> Any:
    """Compute the loss of DiffuLLaMA and DreamOn."""
    token_loss = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    token_loss = torch.where(p > 0, token_loss, torch.zeros_like(token_loss)).masked_fill(p == 0, 0)
    return torch.einsum("bl,bl->b", token_loss, torch.where(p > 0, 1 / p, 0.0)).mean()


def ratios(logits: Any, ids: torch.Tensor, p: torch.Tensor) -> Any:
    """Compute the clipped ratios of GRPO: d1, dLLM-RL, LLaDOU, MDPO."""
    new = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(new - new.detach())
    return -(torch.min(ratio * p, ratio.clamp(0.8, 1.2) * p) * (p > 0)).sum() / ids.numel()


def z_loss(logits: Any, ids: torch.Tensor, p: torch.Tensor) -> Any:
    """Compute a cross-entropy and the square of the logsumexp."""
    token_loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    return token_loss + 1e-4 * logits.logsumexp(-1).square().mean()


def selective(logits: Any, ids: torch.Tensor, p: torch.Tensor) -> Any:
    """Compute log-probabilities of all rows as TRL does."""
    new = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
    return -torch.exp(new - new.detach()).mean()


def subs(logits: Any, ids: torch.Tensor, p: torch.Tensor) -> Any:
    """Compute the loss of MDLM, BD3-LM, ReMDM and Duo."""
    mask_id = logits.shape[-1] - 1
    noisy = ids.masked_fill(p > 0, mask_id)
    logits = logits * 1.0  # the caller's stay as they are
    logits[:, :, mask_id] += -1e6
    logits = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    unmasked = noisy != mask_id
    logits[unmasked] = -1e6
    logits[unmasked, noisy[unmasked]] = 0
    log_p = torch.gather(logits, -1, ids[:, :, None]).squeeze(-1)
    return -(log_p * torch.where(p > 0, 1 / p, 0.0)).sum() / ids.numel()


def guidance(logits: Any, ids: torch.Tensor, p: torch.Tensor) -> Any:
    """Compute a loss of guided logits: dllm, MDPO, d1, LLaDA, EOSER."""
    conditional, other = logits.chunk(2, dim=1)
    logits = other + (1.5 + 1) * (conditional - other)
    return all_rows(logits, ids[:, : logits.shape[1]], p[:, : logits.shape[1]])


def capped_guidance(logits: Any, ids: torch.Tensor, p: torch.Tensor) -> Any:
    """Compute a loss of guided logits that have a soft cap, which are materialized."""
    return guidance(torch.tanh(logits / 30) * 30, ids, p)


def padded_vocabulary(logits: Any, ids: torch.Tensor, p: torch.Tensor) -> Any:
    """Cut a padded vocabulary."""
    vocab = logits.shape[-1] - 64
    return all_rows(logits[..., :vocab], ids.clamp(max=vocab - 1), p)


def entropy(logits: Any, ids: torch.Tensor, p: torch.Tensor) -> Any:
    """Compute the loss of dParallel and d3LLM: a cross-entropy, and the entropy of all rows."""
    token_loss = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    certainty = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return (token_loss * (p > 0)).sum() / ids.numel() + 0.1 * certainty.mean()


def distribution(logits: Any, ids: torch.Tensor, p: torch.Tensor) -> Any:
    """Compute ratios and the entropy by a distribution of torch, as d3LLM and loops of PPO do."""
    policy = torch.distributions.Categorical(logits=logits)
    new = policy.log_prob(ids)  # type: ignore[no-untyped-call]
    return -(torch.exp(new - new.detach()) * p).sum() / ids.numel() - 0.1 * policy.entropy().mean()  # type: ignore[no-untyped-call]


def touched(logits: Any, ids: torch.Tensor, p: torch.Tensor) -> Any:
    """Touch all parameters, as dParallel and d3LLM do."""
    return masked_rows(logits, ids, p) + 0.0 * logits.sum()


@functools.lru_cache(maxsize=1)
def _probabilities(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the stored probabilities of a teacher."""
    return torch.randn(shape, dtype=dtype, device=device).softmax(-1)


def _teacher(logits: Any) -> torch.Tensor:
    return _probabilities(logits.shape, logits.dtype, logits.device)


def eagle(logits: Any, ids: torch.Tensor, p: torch.Tensor) -> Any:
    """Compute the loss of EAGLE: products of the probabilities of a teacher and log-probabilities."""
    return -torch.sum((p > 0)[:, :, None] * (_teacher(logits) * nn.LogSoftmax(dim=2)(logits)), 2).mean()


def distillation(logits: Any, ids: torch.Tensor, p: torch.Tensor) -> Any:
    """Compute the masked mean of a KL divergence, as speculators and TRL do."""
    rows = F.kl_div(F.log_softmax(logits, -1), _teacher(logits), reduction="none").sum(-1)
    return (rows * (p > 0)).sum() / (p > 0).sum()


LOSSES = {
    "masked rows": masked_rows, "all rows": all_rows, "where and einsum": chosen, "ratios": ratios, "z-loss": z_loss,
    "gather and logsumexp": selective, "subs": subs, "guidance": guidance, "padded vocabulary": padded_vocabulary,
    "entropy": entropy, "distribution": distribution, "touched": touched, "EAGLE": eagle,
    "distillation": distillation, "guidance, capped": capped_guidance,
}  # fmt: skip


def candidate(loss: Any, model: Head, inputs: Inputs, fused: bool) -> measure.Candidate:
    """Build one loop, forward and backward."""
    hidden, ids, p = inputs

    def run(_: Any) -> None:
        if not fused:
            loss(model(hidden), ids, p).backward()
            return
        with fused_head(model, on_logits="allow" if loss is capped_guidance else "raise"):
            loss(model(hidden), ids, p).backward()

    return measure.Candidate(run, measure.without_gradients([hidden, model.lm_head.weight]))


def run(options: Any, shapes: tuple[Shape, ...]) -> tuple[list[measure.Result], dict[str, float], str]:
    """Measure all cases; returns the results, the ceilings and the name of the baseline."""
    measured = measure.ceilings(options.device, options.dtype, options.size)
    results: list[measure.Result] = []
    for shape in shapes:
        size = (shape.batch, shape.length)
        model = Head(shape, options)
        hidden = torch.randn(*size, shape.hidden, device=options.device, dtype=options.dtype, requires_grad=True)
        ids = torch.randint(0, shape.vocab, size, device=options.device)
        _probabilities(torch.Size((*size, shape.vocab)), options.dtype, hidden.device)  # not in the memory of a loop
        p = torch.rand(shape.batch, 1, device=options.device).mul(0.8).add(0.1).expand(size)
        p = torch.where(torch.rand(size, device=options.device) < SHARE, p, 0.0)
        flops = 3 * 2 * int((p > 0).sum()) * shape.vocab * shape.hidden
        for name, loss in LOSSES.items():
            case = {"loop": name, "rows": shape.rows, "V": shape.vocab, "D": shape.hidden, "active": f"{SHARE:.0%}"}
            loops = {kind: candidate(loss, model, (hidden, ids, p), kind == OURS) for kind in (OURS, PLAIN)}
            floor = flops / measured["gemm_flop_per_s"]
            results += measure.compare("fused_head", case, "both", loops, options, floor_s=floor)
    return results, measured, PLAIN


def main(argv: list[str]) -> int:
    """Measure the loops of the chosen size."""
    parser = measure.arguments("fused_head", __doc__)
    measure.add_shape(parser)
    options = measure.parse(parser, argv)
    results, measured, baseline = run(options, measure.chosen(LOOPS[options.size], options))
    return report(results, options, baseline=baseline, measured_ceilings=measured)
