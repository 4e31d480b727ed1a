"""The result of an op for a row of logits is bit-identical in every batch and at every position in a batch.

A kernel is compiled anew for other strides and another alignment of the rows, and may then round differently. There the
bits are compared on CPU only; ``tests/ops`` compares the results of every layout with the oracle.
"""

import pytest
import torch

from dllm_kernels import ops
from tests.conftest import DEVICE
from tests.support.parity import small_blocks, values_at
from tests.support.statistics import EVERY_FLAG, differentiable

ROWS = 7
STEPS = {"softcap": 5.0, "scale": 0.7, "skip_id": 2}


def run_token_nll(logits, row, **options):
    options |= {"with_lse": True, "with_correct": True, "with_ids": True}
    out = ops.token_nll(logits, row["id"], active=row["active"], **options)
    return (*out, *torch.autograd.grad(out.nll, logits, row["upstream"]))


def run_weighted_nll(logits, row, **options):
    out = ops.weighted_nll(logits, row["id"], row["active"] * row["upstream"], with_lse=True, **options)
    return out.nll, out.lse, *torch.autograd.grad(out.loss, logits)


def run_token_log_probs(logits, row, **options):
    temperature = 1 / options.pop("scale", 1.0)
    options.pop("softcap", None)
    out = ops.token_log_probs(
        logits, row["id"], active=row["active"], temperature=temperature, with_entropy=True, **options
    )
    return (*out, *torch.autograd.grad(out.log_probs + out.entropy, logits, row["upstream"]))


def run_row_stats(logits, row, **options):
    other = row["id"] // 2
    # A skipped id has a NaN log-probability.
    ids = torch.stack([row["id"], other.masked_fill(other == STEPS["skip_id"], 0)], -1)
    options |= {"mix": (row["a"], row["upstream"]), **EVERY_FLAG}
    out = ops.row_stats(logits, ids, active=row["active"], **options)
    total = sum((t.sum(-1) if t.dim() > row["id"].dim() else t) for t in differentiable(out))
    return (*out, *torch.autograd.grad(total, logits, row["upstream"]))


def run_divergence(logits, row, **options):
    teacher = drawn(logits.shape[-1] + 1, logits.dtype)[0][:, 1:]
    weights = row["active"] * row["upstream"]
    mixed = {"kl": 0.5, "tv": 1.0, "ce": 0.2}
    out = ops.divergence(logits, teacher, weights, kind=mixed, targets=row["id"], teacher_rows=row["number"], **options)
    return (*out[1:], *torch.autograd.grad(out.loss, logits))


OPS_UNDER_TEST = (run_token_nll, run_weighted_nll, run_token_log_probs, run_row_stats, run_divergence)
OPS = {f.__name__.removeprefix("run_"): f for f in OPS_UNDER_TEST}


def drawn(V, dtype):
    """Draw (logits ``[ROWS, V]``, per-row inputs by name)."""
    torch.manual_seed(V)
    logits = (3 * torch.randn(ROWS, V, device=DEVICE)).to(dtype)
    rows = {
        "id": torch.randint(3, V, (ROWS,), device=DEVICE),
        "number": torch.arange(ROWS, device=DEVICE),
        "active": torch.ones(ROWS, device=DEVICE),
        "upstream": torch.rand(ROWS, device=DEVICE) + 0.5,
        "a": torch.tensor([0.0, 1e-3, 0.5, 1e-12, 0.0, 2.0, 0.1], device=DEVICE),
    }
    rows["id"][3] = logits[3, 3:].argmax() + 3
    return logits, rows


def outputs(op, logits, rows, options):
    return OPS[op](logits.detach().requires_grad_(), rows, **options)


def alone(op, logits, rows, options):
    """Compute each row without other rows."""
    for i in range(0, ROWS, 2):
        yield [i], outputs(op, logits[i : i + 1].clone(), {k: t[i : i + 1] for k, t in rows.items()}, options)


def at_another_place(op, logits, rows, options):
    """Compute each row among fewer others, in another order."""
    for order in ([3, 1, 0, 4], [6, 2, 5, 1]):
        yield order, outputs(op, logits[order], {k: t[order] for k, t in rows.items()}, options)


def among_inactive_rows(op, logits, rows, options):
    """Compute each row with all others inactive, so that no other row is read."""
    for i in range(0, ROWS, 2):
        kept = torch.arange(ROWS, device=DEVICE) == i
        found = outputs(op, logits.masked_fill(~kept[:, None], torch.nan), rows | {"active": kept.float()}, options)
        yield [i], [None if t is None else t[i : i + 1] for t in found]


def in_another_stride(op, logits, rows, options):
    """Compute the rows at an odd row stride and another alignment."""
    memory = torch.full((ROWS, logits.shape[1] + 5), torch.nan, dtype=logits.dtype, device=DEVICE)
    view = memory[:, 3:-2]
    view.copy_(logits)
    yield range(ROWS), outputs(op, view, rows, options)


def transposed(op, logits, rows, options):
    """Compute two rows, each twice, in a batch ``[B, L, V]`` with transposed strides."""
    for pair in ([0, 5], [4, 2]):
        view = logits[pair + pair].view(2, 2, -1).transpose(0, 1)
        twice = {k: t[pair].repeat(2).view(2, 2).t().contiguous() for k, t in rows.items()}
        found = outputs(op, view, twice, options)
        yield [pair[0], pair[0], pair[1], pair[1]], [None if t is None else t.flatten(0, 1) for t in found]


PLACES = (alone, at_another_place, among_inactive_rows)
LAYOUTS = (in_another_stride, transposed)


def rows_that_differ(op, logits, rows, options, places=PLACES):
    """Return where results differ in another place."""
    expected = outputs(op, logits, rows, options)
    found = []
    for place in places:
        for which, got in place(op, logits, rows, options):
            for at, i in enumerate(which):
                for number, (g, e) in enumerate(zip(got, expected, strict=True)):
                    if e is not None and not torch.equal(g[at], e[i]):
                        found.append(
                            f"{place.__name__}, row {i}, output {number}: {values_at(g[at], e[i], g[at] != e[i])}"
                        )
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
@pytest.mark.parametrize("op", OPS)
def test_torch_path(op, V, dtype, blocks, steps, two_threads, monkeypatch):
    if blocks == "one row":
        small_blocks(monkeypatch, threads=2)
    places = PLACES + LAYOUTS if DEVICE == "cpu" else PLACES
    assert rows_that_differ(op, *drawn(V, dtype), {"backend": "torch", **steps}, places) == []


@pytest.mark.everyday(1)
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("steps", [{}, STEPS], ids=["plain", "transformed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("V", [1227, 1232, 5])
@pytest.mark.parametrize("op", OPS)
def test_kernels(op, V, dtype, steps, monkeypatch):
    tiles = pytest.importorskip("dllm_kernels.backends.triton._tiles")
    monkeypatch.setattr(tiles, "token_nll_fwd", lambda V, itemsize: tiles.Tile(256, 1, 3))
    monkeypatch.setattr(tiles, "token_nll_bwd", lambda V, itemsize: tiles.Tile(256, 1, 2))
    monkeypatch.setattr(tiles, "divergence_rows", lambda V, itemsize, **_: tiles.Tile(256, 1))
    assert rows_that_differ(op, *drawn(V, dtype), {"backend": "triton", **steps}) == []


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
