"""Linear NLL: parity, gradients and their cost, chunks, compaction, memory, autocast."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import reference
from dllm_kernels.ops import linear_row_objective, linear_row_stats, linear_token_nll, weighted_linear_nll, weighted_nll
from tests.conftest import DEVICE
from tests.support.inputs import Source
from tests.support.parity import assert_as_good_as_plain, assert_parity, largest_error, reduction_sizes, value_and_grads
from tests.support.rows import HEAD_PATHS, on_path

NAN = math.nan
pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(params=HEAD_PATHS)
def path(request, monkeypatch):
    return on_path(request.param, monkeypatch, splits=2)


def inputs(N=9, V=37, D=5, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    hidden, weight, bias = torch.randn(N, D), torch.randn(V, D), torch.randn(V)
    targets = torch.where(torch.rand(N) < 0.15, -100, torch.randint(0, V, (N,)))
    weights = torch.randn(N) * (torch.rand(N) < 0.7)
    return [t.to(DEVICE, dtype) for t in (hidden, weight, bias)], targets.to(DEVICE), weights.to(DEVICE)


def loss_of(targets, weights, **options):
    return lambda h, w, b: weighted_linear_nll(h, w, targets, weights, bias=b, **options).loss


def oracle(targets, weights):
    return lambda h, w, b: reference.weighted_linear_nll(h, w, targets, weights, b)


class OperationLog(TorchDispatchMode):
    """Record the operations in order: name, and shape of the result if it is a tensor."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        shape = tuple(result.shape) if isinstance(result, torch.Tensor) else None
        self.operations.append((function._schema.name.removeprefix("aten::"), shape))
        return result


def around_the_sync(call):
    """List the operations before and after the number of active rows is read, under autocast to bfloat16."""
    with torch.autocast(DEVICE, torch.bfloat16), OperationLog() as recorded:
        call()
    sync = next(i for i, (name, _) in enumerate(recorded.operations) if name == "nonzero")
    return recorded.operations[:sync], recorded.operations[sync + 1 :]


def test_work_independent_of_the_number_of_active_rows_runs_before_the_sync():
    """After the host sync, a GPU is idle until the first product."""
    (hidden, weight, bias), targets, weights = inputs()
    (V, D), N = weight.shape, len(hidden)
    bias.requires_grad_()
    before, after = around_the_sync(
        lambda: weighted_linear_nll(hidden, weight, targets, weights, bias=bias, backend="torch")
    )
    for recorded in (("_to_copy", (V, D)), ("_to_copy", (V,)), ("zeros", (V,))):
        assert recorded in before
        assert recorded not in after
    hidden.requires_grad_()
    before, after = around_the_sync(
        lambda: linear_token_nll(hidden, weight, targets, active=weights != 0, backend="torch")
    )
    assert ("ones", (N,)) in before
    assert ("ones", (N,)) not in after


WEIGHTED = {
    "weighted": lambda h, w, y, weights, **o: weighted_linear_nll(h, w, y, weights, **o).loss,
    "token": lambda h, w, y, weights, **o: (linear_token_nll(h, w, y, **o).nll * weights).sum(),
    "objective": lambda h, w, y, weights, **o: (
        linear_row_objective(h, w, y, lambda stats, c: -c * stats.log_probs, weights, **o).loss
    ),
    "statistics": lambda h, w, y, weights, **o: -(linear_row_stats(h, w, y, **o).log_probs * weights).sum(),
}


@pytest.mark.covering(2, most=2)
@pytest.mark.parametrize("trains_head", [False, True])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("form", WEIGHTED)
def test_float16_rows_of_low_weight_keep_their_gradient_beside_high_ones(form, compiled, trains_head, backend):
    """Whatever the weights of previous chunks and neighbouring rows are. Each row is judged separately."""
    V, D, options = 23, 6, {"chunk_size": 5, "backend": backend}
    # a very low weight in each chunk, the highest in the last
    weights = torch.logspace(0, -6, 14, device=DEVICE)[[1, 2, 3, 4, 11, 5, 6, 7, 8, 12, 9, 10, 13, 0]]
    h, w = (torch.randn(shape, device=DEVICE).half() for shape in ((14, D), (V, D)))
    targets, function = torch.randint(0, V, (14,), device=DEVICE), WEIGHTED[form]
    function = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    leaves = [h.requires_grad_(), *([w.requires_grad_()] if trains_head else [])]
    grads = torch.autograd.grad(function(h, w, targets, weights, **options), leaves)
    wide = [t.detach().double().requires_grad_() for t in (h, w)]
    expected = torch.autograd.grad(reference.weighted_linear_nll(*wide, targets, weights.double()), wide)
    for got, want in zip(grads, expected, strict=False):
        error = (got.double() - want).abs().amax(1) / want.abs().amax(1).clamp(min=torch.finfo(torch.float16).tiny)
        assert error.max() <= 2 * torch.finfo(torch.float16).eps


def test_float16_rows_without_a_loss_have_no_gradient_whatever_the_upstream_gradient(backend):
    h, w = (torch.randn(shape, device=DEVICE).half().requires_grad_() for shape in ((2, 6), (23, 6)))
    rows = torch.full((2,), -100, device=DEVICE)
    loss = weighted_linear_nll(h, w, rows, rows.float(), backend=backend).loss
    loss.backward(torch.full_like(loss, torch.inf))
    assert not torch.cat([h.grad, w.grad]).any()


@pytest.mark.parametrize("factor", [1e-7, 1e7])
def test_float16_gradients_neither_underflow_nor_overflow(factor, path):
    """w / N times a probability is below float16's smallest number, and 1 / p above its largest."""
    source = Source("low rank", path, chunk_size=5)
    _, targets, weights = inputs()
    assert_parity(
        lambda *x: weighted_nll(source.argument(*x), targets, weights * factor, backend=path).loss / factor,
        lambda *x: reference.weighted_nll(source.logits(*x), targets, weights),
        lambda seed: (source.leaves((9,), 37, torch.float16, seed=seed), torch.tensor(1.0)),
    )


def test_the_gradient_of_a_low_precision_head_is_summed_in_float32_over_chunks():
    N, V, D = 512, 64, 16
    torch.manual_seed(0)
    hidden = (1 + torch.rand(N, D)).bfloat16()
    weight = torch.randn(V, D).bfloat16()
    targets, weights = torch.zeros(N, dtype=torch.long), torch.rand(N)
    exact = value_and_grads(
        lambda h, w: reference.weighted_linear_nll(h, w, targets, weights),
        [hidden.double(), weight.double()],
        torch.tensor(1.0),
    )[2]
    plain, ours, chunk_by_chunk = (
        value_and_grads(f, [hidden, weight], torch.tensor(1.0))[2]
        for f in (
            lambda h, w: reference.weighted_linear_nll(h, w, targets, weights),
            lambda h, w: weighted_linear_nll(h, w, targets, weights, chunk_size=4).loss,
            lambda h, w: sum(
                reference.weighted_linear_nll(h[i : i + 4], w, targets[i : i + 4], weights[i : i + 4])
                for i in range(0, N, 4)
            ),
        )
    )
    error, sizes = largest_error([plain], [exact]), reduction_sizes([hidden, weight])
    assert_as_good_as_plain([ours], [exact], error, sizes=sizes)
    with pytest.raises(AssertionError, match="is allowed"):
        assert_as_good_as_plain([chunk_by_chunk], [exact], error, sizes=sizes)


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("hidden_dtype", "weight_dtype"),
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_autocast_is_honoured_as_linear_honours_it(hidden_dtype, weight_dtype, bias_dtype):
    source, (_, targets, weights) = Source("low rank", "torch", chunk_size=5), inputs(N=16)

    def draw(seed):
        dtypes = (hidden_dtype, weight_dtype, bias_dtype, hidden_dtype, weight_dtype)
        leaves = source.leaves((16,), 37, torch.bfloat16, seed=seed)
        return [leaf.to(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)], torch.tensor(1.0)

    with torch.autocast(DEVICE, torch.bfloat16):  # which autocast does not cast
        assert_parity(
            lambda *x: weighted_nll(source.argument(*x), targets, weights, backend="torch").loss,
            lambda *x: reference.weighted_nll(source.logits(*x), targets, weights),
            draw,
        )


def test_autocast_does_not_cast_float64(backend):
    leaves, targets, weights = inputs(dtype=torch.float64)
    function = loss_of(targets, weights, backend=backend)
    expected = value_and_grads(function, leaves, torch.tensor(1.0))
    with torch.autocast(DEVICE, torch.bfloat16):
        got = value_and_grads(function, leaves, torch.tensor(1.0))
        with pytest.raises(ValueError, match=r"weight must have the dtype of hidden, torch.float32"):
            weighted_linear_nll(leaves[0].float(), leaves[1], targets, weights)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_an_infinite_bias_bans_a_token(path):
    leaves, targets, weights = inputs()
    leaves[2][5] = -math.inf
    targets[targets == 5] = 6
    functions = loss_of(targets, weights, chunk_size=4, backend=path), oracle(targets, weights)
    for a, b in zip(*(value_and_grads(f, leaves, torch.tensor(1.0)) for f in functions), strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b)


@pytest.mark.everyday(1)
@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("hip", [None, "6.4"])  # matters on a GPU: rocBLAS has no 16-bit product with a float32 result
@pytest.mark.parametrize("chunk_size", [None, 100, 1200])  # a chunk of 1200 holds all rows: its product is the gradient
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_float16_gradients_whose_scaled_sum_overflows(chunk_size, compiled, hip, monkeypatch):
    """Rows are scaled up to a largest weight of 1. Their sum exceeds 65504, the requested mean does not."""
    monkeypatch.setattr(torch.version, "hip", hip)
    N, V, D = 1200, 8, 3
    hidden = torch.full((N, D), 64.0, dtype=torch.float16, device=DEVICE)
    weight, bias = torch.zeros(V, D, device=DEVICE).half(), torch.zeros(V, device=DEVICE).half()
    targets, weights = torch.zeros(N, dtype=torch.long, device=DEVICE), torch.full((N,), 1 / N, device=DEVICE)
    loss = loss_of(targets, weights, chunk_size=chunk_size, backend="torch")
    function = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
    assert_parity(
        function, oracle(targets, weights), lambda _: ([hidden, weight, bias], torch.tensor(0.5, device=DEVICE))
    )
