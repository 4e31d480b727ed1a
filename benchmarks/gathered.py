"""Losses from hidden states, compared with a loop that gathers the masked rows before the LM head.

``gather`` projects the masked rows alone and runs plain PyTorch on their logits. With ``--compiled``, ``gather,
compiled`` runs ``torch.compile`` of the projection and the loss. ``plain`` computes the logits of all rows.
Each candidate runs forward and backward. The MDLM loss and the loop under ``fused_head`` have a trained head, the
DFlash loss a frozen one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import linear_nll, measure, peers
from benchmarks.losses import Head
from benchmarks.record import report
from benchmarks.shapes import LINEAR
from dllm_kernels import DFlashDecayLoss, MDLMCrossEntropyLoss, fused_head

SHARE = 0.5
CANDIDATES = ("plain", "gather", peers.GATHER_COMPILED)


def mdlm(backend: str) -> peers.Loss:
    """Return the MDLM loss, with 1 / weight as the masking probability."""
    loss = MDLMCrossEntropyLoss(backend=backend)

    def run(hidden: Any, head: Any, targets: Any, weights: Any, chunk: int | None) -> torch.Tensor:
        masked = weights != 0
        p = torch.where(masked, weights, 1.0).reciprocal()
        return loss.forward_fused(hidden, head, targets, masked, p, masked).total_loss

    return run


def dflash(backend: str) -> peers.Loss:
    """Return the DFlash loss, with the weights as the mask of the blocks."""

    def run(hidden: Any, head: Any, targets: Any, weights: Any, chunk: int | None) -> torch.Tensor:
        loss = DFlashDecayLoss(loss_gamma=None, chunk_size=chunk, backend=backend)
        return loss.forward_fused(hidden, head, targets, weights).total_loss

    return run


def loop(backend: str) -> peers.Loss:
    """Return a loop over all rows under ``fused_head``."""

    def run(hidden: Any, head: Any, targets: Any, weights: Any, chunk: int | None) -> torch.Tensor:
        model = Head(head)
        with fused_head(model, on_logits="raise"):
            logits = model.lm_head(hidden)
            token_loss = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
            total: torch.Tensor = (token_loss * weights).sum()
            return total

    return run


#: Name -> (our loss for a backend, whether its head is frozen).
LOSSES = {"MDLM": (mdlm, False), "DFlash": (dflash, True), "fused_head": (loop, False)}


def run(options: Any) -> tuple[list[measure.Result], dict[str, float]]:
    """Measure the losses; returns the results and the ceilings."""
    measured = measure.ceilings(options.device, options.dtype, options.size)
    plain = peers.linear_losses(options.device, options.compiled)
    results: list[measure.Result] = []
    for name, (make, frozen) in LOSSES.items():
        shape = next(shape for shape in LINEAR[options.size] if shape.frozen == frozen)
        hidden, head, targets, weights, _ = linear_nll.make_inputs(shape, SHARE, options.dtype, options.device, True)
        inputs = hidden, head, targets, torch.where(weights != 0, 1 / weights, 0.0), torch.ones_like(weights[0, 0])
        losses = {"ours": make(options.backend)} | {key: plain[key] for key in CANDIDATES if key in plain}
        errors, allowed = linear_nll.errors(losses, inputs, shape)
        flops = linear_nll.floor_flops(shape, int((weights != 0).sum()), "both")
        results += measure.compare(
            "gathered",
            {"loss": name, "rows": shape.rows, "V": shape.vocab, "D": shape.hidden, "active": f"{SHARE:.0%}"},
            "both",
            {who: linear_nll.candidate(loss, inputs, shape, "both") for who, loss in losses.items()},
            options,
            errors=errors,
            allowed_error=allowed,
            floor_s=flops / measured["gemm_flop_per_s"],
        )
    return results, measured


def main(argv: list[str]) -> int:
    """Print the table and write the JSON."""
    parser = measure.arguments("gathered", __doc__)
    parser.add_argument("--compiled", action="store_true", help="also torch.compile of the plain code (slow to start)")
    options = measure.parse(parser, argv)
    results, measured = run(options)
    return report(results, options, baseline="gather", measured_ceilings=measured)
