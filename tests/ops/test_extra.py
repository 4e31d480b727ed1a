"""Two-part heads: every loss with ``extra`` compared with the full logits; their cost; bad input.

The tests of each op run with such a head, too ("low rank" in ``tests/support/inputs.py``).
"""

import functools
import re

import pytest
import torch

import reference
from benchmarks.measure import peak_memory
from dllm_kernels import ops
from dllm_kernels.losses import DFlashDecayLoss, HybridDiffusionLLMLoss
from tests.conftest import DEVICE, every_time
from tests.support.cases import FEWER, FIRSTS, to_device, upstream_for, value_of
from tests.support.parity import assert_parity
from tests.support.recorded import multiplications

B, L, V, D, R = 2, 6, 37, 5, 3
# All cases with a form from hidden states, except the one whose second branch is a separate tensor.
CASES = [case for case in FEWER if not case.separate]
OPS = ("token_nll", "weighted_nll", "row_stats", "row_objective")
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def draw_leaves(seed, dtype=torch.float64, width=1):
    """Draw (hidden, weight, bias, u, U)."""
    torch.manual_seed(seed)
    shapes = (B, width * L, D), (V, D), (V,), (B, width * L, R), (V, R)
    return [torch.randn(shape).to(DEVICE, dtype) for shape in shapes]


def drawn(case):
    torch.manual_seed(0)
    return to_device(case.draw(B, L, V), DEVICE)


def ours(case, inputs, **options):
    """Compute the value as a function of all five leaves."""

    def value(h, w, b, u, second):
        arguments = case.arguments("hidden", h, inputs, (w, b)) | {"extra": (u, second)}
        return value_of(case.output("hidden", arguments, **options))

    return value


def plain(case, inputs):
    return lambda h, w, b, u, second: case.oracle(reference.linear_logits(h, w, b, extra=(u, second)), inputs)


def draw(case, dtype):
    return lambda seed: (draw_leaves(seed, dtype, case.width), upstream_for(case, B, L).to(DEVICE))


@pytest.mark.everyday(3)
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("case", every_time([c for c in FIRSTS if c in CASES], CASES, name=lambda case: case.name))
def test_parity_of_every_loss(case, backend):
    inputs = drawn(case)
    assert_parity(ours(case, inputs, chunk_size=5, backend=backend), plain(case, inputs), draw(case, torch.float64))


def products(function, rows):
    """Count (large, thin) products of all active rows. The hidden size is not a multiple of the thin part's size."""
    total = multiplications(function) / (rows * V)
    return next((large, (total - large * 101) / R) for large in range(9) if 0 <= total - large * 101 < 101)


@pytest.mark.everyday(4)
@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize(
    ("trains", "weighted", "per_row", "objective"),
    [
        # large products and thin ones, of which one computes the logits
        ((0, 0, 0, 0, 0), (1, 1), (1, 1), (1, 1)),
        ((1, 0, 0, 0, 0), (2, 1), (2, 1), (2, 1)),
        ((1, 0, 0, 1, 0), (2, 2), (2, 2), (2, 2)),  # only the rows u train: nothing is recomputed
        ((1, 0, 0, 1, 1), (2, 3), (3, 4), (2, 3)),  # a frozen head whose second part trains
        ((0, 0, 0, 0, 1), (1, 2), (2, 3), (1, 2)),
        ((1, 1, 0, 1, 1), (3, 3), (4, 4), (3, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("chunk", [None, 4])
def test_the_large_products_are_no_more_than_without_it(trains, weighted, per_row, objective, chunk, backend):
    rows, wide = 8, 101
    leaves = [torch.randn(shape, device=DEVICE) for shape in ((12, wide), (V, wide), (V,), (12, R), (V, R))]
    h, w, _, u, second = (leaf.requires_grad_(bool(train)) for leaf, train in zip(leaves, trains, strict=True))
    y, weights = torch.arange(12, device=DEVICE), (torch.arange(12, device=DEVICE) % 3 != 0).float()
    options = {"extra": (u, second), "chunk_size": chunk, "backend": backend}

    def step(value):
        if value.requires_grad:
            value.backward()

    def focal(stats):
        return -((1 - stats.log_probs.exp()) ** 2) * stats.log_probs

    weigh = functools.partial(ops.weighted_linear_nll, h, w, y, weights, **options)
    each = functools.partial(ops.linear_token_nll, h, w, y, active=weights != 0, **options)
    own = functools.partial(ops.linear_row_objective, h, w, y, focal, active=weights != 0, **options)
    assert products(lambda: step(weigh().loss), rows) == weighted
    assert products(lambda: step(each().nll.sum()), rows) == per_row
    assert products(lambda: step(own().loss), rows) == objective
    with torch.no_grad():
        assert products(weigh, rows) == products(each, rows) == (1, 1)


@pytest.mark.everyday(1)
@pytest.mark.skipif(DEVICE != "cpu", reason="measures the CPU's allocator")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_of_the_length_of_the_vocabulary_is_added(dtype, monkeypatch):
    """Only the gradient of U, if it trains, is as long as the vocabulary.

    The thin product is accumulated into the chunk in place.
    """
    monkeypatch.undo()  # poisoning fresh memory allocates nothing, but takes time
    N, many, wide, chunk = 512, 16384, 8, 128
    torch.manual_seed(0)
    hidden, weight, u, second = (torch.randn(shape).to(dtype) for shape in ((N, wide), (many, wide), (N, 2), (many, 2)))
    hidden.requires_grad_()
    targets, weights = torch.randint(0, many, (N,)), torch.ones(N)

    def peak(trains, **options):
        second.requires_grad_(trains)

        def run(_):
            ops.weighted_linear_nll(hidden, weight, targets, weights, chunk_size=chunk, **options).loss.backward()
            hidden.grad = second.grad = None

        run(0)
        return peak_memory(run, "cpu")

    without, frozen, trained = peak(False), peak(False, extra=(u, second)), peak(True, extra=(u, second))
    assert frozen - without <= 64 * N
    slab = 4 * chunk * 4096 if dtype != torch.float32 else 0  # of the gradient, cast to float32 for the sum
    assert trained - without <= 64 * N + 2 * many * (4 + dtype.itemsize) + slab
    assert 64 * N + 2 * many * 8 < chunk * many * dtype.itemsize  # so an additional chunk would exceed the bound


def test_the_gradient_of_the_second_part_is_summed_in_float32():
    """The terms are one entry of 1 and 300 of 1/4096, in chunks of 20. A bfloat16 sum would stay at 1."""
    N = 301
    u = torch.full((N, 1), 1 / 4096, device=DEVICE, dtype=torch.bfloat16)
    u[0] = 1.0
    hidden, weight = (torch.zeros(n, 1, device=DEVICE, dtype=torch.bfloat16) for n in (N, 2))
    second = torch.zeros(2, 1, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    y = torch.zeros(N, dtype=torch.long, device=DEVICE)
    for value in (
        ops.weighted_linear_nll(
            hidden, weight, y, torch.ones(N, device=DEVICE), extra=(u, second), chunk_size=20, backend="torch"
        ).loss,
        ops.linear_token_nll(hidden, weight, y, extra=(u, second), chunk_size=20, backend="torch").nll.sum(),
    ):
        (grad,) = torch.autograd.grad(value, second)
        exact = torch.tensor([-0.5, 0.5], device=DEVICE) * (1 + 300 / 4096)
        rtol = 2**-8 if torch.version.hip is None else 2**-7  # with rocBLAS the product of a chunk is rounded, too
        torch.testing.assert_close(grad.flatten().float(), exact, rtol=rtol, atol=0)


@pytest.mark.parametrize("changed", [0, 1])
def test_backward_rejects_a_second_part_changed_in_place(changed):
    h, w, _, u, second = draw_leaves(0)
    extra = u.requires_grad_() * 1.0, second.requires_grad_() * 1.0
    nll = ops.linear_token_nll(h, w, torch.randint(0, V, (B, L), device=DEVICE), extra=extra).nll
    extra[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        nll.sum().backward()


CALLS = {
    "weighted_linear_nll": lambda h, w, y, **o: ops.weighted_linear_nll(h, w, y, torch.ones(B, L), **o),
    "linear_token_nll": ops.linear_token_nll,
    "linear_row_stats": ops.linear_row_stats,
    "linear_row_objective": lambda h, w, y, **o: ops.linear_row_objective(h, w, y, lambda s: s.log_probs, **o),
    "token_log_probs": lambda h, w, y, **o: ops.token_log_probs(h, y, weight=w, **o),
    "DFlashDecayLoss": lambda h, w, y, **o: DFlashDecayLoss().forward_fused(h, w, y, torch.ones(B, L), **o),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_input(name):
    h, w, _, u, second = (t.to("cpu") for t in draw_leaves(0))
    y = torch.zeros(B, L, dtype=torch.long)
    rows = {"token_log_probs": "logits_or_hidden"}.get(name, "hidden")
    head = {"DFlashDecayLoss": "lm_head_weight"}.get(name, "weight")

    def raises(error, message, extra):
        with pytest.raises(error, match="^" + re.escape(message)):
            CALLS[name](h, w, y, extra=extra)

    raises(TypeError, "extra must be a tuple of two tensors (u, U), got torch.Tensor", u)
    raises(TypeError, "extra must be a tuple of two tensors (u, U), got 1 of them", (u,))
    raises(TypeError, "extra[0] must be a torch.Tensor, got NoneType", (None, second))
    raises(TypeError, "extra[1] must be a torch.Tensor, got list", (u, [1.0]))
    raises(ValueError, "extra[0] must have dtype float16, bfloat16, float32, float64, got int64", (u.long(), second))
    raises(ValueError, "extra[1] must have shape [V, r], got (37,)", (u, second[:, 0]))
    message = f"extra[1] must have shape (37, r) with r >= 1, as many rows as {head}, got (36, 3)"
    raises(ValueError, message, (u, second[1:]))
    message = f"extra[1] must have shape (37, r) with r >= 1, as many rows as {head}, got (37, 0)"
    raises(ValueError, message, (u[..., :0], second[:, :0]))
    shape = f"extra[0] must have shape (2, 6, 3) (the rows of {rows}, the columns of extra[1]), got "
    raises(ValueError, shape + "(2, 6, 2)", (u[..., 1:], second))
    raises(ValueError, shape + "(2, 5, 3)", (u[:, 1:], second))
    dtype = f"must have the dtype of {rows}, torch.float64, unless torch.autocast is on, got torch.float32"
    raises(ValueError, f"extra[0] {dtype}", (u.float(), second))
    raises(ValueError, f"extra[1] {dtype}", (u, second.float()))
    raises(ValueError, f"extra[0] must be on cpu like {rows}, got meta", (u.to("meta"), second))
    raises(ValueError, f"extra[1] must be on cpu like {rows}, got meta", (u, second.to("meta")))


def test_float64_beside_autocast():
    h, w, _, u, second = draw_leaves(0, torch.float32)
    y = torch.zeros(B, L, dtype=torch.long, device=DEVICE)
    with (
        torch.autocast(DEVICE, torch.bfloat16),
        pytest.raises(ValueError, match=re.escape("extra[0] must have the dtype of hidden, torch.float32")),
    ):
        ops.linear_token_nll(h, w, y, extra=(u.double(), second))


def test_extra_is_rejected_where_unsupported():
    h, w, _, u, second = draw_leaves(0)
    y = torch.zeros(B, L, dtype=torch.long, device=DEVICE)
    with pytest.raises(ValueError, match=r"^extra requires weight, got weight=None$"):
        ops.token_log_probs(h, y, extra=(u, second))
    masks = [torch.ones(B, L, device=DEVICE)] * 2
    with pytest.raises(
        ValueError, match=r"^extra must be None with causal_hidden, got both; pass both branches as one"
    ):
        HybridDiffusionLLMLoss().forward_fused(
            h, w, y, masks[0].bool(), masks[1], masks[0], masks[0], causal_hidden=h, extra=(u, second)
        )
