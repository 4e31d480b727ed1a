"""Names of other code bases give the results of the originals' formulas, in value and gradient."""

import importlib.util

import pytest
import torch
from torch.nn import functional as F

from dllm_kernels import fused_head
from dllm_kernels.integrations import names
from tests.conftest import DEVICE

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


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("with_bias", "with_p"), [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize("scale", [1.0, 0.6])
@pytest.mark.parametrize("flat", [False, True])
def test_the_diffusion_cross_entropy(reduction, with_bias, with_p, scale, flat):
    """Rows that are ignored may have p = 0."""
    x, weight, bias, target = rows()
    target[0, :3] = -1
    p = torch.rand(B, L, dtype=torch.float64, device=DEVICE) * 0.9 + 0.1
    p[0, :3] = 0
    bias = bias if with_bias else None
    leaves = [t for t in (x, weight, bias) if t is not None]
    nll = F.cross_entropy(
        scale * F.linear(x, weight, bias).flatten(0, 1), target.flatten(), ignore_index=-1, reduction="none"
    )
    kept = target.flatten() != -1
    theirs = (nll[kept] / (p.flatten()[kept] if with_p else 1)).sum() / (kept.sum() if reduction == "mean" else 1)
    loss = names.FusedLinearDiffusionCrossEntropyLoss(-1, logit_scale=scale, num_chunks=4, reduction=reduction)
    given = (x.flatten(0, 1), target.flatten(), p.flatten()) if flat else (x, target, p)
    ours = loss(given[0], given[1], weight, bias, given[2] if with_p else None)
    assert_same([ours], [theirs], leaves)


def test_no_masked_token():
    """The loss is 0, with zero gradients."""
    x, weight, _, target = rows()
    for reduction in ("mean", "sum"):
        loss = names.FusedLinearDiffusionCrossEntropyLoss(reduction=reduction)
        value = loss(x, torch.full_like(target, -100), weight, p_mask=torch.zeros(B, L, device=DEVICE))
        assert value == 0
        assert not any(g.any() for g in torch.autograd.grad(value, [x, weight]))


def ppo(x, weight, ids, temperature):
    """Compute the formula of verl: log-probabilities and entropies in float32."""
    logits = (x @ weight.t() / temperature).double()
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, ids[..., None])[..., 0], logits.logsumexp(-1) - (log_p.exp() * logits).sum(-1)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_linear_cross_entropy_of_verl(frozen, temperature, reduction):
    x, weight, _, ids = rows(frozen=frozen)
    log_probs, entropy = (t.flatten() for t in ppo(x, weight, ids, temperature))
    log_probs = log_probs if reduction == "none" else getattr(log_probs, reduction)()
    ours = names.linear_cross_entropy(x, weight, ids, temperature, reduction)
    assert [t.shape for t in ours] == [log_probs.shape, (B * L,)]
    assert_same(ours, [log_probs, entropy], [x, weight])


@pytest.mark.parametrize("backend", ["torch", "liger"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_head_of_verl_for_ppo(backend, dtype):
    x, weight, _, ids = rows(dtype)
    ours = names.FusedLinearForPPO(chunk_size=3, impl_backend=backend)(x, weight, ids.int(), temperature=0.7)
    assert [t.shape for t in ours] == [(B, L)] * 2
    assert ours[1].dtype == dtype
    if dtype == torch.bfloat16:
        assert ours[0].dtype == torch.float32
        exact = ppo(x.double(), weight.double(), ids, 0.7)
        torch.testing.assert_close([t.double() for t in ours], list(exact), rtol=0.05, atol=0.05)
    else:
        assert_same(ours, ppo(x, weight, ids, 0.7), [x, weight])


def test_the_entropy_of_tokens():
    logits = (3 * torch.randn(B, L, V, dtype=torch.float64, device=DEVICE)).requires_grad_()
    log_p = logits.log_softmax(-1)
    assert_same([names.token_entropy(logits)], [-(log_p.exp() * log_p).sum(-1)], [logits])
    assert names.token_entropy(logits[0, 0].float()).shape == ()


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
        ours.append(names.masked_soft_cross_entropy(head(x), q, mask))
        assert fused.materialized == 1
    logits = F.linear(x, head.weight)
    log_p = logits.log_softmax(-1)
    assert_same(ours, [-(log_p.exp() * log_p).sum(-1), soft_ce(logits, q, mask)], [x, head.weight])


def test_the_soft_cross_entropy_of_16_bit_logits():
    logits, q = torch.randn(B, L, V).bfloat16().requires_grad_(), torch.randn(B, L, V).softmax(-1)
    ours = names.masked_soft_cross_entropy(logits, q, torch.ones(B, L, 1))
    torch.testing.assert_close(ours, soft_ce(logits.float(), q, torch.ones(B, L, 1)))
    ours.backward()
    assert logits.grad.dtype == torch.bfloat16


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
    "device": (ValueError, "target_probs must be on .* like logits, got meta", lambda x, w, ids: (
        names.masked_soft_cross_entropy(x, x.detach().to("meta"), torch.ones(B, L, 1)))),
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
