"""A ``num_active`` that is too small: everything that a call computes is NaN, results and gradients alike."""

import pytest
import torch

from dllm_kernels.losses import HybridDiffusionLLMLoss
from dllm_kernels.ops import LinearLogits
from tests.conftest import DEVICE, usually
from tests.support.cases import FIRSTS, to_device
from tests.support.op_cases import OP_CASES, Rows, name_of, results

N, V, D, R = 6, 11, 5, 2
INACTIVE = 1  # one row is not active; the others are one more than num_active
SKIPPED = 8


CASES = [case for case in OP_CASES if case.syncs and case.syncs[0]]  # that count the active rows
IDS = torch.tensor([0, 1, 2, 4, 5, 6], device=DEVICE)
ROWS = Rows.of(IDS, IDS != INACTIVE, torch.linspace(0.1, 1, N, device=DEVICE))
TRAINED = {"head": (0, 1, 2, 3, 4), "rows": (0, 3), "hidden": (0,), "bias": (2,)}


def run(case, leaves, bound, first=0, **options):
    """Return the sum of the differentiable results, of rows from the first on, and all results."""
    h, w, b, *extra = leaves
    x = LinearLogits(h, w, b, tuple(extra), num_active=bound, chunk_size=3)
    out = case(x, ROWS, **case.accepted(**options))
    return sum(t[first:].sum() if t.dim() else t for t in case.values(out)), results(out).values()


def make_leaves(dtype, trained):
    torch.manual_seed(1)
    shapes = [(N, D), (V, D), (V,), (N, R), (V, R)]
    leaves = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    return [leaf.requires_grad_(i in trained) for i, leaf in enumerate(leaves)]


def floats(tensors):
    return [t for t in tensors if t.is_floating_point()]


def assert_all_nan(case, trained, dtype=torch.float32, bound=N - 2, run=run, **options):
    leaves = make_leaves(dtype, trained)
    loss, out = run(case, leaves, bound, skip_id=SKIPPED, **options)
    assert floats(out)
    for t in out:
        if t.dtype == torch.bool:
            assert not t.any()
        elif t.is_floating_point():
            assert t.isnan().all()
        else:  # ids, which an embedding may read
            assert ((t == -100) | (t >= 0) & (t < V)).all()
    if case.differentiable:
        loss.backward()
        for i in trained:
            rows = slice(options.get("first", 0), None) if i in TRAINED["rows"] else slice(None)
            assert leaves[i].grad[rows].isnan().all(), i  # a row without an upstream gradient may have the gradient 0


@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("bound", [N - 2, 1, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("first", [0, 2], ids=["every row", "some rows"])  # that have an upstream gradient
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_result_and_gradient_is_nan(case, first, trained, dtype, bound, backend):
    assert_all_nan(case, TRAINED[trained], dtype, bound, first=first, backend=backend)


@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("bound", [N - 1, N])
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_bound_that_is_not_too_small_changes_nothing(case, trained, bound, backend):
    """The inactive row, which a larger bound includes, is NaN."""
    found = []
    for given in (bound, None):
        leaves = make_leaves(torch.float32, TRAINED[trained])
        with torch.no_grad():
            leaves[0][INACTIVE] = torch.nan
        loss, out = run(case, leaves, given, skip_id=SKIPPED, backend=backend)
        if case.differentiable:
            loss.backward()
        found.append([*out, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    for got, expected in zip(*found, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, expected)


IN_A_GRAPH = [case for case in CASES if case.name in ("weighted_nll", "row_objective", "token_log_probs")]


@pytest.mark.exhaustive
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("case", usually(IN_A_GRAPH, CASES, name_of))
@pytest.mark.parametrize("trained", ["head", "rows"])
def test_every_result_and_gradient_of_a_graph_is_nan(case, trained):
    torch.compiler.reset()
    assert_all_nan(case, TRAINED[trained], run=torch.compile(run, backend="aot_eager", fullgraph=True))


BOUNDED = [case for case in FIRSTS if hasattr(case.loss, "forward_fused") and not case.learns]


@pytest.mark.parametrize("case", BOUNDED, ids=lambda case: case.name)
def test_every_loss_and_its_gradients_are_nan(case, backend):
    torch.manual_seed(0)
    inputs = to_device(case.draw(2, 6, V), DEVICE)
    h = torch.randn(2, case.width * 6, D, device=DEVICE, requires_grad=True)
    w = torch.randn(V, D, device=DEVICE, requires_grad=True)
    out = case.output("hidden", case.arguments("hidden", h, inputs, (w, None)), num_active=1, backend=backend)
    out.total_loss.backward()
    for t in (out.total_loss, out.dllm_loss, h.grad, w.grad):
        assert t.isnan().all()


def test_the_bound_of_two_branches_is_that_of_both_together():
    B, L, D, V = 2, 3, 4, 7
    hidden, causal, head = (torch.randn(*s, D, device=DEVICE) for s in ((B, L), (B, L), (V,)))
    ids, on = torch.arange(B * L, device=DEVICE).view(B, L), torch.ones(B, L, device=DEVICE)
    masks = on, on / 2, on, on

    def total(**options):
        loss = HybridDiffusionLLMLoss()
        return loss.forward_fused(hidden, head, ids, *masks, causal_hidden=causal, **options).total_loss

    torch.testing.assert_close(total(num_active=2 * B * L), total(), rtol=0, atol=0)
    with pytest.raises(ValueError, match=rf"^num_active must be an int in \[0, {2 * B * L}\], got {2 * B * L + 1}$"):
        total(num_active=2 * B * L + 1)
