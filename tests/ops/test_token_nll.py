"""Token NLL: parity over dtypes, shapes and strides; extreme and bad rows; the backward pass; memory; in place."""

import itertools
import math

import pytest
import torch

import reference
from dllm_kernels.ops import token_nll, weighted_nll
from tests.conftest import DEVICE
from tests.support.inputs import KINDS, SHAPES, Source, exact, skip_unjudged
from tests.support.parity import (
    assert_as_good_as_plain,
    assert_close_with_grads,
    assert_equal_but_for_contraction,
    assert_parity,
    assert_same_specials,
    largest_error,
    reduction_sizes,
    same,
    value_and_grads,
)
from tests.support.rows import SHARED, between_ordinary_rows, extreme_rows, laid_out

NAN, INF = math.nan, math.inf
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
pytestmark = pytest.mark.usefixtures("poisoned_memory")


# (shape of the rows, V, rows per chunk): a chunk of each row, several chunks, one that is not full, all rows in one
SIZES = [(*size, chunk) for size, chunk in zip(SHAPES, (1, 1, 4, None, 4, 50), strict=True)]


def targets_like(shape, V=37):
    """Draw targets, some of them -100."""
    return torch.where(torch.rand(shape) < 0.15, -100, torch.randint(0, V, shape)).to(DEVICE)


def weights_like(shape):
    """Draw weights, some of them 0 and others negative."""
    return (torch.randn(shape) * (torch.rand(shape) < 0.7)).to(DEVICE)


def inputs(shape=(9,), V=37, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    logits = (4 * torch.randn(*shape, V)).to(DEVICE, dtype)
    return logits, targets_like(shape, V)


def masked_oracle(source, targets, good):
    """Return a function of the leaves: the NLL of the good rows, and 0 in the others, which it does not read."""
    kept = torch.where(good, targets, -100)
    return lambda *x: reference.token_nll(source.logits(*x, active=good), kept)


def upstream_like(targets):
    """Draw one gradient per row, some of them zero."""
    return torch.randn(targets.shape, device=DEVICE) * (torch.rand(targets.shape, device=DEVICE) < 0.8)


@pytest.mark.everyday(14)
@pytest.mark.covering(2, most=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "V", "chunk"), SIZES)
def test_parity(shape, V, chunk, dtype, source):
    skip_unjudged(source, dtype, shape)
    targets, weights = targets_like(shape, V), weights_like(shape)
    for ours, plain, upstream in (
        (
            lambda *x: token_nll(source.argument(*x, chunk_size=chunk), targets, backend=source.backend).nll,
            lambda *x: reference.token_nll(source.logits(*x), targets),
            upstream_like(targets),
        ),
        (
            lambda *x: weighted_nll(source.argument(*x, chunk_size=chunk), targets, weights, backend=source.backend)[0],
            lambda *x: reference.weighted_nll(source.logits(*x), targets, weights),
            torch.tensor(-1.7),
        ),
    ):
        assert_parity(ours, plain, lambda seed, u=upstream: (source.leaves(shape, V, dtype, seed=seed), u))


@pytest.mark.everyday(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity_at_the_real_tiles_on_a_row_split_over_programs(dtype, backend):
    shape, V = (2,), 3 * 4 * 8192 // dtype.itemsize + 5
    _, targets = inputs(shape, V)
    assert_parity(
        lambda x: token_nll(x, targets, backend=backend).nll,
        lambda x: reference.token_nll(x, targets),
        lambda seed: ([inputs(shape, V, dtype, seed)[0]], upstream_like(targets)),
    )


@pytest.mark.everyday(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_extreme_rows(dtype, path):
    """Each extreme row lies between ordinary rows, which must not change.

    Its logits repeat, so that it spans tiles and splits.
    """
    _, logits, targets = between_ordinary_rows(extreme_rows(40), dtype)
    out = token_nll(logits, targets, with_lse=True, with_correct=True, backend=path)
    assert torch.equal(token_nll(logits, targets, with_ids=True, backend=path).ids, reference.predicted_ids(logits))
    exact, lse = reference.token_nll(logits.double(), targets), reference.token_lse(logits)
    assert_same_specials(out.nll, exact)
    torch.testing.assert_close(out.nll, exact.to(dtype), equal_nan=True)
    assert torch.equal(out.correct, reference.argmax_match(logits, targets))
    torch.testing.assert_close(out.lse[lse.isfinite()], lse[lse.isfinite()])
    upstream = torch.linspace(-0.5, 2.0, len(targets), device=DEVICE)
    ours, plain = (
        value_and_grads(f, [logits], upstream)[1]
        for f in (lambda x: token_nll(x, targets, backend=path).nll, lambda x: reference.token_nll(x, targets))
    )
    bad = exact.isnan()
    torch.testing.assert_close(ours[~bad], plain[~bad])
    assert ours[bad].isnan().any(1).all()


@pytest.mark.everyday(5)
@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_gradients_stay_exact_under_a_large_shift(shift, path):
    """A float32 log-sum-exp at 1e4 is off by 5e-4, and so is every probability computed from it."""
    logits, targets = inputs()
    logits = (logits * 8).round() / 8 + shift  # exact in float32 at either shift
    upstream = torch.ones(9, device=DEVICE)
    exact = value_and_grads(lambda x: reference.token_nll(x, targets), [logits.double() - shift], upstream)
    ours = value_and_grads(lambda x: token_nll(x, targets, backend=path).nll, [logits], upstream)
    for a, b in zip(ours, exact, strict=True):
        assert_as_good_as_plain([a], [b], 0.0, sizes=reduction_sizes([logits]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision_with_infinities(dtype, backend):
    info = torch.finfo(dtype)
    logits = torch.tensor([[info.max, info.min, 0.0], [-INF, 1.0, 2.0], [info.min] * 3], dtype=dtype, device=DEVICE)
    targets = torch.tensor([0, 1, 2], device=DEVICE)
    assert_close_with_grads(
        lambda x: token_nll(x, targets, backend=backend).nll,
        lambda x: reference.token_nll(x, targets),
        [logits],
        torch.ones(3),
    )


def test_the_nll_of_a_certain_target_is_positive_zero(path):
    """A negative zero would be printed as -0.0."""
    nll = token_nll(torch.zeros(3, 1, device=DEVICE), torch.zeros(3, dtype=torch.long, device=DEVICE), backend=path).nll
    assert torch.equal(nll, torch.zeros_like(nll))
    assert not nll.signbit().any()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("ignore_index", [0, 7, -1, 255])
def test_another_ignore_index(ignore_index, path):
    logits, targets = inputs((6,))
    targets = torch.tensor([0, 7, -1, 255, 3, 7], device=DEVICE)
    ours = token_nll(logits, targets, ignore_index=ignore_index, backend=path).nll
    torch.testing.assert_close(ours, reference.token_nll(logits, targets, ignore_index), equal_nan=True)
    assert ours[targets == ignore_index].eq(0).all()


@pytest.mark.parametrize(("dtype", "target"), [(torch.uint8, 156), (torch.int8, -100), (torch.int32, -100)], ids=str)
def test_a_uint8_target_of_156_is_not_minus_100(dtype, target, backend):
    target = torch.tensor([target], dtype=dtype, device=DEVICE)
    out = token_nll(torch.zeros(1, 200, device=DEVICE), target, backend=backend)
    assert out.nll.item() == pytest.approx(math.log(200) if dtype == torch.uint8 else 0)


@pytest.mark.everyday(5)
@pytest.mark.parametrize("layout", ["aligned", "8 bytes on", "every second"])
def test_targets_anywhere_in_their_memory(layout, path):
    logits, targets = inputs()
    memory = torch.full((20,), 999, dtype=torch.int64, device=DEVICE)
    start = (memory.data_ptr() // 8) % 2  # the first one aligned to 16 bytes
    where = {
        "aligned": slice(start, start + 9),
        "8 bytes on": slice(start + 1, start + 10),
        "every second": slice(0, 18, 2),
    }
    laid = memory[where[layout]]
    laid.copy_(targets)
    if layout != "every second":
        assert laid.data_ptr() % 16 == 8 * (layout == "8 bytes on")
    torch.testing.assert_close(token_nll(logits, laid, backend=path).nll, reference.token_nll(logits, targets))


@pytest.mark.everyday(7)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_lowest_index_wins_a_tie(dtype, path):
    x = torch.zeros(6, 40, dtype=dtype, device=DEVICE)
    x[:, [3, 20, 39]] = 2.0  # in three tiles of 16
    x[4] = 5.0  # all columns tie
    x[5, 39] = 2.0 + (2**-9 if dtype == torch.bfloat16 else 2**-4)  # bfloat16 rounds it to the same 2.0
    targets = torch.tensor([3, 20, 39, 4, 0, 39], device=DEVICE)
    for kind in KINDS:
        out = token_nll(exact(kind, x), targets, with_correct=True, backend=path)
        assert out.correct.tolist() == [True, False, False, False, True, dtype != torch.bfloat16]
        assert same(out.correct, reference.argmax_match(x, targets), "correct")
        both = token_nll(exact(kind, x), targets, with_correct=True, with_ids=True, backend=path)
        assert torch.equal(both.correct, out.correct)
        assert both.ids.tolist() == [3, 3, 3, 3, 0, 3 if dtype == torch.bfloat16 else 39]


def test_outputs_that_are_not_requested_are_none(source):
    x, targets = source.argument(*source.leaves((9,), 37)), targets_like((9,))
    weights, options = torch.ones(9, device=DEVICE), {"backend": source.backend}
    for out in (token_nll(x, targets, **options), weighted_nll(x, targets, weights, **options)):
        assert out.lse is None
        assert out.correct is None
        assert out.ids is None


def test_the_one_hot_is_subtracted_before_rounding(path):
    """At p = 1 - 2**-12 a bfloat16 probability is 1, and 1 - 1 would leave a gradient of 0."""
    logits = torch.tensor([[12 * math.log(2), 0.0]], device=DEVICE).bfloat16()
    target = torch.tensor([0], device=DEVICE)
    assert_parity(
        lambda x: token_nll(x, target, backend=path).nll,
        lambda x: reference.token_nll(x, target),
        lambda _: ([logits], torch.ones(1, device=DEVICE)),
    )


@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("weights", [torch.bool, torch.int64, torch.bfloat16, torch.float64], ids=str)
def test_weights_of_any_dtype(weights, path):
    logits, targets = inputs((4,))
    w = torch.tensor([0, 1, 2, 1] if weights != torch.float64 else [0, 0.5, -2.25, 1.0]).to(DEVICE, weights)
    logits[0] = NAN
    ours, plain = (
        value_and_grads(f, [logits], torch.tensor(-0.7))
        for f in (
            lambda x: weighted_nll(x, targets, w, backend=path).loss,
            lambda x: reference.weighted_nll(x, targets, w),
        )
    )
    assert ours[0].dtype == torch.float32
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("unchecked")
def test_active_rows_of_weight_0_stay_out_of_the_sum(source):
    """``active`` requests NLL and argmax match of rows of weight 0; NaN in them stays in their own NLL."""
    leaves, targets, weights = source.leaves((9,), 37), targets_like((9,)), weights_like((9,))
    weights[:4], targets[:4] = torch.tensor([0.0, 2.0, 0.0, 0.5]), torch.tensor([1, 2, 99, 3])
    source.spoil(leaves, 0)
    seen = []

    def ours(*x):
        active, options = torch.ones_like(weights), {"with_correct": True, "backend": source.backend}
        seen.append(weighted_nll(source.argument(*x), targets, weights, active=active, **options))
        return seen[-1].loss

    expected = value_and_grads(
        lambda *x: (masked_oracle(source, targets, weights != 0)(*x) * weights).sum(), leaves, torch.tensor(1.0)
    )
    for a, b in zip(value_and_grads(ours, leaves, torch.tensor(1.0)), expected, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(seen[0].nll.isnan(), torch.tensor([True, False, True, *[False] * 6], device=DEVICE))


@pytest.mark.everyday(4)
@pytest.mark.parametrize("transform", [{}, {"softcap": 3.0, "scale": 0.7}], ids=["plain", "transformed"])
def test_a_weighted_sum_is_the_product_and_the_sum(transform, path):
    """Its gradient is that of the rows for the weights times the upstream gradient."""
    logits, targets = inputs((4, 3))
    weights = torch.rand(4, 3, device=DEVICE) - 0.3
    weights[1] = 0
    options = {"with_lse": True, "with_correct": True, "with_ids": True, "backend": path, **transform}
    x, y = (logits.clone().requires_grad_() for _ in range(2))
    rows, found = token_nll(x, targets, active=weights != 0, **options), weighted_nll(y, targets, weights, **options)
    assert_equal_but_for_contraction(found.loss, (rows.nll * weights).flatten().sum(), path)
    for a, b in zip(found[1:], rows, strict=True):
        assert_equal_but_for_contraction(a, b, path)
    assert not found.nll.requires_grad
    rows.nll.backward(0.3 * weights)
    found.loss.backward(torch.tensor(0.3, device=DEVICE))
    assert_equal_but_for_contraction(x.grad, y.grad, path)


@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_rounded_nll_rounds_no_gradient(dtype, path):
    """As from hidden states, a float16 weight over a large count would underflow."""
    logits, targets = (t.to(dtype) if t.is_floating_point() else t for t in inputs((4,)))
    weights = torch.full((4,), 2.0**-9 / 3, device=DEVICE)
    x, y = (logits.clone().requires_grad_() for _ in range(2))
    rounded, plain = (weighted_nll(t, targets, weights, round_nll=r, backend=path) for t, r in ((x, True), (y, False)))
    rounded.loss.backward()
    plain.loss.backward()
    assert torch.equal(rounded.nll, plain.nll.to(dtype).float())
    assert torch.equal(rounded.loss, (rounded.nll * weights).sum())
    assert torch.equal(x.grad, y.grad)


@pytest.mark.everyday(5)
@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 1, 3)])
def test_inplace_backward_leaves_the_gradient_in_the_logits(shape, path):
    logits, targets = inputs(shape)
    upstream = upstream_like(targets)
    expected = value_and_grads(lambda x: token_nll(x, targets, backend=path).nll, [logits], upstream)
    leaf = logits.clone().requires_grad_()
    z = leaf * 1.0
    out = token_nll(z, targets, inplace_backward=True, backend=path).nll
    (grad,) = torch.autograd.grad(out, z, upstream)
    assert torch.equal(grad, expected[1])
    assert grad.data_ptr() == z.data_ptr()
    assert torch.equal(z.detach(), grad)


@pytest.mark.usefixtures("unchecked")
def test_inplace_backward_with_a_target_out_of_range(backend):
    logits, targets = inputs()
    targets.view(-1)[0] = logits.shape[-1]
    grads = []
    for inplace in (False, True):
        leaf = logits.detach().clone().requires_grad_()
        nll = token_nll(leaf * 1.0, targets, inplace_backward=inplace, backend=backend).nll
        grads.append(torch.autograd.grad(nll.sum(), leaf)[0])
    assert torch.equal(*(g.nan_to_num(99.0) for g in grads))
    assert grads[0].isfinite().any()


def test_inplace_backward_on_a_slice_writes_only_its_rows(backend):
    leaf, _ = inputs((2, 5))
    z = leaf.clone().requires_grad_() * 1.0
    targets = torch.randint(0, 37, (2, 4), device=DEVICE)
    part = z[:, :-1]
    out = token_nll(part, targets, inplace_backward=True, backend=backend).nll
    torch.autograd.grad(out.sum(), part)
    assert torch.equal(z[:, -1], leaf[:, -1])
    assert not torch.equal(z[:, 0], leaf[:, 0])


def test_a_second_reader_after_inplace_backward_is_an_error(backend):
    logits, targets = inputs()
    z = logits.requires_grad_() * 1.0
    first = token_nll(z, targets, inplace_backward=True, backend=backend).nll.sum()
    second = token_nll(z, targets, backend=backend).nll.sum()
    first.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


@pytest.mark.parametrize("kind", SHARED)
def test_inplace_backward_rejects_overlapping_rows(kind):
    logits = laid_out(kind).requires_grad_()
    targets = torch.zeros(logits.shape[:-1], dtype=torch.long, device=DEVICE)
    message = r"inplace_backward=True needs logits whose rows can be written in place, got shape"
    with pytest.raises(ValueError, match=message):
        token_nll(logits, targets, inplace_backward=True)
    with torch.no_grad():  # nothing to write
        assert token_nll(logits, targets, inplace_backward=True).nll.isfinite().all()
    assert token_nll(logits.detach(), targets, inplace_backward=True).nll.isfinite().all()


def shares_memory(x):
    """Return whether two entries of a tensor share memory."""
    where = sum(torch.arange(n).view(-1, *[1] * (x.dim() - d - 1)) * x.stride(d) for d, n in enumerate(x.shape))
    return where.unique().numel() < x.numel()


@pytest.mark.everyday(3)
@pytest.mark.parametrize("B", [1, 2, 3])
@pytest.mark.parametrize("L", [1, 2, 4])
def test_inplace_backward_finds_every_overlap_of_rows(B, L):
    V, base = 3, torch.randn(64)
    targets = torch.zeros(B, L, dtype=torch.long)
    for strides in itertools.product(range(13), range(13)):
        x = base.as_strided((B, L, V), (*strides, 1)).requires_grad_()
        try:
            token_nll(x, targets, inplace_backward=True)
        except ValueError as error:
            assert "rows can be written in place" in str(error)  # noqa: PT017
            assert shares_memory(x) or min(B, L) > 1  # rows of two strides may interleave
        else:
            assert not shares_memory(x)


@pytest.mark.parametrize("kind", ["batch slice", "position slice", "every second position", "transposed batch",
                                  "no batch", "four dimensions", "two, sliced", "one dimension",
                                  "one column"])  # fmt: skip
def test_inplace_backward_accepts_every_layout_without_overlap(kind):
    z = laid_out(kind).requires_grad_()
    upstream = torch.randn(z.shape[:-1], device=DEVICE)
    targets = torch.zeros(z.shape[:-1], dtype=torch.long, device=DEVICE)
    (expected,) = torch.autograd.grad(token_nll(z, targets).nll, z, upstream)
    (grad,) = torch.autograd.grad(token_nll(z, targets, inplace_backward=True).nll, z, upstream)
    assert torch.equal(grad, expected)
    assert torch.equal(z.detach(), grad)


@pytest.mark.gpu
def test_more_than_2_to_the_31_logits():
    """Element offsets exceed int32 in the last rows, forward and backward."""
    V = 131_072
    N = 2**31 // V + 3
    logits = torch.zeros(1, N, V, dtype=torch.bfloat16, device="cuda")
    logits[0, -1, 5] = 3.0
    logits.requires_grad_()
    targets = torch.full((1, N), -100, device="cuda")
    targets[0, [0, -2, -1]] = torch.tensor([7, 9, 5], device="cuda")
    nll = token_nll(logits, targets, backend="triton").nll
    expected = reference.token_nll(logits.detach()[0, [0, -2, -1]], targets[0, [0, -2, -1]])
    torch.testing.assert_close(nll[0, [0, -2, -1]].detach(), expected)
    nll.sum().backward()
    rows = logits.detach()[0, [0, -2, -1]]
    plain = value_and_grads(
        lambda x: reference.token_nll(x, targets[0, [0, -2, -1]]), [rows], torch.ones(3, device="cuda")
    )
    torch.testing.assert_close(logits.grad[0, [0, -2, -1]], plain[1])
    assert logits.grad[0, 1:-2].count_nonzero() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_graph_capture(kind):
    source = Source(kind, "triton")
    leaves = [leaf.requires_grad_() for leaf in source.leaves((256,), 1000, torch.bfloat16, D=64)]
    targets, weights = targets_like((256,), 1000), weights_like((256,))

    def step():
        loss = weighted_nll(source.argument(*leaves), targets, weights, backend="triton").loss
        return loss, *torch.autograd.grad(loss, leaves)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        leaves[0].copy_(torch.randn_like(leaves[0]))
        weights.copy_(weights.roll(1))
    graph.replay()
    if kind == "stored":
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
    one = torch.tensor(1.0, device="cuda")
    plain, exact = (
        value_and_grads(lambda *x: reference.weighted_nll(source.logits(*x), targets, weights), draws, one)
        for draws in (leaves, [t.double() for t in leaves])
    )
    for a, p, e in zip(captured, plain, exact, strict=True):
        assert_as_good_as_plain([a], [e], largest_error([p], [e]), sizes=reduction_sizes(leaves))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_no_host_sync_if_the_number_of_active_rows_is_given(kind):
    source = Source(kind)
    leaves = source.leaves((256,), 1000, torch.bfloat16, D=64)
    x = source.argument(leaves[0].requires_grad_(), *leaves[1:], num_active=256)
    targets, weights = targets_like((256,), 1000), weights_like((256,))
    weighted_nll(x, targets, weights).loss.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        weighted_nll(x, targets, weights).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("V", [50_257, 126_464, 262_144])
def test_parity_at_the_sizes_of_models(V):
    _, targets = inputs((33,), V)
    assert_parity(
        lambda x: token_nll(x, targets, backend="triton").nll,
        lambda x: reference.token_nll(x, targets),
        lambda seed: ([inputs((33,), V, torch.bfloat16, seed)[0]], upstream_like(targets)),
    )
