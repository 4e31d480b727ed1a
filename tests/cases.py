"""One row per op or loss: how to draw its small inputs, our two forms of it, and the oracle.

Every test that holds for all losses (parity, laws, compilation, memory, inputs left alone) runs over ``CASES``.
``B`` sequences of ``L`` tokens; the logits or hidden states have ``case.width * L`` positions a sequence.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import dllm_kernels as ours
import reference
from dllm_kernels import ops

Inputs = dict[str, torch.Tensor]
BLOCK = 4  # positions of a DFlash block, its anchor included: 3 are predicted


class Case(NamedTuple):
    """What the tests need to know of one op or loss.

    Attributes:
        name: what pytest calls it.
        draw: (B, L, V) -> targets, masks and weights by name, drawn from torch's default generator.
        logits_form: (logits, inputs, **options) -> value; options are ``backend`` and, for a loss with that argument,
            ``fp32_upcast``.
        hidden_form: (hidden, weight, bias, inputs, **options) -> value; ``chunk_size`` too.
        oracle: (logits, inputs) -> value.
        width: positions of the logits for each token.
        per_row: whether the value is one number a row.
        linear_in: the input the value is linear in, if any.
        rounds: whether it takes ``fp32_upcast``.
        transform: what the logits go through first, as the ops and losses take it.
    """

    name: str
    draw: Callable[[int, int, int], Inputs]
    logits_form: Callable[..., torch.Tensor]
    hidden_form: Callable[..., torch.Tensor]
    oracle: Callable[..., torch.Tensor]
    width: int = 1
    per_row: bool = False
    linear_in: str | None = None
    rounds: bool = False
    transform: dict[str, Any] | None = None


def _targets(B: int, L: int, V: int) -> torch.Tensor:
    """Targets, about one in six of them -100."""
    targets = torch.randint(0, V, (B, L))
    return torch.where(torch.rand(B, L) < 1 / 6, -100, targets)


def _mask(B: int, L: int, share: float = 0.6) -> torch.Tensor:
    return torch.rand(B, L) < share


def _rows(B: int, L: int, V: int) -> Inputs:
    weights = torch.randn(B, L) * _mask(B, L)
    return {"targets": _targets(B, L, V), "weights": weights}


def _diffusion(B: int, L: int, V: int) -> Inputs:
    return {
        "target_ids": _targets(B, L, V),
        "noise_mask": _mask(B, L),
        "p_mask": torch.rand(B, L).clamp(min=0.05),
        "loss_mask": _mask(B, L, 0.8).long(),
    }


def _counted_diffusion(B: int, L: int, V: int) -> Inputs:
    return _diffusion(B, L, V) | {"num_diffusion_tokens": torch.tensor(max(1, B * L - 2))}


def _hybrid(B: int, L: int, V: int) -> Inputs:
    ar = {"loss_mask_ar": torch.rand(B, L) * _mask(B, L), "num_ar_tokens": torch.tensor(max(1, B * L - 1))}
    return _counted_diffusion(B, L, V) | ar


def _dflash(B: int, L: int, V: int) -> Inputs:
    return {
        "target_ids": _targets(B, L, V),
        "block_mask": torch.rand(B, L) * _mask(B, L, 0.8),
        "num_tokens": torch.tensor(max(1, B * L - 3)),
    }


def _idlm(B: int, L: int, V: int) -> Inputs:
    masks = {"answer_mask": _mask(B, L, 0.7), "valid_mask": _mask(B, L, 0.9).long()}
    return {"target_ids": _targets(B, L, V)} | masks


def _counted_idlm(B: int, L: int, V: int) -> Inputs:
    return _idlm(B, L, V) | {"num_diffusion_tokens": torch.tensor(max(1, B * L - 2))}


MASK_ID = 2


def _scdd(B: int, L: int, V: int) -> Inputs:
    """A third of the tokens MASK, a third as they were, the rest drawn anew; no clean one is MASK, whose probability is 0."""
    targets = _targets(B, L, V)
    targets = torch.where(targets == MASK_ID, (MASK_ID + 1) % V, targets)
    kind, other = torch.rand(B, L), (MASK_ID + 1 + torch.randint(0, V - 1, (B, L))) % V
    noisy = torch.where(kind < 1 / 3, MASK_ID, torch.where(kind < 2 / 3, targets.clamp(min=0), other))
    return {
        "target_ids": targets,
        "noise_mask": noisy != targets,
        "p_mask": (torch.rand(B, 1) * 0.8 + 0.1).expand(B, L).contiguous(),
        "loss_mask": _mask(B, L, 0.8).long(),
        "noisy_input_ids": noisy,
    }


def _counted_scdd(B: int, L: int, V: int) -> Inputs:
    return _scdd(B, L, V) | {"num_diffusion_tokens": torch.tensor(max(1, B * L - 2))}


def _encoder(B: int, L: int, V: int) -> Inputs:
    return {"input_ids": torch.randint(0, V, (B, L)), "valid_mask": _mask(B, L, 0.8)}


def _statistics(B: int, L: int, V: int) -> Inputs:
    ids = torch.stack([_targets(B, L, V) for _ in range(2)], -1)
    a, b = 10 ** (-3 * torch.rand(B, L)) * _mask(B, L, 0.8), torch.rand(B, L) + 0.1
    return {"ids": ids, "a": a, "b": b, "weights": torch.randn(B, L) * _mask(B, L)}


def _one_number(out):
    """A row's statistics, each with a weight of its own, but for the logsumexp, which a shift of the row shifts."""
    ids = torch.tensor([1.0, -0.7], dtype=out.lse.dtype, device=out.lse.device)
    return out.log_probs @ ids - 1.3 * out.entropy + 0.1 * out.mix


def _row_stats(x, i, **options):
    out = ops.row_stats(x, i["ids"], entropy=True, mix=(i["a"], i["b"]), active=i["weights"], **options)
    return _one_number(out)


def _linear_row_stats(h, w, b, i, **options):
    mix = (i["a"], i["b"])
    out = ops.linear_row_stats(h, w, i["ids"], bias=b, entropy=True, mix=mix, active=i["weights"], **options)
    return _one_number(out)


def _statistics_oracle(x, i):
    return _one_number(reference.row_stats(x, i["ids"], (i["a"], i["b"]), i["weights"] != 0))


def _token_nll(x, i, **options):
    return ops.token_nll(x, i["targets"], active=i["weights"], **options).nll


def _linear_token_nll(h, w, b, i, **options):
    return ops.linear_token_nll(h, w, i["targets"], bias=b, active=i["weights"], **options).nll


def _token_oracle(x, i):
    return reference.token_nll(x, i["targets"], active=i["weights"] != 0)


def _weighted_nll(x, i, **options):
    return ops.weighted_nll(x, i["targets"], i["weights"], **options).loss


def _weighted_linear_nll(h, w, b, i, **options):
    return ops.weighted_linear_nll(h, w, i["targets"], i["weights"], bias=b, **options).loss


def _weighted_oracle(x, i):
    return reference.weighted_nll(x, i["targets"], i["weights"])


def _mdlm(x, i, fp32_upcast=True, **options):
    return ours.MDLMCrossEntropyLoss(fp32_upcast, **options)(x, **i).total_loss


def _mdlm_hidden(h, w, b, i, chunk_size=None, fp32_upcast=True, **options):
    loss = ours.MDLMCrossEntropyLoss(fp32_upcast, **options)
    return loss.forward_fused(h, w, **i, lm_head_bias=b, chunk_size=chunk_size).total_loss


def _block(x, i, fp32_upcast=True, **options):
    return ours.BlockDiffusionCrossEntropyLoss(fp32_upcast, **options)(x, **i).total_loss


def _block_hidden(h, w, b, i, chunk_size=None, fp32_upcast=True, **options):
    loss = ours.BlockDiffusionCrossEntropyLoss(fp32_upcast, **options)
    return loss.forward_fused(h, w, **i, lm_head_bias=b, chunk_size=chunk_size).total_loss


def _block_oracle(x, i, **options):
    used = {name: i[name] for name in ("target_ids", "loss_mask", "num_diffusion_tokens") if name in i}
    return reference.block_diffusion_loss(x, **used, **options)


ALPHA = 0.3


def _halves(x: torch.Tensor, i: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    L = i["target_ids"].shape[1]
    return x[:, :L], x[:, L:]


def _hybrid_separate(x, i, fp32_upcast=True, **options):
    logits, causal = _halves(x, i)
    return ours.HybridDiffusionLLMLoss(ALPHA, fp32_upcast, **options)(logits, **i, causal_logits=causal).total_loss


def _hybrid_separate_hidden(h, w, b, i, chunk_size=None, fp32_upcast=True, **options):
    hidden, causal = _halves(h, i)
    loss = ours.HybridDiffusionLLMLoss(ALPHA, fp32_upcast, **options)
    out = loss.forward_fused(hidden, w, **i, causal_hidden=causal, lm_head_bias=b, chunk_size=chunk_size)
    return out.total_loss


def _hybrid_legacy(x, i, fp32_upcast=True, **options):
    return ours.HybridDiffusionLLMLoss(ALPHA, fp32_upcast, **options)(x, **i).total_loss


def _hybrid_legacy_hidden(h, w, b, i, chunk_size=None, fp32_upcast=True, **options):
    loss = ours.HybridDiffusionLLMLoss(ALPHA, fp32_upcast, **options)
    return loss.forward_fused(h, w, **i, lm_head_bias=b, chunk_size=chunk_size).total_loss


def _hybrid_oracle(x, i, **options):
    return reference.hybrid_loss(x, **i, alpha=ALPHA, **options).total_loss


def _dflash_forms(**settings: Any) -> tuple[Callable[..., torch.Tensor], ...]:
    block_size = settings.pop("block_size", None)
    gamma, normalize = settings.get("loss_gamma", 7.0), settings.get("normalize", "tokens")

    def logits_form(x, i, **options):
        return ours.DFlashDecayLoss(**settings, **options)(x, **i, block_size=block_size).total_loss

    def hidden_form(h, w, b, i, chunk_size=1024, **options):
        loss = ours.DFlashDecayLoss(**settings, chunk_size=chunk_size, **options)
        return loss.forward_fused(h, w, **i, block_size=block_size, lm_head_bias=b).total_loss

    def oracle(x, i):
        return reference.dflash_loss(x, **i, block_size=block_size, gamma=gamma, normalize=normalize)

    return logits_form, hidden_form, oracle


def _idlm_forms(**settings: Any) -> tuple[Callable[..., torch.Tensor], ...]:
    def logits_form(x, i, **options):
        return ours.IDLMLoss(**settings, **options)(x, **i, seq_len=i["target_ids"].shape[1]).total_loss

    def hidden_form(h, w, b, i, chunk_size=None, **options):
        loss, L = ours.IDLMLoss(**settings, **options), i["target_ids"].shape[1]
        return loss.forward_fused(h, w, **i, seq_len=L, lm_head_bias=b, chunk_size=chunk_size).total_loss

    def oracle(x, i):
        return reference.idlm_loss(x, **i, **settings).total_loss

    return logits_form, hidden_form, oracle


def _scdd_forms(**settings: Any) -> tuple[Callable[..., torch.Tensor], ...]:
    """In few steps, since the loss is a difference of numbers that are nearer to each other the more there are."""
    settings = {"mask_token_id": MASK_ID, "num_timesteps": 5, **settings}

    def logits_form(x, i, **options):
        return ours.SCDDLoss(**settings, **options)(x, **i).total_loss

    def hidden_form(h, w, b, i, chunk_size=None, **options):
        loss = ours.SCDDLoss(**settings, chunk_size=chunk_size, **options)
        return loss.forward_fused(h, w, **i, lm_head_bias=b).total_loss

    def oracle(x, i):
        return reference.scdd_loss(x, **{name: t for name, t in i.items() if name != "noise_mask"}, **settings)

    return logits_form, hidden_form, oracle


def _encoder_ar(x, i, **options):
    return ours.encoder_ar_loss(x, **i, **options)


def _encoder_ar_hidden(h, w, b, i, **options):
    return ours.encoder_ar_loss_fused(h, w, **i, lm_head_bias=b, **options)


def _encoder_oracle(x, i):
    return reference.encoder_ar_loss(x, **i)


def _mdlm_oracle(x, i, **options):
    return reference.mdlm_loss(x, **i, **options)


SKIP_ID = 1


def _transformed(case: Case, **transform: Any) -> Case:
    """The same of transformed logits. No target is the skipped column, whose NLL would be NaN."""
    skip_id = transform.get("skip_id", -1)

    def draw(B, L, V):
        inputs = case.draw(B, L, V)
        ids = next(name for name in ("targets", "target_ids", "input_ids") if name in inputs)
        return inputs | {ids: torch.where(inputs[ids] == skip_id, (skip_id + 1) % V, inputs[ids])}

    def logits_form(x, i, **options):
        return case.logits_form(x, i, **transform, **options)

    def hidden_form(h, w, b, i, **options):
        return case.hidden_form(h, w, b, i, **transform, **options)

    def oracle(x, i):
        return case.oracle(reference.transformed(x, **transform), i)

    return case._replace(
        name=f"{case.name}, {' '.join(transform)}", draw=draw, logits_form=logits_form, hidden_form=hidden_form,
        oracle=oracle, rounds=False, transform=transform,
    )  # fmt: skip


PLAIN = (
    Case("token_nll", _rows, _token_nll, _linear_token_nll, _token_oracle, per_row=True),
    Case("row_stats", _statistics, _row_stats, _linear_row_stats, _statistics_oracle, per_row=True),
    Case("weighted_nll", _rows, _weighted_nll, _weighted_linear_nll, _weighted_oracle, linear_in="weights"),
    Case("mdlm", _diffusion, _mdlm, _mdlm_hidden, _mdlm_oracle, rounds=True),
    Case("mdlm, counted", _counted_diffusion, _mdlm, _mdlm_hidden, _mdlm_oracle, rounds=True),
    Case("block diffusion", _diffusion, _block, _block_hidden, _block_oracle, rounds=True),
    Case("block diffusion, counted", _counted_diffusion, _block, _block_hidden, _block_oracle, rounds=True),
    Case("hybrid", _hybrid, _hybrid_separate, _hybrid_separate_hidden, _hybrid_oracle, width=2, rounds=True),
    Case("hybrid, one tensor", _hybrid, _hybrid_legacy, _hybrid_legacy_hidden, _hybrid_oracle, width=2, rounds=True),
    Case("dflash", _dflash, *_dflash_forms(block_size=BLOCK), linear_in="block_mask"),
    Case("dflash, mean", _dflash, *_dflash_forms(block_size=BLOCK, normalize="mean", loss_gamma=2.0)),
    Case("dflash, one block", _dflash, *_dflash_forms(), linear_in="block_mask"),
    Case("dflash, no decay", _dflash, *_dflash_forms(block_size=BLOCK, loss_gamma=None), linear_in="block_mask"),
    Case("idlm", _idlm, *_idlm_forms(), width=2),
    Case("idlm, counted", _counted_idlm, *_idlm_forms(clean_loss_weight=0.7), width=2),
    Case("idlm, balanced", _idlm, *_idlm_forms(auto_balance=True), width=2),
    Case("scdd", _scdd, *_scdd_forms(max_ratio=0.4)),
    Case("scdd, counted", _counted_scdd, *_scdd_forms(gamma_shape=2.0, t_peak=0.3)),
    Case("scdd, no uniform noise", _counted_scdd, *_scdd_forms(max_ratio=0.0)),
    Case("encoder AR", _encoder, _encoder_ar, _encoder_ar_hidden, _encoder_oracle),
)
TRANSFORMS = {
    "token_nll": {"softcap": 4.0, "scale": 1.7, "skip_id": SKIP_ID},
    "weighted_nll": {"softcap": 3.0},
    "mdlm, counted": {"scale": 1 / 0.7, "skip_id": SKIP_ID},
    "block diffusion": {"softcap": 30.0},
    "hybrid": {"softcap": 2.5, "skip_id": SKIP_ID},
    "hybrid, one tensor": {"scale": 0.6},
    "dflash": {"softcap": 5.0, "scale": 0.8, "skip_id": SKIP_ID},
    "idlm": {"softcap": 4.0, "skip_id": SKIP_ID},
    "idlm, balanced": {"scale": 1.2},
    "scdd, counted": {"softcap": 5.0, "scale": 0.8},
    "encoder AR": {"softcap": 4.0, "scale": 1.3},
}
CASES = (*PLAIN, *(_transformed(case, **TRANSFORMS[case.name]) for case in PLAIN if case.name in TRANSFORMS))
LOSSES = tuple(case for case in CASES if not case.per_row)
# Where a case takes seconds, in several processes and under a compiler: the losses, and two ways in for transformed logits.
TRANSFORMED = ("token_nll, softcap scale skip_id", "mdlm, counted, scale skip_id")
VARIANTS = ("idlm, counted", "scdd", "scdd, no uniform noise")  # which differ in numbers only
FEWER = tuple(
    case for case in CASES if case.name in TRANSFORMED or (case.transform is None and case.name not in VARIANTS)
)
BY_NAME = {case.name: case for case in CASES}


def to_device(inputs: Inputs, device: str) -> Inputs:
    """The same inputs on another device."""
    return {name: t.to(device) for name, t in inputs.items()}


def upstream_for(case: Case, B: int, L: int) -> torch.Tensor:
    """A random upstream gradient: one number a row, some of them zero, or one for the loss."""
    if not case.per_row:
        return torch.randn(())
    return torch.randn(B, L) * (torch.rand(B, L) < 0.8)
