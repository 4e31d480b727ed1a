"""The calls of the page "noise of published code" have the moments of the code, restated here.

Each restatement returns noisy tokens, mask and probabilities (or times), ``[n, B, L]``, of n batches drawn by torch.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.support.readme import DOCS, python, run

B, L, V, MASK, BLOCK = 4, 12, 6, 5, 4
IDS = torch.arange(B * L).view(B, L) % MASK
LOSS_MASK = torch.ones(B, L)
LOSS_MASK[:, :3] = 0
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 6 + [-1], [3] * 12, [0] * 2 + [7] * 10, [1] * 4 + [2] * 4 + [3] * 4])
START = torch.tensor([0, 3, 5, 8])
PLACE = torch.arange(L)


def masked(p, supervised=LOSS_MASK != 0):
    noise = (torch.rand(p.shape[0], B, L) < p) & supervised
    return torch.where(noise, MASK, IDS), noise, p.expand(-1, B, L)


def llada(n):
    return masked((1 - 1e-3) * torch.rand(n, B, 1) + 1e-3)


def dllm_linear(n):
    return masked(1e-3 + (1 - 1e-3) * torch.rand(n, B, 1))


def dllm_cosine(n):
    t = 1e-3 + (1 - 1e-3) * torch.rand(n, B, 1)
    return masked(1 - (1 - torch.cos(torch.pi / 2 * (1 - t))))


def bd3lm(n):
    parts = B * L // BLOCK
    order = torch.rand(n, parts).argsort(1)
    u = ((torch.rand(n, parts) + torch.arange(parts)) / parts).gather(1, order).view(n, B, -1)
    return masked((0.3 + 0.5 * u).repeat_interleave(BLOCK, 2))


def sdar(n):
    """Draw each row up to ten times, and keep the first one in which a token is masked."""
    levels = (1 - 1e-3) * torch.rand(10 * n, B, 8) + 1e-3
    p = torch.where(DOCUMENTS >= 0, levels.gather(2, DOCUMENTS.clamp(min=0).expand(10 * n, -1, -1)), 1.0)
    drawn = [t.view(10, n, B, L) for t in masked(p, (LOSS_MASK != 0) & (DOCUMENTS >= 0))]
    none = ~drawn[1].any(3)
    first = none.long().cumprod(0).sum(0).clamp(max=9)[None, ..., None].expand(1, n, B, L)
    return [t.gather(0, first)[0] for t in drawn]


def dparallel(n):
    start = START[:, None]
    blocks = -(-(L - start) // BLOCK)
    begin = start + BLOCK * (torch.rand(n, B, 1) * blocks).long()
    block, behind = (begin <= PLACE) & (begin + BLOCK > PLACE), begin + BLOCK <= PLACE
    p = torch.where(block, torch.rand(n, B, 1), behind.float())
    return *masked(torch.where(start > PLACE, 1.0, p), start <= PLACE), block


def gidd(n):
    """Sample each token from its row of the transition matrix."""
    t = (torch.rand(n, 1) + torch.arange(B) / B) % 1
    t = ((1 - 2e-4) * t + 1e-4)[..., None, None]
    c = 2 * 0.2 / (1 - 0.2) * (t * (1 - t)).sqrt()
    mask = F.one_hot(torch.tensor(MASK), V)
    q = ((1 - t) * F.one_hot(IDS, V) + t * mask + c * (1 - mask) / (V - 1)) / (1 + c)
    z = torch.multinomial(q.flatten(0, 2), 1).view(n, B, L)
    z = torch.where(LOSS_MASK != 0, z, IDS)
    return z, z != IDS, t[..., 0]


def duo(n):
    t = 1e-3 + (1 - 1e-3) * ((torch.rand(n, B) + torch.arange(B)) / B)[..., None]
    _, noise, p = masked(t)
    return torch.where(noise, torch.randint(V, (n, B, L)), IDS), noise, p


CALLS = {  # the restatement, and the function of the page with its arguments
    llada: ("llada", (IDS, LOSS_MASK)),
    dllm_linear: ("dllm", (IDS, LOSS_MASK)),
    dllm_cosine: ("dllm", (IDS, LOSS_MASK, "cosine")),
    bd3lm: ("bd3lm", (IDS, LOSS_MASK)),
    sdar: ("sdar", (IDS, LOSS_MASK, DOCUMENTS)),
    dparallel: ("dparallel", (IDS, START)),
    gidd: ("gidd", (IDS, LOSS_MASK)),
    duo: ("duo", (IDS, LOSS_MASK)),
}
OF_BATCHES = bd3lm, gidd, duo  # the levels of a batch depend on each other


@pytest.fixture(scope="module")
def page():
    """Provide the functions of the page, with a vocabulary so small that a wrong share of clean tokens shows."""
    names = {}
    for code in python((DOCS / "published-noise.md").read_text()):
        run(code.replace("V, MASK = 100, 99", f"V, MASK = {V}, {MASK}"), names)
    return names


def drawn(function, arguments, n, one_by_one):
    """Draw n batches, in one call if the rows are independent."""
    if one_by_one:
        return [torch.stack(parts) for parts in zip(*(function(*arguments) for _ in range(n)), strict=True)]
    many = (t.repeat(n, *[1] * (t.dim() - 1)) if isinstance(t, torch.Tensor) else t for t in arguments)
    return [t.view(n, B, *t.shape[1:]) for t in function(*many)]


def features(noisy, noise, p, *others):
    """Return numbers of each batch whose means describe the noise: levels, masks, tokens and their products."""
    noise, p = noise.double(), p.double().expand(-1, B, L) if p.dim() == 3 else p.double()[..., None].expand(-1, B, L)
    mean_p, mean_noise = p.mean((1, 2), keepdim=True), noise.mean((1, 2), keepdim=True)
    pairs = noise[..., :-1] * noise[..., 1:]  # depends on whether the two have one level
    found = [p, p**2, (mean_p - 0.5) ** 2, p[:, :1] * p[:, 1:], noise, pairs, noise * p, noise * p**2, mean_noise**2]
    found += [(noisy == MASK).double(), (noisy != IDS).double(), noisy.double(), *(t.double() for t in others)]
    return torch.cat([t.flatten(1) for t in found], 1)


@pytest.mark.everyday(3)
@pytest.mark.parametrize("published", CALLS, ids=lambda function: function.__name__)
def test_a_call_has_the_moments_of_the_published_noise(page, published):
    """The means of all features differ by at most five standard errors."""
    coupled, (name, arguments) = published in OF_BATCHES, CALLS[published]
    n = 500 if coupled else 4000
    torch.manual_seed(0)
    theirs, ours = features(*published(n)), features(*drawn(page[name], arguments, n, coupled))
    error = ((ours.var(0) + theirs.var(0)) / n).sqrt()
    assert ((ours.mean(0) - theirs.mean(0)).abs() / error.clamp(min=1e-6)).max() < 5
