"""The row kernels on edge-case rows, in tiles with several accesses per thread.

One batch holds every kind of row, so that no row may affect another. Vocabularies end inside of a tile and at its edge.
"""

import math

import pytest
import torch

import reference
from dllm_kernels.ops import LinearLogits
from tests.conftest import DEVICE
from tests.support.op_cases import FIRST_OPS, Rows, name_of
from tests.support.parity import (
    assert_as_good_as_plain,
    assert_same_specials,
    largest_error,
    poison_empty,
    value_and_grads,
)
from tests.support.rows import in_separate_memory

pytestmark = pytest.mark.indices

token_nll_kernels = pytest.importorskip("dllm_kernels.backends.triton.token_nll")
linear_nll_kernels = pytest.importorskip("dllm_kernels.backends.triton.linear_nll")
tiles = pytest.importorskip("dllm_kernels.backends.triton._tiles")

INF, NAN = math.inf, math.nan
TILE = 512  # of one warp: four 16-byte accesses per thread for float32, two for 16 bits
VOCABULARIES = (2 * TILE, 2 * TILE + 203, TILE - 5, 3)


@pytest.fixture(autouse=True)
def _several_accesses_a_thread(monkeypatch):
    poison_empty(monkeypatch)
    monkeypatch.setattr(tiles, "token_nll_fwd", lambda V, itemsize: tiles.Tile(TILE, 1))
    monkeypatch.setattr(tiles, "token_nll_bwd", lambda V, itemsize: tiles.Tile(TILE, 1, 2))
    monkeypatch.setattr(tiles, "linear_nll_rows", lambda V, itemsize, **_: tiles.Tile(TILE, 1))


def rows(V, dtype):
    """Return (logits, targets) by the name of the row."""
    torch.manual_seed(V)
    info = torch.finfo(dtype)
    high = 1e4
    first, middle, last = 0, V // 2, V - 1

    def drawn():
        return 2 * torch.randn(V, dtype=torch.float64)

    def with_(values, *columns, row=None):
        row = drawn() if row is None else row
        row[list(columns)] = values
        return row

    peak = 9.0  # slightly above the others: its NLL is of the size of the logits
    rows_by_name = {
        "tame": (drawn(), middle),
        "up": (drawn() + high, first),
        "down": (drawn() - high, last),
        "up at some": (with_(high, *range(0, V, 7)), last),
        "far higher from its middle on": (drawn() + 40.0 * (torch.arange(V) >= middle), last),
        "far higher at its end": (with_(60.0, *range(V - V // 50, V)), first),
        "one of all": (with_(high, first, row=torch.full((V,), -high, dtype=torch.float64)), first),
        "first half -inf": (with_(-INF, *range(middle)), last),
        "all -inf but the last": (with_(0.0, last, row=torch.full((V,), -INF, dtype=torch.float64)), last),
        "all -inf": (torch.full((V,), -INF, dtype=torch.float64), first),
        "-inf and the lowest": (with_(info.min, last, row=torch.full((V,), -INF, dtype=torch.float64)), last),
        "all the lowest": (torch.full((V,), info.min, dtype=torch.float64), middle),
        "all the largest": (torch.full((V,), info.max / 2, dtype=torch.float64), first),
        "largest beside lowest": (with_(info.max, middle, row=torch.full((V,), info.min, dtype=torch.float64)), middle),
        "nan": (with_(NAN, middle), first),
        "inf": (with_(INF, middle), first),
        "argmax": (with_(peak, middle), middle),
        "tie, lower in the first tile": (with_(peak, first, last), last),
        "tie, higher in the last tile": (with_(peak, first, last), first),
        "tie, just below": (with_(peak, max(middle - 1, 0), middle), middle),
        "tie, just above": (with_(peak, middle, min(middle + 1, last)), middle),
        "all equal, first": (torch.ones(V, dtype=torch.float64), first),
        "all equal, last": (torch.ones(V, dtype=torch.float64), last),
        "target too large": (drawn(), V + 3),
        "target far too large": (drawn(), 2**32 + 1),
        "target negative": (drawn(), -5),
    }
    logits = torch.stack([row for row, _ in rows_by_name.values()]).to(dtype)
    return list(rows_by_name), logits.to(DEVICE), torch.tensor([y for _, y in rows_by_name.values()], device=DEVICE)


def exact_and_plain(logits, targets, scale):
    """Compute (nll, gradient) in float64 and in the dtype of the sums, and the argmax match."""
    acc = torch.promote_types(logits.dtype, torch.float32)
    both = (
        value_and_grads(lambda x: reference.token_nll(x, targets), [logits.to(dtype)], scale)
        for dtype in (torch.float64, acc)
    )
    return (*both, reference.argmax_match(logits, targets))


# Each returns (nll, gradient, (argmax match, argmax), factor by which the gradient is still to be multiplied).


def forward_and_backward(logits, targets, scale):
    nll, row_max, log_sum, *argmax = token_nll_kernels.nll(logits[None], targets, with_correct=True, with_ids=True)
    assert torch.equal(token_nll_kernels.nll(logits[None], targets, with_correct=True)[3], argmax[0])
    grad = torch.empty_like(logits)
    token_nll_kernels.nll_grad(logits[None], targets, scale, row_max, log_sum, grad[None])
    return nll, grad, argmax, torch.ones_like(scale).unsqueeze(1)


def over_a_chunk(logits, targets, scale):
    nll, _, _, *argmax = linear_nll_kernels.nll_and_grad_(logits, targets, scale, with_correct=True, with_ids=True)
    return nll, logits, argmax, torch.ones_like(scale).unsqueeze(1)


PATHS = {"whole rows": forward_and_backward, "split rows": forward_and_backward, "chunk": over_a_chunk}


DTYPES = {
    "whole rows": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
    "split rows": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    "chunk": (torch.float64, torch.bfloat16, torch.float16, torch.float32),
}


@pytest.mark.everyday(1)
@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("offset", [None, 3])
@pytest.mark.parametrize("V", VOCABULARIES)
@pytest.mark.parametrize(("path", "dtype"), [(p, dtype) for p in PATHS for dtype in DTYPES[p]], ids=str)
def test_every_kind_of_row(path, V, dtype, offset, monkeypatch):
    if path == "split rows":
        monkeypatch.setattr(tiles, "token_nll_fwd", lambda V, itemsize: tiles.Tile(TILE, 1, 3))
    names, logits, targets = rows(V, dtype)
    scale = torch.rand(len(names), device=DEVICE, dtype=torch.promote_types(dtype, torch.float32)) + 0.5
    exact, plain, matches = exact_and_plain(logits, targets, scale)
    ordinary = logits.abs().amax(1) < 10
    theirs = logits.clone() if offset is None else in_separate_memory(logits, offset)
    ids = reference.predicted_ids(logits)
    nll, grad, (correct, best), factor = PATHS[path](theirs, targets, scale)
    for i, name in enumerate(names):
        assert_same_specials(nll[i], exact[0][i], name)
        assert correct[i] == (matches[i] & ~exact[0][i].isnan()), f"argmax match of the row {name!r}"
        assert best[i] == ids[i], f"argmax of the row {name!r}"
        assert (grad[i] * factor[i]).isnan().any() == exact[0][i].isnan(), name
    one_by_one = (~ordinary & ~exact[0].isnan()).nonzero().tolist()
    for these in (ordinary & ~exact[0].isnan(), *one_by_one):
        for ours, e, p in ((nll, exact[0], plain[0]), (grad, exact[1] / factor, plain[1] / factor)):
            error = largest_error([p[these].double()], [e[these]])
            assert_as_good_as_plain([ours[these]], [e[these]], error, f"{these}", sizes={V})


OPS = [(kind, case) for case in FIRST_OPS for kind in case.kinds or ("other",)]


@pytest.mark.skipif(DEVICE != "cpu", reason="counts what Triton's interpreter launches")
@pytest.mark.parametrize(("kind", "case"), OPS, ids=name_of)
def test_without_rows_nothing_is_launched(kind, case, monkeypatch):
    from triton.runtime import interpreter

    launches = []
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda *args, **options: launches.append(args))
    leaf = torch.zeros(0, 7 if kind == "stored" else 3, device=DEVICE, requires_grad=True)
    x = leaf if kind == "stored" else LinearLogits(leaf, torch.ones(7, 3, device=DEVICE))
    rows = Rows.drawn(0, *(() if case.kinds else (7,)), V=7, device=DEVICE)
    if values := case.values(case(x, rows, **case.accepted(backend="triton"))):
        (gradient,) = torch.autograd.grad(sum(t.sum() for t in values), leaf)
        assert gradient.shape == leaf.shape
    assert not launches
