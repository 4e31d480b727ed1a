"""Training loops from logits under ``fused_head``: values and gradients of the plain loop, without the logits.

The loops are those of published training code: LLaDA, dllm, Dream, Fast-dLLM, block diffusion beside clean tokens,
GRPO, DFlash drafts, and models whose forward computes the loss.
"""

import copy
import pickle
import threading
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import dllm_kernels
from dllm_kernels import fused_head
from tests.conftest import DEVICE
from tests.support.cases import CASES
from tests.support.parity import assert_parity

B, L, D, V = 2, 8, 6, 53
DRAFT = 4


class Model(nn.Module):
    """Embedding and head; ``cap``: soft cap of the logits."""

    def __init__(self, *, tied=False, bias=False, cap=None, dtype=torch.float32):
        super().__init__()
        self.body, self.lm_head, self.cap = nn.Embedding(V, D), nn.Linear(D, V, bias=bias), cap
        if tied:
            self.lm_head.weight = self.body.weight
        self.to(DEVICE, dtype)

    def forward(self, ids, labels=None):
        logits = self.lm_head(torch.tanh(self.body(ids)))
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        if labels is None:
            return logits
        return F.cross_entropy(logits.float()[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))


class Batch:
    """Clean and noisy tokens, masks and probabilities; ``dtype``: dtype that a loop casts its logits to."""

    dtype = torch.float32

    def __init__(self, seed=0, L=L):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, V - 1, (B, L), generator=g).to(DEVICE)
        p = torch.rand(B, 1, generator=g).mul(0.8).add(0.1).expand(B, L)
        masked = torch.rand(B, L, generator=g) < 0.5
        masked[:, 3] = True
        self.p, self.masked = p.to(DEVICE), masked.to(DEVICE)
        self.noisy = self.ids.masked_fill(self.masked, V - 1)
        self.old = torch.randn(B, L, generator=g).sub(4).to(DEVICE)
        self.advantages = torch.randn(B, 1, generator=g).to(DEVICE)


def llada(z, x):
    nll = F.cross_entropy(z[x.masked], x.ids[x.masked], reduction="none") / x.p[x.masked]
    return nll.sum() / x.ids.numel()


def dllm(z, x):
    nll = F.cross_entropy(z.transpose(1, 2), x.ids, reduction="none")
    return (nll * x.masked.to(nll.dtype) / x.p).sum() / x.masked.sum()


def dream(z, x):
    z = torch.cat([z[:, :1], z[:, :-1]], 1)
    nll = F.cross_entropy(z.reshape(-1, V).to(x.dtype), x.ids.reshape(-1), reduction="none")
    return (nll.view(B, L) * x.masked).mean()


def fast_dllm(z, x):
    labels = x.ids.masked_fill(~x.masked, -100)
    return nn.CrossEntropyLoss()(z[..., :-1, :].contiguous().view(-1, V), labels[:, 1:].contiguous().view(-1))


def half(z, x):
    noisy = z[:, : L // 2]
    nll = F.cross_entropy(noisy.permute(0, 2, 1), x.ids[:, : L // 2], reduction="none")
    weights = torch.where(x.masked, 1 / x.p, 0.0)[:, : L // 2]
    return (nll * weights).sum(1).div(x.masked.sum(1).clamp(min=1)).mean()


def selective_log_softmax(z, ids):
    chosen = torch.gather(z, -1, ids.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in z])


def grpo(z, x):
    new = selective_log_softmax(z / 0.7, x.ids)
    ratio = torch.exp(new - x.old)
    each = torch.min(ratio * x.advantages, ratio.clamp(0.8, 1.2) * x.advantages)
    return -((each * x.masked).sum(1) / x.masked.sum(1)).mean()


def grpo_by_rows(z, x):
    new = torch.stack(
        [F.log_softmax(a, -1).gather(-1, i.unsqueeze(-1)).squeeze(-1) for a, i in zip(z, x.ids, strict=True)]
    )
    return -(torch.exp(new - new.detach()) * x.advantages * x.masked).sum() / x.masked.sum()


def dflash(z, x):
    z = z.view(B, L // DRAFT, DRAFT, V)[:, :, 1:]
    ids = x.ids.view(B, L // DRAFT, DRAFT)[:, :, 1:]
    decay = torch.exp(-torch.arange(DRAFT - 1, device=z.device) / 4)
    nll = F.cross_entropy(z.flatten(0, 2), ids.flatten(), reduction="none").view_as(ids)
    return (nll * decay).sum() / decay.sum()


def log_probs(z, x):
    picked = z.log_softmax(-1, dtype=x.dtype).gather(-1, x.ids[..., None])
    return -(picked.squeeze(-1)[x.masked] / x.p[x.masked]).mean()


def nll_loss(z, x):
    return F.nll_loss(z.log_softmax(dim=-1).flatten(0, 1), x.ids.flatten(), ignore_index=3, reduction="sum")


def tempered(z, x):
    z = z / 0.5
    z = 3 * torch.tanh(2 * z / 3) / 0.7
    return F.cross_entropy(torch.stack(list(z)).movedim(-1, 1), x.ids, ignore_index=int(x.ids[0, 0]))


def diffullama(z, x):
    nll = F.cross_entropy(z[:, :-1].reshape(-1, V), x.ids[:, 1:].reshape(-1), reduction="none").view(B, -1)
    masked = x.masked[:, 1:]
    filled = nll.masked_fill(masked, -1.0)
    return (nll.masked_fill(~masked, 0) / x.p[:, :1]).sum() / masked.sum() + filled.sum()


def dreamon(z, x):
    nll = F.cross_entropy(z.transpose(1, 2), x.ids, reduction="none")
    nll = torch.where(x.masked, nll, torch.zeros_like(nll))
    rows = torch.einsum("bl,bl->b", [nll, 1 / x.p]).div(x.masked.sum(1))
    return rows.mean() + torch.einsum("bl->b", nll[:1]).sum()


def mdlm(z, x):
    """The "subs" parametrisation: MASK is never predicted, and other tokens are predicted as they are."""
    z[:, :, V - 1] += -1e6
    z = z - torch.logsumexp(z, dim=-1, keepdim=True)
    unmasked = x.noisy != V - 1
    z[unmasked] = -1e6
    z[unmasked, x.noisy[unmasked]] = 0
    return -(torch.gather(z, -1, x.ids[:, :, None]).squeeze(-1) / x.p).sum() / x.masked.sum()


def never_mask(z, x):
    z = z[:, :-1].float().to(x.dtype) / 0.9
    z[..., V - 1] = -torch.inf
    nll = F.cross_entropy(z.transpose(1, 2), x.ids[:, 1:], reduction="none")
    return (nll * x.masked[:, 1:]).sum() + z.logsumexp(-1).square().mean() + 0 * z.argmax(-1).sum()


def guidance(z, x):
    conditional, other = z.chunk(2)
    z = other + (1.5 + 1) * (conditional - other)
    nll = F.cross_entropy(z.transpose(1, 2), x.ids[:1], reduction="none")
    return (nll * x.masked[:1]).sum() - 0.1 * (-z).logsumexp(-1).mean()


def padded_vocabulary(z, x):
    z = z[..., : V - 2]
    return F.cross_entropy(z.flatten(0, 1), x.ids.clamp(max=V - 3).flatten()) + z[:, 1:].logsumexp(-1).mean()


def touched(z, x):
    nll = F.cross_entropy(z[x.masked], x.ids[x.masked])
    return nll + 0.0 * z.sum() + (z * 0).sum() + 1e-3 * z.mean(-1).square().sum()


def entropy(z, x):
    nll = F.cross_entropy(z.transpose(1, 2), x.ids, reduction="none")
    certainty = (z.softmax(-1) * z.log_softmax(-1)).sum(-1)
    return (nll * x.masked).sum() / x.masked.sum() - 0.1 * -certainty.mean()


def z_loss(z, x):
    log_probs = z.log_softmax(-1)
    rows = -(log_probs.exp() * log_probs).sum(-1) / 2, z.logsumexp(-1, keepdim=True)[..., 0].square()
    return F.cross_entropy(z.view(-1, V), x.ids.view(-1)) + sum((row * x.p).mean() for row in rows)


def late_z_loss(z, x):
    """PaLM, with the accuracy: the loss is reduced before the logsumexp."""
    nll = F.cross_entropy(z.flatten(0, 1), x.ids.flatten(), ignore_index=int(x.ids[0, 0]))
    correct = (z.argmax(-1) == x.ids).float().mean()
    return nll + 1e-2 * (z.logsumexp(-1) ** 2).mean() + 0 * correct


def distribution(z, x):
    """PPO and d3LLM."""
    p = torch.distributions.Categorical(logits=z)
    ratio = torch.exp(p.log_prob(x.ids) - x.old)
    return -(torch.min(ratio * x.advantages, ratio.clamp(0.8, 1.2) * x.advantages) + 0.1 * p.entropy()).mean()


def verl(z, x):
    """Entropies of verl, OpenRLHF and TRL, and of log-probabilities with other signs."""
    z = z / 0.9
    new = z.log_softmax(-1)[torch.arange(B)[:, None], torch.arange(L), x.ids - V]
    p = z.softmax(-1)
    rows = z.logsumexp(-1) - torch.sum(p * z, dim=-1)
    rows = rows + (-z.log_softmax(-1) * z.log_softmax(-1).exp() * 2).sum(-1) - (-p * z.log_softmax(-1)).sum(-1)
    with torch.no_grad():
        certainty = -(z.softmax(-1) * z.log_softmax(-1)).sum(-1) + (z.softmax(-1) * z).sum(-1)
        certainty = certainty + z.softmax(-1).take_along_dim(x.ids[..., None], -1).squeeze(-1)
    chosen = (-p).gather(-1, x.noisy[..., None]).squeeze(-1)
    return -(torch.exp(new - new.detach()) * certainty + 0.1 * rows + chosen).mean()


def many_moves(z, x):
    z = z.unsqueeze(0).squeeze(0).expand(2, -1, -1, -1).unflatten(1, (1, B))[1, 0]
    first, second = z.split(L // 2, dim=1)
    z = torch.cat([second, first], dim=1).roll(1, 1).swapaxes(0, 1).transpose(0, 1)
    z = z.index_select(0, torch.tensor([1, 0], device=z.device)).narrow(1, 1, L - 1).mT.mT.clone()
    z = torch.stack([row for part in z.chunk(2) for row in part.unbind(0)])
    return F.cross_entropy(z.view(-1, V), x.ids[:, 1:].flip(0).reshape(-1), reduction="sum")


LOOPS = {
    function.__name__: function
    for function in (
        llada, dllm, dream, fast_dllm, half, grpo, grpo_by_rows, dflash, log_probs, nll_loss, tempered, diffullama,
        dreamon, mdlm, never_mask, guidance, padded_vocabulary, touched,
        entropy, z_loss, late_z_loss, distribution, verl, many_moves
    )
}  # fmt: skip
MODELS = {"plain": {}, "tied": {"tied": True}, "bias": {"bias": True}, "cap": {"cap": 2.0}}


class LargestTensor(TorchDispatchMode):
    """Record the size of the largest tensor with data that an operation makes."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.device.type != "meta"]
        sizes = (min(t.numel(), t.untyped_storage().nbytes() // t.element_size()) for t in made)  # expand is a view
        self.size = max([self.size, *sizes])
        return out


def parameters(model):
    return [p for p in model.parameters() if p.requires_grad]


def value_and_gradients(model, loss):
    grads = torch.autograd.grad(loss, parameters(model), allow_unused=True)
    return [loss.detach(), *grads]


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in list(MODELS)[1:])]
)
def test_a_loop_has_the_value_and_the_gradients_of_the_plain_loop(name, kind):
    if kind == "cap" and name in ("tempered", "guidance", "touched"):
        pytest.skip("a cap of a capped logit and sums of capped logits are not recorded")
    torch.manual_seed(0)
    model, x = Model(**MODELS[kind]), Batch()
    names = [name for name, _ in model.named_parameters()]

    def run(fused, *leaves):
        module = copy.deepcopy(model).to(leaves[0].dtype)
        given = dict(zip(names, leaves, strict=True))
        if kind == "tied":
            given["lm_head.weight"] = given["body.weight"]
        state = torch.nn.utils.stateless._reparametrize_module(module, given)
        batch = copy.copy(x)
        batch.dtype = leaves[0].dtype
        for attribute in ("p", "old", "advantages"):
            setattr(batch, attribute, getattr(x, attribute).to(leaves[0].dtype))
        with state:
            if not fused:
                return LOOPS[name](module(batch.noisy), batch)
            with fused_head(module, on_logits="raise") as head:
                loss = LOOPS[name](module(batch.noisy), batch)
            assert head.materialized == 0
            return loss

    def draw(seed):
        g = torch.Generator().manual_seed(seed)
        leaves = [torch.randn(p.shape, generator=g).to(DEVICE) for p in model.parameters()]
        return leaves, torch.tensor(0.75, device=DEVICE)

    assert_parity(lambda *leaves: run(True, *leaves), lambda *leaves: run(False, *leaves), draw, [B * L])


@pytest.mark.everyday(8)
@pytest.mark.skipif(DEVICE != "cpu", reason="chunks of a GPU have more rows than the test")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", LOOPS)
def test_the_largest_tensor_of_a_loop_is_a_chunk(name, frozen):
    """In the forward and the backward pass. A chunk has at most 512 rows on a CPU."""
    length, chunk = 1024, 512
    torch.manual_seed(0)
    model, x = Model(), Batch(L=length)
    model.lm_head.requires_grad_(not frozen)
    loop = LOOPS[name]
    loop = type(loop)(loop.__code__, loop.__globals__ | {"L": length}, name, loop.__defaults__, loop.__closure__)
    with fused_head(model) as fused, LargestTensor() as largest:
        loop(model(x.noisy), x).backward()
    assert fused.materialized == 0
    assert largest.size <= chunk * V


def by_both(case, form, model, hidden, inputs):
    """Return value and gradients of a case from deferred logits, or from hidden states and the head."""
    leaves = [hidden, *model.lm_head.parameters()]
    if form == "logits":
        with fused_head(model, on_logits="raise") as fused:
            value = case.logits_form(model.lm_head(hidden), inputs)
        assert fused.materialized == 0
    else:
        value = case.hidden_form(*leaves, inputs)
    return [value, *torch.autograd.grad(value.sum(), leaves, allow_unused=True)]


@pytest.mark.everyday(24)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_and_ops_take_deferred_logits_as_their_form_from_hidden_states(case):
    inputs = {name: t.to(DEVICE) for name, t in case.draw(2, 6, V).items()}
    model = Model(bias=True)
    hidden = torch.randn(2, case.width * 6, D, device=DEVICE, requires_grad=True)
    if case.separate or "teacher" in " ".join(inputs):
        pytest.skip("takes a second tensor of logits, which is deferred in the test below")
    for got, expected in zip(
        *(by_both(case, form, model, hidden, inputs) for form in ("logits", "hidden")), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


TWO = {
    "hybrid": lambda y, z, x: dllm_kernels.HybridDiffusionLLMLoss(0.5)(
        y, x.ids, x.masked, x.p, x.masked | True, torch.ones_like(x.p), causal_logits=z
    ).total_loss,
    "divergence": lambda y, z, x: dllm_kernels.divergence(y, z, x.p).loss,
    "divergence, tempered": lambda y, z, x: dllm_kernels.divergence(y / 2, z / 2, kind="rkl", softcap=3.0).loss,
    "divergence, a transform each": lambda y, z, x: dllm_kernels.divergence(
        y / 2, z * 3, kind="tv", teacher_transform={"scale": 0.5}
    ).loss,
    "distillation": lambda y, z, x: dllm_kernels.DraftDistillationLoss("kl")(y, z, x.ids, x.masked).total_loss,
    "log-probs": lambda y, z, x: (
        dllm_kernels.token_log_probs(y / 0.5, x.ids, temperature=2.0).log_probs.sum() + z[0, 0].logsumexp(-1)
    ),
    "MTP": lambda y, z, x: dllm_kernels.calculate_mtp_loss(
        dllm_kernels.MaskedCrossEntropy(), mtp_per_depth_logits=[y, z], labels=x.ids, scaling_factor=0.5, model=None
    ),
    "pipeline": lambda y, z, x: dllm_kernels.PipelineCausalLMLoss(dllm_kernels.MaskedCrossEntropy(), Model())(y, x.ids),
    "per token": lambda y, z, x: dllm_kernels.compute_per_token_nll(y, x.ids).mul(x.p).sum(),
    "encoder": lambda y, z, x: dllm_kernels.encoder_ar_loss(z * 3, x.ids, scale=0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", TWO)
def test_losses_take_deferred_logits_of_two_calls(name):
    model, x = Model(bias=True), Batch()
    plain = value_and_gradients(model, TWO[name](model(x.noisy), model(x.ids), x))
    with fused_head(model, on_logits="raise"):
        found = value_and_gradients(model, TWO[name](model(x.noisy), model(x.ids), x))
    torch.testing.assert_close(found, plain)


def views_of(x):
    ones = torch.ones(1, B, L, device=DEVICE)
    return dllm_kernels.PolicyViews(x.noisy[None], x.masked[None], ones * x.masked, scheme="full")


def head_loss(x, weights):
    """Compute a loss of another head, with an argument that comes from the first."""
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(B, L, D, generator=g).to(DEVICE), torch.randn(V, D, generator=g).to(DEVICE)
    return dllm_kernels.weighted_linear_nll(hidden, weight, x.ids, weights).loss


REINFORCE = dllm_kernels.PolicyObjective("reinforce")
DECAY = dllm_kernels.DFlashDecayLoss()
ROWS = dllm_kernels.ops.LinearLogits(torch.ones(1, B, L, D, device=DEVICE), torch.ones(V, D, device=DEVICE))
# Functions of log-probabilities; a result without a gradient is a constant.
DOORS = {
    "token_scores": lambda lp, x: views_of(x).token_scores(lp[None]),
    "sequence_scores": lambda lp, x: views_of(x).sequence_scores(log_probs=lp[None], mean=True),
    "eubo": lambda lp, x: dllm_kernels.eubo(lp[None], views_of(x)),
    "objective": lambda lp, x: REINFORCE(lp, None, x.advantages),
    "nll_weights": lambda lp, x: dllm_kernels.nll_weights(lambda t: t.exp().sum(), lp),
    "weighted_mean": lambda lp, x: DECAY.weighted_mean(-lp, x.masked.float()),
    "position_weights": lambda lp, x: dllm_kernels.DFlashDecayLoss(position_weights="dpace").position_weights(
        x.masked, token_nll=-lp
    ),
}  # fmt: skip
CONSTANT_DOORS = {  # the argument must not require a gradient
    "old": lambda lp, x: dllm_kernels.PolicyObjective()(x.old, lp, x.advantages),
    "fused policy loss": lambda lp, x: dllm_kernels.PolicyLoss(REINFORCE)(
        ROWS, x.ids, views_of(x), lp, lp
    ).loss,
    "dpace_weights": lambda lp, x: dllm_kernels.dpace_weights(lp / -100, x.masked),
    "acceptance_length": lambda lp, x: dllm_kernels.acceptance_length(lp / -100, x.masked, 5, sampling=True),
    "acceptance_stats": lambda lp, x: torch.stack(
        dllm_kernels.acceptance_stats(lp / -100, x.masked, 5, sampling=True)
    ),
    "gumbel_topk": lambda lp, x: dllm_kernels.gumbel_topk(lp[0], 3, uniform=torch.full((L,), 0.5, device=DEVICE)),
    "gumbel_topk of rows": lambda lp, x: dllm_kernels.batched_gumbel_topk(lp, 3, seeds=x.ids[:, 0]),
    "gumbel_topk_mask": lambda lp, x: dllm_kernels.gumbel_topk_mask(lp, 3, seeds=x.ids[:, 0]),
    "uniform numbers": lambda lp, x: dllm_kernels.gumbel_topk_mask(lp * 0, 3, uniform=lp.exp()),
    "loss mask": lambda lp, x: dllm_kernels.corrupt_uniform(x.ids, -lp, V - 1, seeds=x.ids[:, 0])[1],
    "loss mask of blocks": lambda lp, x: dllm_kernels.corrupt_blockwise(x.ids, -lp, V - 1, 4, seeds=x.ids[:, 0])[1],
    "level": lambda lp, x: dllm_kernels.corrupt_uniform(
        x.ids, x.masked, V - 1, level=lp[:, 0].exp(), seeds=x.ids[:, 0]
    )[2],
    "level of views": lambda lp, x: dllm_kernels.policy_views(
        x.ids, -lp, V - 1, "elbo", level=lp[:, 0].exp(), seeds=x.ids[:, 0]
    ).weights,
    "weights of views": lambda lp, x: dllm_kernels.PolicyLoss(dllm_kernels.PolicyObjective(kl="k2", kl_coef=0.1))(
        ROWS, x.ids, replace(views_of(x), weights=-lp[None]), lp, lp, lp
    ).loss,
    "row weights": lambda lp, x: head_loss(x, -lp),
    "row objective": lambda lp, x: dllm_kernels.linear_row_objective(
        torch.ones(B, L, D, device=DEVICE), torch.ones(V, D, device=DEVICE), x.ids, lambda s, w: w * s.log_probs, lp
    ).loss,
}  # fmt: skip


@pytest.mark.parametrize("name", [*DOORS, *CONSTANT_DOORS])
def test_functions_of_log_probs_take_deferred_ones(name):
    model, x = Model(bias=True), Batch()
    function = (DOORS | CONSTANT_DOORS)[name]

    def run():
        lp = model(x.noisy).log_softmax(-1).gather(-1, x.ids[..., None]).squeeze(-1)
        out = function(lp, x)
        assert isinstance(out, torch.Tensor)
        return lp, value_and_gradients(model, out.sum()) if out.requires_grad else [out]

    with torch.set_grad_enabled(name in DOORS):
        _, plain = run()
        with fused_head(model, on_logits="raise"):
            lp, found = run()
    assert type(lp).__name__ == "DeferredNLL" or not lp.requires_grad
    torch.testing.assert_close(found, plain)


def test_a_teacher_with_a_head_of_its_own_is_deferred_too():
    draft, target, x = Model(), Model(bias=True).requires_grad_(False), Batch()
    for loss in (TWO["divergence"], TWO["distillation"]):
        plain = value_and_gradients(draft, loss(draft(x.noisy), target(x.ids), x))
        with fused_head(draft, on_logits="raise"), fused_head(target, on_logits="raise"):
            found = value_and_gradients(draft, loss(draft(x.noisy), target(x.ids), x))
        torch.testing.assert_close(found, plain)


UNFUSED = {
    "a cumulative sum": lambda z, x: z.exp().cumsum(-1).mean(),
    "a teacher that is trained": lambda z, x: (
        z.log_softmax(-1) * torch.ones(V, device=z.device).requires_grad_()
    ).sum(),
    "a softmax of other dimensions": lambda z, x: (z.log_softmax(1) * x.p[..., None]).sum(),
    "softmax": lambda z, x: z.softmax(-1)[..., 0].sum(),
    "the least class": lambda z, x: z.topk(2, largest=False)[0].sum(),
    "the largest of all": lambda z, x: z.max() + z.softmax(-1).max(),
    "the largest of all rows": lambda z, x: (z.argmax(1) + z.logsumexp(-1).sum()).sum(),
    "the top of some low classes": lambda z, x: (
        z.masked_fill(torch.arange(V, device=z.device) < 2, -1e9).topk(2)[0].sum()
    ),
    "a class that is not low enough": lambda z, x: (z[..., 3].add_(-100), z.logsumexp(-1).sum())[1],
    "a class that is low, as a target": lambda z, x: (
        z.__setitem__((..., int(x.ids[0, 0])), -3e3),
        F.cross_entropy(z.flatten(0, 1), x.ids.flatten()),
    )[1],
    "a low class beside a view": lambda z, x: (lambda y: (z.__setitem__((..., 3), -1e6), y.logsumexp(-1).sum())[1])(
        z[:, 1:]
    ),
    "two classes, as targets": lambda z, x: F.cross_entropy(
        z.masked_fill(torch.arange(V, device=z.device) < V - 2, -1e9).mT, x.ids
    ),
    "a loss of this package with low classes": lambda z, x: (
        dllm_kernels.MDLMCrossEntropyLoss()(
            z.masked_fill(torch.arange(V, device=z.device) > 3, -1e9), x.ids, x.masked, x.p, x.masked
        ).total_loss
    ),
    "every class set": lambda z, x: (
        z.masked_fill(torch.arange(V, device=z.device) >= 0, -1e9).logsumexp(-1) - z[..., 0]
    ).sum(),
    "a class in some rows": lambda z, x: (z.__setitem__((0, ..., 3), -1e6), z.logsumexp(-1).sum())[1],
    "NaN": lambda z, x: (z / 1e-30 / 1e-30 * 0 == z).sum() + z.sum(),
    "log-probabilities of rows": lambda z, x: (
        lambda y: (y.__setitem__(x.masked, -1e6), y.__setitem__((x.masked, x.ids[x.masked]), 0.0), y[:, 1:].sum())[2]
    )(z - z.logsumexp(-1, keepdim=True)),
    "rows of a mask of inference mode": lambda z, x: (
        z.sum()
        + torch.no_grad()(
            lambda y: (y.__setitem__(torch.inference_mode()(torch.logical_not)(x.masked), -1e6), y.sum())[1]
        )(z.detach().log_softmax(-1))
    ),
    "two dtypes": lambda z, x: (z + z.double()).logsumexp(-1).sum(),
    "a slice of classes": lambda z, x: z[..., :5].sum() + z[..., 7].sum(),
    "a view across classes": lambda z, x: z.reshape(B, L * V).sum(1).mean(),
    "a sort": lambda z, x: z.sort(-1).values[..., :3].sum() + z.kthvalue(2, -1).values.sum(),
    "cat of classes": lambda z, x: torch.cat([z, z], -1).logsumexp(-1).sum(),
    "cat with zeros": lambda z, x: torch.cat([z, torch.zeros_like(z[:, :1])], 1).logsumexp(-1).sum(),
    "logsumexp of rows": lambda z, x: z.logsumexp(1).sum(),
    "in place": lambda z, x: z.mul_(x.p[..., None]).logsumexp(-1).sum(),
    "in place, beside a view": lambda z, x: (lambda y: (z.div_(2), y.logsumexp(-1).sum())[1])(z[:, 1:]),
    "an assignment": lambda z, x: (z.__setitem__((slice(None), 0), 0.0), z.logsumexp(-1).sum())[1],
    "both caps": lambda z, x: (
        dllm_kernels.MDLMCrossEntropyLoss(softcap=2.0)(torch.tanh(z / 3) * 3, x.ids, x.masked, x.p, x.masked).total_loss
    ),
    "one of two": lambda z, x: dllm_kernels.divergence(z, torch.ones(B, L, V, device=z.device)).loss,
}


@pytest.mark.parametrize("name", UNFUSED)
def test_other_operations_get_the_logits_once_and_warn_once(name):
    model, x = Model(), Batch()
    plain = value_and_gradients(model, UNFUSED[name](model(x.noisy), x))
    with warnings.catch_warnings(record=True) as caught, fused_head(model) as fused:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "(overflow|invalid value) encountered")  # of NumPy in Triton's interpreter
        found = value_and_gradients(model, UNFUSED[name](model(x.noisy), x))
        assert fused.materialized == 1
        messages = [str(w.message) for w in caught]
        assert len(messages) == 1
        again = UNFUSED[name](model(x.noisy), x)
    assert fused.materialized == 2
    assert len(caught) == 1
    assert (
        f"needs the logits themselves, so that all {B * L * V} of them, {(B, L, V)}, are computed; use " in messages[0]
    )
    assert caught[0].filename == __file__
    assert f"{__file__}:{caught[0].lineno} " in messages[0]
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(again, plain[0])


def test_on_logits_says_what_an_operation_that_needs_them_does():
    model, x = Model(), Batch()
    with (
        fused_head(model, on_logits="raise") as fused,
        pytest.raises(RuntimeError, match=r"^softmax at .*needs the logits"),
    ):
        model(x.noisy).softmax(1).mean()
    assert fused.materialized == 0
    with warnings.catch_warnings(), fused_head(model, on_logits="allow") as fused:
        warnings.simplefilter("error")
        z = model(x.noisy)
        z.softmax(1)
        z.exp().sort()
    assert fused.materialized == 1


def test_a_head_that_the_model_does_not_call_warns():
    """Such a model computes its logits from the weight of the head, so nothing is fused."""
    model, x = Model(), Batch()
    for on_logits in ("warn", "raise"):
        message = "^fused_head had no effect, because the model did not call its head, torch.nn.modules.linear.Linear; "
        with pytest.warns(UserWarning, match=message) as caught, fused_head(model, on_logits=on_logits) as fused:
            llada(F.linear(torch.tanh(model.body(x.noisy)), model.lm_head.weight), x)
        assert caught[0].filename == __file__
    assert fused.materialized == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fused_head(model, on_logits="allow"):
            pass
        with pytest.raises(ZeroDivisionError), fused_head(model):
            raise ZeroDivisionError
        with fused_head(model):
            model(x.noisy)


METADATA = {
    "shape": lambda z: z.shape, "dtype": lambda z: z.dtype, "device": lambda z: z.device, "ndim": lambda z: z.ndim,
    "size": lambda z: (z.size(), z.size(-1), z.size(dim=0)), "dim": lambda z: z.dim(), "numel": lambda z: z.numel(),
    "torch.numel": torch.numel, "len": len, "requires_grad": lambda z: z.requires_grad, "is_cuda": lambda z: z.is_cuda,
    "is_floating_point": torch.is_floating_point, "is_contiguous": lambda z: z.is_contiguous(),
    "float": lambda z: z.double().dtype, "moved": lambda z: z.transpose(1, 2)[:, :, 1:].mT.unsqueeze(0).shape,
    "like": lambda z: z.view_as(torch.zeros(B * L, V)).shape, "bool index": lambda z: z[z.new_ones(B, L).bool()].shape,
    "no row": lambda z: z[:0].view(-1, V).shape, "none": lambda z: z[None, ..., None, 0, :].shape,
    "a list": lambda z: z[[1, 0]][:, [0, 2, 1]].shape, "separate": lambda z: z[:, None, [0, 1]].shape,
    "type": lambda z: z.type(torch.bfloat16).dtype,
    "terms": lambda z: (lambda p: [t.dtype for t in (p * 2, p / 2, -p, p.log2())])(z.bfloat16().softmax(-1)),
    "casts": lambda z: [
        nll.to(target).dtype
        for nll in [F.cross_entropy(z.mT, z.new_zeros(B, L, dtype=torch.long), reduction="none")]
        for target in (torch.int64, torch.bfloat16, "cpu")
    ],
    "one of a dimension": lambda z: [
        t.logsumexp(dim).shape
        for y, d, dim in ((z, 0, -1), (z, 1, -1), (z.mT, -1, 1), (z.mT, 0, 0))
        for t in (y.select(d, 0), y.unbind(d)[0])
    ],
    "probabilities": lambda z: z.softmax(-1, torch.float64).dtype,
    "new": lambda z: [
        (t.dtype, t.device, t.shape)
        for rows in (z, F.cross_entropy(z.flatten(0, 1), z.new_zeros(B * L, dtype=torch.long), reduction="none"))
        for t in (
            rows.new_zeros(2), rows.new_ones(()), rows.new_full((1, 2), 3.0), rows.new_empty(0, 2),
            rows.new_tensor([1.0]), rows.new_zeros((2,), dtype=torch.int32),
        )
    ],
    "type_as": lambda z: z.type_as(torch.ones((), device=z.device).half()).dtype,
}  # fmt: skip


@pytest.mark.parametrize("name", METADATA)
def test_deferred_logits_have_the_shape_dtype_and_device_of_logits(name):
    model, x = Model(), Batch()
    expected = METADATA[name](model(x.noisy))
    with fused_head(model, on_logits="raise"):
        assert METADATA[name](model(x.noisy)) == expected


INSIDE = {
    "logits": lambda z, ids: z.softmax(-1).square().sum(),
    "a slice": lambda z, ids: z[:, 1:].float().softmax(-1).square().sum(),
    "NLL": lambda z, ids: F.cross_entropy(z.flatten(0, 1), ids.flatten(), reduction="none").exp().sum(),
}


@pytest.mark.parametrize("function", [lambda t: None, lambda t: t.shape, id])
def test_a_function_that_returns_no_tensors_maps_over_deferred_logits(function):
    """As checkpoint of torch 2.11 does, to find the device."""
    model, x = Model(), Batch()
    with fused_head(model):
        z = model(x.noisy)
        assert tree_map(function, z) == function(z)


@pytest.mark.parametrize("name", INSIDE)
def test_a_checkpointed_function_of_deferred_logits(name):
    """The function runs twice, and materializes the logits, or the NLL, in its first run only."""
    model, x = Model(dtype=torch.float64), Batch()

    def run():
        model.zero_grad()
        z = model(x.noisy)
        nll = F.cross_entropy(z.flatten(0, 1), x.ids.flatten(), reduction="none")

        def body(z, nll):
            return INSIDE[name](z, x.ids) + nll.square().sum()

        loss = checkpoint(body, z, nll, use_reentrant=False)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    plain = run()
    with fused_head(model, on_logits="allow"):
        torch.testing.assert_close(run(), plain)


def test_a_checkpointed_function_of_logits_whose_values_are_needed_after_it():
    """Its recomputation computes from the hidden states, although the backward pass has needed the values before."""
    model, x = Model(dtype=torch.float64), Batch()

    def run():
        model.zero_grad()
        z = model(x.noisy)
        loss = checkpoint(lambda z: F.cross_entropy(z.mT, x.ids, reduction="none").mean(), z, use_reentrant=False)
        loss = loss + z.sort(-1).values.mean() + torch.vmap(lambda row: row.logsumexp(-1))(z.flatten(0, 1)).mean()
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    plain = run()
    with fused_head(model, on_logits="allow"):
        torch.testing.assert_close(run(), plain)


@pytest.mark.parametrize("of", [torch.logsumexp, lambda t, dim: (t * t.detach()).sum(dim)])
def test_a_checkpointed_function_of_a_term_under_hooks_of_saved_tensors(of):
    """The checkpoint then saves a copy of its argument, which has a graph."""
    model, x = Model(dtype=torch.float64), Batch()

    def run():
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            loss = checkpoint(lambda z: of(z, -1).sum(), model(x.noisy).clamp(-1, 1), use_reentrant=False)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    plain = run()
    with fused_head(model, on_logits="raise"):
        torch.testing.assert_close(run(), plain)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_results_have_the_dtype_of_the_plain_loop(reduction, dtype, autocast):
    model, x = Model(dtype=dtype), Batch()

    def run():
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            z = model(x.noisy)
            made = F.cross_entropy(z.flatten(0, 1), x.ids.flatten(), reduction=reduction)
            return [made.sum(), z.logsumexp(-1), z.gather(-1, x.ids[..., None])]

    plain = run()
    with fused_head(model, on_logits="raise"):
        found = run()
    assert [t.dtype for t in found] == [t.dtype for t in plain]
    for got, expected in zip(found, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


def test_rows_that_are_ignored_or_missing(monkeypatch):
    monkeypatch.setenv("DLLM_KERNELS_CHECK", "0" if DEVICE == "cpu" else "1")  # on a CPU, torch always checks
    model, x = Model(), Batch()
    ids = torch.full_like(x.ids, -100)
    for reduction in ("mean", "sum", "none"):
        plain = F.cross_entropy(model(x.noisy).flatten(0, 1), ids.flatten(), reduction=reduction)
        with fused_head(model, on_logits="raise"):
            found = F.cross_entropy(model(x.noisy).flatten(0, 1), ids.flatten(), reduction=reduction)
            found = found if torch.is_tensor(found) else found * 1.0 + 0.0
        torch.testing.assert_close(found, plain, equal_nan=True)
    with fused_head(model, on_logits="raise"):
        z = model(x.noisy)
        none = F.cross_entropy(z[:0].flatten(0, 1), x.ids[:0].flatten(), reduction="none")
        assert none.mean().isnan()
        assert none.view(0, 1).mean(0).isnan().all()
        for use in (
            lambda: z.gather(-1, ids[..., None]),
            lambda: z.log_softmax(-1).gather(-1, ids[..., None]),
            lambda: z.softmax(-1).gather(-1, ids[..., None]),
            lambda: z.log_softmax(-1)[torch.arange(B, device=DEVICE)[:, None], torch.arange(L, device=DEVICE), ids],
        ):
            with pytest.raises(IndexError, match=rf"^index must lie in \[0, {V}\), got -100 at position "):
                use()


def test_rows_of_weight_0_are_not_projected(monkeypatch):
    model, x = Model(), Batch()
    with torch.no_grad():
        model.body.weight[V - 1] = torch.nan  # the masked tokens
    with fused_head(model):
        loss = (F.cross_entropy(model(x.noisy).transpose(1, 2), x.ids, reduction="none") * ~x.masked).sum()
    assert loss.isfinite()


def test_hidden_states_or_a_head_that_changed_raise():
    message = "must not be modified between the head and the use"
    for change in (lambda model, h: h.mul_(2), lambda model, h: model.lm_head.weight.mul_(2)):
        for use in (
            lambda z: z.logsumexp(-1),
            lambda z: z[:, 1:].mT.argmax(1),
            lambda z: z.exp(),
            lambda z: z.argmax(-1),
        ):
            model, h = Model(), torch.randn(B, L, D, device=DEVICE)
            with fused_head(model, on_logits="allow"):
                z = model.lm_head(h)
                nll = F.cross_entropy(z.mT, torch.zeros(B, L, dtype=torch.long, device=DEVICE), reduction="none")
            with torch.no_grad():
                change(model, h)
            for late in (lambda: use(z), nll.sum):  # noqa: B023
                with pytest.raises(RuntimeError, match=message):
                    late()


def test_gradients_follow_the_state_of_the_call_and_of_the_use():
    model, x = Model(), Batch()
    with fused_head(model, on_logits="allow"):
        z = model(x.noisy)
        nll = F.cross_entropy(z.mT, x.ids, reduction="none")
        with torch.no_grad():
            assert not any(t.requires_grad for t in (nll.sum(), nll.mean(), z.logsumexp(-1), z[:, 1:].log_softmax(-1)))
            nll + 0
            z.exp()
            constant = model(x.noisy)
        assert (nll + 0).requires_grad
        assert z.exp().requires_grad
        assert not nll.detach().requires_grad
        assert not F.cross_entropy(z.detach().mT, x.ids).requires_grad
        for t in (constant.logsumexp(-1), F.cross_entropy(constant.mT, x.ids, reduction="none").sum(), constant.exp()):
            assert not t.requires_grad


def test_a_model_that_computes_its_loss():
    model, x = Model(cap=2.0), Batch()
    plain = value_and_gradients(model, model(x.noisy, labels=x.ids))
    with fused_head(model, on_logits="raise"):
        found = value_and_gradients(model, model(x.noisy, labels=x.ids))
    torch.testing.assert_close(found, plain)


@pytest.mark.exhaustive
def test_a_model_of_transformers_that_computes_its_loss():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model, x = transformers.LlamaForCausalLM(config).to(DEVICE), Batch()
    plain = value_and_gradients(model, model(x.noisy, labels=x.ids).loss)
    with fused_head(model, on_logits="raise"):
        out = model(x.noisy, labels=x.ids)
        found = value_and_gradients(model, out.loss)
        assert out.logits.shape == (B, L, V)
    torch.testing.assert_close(found, plain)


def trained(model, steps):
    for p in model.parameters():
        p.grad = None
    losses = [loss.detach() for loss in steps(model)]
    return [*losses, *(p.grad for p in model.parameters())]


def accumulated(model):
    for seed in range(3):
        x = Batch(seed)
        loss = dllm(model(x.noisy), x)
        loss.backward()
        yield loss


def checkpointed(model):
    x = Batch()
    loss = checkpoint(lambda ids: llada(model(ids), x), x.noisy, use_reentrant=False)
    loss.backward()
    yield loss
    logits = checkpoint(model, x.noisy, use_reentrant=False)
    loss = dllm(logits, x)
    loss.backward()
    yield loss


def autocast(model):
    x = Batch()
    with torch.autocast(DEVICE, torch.bfloat16):
        logits = model(x.noisy).float()
    loss = dllm(logits, x)
    loss.backward()
    yield loss


@pytest.mark.parametrize("steps", [accumulated, checkpointed, autocast], ids=lambda steps: steps.__name__)
@pytest.mark.parametrize("kind", ["plain", "tied"])
def test_a_step_equals_the_plain_step(steps, kind):
    model = Model(**MODELS[kind])
    plain = trained(model, steps)
    with fused_head(model, on_logits="raise"):
        found = trained(model, steps)
    loose = {"rtol": 0.02, "atol": 0.02} if steps is autocast else {}
    torch.testing.assert_close(found, plain, **loose)


def adapted(kind, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = Model()
    if kind == "lora":
        options = {"target_modules": ["lm_head"], "r": 2, "init_lora_weights": False, **options}
    else:
        options = {"target_modules": ["body"], "r": 2, "modules_to_save": ["lm_head"]}
    return peft.get_peft_model(model, peft.LoraConfig(**options))


@pytest.mark.everyday(1)
@pytest.mark.parametrize("name", ["llada", "many_moves", "grpo"])
@pytest.mark.parametrize("kind", ["lora", "saved"])
def test_adapters_of_the_head_train(kind, name):
    model, x = adapted(kind), Batch()
    plain = value_and_gradients(model, LOOPS[name](model(x.noisy), x))
    with fused_head(model, on_logits="raise"):
        found = value_and_gradients(model, LOOPS[name](model(x.noisy), x))
    torch.testing.assert_close(found, plain)


def test_all_uses_of_the_logits_share_the_dropout_of_the_adapter():
    model, x = adapted("lora", lora_dropout=0.5), Batch()
    model.train()
    with fused_head(model, on_logits="allow"):
        z = model(x.noisy)
        fused, real = z.logsumexp(-1), torch.exp(z).sum(-1).log()
    torch.testing.assert_close(fused, real)


def test_an_adapter_that_was_off_at_the_head_call_stays_off():
    model, x = adapted("lora"), Batch()
    with model.disable_adapter():
        expected = model(x.noisy).logsumexp(-1)
    with fused_head(model, on_logits="raise"):
        with model.disable_adapter():
            z = model(x.noisy)
        torch.testing.assert_close(z.logsumexp(-1), expected)


def scaled(head):
    own = head.forward
    head.forward = lambda hidden: own(hidden) * 2
    return head


def hooked(head):
    head.register_forward_hook(lambda module, args, output: output * 2)
    return head


@pytest.mark.parametrize("change", [scaled, hooked])
@pytest.mark.parametrize("kind", ["plain", "lora", "saved"])
def test_a_head_that_does_more_is_refused_and_stays_as_it_is(change, kind):
    model, x = Model() if kind == "plain" else adapted(kind), Batch()
    change(model.lm_head)
    expected, own = model(x.noisy), vars(model.lm_head).get("forward")
    with pytest.raises(ValueError, match=r"^the LM head must .*leave the head as it is"), fused_head(model):
        pass
    assert vars(model.lm_head).get("forward") is own
    torch.testing.assert_close(model(x.noisy), expected)


def test_bad_arguments():
    model = Model()
    for match, error, args, options in (
        ("^model must be an nn.Module, got int", TypeError, [3], {}),
        ("^head must be an nn.Module, got", TypeError, [model], {"head": model.lm_head.weight}),
        ("^on_logits must be one of warn, raise, allow, got 'no'", ValueError, [model], {"on_logits": "no"}),
        ("^model must have get_output_embeddings", ValueError, [nn.Linear(2, 2)], {}),
        ("^the LM head must be an nn.Linear", ValueError, [model], {"head": nn.LayerNorm(3)}),
    ):
        with pytest.raises(error, match=match), fused_head(*args, **options):
            pass
    assert "forward" not in vars(model.lm_head)
    with fused_head(model):
        message = (
            r"of another call that replaces the same head and has not returned \(leave an enclosing fused_head first"
        )
        with pytest.raises(ValueError, match=message), fused_head(model):
            pass
        assert type(model(Batch().noisy)) is not torch.Tensor
    assert torch.is_tensor(model(Batch().noisy))
    with fused_head(nn.Sequential(), head=model.lm_head):
        assert type(model(Batch().noisy)) is not torch.Tensor


@pytest.mark.parametrize("early", [False, True], ids=["compiled inside", "compiled before"])
def test_a_compiled_model_computes_its_logits_and_says_so(early):
    model, x = Model(), Batch()
    expected, compiled = model(x.noisy), torch.compile(model, backend="eager")
    if early:
        compiled(x.noisy)
    message = r"torch\.compile of a model with its head .*compile of the body alone"
    with pytest.warns(UserWarning, match=message), fused_head(compiled) as fused:
        found = compiled(x.noisy)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, expected)
    assert fused.materialized == 1
    with fused_head(compiled, on_logits="raise"), pytest.raises(RuntimeError, match="needs the logits themselves"):
        compiled(x.noisy)
    torch.testing.assert_close(compiled(x.noisy), expected)


def test_a_compiled_loss_takes_deferred_logits():
    model, x = Model(), Batch()
    plain = value_and_gradients(model, llada(model(x.noisy), x))
    with fused_head(model, on_logits="raise"):
        found = value_and_gradients(model, torch.compile(llada, backend="eager")(model(x.noisy), x))
    torch.testing.assert_close(found, plain)


def test_copies_of_deferred_logits():
    model, x = Model(), Batch()
    expected = model(x.noisy)
    with fused_head(model, on_logits="allow"):
        z = model(x.noisy) / 2
        mapped = torch.utils._pytree.tree_map(lambda t: t * 1, {"logits": z})["logits"]
        torch.testing.assert_close(mapped.logsumexp(-1), (expected / 2).logsumexp(-1))
        torch.testing.assert_close(mapped.exp(), (expected / 2).exp())
        torch.testing.assert_close(pickle.loads(pickle.dumps(z)), expected / 2)
        cast = torch.utils._pytree.tree_map(lambda t: t.double() if torch.is_tensor(t) else t, model(x.noisy))
        assert cast.dtype == torch.float64
        assert cast.parts[0].dtype == torch.float32


def test_argmax_has_no_gradient_and_takes_the_lowest_index():
    model, x = Model(), Batch()
    with torch.no_grad():
        model.lm_head.weight[5:8] = model.lm_head.weight[5]
    expected = model(x.noisy)
    with fused_head(model, on_logits="raise"):
        z = model(x.noisy)
        assert torch.equal(z.argmax(-1), expected.argmax(-1))
        assert torch.equal(torch.argmax(z.mT, dim=1, keepdim=True), expected.mT.argmax(1, keepdim=True))
        assert torch.equal(z.log_softmax(-1).argmax(dim=-1), expected.argmax(-1))


def test_heads_of_two_threads_do_not_mix():
    results = {}

    def run(seed):
        torch.manual_seed(seed)
        model, x = Model(), Batch(seed)
        plain = value_and_gradients(model, llada(model(x.noisy), x))
        with fused_head(model, on_logits="raise"):
            results[seed] = value_and_gradients(model, llada(model(x.noisy), x)), plain

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == len(threads)
    for found, plain in results.values():
        torch.testing.assert_close(found, plain)


def test_a_backward_pass_leaves_losses_of_another_thread_to_it(monkeypatch):
    """It computes losses of its own thread that are pending, because the head may change after it."""
    model, x = Model(), Batch()
    weighted_nll, threads = dllm_kernels.ops.weighted_nll, []

    def counted(*args, **kwargs):
        threads.append(threading.get_ident())
        return weighted_nll(*args, **kwargs)

    monkeypatch.setattr("dllm_kernels.ops.weighted_nll", counted)
    with fused_head(model, on_logits="raise"):
        losses = [F.cross_entropy(model(x.noisy).mT, x.ids) for _ in range(2)]
        thread = threading.Thread(target=lambda: F.cross_entropy(model(x.noisy).mT, x.ids).backward())
        thread.start()
        thread.join()
        assert len(threads) == 1
        assert threading.get_ident() not in threads
        losses[0].backward()
        assert threads[1:] == [threading.get_ident()] * 2
