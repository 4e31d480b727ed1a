"""Row statistics: parity of every output and of their joint gradients, extreme and bad rows, both forms, memory."""

import itertools
import math
from functools import partial

import pytest
import torch

import reference
from dllm_kernels.ops import RowStats, row_stats
from tests.conftest import DEVICE
from tests.support.inputs import SHAPES, Source, skip_unjudged
from tests.support.parity import PLAIN_DRAWS, assert_as_good_as_plain, largest_error, reduction_sizes, same
from tests.support.readme import ROOT
from tests.support.rows import SPREAD, around_a_transform, between_ordinary_rows, extreme_rows, of_each_backend
from tests.support.statistics import DIFFERENTIABLE, EVERY_FLAG, FLAGS, STATISTICS, differentiable, statistics

NAN, INF = math.nan, math.inf
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def options(shape, V, K, dtype=torch.float32, *, mix=True, skip_id=None, seed=0):
    """Draw ids (one in six is -100), a and b (some of them 0) and active rows."""
    torch.manual_seed(seed)
    acc = torch.promote_types(dtype, torch.float32)
    per_id = shape if K is None else (*shape, K)
    ids = torch.randint(0, V, per_id)
    if skip_id is not None:
        ids = torch.where(ids == skip_id, (skip_id + 1) % V, ids)
    ids = torch.where(torch.rand(per_id) < 1 / 6, -100, ids)
    a = 10 ** (-4 * torch.rand(shape)) * (torch.rand(shape) < 0.8)
    b = torch.rand(shape) + 0.1
    b = b * ((torch.rand(shape) < 0.8) | (a == 0))
    arguments = {"mix": (a.to(DEVICE, acc), b.to(DEVICE, acc)) if mix else None}
    return ids.to(DEVICE), arguments | {"active": (torch.rand(shape) < 0.7).to(DEVICE)}


def upstream(out, seed=1):
    """Draw a random gradient for each output, some entries zero."""
    torch.manual_seed(seed)
    return [(torch.randn(t.shape) * (torch.rand(t.shape) < 0.8)).to(t.device, t.dtype) for t in out]


def run(function, leaves, **kwargs):
    """Return the statistics by name, and the joint gradients of those that have one for :func:`upstream`."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    out = statistics(function(*leaves, **kwargs))
    grad = {name: t for name, t in out.items() if t.requires_grad}
    grads = torch.autograd.grad([*grad.values()], leaves, upstream(grad.values()))
    names = (f"gradient of {', '.join(grad)}: {i}" for i in range(len(leaves)))
    return {name: t.detach() for name, t in out.items()} | dict(zip(names, grads, strict=True))


def assert_parity(ours, oracle, draw):
    """Compare every output and gradient with the oracle by ``tests/support/parity.py``.

    ``draw(seed)`` returns (leaves, options).
    """
    draws = [draw(seed) for seed in range(PLAIN_DRAWS)]

    def wide(options):
        return {name: tuple(t.double() for t in o) if name == "mix" and o else o for name, o in options.items()}

    results = [run(ours, leaves, **arguments) for leaves, arguments in draws[:2]]
    exact = [run(oracle, [leaf.double() for leaf in leaves], **wide(arguments)) for leaves, arguments in draws]
    plain = [run(oracle, leaves, **arguments) for leaves, arguments in draws]
    sizes = reduction_sizes(draws[0][0])
    assert [*results[0]] == [*exact[0]]
    for name in exact[0]:
        got, e, p = ([r[name] for r in runs] for runs in (results, exact, plain))
        assert_as_good_as_plain(got, e, largest_error(p, e), name, sizes)


def pair(source, sizes=None, **fixed):
    """Return the op and the oracle as functions of the leaves."""
    flags = itertools.cycle([{"with_correct": True}, {"with_correct": True, "with_ids": True}])

    def ours(*x, **arguments):
        logits = source.argument(*x, **sizes or {})
        out = row_stats(logits, **FLAGS, backend=source.backend, **next(flags), **arguments, **fixed)
        if source.kind == "stored" or x[0].dtype.itemsize > 2:  # 16 bits round products of another order otherwise
            wanted = oracle(*(t.detach() for t in x), **arguments)
            assert same(out.correct, wanted.correct, "correct")
            assert out.ids is None or same(out.ids, wanted.ids, "ids")
        return out

    def oracle(*x, **arguments):
        return reference.row_stats(source.logits(*x), **arguments, **fixed)

    return ours, oracle


def drawn(source, shape, V, K, dtype, skip_id=None):
    def draw(seed):
        ids, arguments = options(shape, V, K, dtype, skip_id=skip_id, seed=seed)
        return source.leaves(shape, V, dtype, seed=seed + 100), {"ids": ids, **arguments}

    return draw


SIZES = [(*size, K) for size, K in zip(SHAPES, (None, 1, 2, 5, 2, None), strict=True)]
TRANSFORMS = ({}, {"skip_id": 7}, {"softcap": 3.0, "scale": 0.7}, {"softcap": 4.0, "scale": 2.0, "skip_id": 0})


@pytest.mark.everyday(9)
@pytest.mark.covering(2, most=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "V", "K"), SIZES)
def test_parity(shape, V, K, dtype, source):
    skip_unjudged(source, dtype, shape)
    assert_parity(*pair(source), drawn(source, shape, V, K, dtype))


@pytest.mark.everyday(6)
@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize(("chunk_size", "num_active"), [(4, None), (None, None), (3, 9), (50, 8)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity_of_transformed_logits(transform, chunk_size, num_active, dtype, source):
    skip_unjudged(source, dtype)
    sizes = {"chunk_size": chunk_size, "num_active": num_active}
    assert_parity(*pair(source, sizes, **transform), drawn(source, (9,), 53, 2, dtype, transform.get("skip_id")))


@pytest.mark.everyday(2)
@pytest.mark.covering(1)
@of_each_backend
@pytest.mark.parametrize("kind", SPREAD)
def test_parity_of_rows_far_apart(kind, path):
    def draw(seed):
        ids, arguments = options((6,), 37, 2, skip_id=4, seed=seed)
        x = SPREAD[kind](torch.randn(6, 37))
        arguments["mix"] = tuple(torch.full((6,), c, device=DEVICE) for c in (1e-3, 0.9))
        return [x.to(DEVICE)], {"ids": ids, **arguments}

    assert_parity(*pair(Source("stored", path)), draw)


@pytest.mark.covering(1, most=2)
@of_each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_each_output_alone(dtype, path):
    """The other outputs have no upstream gradient, or are not requested."""
    logits = (4 * torch.randn(2, 3, 37)).to(DEVICE, dtype).requires_grad_()
    ids, arguments = options((2, 3), 37, 2, dtype)
    oracle, mix = reference.row_stats(logits, ids, **arguments), arguments.pop("mix")
    for requested in (*zip(DIFFERENTIABLE), ("entropy", "lse"), DIFFERENTIABLE):
        expected = [getattr(oracle, name) for name in requested]
        grads = upstream(expected)
        (wanted,) = torch.autograd.grad(expected, logits, grads, retain_graph=True)
        given = {"mix": mix} if "mix" in requested else {}
        for flags in (FLAGS, {name: True for name in FLAGS if name in requested}):
            out = row_stats(logits, ids, backend=path, **flags, **given, **arguments)
            named = {name for name, t in out._asdict().items() if t is not None}
            assert named == {"log_probs", "lse", *flags, *given}
            out = [getattr(out, name) for name in requested]
            (grad,) = torch.autograd.grad(out, logits, grads)
            for got, want in zip([*out, grad], [*expected, wanted], strict=True):
                torch.testing.assert_close(got, want, msg=lambda error, of=requested: f"{of}: {error}")


# A kernel compares the columns of a tile with few ids in another loop than with many.
@pytest.mark.parametrize("K", [4, 11])
def test_the_same_id_twice_gets_both_gradients(K, path):
    torch.manual_seed(0)
    logits = torch.randn(1, 37, device=DEVICE, requires_grad=True)
    ids = torch.tensor([[20, 0, 20, -100, 36, 0, 1, 17, 20, 15, 16]], device=DEVICE)[:, :K].contiguous()
    grads = 2.0 ** torch.arange(K, device=DEVICE)[None]

    def gradient(function, logits):
        log_probs = function(logits, ids).log_probs
        return torch.autograd.grad(log_probs, logits, grads.to(log_probs))

    exact = gradient(reference.row_stats, logits.detach().double().requires_grad_())
    plain_error = largest_error(gradient(reference.row_stats, logits), exact)
    assert_as_good_as_plain(gradient(partial(row_stats, backend=path), logits), exact, plain_error, sizes={37})


def test_a_or_b_is_zero(path):
    """Without a, a probability that float32 rounds to 0 contributes its logarithm, with a full-size gradient."""
    logits = torch.tensor([[0.0, -300.0, 2.0]] * 3, device=DEVICE, requires_grad=True)
    a, b = torch.tensor([0.0, 0.5, 0.25], device=DEVICE), torch.tensor([2.0, 0.0, 4.0], device=DEVICE)
    ids = torch.zeros(3, dtype=torch.long, device=DEVICE)
    F = row_stats(logits, ids, mix=(a, b), backend=path).mix
    exact = logits.detach().double().requires_grad_()
    wanted = reference.row_stats(exact, ids, (a.double(), b.double())).mix
    torch.testing.assert_close(F, wanted.float())
    grads = torch.tensor([1.0, 2.0, 3.0], device=DEVICE)
    torch.testing.assert_close(
        torch.autograd.grad(F, logits, grads)[0], torch.autograd.grad(wanted, exact, grads.double())[0].float()
    )


@pytest.mark.everyday(2)
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_terms_of_a_mixture_of_every_size(dtype, path):
    """One logarithm may serve several terms only if their product is neither too small nor too large."""
    pairs = [(a, b) for a in (1e-30, 0.9e-9, 1.1e-9, 1e-6, 3.0, 0.9e9, 1e11, 1e30) for b in (0.0, 1e-3, 1.0, 1e9)]
    pairs += [(1e-6, 1e20), (3.0, 1e20)]
    a, b = (
        torch.tensor(pairs, dtype=torch.float64).t().contiguous().to(DEVICE, torch.promote_types(dtype, torch.float32))
    )
    torch.manual_seed(7)
    logits = (20 * torch.randn(len(pairs), 150, device=DEVICE)).clamp(-80, 80).to(dtype)
    logits[:, 3], logits[:, 4] = -INF, logits[:, 5]
    ids = torch.zeros(len(pairs), dtype=torch.long, device=DEVICE)
    F = row_stats(logits, ids, mix=(a, b), backend=path).mix
    wanted = reference.row_stats(logits.double(), ids, (a.double(), b.double())).mix
    plain = reference.row_stats(logits.to(F.dtype), ids, (a, b)).mix
    for i, pair in enumerate(pairs):
        error = largest_error([plain[i : i + 1]], [wanted[i : i + 1]])
        assert_as_good_as_plain([F[i : i + 1]], [wanted[i : i + 1]], error, f"a, b = {pair}", sizes={150})


def stats_and_gradient(function, logits, ids, mix, steps):
    """Return the statistics of special rows and their joint gradient by name, and the outputs.

    The gradient of the oracle's logsumexp is computed from softmax, because torch's own is wrong for logits far from 0.
    In a row with +inf, logsumexp and its gradient are NaN.
    """
    x = logits.clone().requires_grad_()
    out = function(x, ids, mix=tuple(t.to(torch.promote_types(x.dtype, torch.float32)) for t in mix), **steps)
    values, wrt, grads = statistics(out), differentiable(out), [torch.ones_like(t) for t in differentiable(out)]
    if function is reference.row_stats:
        z = reference.transformed(x, **steps)
        values["lse"] = torch.where(out.lse == INF, NAN, out.lse)
        at = next(i for i, t in enumerate(wrt) if t is out.lse)
        wrt[at], grads[at] = z, torch.where(values["lse"].isnan()[:, None], NAN, z.detach().softmax(-1))
    values["gradient"] = torch.autograd.grad(wrt, x, grads)[0]
    return {name: t.detach() for name, t in values.items()}, out


def judge_special_rows(rows, dtype, path, **steps):
    """Compare special rows, which lie between ordinary rows. NaN must stay in its own row."""
    names, logits, targets = between_ordinary_rows(rows, dtype)
    ids = torch.stack([targets, torch.zeros_like(targets)], 1)
    mix = [torch.full(targets.shape, c, device=DEVICE, dtype=torch.float64) for c in (0.25, 0.5)]

    def ours(x, ids, **arguments):
        return row_stats(x, ids, **EVERY_FLAG, backend=path, **arguments)

    got, out = stats_and_gradient(ours, logits, ids, mix, steps)
    plain, oracle = stats_and_gradient(reference.row_stats, logits, ids, mix, steps)
    exact, _ = stats_and_gradient(reference.row_stats, logits.double(), ids, mix, steps)
    assert same(out.correct, oracle.correct, "correct")
    assert same(out.ids, oracle.ids, "ids")
    for row, kind in enumerate(names):
        for name in exact:
            o, p, e = got[name], plain[name], exact[name]
            label, error = f"{name}, {kind}", largest_error([p[row]], [e[row]])
            if name == "gradient" and e[row].isnan().any():  # it is unspecified which columns are NaN
                assert o[row].isnan().any(), label
            else:
                assert_as_good_as_plain([o[row]], [e[row]], error, label, sizes={logits.shape[1]})


@pytest.mark.everyday(1)
@of_each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_extreme_rows(dtype, path):
    judge_special_rows(extreme_rows(40), dtype, path)


@pytest.mark.everyday(2)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("steps", [{"softcap": 5.0, "skip_id": 17}, {"scale": 0.5, "skip_id": 17}], ids=str)
def test_rows_around_a_transform(steps, dtype, path):
    judge_special_rows(around_a_transform(53, 17, 200.0 if "softcap" in steps else 4.0), dtype, path, **steps)


@pytest.mark.everyday(1)
def test_long_bf16_rows(backend):
    """Tiles and blocks have their real sizes. The row length is odd, so that rows begin at any alignment."""
    V = 262_145
    torch.manual_seed(0)
    x = (3 * torch.randn(2, V)).bfloat16().to(DEVICE)
    ids = torch.tensor([[V - 1, 0], [77, 131_072]], device=DEVICE)
    arguments = {"ids": ids, "mix": (torch.tensor([1e-6, 0.0]).to(DEVICE), torch.tensor([0.9, 1.0]).to(DEVICE))}
    ours, oracle = pair(Source("stored", backend), skip_id=5)
    exact_arguments = arguments | {"mix": tuple(t.double() for t in arguments["mix"])}
    got, exact, plain = (
        run(ours, [x], **arguments),
        run(oracle, [x.double()], **exact_arguments),
        run(oracle, [x], **arguments),
    )
    for name, e in exact.items():
        assert_as_good_as_plain([got[name]], [e], largest_error([plain[name]], [e]), name, reduction_sizes([x]))


def test_every_output_is_in_the_oracle_and_described():
    assert RowStats._fields == reference.RowStats._fields, "the fields in ops/row_stats.py and reference/row_stats.py"
    assert {*FLAGS} <= {*STATISTICS}
    texts = {file: (ROOT / file).read_text() for file in ("docs/ops/row-stats.md", "CHANGELOG.md")}
    interface = (ROOT / "dllm_kernels/rows/_stats_interface.py").read_text().split('"""')[1]
    texts["docstring of rows/_stats_interface.py"] = interface
    assert [(name, file) for name in RowStats._fields for file, text in texts.items() if f"`{name}`" not in text] == []


def test_the_lowest_of_equal_columns_is_the_argmax(backend):
    """Equal columns in one tile, in two tiles and different lanes, and in the ragged end of a row."""
    V = 5003
    ties = torch.tensor([[1, 2], [9, 4500], [4500, V - 1], [V - 2, V - 1], [0, 2500]], device=DEVICE)
    x = torch.zeros(5, V, device=DEVICE).scatter_(1, ties, 4.0)
    assert same(row_stats(x, ties[:, :1], with_ids=True, backend=backend).ids, ties[:, 0], "ids")
