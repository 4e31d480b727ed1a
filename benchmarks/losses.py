"""Every loss class as a training step calls it: ours, the plain code, and the original if it is installed.

A case holds its leaves, for which gradients are computed, and one function of the leaves per candidate. The original's
classes take the same arguments as ours, so one function calls both.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import reference
from benchmarks import measure, peers, record, shapes
from benchmarks.shapes import Shape

Leaves = Sequence[torch.Tensor]
Loss = Callable[[Leaves], torch.Tensor]
PHASES = ("forward", "backward", "both")


@dataclass(frozen=True)
class Case:
    """A loss on one set of inputs: the leaves, and one function of the leaves per candidate."""

    leaves: tuple[torch.Tensor, ...]
    losses: dict[str, Loss]


@dataclass(frozen=True)
class Draw:
    """Draws the inputs of a case."""

    shape: Shape
    share: float
    options: argparse.Namespace

    def logits(self) -> torch.Tensor:
        """``[B, L, V]``, standard normal, with gradient."""
        return self._normal(self.shape.batch, self.shape.length, self.shape.vocab).requires_grad_()

    def hidden(self) -> torch.Tensor:
        """``[B, L, D]``, standard normal, with gradient."""
        return self._normal(self.shape.batch, self.shape.length, self.shape.hidden).requires_grad_()

    def head(self, frozen: bool) -> torch.Tensor:
        """``[V, D]``, scaled to logits of variance 1, with gradient unless frozen."""
        weight: torch.Tensor = self._normal(self.shape.vocab, self.shape.hidden) * float(self.shape.hidden) ** -0.5
        return weight.requires_grad_(not frozen)

    def ids(self) -> torch.Tensor:
        """``[B, L]`` tokens."""
        size = (self.shape.batch, self.shape.length)
        return torch.randint(self.shape.vocab, size, device=self.options.device)

    def mask(self) -> torch.Tensor:
        """``[B, L]``, True at the share of active rows."""
        return torch.rand(self.shape.batch, self.shape.length, device=self.options.device) < self.share

    def p_mask(self) -> torch.Tensor:
        """``[B, L]``, in [0.1, 1)."""
        return torch.rand(self.shape.batch, self.shape.length, device=self.options.device) * 0.9 + 0.1

    def built(self, name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Construct the loss class with this name: ours, and the original's if it is installed."""
        from dllm_kernels import losses

        found = {"ours": getattr(losses, name)(*args, **kwargs, backend=self.options.backend)}
        if (original := peers.module(peers.DLLM_LOSS)) is not None:
            found["original"] = getattr(original, name)(*args, **kwargs)
        return found

    def plain(self, loss: Loss) -> dict[str, Loss]:
        """Return the reference and, if requested, ``torch.compile`` of it."""
        return {"reference": loss} | ({"compiled": torch.compile(loss)} if self.options.compiled else {})

    def _normal(self, *size: int) -> torch.Tensor:
        dtype: torch.dtype = self.options.dtype
        return torch.randn(size, device=self.options.device, dtype=dtype)


def mdlm(draw: Draw) -> Case:
    """Masked diffusion from logits."""
    ids, noise, p, ones = draw.ids(), draw.mask(), draw.p_mask(), torch.ones_like(draw.mask())
    args = (ids, noise, p, ones)
    count = {"num_diffusion_tokens": ids.numel()}
    losses = draw.plain(lambda x: reference.mdlm_loss(x[0], *args, ids.numel()))
    for name, loss in draw.built("MDLMCrossEntropyLoss").items():
        losses[name] = lambda x, loss=loss: loss(x[0], *args, **count).total_loss  # type: ignore[misc]
    return Case((draw.logits(),), losses)


def mdlm_fused(draw: Draw) -> Case:
    """Masked diffusion from hidden states and a trainable head."""
    ids, noise, p, ones = draw.ids(), draw.mask(), draw.p_mask(), torch.ones_like(draw.mask())
    args = (ids, noise, p, ones)
    losses = draw.plain(lambda x: reference.mdlm_loss(F.linear(x[0], x[1]), *args, ids.numel()))
    for name, loss in draw.built("MDLMCrossEntropyLoss").items():
        if hasattr(loss, "forward_fused"):
            losses[name] = lambda x, loss=loss: (
                loss.forward_fused(  # type: ignore[misc]
                    x[0], x[1], *args, num_diffusion_tokens=ids.numel()
                ).total_loss
            )
    return Case((draw.hidden(), draw.head(frozen=False)), losses)


def block(draw: Draw) -> Case:
    """Flat block diffusion from logits; ``share`` is the fraction of supervised rows."""
    ids, supervised, p = draw.ids(), draw.mask(), draw.p_mask()
    losses = draw.plain(lambda x: reference.block_diffusion_loss(x[0], ids, supervised))
    for name, loss in draw.built("BlockDiffusionCrossEntropyLoss").items():
        losses[name] = lambda x, loss=loss: loss(x[0], ids, supervised, p, supervised).total_loss  # type: ignore[misc]
    return Case((draw.logits(),), losses)


def hybrid(draw: Draw) -> Case:
    """Masked diffusion and next token, from two logits tensors."""
    ids, noise, p, ones = draw.ids(), draw.mask(), draw.p_mask(), torch.ones_like(draw.mask())
    count = ids.numel()
    args = (ids, noise, p, ones, ones, count, count)
    losses = draw.plain(lambda x: reference.hybrid_loss(x[0], *args, x[1], 0.3)[0])
    for name, loss in draw.built("HybridDiffusionLLMLoss", 0.3).items():
        losses[name] = lambda x, loss=loss: loss(x[0], *args, x[1]).total_loss  # type: ignore[misc]
    return Case((draw.logits(), draw.logits()), losses)


def idlm(draw: Draw) -> Case:
    """A masked and a clean copy of half the length from one logits tensor; ``share`` is the fraction of the answer."""
    L = draw.shape.length // 2
    args = (draw.ids()[:, :L], draw.mask()[:, :L], torch.ones_like(draw.mask()[:, :L]))
    losses = draw.plain(lambda x: reference.idlm_loss(x[0][:, : 2 * L], *args).total_loss)
    for name, loss in draw.built("IDLMLoss").items():
        losses[name] = lambda x, loss=loss: loss(x[0][:, : 2 * L], *args, seq_len=L).total_loss  # type: ignore[misc]
    return Case((draw.logits(),), losses)


def scdd(draw: Draw) -> Case:
    """Self-correcting diffusion; half of the tokens are MASK, a tenth wrong. ``share``: fraction of supervised rows."""
    ids, supervised, mask = draw.ids() % (draw.shape.vocab - 1), draw.mask(), draw.shape.vocab - 1
    kind, other = torch.rand_like(ids, dtype=torch.float32), draw.ids() % mask
    noisy = torch.where(kind < 0.5, mask, torch.where(kind < 0.6, other, ids))
    t = draw.p_mask()[:, :1].expand(ids.shape)
    losses = draw.plain(lambda x: reference.scdd_loss(x[0], ids, t, supervised, noisy, mask))
    args = (ids, noisy != ids, t, supervised)
    for name, loss in draw.built("SCDDLoss", mask).items():
        losses[name] = lambda x, loss=loss: loss(x[0], *args, noisy_input_ids=noisy).total_loss  # type: ignore[misc]
    return Case((draw.logits(),), losses)


def _dflash_block(shape: Shape) -> int:
    """Return the shape's block size, or another one whose predicted positions divide the length."""
    given = shape.block_size or 16
    return (
        given
        if shape.length % (given - 1) == 0
        else next(n for n in range(given, 1, -1) if shape.length % (n - 1) == 0)
    )


def dflash(draw: Draw) -> Case:
    """DFlash from logits, with draft accuracy."""
    ids, mask, size = draw.ids(), draw.mask().float(), _dflash_block(draw.shape)
    losses = draw.plain(lambda x: reference.dflash_loss(x[0], ids, mask, ids.numel(), size))
    for name, loss in draw.built("DFlashDecayLoss").items():
        losses[name] = lambda x, loss=loss: loss(x[0], ids, mask, ids.numel(), size).total_loss  # type: ignore[misc]
    return Case((draw.logits(),), losses)


def dflash_fused(draw: Draw) -> Case:
    """DFlash from hidden states and a frozen head, with draft accuracy."""
    ids, mask, size = draw.ids(), draw.mask().float(), _dflash_block(draw.shape)
    head = draw.head(frozen=True)
    args = (ids, mask, ids.numel(), size)
    losses = draw.plain(lambda x: reference.dflash_loss(F.linear(x[0], head.to(x[0].dtype)), *args))
    chunk = draw.shape.chunk or 1024
    for name, loss in draw.built("DFlashDecayLoss", use_fused_linear_ce=True, chunk_size=chunk).items():
        losses[name] = lambda x, loss=loss: loss.forward_fused(x[0], head, *args).total_loss  # type: ignore[misc]
    return Case((draw.hidden(),), losses)


def distillation(draw: Draw) -> Case:
    """Draft distillation from hidden states of both models and one frozen head, with DSpark's 0.1 ce + 0.9 l1."""
    from dllm_kernels.losses import DraftDistillationLoss

    ids, mask, size = draw.ids(), draw.mask().float(), _dflash_block(draw.shape)
    head, teacher, kind = draw.head(frozen=True), draw.hidden().detach(), {"ce": 0.1, "l1": 0.9}

    def plain(x: Leaves) -> torch.Tensor:
        logits, its_logits = (F.linear(h.to(x[0].dtype), head.to(x[0].dtype)) for h in (x[0], teacher))
        return reference.draft_distillation_loss(logits, its_logits, ids, mask, ids.numel(), size, kind=kind)

    losses = draw.plain(plain)
    ours = DraftDistillationLoss(kind, chunk_size=draw.shape.chunk, backend=draw.options.backend)
    losses["ours"] = lambda x: ours.forward_fused(x[0], head, teacher, ids, mask, ids.numel(), size).total_loss
    return Case((draw.hidden(),), losses)


def encoder_ar(draw: Draw) -> Case:
    """Next token from logits; ``share`` is the fraction of valid positions."""
    ids, valid = draw.ids(), draw.mask()
    losses = draw.plain(lambda x: reference.encoder_ar_loss(x[0], ids, valid))
    from dllm_kernels.losses import encoder_ar_loss

    losses["ours"] = lambda x: encoder_ar_loss(x[0], ids, valid, backend=draw.options.backend)
    if (original := peers.module(peers.DLLM_LOSS)) is not None:
        losses["original"] = lambda x: original.encoder_ar_loss(x[0], ids, valid)
    return Case((draw.logits(),), losses)


class Head(nn.Module):
    """Model with an LM head, as the MTP losses and ``fused_head`` require."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)


def mtp(draw: Draw) -> Case:
    """All MTP depths from hidden states and a trainable head; ``share`` is the fraction of labels."""
    from dllm_kernels.mtp import FusedLinearCrossEntropy, calculate_mtp_loss

    depths = draw.shape.depths or 2
    labels = torch.where(draw.mask(), draw.ids(), -100)
    head = draw.head(frozen=False)
    count = int((labels != -100).sum())
    losses = draw.plain(lambda x: reference.mtp_loss([F.linear(h, x[-1]) for h in x[:-1]], labels, 0.1, count).loss)
    ours = FusedLinearCrossEntropy(backend=draw.options.backend)
    losses["ours"] = lambda x: calculate_mtp_loss(
        ours, mtp_per_depth_h=list(x[:-1]), labels=labels, model=nn.Module(), num_label_tokens=count, lm_weight=x[-1]
    )
    if (original := peers.module("nemo_automodel.components.loss.mtp")) is not None:
        masked = peers.module("nemo_automodel.components.loss.masked_ce").MaskedCrossEntropy()
        losses["original"] = lambda x: original.calculate_mtp_loss(
            masked,
            mtp_per_depth_logits=[F.linear(h, x[-1]) for h in x[:-1]],
            labels=labels,
            model=nn.Module(),
            num_label_tokens=count,
        )
    return Case((*(draw.hidden() for _ in range(depths)), head), losses)


SUBJECTS: dict[str, tuple[Callable[[Draw], Case], dict[str, Shape]]] = {
    "mdlm": (mdlm, {"toy": shapes.TOY_LOGITS, "small": shapes.CPU_LOGITS, "full": shapes.LLADA_SHORT}),
    "mdlm_fused": (
        mdlm_fused,
        {"toy": shapes.TOY_TRAINABLE, "small": shapes.CPU_TRAINABLE, "full": shapes.LLADA_SHORT},
    ),
    "block": (block, {"toy": shapes.TOY_LOGITS, "small": shapes.CPU_LOGITS, "full": shapes.GEMMA_BATCH}),
    "hybrid": (hybrid, {"toy": shapes.TOY_LOGITS, "small": shapes.CPU_LOGITS, "full": shapes.HYBRID}),
    "idlm": (idlm, {"toy": shapes.TOY_LOGITS, "small": shapes.CPU_LOGITS, "full": shapes.HYBRID}),
    "scdd": (scdd, {"toy": shapes.TOY_LOGITS, "small": shapes.CPU_LOGITS, "full": shapes.LLADA_SHORT}),
    "dflash": (dflash, {"toy": shapes.TOY_LOGITS, "small": shapes.CPU_LOGITS, "full": shapes.DFLASH_4B}),
    "dflash_fused": (dflash_fused, {"toy": shapes.TOY_FROZEN, "small": shapes.CPU_FROZEN, "full": shapes.DFLASH_8B}),
    "distillation": (distillation, {"toy": shapes.TOY_FROZEN, "small": shapes.CPU_FROZEN, "full": shapes.DFLASH_8B}),
    "encoder_ar": (encoder_ar, {"toy": shapes.TOY_LOGITS, "small": shapes.CPU_LOGITS, "full": shapes.GEMMA_BATCH}),
    "mtp": (mtp, {"toy": shapes.TOY_MTP, "small": shapes.CPU_MTP, "full": shapes.MTP}),
}


def candidate(case: Case, loss: Loss, phase: str) -> measure.Candidate:
    """Build one loss in one phase."""
    dropped = measure.without_gradients(case.leaves)

    def forward(_: object) -> torch.Tensor:
        return loss(case.leaves)

    def prepared(index: int) -> torch.Tensor:
        dropped(index)
        return forward(index)

    def backward(value: torch.Tensor) -> None:
        value.backward()  # type: ignore[no-untyped-call]

    if phase == "backward":
        return measure.Candidate(backward, prepared)
    return measure.Candidate((lambda _: backward(loss(case.leaves))) if phase == "both" else forward, dropped)


def _gradients(loss: Loss, leaves: Leaves) -> torch.Tensor:
    copies = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
    asked = [copy for copy in copies if copy.requires_grad]
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss(copies), asked)])


def errors(build: Callable[[Draw], Case], draw: Draw) -> dict[str, float]:
    """Return the distance of each candidate's gradients from the reference in float64, on one short sequence."""
    short = replace(draw.shape, batch=1, length=min(draw.shape.length, 60))
    case = build(replace(draw, shape=short))
    exact = _gradients(case.losses["reference"], [leaf.detach().double().requires_grad_() for leaf in case.leaves])
    return {name: measure.relative_error(_gradients(loss, case.leaves), exact) for name, loss in case.losses.items()}


def run(options: argparse.Namespace, names: Sequence[str], shares: Sequence[float]) -> list[measure.Result]:
    """Measure the named losses, in every phase, at every fraction of active rows."""
    results: list[measure.Result] = []
    for name in names:
        build, by_size = SUBJECTS[name]
        for share in shares:
            draw = Draw(by_size[options.size], share, options)
            off = errors(build, draw)
            case = build(draw)
            label = {"loss": name, "shape": draw.shape.name, "active": f"{share:.0%}"}
            for phase in PHASES:
                candidates = {who: candidate(case, loss, phase) for who, loss in case.losses.items()}
                results += measure.compare("losses", label, phase, candidates, options, errors=off)
            del case
    return results


def main(argv: list[str]) -> int:
    """Print the table and write the JSON."""
    parser = measure.arguments("losses", __doc__)
    parser.add_argument("--loss", action="append", choices=tuple(SUBJECTS), help="default: all")
    parser.add_argument("--share", type=float, action="append", help="share of active rows, default 0.5")
    parser.add_argument("--compiled", action="store_true", help="also torch.compile of the plain code (slow to start)")
    options = measure.parse(parser, argv)
    results = run(options, options.loss or tuple(SUBJECTS), options.share or (0.5,))
    base = "original" if any(result.name == "original" for result in results) else "reference"
    return record.report(results, options, baseline=base)
