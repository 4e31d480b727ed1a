"""The oracle of the divergences: numbers by hand, closed forms of the gradients, edges of the definitions."""

import math

import pytest
import torch

import reference
from reference.divergence import row_divergence

P, Q = [0.5, 0.25, 0.25, 0.0], [0.125, 0.5, 0.25, 0.125]
LN2 = math.log(2)
BY_HAND = {
    "kl": math.inf,
    "rkl": 0.5 * 2 * LN2 - 0.25 * LN2,
    "tv": 0.375,
    "l1": 0.75,
    "nla": -math.log(0.625),
    "soft_ce": math.inf,
    "teacher_ce": 2 * LN2,
    "ce": LN2,
}
# beta 1/2: m = (5, 6, 4, 1) / 16.
M = [5 / 16, 6 / 16, 4 / 16, 1 / 16]
BY_HAND["jsd"] = 0.5 * sum(q * math.log(q / m) for q, m in zip(Q, M, strict=True)) + 0.5 * sum(
    p * math.log(p / m) for p, m in zip(P, M, strict=True) if p
)


@pytest.mark.parametrize("kind", BY_HAND)
def test_by_hand(kind):
    logits, teacher = torch.tensor([P], dtype=torch.float64).log(), torch.tensor([Q], dtype=torch.float64).log()
    out = reference.divergence(logits + 3, teacher - 2, kind=kind, targets=torch.tensor([0]))
    assert out.value.item() == pytest.approx(BY_HAND[kind])
    assert out.acceptance_rate.item() == pytest.approx(0.625)
    assert out.agree.tolist() == [False]


def test_lk_by_hand():
    log_p, log_q = (torch.tensor([t], dtype=torch.float64).log() for t in ([0.5, 0.5], [0.25, 0.75]))
    kl, lam = 0.25 * math.log(0.5) + 0.75 * math.log(1.5), math.exp(-3 * 0.75)
    assert row_divergence("lk", log_p, log_q).item() == pytest.approx(lam * kl + (1 - lam) * 0.25)
    lam, soft_ce = 0.5 * math.exp(-0.4), LN2
    value = row_divergence("lk", log_p, log_q, None, torch.tensor(0.2), eta=2.0, kl_scale=0.5, base="soft_ce")
    assert value.item() == pytest.approx(lam * soft_ce + (1 - lam) * 0.25)


def closed_form(kind, p, q):
    """Compute dL/dz by the formulas of the derivations."""
    below = (p <= q * (1 + 2.0**-18)).to(p)
    a, X = torch.minimum(p, q).sum(-1, keepdim=True), (p * below).sum(-1, keepdim=True)
    tv, kl = -p * (below - X), p - q
    m, lam = (p + q) / 2, torch.exp(-3 * a)

    def log_ratio(other):
        x = p.log() - other.log()
        return p * (x - (p * x).sum(-1, keepdim=True))

    forms = {"kl": kl, "soft_ce": kl, "rkl": log_ratio(q), "jsd": log_ratio(m) / 2, "tv": tv, "l1": 2 * tv}
    return {**forms, "nla": tv / a, "lk": lam * kl + (1 - lam) * tv}[kind]


@pytest.mark.parametrize("kind", ["kl", "soft_ce", "rkl", "jsd", "tv", "l1", "nla", "lk"])
def test_gradients_equal_the_closed_forms(kind):
    z, t = (2 * torch.randn(4, 7, dtype=torch.float64)).requires_grad_(), 2 * torch.randn(4, 7, dtype=torch.float64)
    weights = torch.tensor([1.0, -2.0, 0.0, 0.5])
    reference.divergence(z, t, weights, kind=kind).loss.backward()
    want = weights[:, None] * closed_form(kind, z.detach().softmax(-1), t.softmax(-1))
    torch.testing.assert_close(z.grad, want)


def test_the_edges():
    """Identical rows, rows without a common column, rows of weight 0, and a row missing in the teacher."""
    z = torch.tensor([[0.0, 1.0, 2.0], [5.0, -math.inf, -math.inf], [math.nan] * 3, [0.0, 1.0, 2.0]]).requires_grad_()
    teacher = torch.tensor([[0.0, 1.0, 2.0], [-math.inf, 0.0, 0.0]])
    rows, weights = torch.tensor([0, 1, 0, 2]), torch.tensor([1, 1, 0, 1])
    for kind in ("kl", "tv", "nla", "jsd"):
        out = reference.divergence(z, teacher, weights, kind=kind, teacher_rows=rows, reduction="none")
        assert out.acceptance_rate[:3].tolist() == pytest.approx([1, 0, 0])
        assert out.value[0].item() == pytest.approx(0, abs=1e-6)
        assert out.value[2] == 0
        assert out.value[3].isnan()
        assert out.agree.tolist() == [True, False, False, False]
        grad = torch.autograd.grad(out.loss[:3].sum(), z)[0]
        assert grad[2].tolist() == [0, 0, 0]
        assert grad[0].abs().max() < 1e-6
    assert reference.divergence(z, teacher, weights, kind="nla", teacher_rows=rows).value[1].item() == pytest.approx(
        5 * math.log(10)
    )


def test_temperature_columns_and_a_sum_of_kinds():
    z, t = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    columns, y = torch.tensor([5, 0, 2, 1]), torch.tensor([0, 3, -100])
    out = reference.divergence(
        z, t, kind={"ce": 0.1, "l1": 0.9}, targets=y, draft_to_target=columns, temperature=2.0, skip_id=1
    )
    p, q = (x.index_fill(1, torch.tensor([1]), -math.inf).div(2).softmax(1) for x in (z, t[:, columns]))
    ce = torch.stack([-p[0, 0].log(), -p[1, 3].log(), p.new_zeros(())])
    torch.testing.assert_close(out.value, 4 * (0.1 * ce + 0.9 * (p - q).abs().sum(1)))
