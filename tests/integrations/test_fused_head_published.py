"""Kernels and losses that others publish, on deferred logits: the value and all gradients of the loop without them."""

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dllm_kernels import fused_head
from tests.conftest import every_time
from tests.support import trainers

B, L, V, D = 2, 5, 11, 6
IDS = torch.arange(B * L).mul(7).add(2).remainder(V).view(B, L)
MASK = torch.arange(B * L).remainder(3).view(B, L) > 0


class Model(nn.Module):
    def __init__(self, head="trained", dtype=torch.float32):
        super().__init__()
        self.body, self.lm_head = nn.Embedding(V, D), nn.Linear(D, V, bias=head == "bias")
        self.d2t = torch.arange(V)
        if head == "tied":
            self.lm_head.weight = self.body.weight
        self.lm_head.requires_grad_(head != "frozen")
        self.to(dtype)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.body(ids)))


def results(loss, head, fused, dtype=torch.float32):
    """Return losses and gradients of two steps of a loop ``loss(model)``, a loss or a tuple that begins with it."""
    torch.manual_seed(0)
    model = Model(head, dtype)
    optimizer, seen = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5), []
    with fused_head(model, on_logits="allow") if fused else contextlib.nullcontext():
        for _ in range(2):
            found = loss(model)
            found = found if isinstance(found, tuple) else (found,)
            found[0].backward()
            seen += [torch.as_tensor(t).detach().clone() for t in found]
            seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    return seen


@pytest.fixture(params=every_time(["trained"], ["trained", "frozen", "bias", "tied"]))
def agrees(request):
    """Compare a loop with and without the context."""

    def compare(loss, dtype=torch.float32):
        plain, fused = (results(loss, request.param, way, dtype) for way in (False, True))
        assert any(t.abs().max() > 1e-3 for t in plain[1:])
        torch.testing.assert_close(fused, plain, atol=2e-6, rtol=2e-5)

    return compare


def constant(*shape):
    return torch.arange(torch.Size(shape).numel()).mul(0.7).sin().view(shape)


# trl ------------------------------------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize("masked", [False, True])
def test_logprob_kernel_of_trl(agrees, masked):
    with trainers.loaded(trainers.TRL, "kernels.logprob_entropy") as modules:
        both = modules.logprob_entropy.selective_log_softmax_and_entropy

        def grpo(model):
            logits = model(IDS)[:, :-1]
            logp, entropy = both(logits, IDS[:, 1:], 0.9, MASK[:, 1:] if masked else None)
            old = both(logits.detach(), IDS[:, 1:], 0.9)[0]
            keep = MASK[:, 1:]
            ratio = torch.exp(torch.where(keep, logp - old, 0.0))
            loss = -(torch.min(ratio * 1.3, ratio.clamp(0.8, 1.2)) * keep).sum() / keep.sum()
            return loss - 0.1 * torch.where(keep, entropy, 0.0).sum(), ratio

        agrees(grpo)


# SpecForge ------------------------------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize("lk_loss_type", [None, "alpha", "lambda"])
def test_eagle3_step_of_specforge(agrees, lk_loss_type, monkeypatch):
    """Its kernel writes the gradient into the logits; three steps of the unrolled loop, one backward."""
    for name in "transformers", "transformers.cache_utils":  # of which it needs one name, and which imports for seconds
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(DynamicCache=None))
    with trainers.loaded(trainers.SPECFORGE, "algorithms.eagle3.model") as modules:
        target = constant(B, L, V).softmax(-1)

        def unrolled(model):
            trained = modules.model.OnlineEagle3Model(model, lk_loss_type=lk_loss_type)
            losses, rates = [], []
            ids = IDS
            for step in range(3):
                logits = model(ids)
                acc, rate, loss, *_ = trained._acc_and_loss(
                    logits=logits,
                    target_p=target,
                    target_p_on_draft=target * 0.9,
                    target_token_ids=IDS,
                    position_mask=MASK[..., None],
                    loss_mask=MASK[..., None].float(),
                    adapter=modules.model.SdpaLikeAdapter(trained),
                )
                losses.append(0.8**step * loss)
                rates += [acc, rate]
                ids = ids.roll(1, 1)
            return torch.stack(losses).sum() / 3, *rates

        agrees(unrolled)


@pytest.mark.peer
def test_kernel_of_specforge_beside_a_fused_loss(agrees):
    """The gradient of the fused loss does not depend on the logits that the kernel overwrites."""
    with trainers.loaded(trainers.SPECFORGE, "core.loss") as modules:
        target = constant(B, L, V).softmax(-1)

        def both(model):
            logits = model(IDS)
            loss = modules.loss.LogSoftmaxLoss.apply(logits.float(), target, MASK[..., None])
            return loss + F.cross_entropy(model(IDS).view(-1, V), IDS.view(-1)) + logits[MASK].logsumexp(-1).mean()

        agrees(both)


# speculators ----------------------------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["kl_div", "reverse_kl_div", "js_div", "ce", "tv", "nla", "lk_hybrid"])
def test_fused_losses_of_speculators(agrees, kind):
    with trainers.loaded(trainers.SPECULATORS, "losses.fused") as modules:
        loss = getattr(modules.fused, f"fused_{kind}_loss")
        targets = 2 * constant(B, L, V)
        agrees(lambda model: (loss(model(IDS)[:, :-1], targets[:, 1:]) * MASK[:, 1:]).sum() / MASK.sum())


# Liger ----------------------------------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cross_entropy_of_liger(agrees, reduction):
    """It writes the gradient into the logits in its forward."""
    with trainers.loaded(trainers.LIGER, "ops.cross_entropy") as modules:
        apply = modules.cross_entropy.LigerCrossEntropyFunction.apply

        def loop(model):
            logits = model(IDS)
            labels = IDS.masked_fill(~MASK, -100)
            arguments = None, -100, 1e-4, 0.1, reduction, None, True  # z-loss, smoothing
            loss, z_loss, *_ = apply(logits.view(-1, V), labels.view(-1), *arguments)
            return loss.sum() / 2, z_loss

        agrees(loop)


# flash-attn -----------------------------------------------------------------------------------------------------------


class FlashCrossEntropy(torch.autograd.Function):
    """``flash_attn.ops.triton.cross_entropy.CrossEntropyLoss`` 2.8.3 with torch in place of its kernels."""

    @staticmethod
    def forward(ctx, logits, labels, ignore_index=-100, inplace_backward=False):
        lse = logits.float().logsumexp(-1)
        losses = lse - logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0].float()
        losses.masked_fill_(labels == ignore_index, 0.0)
        z_losses = torch.zeros_like(losses)
        ctx.save_for_backward(logits, lse, labels)
        ctx.mark_non_differentiable(z_losses)
        ctx.ignore_index, ctx.inplace_backward = ignore_index, inplace_backward
        return losses, z_losses

    @staticmethod
    def backward(ctx, grad_losses, grad_z_losses):
        del grad_z_losses
        logits, lse, labels = ctx.saved_tensors
        dlogits = logits if ctx.inplace_backward else torch.empty_like(logits)
        grad = (logits.float() - lse[:, None]).exp() - F.one_hot(labels.clamp(min=0), logits.shape[-1])
        grad = grad * (grad_losses * (labels != ctx.ignore_index))[:, None]
        dlogits.data.copy_(grad)  # a kernel leaves the version as it is
        return dlogits, None, None, None


def smdm(cross_entropy):
    """The step of SMDM: rows of the mask, divided by their level."""

    def loop(model):
        logits = model(IDS)
        p_mask = torch.linspace(0.3, 0.9, B * L).view(B, L)
        loss = cross_entropy(logits[MASK], IDS[MASK]) / p_mask[MASK]
        return loss.sum() / IDS.numel()

    return loop


def diffullama(cross_entropy):
    """The step of DiffuLLaMA: all rows of the shifted logits, weighted afterwards."""

    def loop(model):
        logits = model(IDS)[:, :-1].contiguous()
        loss = cross_entropy(logits.reshape(-1, V), IDS[:, 1:].reshape(-1)).view(B, L - 1)
        loss = loss.masked_fill(~MASK[:, 1:], 0) * torch.tensor([[1.5], [2.0]])
        return loss.sum() / MASK[:, 1:].sum()

    return loop


@pytest.mark.parametrize("loop", [smdm, diffullama])
@pytest.mark.parametrize("inplace", [False, True])
def test_function_like_that_of_flash_attn(agrees, loop, inplace):
    agrees(loop(lambda logits, labels: FlashCrossEntropy.apply(logits, labels, -100, inplace)[0]))


@pytest.mark.peer
@pytest.mark.parametrize("loop", [smdm, diffullama])
@pytest.mark.parametrize("inplace", [False, True])
def test_cross_entropy_of_flash_attn(agrees, loop, inplace, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    with trainers.loaded(trainers.FLASH_ATTN, "ops.triton.cross_entropy") as modules:
        apply = modules.cross_entropy.cross_entropy_loss
        agrees(loop(lambda logits, labels: apply(logits, labels, inplace_backward=inplace)[0]))


# Other code bases ----------------------------------------------------------------------------------------------------


def log_probs(model, ids=IDS):
    """TRL: selective_log_softmax, with the logsumexp row by row."""
    logits = model(ids)[:, :-1] / 0.9
    lse = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    return logits, logits.gather(-1, IDS[:, 1:, None]).squeeze(-1) - lse


def grpo_of_trl(model):
    """Entropies of all tokens under no_grad, to train on the most uncertain ones."""
    logits, new = log_probs(model)
    with torch.no_grad():
        entropies = []
        for chunk in logits.flatten(0, -2).split(3):
            logps = F.log_softmax(chunk, dim=-1)
            entropies.append(-(torch.exp(logps) * logps).sum(-1))
        certain = torch.cat(entropies).view(new.shape).neg().exp()
    ratio = torch.exp(new - new.detach())
    return -(torch.min(ratio, ratio.clamp(0.8, 1.2)) * certain * MASK[:, 1:]).sum() / MASK.sum()


def sft_of_trl(model):
    """The loss of the model, then entropy and accuracy as metrics."""
    logits, labels = model(IDS)[..., :-1, :].contiguous(), IDS[:, 1:].masked_fill(~MASK[:, 1:], -100)
    loss = F.cross_entropy(logits.float().view(-1, V), labels.reshape(-1), ignore_index=-100)
    with torch.no_grad():
        probs = logits.softmax(-1)
        entropy = torch.logsumexp(logits, -1) - (probs * logits).sum(-1)
        return loss, (logits.argmax(-1) == labels).sum(), entropy[labels != -100].mean()


def dft_of_trl(model):
    _, new = log_probs(model)
    return -(new.exp().detach() * new * MASK[:, 1:]).sum() / MASK[:, 1:].sum()


def orpo_of_trl(model):
    logits, new = log_probs(model)
    chosen, rejected = (new * MASK[:, 1:]).sum(-1) / MASK[:, 1:].sum(-1)
    odds = chosen - rejected - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return nn.CrossEntropyLoss()(logits[0], IDS[0, 1:]) - 0.1 * F.logsigmoid(odds)


def coupled_grpo_of_diffucoder(model):
    both = torch.cat([IDS.masked_fill(MASK, V - 1), IDS.masked_fill(~MASK, V - 1)])
    logits = model(both)
    logits = torch.cat([logits[:, :1], logits[:, :-1]], dim=1)
    new = (logits.gather(-1, IDS.repeat(2, 1)[..., None]).squeeze(-1) - logits.logsumexp(-1)).view(2, B, L)
    new = (new * torch.stack([MASK, ~MASK])).sum(0)
    return -torch.exp(new - new.detach()).clamp(0.8, 1.2).mean()


def spg(model):
    new = model(IDS.masked_fill(MASK, V - 1)).log_softmax(-1).gather(-1, IDS[..., None]).squeeze(-1)
    eubo = (MASK * (1.5 * new).exp()).mean(1).log() / 1.5
    return (0.5 * eubo - 0.5 * (new * MASK).mean(1)).mean()


def d3llm(model):
    logits = model(IDS)
    entropy = torch.distributions.Categorical(logits=logits[MASK]).entropy()
    sure = logits[MASK].argmax(-1) == IDS[MASK]
    return F.cross_entropy(logits[MASK], IDS[MASK]) + (entropy * sure).mean() + 0.0 * logits.sum()


@pytest.mark.parametrize(
    "loop",
    [grpo_of_trl, sft_of_trl, dft_of_trl, orpo_of_trl, coupled_grpo_of_diffucoder, spg, d3llm],
    ids=lambda loop: loop.__name__,
)  # fmt: skip
def test_a_loop_needs_no_logits(agrees, loop):
    agrees(loop)
    with fused_head(model := Model("bias"), on_logits="raise"):
        loop(model)
