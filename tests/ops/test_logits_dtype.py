"""Float32 logits of 16-bit operands: exact to float32, one rounding in the gradient, memory for one chunk."""

import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dllm_kernels import ops
from dllm_kernels.mtp import FusedLinearCrossEntropy, calculate_mtp_loss
from tests.conftest import DEVICE, every_time
from tests.support.cases import CASES, FIRSTS, value_of
from tests.support.parity import value_and_grads

N, D, V = 37, 48, 203
WIDE = {"logits_dtype": torch.float32}
HALVES = (torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", HALVES, ids=str)


def drawn(dtype):
    torch.manual_seed(0)
    tensors = (torch.randn(N, D), torch.randn(V, D), torch.randn(V), torch.randn(N, 3), torch.randn(V, 3))
    hidden, weight, bias, u, U = ((t / 2).to(DEVICE, dtype) for t in tensors)
    return hidden, weight, bias, (u, U), torch.randint(0, V, (N,), device=DEVICE)


def exact_logits(hidden, weight, bias, extra):
    u, U = (t.double() for t in extra)
    return F.linear(hidden.double(), weight.double(), bias.double()) + u @ U.t()


def statistics(hidden, weight, ids, **options):
    """Return all outputs of the ops except gradients, one tensor per statistic."""
    of_nll = ops.linear_token_nll(hidden, weight, ids, with_lse=True, chunk_size=16, **options)
    of_rows = ops.linear_row_stats(hidden, weight, ids, entropy=True, chunk_size=16, **options)
    log_p = ops.token_log_probs(hidden, ids, weight=weight, chunk_size=16, **options)
    weighted = ops.weighted_linear_nll(hidden, weight, ids, torch.ones(N, device=DEVICE), chunk_size=16, **options)
    squares = ops.linear_row_objective(hidden, weight, ids, lambda s: s.log_probs.square(), chunk_size=16, **options)
    return {
        "nll": of_nll.nll, "lse": of_nll.lse, "log_probs": of_rows.log_probs, "entropy": of_rows.entropy,
        "token_log_probs": log_p.log_probs, "weighted": weighted.nll, "objective": squares.value,
    }  # fmt: skip


@pytest.mark.everyday(1)
@pytest.mark.covering(1, most=1)
@dtypes
def test_statistics_are_exact_to_float32(dtype, backend):
    hidden, weight, bias, extra, ids = drawn(dtype)
    log_p = exact_logits(hidden, weight, bias, extra).log_softmax(-1)
    nll, lse = F.nll_loss(log_p, ids, reduction="none"), exact_logits(hidden, weight, bias, extra).logsumexp(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    exact = {"nll": nll, "lse": lse, "log_probs": -nll, "entropy": entropy, "token_log_probs": -nll, "weighted": nll}
    exact["objective"] = nll.square()
    passed = {"bias": bias, "extra": extra, "backend": backend}
    errors = [
        {name: ((got - exact[name]) / exact[name]).abs().max().item() for name, got in found.items()}
        for found in (statistics(hidden, weight, ids, **passed, **WIDE), statistics(hidden, weight, ids, **passed))
    ]
    assert all(error < 2e-6 for error in errors[0].values()), errors[0]
    assert all(error > 1e-5 for error in errors[1].values()), errors[1]


@pytest.mark.everyday(1)
@pytest.mark.covering(1, most=1)
@dtypes
def test_a_divergence_is_exact_to_float32_on_both_sides(dtype, backend):
    hidden, weight, bias, extra, _ = drawn(dtype)
    teacher = torch.randn(N, D, device=DEVICE).to(dtype)
    found = ops.linear_divergence(
        hidden, weight, teacher, torch.ones(N, device=DEVICE), bias=bias, extra=extra, backend=backend, **WIDE
    )
    q = F.linear(teacher.double(), weight.double(), bias.double()).log_softmax(-1)
    p = exact_logits(hidden, weight, bias, extra).log_softmax(-1)
    # Logits rounded to float32 change a probability by a few rounding steps of the largest one, 16 bits by thousands.
    logits = exact_logits(hidden, weight, bias, extra)
    rtol = 4 * torch.finfo(torch.float32).eps * logits.abs().max().item()
    terms = q.exp() * (q - p)  # of both signs
    assert ((found.value.double() - terms.sum(-1)).abs() <= rtol * terms.abs().sum(-1)).all()
    accepted = torch.minimum(p.exp(), q.exp()).sum(-1)
    torch.testing.assert_close(found.acceptance_rate.double(), accepted, rtol=rtol, atol=0)
    assert torch.equal(found.agree, p.argmax(-1) == q.argmax(-1))


@pytest.mark.everyday(2)
@pytest.mark.covering(1, most=2)
@dtypes
@pytest.mark.parametrize("trains", ["head", "rows"])
def test_the_gradient_is_rounded_once(dtype, backend, trains):
    """Each entry of the logits' gradient is rounded by at most half a unit in the last place, then the result."""
    hidden, weight, bias, extra, ids = drawn(dtype)
    weights = torch.rand(N, device=DEVICE) + 0.5
    leaves = [hidden.requires_grad_(), weight.requires_grad_(trains == "head")]
    loss = ops.weighted_linear_nll(
        *leaves, ids, weights, bias=bias, extra=extra, backend=backend, chunk_size=16, **WIDE
    ).loss
    p = exact_logits(hidden, weight, bias, extra).softmax(-1).detach()
    of_logits = weights.double().unsqueeze(1) * (p - F.one_hot(ids, V))
    h, w = (t.detach().double() for t in (hidden, weight))
    half = torch.finfo(dtype).eps / 2
    exact = [(of_logits @ w, of_logits.abs() @ w.abs()), (of_logits.t() @ h, of_logits.abs().t() @ h.abs())]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    for got, (value, size) in zip(torch.autograd.grad(loss, wanted), exact, strict=False):
        # float16's smallest numbers are rounded to multiples of 2^-24. A CPU rounds the products of the rows once more.
        tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        bound = half * (1 + 2 * half) * size + 2 * half * value.abs() + V * tiny + 1e-6 * size
        assert ((got.double() - value).abs() <= bound).all()


@pytest.mark.everyday(1)
@pytest.mark.covering(1, most=2)
@dtypes
@pytest.mark.parametrize("bumped", [False, True])
def test_a_mean_embedding_is_of_exact_probabilities(dtype, backend, bumped):
    """Each probability is rounded once, by at most half a unit in the last place, then the result itself."""
    hidden, weight, bias, extra, ids = drawn(dtype)
    embedding = torch.randn(V, 7, device=DEVICE).to(dtype)
    z, bump = exact_logits(8 * hidden, weight, bias, extra), {"bump": 2.0, "bump_ids": ids} if bumped else {}
    p = (z + 2.0 * F.one_hot(ids, V) * bumped).softmax(-1)
    exact, size = p @ embedding.double(), p @ embedding.double().abs()
    half, tiny = torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    bound = half * (1 + 2 * half) * size + half * exact.abs() + V * tiny * embedding.abs().max() + 1e-6 * size
    kept, rounded = (
        (got.double() - exact).abs()
        for got in (
            ops.soft_embedding(
                8 * hidden, weight, embedding, bias=bias, extra=extra, chunk_size=16, backend=backend, **bump, **options
            )
            for options in (WIDE, {})
        )
    )
    assert (kept <= bound).all()
    assert (rounded > bound).any()


@pytest.mark.parametrize("case", every_time([c for c in CASES if c in FIRSTS], CASES, name=lambda case: case.name))
def test_every_loss_has_the_value_of_float32_operands(case):
    """The reference takes the 16-bit operands cast to float32."""
    inputs = {name: t.to(DEVICE) for name, t in case.draw(2, 6, 11).items()}
    h, w, b = (torch.randn(s, device=DEVICE).bfloat16() for s in ((2, 6 * case.width, 4), (11, 4), (11,)))
    found = case.output("hidden", case.arguments("hidden", h, inputs, (w, b)), **WIDE)
    wide = case.output("hidden", case.arguments("hidden", h.float(), inputs, (w.float(), b.float())))
    torch.testing.assert_close(value_of(found), value_of(wide), rtol=2e-6, atol=2e-6)


def test_multi_token_prediction_passes_the_dtype_on():
    hidden, weight, _, _, ids = drawn(torch.bfloat16)
    model = torch.nn.Module()
    model.lm_head = torch.nn.Linear(D, V, bias=False, device=DEVICE, dtype=torch.bfloat16)
    model.lm_head.weight.data.copy_(weight)
    values = [
        calculate_mtp_loss(
            FusedLinearCrossEntropy(), mtp_per_depth_h=[h[None]], labels=ids[None], model=model, lm_weight=w, **options
        )
        for h, w, options in (
            (hidden, weight, WIDE),
            (hidden.float(), weight.float(), {}),
            (hidden, weight, {"logits_dtype": torch.bfloat16}),
        )
    ]
    torch.testing.assert_close(values[0], values[1], rtol=2e-6, atol=0)
    assert values[2] != values[0]


class Largest(TorchDispatchMode):
    """Record the largest number of elements of any tensor created under it."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


def test_at_most_one_chunk_is_in_float32():
    """On a CPU, neither the head nor the full logits exist in float32."""
    rows, vocabulary = 512, 9000
    hidden = torch.randn(rows, 8).bfloat16().requires_grad_()
    weight, ids = torch.randn(vocabulary, 8).bfloat16(), torch.randint(0, vocabulary, (rows,))
    with Largest() as largest:
        ops.weighted_linear_nll(hidden, weight, ids, torch.ones(rows), chunk_size=64, **WIDE).loss.backward()
    assert largest.elements <= max(64 * vocabulary, weight.numel())


@pytest.mark.exhaustive
def test_one_graph_under_compile():
    hidden, weight, bias, extra, ids = drawn(torch.float16)

    def step(hidden, weight):
        first = ops.linear_token_nll(hidden, weight, ids, bias=bias, extra=extra, chunk_size=16, **WIDE).nll.sum()
        return first + ops.linear_row_stats(hidden, weight, ids, entropy=True, chunk_size=16, **WIDE).entropy.sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    upstream = torch.ones((), device=DEVICE)
    for got, expected in zip(*(value_and_grads(f, [hidden, weight], upstream) for f in (compiled, step)), strict=True):
        assert torch.equal(got, expected)


def test_logits_of_float32_operands_are_float32_without_the_option():
    hidden, weight, bias, _, ids = drawn(torch.float32)
    got, expected = (ops.linear_token_nll(hidden, weight, ids, bias=bias, **o).nll for o in (WIDE, {}))
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("dtype", "passed", "error", "message"),
    [
        (
            torch.bfloat16,
            torch.float64,
            ValueError,
            "torch.float32, torch.bfloat16 or None for this head, got torch.float64",
        ),
        (torch.float64, torch.float32, ValueError, "torch.float64 or None for this head, got torch.float32"),
        (torch.float32, torch.bfloat16, ValueError, "torch.float32 or None for this head, got torch.bfloat16"),
        (torch.float32, "float32", TypeError, "a torch.dtype or None, got str"),
    ],
    ids=str,
)
def test_another_dtype_is_rejected(dtype, passed, error, message):
    hidden, weight, *_, ids = drawn(dtype)
    with pytest.raises(error, match=f"^logits_dtype must be {re.escape(message)}$"):
        ops.linear_token_nll(hidden, weight, ids, logits_dtype=passed)


def test_ops_on_logits_reject_the_option():
    _, weight, *_, ids = drawn(torch.bfloat16)
    with pytest.raises(ValueError, match=r"^logits_dtype requires weight, got weight=None$"):
        ops.token_log_probs(weight[:N], ids.clamp(max=D - 1), **WIDE)


def test_every_function_with_a_head_has_the_option():
    for name in ops.__all__:
        parameters = inspect.signature(getattr(ops, name)).parameters
        assert ("logits_dtype" in parameters) == ("chunk_size" in parameters), name
