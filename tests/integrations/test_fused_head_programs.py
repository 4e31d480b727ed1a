"""Programs that use logits and NLL in unusual ways: values and gradients under ``fused_head`` are those without it."""

import contextlib
import copy
import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import dllm_kernels
from dllm_kernels import HybridDiffusionLLMLoss, divergence, fused_head, token_nll
from tests.conftest import DEVICE
from tests.support.fused_models import Adapted, B, D, L, Model, V


class Batch:
    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.ids, self.noisy = (torch.randint(0, V, (B, L), generator=g).to(DEVICE) for _ in range(2))
        self.masked = (torch.rand(B, L, generator=g) < 0.5).to(DEVICE)
        self.masked[:, 2] = True

    def nll(self, model):
        return F.cross_entropy(model(self.noisy).transpose(1, 2), self.ids, reduction="none")


def trained_and_gradients(program, make, fused):
    """Return loss and gradients; ``make()`` returns a model with a module ``lm_head``."""
    torch.manual_seed(1)
    model = make()
    with fused_head(model, on_logits="allow") if fused else contextlib.nullcontext():
        loss = program(model, Batch())
    if loss.requires_grad:
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(program, make=Model):
    expected, expected_gradients = trained_and_gradients(program, make, fused=False)
    loss, gradients = trained_and_gradients(program, make, fused=True)
    assert loss.dtype == expected.dtype
    torch.testing.assert_close(loss, expected, rtol=2e-5, atol=1e-6)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        size = float(expected_gradients[name].abs().max())
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=2e-5, atol=1e-5 * max(size, 1.0))


def without_gradients(change):
    """Return a program that weighs the NLL by a constant that was computed from it under ``no_grad``."""

    def program(model, x):
        nll = x.nll(model)
        with torch.no_grad():
            weights = change(nll)
        return (weights.exp() * nll).mean()

    return program


def scaled_without_gradients(model, x):
    logits = model(x.noisy)
    with torch.no_grad():
        logits /= 0.5
    return F.cross_entropy(logits.transpose(1, 2), x.ids)


def in_place(select):
    """Return a program that sets some NLLs to 0 through ``select(nll)``, which may share their memory."""

    def program(model, x):
        nll = x.nll(model)
        select(nll)[~x.masked.reshape(select(x.masked).shape)] = 0
        return nll.sum()

    return program


def first_row_in_place(model, x):
    nll = x.nll(model)
    nll[0][~x.masked[0]] = 0
    return nll.sum()


def views_of_views_in_place(model, x):
    nll = x.nll(model)
    flat = nll.flatten()
    square = flat.view(B, L)
    square[x.masked] = 0
    return flat.sum() + nll.square().sum()


def twice_in_place(model, x):
    """Both changes reach a view that was made before them."""
    nll = x.nll(model)
    flat = nll.flatten()
    nll[0, 0] = 0
    nll[1, 1] = 0
    return flat.square().sum()


def rows_used_before(model, x):
    nll = x.nll(model)
    used = nll[0].exp().sum()
    nll[x.masked] = 0
    return used + nll.sum()


def copied_logits(model, x):
    logits = model(x.noisy)
    other = logits.to(torch.float32, copy=True)
    other[..., 3] = -9.0
    return F.cross_entropy(logits.transpose(1, 2), x.ids)


def scaled_after_the_nll(model, x):
    logits = model(x.noisy.flatten())
    nll = F.cross_entropy(logits, x.ids.flatten(), reduction="none")
    logits.div_(0.5)
    return nll.sum()


def weights_written_later(model, x):
    weights = x.masked.float()
    with torch.no_grad():
        weighted = x.nll(model) * weights
        weights.fill_(1.0)
        return weighted.sum()


def targets_written_later(model, x):
    with torch.no_grad():
        nll = x.nll(model)
        x.ids.zero_()
        return nll.sum()


def called_with_other_weights(model, x):
    with torch.no_grad():
        logits = functional_call(model, {name: 2 * p for name, p in model.named_parameters()}, (x.noisy,))
    return F.cross_entropy(logits.transpose(1, 2), x.ids)


def maml(model, x):
    """One step of first-order MAML."""
    gradients = torch.autograd.grad(x.nll(model).mean(), list(model.parameters()))
    moved = {name: p - 0.9 * g for (name, p), g in zip(model.named_parameters(), gradients, strict=True)}
    return F.cross_entropy(functional_call(model, moved, (x.ids,)).transpose(1, 2), x.ids)


def weighted(p, times=1):
    """Return a program that divides or, with a factor ``times``, multiplies by a constant of another dtype."""

    def program(model, x):
        nll, constant = x.nll(model), p.to(DEVICE).expand(B, L)
        for _ in range(times):
            nll = nll * constant
        return nll.mean() if times else (nll / constant).sum()

    return program


def joined(join):
    def program(model, x):
        logits = model(x.noisy)
        return F.cross_entropy(join([logits, logits]).reshape(-1, V), x.ids.repeat(2, 1).flatten())

    return program


def teacher_of_another_dtype(model, x):
    with torch.random.fork_rng():
        teacher = Model().bfloat16()
    fused = "forward" in vars(model.lm_head)
    with fused_head(teacher, on_logits="allow") if fused else contextlib.nullcontext(), torch.no_grad():
        target = teacher(x.noisy).float()
    return divergence(model(x.noisy).float(), target, x.masked.float()).loss


def used_after_a_step(model, x):
    """Metrics that nobody reads before the head changes."""
    logits = model(x.noisy).flatten(0, 1)
    metrics = F.cross_entropy(logits, x.ids.flatten()), x.nll(model).sum()
    F.cross_entropy(logits, x.noisy.flatten(), reduction="sum").backward()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    return x.nll(model).mean() + sum(metrics).detach()


def changed_in_place(model, x):
    loss = x.nll(model).mean()
    loss /= 2
    loss.mul_(3)
    loss.register_hook(lambda g: g * 5)
    return loss


PROGRAMS = {
    "a loss that is read after a step": used_after_a_step,
    "a loss in place": changed_in_place,
    "a loss in a Function": lambda m, x: checkpoint(torch.square, x.nll(m).sum(), use_reentrant=True),
    "a loss times logits": lambda m, x: (lambda z: (z * F.cross_entropy(z.mT, x.ids)).mean())(m(x.noisy)),
    "sum over an axis": lambda m, x: (x.nll(m).sum(axis=1) / x.masked.sum(1)).square().sum(),
    "mean over an axis": lambda m, x: x.nll(m).mean(axis=1).square().sum(),
    "an op on float64 logits": lambda m, x: token_nll(m(x.noisy).double(), x.ids).nll.mean(),
    "keepdims": lambda m, x: (x.nll(m).sum(axis=1, keepdims=True) * x.masked).sum(),
    "chunks along an axis": lambda m, x: torch.chunk(m(x.noisy), 2, axis=-1)[0].logsumexp(-1).mean(),
    "input by name": lambda m, x: torch.log_softmax(dim=-1, input=m(x.noisy)).gather(-1, x.ids[..., None]).mean(),
    "other by name": lambda m, x: torch.mul(x.masked, other=x.nll(m)).sum(),
    "a NumPy factor": lambda m, x: F.cross_entropy((np.sqrt(2.0) * m(x.noisy)).transpose(1, 2), x.ids),
    "large factors": lambda m, x: F.cross_entropy((m(x.noisy) * 1e10 * -1e10 / 1e20).transpose(1, 2), x.ids),
    "type by name": lambda m, x: m(x.noisy).type("torch.DoubleTensor").square().mean(),
    "a constant product": without_gradients(lambda nll: nll * 0.1),
    "a sum with a constant": lambda m, x: (lambda nll: (nll + torch.no_grad()(torch.mul)(nll, 2)).mean())(x.nll(m)),
    "a constant quotient": without_gradients(lambda nll: nll / torch.full((L,), 8.0, device=nll.device)),
    "a constant negative": without_gradients(lambda nll: -nll),
    "a constant clone": without_gradients(lambda nll: nll.clone() * 0.1),
    "a constant cast": without_gradients(lambda nll: nll.double().float() * 0.1),
    "constant rows": without_gradients(lambda nll: -nll.flatten().view(B, L)),
    "logits scaled in no_grad": scaled_without_gradients,
    "a view in place": in_place(lambda nll: nll.view(-1)),
    "a transposed view in place": in_place(lambda nll: nll.unsqueeze(1)),
    "a row in place": first_row_in_place,
    "views of views in place": views_of_views_in_place,
    "twice in place": twice_in_place,
    "a clone in place": in_place(lambda nll: nll.clone()),
    "in place after a use": rows_used_before,
    "a copy of the logits in place": copied_logits,
    "logits scaled after the NLL": scaled_after_the_nll,
    "weights written later": weights_written_later,
    "targets written later": targets_written_later,
    "functional_call": called_with_other_weights,
    "first-order MAML": maml,
    "float16 probabilities": weighted(torch.tensor(1e-5).half(), times=0),
    "bfloat16 probabilities": weighted(torch.tensor(0.3).bfloat16(), times=0),
    "bytes as weights": weighted(torch.tensor(200, dtype=torch.uint8), times=2),
    "logits twice in cat": joined(torch.cat),
    "logits twice in stack": joined(torch.stack),
    "a teacher of another dtype": teacher_of_another_dtype,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_the_value_and_the_gradients_without_it(name):
    assert_same(PROGRAMS[name])


# Affine functions of the NLL of rows ------------------------------------------------------------------------------


def in_place_sum(nll, x):
    nll *= x.weights
    nll.div_(2)
    nll.masked_fill_(x.masked, 0.5)
    nll[x.ids > V // 2] = 0
    return nll.sum()


AFFINE = {
    "where, a number": lambda nll, x: torch.where(x.masked, nll, 0).sum(),
    "where, zeros": lambda nll, x: torch.where(x.masked, nll, torch.zeros_like(nll)).mean(),
    "where, a constant": lambda nll, x: torch.where(x.masked, x.weights, nll / x.weights).mean(),
    "where, by name": lambda nll, x: torch.where(condition=x.masked, input=nll, other=nll * 3).mean(),
    "where, a method": lambda nll, x: nll.where(x.masked, 0.0).sum(1).mean(),
    "masked_fill": lambda nll, x: (nll.masked_fill(~x.masked, 0) / x.weights).sum(-1).div(x.masked.sum(-1)).mean(),
    "masked_fill, no zero": lambda nll, x: (nll.masked_fill(~x.masked, 3) * x.weights).sum(),
    "nan_to_num": lambda nll, x: torch.nan_to_num(nll * x.masked / x.weights).mul(x.weights).T.mean(0).sum(),
    "dot": lambda nll, x: torch.dot(nll.flatten(), x.weights.flatten()),
    "matmul": lambda nll, x: (nll @ x.weights[0] / 2).sum() + (x.weights[1] @ nll.T).mean(),
    "inner": lambda nll, x: torch.inner(x.weights[0], nll).mean(),
    "einsum": lambda nll, x: torch.einsum("bl,bl->", nll, x.weights),
    "einsum, of sums": lambda nll, x: torch.einsum("bl, l -> b", nll, x.weights[0]).mean(),
    "einsum, implicit": lambda nll, x: torch.einsum("bl,bl", x.weights, nll),
    "einsum, transposed": lambda nll, x: torch.einsum("bl,l,bl->lb", nll, x.weights[0], x.weights)[1:].sum(),
    "sums": lambda nll, x: (nll * x.weights + nll * x.masked - 2 + x.weights).sum(),
    "differences": lambda nll, x: (1 - nll).mean() + (x.weights - nll / 3).sum() + torch.sub(nll, nll, alpha=0.5).sum(),
    "a factor of a sum": lambda nll, x: torch.add(x.weights, nll, alpha=2).mean() + torch.rsub(nll, 1, alpha=2).sum(),
    "sums over dimensions": lambda nll, x: (nll.view(B, 2, 3).sum(-1) * x.weights[:, :2]).sum(0).div(3).sum(),
    "a kept dimension": lambda nll, x: (nll.sum(0, keepdim=True)[:, 1:] * x.weights[:1, 1:]).mean(),
    "sums of sums with numbers": lambda nll, x: ((nll + 1) + (nll * x.weights - x.weights) + (nll - 2)).sum(),
    "sums of sums": lambda nll, x: (nll.sum(-1) / x.masked.sum(-1) + x.weights[:, 0]).unsqueeze(0).mean(1).sum(),
    "in place": in_place_sum,
}  # fmt: skip


@pytest.mark.parametrize("broken", [False, True], ids=["", "nan"])
@pytest.mark.parametrize("name", AFFINE)
def test_an_affine_function_of_the_nll_is_one_weighted_sum(name, broken, monkeypatch):
    """``broken``: the NLL of a row is NaN, which the plain loss shows too, unless a constant replaces it."""
    monkeypatch.setattr("dllm_kernels.ops.token_nll", None)

    def program(model, x):
        x.weights = torch.rand(B, L, generator=torch.Generator().manual_seed(1)).add(0.1).to(DEVICE)
        if broken:
            x.noisy[0, 0], x.masked[0, 0] = V, False
        return AFFINE[name](x.nll(model), x)

    def make():
        model = Model(bias=True)
        with torch.no_grad():
            model.body.weight.data = torch.cat([model.body.weight, torch.full((1, D), torch.nan, device=DEVICE)])
        return model

    if not broken:
        assert_same(program, make)
        return
    with torch.no_grad():
        plain = program(make(), Batch())
    loss, _ = trained_and_gradients(program, make, fused=True)
    assert loss.isnan() == plain.isnan()


def test_nan_to_num_of_an_nll_that_is_nan_or_infinite():
    def program(model, x):
        with torch.no_grad():
            model.body.weight[x.noisy[0, 0]] = torch.nan
        nll = x.nll(model) / x.masked
        return (torch.nan_to_num(nll) * 1e-38).sum(1).mean()

    plain, _ = trained_and_gradients(program, Model, fused=False)
    torch.testing.assert_close(trained_and_gradients(program, Model, fused=True)[0], plain)


# Statistics that are computed together -------------------------------------------------------------------------------


def picked(logits, x):
    return logits.gather(-1, x.ids[..., None]).squeeze(-1)


def entropy(logits):
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def nll_of_rows(logits, x):
    return F.cross_entropy(logits.flatten(0, 1), x.ids.flatten(), reduction="none").view(B, L)


def three(logits, x):
    nll, lse, certainty = nll_of_rows(logits, x), logits.logsumexp(-1), entropy(logits)
    return (nll * x.masked).sum() + (lse.square() + certainty).mean()


TOGETHER = {
    "gather and logsumexp": lambda z, x: (picked(z, x) - z.logsumexp(-1)).exp().mean(),
    "gather of log-probabilities": lambda z, x: (
        z.log_softmax(-1).gather(-1, x.ids[..., None] % torch.tensor([5, 7], device=DEVICE)).exp().sum()
    ),
    "the NLL and its ratio, and the entropy": lambda z, x: (
        lambda nll, certainty: (torch.exp(nll.detach() - nll) - certainty).mean()
    )(nll_of_rows(z, x), entropy(z)),
    "three": three,
    "spellings of the entropy": lambda z, x: (lambda p: sum(i * rows for i, rows in enumerate([
        terms.sum(-1) for terms in (
            torch.special.entr(p), torch.xlogy(p, p), torch.special.xlogy(p, p), p * p.log2(), p.log10() * p,
            p * (p + 1e-10).log(), p * p.clamp(min=1e-12).log(), -2 * p * z.log_softmax(-1) / 3,
        )], 1)).mean())(z.softmax(-1)),
    "a weighted sum beside a logsumexp": lambda z, x: (
        lambda lse, nll: (nll * x.masked).sum(1).mean() + lse.exp().mean()
    )(z.logsumexp(-1), nll_of_rows(z, x)),
    "a reduced loss, the entropy and the argmax": lambda z, x: (
        lambda nll, certainty, best: (nll + certainty * (best == x.ids)).mean()
    )(F.cross_entropy(z.mT, x.ids), entropy(z), z.argmax(-1)),
    "a distribution": lambda z, x: (lambda p, log_p: (p.entropy() - log_p.exp()).mean())(
        *(lambda p: (p, p.log_prob(x.ids)))(torch.distributions.Categorical(logits=z))
    ),
    "log-probabilities from an unused logsumexp": lambda z, x: (
        lambda lse: picked(z - lse, x).exp().sum()
    )(z.logsumexp(-1, keepdim=True)),
    "log-probabilities from the logsumexp": lambda z, x: (
        lambda lse: nll_loss_of(z - lse, x) + lse.square().mean() / 3
    )(z.logsumexp(-1, keepdim=True)),
}  # fmt: skip


def nll_loss_of(log_probs, x):
    return -log_probs.gather(-1, x.ids[..., None]).squeeze(-1)[x.masked].exp().sum()


def rank(z, x):
    return (z >= picked(z, x).unsqueeze(-1)).sum(-1)


def hinge(z, x):
    margin = (z - picked(z, x)[..., None]).relu()
    return margin.sum() / (margin > 0).sum()


# Logits beside their own entries; the results are counts, but for the last one.
ENTRIES = {
    "the rank of a target": rank,
    "of log-probabilities": lambda z, x: rank(z.log_softmax(-1), x),
    "of probabilities": lambda z, x: rank(z.softmax(-1), x),
    "of a view without a graph": lambda z, x: rank(z[:, 1:].detach(), Shifted(x)),
    "the maximum": lambda z, x: (z == z.max(-1, keepdim=True).values).sum(-1),
    "the maximum of probabilities": lambda z, x: (lambda p: (p.amax(-1)[..., None] <= p).sum(-1))((z / 3).softmax(-1)),
    "the maximum of detached logits": lambda z, x: (z.detach() < z.detach().amax(-1, True)).sum(-1),
    "the maximum, as a number per row": lambda z, x: torch.eq(z, z.detach().max(-1)[0].unsqueeze(-1)).sum(-1),
    "the largest of a mixture": lambda z, x: (lambda y: (y < y.topk(3).values[..., -1:]).sum(-1))(
        z.roll(1, 0) + 1.5 * (z - z.roll(1, 0))
    ),
    "another tensor": lambda z, x: (z * 2 >= z.max(-1, keepdim=True).values).sum(-1),
    "a hinge loss": hinge,
}


class Shifted:
    def __init__(self, x):
        self.ids = x.ids[:, 1:]


@pytest.mark.parametrize("name", ENTRIES)
def test_a_comparison_with_entries_of_the_logits_is_exact(name):
    model, x = Model().double(), Batch()

    def run():
        model.zero_grad()
        out = ENTRIES[name](model(x.noisy), x)
        if out.requires_grad:
            out.backward()
        return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    plain = run()
    with fused_head(model, on_logits="allow"):
        torch.testing.assert_close(run(), plain)
    if not plain[0].is_floating_point():
        with torch.no_grad(), fused_head(model, on_logits="allow"):
            assert torch.equal(ENTRIES[name](model(x.noisy), x), plain[0])


def test_entries_that_were_changed_are_compared_as_they_are():
    model, x = Model().double(), Batch()

    def run():
        with torch.no_grad():
            z = model(x.noisy)
            best = z.amax(-1, keepdim=True)
            best -= 1
            return (z > best).sum(-1)

    plain = run()
    with fused_head(model, on_logits="allow"):
        assert torch.equal(run(), plain)


def test_entries_of_rows_whose_memory_other_rows_took_are_compared_as_they_are():
    model, ids = Model().double(), torch.arange(V - 1, device=DEVICE)[None]
    one, other = ids[0].view(2, -1)

    def run():
        with torch.no_grad():
            z = model(ids)
            best = z[:, one].amax(-1, keepdim=True)
            return torch.stack([(rows >= best).sum(-1) for rows in [z[:, other] for _ in range(50)]])

    plain = run()
    with fused_head(model, on_logits="allow"):
        assert torch.equal(run(), plain)


@pytest.mark.parametrize("name", TOGETHER)
def test_statistics_of_the_same_logits_are_computed_in_one_pass(name, monkeypatch):
    calls = []
    row_stats = dllm_kernels.ops.row_stats
    monkeypatch.setattr("dllm_kernels.ops.linear_sample", None)
    monkeypatch.setattr(
        "dllm_kernels.ops.row_stats", lambda *a, **k: (calls.append(k["with_ids"]), row_stats(*a, **k))[1]
    )
    if "from" not in name:
        monkeypatch.setattr("dllm_kernels.ops.token_nll", None)
        monkeypatch.setattr("dllm_kernels.ops.weighted_nll", None)
        monkeypatch.setattr("dllm_kernels.deferred._nll.weighted_rows", None)
        monkeypatch.setattr("dllm_kernels.deferred._nll.row_values", None)
    assert_same(lambda model, x: TOGETHER[name](model(x.noisy), x))
    assert calls == ([] if "unused" in name else ["argmax" in name])


# Adapters of one head ---------------------------------------------------------------------------------------------


def mixed(first, second):
    """Return a program that joins the logits of two calls of one head."""

    def program(model, x):
        logits = torch.cat([first(model, x.noisy), second(model, x.noisy)])
        return F.cross_entropy(logits.transpose(1, 2), x.ids.repeat(2, 1))

    return program


def on(model, ids):
    return model(ids)


def off(model, ids):
    return model.off(ids)


def self_distillation(model, x):
    with torch.no_grad():
        teacher = model.off(x.noisy)
    return divergence(model(x.noisy), teacher, x.masked.float()).loss


def hybrid(noisy, causal):
    """Return a program with a diffusion branch and a causal branch of one head."""

    def program(model, x):
        p, ones = torch.full((B, L), 0.5, device=DEVICE), torch.ones(B, L, device=DEVICE)
        masks = x.masked, p, ones, ones
        loss = HybridDiffusionLLMLoss()(noisy(model, x.noisy), x.ids, *masks, causal_logits=causal(model, x.ids))
        return loss.total_loss

    return program


TWO_CALLS = {
    "off, on": mixed(off, on), "on, off": mixed(on, off), "on, on": mixed(on, on), "off, off": mixed(off, off),
    "self-distillation": self_distillation, "hybrid, off and on": hybrid(off, on),
    "hybrid, on and off": hybrid(on, off), "hybrid, on and on": hybrid(on, on),
}  # fmt: skip


@pytest.mark.peer
@pytest.mark.parametrize("name", TWO_CALLS)
def test_calls_with_and_without_an_adapter_are_of_different_heads(name):
    assert_same(TWO_CALLS[name], Adapted)


@pytest.mark.peer
def test_a_teacher_without_the_bias_of_the_adapter():
    def make():
        model = Adapted(bias=True, lora_bias=True)
        with torch.no_grad():
            model.lm_head.lora_B["default"].bias.normal_(std=3.0)
        return model

    assert_same(self_distillation, make)


# Errors and copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_logits_are_not_used_after_an_optimizer_has_changed_the_head(options):
    model, x = Model(), Batch()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, **options)
    other = torch.optim.AdamW(Model().parameters(), 0.1, **options)
    with fused_head(model):
        logits = model(x.noisy).transpose(1, 2)
        F.cross_entropy(logits, x.ids).backward()
        other.step()  # of another model
        F.cross_entropy(logits, x.ids)
        optimizer.step()
        with pytest.raises(RuntimeError, match="must not be modified between the head and the use"):
            F.cross_entropy(logits, x.ids)
        F.cross_entropy(model(x.noisy).transpose(1, 2), x.ids)


@pytest.mark.skipif(DEVICE != "cpu", reason="values are not read on a GPU")
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_logits_are_not_used_after_a_write_to_the_data_of_the_head(name):
    """As an EMA of the weights does, which changes no version counter."""
    model, x = Model(bias=True), Batch()
    with fused_head(model, on_logits="allow"):
        z = model(x.noisy)
        with torch.no_grad():
            old = z.logsumexp(-1)
        model.lm_head.get_parameter(name).data.mul_(0.9)
        for use in (lambda: z.logsumexp(-1), z.exp, lambda: F.cross_entropy(z.transpose(1, 2), x.ids)):
            with pytest.raises(RuntimeError, match="must not be modified between the head and the use"):
                use()
        assert not torch.equal(model(x.noisy).logsumexp(-1), old)


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False).to(DEVICE)


def test_a_factor_of_a_float64_loss_has_all_its_digits():
    model, x = Model().double(), Batch()
    with fused_head(model):
        fused = (x.nll(model) / 3).sum()
    torch.testing.assert_close(fused, (x.nll(model) / 3).sum(), rtol=1e-14, atol=0)


def test_logits_cast_to_float64_have_the_digits_of_float64():
    """Fused operations would compute in the dtype of the hidden states."""
    model, x = Model(), Batch()

    def losses():
        z = model(x.noisy).double()
        return F.cross_entropy(z.transpose(1, 2), x.ids), token_nll(z, x.ids).nll, z.logsumexp(-1)

    expected = losses()
    with fused_head(model, on_logits="allow"):
        found = losses()
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("of", [lambda model, x: model(x.noisy), lambda model, x: x.nll(model)], ids=["logits", "NLL"])
def test_the_gradient_of_what_was_never_computed(of):
    model, x = Model(), Batch()

    def loss(y):
        return F.cross_entropy(y.flatten(0, 1), x.ids.flatten()) if y.ndim == 3 else y.sum()

    with fused_head(model, on_logits="allow"):
        y = of(model, x)
        with pytest.raises(RuntimeError, match=r"inputs of torch\.autograd\.grad must .* call materialize\(\) of them"):
            torch.autograd.grad(loss(y), [model.lm_head.weight, y], allow_unused=True)
        y = of(model, x)
        y.materialize()
        (gradient,) = torch.autograd.grad(loss(y), y)
        lse = model(x.noisy).logsumexp(-1)
        (of_lse,) = torch.autograd.grad(lse.square().sum(), lse)
        torch.testing.assert_close(of_lse, 2 * lse.detach())
    y = of(model, x)
    torch.testing.assert_close(gradient, torch.autograd.grad(loss(y), y)[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["deepcopy", "torch.save"])
def test_a_copy_of_the_model_has_its_own_head(copied):
    model, x = Model(), Batch()
    expected = model(x.noisy)
    with fused_head(model):
        other = copied(model)
        assert torch.equal(other(x.noisy), expected)
        assert type(model(x.noisy)) is not torch.Tensor
        with fused_head(other) as fused:
            with torch.no_grad():
                other.lm_head.weight.zero_()
            assert x.nll(other).mean().item() == pytest.approx(float(np.log(V)))
        assert fused.materialized == 0
    assert torch.equal(model(x.noisy), expected)
    assert not other.lm_head.weight.any()
    assert torch.equal(other(x.noisy), torch.zeros_like(expected))


def test_a_model_without_values():
    model = Model().to("meta")
    ids = torch.zeros(B, L, dtype=torch.long, device="meta")
    with fused_head(model) as fused:
        nll = F.cross_entropy(model(ids).transpose(1, 2), ids, reduction="none")
        assert (nll * torch.tensor(0.5)).sum().shape == ()
    assert fused.materialized == 0
    with FakeTensorMode(), fused_head(head := torch.nn.Linear(D, V), head=head, on_logits="allow"):
        z = head(torch.ones(B, L, D)) + torch.ones(B, L, 1)  # operations that otherwise read values
        z[..., 3] = -1e9
        z = z.masked_fill(torch.arange(V) > 5, -torch.inf)
        assert F.mse_loss(z, z.softmax(-1)).shape == ()


@pytest.mark.skipif(DEVICE == "cpu", reason="a number on the CPU and an NLL on a GPU")
def test_a_weight_that_is_a_number_on_the_cpu():
    assert_same(lambda m, x: (x.nll(m) * torch.tensor(0.5) / torch.tensor(3)).sum())
