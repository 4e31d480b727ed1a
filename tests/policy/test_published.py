"""Published estimators: loss and gradient of each formula, written out on tables of log-probabilities in float64.

The tables are those of a small model under each view: log p of every token of the batch, ``[K, B, L]``. The formulas
derive the masked tokens from the noisy tokens, and take the levels from the test. Clip ranges, KL penalties,
normalizations and the objective of TraceRL's scores are examples. Only the weights of the views are float32, which
determines the tolerance.
"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dllm_kernels import (
    PolicyLoss,
    PolicyObjective,
    eubo,
    linear_token_nll,
    nll_weights,
    policy_views,
    token_log_probs,
    weighted_linear_nll,
)

B, L, D, V, MASK = 4, 8, 5, 9, 8
PROMPT, LENGTHS = 2, (6, 5, 3, 6)  # of each completion; padding follows
ADVANTAGES = torch.tensor([1.5, -0.7, 0.4, -1.2]).double()
TOKENS = [range(PROMPT, PROMPT + n) for n in LENGTHS]
STEPS = torch.tensor(
    [[-1, -1, 2, 0, 1, 0, 2, 3], [-1, -1, 0, 0, 1, 2, 3, -1], [-1, -1, 2, 1, 0, -1, -1, -1], [-1, -1, *range(6)]]
)
LEVELS = torch.tensor([[0.3, 0.6, 0.8, 0.45], [0.55, 0.35, 0.4, 0.7], [0.9, 0.75, 0.5, 0.2]])
CLIP = {"clip_low": 0.1, "clip_high": 0.15}


class Policy(nn.Module):
    """A model in which every position sees its own token and the mean of all tokens. Returns hidden states."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        tables = [0.7 * torch.randn(shape, generator=generator).double() for shape in ((V, D), (L, D), (V, D))]
        self.embed, self.place, self.head = map(nn.Parameter, tables)

    def forward(self, ids):
        x = self.embed[ids]
        return (x + x.mean(-2, keepdim=True) + self.place).tanh()

    def table(self, views, ids):
        """Return log p of each token under each view, by the plain softmax over all tokens except MASK."""
        z = F.linear(self(views.noisy), self.head)[..., :MASK]
        return z.log_softmax(-1).gather(-1, ids.expand(views.noisy.shape)[..., None])[..., 0]

    def near(self, seed, by=0.25):
        """Return another policy, near this one."""
        other = Policy(seed)
        with torch.no_grad():
            for p, q in zip(other.parameters(), self.parameters(), strict=True):
                p.copy_(q + by * p)
        return other


def mean(values):
    values = list(values)
    return torch.stack(values).mean()


def clipped(new, old, A, low=CLIP["clip_low"], high=CLIP["clip_high"]):
    ratio = (new - old).exp()
    return -torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)


def k3(new, ref):
    return (ref - new).exp() - (ref - new) - 1


# The formulas: tables of the policy, the sampling and the reference policy; ``masked`` [K, B, L] ----------------------


def diffu_grpo(now, old, ref, masked):
    """d1, arXiv:2504.12216: score each token given a partly masked prompt and a fully masked completion."""
    assert all(masked[0, b, i] for b in range(B) for i in TOKENS[b])
    assert 0 < masked[0, :, :PROMPT].sum() < B * PROMPT
    return mean(
        mean(
            clipped(now[0, b, i], old[0, b, i], ADVANTAGES[b]) + 0.04 * k3(now[0, b, i], ref[0, b, i])
            for i in row_tokens
        )
        for b, row_tokens in enumerate(TOKENS)
    )


def coupled_grpo(now, old, ref, masked):
    """DiffuCoder, arXiv:2506.20639, section 4.2: the mean of the scores by the full mask and by one mask of a pair."""

    def score(table, b, i):
        t = float(LEVELS[0, b])
        assert masked[1, b, i] != masked[2, b, i]
        return (table[0, b, i] + (table[1, b, i] / t if masked[1, b, i] else table[2, b, i] / (1 - t))) / 2

    def loss(b, i):
        new, before, reference = (score(table, b, i) for table in (now, old, ref))
        return clipped(new, before, ADVANTAGES[b]) + 0.04 * k3(new, reference)

    return mean(mean(loss(b, i) for i in row_tokens) for b, row_tokens in enumerate(TOKENS))


def espo(now, old, ref, masked):
    """ESPO, arXiv:2512.03759: one ratio per sequence, exp of the difference of ELBOs over the length.

    In a pair, one ELBO masks l of the n tokens, the other one masks the rest. The log-probabilities are weighted by
    half of (n + 1) / l and (n + 1) / (n - l). There are two pairs.
    """

    def elbo(table, b):
        n, total = LENGTHS[b], 0
        for k in range(4):
            hidden = [i for i in TOKENS[b] if masked[k, b, i]]
            total = total + (n + 1) / len(hidden) * sum(table[k, b, i] for i in hidden) / 2 if hidden else total
        return total / 2

    def loss(b):
        new, before, reference = (elbo(table, b) / LENGTHS[b] for table in (now, old, ref))
        return clipped(new, before, ADVANTAGES[b]) + 0.3 * (new - reference) ** 2 / 2

    return mean(map(loss, range(B)))


def gdpo(now, old, ref, masked):
    """GDPO, arXiv:2510.08554: the ELBO by Gauss-Legendre quadrature with three nodes; one ratio per sequence."""
    nodes = [(1 - math.sqrt(3 / 5)) / 2, 1 / 2, (1 + math.sqrt(3 / 5)) / 2]
    factors = [5 / 18, 8 / 18, 5 / 18]

    def elbo(table, b):
        return sum(
            factors[k] / nodes[k] * sum(table[k, b, i] for i in TOKENS[b] if masked[k, b, i]) for k in range(len(nodes))
        )

    return mean(clipped(elbo(now, b) / LENGTHS[b], elbo(old, b) / LENGTHS[b], ADVANTAGES[b]) for b in range(B))


def trace_rl(now, old, ref, masked):
    """TraceRL, arXiv:2509.06949: each token given those of earlier decoding steps; the mean over tokens."""
    terms = []
    for b, row_tokens in enumerate(TOKENS):
        for i in row_tokens:
            step = int(STEPS[b, i])
            assert all(bool(masked[step, b, j]) == bool(STEPS[b, j] >= step) for j in row_tokens)
            terms.append(clipped(now[step, b, i], old[step, b, i], ADVANTAGES[b]))
    return mean(terms)


def spg(now, old, ref, masked):
    """SPG, arXiv:2510.09541: ELBO for positive advantages, EUBO (beta 1.5) for negative ones, each over its tokens.

    ELBO: mean over views of the sum of log p / t over the masked tokens. EUBO: (1 / beta) log of the mean over views of
    p^beta / t, summed over the tokens that are masked in any view.
    """

    def elbo(b):
        views = [sum(now[k, b, i] for i in TOKENS[b] if masked[k, b, i]) / float(LEVELS[k, b]) for k in range(3)]
        return sum(views) / 3 / LENGTHS[b]

    def upper(b, beta=1.5):
        tokens = [i for i in TOKENS[b] if any(masked[k, b, i] for k in range(3))]
        inner = [
            sum(now[k, b, i].exp() ** beta / float(LEVELS[k, b]) for k in range(3) if masked[k, b, i]) / 3
            for i in tokens
        ]
        return mean(x.log() for x in inner) / beta

    return -mean(ADVANTAGES[b] * (elbo(b) if ADVANTAGES[b] > 0 else upper(b)) for b in range(B))


def vrpo(now, old, ref, masked):
    """LLaDA 1.5, arXiv:2505.19223: DPO on differences of ELBOs; rows 0 and 1 are preferred to rows 2 and 3."""

    def elbo(table, b):
        return (
            sum(sum(table[k, b, i] for i in TOKENS[b] if masked[k, b, i]) / float(LEVELS[k, b]) for k in range(3)) / 3
        )

    def margin(b):
        return elbo(now, b) - elbo(ref, b)

    return mean(-torch.log(1 / (1 + torch.exp(-0.2 * (margin(b) - margin(b + 2))))) for b in range(2))


# The package's version: a function of log-probabilities and, where one exists, a PolicyLoss
# -----------------------------


def token_loss(views, objective, normalize="sequences"):
    def loss_of(log_probs, old, ref):
        s, before, reference = map(views.token_scores, (log_probs, old, ref))
        values = torch.where(views.scored.any(0), objective(s, before, ADVANTAGES[:, None], reference), 0.0)
        return (
            (values.sum(1) / views.num_supervised).mean() if normalize == "sequences" else values.sum() / sum(LENGTHS)
        )

    return loss_of


def sequence_loss(views, objective):
    def loss_of(log_probs, old, ref):
        s, before, reference = (views.sequence_scores(table, mean=True) for table in (log_probs, old, ref))
        return objective(s, before, ADVANTAGES, reference).mean()

    return loss_of


def sandwiched(views, objective):
    def loss_of(log_probs, old, ref):
        bounds = torch.where(ADVANTAGES > 0, views.sequence_scores(log_probs, mean=True), eubo(log_probs, views))
        return objective(bounds, None, ADVANTAGES).mean()

    return loss_of


def preference(views, objective):
    def loss_of(log_probs, old, ref):
        better, worse = (views.sequence_scores(log_probs) - views.sequence_scores(ref)).chunk(2)
        return -F.logsigmoid(0.2 * (better - worse)).mean()

    return loss_of


K3, K2 = {"kl": "k3", "kl_coef": 0.04}, {"kl": "k2", "kl_coef": 0.3}
SEQUENCES = {"level": "sequence", "normalize": "sequences"}
METHODS = {  # formula, scheme, options of the views, objective, settings of PolicyLoss, the loss of log-probabilities
    "d1": (
        diffu_grpo, "full", {"prompt_prob": 0.5}, PolicyObjective(**CLIP, **K3), {"normalize": "sequences"}, token_loss,
    ),
    "DiffuCoder": (
        coupled_grpo, "coupled", {"level": LEVELS[0]}, PolicyObjective(**CLIP, **K3), {"normalize": "sequences"},
        token_loss,
    ),
    "ESPO": (espo, "count", {"num": 2}, PolicyObjective(**CLIP, **K2), SEQUENCES, sequence_loss),
    "GDPO": (gdpo, "quadrature", {"num": 3}, PolicyObjective(**CLIP), SEQUENCES, sequence_loss),
    "TraceRL": (
        trace_rl, "trace", {"step_map": STEPS}, PolicyObjective(**CLIP), {"normalize": "tokens"},
        lambda views, objective: token_loss(views, objective, "tokens"),
    ),
    "SPG": (spg, "elbo", {"num": 3, "level": LEVELS}, PolicyObjective("reinforce"), None, sandwiched),
    "VRPO": (vrpo, "elbo", {"num": 3, "level": LEVELS}, None, None, preference),
}  # fmt: skip


@pytest.fixture(params=METHODS)
def method(request):
    """Prepare a batch, its views, three policies, and the loss and gradient of the formula."""
    formula, scheme, options, objective, settings, loss_of = METHODS[request.param]
    ids = torch.randint(0, MASK, (B, L), generator=torch.Generator().manual_seed(0))
    supervised = torch.tensor([[i in row_tokens for i in range(L)] for row_tokens in TOKENS])
    views = policy_views(ids, supervised, MASK, scheme, seeds=torch.arange(B) + 10, **options)
    policy = Policy(0)
    sampling, reference = policy.near(1), policy.near(2)
    old, ref = (p.table(views, ids).detach() for p in (sampling, reference))
    loss = formula(policy.table(views, ids), old, ref, views.noisy == MASK)
    grads = torch.autograd.grad(loss, list(policy.parameters()))
    return SimpleNamespace(
        ids=ids, views=views, policy=policy, sampling=sampling, reference=reference, objective=objective,
        settings=settings, loss_of=loss_of(views, objective), loss=loss.detach(), grads=grads,
    )  # fmt: skip


def assert_equals_formula(method, loss):
    """Compare the loss and the policy's ``.grad`` with the formula, then clear the gradients."""
    close = {"rtol": 2**-20, "atol": 2**-24}  # the weights of the views are float32
    torch.testing.assert_close(loss.detach(), method.loss, **close)
    for p, expected in zip(method.policy.parameters(), method.grads, strict=True):
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(p.grad, expected, **close)
    method.policy.zero_grad()


def log_probs_of(method, policy):
    ids, views = method.ids.expand(method.views.noisy.shape), method.views
    return token_log_probs(policy(views.noisy), ids, weight=policy.head, active=views.scored, skip_id=MASK).log_probs


def test_loss_and_gradient_equal_the_formula(method):
    """All views run at once: from log-probabilities, and by the policy loss in both forms."""
    with torch.no_grad():
        old, ref = (log_probs_of(method, p) for p in (method.sampling, method.reference))
    loss = method.loss_of(log_probs_of(method, method.policy), old, ref)
    loss.backward()
    assert_equals_formula(method, loss)
    if method.settings is None:
        return
    policy_loss, views, policy = PolicyLoss(method.objective, **method.settings), method.views, method.policy
    by_token = policy_loss.level == "token"
    old, ref = (views.token_scores(t) if by_token else views.sequence_scores(t, mean=True) for t in (old, ref))
    arguments = method.ids, views, old, ADVANTAGES, ref
    for out in (
        policy_loss.forward_fused(policy(views.noisy), policy.head, *arguments, skip_id=MASK),
        policy_loss(F.linear(policy(views.noisy), policy.head), *arguments, skip_id=MASK),
    ):
        assert 0 < out.clip_fraction < 1
        out.loss.backward()
        assert_equals_formula(method, out.loss)


def test_one_view_at_a_time_has_the_gradient_of_the_formula(method):
    """The gradient equals that of autograd through all views at once, up to float64 rounding."""
    policy, views, ids = method.policy, method.views, method.ids
    options = {"skip_id": MASK}

    def one_by_one(policy):
        rows = zip(views.noisy, views.scored, strict=True)
        return torch.stack([-linear_token_nll(policy(x), policy.head, ids, active=on, **options).nll for x, on in rows])

    with torch.no_grad():
        now, old, ref = map(one_by_one, (policy, method.sampling, method.reference))
        weights = nll_weights(lambda log_probs: method.loss_of(log_probs, old, ref), now)
    assert not weights[~views.scored].any()
    for noisy, view_weights in zip(views.noisy, weights, strict=True):
        weighted_linear_nll(policy(noisy), policy.head, ids, view_weights, **options).loss.backward()
    parameters = list(policy.parameters())
    all_at_once = torch.autograd.grad(method.loss_of(policy.table(views, ids), old, ref), parameters)
    torch.testing.assert_close([p.grad for p in parameters], list(all_at_once), rtol=1e-12, atol=1e-14)
    assert_equals_formula(method, method.loss_of(now, old, ref))
