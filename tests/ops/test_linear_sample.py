"""Samples from hidden states: the oracle's tokens, their distribution, dependence on seeds, special rows, bad input.

Hidden states and heads are small multiples of 1/4. Logits are therefore exact in every dtype and for any summation
order, and many are equal, so the oracle's token is the only correct one.
"""

import math
import re

import pytest
import torch

import reference
from dllm_kernels import linear_sample, token_log_probs
from tests.conftest import DEVICE
from tests.support.parity import (
    assert_as_good_as_plain,
    assert_equal_but_for_contraction,
    largest_error,
    reduction_sizes,
    same,
)
from tests.support.rows import HEAD_PATHS, on_path
from tests.support.uniforms import uniforms

B, L, V, D = 2, 6, 70, 5
NAN, INF = math.nan, math.inf
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TRANSFORMS = ({}, {"scale": 1.5}, {"skip_id": 3}, {"softcap": 8.0, "scale": 0.5, "skip_id": 3})
# No share is met exactly by masses of these logits.
TRUNCATIONS = (
    {}, {"top_k": 9}, {"top_p": 0.83}, {"min_p": 0.11}, {"top_k": 20, "top_p": 0.83, "min_p": 0.07},
    {"top_k": 20, "top_p": 0.83, "untruncated_log_probs": True},
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(params=HEAD_PATHS)
def path(request, monkeypatch):
    return on_path(request.param, monkeypatch, splits=2)


def draw(dtype=torch.float32, seed=0, columns=V):
    """Draw (hidden, head, bias) and one seed per sequence."""
    torch.manual_seed(seed)
    h = torch.randint(-1, 2, (B, L, D)).to(DEVICE, dtype)
    w, b = (torch.randint(-6, 7, s).to(DEVICE, dtype) / 4 for s in ((columns, D), (columns,)))
    return (h, w, b), torch.randint(-(2**62), 2**62, (B,), device=DEVICE)


def uniforms_for(seeds, columns=V):
    """Return the uniforms for ``[B]`` seeds; rows are numbered within their sequence."""
    rows = torch.arange(L).expand(B, L)
    return uniforms(seeds[:, None].expand(B, L), rows, columns).to(DEVICE)


@pytest.mark.everyday(2)
@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("temperature", [0, 0.5, 1.0])
@pytest.mark.parametrize("chunk", [1, 5, None])
def test_parity(chunk, temperature, truncation, transform, dtype, path):
    (h, w, b), seeds = draw(dtype)
    options = {"temperature": temperature, "return_top": 4, **transform, **truncation}
    got = linear_sample(h, w, bias=b, seeds=seeds, chunk_size=chunk, backend=path, **options)
    u = uniforms_for(seeds)
    plain = reference.linear_sample(h, w, u, bias=b, **options)
    exact = reference.linear_sample(h.double(), w.double(), u, bias=b.double(), **options)
    assert same(got.ids, exact[0], "ids")
    assert same(got.top_ids, exact[3], "top_ids")
    values = got.log_probs, got.entropy, got.top_log_probs
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(t.dtype == wide and not t.requires_grad for t in values)
    assert got.ids.dtype == got.top_ids.dtype == torch.int64
    for ours, theirs, true in zip(values, (plain[1], plain[2], plain[4]), (exact[1], exact[2], exact[4]), strict=True):
        assert_as_good_as_plain([ours], [true], largest_error([theirs], [true]), "", reduction_sizes([h, w]))


def test_the_lowest_of_equal_columns_is_greedy(path):
    """Columns of one tile, of two tiles and of two programs are equal; the torch path reads them at once."""
    columns = torch.tensor([[0, 9], [5, 70], [70, 290], [130, 131]], device=DEVICE)
    h, w = torch.eye(4, device=DEVICE), torch.zeros(300, 4, device=DEVICE).scatter_(0, columns.t(), 1.0)
    assert same(linear_sample(h, w, temperature=0, backend=path).ids, columns[:, 0], "ids")


def test_the_largest_noise_of_equal_columns_wins(backend):
    """The high 16 bits of the uniforms of columns 127 and 997 are all ones; only the low bits make a difference."""
    seeds, h, w = torch.tensor([23246], device=DEVICE), torch.ones(1, 1, 1), torch.zeros(1000, 1)
    assert uniforms(seeds, torch.zeros_like(seeds), 1000).topk(2).indices.tolist() == [[997, 127]]
    got = linear_sample(h.to(DEVICE), w.to(DEVICE), seeds=seeds, backend=backend)
    assert got.ids.tolist() == [[997]]


def critical(freedom, tail=3.719):
    """Return the value that chi-square exceeds with probability 1e-4, by Wilson and Hilferty (6 degrees: 2 % low)."""
    return freedom * (1 - 2 / (9 * freedom) + tail * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.many_draws
@pytest.mark.parametrize("columns", [7, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_token_frequencies_equal_their_probabilities(columns):
    N = 50_000
    x = torch.linspace(-1, 1, columns, dtype=torch.float32, device=DEVICE)
    seed = torch.tensor(20261123, device=DEVICE)
    got = linear_sample(torch.ones(N, 1, device=DEVICE), x[:, None], seeds=seed, temperature=0.5, chunk_size=20_000)
    expected = N * torch.softmax(2 * x.double(), 0)
    counts = torch.bincount(got.ids, minlength=columns)
    assert len(counts) == columns
    assert float(((counts - expected) ** 2 / expected).sum()) < critical(columns - 1)


FREQUENT = ({"top_k": 12}, {"top_p": 0.6}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.9, "min_p": 0.05})
EACH, ALL = FREQUENT[:3], FREQUENT[3:]
rare = {"marks": pytest.mark.exhaustive}, {"marks": pytest.mark.every_case}


@pytest.mark.everyday(2)
@pytest.mark.many_draws
@pytest.mark.parametrize(
    ("columns", "N", "options"),
    [(40, 20_000, options) for options in FREQUENT]
    # Of long rows, which take long, usually those with all options; top_p alone sorts whole rows.
    + [pytest.param(1000, 20_000, o, **marks) for some, marks in zip((ALL, EACH), rare, strict=True) for o in some]
    + [pytest.param(151_936, 400, o, **marks) for some, marks in zip((ALL, EACH), rare, strict=True) for o in some],
    ids=str,
)
def test_truncated_frequencies_equal_their_probabilities(columns, N, options):
    """No column outside the support is drawn, and those inside as often as their probabilities say."""
    x = (
        torch.randperm(columns, device=DEVICE) + 1
    ).log() * -0.75  # the probability of rank r is proportional to r^-1.5
    kept = reference.truncated(2 * x.double(), **options)
    ones, seed = torch.ones(N, 1, device=DEVICE), torch.tensor(20261123, device=DEVICE)
    got = linear_sample(ones, x[:, None], seeds=seed, temperature=0.5, chunk_size=20_000_000 // columns, **options)
    counts = torch.bincount(got.ids, minlength=columns)
    inside = kept > -INF
    assert 1 < inside.sum() < columns
    assert not counts[~inside].any()
    torch.testing.assert_close(got.log_probs, torch.log_softmax(kept, 0)[got.ids].float())
    expected = N * torch.softmax(kept, 0)[inside]
    enough = expected >= 5  # for chi-square; the others are counted together
    counts, expected = (torch.cat([t[enough], t[~enough].sum()[None]]) for t in (counts[inside].double(), expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert columns < 151_936 or enough.all()  # the support is small, so that each of its columns is tested
    assert float(((counts - expected) ** 2 / expected).sum()) < critical(max(len(expected) - 1, 1))


@pytest.mark.parametrize(
    ("logits", "options", "support"),
    [
        ([0.0, 1.0, 1.0, 1.0, 2.0], {"top_k": 3}, [1, 2, 4]),
        ([0.0] * 10, {"top_k": 4}, [0, 1, 2, 3]),
        ([0.0] * 10, {"top_p": 0.5}, [0, 1, 2, 3, 4]),
        ([0.0] * 10, {"top_p": 0.3}, [0, 1, 2]),
        ([0.0] * 10, {"top_p": 0.31}, [0, 1, 2, 3]),
        ([0.0] * 10, {"top_p": 1e-9}, [0]),
        ([0.0] * 10, {"top_k": 4, "top_p": 0.5}, [0, 1]),  # half of what top_k leaves
        ([0.0] * 3, {"top_k": 0, "top_p": 1, "min_p": 0}, [0, 1, 2]),
        ([0.0] * 4, {"min_p": 1}, [0, 1, 2, 3]),  # no border runs through equal columns
        ([0.0, math.log(2), math.log(4)], {"min_p": 0.4}, [1, 2]),
        ([0.0, math.log(2), math.log(4)], {"top_k": 2, "min_p": 0.1}, [1, 2]),
        ([-INF, 0.0, -INF, 1.0], {"top_k": 3}, [1, 3]),
        ([-INF, 0.0, -INF, 1.0], {"top_p": 0.999}, [1, 3]),
        ([-INF, 0.0, -INF, 1.0], {"min_p": 1e-30}, [1, 3]),
    ],
)
def test_supports_by_hand(logits, options, support, backend):
    x = torch.tensor(logits, device=DEVICE)
    zero, head = torch.zeros(1, 1, device=DEVICE), torch.zeros(len(x), 1, device=DEVICE)
    out = linear_sample(zero, head, bias=x, temperature=0, return_top=len(x), backend=backend, **options)
    found = out.top_ids[0][out.top_log_probs[0] > -INF]
    assert sorted(found.tolist()) == support
    torch.testing.assert_close(out.top_log_probs[0].exp().sum(), torch.ones((), device=DEVICE))
    assert reference.truncated(x.double(), **options).isfinite().nonzero()[:, 0].tolist() == support
    full = linear_sample(zero, head, bias=x, temperature=0, return_top=len(x), untruncated_log_probs=True, **options)
    torch.testing.assert_close(full.top_log_probs[0], x.log_softmax(0)[full.top_ids[0]])


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    ("columns", "N", "truncation"),
    [(70, 3, t) for t in TRUNCATIONS if t]
    + [pytest.param(1000, 4, TRUNCATIONS[2], marks=pytest.mark.exhaustive)]
    + [pytest.param(100_003, 1, TRUNCATIONS[4], marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_both_backends_draw_equal_ids(columns, N, truncation):
    pytest.importorskip("triton")
    torch.manual_seed(0)
    h, w = torch.randn(N, 8, device=DEVICE), 0.7 * torch.randn(columns, 8, device=DEVICE)
    options = {"seeds": torch.arange(N, device=DEVICE), "softcap": 9.0, "temperature": 0.8, "skip_id": 3, **truncation}
    ours, theirs = (linear_sample(h, w, backend=backend, **options) for backend in ("torch", "triton"))
    assert same(ours.ids, theirs.ids, "ids")
    torch.testing.assert_close(ours.log_probs, theirs.log_probs)
    assert (ours.ids != 3).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8, "min_p": 0.2}], ids=str
)
def test_supports_are_those_of_transformers(options):
    transformers = pytest.importorskip("transformers")
    config = transformers.GenerationConfig(do_sample=True, temperature=0.7, **{"top_k": 0, **options})
    x = torch.randn(50, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=30, n_layer=1, n_head=1, n_embd=2))
    theirs = model._get_logits_processor(generation_config=config, input_ids_seq_length=1)(None, x)
    assert torch.equal(theirs > -INF, reference.truncated(x / 0.7, **options) > -INF)
    zero, head = torch.zeros(1, 1, dtype=x.dtype), torch.zeros(30, 1, dtype=x.dtype)
    for row, expected in zip(x, theirs, strict=True):
        out = linear_sample(zero, head, bias=row, temperature=0.7, return_top=30, **options)
        inside = out.top_ids[0][out.top_log_probs[0] > -INF]
        assert torch.equal(inside.sort().values, (expected > -INF).nonzero()[:, 0])


@pytest.mark.everyday(1)
def test_a_peaked_row_and_a_rare_token(backend):
    """If one token has nearly all of the probability, the bound of its score is loose, but other tokens are drawn."""
    N = 4096 if backend == "torch" else 32
    x = torch.zeros(200, 1, device=DEVICE)
    x[17] = math.log(199 * 19.0)  # probability 19 / 20
    got = linear_sample(torch.ones(N, 1, device=DEVICE), x, seeds=torch.tensor(5, device=DEVICE), backend=backend)
    rate = (got.ids == 17).double().mean().item()
    assert abs(rate - 0.95) < 4 * math.sqrt(0.95 * 0.05 / N)
    assert len(got.ids.unique()) > 1


@pytest.mark.everyday(1)
def test_a_row_depends_only_on_its_seed_and_number(backend):
    (h, w, _), seeds = draw()
    options = {"backend": backend, "return_top": 3}
    whole = linear_sample(h, w, seeds=seeds, **options)
    alone = linear_sample(h[1:], w, seeds=seeds[1:], chunk_size=2, **options)
    assert all(torch.equal(a[1:], b) for a, b in zip(whole, alone, strict=True))
    first = linear_sample(h[:, :3], w, seeds=seeds, **options)
    assert torch.equal(first.ids, whole.ids[:, :3])
    if backend == "triton":  # the seeds and numbers of the rows are those of the other backend
        return
    same = linear_sample(h[:, :1].expand(B, L, D), w, seeds=seeds[:, None].expand(B, L))
    assert (same.ids == same.ids[:, :1]).all()  # each position is row 0 of the seed
    other = linear_sample(h, w, seeds=seeds + 1)
    assert not torch.equal(other.ids, whole.ids)
    shared = linear_sample(h, w, seeds=seeds[0])
    flat = linear_sample(h.flatten(0, 1), w, seeds=seeds[0])
    assert torch.equal(shared.ids.flatten(), flat.ids)


@pytest.mark.everyday(1)
def test_the_noise_of_a_column_does_not_depend_on_the_number_of_columns(backend):
    """Columns without a probability, such as a padded vocabulary, leave the tokens of numbered rows unchanged."""
    (h, w, b), _ = draw()
    options = {"seeds": torch.tensor([3, 4, 5], device=DEVICE)[:B], "backend": backend}
    expected = linear_sample(h, w, bias=b, **options)
    for more in (1, 15, 70):
        wide = torch.cat([w, torch.ones(more, D, device=DEVICE)])
        never = torch.cat([b, torch.full((more,), -math.inf, device=DEVICE)])
        got = linear_sample(h, wide, bias=never, **options)
        assert same(got.ids, expected.ids, "ids")
        torch.testing.assert_close(got.log_probs, expected.log_probs)


def test_a_vocabulary_of_one_skipped_column():
    """No column is left, so that any id would be wrong: an error before anything runs."""
    h, w = torch.randn(3, D, device=DEVICE), torch.randn(1, D, device=DEVICE)
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match=r"^skip_id must leave a column to choose, got 0 and a head of one column"):
            linear_sample(h, w, temperature=temperature, skip_id=0)
        assert not linear_sample(h, w, temperature=temperature).ids.any()


@pytest.mark.parametrize("skip_id", [None, 0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_in_which_every_column_is_excluded(temperature, skip_id, backend):
    """The id is valid, an embedding can read it, and the log-probability shows that it means nothing."""
    h, w = torch.randn(3, D, device=DEVICE), torch.randn(2, D, device=DEVICE)
    never = torch.full((2,), -math.inf, device=DEVICE)
    out = linear_sample(h, w, bias=never, temperature=temperature, skip_id=skip_id, return_top=2, backend=backend)
    assert (out.ids == int(skip_id == 0)).all()
    assert out.log_probs.isnan().all()
    assert ((out.top_ids >= 0) & (out.top_ids < 2)).all()


@pytest.mark.many_draws
def test_the_generator_decides_without_seeds():
    (h, w, _), _ = draw()

    def ids(seed):
        generator = torch.Generator().manual_seed(seed)
        return [linear_sample(h, w, generator=generator).ids for _ in range(2)]

    first, again, other = ids(1), ids(1), ids(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(*first)
    assert not torch.equal(first[0], other[0])
    torch.manual_seed(7)
    a = linear_sample(h, w).ids
    torch.manual_seed(7)
    assert torch.equal(a, linear_sample(h, w).ids)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 33, 130])
def test_any_vocabulary(columns, backend):
    (h, w, b), seeds = draw(columns=columns)
    got = linear_sample(h, w, bias=b, seeds=seeds, return_top=columns, backend=backend)
    exact = reference.linear_sample(h, w, uniforms_for(seeds, columns), bias=b, return_top=columns)
    assert same(got.ids, exact[0], "ids")
    assert same(got.top_ids, exact[3], "top_ids")


@pytest.mark.everyday(1)
def test_log_probs_are_those_of_token_log_probs(backend):
    (h, w, b), seeds = draw(torch.bfloat16)
    options = {"bias": b, "temperature": 0.7, "skip_id": 3, "softcap": 5.0, "backend": backend}
    got = linear_sample(h, w, seeds=seeds, **options)
    expected = token_log_probs(h, got.ids, weight=w, with_entropy=True, **options)
    assert_equal_but_for_contraction(got.log_probs, expected.log_probs, backend)
    assert_equal_but_for_contraction(got.entropy, expected.entropy, backend)


@pytest.mark.everyday(2)
@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("truncation", [{}, {"top_k": V}, {"top_p": 0.99999}, {"min_p": 1e-9}], ids=str)
def test_special_rows(truncation, temperature, path):
    """Logits are the bias.

    Rows without a distribution (all -inf, with a NaN, or with inf) are marked in the outputs.
    """
    x = torch.randn(5, V, device=DEVICE)
    x[0, ::2], x[1], x[2, 7], x[3, 7] = -INF, -INF, NAN, INF
    none = torch.zeros(1, D, device=DEVICE)
    for i, row in enumerate(x):
        head = torch.zeros(V, D, device=DEVICE)
        got = linear_sample(none, head, bias=row, seeds=torch.tensor([i], device=DEVICE), temperature=temperature,
                            return_top=2, backend=path, **truncation)  # fmt: skip
        if i in (1, 2, 3):
            assert got.ids.item() == 0
            assert got.top_ids.tolist() == [[0, 0]]
            assert got.log_probs.isnan().all()
            assert got.top_log_probs.isnan().all()
            skipped = linear_sample(none, head, bias=row, temperature=0, skip_id=0, backend=path)
            assert skipped.ids.item() == 1
        else:
            assert row[got.ids].isfinite().all()
            assert torch.equal(got.top_ids[0], row.sort(descending=True).indices[:2])


@pytest.mark.everyday(1)
def test_a_skipped_column_is_never_chosen(backend):
    (h, w, _), seeds = draw()
    w[11] = 40 * h[0, 0] + 40  # by far the most likely one
    for temperature in (0, 1.0, 5.0):
        got = linear_sample(h, w, seeds=seeds, temperature=temperature, skip_id=11, return_top=V, backend=backend)
        assert (got.ids != 11).all()
        assert (got.top_ids[..., -1] == 11).all()
        assert (got.top_log_probs[..., -1] == -INF).all()


def test_a_second_part_of_the_head(backend):
    (h, w, b), seeds = draw(torch.float64)
    extra = (torch.randint(-1, 2, s, device=DEVICE).double() for s in ((B, L, 3), (V, 3)))
    extra = tuple(extra)
    got = linear_sample(h, w, bias=b, extra=extra, seeds=seeds, chunk_size=5, backend=backend)
    assert torch.equal(got.ids, reference.linear_sample(h, w, uniforms_for(seeds), bias=b, extra=extra)[0])


@pytest.mark.everyday(1)
def test_float32_logits_of_16_bit_operands(backend):
    """Rounding to bfloat16 makes different logits equal. In float32, the token is that of the exact logits."""
    (h, _, _), seeds = draw()
    w = torch.randint(-(2**7), 2**7, (V, D), device=DEVICE) / 2.0**3
    w += 100
    h, w = h.bfloat16(), w.bfloat16()
    h[..., 0] = 1
    exact = reference.linear_sample(h.float(), w.float(), uniforms_for(seeds))
    got = linear_sample(h, w, seeds=seeds, logits_dtype=torch.float32, backend=backend)
    assert same(got.ids, exact[0], "ids")
    torch.testing.assert_close(got.log_probs, exact[1])


def test_bad_input():
    (h, w, b), seeds = (tuple(t.cpu() for t in draw()[0]), draw()[1].cpu())

    def raises(error, message, *args, **options):
        with pytest.raises(error, match="^" + re.escape(message)):
            linear_sample(*args, **options)

    raises(TypeError, "hidden must be a torch.Tensor, got list", [1.0], w)
    stored = "head must be a torch.Tensor, got NoneType; pass hidden states and the head, or LinearLogits(hidden, head)"
    raises(TypeError, stored + ": stored logits are not taken", h)
    raises(ValueError, "hidden must have shape [..., 5] to go with head [V, D] = (70, 5), got (2, 6, 4)", h[..., 1:], w)
    raises(TypeError, "temperature must be a number, got NoneType", h, w, temperature=None)
    raises(ValueError, "temperature must be 0, or positive, from ", h, w, temperature=-1.0)
    raises(ValueError, "scale must be positive, from ", h, w, scale=0.0)
    raises(TypeError, "seeds must be a torch.Tensor, got int", h, w, seeds=3)
    raises(ValueError, "seeds must have dtype int64, got int32", h, w, seeds=seeds.int())
    message = "seeds must have the shape of leading dimensions of hidden, of (2, 6), got (6,)"
    raises(ValueError, message, h, w, seeds=torch.zeros(6, dtype=torch.int64))
    message = "generator and seeds exclude each other: expected one of them, got both"
    raises(ValueError, message, h, w, seeds=seeds, generator=torch.Generator())
    raises(TypeError, "generator must be a torch.Generator or None, got int", h, w, generator=1)
    for name, least in (("return_top", 1), ("top_k", 0)):
        raises(TypeError, f"{name} must be an int, got float", h, w, **{name: 2.0})
        for k in (least - 1, 71):
            message = f"{name} must lie in [{least}, 70], the size of the vocabulary, or be None, got {k}"
            raises(ValueError, message, h, w, **{name: k})
    for p in (0, -0.5, 1.5, NAN):
        raises(ValueError, f"top_p must lie in (0, 1], or be None, got {p}", h, w, top_p=p)
    for p in (-0.5, 1.5, NAN):
        raises(ValueError, f"min_p must lie in [0, 1], or be None, got {p}", h, w, min_p=p)
    for name in ("top_p", "min_p"):
        raises(TypeError, f"{name} must be a number or None, got str", h, w, **{name: "0.5"})
        raises(TypeError, f"{name} must be a number or None, got bool", h, w, **{name: True})
    raises(TypeError, "untruncated_log_probs must be", h, w, untruncated_log_probs="no")
    raises(ValueError, "bias must have shape (70,)", h, w, bias=b[1:])
    raises(ValueError, "active must have shape (2, 6)", h, w, active=torch.ones(2, 5))
    raises(ValueError, "chunk_size must be at least 1, got 0", h, w, chunk_size=0)
    raises(ValueError, "skip_id must lie in [0, 70), got 70", h, w, skip_id=70)
    raises(ValueError, "backend must be one of", h, w, backend="cuda")
