"""Forms of confidences, shifts, caps, entropies and set classes: no logits under ``fused_head``, and equal results."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

from benchmarks.measure import peak_memory
from dllm_kernels import fused_head
from tests.conftest import DEVICE, every_time
from tests.support.fused_models import Adapted, B, D, L, Model, V, frozen


class Batch:
    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, V - 4, (B, L), generator=g).to(DEVICE)
        self.masked = (torch.rand(B, L, generator=g) < 0.5).to(DEVICE)
        self.masked[:, 2] = True
        self.noisy = self.ids.masked_fill(self.masked, V - 1)
        self.w = torch.rand(B, L, generator=g).to(DEVICE)
        self.classes = torch.rand(V, generator=g).to(DEVICE)
        self.targets = self.ids.masked_fill(~self.masked, -100)


def nll(z, x):
    return F.cross_entropy(z.flatten(0, -2), x.ids.flatten(), reduction="none").view(B, L)


def picked(z, x):
    return z.gather(-1, x.ids[..., None]).squeeze(-1)


def entropy_of(p):
    return -(p * p.log()).sum(-1)


def put(z, index, value):
    z[index] = value
    return z


def added(z, index, value):
    z[index] += value
    return z


def no_grad(function):
    def without(z, x):
        with torch.no_grad():
            return function(z, x)

    return without


def margin(values):
    return values[..., 0] - values[..., 1]


def shifted_in_place(z, x):
    z -= z.max(-1, keepdim=True).values.detach()
    return (z.exp().sum(-1).log() - picked(z, x)) * x.w


def subs(z, x, fill):
    """Return log-probabilities with those of tokens that are not masked replaced by ``fill(log_probs, given)``."""
    z = put(z, (..., V - 1), -1e6)
    return fill(z - torch.logsumexp(z, -1, keepdim=True), ~x.masked[..., None])


def both_parts(best):
    """Use values and ids of a maximum."""

    def use(z, x):
        values, ids = best(z)
        return values * x.w + (ids == x.ids)

    return use


SHIFTS = {
    "its maximum": lambda z, x: z - z.max(-1, keepdim=True).values,
    "its maximum, detached": lambda z, x: z - z.max(dim=-1, keepdim=True)[0].detach(),
    "its maximum, amax": lambda z, x: z - z.detach().amax(-1, keepdim=True),
    "its maximum, in a new dimension": lambda z, x: z - torch.max(z, -1).values.detach()[..., None],
    "a number": lambda z, x: z + 3 - 0.5,
    "a number per row": lambda z, x: x.w.unsqueeze(-1) + z,
    "a number per position": lambda z, x: torch.sub(z, x.w[0][:, None]),
    "a number per row, in place": lambda z, x: z.sub_(x.w[..., None]).add_(2),
    "a number per row, moved": lambda z, x: (
        ((z - x.w[..., None]) / 2).flatten(0, 1).view(B, L, V).roll(1, 1).roll(-1, 1) * 2
    ),
    "a number per class": lambda z, x: z + 0.3 * x.classes,
    "a number per class, in place": lambda z, x: z.div_(2).sub_(x.classes[None]),
}  # fmt: skip
OF_SHIFTS = {
    "logsumexp": lambda z, x: z.logsumexp(-1) * x.w,
    "logsumexp by hand": lambda z, x: torch.log(torch.exp(z).sum(dim=-1)) - picked(z, x),
    "gather": picked,
    "softmax by hand": lambda z, x: (lambda e: (e / e.sum(-1, keepdim=True)).gather(-1, x.ids[..., None]))(z.exp()),
    "log-softmax by hand": lambda z, x: picked(z - z.exp().sum(-1, keepdim=True).log(), x),
    "log-softmax": lambda z, x: picked(z.log_softmax(-1), x).exp(),
    "a mean of logits": lambda z, x: (z.softmax(-1) * z).sum(-1) * x.w,
    "entropy": lambda z, x: entropy_of(z.softmax(-1)) * x.w,
    "maximum": lambda z, x: z.max(-1).values * x.w,
    "cross-entropy": lambda z, x: F.cross_entropy(z.mT, x.ids),
    "top-k": lambda z, x: margin(z.topk(2, -1).values * 2) + z.topk(2, -1).values.sum(-1) * x.w,
}
FORMS = {
    "confidence": lambda z, x: (1 - z.softmax(-1).max(-1).values.detach()) * nll(z, x),
    "confidence and prediction": both_parts(lambda z: torch.max(z.softmax(-1), dim=-1)),
    "confidence of log-probabilities": both_parts(lambda z: z.log_softmax(-1).max(-1)),
    "maximum of logits": both_parts(lambda z: z.max(-1)),
    "without gradients": no_grad(both_parts(lambda z: z.softmax(-1).max(-1))),
    "in inference mode": lambda z, x: nll(z, x) * torch.inference_mode()(
        lambda z: (z.softmax(-1) * x.w[..., None]).exp().sum(-1))(z).clone(),
    "weights without gradients": lambda z, x: no_grad(both_parts(lambda z: z.max(-1)))(z, x) * nll(z, x),
    "prediction of probabilities": lambda z, x: (z.softmax(-1).argmax(-1) == x.ids) * nll(z, x),
    "predictions as targets": lambda z, x: (lambda p, ids: p.detach() * (
        F.cross_entropy(z.mT, ids, reduction="none") + z.log_softmax(-1).gather(-1, ids[..., None])[..., 0].exp()
    ))(*z.softmax(-1).max(-1)),
    "amax": lambda z, x: z.softmax(-1).amax(-1) * x.w + z.amax(dim=(-1,), keepdim=True).squeeze(-1),
    "margin": lambda z, x: margin(z.softmax(-1).topk(2, dim=-1).values) * x.w,
    "margin of log-probabilities": lambda z, x: margin(z.log_softmax(-1).topk(2)[0]).exp() * x.w,
    "accuracy of the top": lambda z, x: (
        nll(z, x) + (no_grad(lambda z, x: z.topk(3, -1))(z, x)[1] == x.ids[..., None]).any(-1).float().mean()
    ),
    "top without gradients": lambda z, x: nll(z, x) * no_grad(lambda z, x: z.topk(3).values.sum(-1))(z, x),
    "confidence of rows": lambda z, x: z.softmax(-1)[x.masked].max(-1).values * x.w[x.masked],
    "confidence, cast": lambda z, x: (
        z.softmax(-1).float().view(B * L, V).detach().max(-1).values.view(B, L) * nll(z, x)
    ),
    "classes first": lambda z, x: z.mT.softmax(1).max(1).values * x.w + z.mT.amax(1, keepdim=True).squeeze(1),
    "confidence without a class": lambda z, x: put(z, (..., V - 1), -torch.inf).softmax(-1).max(-1).values * x.w,
    "the entropy of p and log p": lambda z, x: entropy_of(z.softmax(-1)) * x.w,
    "bits": lambda z, x: -(lambda p: (p * p.log2()).sum(-1) + (p.log10() * p).sum(-1))(z.softmax(-1)) * x.w,
    "xlogy": lambda z, x: (lambda p: torch.xlogy(p, p).sum(-1))(z.softmax(-1)) * x.w,
    "entr": lambda z, x: torch.special.entr(z.softmax(-1)).sum(-1) * x.w,
    "a tiny constant in the logarithm": lambda z, x: (lambda p: -(p * (p + 1e-10).log()).sum(-1))(z.softmax(-1)) * x.w,
    "a tiny bound in the logarithm": lambda z, x: (
        lambda p: -(p * p.clamp(min=1e-12).log()).sum(-1))(z.softmax(-1)) * x.w,
    "entropies of everything": lambda z, x: (lambda p: (p * p.log()).sum() - (p * z).mean())(z.softmax(-1)),
    "entropy of rows": lambda z, x: entropy_of(z[x.masked].softmax(-1)) * x.w[x.masked] + nll(z, x)[x.masked],
    "entropy of correct tokens": lambda z, x: (
        lambda s, y: F.cross_entropy(s, y) + (entropy_of(s.softmax(-1)) * (s.argmax(-1) == y)).sum()
        )(z[x.masked], x.ids[x.masked]),
    "a detached entropy": lambda z, x: entropy_of(z.softmax(-1)).detach() * nll(z, x),
    "an entropy with a dimension": lambda z, x: (z.softmax(-1) * z.log_softmax(-1)).sum(-1, keepdim=True)[..., 0] * x.w,
    "NLL of the logarithm": lambda z, x: F.nll_loss(z.softmax(-1).log().flatten(0, 1), x.targets.flatten()),
    "a sigmoid cap": lambda z, x: nll(30 * torch.sigmoid(z / 7.5), x) * x.w,
    "a sigmoid cap with a number": lambda z, x: nll(23 * torch.sigmoid((z + 5) / 7.5), x) * x.w,
    "a sigmoid cap around 0": lambda z, x: picked(2 * 5 * torch.sigmoid(2 * z / 5) - 5, x) * x.w,
    "values of a sigmoid cap": lambda z, x: (lambda y: y.logsumexp(-1) - y.max(-1).values + picked(y, x))(
        30 * z.sigmoid()) * x.w,
    "several classes": lambda z, x: nll(put(z, (..., [V - 1, V - 3]), -torch.inf), x) * x.w,
    "a slice without a class": lambda z, x: put(z, (..., V - 1), -torch.inf)[..., 4:].logsumexp(-1) * x.w,
    "padded classes": lambda z, x: nll(put(z, (slice(None), slice(None), slice(V - 3, None)), -torch.inf), x),
    "padded classes, lowest": lambda z, x: nll(put(z, (..., slice(V - 3, None)), torch.finfo(z.dtype).min), x),
    "a mask of classes": lambda z, x: (lambda y: y.softmax(-1).max(-1).values + picked(y.log_softmax(-1), x))(
        z.masked_fill(torch.arange(V, device=z.device) > V - 4, torch.tensor(-torch.inf))) * x.w,
    "a mask of classes, where": lambda z, x: (lambda y: y.logsumexp(-1) * Categorical(logits=y).entropy())(
        torch.where(torch.arange(V, device=z.device) < V - 2, z, -1e9)) * x.w,
    "a mask of classes, a tensor": lambda z, x: nll(torch.where(
        torch.arange(V, device=z.device) < V - 2, z, torch.full_like(z, -torch.inf)), x) * x.w,
    "two classes, one after the other": lambda z, x: nll(put(put(z, (..., 20), -torch.inf), (..., 21), -torch.inf), x),
    "rows of given tokens": lambda z, x: picked(subs(z, x, lambda y, given: torch.where(
        given, torch.full_like(y, -1e6).scatter(-1, x.noisy[..., None], 0.0), y)), x) * x.w,
    "rows of given tokens, the other way": lambda z, x: picked(subs(z, x, lambda y, given: torch.where(
        ~given, y, torch.full_like(y, -1e6).scatter(dim=-1, index=x.ids[..., None], value=0))), x) * x.w,
    "rows of given tokens, one number": lambda z, x: picked(
        subs(z, x, lambda y, given: y.masked_fill(given, -3.0)), x) * x.w,
    "rows of given tokens, ignored": lambda z, x: F.nll_loss(
        z.flatten(0, 1).log_softmax(-1).masked_fill(~x.masked.view(-1, 1), -3.0), x.targets.flatten()),
    "a tensor of zeros": lambda z, x: nll(z, x) * (torch.zeros_like(z)[0, 0, 0] + torch.ones_like(z).sum(-1)),
    "label smoothing": lambda z, x: F.cross_entropy(z.flatten(0, 1), x.targets.flatten(), label_smoothing=0.1),
    "label smoothing of rows": lambda z, x: F.cross_entropy(
        z.mT, x.targets, label_smoothing=0.3, reduction="none") * x.w,
    "label smoothing by hand": lambda z, x: (lambda lp: -0.9 * picked(lp, x) - 0.1 * lp.mean(-1))(z.log_softmax(-1)),
    "label smoothing of fairseq": lambda z, x: (lambda lp: -picked(lp, x).sum() - 0.1 * lp.sum(-1, keepdim=True).sum())(
        F.log_softmax(z, -1)),
    "log-probabilities of everything": lambda z, x: -z.log_softmax(-1).mean() + (-z.log_softmax(-1)).sum(),
    "class weights": lambda z, x: F.cross_entropy(z.flatten(0, 1), x.targets.flatten(), weight=x.classes.to(z.dtype)),
    "class weights of rows": lambda z, x: F.cross_entropy(
        z.mT, x.targets, weight=x.classes.to(z.dtype), reduction="none").square() * x.w,
    "class weights, summed": lambda z, x: nn.NLLLoss(x.classes.to(z.dtype), reduction="sum")(
        z.log_softmax(-1).mT, x.ids),
}  # fmt: skip
# Changes in place of a view, whose base nothing else refers to.
OF_CALLS = {
    "a class of a view": lambda call, x: nll(put(call()[:, :L], (..., V - 1), -torch.inf), x) * x.w,
    "a class of a view of a view": lambda call, x: nll(put(call()[:, 0:].view(B, L, V), (..., V - 1), -1e30), x) * x.w,
    "a class of a view, added": lambda call, x: nll(added(call()[:, :L], (..., V - 1), -1e6), x) * x.w,
    "padded classes of a view": lambda call, x: nll(
        put(call()[:, :L], (slice(None), slice(None), slice(V - 3, None)), -torch.inf), x) * x.w,
    "a view of a copy": lambda call, x: nll(put((call() / 2)[:, :L], (..., V - 1), -torch.inf), x) * x.w,
    "a shift of a view": lambda call, x: shifted_in_place(call()[:, :L], x),
    "a factor of a view": lambda call, x: call()[:, :L].mul_(0.3).logsumexp(-1) * x.w,
}  # fmt: skip
EVERYDAY = [*FORMS, *OF_CALLS, *(f"{shift}: {use}" for shift, use in zip(SHIFTS, OF_SHIFTS, strict=True))]
for shift in SHIFTS:
    for use in OF_SHIFTS:
        FORMS[f"{shift}: {use}"] = lambda z, x, s=SHIFTS[shift], u=OF_SHIFTS[use]: u(s(z, x), x)
AFTER = {
    "cap": lambda z: 3 * torch.tanh(z / 3), "scale": lambda z: z / 0.7, "in place": lambda z: z.div_(0.7),
    "a view": lambda z: torch.cat([z, z], 1)[:, :L],
}  # fmt: skip
MAKE = {"frozen": frozen, "lora": Adapted}
KINDS = ["bias", "no bias", *MAKE, *AFTER, "autocast", "bfloat16"]


def run(name, kind, fused, double=False):
    torch.manual_seed(0)
    after = {"after": AFTER[kind]} if kind in AFTER else {}
    model, x = MAKE.get(kind, Model)(bias=kind != "no bias", size=2.0, **after), Batch()
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model.to(dtype)
    if double:
        model.double()
        x.w, x.classes = x.w.double(), x.classes.double()
    autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=kind == "autocast" and not double)
    head = fused_head(model, on_logits="allow") if fused else contextlib.nullcontext()
    with autocast, head as counted:
        form = OF_CALLS[name](lambda: model(x.noisy), x) if name in OF_CALLS else FORMS[name](model(x.noisy), x)
        loss = form.float().mean()
        if loss.requires_grad:
            loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return [loss.detach(), *grads.values()], list(grads), counted.materialized if fused else None


def assert_equal_results(name, kind, may_materialize=False):
    found, names, materialized = run(name, kind, True)
    expected, expected_names, _ = run(name, kind, False)
    assert names == expected_names
    exact, _, _ = run(name, kind, False, double=True)
    for got, plain, e in zip(found, expected, exact, strict=True):
        assert got.dtype == plain.dtype
        size, error = e.abs().max().item(), (plain - e).abs().max().item()
        rounding = torch.finfo(torch.bfloat16 if kind in ("autocast", "bfloat16") else torch.float32).eps
        assert (got - e).abs().max() <= 3 * error + 20 * rounding * max(size, 0.1), (got - e).abs().max()
    assert may_materialize or materialized == 0


@pytest.mark.parametrize("name", every_time(EVERYDAY, [*FORMS, *OF_CALLS]))
def test_a_form_needs_no_logits(name):
    assert_equal_results(name, "bias")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bias"])
@pytest.mark.parametrize("name", [*FORMS, *OF_CALLS])
def test_a_form_has_equal_results_for_every_head(name, kind):
    assert_equal_results(name, kind, may_materialize=True)


def capped(z):
    return 30 * torch.tanh(z / 30)


def hooked(z):
    z.register_hook(lambda gradient: gradient * 2)
    return z


MATERIALIZED = {
    "guidance": lambda z: (lambda z, u: u + 2.5 * (z - u))(*capped(z).chunk(2, 1)).cumsum(1),
    "sums of sums": lambda z: (capped(z) + capped(z).roll(1, 1) / 2).mul(3).cumsum(1),
    "without gradients": lambda z: z * no_grad(lambda z, _: (capped(z) / 0.7).sort(-1).values[..., :1])(z, None),
    "a copy of exponentials": lambda z: z.exp().clone().scatter_(-1, z.argmax(-1, keepdim=True), 0.0),
    "a view in place": lambda z: put(capped(z).mul(2)[:, 1:], 0, 1.0).cumsum(1),
    "where": lambda z: torch.where((z := capped(z)) > 0, z, 0.0),
    "a hook": lambda z: hooked(z := capped(z) / 2).log_softmax(-1).cumsum(1),
    "a hook on parts": lambda z: (lambda z, u: u + 2.5 * (z - u))(*hooked(z := capped(z)).chunk(2, 1)).cumsum(1),
}  # fmt: skip


@pytest.mark.skipif(DEVICE != "cpu", reason="measures the CPU's allocator")
@pytest.mark.parametrize("name", MATERIALIZED)
def test_materialized_logits_take_at_most_one_more_copy(name):
    model, classes = Model(), 3000
    ids = Batch().ids.repeat(1, 8)  # the gradient of the head is small beside the logits
    model.lm_head = nn.Linear(D, classes, bias=False)

    def step(_):
        model.zero_grad(set_to_none=True)
        MATERIALIZED[name](model(ids)).sum().backward()

    def fused(_):
        with fused_head(model, on_logits="allow"):
            step(_)

    assert peak_memory(fused, "cpu") <= peak_memory(step, "cpu") + 1.1 * ids.numel() * classes * 4
