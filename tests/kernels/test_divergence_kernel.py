"""The Triton kernel over pairs of rows: every kind, on edge-case rows and at every alignment.

``test_divergence.py`` tests the public functions.
"""

import itertools
import math

import pytest
import torch

import reference
from dllm_kernels.rows._divergence import DivergenceRequest
from dllm_kernels.rows._divergence_kinds import ALIASES, NAMES
from dllm_kernels.rows._divergence_spec import checked_spec
from dllm_kernels.rows._transform import Transform
from tests.conftest import DEVICE, usually
from tests.support.parity import (
    assert_as_good_as_plain,
    assert_same_specials,
    largest,
    largest_error,
    poison_empty,
    same,
)
from tests.support.rows import in_separate_memory

kernel = pytest.importorskip("dllm_kernels.backends.triton.divergence")
tiles = pytest.importorskip("dllm_kernels.backends.triton._tiles")
pytestmark = pytest.mark.indices

INF, NAN = math.inf, math.nan
TILE = 512  # of one warp: two or four 16-byte accesses per thread
N = 6
KINDS = {name: {"kind": name} for name in NAMES if name not in ALIASES} | {
    "jsd, beta 0.9": {"kind": "jsd", "beta": 0.9},
    "lk from soft_ce": {"kind": "lk", "base": "soft_ce", "eta": 0.0, "kl_scale": 0.5},
    "lk, eta of 1e6": {"kind": "lk", "eta": 1e6},
    "lk, negative eta": {"kind": "lk", "eta": -1.5},
    "0.1 ce + 0.9 l1": {"kind": {"ce": 0.1, "l1": 0.9}},
    "kl less tv": {"kind": {"kl": 1.0, "tv": -0.5}},
    "kl and rkl": {"kind": {"kl": 0.5, "rkl": 0.3}},
    "rkl beside sums": {"kind": {"rkl": 1.0, "jsd": 2.0, "teacher_ce": 0.3, "ce": 0.5}},
    "all": {"kind": {name: 0.5 for name in NAMES if name not in ALIASES}},
}
STEPS = {
    "as they are": ({}, {}),
    "temperature": ({"scale": 1 / 0.7}, {"scale": 1 / 0.7}),
    "all, of either side": ({"softcap": 5.0, "scale": 0.7, "skip_id": 2}, {"softcap": 9.0, "scale": 1.5, "skip_id": 2}),
    "the student's alone": ({"softcap": 5.0}, {}),
}


@pytest.fixture(autouse=True)
def _several_accesses_a_thread(monkeypatch):
    poison_empty(monkeypatch)
    set_tile(TILE, monkeypatch)


def set_tile(columns, monkeypatch):
    monkeypatch.setattr(tiles, "divergence_rows", lambda V, itemsize, **_: tiles.Tile(columns, 1))


def drawn(V, dtype, seed=0):
    """Draw (logits ``[2, N / 2, V]``, teacher ``[1, N, V]``, other inputs); row 4 has weight 0 and is all NaN."""
    torch.manual_seed(seed)
    z, t = ((3 * torch.randn(s, device=DEVICE)).to(dtype) for s in ((2, N // 2, V), (1, N, V)))
    rest = {
        "weights": torch.rand(N, device=DEVICE, dtype=torch.promote_types(dtype, torch.float32)) + 0.5,
        "targets": torch.tensor([V - 1, -100, 0, V // 2, 0, V], device=DEVICE),
        "teacher_rows": torch.tensor([2, 0, 5, 5, 4, 1], device=DEVICE),
    }
    rest["weights"][4] = 0
    z.view(N, V)[4], t[0, 4] = NAN, NAN
    return z, t, rest


def run_kernel(z, t, rest, options, steps=({}, {}), *, out=None, rows=True):
    """Return (value, alpha, gradient, agree) of the kernel.

    The gradient is written in place on a copy, or to ``out`` by a separate launch.
    """
    spec = checked_spec(**options)
    skip, y = steps[0].get("skip_id"), rest["targets"]
    request = DivergenceRequest(
        spec, t, rest["weights"], rest["teacher_rows"] if rows else None,
        (y if skip is None else y.masked_fill(y == skip, -1)) if spec.wants_targets else None,
        rest.get("mean_acceptance"), None, *(Transform(**step) for step in steps),
    )  # fmt: skip
    in_place = out is None
    into = z.clone() if in_place else z
    value, alpha, agree, kept = kernel.divergence(into, request, with_grad=in_place)
    if not in_place:
        assert kept.stats.shape[1] == 8  # four norms, a, and three sums that are terms of the gradient, too
        kernel.divergence_grad(z, request, kept, out)
    return value, alpha, into if in_place else out, agree


def run_oracle(z, t, rest, options, steps, dtype, rows=True):
    """Return the outputs of ``run_kernel`` as computed by the oracle, in another dtype."""
    z = z.to(dtype).requires_grad_()
    n = z[..., 0].numel()
    found = reference.divergence(
        z.reshape(n, -1), t.to(dtype).reshape(-1, t.shape[-1]), rest["weights"].to(dtype), targets=rest["targets"],
        teacher_rows=rest["teacher_rows"] if rows else None, **options, **steps[0], teacher_transform=steps[1],
    )  # fmt: skip
    (grad,) = torch.autograd.grad(found.loss, z)
    return found.value.detach(), found.acceptance_rate, grad, found.agree


LABELS = ("value", "alpha", "gradient")


def assert_as_good_as_the_oracle(kind, dtype, V, steps, run=run_kernel):
    """Judge all outputs of ``run``, on the inputs of ``drawn``."""
    options, steps = KINDS[kind], STEPS[steps]
    acc = torch.promote_types(dtype, torch.float32)
    draws = [drawn(V, dtype, seed) for seed in range(6)]
    exact, plain = ([run_oracle(*draw, options, steps, d) for draw in draws] for d in (torch.float64, acc))
    ours = [run(*draw, options, steps) for draw in draws[:1]]
    sides = [pair for draw in draws for pair in zip(draw, steps, strict=False)]
    terms = max(largest(reference.transformed(t.double(), **side_steps)) for t, side_steps in sides)
    for place, label in enumerate(LABELS):
        got, e, p = ([run[place] for run in runs] for runs in (ours, exact, plain))
        sums = [V] * 3  # of the softmax of either side, and of the divergence
        assert_as_good_as_plain(got, e, largest_error(p, e), label, sums, terms)
    for o, e in zip(ours, exact, strict=False):
        assert same(o[3], e[3], "agree")


@pytest.mark.everyday(2)
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("V", [2 * TILE, 4 * TILE + 203, 2 * TILE - 5, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind, dtype, V, steps):
    assert_as_good_as_the_oracle(kind, dtype, V, steps)


@pytest.mark.everyday(1)
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("steps", ["as they are", "all, of either side"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_without_a_gradient_and_the_gradient_from_kept_statistics(kind, steps):
    """Each launch is another compiled kernel, which may round products elsewhere than the one with a gradient."""

    def run(z, *others):
        return run_kernel(z, *others, out=torch.full_like(z, NAN))

    assert_as_good_as_the_oracle(kind, torch.float32, TILE + 203, steps, run)


@pytest.mark.parametrize("V", [32000, 32768, 32769, 151936])
def test_short_rows_leave_room_for_a_second_program(V, monkeypatch):
    monkeypatch.undo()
    warps = 8 if V <= 32768 else 16
    for rule in (tiles.divergence_rows, tiles.linear_nll_rows):
        assert rule(2 * V, 2).num_warps == rule(V, 4).num_warps == warps


def pairs(V, dtype):
    """Return (names, logits, teacher) of edge-case rows."""
    torch.manual_seed(V)
    info = torch.finfo(dtype)
    first, middle, last = 0, V // 2, V - 1

    def tame():
        return 2 * torch.randn(V, dtype=torch.float64)

    def with_(value, *columns, row=None):
        row = tame() if row is None else row.clone()
        row[list(columns)] = value
        return row

    low, same = torch.full((V,), -INF, dtype=torch.float64), tame()
    pairs_by_name = {
        "tame": (tame(), tame()),
        "the same": (same, same),
        "the same but for a constant": (same, same + 4),
        "two peaks": (with_(9.0, first, last), with_(10.0, last, row=with_(9.0, first))),
        "two peaks, far": (with_(40.0, first, last), with_(41.0, last, row=with_(40.0, first))),
        "far up and far down": (tame() + 1e4, tame() - 1e4),
        "far apart": (with_(40.0, first), with_(40.0, last)),
        "the student's far spread": (30 * tame(), tame()),
        "the teacher's far spread": (tame(), 30 * tame()),
        "far higher from its middle on": (tame() + 30.0 * (torch.arange(V) >= middle), tame()),
        "one column each": (with_(0.0, middle, row=low), with_(1.0, middle, row=low)),
        "other columns each": (with_(0.0, first, row=low), with_(0.0, last, row=low)),
        "some -inf in both": (with_(-INF, *range(0, V, 3)), with_(-INF, *range(0, V, 3))),
        "some -inf in the student": (with_(-INF, *range(middle)), tame()),
        "some -inf in the teacher": (tame(), with_(-INF, *range(middle))),
        "-inf and the lowest": (with_(info.min, last, row=low), with_(info.min, last, row=low)),
        "all equal": (torch.ones(V, dtype=torch.float64), torch.zeros(V, dtype=torch.float64)),
        "tie, the same lowest": (with_(9.0, first, last), with_(9.0, first, middle)),
        "tie, another lowest": (with_(9.0, middle, last), with_(9.0, first, last)),
        "nan": (with_(NAN, middle), tame()),
        "the teacher's nan": (tame(), with_(NAN, last)),
        "inf": (with_(INF, first), tame()),
        "the teacher's inf": (tame(), with_(INF, first)),
        "all -inf": (low, tame()),
        "the teacher's all -inf": (tame(), low),
    }
    z, t = (torch.stack([pair[i] for pair in pairs_by_name.values()]).to(dtype).to(DEVICE) for i in (0, 1))
    return list(pairs_by_name), z, t


DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
EACH = [*zip(KINDS, itertools.cycle(DTYPES))]
# Each name alone, and all of them in one sum; not the same names with other numbers and in other sums.
ALONE = [(kind, dtype) for kind, dtype in EACH if kind == "all" or KINDS[kind] == {"kind": kind}]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("kind", "dtype"), usually(ALONE, EACH))
def test_every_kind_of_row(kind, dtype):
    V = TILE + 203 if dtype in (torch.float32, torch.float16) else 2 * TILE
    options, names = KINDS[kind], pairs(V, dtype)[0]
    _, z, t = pairs(V, dtype)
    acc = torch.promote_types(dtype, torch.float32)
    rest = {
        "weights": torch.rand(len(names), device=DEVICE, dtype=acc) + 0.5,
        "targets": torch.full((len(names),), V // 2, device=DEVICE),
    }
    exact, plain = (run_oracle(z[None], t, rest, options, ({}, {}), d, rows=False) for d in (torch.float64, acc))
    ours = run_kernel(z[None], t[None], rest, options, rows=False)
    assert same(ours[3], exact[3], "agree")
    lost = exact[1].isnan()  # either row has no distribution
    assert [name for name, row_lost in zip(names, lost, strict=True) if row_lost] == names[-6:]
    assert all(found[lost].isnan().all() for found in (*ours[:2], ours[2][0]))
    assert_same_specials(ours[0][~lost], exact[0][~lost])
    assert_same_specials(ours[1][~lost], exact[1][~lost])
    assert same(*(found[2][0].isnan().any(1) & ~lost for found in (ours, exact)), "rows with NaN as gradient")
    finite = ~lost & exact[0].isfinite() & exact[2][0].isfinite().all(1)
    near = torch.maximum(z.abs().nan_to_num(0, 0, 0).amax(1), t.abs().nan_to_num(0, 0, 0).amax(1)) < 12
    for these in (finite & near, finite & ~near):
        for o, e, p, label in zip(ours, exact, plain, LABELS, strict=False):
            o, e, p = (x[0][these] if x.dim() == 3 else x[these] for x in (o, e, p))
            sums = 1 if label == "alpha" else 3  # both softmaxes, and sums over their results
            assert_as_good_as_plain([o], [e], largest_error([p], [e]), f"{label} of {these}", sizes=[V] * sums)


def assert_rows_as_good_as_plain(found, exact, plain, V, order=slice(None)):
    """Judge the outputs for the rows ``order`` of the oracle; a compiled kernel depends on strides and alignment."""
    for o, e, p, label in zip(found, exact, plain, LABELS, strict=False):
        e, p = (x.reshape(N, *x.shape[2:])[order] for x in (e, p))
        assert_as_good_as_plain([o.reshape(e.shape)], [e], largest_error([p], [e]), label, sizes=[V] * 3)
    assert same(found[3], exact[3][order], "agree")


def test_nla_is_constant_below_its_floor():
    V = TILE + 3
    z, t = torch.zeros(1, 3, V, device=DEVICE), torch.zeros(1, 3, V, device=DEVICE)
    z[0, :2, 0], t[0, 0, V - 1], t[0, 1, 0] = 9.0, 9.0, 8.0
    z[0, 2, 2:], t[0, 2, 1:] = -INF, -INF  # a is the floor
    rest = {"weights": torch.ones(3, device=DEVICE), "targets": None}
    value, alpha, grad, _ = run_kernel(z, t, rest, {"kind": "nla", "floor": 0.5}, rows=False)
    assert alpha[0] < 0.5 == alpha[2] < alpha[1] < 1
    torch.testing.assert_close(value, -alpha.clamp(min=0.5).log())
    assert grad[0].bool().any(1).tolist() == [False, True, True]


@pytest.mark.parametrize("skipped", [None, 3])
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_the_lowest_of_equal_columns_is_the_argmax(side, skipped):
    """Equal columns in one tile, in two tiles, in a tile and the tail of the row, and both in the tail."""
    V, steps = 2 * TILE + 3, ({"skip_id": skipped}, {"skip_id": skipped})
    ties = torch.tensor([[1, 2], [5, TILE], [TILE - 1, V - 1], [V - 2, V - 1]], device=DEVICE)
    with_tie = torch.zeros(4, V, device=DEVICE).scatter_(1, ties, 4.0)
    if skipped is not None:
        with_tie[:, skipped] = 4.0
    rest = {"weights": torch.ones(4, device=DEVICE), "targets": None}
    for column, agree in zip(ties.t(), (True, False), strict=True):
        with_peak = torch.zeros(4, V, device=DEVICE).scatter_(1, column[:, None], 4.0)
        z, t = (with_tie, with_peak) if side == "student" else (with_peak, with_tie)
        found = run_kernel(z[None], t[None], rest, {"kind": "kl"}, steps, rows=False)[3]
        assert same(found, torch.full_like(found, agree), f"agree with columns {column.tolist()}")


@pytest.mark.everyday(1)
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("kind", ["kl", "rkl", "0.1 ce + 0.9 l1"])
@pytest.mark.parametrize("V", [TILE, TILE + 13])
def test_a_row_at_any_place(kind, V):
    """The rows are computed in place, in other memory, at any offset and between other rows.

    Memory beside them is not written. The row of weight 0 is written as zeros.
    """
    z, t, rest = drawn(V, torch.bfloat16)
    exact, plain = (run_oracle(z, t, rest, KINDS[kind], ({}, {}), dtype) for dtype in (torch.float64, torch.float32))
    order = torch.tensor([3, 0, 4, 5], device=DEVICE)
    some = {"teacher_rows": rest["teacher_rows"], **{name: rest[name][order] for name in ("weights", "targets")}}
    some["teacher_rows"] = some["teacher_rows"][order]
    for offset in (0, 3):
        teacher = in_separate_memory(t, offset)
        mine = in_separate_memory(z.view(1, N, V)[:, order], 3 - offset)
        out = in_separate_memory(torch.full_like(mine, NAN), offset)
        elsewhere = run_kernel(mine, teacher, some, KINDS[kind], out=out)
        in_place = run_kernel(mine.clone(memory_format=torch.preserve_format), teacher, some, KINDS[kind])
        for found in (elsewhere, in_place):
            assert_rows_as_good_as_plain(found, exact, plain, V, order)
            assert not any(t.reshape(len(order), -1)[2].any() for t in found)
        assert torch.equal(mine.nan_to_num(9.0), z.view(1, N, V)[:, order].nan_to_num(9.0))
        for view in (mine, teacher, out):
            beside = view._base.clone()
            beside[..., view.storage_offset() : view.storage_offset() + V] = NAN
            assert beside.isnan().all()


def test_rows_between_others_are_computed_in_place():
    z, t, rest = drawn(TILE + 13, torch.float32)
    exact, plain = (run_oracle(z, t, rest, KINDS["tv"], ({}, {}), dtype) for dtype in (torch.float64, torch.float32))
    wider = torch.full((2, N // 2 + 2, TILE + 13), NAN, device=DEVICE)
    mine = wider.clone()[:, 1:-1].copy_(z)
    teacher = torch.full((N, 2, TILE + 13), NAN, device=DEVICE)[:, :1].copy_(t.transpose(0, 1))
    request = DivergenceRequest(checked_spec("tv"), teacher, rest["weights"], rest["teacher_rows"])
    value, alpha, agree, _ = kernel.divergence(mine, request, with_grad=True)
    assert_rows_as_good_as_plain((value, alpha, mine, agree), exact, plain, TILE + 13)
    assert mine._base[:, [0, -1]].isnan().all()


@pytest.mark.parametrize("count", [N, 0])
def test_a_row_missing_in_the_teacher_gives_nan(count):
    V = 2 * TILE
    z, t = (torch.randn(1, n, V, device=DEVICE) for n in (4, count))
    weights = torch.ones(4, device=DEVICE)
    rows = torch.tensor([-1, count, count + 2**40, 2**62], device=DEVICE)
    request = DivergenceRequest(checked_spec("kl"), t, weights, rows)
    value, alpha, agree, _ = kernel.divergence(z, request, with_grad=True)
    assert value.isnan().all()
    assert alpha.isnan().all()
    assert not agree.any()
    assert z.isnan().all()


@pytest.mark.everyday(1)
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("V", [1, 3, 16, 53])
@pytest.mark.parametrize("kind", ["kl", "jsd", "0.1 ce + 0.9 l1"])
def test_tiles_of_16_columns(kind, V, monkeypatch):
    set_tile(16, monkeypatch)
    test_every_kind(kind, torch.float32, V, "all, of either side" if V > 3 else "temperature")


@pytest.mark.everyday(1)
@pytest.mark.parametrize("kind", ["kl", "jsd", "0.1 ce + 0.9 l1"])
def test_products_may_be_fused(kind, fused_products, monkeypatch):
    """One column has probability 1 on both sides.

    With fused products, z - z is the rounding error of a scaled logit.
    """
    test_tiles_of_16_columns(kind, 1, monkeypatch)
