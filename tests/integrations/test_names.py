"""Names of other code bases give the results of the originals' formulas, in value and gradient."""

import contextlib
import importlib.util

import pytest
import torch
import torch.utils.checkpoint
from torch.nn import functional as F

from dllm_kernels import fused_head
from dllm_kernels.integrations import names
from tests.conftest import DEVICE
from tests.support.pairs import pairs, surrounding

B, L, D, V = 2, 7, 6, 19


def rows(dtype=torch.float64, seed=0, frozen=False):
    g = torch.Generator().manual_seed(seed)
    x, weight, bias = (torch.randn(*shape, generator=g, dtype=dtype) for shape in ((B, L, D), (V, D), (V,)))
    ids = torch.randint(0, V, (B, L), generator=g)
    x, weight, bias, ids = (t.to(DEVICE) for t in (x, weight, bias, ids))
    return x.requires_grad_(), weight.requires_grad_(not frozen), bias.requires_grad_(not frozen), ids


def assert_same(ours, theirs, leaves):
    """Compare values, and the gradients of a weighted sum of them."""
    leaves = [t for t in leaves if t.requires_grad]
    found = []
    for values in (ours, theirs):
        upstream = [torch.linspace(-1, 2, v.numel(), dtype=v.dtype, device=v.device).view(v.shape) for v in values]
        total = sum((u * v).sum().double() for u, v in zip(upstream, values, strict=True))
        found.append([*values, *torch.autograd.grad(total, leaves)])
    for o, t in zip(*found, strict=True):
        torch.testing.assert_close(o, t, check_dtype=False)


def soft_ce(logits, target_probs, position_mask):
    per_token = -(target_probs * logits.log_softmax(-1)).sum(-1)
    valid = position_mask.squeeze(-1).to(per_token.dtype)
    return (per_token * valid).sum() / valid.sum().clamp_min(1.0)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.int64])
@pytest.mark.parametrize("share", [1.0, 0.4, 0.0])
def test_the_soft_cross_entropy(mask_dtype, share):
    """The targets of a draft vocabulary have a share of the mass, and some are 0."""
    logits = (2 * torch.randn(B, L, V, dtype=torch.float64, device=DEVICE)).requires_grad_()
    q = torch.randn(B, L, V, dtype=torch.float64, device=DEVICE)
    q = q.index_fill(-1, torch.arange(3, device=DEVICE), -torch.inf).softmax(-1) * share
    mask = (torch.rand(B, L, 1, device=DEVICE) < 0.6).to(mask_dtype)
    assert_same([names.masked_soft_cross_entropy(logits, q, mask)], [soft_ce(logits, q, mask)], [logits])
    none = names.masked_soft_cross_entropy(logits, q, torch.zeros_like(mask))
    assert none == 0
    q = q.masked_fill(mask == 0, torch.nan)
    assert names.masked_soft_cross_entropy(logits, q, mask).isfinite()


def test_the_logits_of_a_fused_head():
    """The entropy needs no logits; the cross-entropy against probabilities does."""
    x, weight, _, _ = rows()
    head = torch.nn.Linear(D, V, bias=False, device=DEVICE, dtype=torch.float64)
    head.weight = torch.nn.Parameter(weight.detach())
    q = torch.randn(B, L, V, dtype=torch.float64, device=DEVICE).softmax(-1)
    mask = torch.rand(B, L, 1, device=DEVICE) < 0.6
    with fused_head(head, head=head, on_logits="allow") as fused:
        ours = [names.token_entropy(head(x))]
        assert fused.materialized == 0
        assert names.token_entropy(head(x)[0, 0]).shape == ()
        ours.append(names.masked_soft_cross_entropy(head(x), q, mask))
        assert fused.materialized == 1
    logits = F.linear(x, head.weight)
    log_p = logits.log_softmax(-1)
    assert_same(ours, [-(log_p.exp() * log_p).sum(-1), soft_ce(logits, q, mask)], [x, head.weight])


@pytest.mark.peer
@pytest.mark.skipif(importlib.util.find_spec("nemo_automodel") is None, reason="nemo_automodel is not installed")
def test_names_of_the_installed_host():
    from nemo_automodel.components.loss.soft_ce import masked_soft_cross_entropy

    logits, q, mask = torch.randn(B, L, V), torch.randn(B, L, V).softmax(-1), torch.rand(B, L, 1) < 0.5
    torch.testing.assert_close(
        names.masked_soft_cross_entropy(logits, q, mask), masked_soft_cross_entropy(logits, q, mask)
    )


def test_the_scaling_factor_of_mtp():
    model = torch.nn.Linear(1, 1)
    assert names.get_mtp_loss_scaling_factor(model) == 0.1
    assert names.get_mtp_loss_scaling_factor(model, 0.3) == 0.3
    model.mtp_config = type("Config", (), {"loss_scaling_factor": 0.7})()
    assert names.get_mtp_loss_scaling_factor(model, default=0.3) == 0.7


BAD = {
    "reduction": (ValueError, "reduction must be one of mean, sum, got 'none'", lambda x, w, ids: (
        names.FusedLinearDiffusionCrossEntropyLoss(reduction="none"))),
    "chunks": (ValueError, "num_chunks must be at least 1, got 0", lambda x, w, ids: (
        names.FusedLinearDiffusionCrossEntropyLoss(num_chunks=0))),
    "p": (ValueError, r"p_mask must have shape \(2, 7\) \(that of target\), got ", lambda x, w, ids: (
        names.FusedLinearDiffusionCrossEntropyLoss()(x, ids, w, p_mask=torch.ones(B)))),
    "reduction of verl": (ValueError, "reduction must be one of none, sum, mean, got 'max'", lambda x, w, ids: (
        names.linear_cross_entropy(x, w, ids, 1.0, "max"))),
    "rows of a chunk": (ValueError, "chunk_size must be at least 1, got 0", lambda x, w, ids: (
        names.FusedLinearForPPO(chunk_size=0))),
    "group": (ValueError, "dist_process_group must be None, got str; pass DTensors", lambda x, w, ids: (
        names.linear_cross_entropy(x, w, ids, 1.0, "none", "group"))),
    "backend": (ValueError, "impl_backend must be one of torch, liger, got 'cute'", lambda x, w, ids: (
        names.FusedLinearForPPO(impl_backend="cute"))),
    "mask": (ValueError, r"position_mask must have shape \(2, 7, 1\)", lambda x, w, ids: (
        names.masked_soft_cross_entropy(x, x.detach(), torch.ones(B, L)))),
    "constant": (ValueError, "target_probs ", lambda x, w, ids: (
        names.masked_soft_cross_entropy(x, x, torch.ones(B, L, 1)))),
    "no head": (TypeError, r"weight must be a torch\.Tensor, got NoneType", lambda x, w, ids: (
        names.linear_cross_entropy(x, None, ids % D))),
    "ids": (IndexError, r"input_ids must lie in \[0, 19\) or be -100, got ", lambda x, w, ids: (
        names.FusedLinearForPPO()(x, w, ids + V))),
    "labels": (ValueError, r"labels must have shape \(2, 7\) \(that of hidden without", lambda x, w, ids: (
        names.linear_cross_entropy(x, w, ids[:, 1:]))),
    "head of another layout": (ValueError, r"x must have shape \[\.\.\., 19\] to go with weight", lambda x, w, ids: (
        names.FusedLinearDiffusionCrossEntropyLoss()(x, ids, w.T))),
    "probability": (ValueError, r"p_mask must lie in \[0, 1\] where it is used, got 1\.5 at position \(0, 0\)",
                    lambda x, w, ids: names.FusedLinearDiffusionCrossEntropyLoss()(
                        x, ids, w, None, torch.full(ids.shape, 1.5, device=DEVICE))),
    "negative probability": (ValueError, "target_probs must not be negative, got -1.0", lambda x, w, ids: (
        names.masked_soft_cross_entropy(x, -torch.ones_like(x), torch.ones(B, L, 1, device=DEVICE)))),
    "ignored index": (TypeError, "ignore_index must be an int, got float", lambda x, w, ids: (
        names.FusedLinearDiffusionCrossEntropyLoss(1.0))),
    "scale": (ValueError, "logit_scale must be positive, from .*, got 0.0", lambda x, w, ids: (
        names.FusedLinearDiffusionCrossEntropyLoss(logit_scale=0.0))),
    "list": (TypeError, r"logits must be a torch\.Tensor, got list", lambda x, w, ids: names.token_entropy([1.0])),
}  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), BAD.values(), ids=BAD)
def test_bad_arguments(error, message, call):
    x, weight, _, ids = rows()
    with pytest.raises(error, match=f"^{message}"):
        call(x, weight, ids)


def test_a_token_of_uint8_is_not_the_ignored_label():
    """-100 is 156 in uint8."""
    x, weight = torch.randn(B, D, device=DEVICE), torch.randn(200, D, device=DEVICE)
    target, loss = torch.tensor([156, 3], device=DEVICE), names.FusedLinearDiffusionCrossEntropyLoss()
    assert torch.equal(loss(x, target.to(torch.uint8), weight), loss(x, target, weight))


PAIRS = {
    "name": ["FusedLinearDiffusionCrossEntropyLoss", "linear_cross_entropy", "FusedLinearForPPO", "token_entropy",
             "masked_soft_cross_entropy"],
    "option": [None, "mean", "sum"],
    "scale": [1.0, 0.6, 2],
    "head": ["trained", "frozen", "with bias"],
    "dtype": [torch.float64, torch.float32, torch.bfloat16],
    "ids": [torch.int64, torch.int32, torch.uint8],
    "ignored": ["none", "some", "all of a row", "all"],
    "mask": [None, torch.float32, torch.bfloat16, torch.float64],
    "layout": ["batch", "flat", "strided", "no rows"],
    "around": ["nothing", "autocast", "default dtype", "checkpoint", "no_grad", "fused_head"],
}  # fmt: skip


def excluded(case):
    """Return True for values that no call takes together, or that are no reference."""
    name, ids = case.get("name", "token_entropy"), case.get("ids", torch.int64)
    if ids == torch.uint8 and case.get("ignored", "none") != "none" and name != "FusedLinearDiffusionCrossEntropyLoss":
        return True  # -100 does not fit
    return case.get("around") == "autocast" and case.get("dtype") == torch.float32


CASES = pairs(PAIRS, excluded)


def plain_loss(name, x, weight, bias, ids, p, option, scale, ignored):
    """Compute the results by their formulas, from logits of all rows."""
    z = F.linear(x, weight, bias).to(torch.promote_types(x.dtype, torch.float32))
    counted = ids.long() != ignored
    log_p = (z * scale if name.startswith("FusedLinearD") else z / scale if "token" not in name else z).log_softmax(-1)
    p = None if p is None else torch.where(counted, p, 1)
    of_ids = log_p.gather(-1, torch.where(counted, ids.long(), 0)[..., None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    if name == "token_entropy":
        return [entropy]
    if name == "FusedLinearDiffusionCrossEntropyLoss":
        total = -torch.where(counted, of_ids / (1 if p is None else p.to(of_ids.dtype)), 0.0).sum()
        return [total / (counted.sum().clamp(min=1) if option != "sum" else 1)]
    of_ids, entropy = (torch.where(counted, t, 0.0) for t in (of_ids, entropy))
    if name == "linear_cross_entropy":
        return [of_ids.flatten() if option is None else getattr(of_ids, option)(), entropy.flatten()]
    return [of_ids, entropy]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_pairs_of_features(number):
    chosen = CASES[number]
    name, dtype, flat = chosen["name"], chosen["dtype"], chosen["layout"] == "flat"
    g = torch.Generator().manual_seed(number)
    b = 0 if chosen["layout"] == "no rows" else B
    ignored = 255 if chosen["ids"] == torch.uint8 else -100
    x, weight, bias = (torch.randn(*shape, generator=g).to(DEVICE, dtype) for shape in ((b, L, D), (V, D), (V,)))
    ids, p = torch.randint(0, V, (b, L), generator=g), torch.rand(b, L, generator=g) * 0.9 + 0.1
    ids[:1, :3] = ignored if chosen["ignored"] == "some" else ids[:1, :3]
    ids[:1] = ignored if chosen["ignored"] == "all of a row" else ids[:1]
    ids[:] = ignored if chosen["ignored"] == "all" else ids
    p[ids == ignored] = 0
    ids, p = ids.to(DEVICE, chosen["ids"]), None if chosen["mask"] is None else p.to(DEVICE, chosen["mask"])
    if flat:
        x, ids, p = x.flatten(0, 1), ids.flatten(), None if p is None else p.flatten()
    if chosen["layout"] == "strided":
        x = torch.stack([x, x], -1)[..., 0]
    bias = bias if chosen["head"] == "with bias" else None
    option, scale = chosen["option"], chosen["scale"]
    q = torch.rand(*ids.shape, V, generator=g).to(DEVICE) / V

    def ours(x, weight, bias):
        head = torch.nn.Linear(D, V, bias=bias is not None, device=DEVICE, dtype=dtype)
        for key, t in (("weight", weight), ("bias", bias)):
            del head._parameters[key]
            setattr(head, key, t)
        if name == "FusedLinearDiffusionCrossEntropyLoss":
            loss = names.FusedLinearDiffusionCrossEntropyLoss(
                ignored, logit_scale=scale, num_chunks=2, reduction=option or "mean"
            )
            return [loss(x, ids, weight, bias, p)]
        if name in ("token_entropy", "masked_soft_cross_entropy"):
            fused = chosen["around"] == "fused_head"
            with fused_head(head, head=head, on_logits="allow") if fused else contextlib.nullcontext():
                if name == "token_entropy":
                    return [names.token_entropy(head(x))]
                mask = torch.ones(ids.shape, device=DEVICE) if p is None else p
                return [names.masked_soft_cross_entropy(head(x), q, mask[..., None])]
        if name == "linear_cross_entropy":
            return list(names.linear_cross_entropy(x, weight, ids, float(scale), option or "none"))
        return list(names.FusedLinearForPPO(3, ("torch", "liger")[number % 2])(x, weight, ids, float(scale)))

    def theirs(x, weight, bias):
        if name == "masked_soft_cross_entropy":
            mask = torch.ones(ids.shape, device=DEVICE) if p is None else p
            dtype = torch.promote_types(x.dtype, torch.float32)
            log_p, mask = F.linear(x, weight, bias).to(dtype).log_softmax(-1), mask.to(dtype)
            return [(mask * -(q.to(dtype) * log_p).sum(-1)).sum() / mask.sum().clamp(min=1)]
        return plain_loss(name, x, weight, bias, ids, p, option, scale, ignored)

    if name in ("linear_cross_entropy", "FusedLinearForPPO"):
        bias = None
    x.requires_grad_()
    for t in (weight, bias):
        if t is not None:
            t.requires_grad_(chosen["head"] != "frozen")
    leaves = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
    with surrounding(chosen["around"]):
        of_call = torch.utils.checkpoint.checkpoint if chosen["around"] == "checkpoint" else lambda f, *a, **_: f(*a)
        found = [of_call(ours, x, weight, bias, use_reentrant=False), theirs(x, weight, bias)]
    exact = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {}
    for got, same in zip(*found, strict=True):
        torch.testing.assert_close(got, same, check_dtype=False, equal_nan=True, **exact)
    if name == "FusedLinearForPPO" and chosen["around"] != "autocast":
        assert [t.dtype for t in found[0]] == [torch.promote_types(dtype, torch.float32), dtype]
    if chosen["around"] != "no_grad":
        upstream = [torch.linspace(-1, 2, t.numel(), device=DEVICE).view(t.shape) for t in found[0]]
        totals = [sum((u * t).sum() for u, t in zip(upstream, ts, strict=True)) for ts in found]
        grads = [torch.autograd.grad(total, leaves) for total in totals]
        for got, same in zip(*grads, strict=True):
            torch.testing.assert_close(got, same, **exact)
