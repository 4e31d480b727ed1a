"""The result of an op for a row of logits is bit-identical in every batch and at every position in a batch.

A kernel is compiled anew for other strides and another alignment of the rows, and may then round differently. There the
bits are compared on CPU only; ``tests/ops`` compares the results of every layout with the oracle.
"""

import pytest
import torch

from tests.conftest import DEVICE
from tests.support.op_cases import OF_EVERY_KIND, Rows, name_of, results
from tests.support.parity import small_blocks, small_tiles, values_at

ROWS = 7
STEPS = {"softcap": 5.0, "scale": 0.7, "skip_id": 2}


CASES = [case for kind, case in OF_EVERY_KIND if kind == "stored" and case.independent]


def drawn(V, dtype):
    """Draw logits ``[ROWS, V]`` and the other inputs."""
    torch.manual_seed(V)
    logits = (3 * torch.randn(ROWS, V, device=DEVICE)).to(dtype)
    rows = Rows.drawn(ROWS, V=V, low=STEPS["skip_id"] + 1, device=DEVICE)
    rows.ids[3] = logits[3, 3:-1].argmax() + 3
    return logits, Rows.of(rows.ids, torch.ones_like(rows.mask), rows.positive)


def outputs(case, logits, rows, options):
    """Return the results per row, and the gradient with an upstream gradient for each of them."""
    x = logits.detach().requires_grad_()
    out = case(x, rows, **case.accepted(**options))
    values = case.values(out)
    upstream = [rows.positive.to(t).view(*t.shape[: rows.ids.dim()], *[1] * (t.dim() - rows.ids.dim())).expand(t.shape)
                if t.dim() else torch.ones_like(t) for t in values]  # fmt: skip
    grads = torch.autograd.grad(values, x, upstream)
    return [*(t.detach() for t in results(out).values() if t.dim()), *grads]


def alone(case, logits, rows, options):
    """Compute each row without other rows."""
    for i in range(0, ROWS, 2):
        yield [i], outputs(case, logits[i : i + 1].clone(), rows.map(lambda t, i=i: t[i : i + 1]), options)


def at_another_place(case, logits, rows, options):
    """Compute each row among fewer others, in another order."""
    for order in ([3, 1, 0, 4], [6, 2, 5, 1]):
        yield order, outputs(case, logits[order], rows.map(lambda t, order=order: t[order]), options)


def among_inactive_rows(case, logits, rows, options):
    """Compute each row with all others inactive, so that no other row is read."""
    for i in range(0, ROWS, 2):
        kept = torch.arange(ROWS, device=DEVICE) == i
        others = Rows.of(rows.ids, kept, rows.positive)
        found = outputs(case, logits.masked_fill(~kept[:, None], torch.nan), others, options)
        yield [i], [t[i : i + 1] for t in found]


def in_another_stride(case, logits, rows, options):
    """Compute the rows at an odd row stride and another alignment."""
    memory = torch.full((ROWS, logits.shape[1] + 5), torch.nan, dtype=logits.dtype, device=DEVICE)
    view = memory[:, 3:-2]
    view.copy_(logits)
    yield range(ROWS), outputs(case, view, rows, options)


def transposed(case, logits, rows, options):
    """Compute two rows, each twice, in a batch ``[B, L, V]`` with transposed strides."""
    for pair in ([0, 5], [4, 2]):
        view = logits[pair + pair].view(2, 2, -1).transpose(0, 1)
        twice = rows.map(lambda t, pair=pair: t[pair].repeat(2).view(2, 2).t().contiguous())
        found = outputs(case, view, twice, options)
        yield [pair[0], pair[0], pair[1], pair[1]], [t.flatten(0, 1) for t in found]


PLACES = (alone, at_another_place, among_inactive_rows)
LAYOUTS = (in_another_stride, transposed)


def rows_that_differ(case, logits, rows, options, places=PLACES):
    """Return the rows whose results differ in another place."""
    expected = outputs(case, logits, rows, options)
    found = []
    for place in places:
        for which, got in place(case, logits, rows, options):
            for at, i in enumerate(which):
                for number, (g, e) in enumerate(zip(got, expected, strict=True)):
                    if not torch.equal(g[at], e[i]):
                        where = values_at(g[at], e[i], g[at] != e[i])
                        found.append(f"{place.__name__}, row {i}, output {number}: {where}")
    return found


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.everyday(1)
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("steps", [{}, STEPS], ids=["plain", "transformed"])
@pytest.mark.parametrize("blocks", ["many rows", "one row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("V", [40_003, 51])  # torch splits a sum of so many numbers among threads, but not of fewer
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_torch_path(case, V, dtype, blocks, steps, two_threads, monkeypatch):
    if blocks == "one row":
        small_blocks(monkeypatch, threads=2)
    places = PLACES + LAYOUTS if DEVICE == "cpu" else PLACES
    assert rows_that_differ(case, *drawn(V, dtype), {"backend": "torch", **steps}, places) == []


@pytest.mark.everyday(1)
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("steps", [{}, STEPS], ids=["plain", "transformed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("V", [1227, 1232, 5])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_kernels(case, V, dtype, steps, monkeypatch):
    small_tiles(monkeypatch, splits=3, columns=256)
    assert rows_that_differ(case, *drawn(V, dtype), {"backend": "triton", **steps}) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("V", [1, 16, 51, 1000, 40_003])
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_assumptions_of_the_torch_path_about_torch(function, V, dtype, two_threads):
    """On CPU, torch's softmax may overwrite its input, and the result for a row does not depend on other rows."""
    logits = 3 * torch.randn(ROWS, V, dtype=dtype, generator=torch.Generator().manual_seed(V), device="cpu")
    expected, over = function(logits, 1), logits.clone()
    assert torch.equal(function(over, 1, out=over), expected)
    for i in range(ROWS):
        assert torch.equal(function(logits[i : i + 1], 1), expected[i : i + 1])
    if function is torch.log_softmax:
        largest = expected.amax(1, keepdim=True)
        assert torch.equal((logits - logits.amax(1, keepdim=True)) + largest, expected)
