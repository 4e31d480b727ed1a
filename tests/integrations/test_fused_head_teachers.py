"""Losses against a teacher under ``fused_head``: values and gradients of the plain loop, without the student's logits.

The teacher is a stored tensor, or deferred logits of another head.
"""

import contextlib
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, kl_divergence

from dllm_kernels import fused_head
from tests.conftest import DEVICE
from tests.support.fused_models import Adapted, B, L, V, frozen
from tests.support.fused_models import Model as AnyModel
from tests.support.parity import assert_parity

Model = functools.partial(AnyModel, size=3.0)


class Batch:
    """Tokens, a mask, weights, and a teacher: its model, logits, probabilities, some of which are 0."""

    def __init__(self, dtype=torch.float32):
        g = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, V, (B, L), generator=g).to(DEVICE)
        self.mask = (torch.rand(B, L, generator=g) < 0.6).to(DEVICE)
        self.mask[:, 2], self.mask[0, 1] = True, False
        self.w = torch.rand(B, L, generator=g).to(DEVICE, dtype)
        self.t = torch.randn(B, L, V, generator=g).mul(2).to(DEVICE, dtype)
        self.q = self.t.softmax(-1)
        self.sparse = self.q.masked_fill(torch.rand(B, L, V, generator=g).to(DEVICE) < 0.8, 0)
        self.teacher = Model(bias=True).to(dtype)

    def mean(self, rows):
        return (rows * self.mask).sum() / self.mask.sum()


def in_place(z, x):
    terms = x.q * z.log_softmax(-1)
    terms *= x.mask[..., None]
    terms[x.q < 0.01] = 0
    return -terms.neg_().sum()


def without_class(z):
    z[..., 3] = -torch.inf
    return z


@torch.no_grad()
def probabilities(z):
    return z.softmax(-1, dtype=torch.promote_types(z.dtype, torch.float32))


def torchtune(z, x):
    infinite = torch.isinf(z)
    log_p = F.log_softmax(z, -1, dtype=torch.float32)
    rows = torch.masked_fill(x.q * log_p, infinite, 0).sum(-1).view(-1)
    return -torch.sum(rows * x.mask.int().view(-1), dim=0) / x.mask.sum()


def minillm(z, x):
    p, log_p = F.softmax(z, -1, dtype=torch.float32), F.log_softmax(z, -1, dtype=torch.float32)
    return x.mean((p * log_p - p * x.t.log_softmax(-1)).sum(-1))


def gkd(z, x):
    student, teacher, beta = F.log_softmax(z / 0.9, -1), F.log_softmax(x.t / 0.9, -1), torch.tensor(0.3, device=DEVICE)
    mixture = torch.logsumexp(torch.stack([student + torch.log(1 - beta), teacher + torch.log(beta)]), dim=0)
    to_teacher, to_student = (F.kl_div(mixture, q, reduction="none", log_target=True) for q in (teacher, student))
    return (beta * to_teacher + (1 - beta) * to_student)[x.mask].sum() / x.mask.sum()


def mixed(z, x):
    ce = F.cross_entropy(z.view(-1, V), x.ids.view(-1))
    return 0.3 * ce + 0.7 * 4 * F.kl_div((z / 2).log_softmax(-1), (x.t / 2).softmax(-1), reduction="batchmean")


def one_log_softmax(z, x):
    log_p = z.log_softmax(-1)
    nll = -log_p.gather(-1, x.ids[..., None]).squeeze(-1)
    return x.mean(0.3 * nll - 0.7 * (x.q * log_p).sum(-1))


def chunks(z, x):
    parts = zip(z.log_softmax(-1).chunk(3, 1), x.q.chunk(3, 1), x.w.chunk(3, 1), strict=True)
    return sum((F.kl_div(a, q, reduction="none").sum(-1) * w).sum() for a, q, w in parts)


def kl(z, x):
    return F.kl_div(z.log_softmax(-1), x.q, reduction="none").sum(-1)


def without_graph(x):
    with torch.no_grad():
        return x.teacher(x.ids)


LOSSES = {
    "product": lambda z, x: -(x.q * z.log_softmax(-1)).sum(-1).mean(),
    "product, masked rows": lambda z, x: -(x.q * z.log_softmax(-1) * x.mask[..., None]).sum() / x.mask.sum(),
    "product of a mask first": lambda z, x: -torch.sum(x.mask[..., None] * x.q * nn.LogSoftmax(dim=2)(z), 2).mean(),
    "sums of both": lambda z, x: -torch.sum(torch.sum(x.mask[..., None] * (x.q * nn.LogSoftmax(dim=2)(z)), 2)),
    "signed constants": lambda z, x: (x.t * z.log_softmax(-1)).sum(-1)[x.mask].mean(),
    "zeros": lambda z, x: -(x.sparse * z.log_softmax(-1)).sum((1, 2)).mean(),
    "flat rows": lambda z, x: -(x.q * z.log_softmax(-1)).view(-1, V)[x.mask.view(-1)].sum(1).mean(),
    "a slice later": lambda z, x: -(x.q * z.log_softmax(-1))[:, 1:].sum(-1, keepdim=True).squeeze(-1).mean(dim=(0, 1)),
    "a strided teacher": lambda z, x: -(x.t[:, :-1].softmax(-1) * z[:, 1:].log_softmax(-1)).sum(-1).mean(),
    "a mean of all": lambda z, x: -(x.q * z.log_softmax(-1)).mean(),
    "where": lambda z, x: torch.where(x.mask[..., None], -(x.q * z.log_softmax(-1)), 0.0).sum(-1).mean(),
    "einsum": lambda z, x: -torch.einsum("blv,blv->bl", x.q, z.log_softmax(-1).to(x.q.dtype)).mean(),
    "in place": in_place,
    "torchtune": torchtune,
    "cross_entropy": lambda z, x: F.cross_entropy(z.view(-1, V), x.q.view(-1, V)),
    "cross_entropy, classes second": lambda z, x: F.cross_entropy(z.mT, x.q.mT, reduction="none")[x.mask].mean(),
    "smoothing of probabilities": lambda z, x: nn.CrossEntropyLoss(label_smoothing=0.1)(z[0], x.q[0]),
    "smoothing of ids, capped": lambda z, x: F.cross_entropy(z.tanh().view(-1, V), x.ids.view(-1), label_smoothing=0.1),
    "smoothing of ids, with weights": lambda z, x: F.cross_entropy(
        z.mT, x.ids.masked_fill(~x.mask, -100), label_smoothing=0.1, weight=x.q[0, 0]
    ),
    "kl_div": lambda z, x: x.mean(F.kl_div(z.log_softmax(-1), x.q, reduction="none").sum(-1)),
    "kl_div of zeros": lambda z, x: x.mean(F.kl_div(z.log_softmax(-1), x.sparse, reduction="none").sum(-1)),
    "kl_div, sum": lambda z, x: F.kl_div(z.log_softmax(-1), x.t.log_softmax(-1), reduction="sum", log_target=True),
    "kl_div, mean": lambda z, x: F.kl_div(input=z.log_softmax(-1), target=x.q, reduction="mean"),
    "KLDivLoss": lambda z, x: nn.KLDivLoss(reduction="batchmean")(F.log_softmax(z / 2, -1), F.softmax(x.t / 2, -1)),
    "reversed": lambda z, x: x.mean((z.softmax(-1) * (z.log_softmax(-1) - x.t.log_softmax(-1))).sum(-1)),
    "reversed kl_div": lambda z, x: F.kl_div(
        x.t.log_softmax(-1), z.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1).mul(x.w).sum(),
    "minillm": minillm,
    "total variation": lambda z, x: 0.5 * (z.softmax(-1) - x.q).abs().sum(-1).mean(),
    "squares": lambda z, x: F.mse_loss(z, x.t) + ((z.softmax(-1) - x.q) ** 2).mean(-1)[x.mask].mean(),
    "a distribution": lambda z, x: kl_divergence(Categorical(logits=z), Categorical(logits=x.t)).mean(),
    "a distribution, reversed": lambda z, x: x.mean(kl_divergence(Categorical(probs=x.q), Categorical(logits=z))),
    "gkd": gkd,
    "mixture of probabilities": lambda z, x: (
        x.q * (x.q.log() - (0.1 * z.log_softmax(-1).exp() + 0.9 * x.q).log())
    ).sum(-1).mean(),
    "a tensor as temperature": lambda z, x: -(x.q * (z / torch.tensor(2.0)).log_softmax(-1)).sum(-1).mean(),
    "cross-entropy and teacher": mixed,
    "one log-softmax": one_log_softmax,
    "a function of rows": lambda z, x: kl(z, x).clamp(max=2).mean(),
    "functions of functions": lambda z, x: x.mean(1 - (-kl(z, x) / 2 - 1e-3).exp() ** 2),
    "functions of two values": lambda z, x: x.mean(
        ((z - z.mean(-1, keepdim=True)).exp().sum(-1) - (z * z).gather(-1, x.ids[..., None])[..., 0]) / (2 + kl(z, x))
    ),
    "functions of moved rows": lambda z, x: kl(z, x)[x.mask].sqrt().sum() + (kl(z, x).log1p().T[1:] * x.w.T[1:]).sum(),
    "functions of weighted rows": lambda z, x: (kl(z, x) * x.w).exp().sum() + (kl(z, x) + x.w).square().sum(),
    "a function and its argument": lambda z, x: (
        lambda k: x.mean(k.exp()) + (2 / k).sum() + (k.sqrt() / 3).sum(-1).log().mean() + k.mean()
    )(kl(z, x)),
    "a function of values": lambda z, x: (
        lambda r: torch.min(r * x.w, r.clamp(0.8, 1.2) * x.w).mean() + 0 * r.detach().mean()
    )((kl(z, x) - 0.5).exp()),
    "chunks": chunks,
    "another head": lambda z, x: -(without_graph(x).softmax(-1) * z.log_softmax(-1)).sum(-1)[x.mask].mean(),
    "another head, detached": lambda z, x: F.kl_div(
        z.log_softmax(-1), x.teacher(x.ids).detach().log_softmax(-1), reduction="batchmean", log_target=True
    ),
    "another head, moved": lambda z, x: x.mean(
        (without_graph(x).roll(1, 1).softmax(-1) - z.softmax(-1)).abs()[:, :, None].squeeze(2).sum(-1)
    ),
    "entropy of weighted rows": lambda z, x: (z.softmax(-1) * z.log_softmax(-1) * x.w[..., None]).sum(),
    "a negative factor": lambda z, x: (-2 * z).amax(-1).sum(),
    "capped": lambda z, x: (lambda y: (y + y / 2).logsumexp(-1).sum())(torch.tanh(z)),
    "a cap of capped ones": lambda z, x: torch.tanh(torch.tanh(z / 3)).logsumexp(-1).sum(),
    "a cap of log-probabilities": lambda z, x: torch.tanh(z.log_softmax(-1)).logsumexp(-1).sum(),
    "a cap of a skipped class": lambda z, x: torch.tanh(without_class(z)).logsumexp(-1).sum(),
    "dimensions from the front": lambda z, x: (x.q - F.softmax(z, 2)).abs().sum(2).mean() + (
        lambda e: (x.q * (e / e.sum(2, keepdim=True)).sqrt()).sum(2).mean()
    )(z.exp()),
    "a number per row": lambda z, x: (x.t * (z + x.w[..., None]).relu())[:, 1:].flatten(0, 1).sum(-1).square().mean(),
    "a number per row, moved": lambda z, x: (
        (z - x.w[..., None])[:, 1:].flatten(0, 1).relu() * x.t[:, 1:].flatten(0, 1)
    )[[3, 1, 0]].mean(-1).square().mean(),
    "a number per class": lambda z, x: ((z + x.q[0, 0]).sigmoid() * x.t).sum(-1).mean(),
    "minus the maximum": lambda z, x: ((z - z.amax(-1, keepdim=True)).exp() * x.t).sum(-1).mean(),
    "minus the maximum, detached": lambda z, x: (
        (z - z.max(-1, keepdim=True).values.detach() + 1).square() * x.t
    ).sum(-1).mean(),
    "set classes": lambda z, x: (
        z.masked_fill(torch.arange(V, device=z.device) < 2, -torch.inf).clamp(min=-5) * x.t
    ).sum(-1).mean(),
    "a large epsilon": lambda z, x: (lambda p: (p * (p + 1e-3).log()).sum())(z.softmax(-1)),
    "classes in another place": lambda z, x: (lambda p: (p * p.log()).sum(1).mean())(z.softmax(-1).mT),
    "without a graph": lambda z, x: (probabilities(z) * z.log_softmax(-1)).sum(-1).mean() + (
        probabilities(z).max(-1).values.sum() + probabilities(z).gather(-1, x.ids[..., None]).sum()
    ),
    "a softmax of squares": lambda z, x: (torch.softmax(z.square(), -1, z.dtype) * x.t).sum(-1).mean(),
    "a power without a graph": lambda z, x: (
        lambda p: (torch.no_grad()(torch.square)(p) * p.log()).sum(-1).mean())(z.softmax(-1)),
    "a detached entropy": lambda z, x: (
        (z.softmax(-1) * z.log_softmax(-1)).detach().sum(-1).mean() + z.softmax(-1).detach().amax(-1).mean()
        + z.logsumexp(-1).mean()
    ),
    "itself": lambda z, x: -(z.detach().softmax(-1) * (z / 2).log_softmax(-1)).sum(-1).mean(),
}  # fmt: skip


def run(name, fused, *, dtype=torch.float32, autocast=False, make=Model):
    torch.manual_seed(1)
    model, x = make().to(dtype), Batch(dtype)
    with contextlib.ExitStack() as stack:
        heads = [stack.enter_context(fused_head(m, on_logits="raise")) for m in (model, x.teacher) if fused]
        stack.enter_context(torch.autocast(DEVICE, torch.bfloat16, enabled=autocast))
        loss = LOSSES[name](model(x.ids), x)
        loss.backward()
    assert not any(head.materialized for head in heads)
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_value_and_gradients_of_the_plain_loop(name):
    expected = run(name, False)
    torch.testing.assert_close(run(name, True), expected, rtol=2e-5, atol=2e-6)


SETTINGS = {
    "bias and cap": {"make": lambda: Model(bias=True, after=lambda z: torch.tanh(z / 4) * 4)},
    "lora": {"make": lambda: Adapted(bias=True, size=3.0)}, "frozen": {"make": lambda: frozen(size=3.0)},
    "float64": {"dtype": torch.float64},
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_loss_in_other_settings(name, setting):
    expected = run(name, False, **SETTINGS[setting])
    torch.testing.assert_close(run(name, True, **SETTINGS[setting]), expected, rtol=2e-5, atol=2e-6)


def error(found, exact):
    return max(float((a.double() - b).norm() / b.norm().clamp(min=1e-12)) for a, b in zip(found, exact, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("low", [{"dtype": torch.bfloat16}, {"autocast": True}], ids=["bfloat16", "autocast"])
def test_a_loss_in_low_precision_is_as_good_as_the_plain_one(name, low):
    exact = run(name, False, dtype=torch.float64)
    plain, found = run(name, False, **low), run(name, True, **low)
    assert found[0].dtype == plain[0].dtype
    assert error(found, exact) <= 2 * error(plain, exact) + 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_logarithm_of_a_softmax_in_16_bits_is_rounded_as_in_the_plain_loop(dtype):
    """Errors of p and of its logarithm cancel in p log p; those of log_softmax, which is the same number, do not."""

    def kl(z):
        p = z.softmax(-1)
        return (p * (p.log() - q)).sum(-1)

    model, x = Model().to(dtype), Batch()
    q = (model(x.ids).detach() * 1.05).log_softmax(-1)
    plain = kl(model(x.ids)).detach()
    with fused_head(model, on_logits="raise"):
        torch.testing.assert_close(kl(model(x.ids)).detach(), plain, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("name", ["product", "kl_div", "minillm"])
def test_parity_of_losses_against_a_teacher(name):
    model, x = Model(bias=True), Batch()
    names = [name for name, _ in model.named_parameters()]

    def loss(fused, *leaves):
        module, batch = copy.deepcopy(model).to(leaves[0].dtype), copy.copy(x)
        batch.t, batch.q = (t.to(leaves[0].dtype) for t in (x.t, x.q))
        state = torch.nn.utils.stateless._reparametrize_module(module, dict(zip(names, leaves, strict=True)))
        with state, fused_head(module, on_logits="raise") if fused else contextlib.nullcontext():
            return LOSSES[name](module(batch.ids), batch)

    def draw(seed):
        g = torch.Generator().manual_seed(seed)
        leaves = [torch.randn(p.shape, generator=g).to(DEVICE) for p in model.parameters()]
        return leaves, torch.tensor(0.75, device=DEVICE)

    assert_parity(lambda *leaves: loss(True, *leaves), lambda *leaves: loss(False, *leaves), draw, [B * L * V])


def test_a_teacher_that_is_modified_before_the_loss_raises_as_in_the_plain_loop():
    model, x = Model(), Batch()
    with fused_head(model, on_logits="raise"):
        terms = x.q * model(x.ids).log_softmax(-1)
        x.q.zero_()
        with pytest.raises(RuntimeError, match="operands of deferred logits must not be modified before the loss"):
            terms.sum(-1).mean().backward()


def test_a_small_operand_is_copied():
    def loss(model, x):
        terms, mask = F.kl_div(model(x.ids).log_softmax(-1), x.q, reduction="none"), x.mask[..., None].to(x.q.dtype)
        terms = terms + mask
        mask.zero_()
        return terms.sum()

    model, x = Model(), Batch()
    plain = loss(model, x)
    with fused_head(model, on_logits="raise"):
        torch.testing.assert_close(loss(model, x), plain)


def product_of_trained(model, x):
    q = nn.Parameter(x.q.clone())
    (-(q * model(x.ids).log_softmax(-1)).sum(-1).mean()).backward()
    return q.grad


def hooked(model, x):
    log_p, grads = model(x.ids).log_softmax(-1), []
    terms = x.q * log_p
    terms.register_hook(grads.append)
    (terms.sum(-1) * x.w).sum().backward()
    return grads[0]


def kept(model, x):
    p = model(x.ids).softmax(-1)
    p.retain_grad()
    ((p - x.q).abs().sum(-1) * x.w).sum().backward()
    return p.grad


def used_twice(model, x):
    terms = F.kl_div(model(x.ids).log_softmax(-1), x.q, reduction="none")
    (terms.sum(-1).square().mean() + terms.cumsum(-1).mean() + terms.sum()).backward()
    return model.lm_head.weight.grad


def changed_beside_a_view(model, x):
    terms = x.q * model(x.ids).log_softmax(-1)
    first = terms[:, 0]
    terms *= 2
    (first.sum() + terms.square().sum()).backward()
    return model.lm_head.weight.grad


def no_graph(model, x):
    with torch.no_grad():
        rows = F.kl_div(model(x.ids).log_softmax(-1), x.q, reduction="none").sum(-1)
        model.lm_head.weight.zero_()
    return rows


def several_backwards(model, x):
    rows = F.kl_div(model(x.ids).log_softmax(-1), x.q, reduction="none").sum(-1)
    for row in rows[0]:
        row.backward(retain_graph=True)
    return model.lm_head.weight.grad


def with_itself(model, x):
    p = model(x.ids).softmax(-1)
    ((p + p) * p * (p - p * 2) / (p + 1)).pow(2).sum().backward()
    return model.lm_head.weight.grad


@pytest.mark.parametrize(
    "program",
    [
        product_of_trained,
        hooked,
        kept,
        used_twice,
        changed_beside_a_view,
        no_graph,
        several_backwards,
        with_itself,
    ],
)
def test_other_uses_of_terms_are_those_of_the_plain_loop(program):
    torch.manual_seed(2)
    model, x = Model(), Batch()
    plain = program(copy.deepcopy(model), x)
    with fused_head(model, on_logits="allow"):
        torch.testing.assert_close(program(model, x), plain)
