"""Training loops from logits under ``fused_head``, compared with the same loops without it.

Each loop runs forward and backward with a trained head. "masked rows" selects the masked positions from the logits
(LLaDA), "all rows" computes the loss of all positions and multiplies it by weights (dllm). The floor counts the three
matrix products on the active rows at the rate of a square product.
"""

from __future__ import annotations

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


def masked_rows(logits: Any, ids: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Compute the loss of LLaDA; ``p`` is 0 at positions that are not masked."""
    masked = p > 0
    token_loss = F.cross_entropy(logits[masked], ids[masked], reduction="none") / p[masked]
    return token_loss.sum() / ids.numel()


def all_rows(logits: Any, ids: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Compute the loss of dllm."""
    token_loss = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    return (token_loss * torch.where(p > 0, 1 / p, 0.0)).sum() / ids.numel()


LOSSES = {"masked rows": masked_rows, "all rows": all_rows}


def candidate(loss: Any, model: Head, inputs: Inputs, fused: bool) -> measure.Candidate:
    """Build one loop, forward and backward."""
    hidden, ids, p = inputs

    def run(_: Any) -> None:
        if not fused:
            loss(model(hidden), ids, p).backward()
            return
        with fused_head(model, on_logits="raise"):
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
