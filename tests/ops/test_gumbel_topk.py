"""Choosing k of D: equal sets from kernel, torch path, host path and reference; counts, ties, edges, errors."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from dllm_kernels import corruption
from dllm_kernels.ops import gumbel_topk_mask
from reference.gumbel_topk import batched_gumbel_topk as reference_topk
from tests.conftest import drawn
from tests.support.parity import same

pytestmark = pytest.mark.indices

INF = float("inf")


def example(N, D, seed=0, share_never=0.2):
    g = torch.Generator().manual_seed(seed)
    log_w = torch.randn(N, D, generator=g) * 2
    log_w[torch.rand(N, D, generator=g) < share_never] = -INF
    k = torch.randint(0, D + 2, (N,), generator=g)
    uniform = torch.rand(N, D, generator=g).clamp(min=2.0**-25)
    return log_w, k, uniform


SHAPES = [(1, 1), (5, 2), (9, 3), (20, 32), (3, 33), (4, 128), (2, 129), (2, 700), (1, 4096), (1, 4097), (1, 9001)]


@pytest.mark.everyday(2)
@pytest.mark.parametrize(("N", "D"), SHAPES)
def test_one_set_from_given_draws(N, D, backend, device):
    log_w, k, uniform = (t.to(device) for t in example(N, D))
    expected = reference_topk(log_w.double(), k, uniform.double())
    assert same(gumbel_topk_mask(log_w, k, uniform=uniform, backend=backend), expected)


@pytest.mark.everyday(1)
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize(("N", "D"), SHAPES)
@pytest.mark.parametrize("source", ["seeds", "generator"])
def test_kernel_and_torch_choose_the_same_from_a_seed(N, D, source, device):
    log_w, k, _ = (t.to(device) for t in example(N, D))

    def run(backend):
        if source == "seeds":
            return gumbel_topk_mask(log_w, k, seeds=torch.arange(N, device=device) - 3, backend=backend)
        return gumbel_topk_mask(log_w, k, generator=torch.Generator().manual_seed(1), backend=backend)

    assert same(run("triton"), run("torch"))


def test_the_longest_row():
    log_w, _, uniform = example(2, 131_072)
    k = torch.tensor([1, 60_000])
    expected = reference_topk(log_w.double(), k, uniform.double())
    assert torch.equal(gumbel_topk_mask(log_w, k, uniform=uniform, backend="torch"), expected)
    assert gumbel_topk_mask(log_w, k, seeds=torch.tensor([1, 2]), backend="torch").sum(1).tolist() == [1, 60_000]


@pytest.mark.gpu
def test_the_longest_row_on_a_gpu():
    log_w, _, uniform = example(2, 131_072)
    k = torch.tensor([1, 60_000])
    expected = reference_topk(log_w.double(), k, uniform.double())
    got = gumbel_topk_mask(log_w.cuda(), k.cuda(), uniform=uniform.cuda(), backend="triton")
    assert torch.equal(got.cpu(), expected)


@pytest.mark.gpu
def test_the_same_on_cpu_and_gpu():
    log_w, k, _ = example(50, 300)
    cpu = gumbel_topk_mask(log_w, k, generator=torch.Generator().manual_seed(4))
    gpu = gumbel_topk_mask(log_w.cuda(), k.cuda(), generator=torch.Generator().manual_seed(4))
    assert torch.equal(gpu.cpu(), cpu)


@drawn(N=st.integers(1, 12), D=st.integers(1, 40), seed=st.integers(0, 10**6), share_never=st.floats(0, 1))
def test_exactly_k_and_never_at_minus_infinity(N, D, seed, share_never):
    log_w, k, _ = example(N, D, seed, share_never)
    chosen = gumbel_topk_mask(log_w, k, seeds=torch.arange(N) + seed)
    choosable = log_w > -INF
    assert torch.equal(chosen.sum(1), torch.minimum(k, choosable.sum(1)))
    assert not (chosen & ~choosable).any()


@drawn(D=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_sets_grow_with_k(D, seed):
    log_w, _, uniform = example(1, D, seed)
    sets = [gumbel_topk_mask(log_w, k, uniform=uniform) for k in range(D + 1)]
    assert all(bool((small <= large).all()) for small, large in itertools.pairwise(sets))


@pytest.mark.parametrize("D", [6, 200, 5000])
def test_ties_go_to_the_lower_index(D, backend, device):
    log_w = torch.zeros(4, D, device=device)
    log_w[2, ::2] = -INF
    uniform = torch.full((4, D), 0.25, device=device)
    uniform[1, 4] = 0.5  # the only one with a score above the others
    uniform[3, 2:] = 0.5  # more than are chosen
    chosen = gumbel_topk_mask(log_w, 3, uniform=uniform, backend=backend)
    assert [row.nonzero().flatten().tolist() for row in chosen] == [[0, 1, 2], [0, 1, 4], [1, 3, 5], [2, 3, 4]]


def test_near_ties_are_resolved_equally_on_every_path(device):
    # Draws one float64 step apart, where two logarithms may round differently: all paths must still agree.
    g = torch.Generator().manual_seed(0)
    N = 100
    centre = torch.rand(N, 1, generator=g, dtype=torch.float64) * 0.98 + 0.01
    uniform = (centre * (1 + torch.randint(-3, 4, (N, 8), generator=g) * 2.0**-52)).to(device)
    log_w = torch.zeros(N, 8, dtype=torch.float64, device=device)
    k = torch.randint(1, 8, (N,), generator=g).to(device)
    triton = gumbel_topk_mask(log_w, k, uniform=uniform, backend="triton")
    assert same(gumbel_topk_mask(log_w, k, uniform=uniform, backend="torch"), triton)
    assert torch.equal(triton.sum(1), k)


def test_positions_that_are_never_or_always_chosen(backend, device):
    nan = float("nan")
    log_w = torch.tensor([[nan, 0.0, -INF, INF, 0.0], [INF, INF, -1.0, INF, nan]], device=device)
    uniform = torch.full((2, 5), 0.5, device=device)
    chosen = gumbel_topk_mask(log_w, 2, uniform=uniform, backend=backend)
    assert chosen.tolist() == [[False, True, False, True, False], [True, True, False, False, False]]
    everything = gumbel_topk_mask(log_w, 5, uniform=uniform, backend=backend)
    assert everything.tolist() == [[False, True, False, True, True], [True, True, True, True, False]]


def test_draws_at_the_ends_are_moved_inside(backend, device):
    """Draws at an end and beyond it tie, in either order."""
    uniform = torch.tensor([[0.0, 0.1, -3.0, 1.0, 2.0, float("nan")], [-3.0, 0.1, 0.0, 2.0, 1.0, float("nan")]])
    log_w = torch.zeros(2, 6, device=device)
    for k, chosen in enumerate(([3], [3, 4], [1, 3, 4], [0, 1, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), 1):
        rows = gumbel_topk_mask(log_w, k, uniform=uniform.to(device), backend=backend)
        assert [row.nonzero().flatten().tolist() for row in rows] == [chosen] * 2, k


@pytest.mark.everyday(4)
@pytest.mark.covering(2, most=2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("k_dtype", [torch.int32, torch.int64, torch.uint8])
def test_dtypes_strides_and_int_k(dtype, k_dtype, backend, device):
    log_w, k, uniform = (t.to(device) for t in example(6, 24))
    log_w = log_w.to(dtype)
    expected = gumbel_topk_mask(log_w, k, uniform=uniform, backend="torch")
    wide = torch.stack([log_w, torch.zeros_like(log_w)], dim=-1)[..., 0]  # stride 2
    turned = uniform.t().contiguous().t()
    got = gumbel_topk_mask(wide, k.to(k_dtype), uniform=turned, backend=backend)
    assert same(got, expected)
    seven = gumbel_topk_mask(log_w, 7, uniform=uniform, backend=backend)
    assert torch.equal(seven, gumbel_topk_mask(log_w, torch.full_like(k, 7), uniform=uniform, backend=backend))


def test_counts_far_beyond_the_row(backend, device):
    log_w = torch.zeros(2, 5, device=device)
    seeds = torch.arange(2, device=device)
    assert gumbel_topk_mask(log_w, 2**40, seeds=seeds, backend=backend).all()
    k = torch.tensor([2**40, 0], device=device)
    assert gumbel_topk_mask(log_w, k, seeds=seeds, backend=backend).sum(1).tolist() == [5, 0]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_empty(shape, backend, device):
    k = torch.zeros(shape[0], dtype=torch.int64, device=device)
    mask = gumbel_topk_mask(torch.zeros(shape, device=device), k, backend=backend)
    assert (mask.shape, mask.dtype) == (shape, torch.bool)


@pytest.mark.everyday(1)
def test_a_row_with_a_seed_is_independent_of_its_batch(backend, device):
    log_w, k, _ = (t.to(device) for t in example(8, 40))
    seeds = torch.arange(8, device=device) * 1_000_003
    whole = gumbel_topk_mask(log_w, k, seeds=seeds, backend=backend)
    order = torch.tensor([5, 2, 7], device=device)
    part = gumbel_topk_mask(log_w[order], k[order], seeds=seeds[order], backend=backend)
    assert torch.equal(part, whole[order])
    alone = gumbel_topk_mask(log_w[3:4], k[3:4], seeds=seeds[3:4], backend=backend)
    assert torch.equal(alone, whole[3:4])


def test_weights_beyond_float32_on_the_host():
    # The host's quick scores are float32. Here they are all infinite, so the exact scores must decide.
    log_w = torch.tensor([[1e300, 2e300, -1e300, -2e300, 0.0, -INF]], dtype=torch.float64)
    uniform = torch.full((1, 6), 0.5)
    order = [1, 0, 4, 2, 3]
    for k in range(7):
        chosen = gumbel_topk_mask(log_w, k, uniform=uniform, backend="torch")[0]
        assert chosen.nonzero().flatten().tolist() == sorted(order[:k])


def test_the_default_generator_without_a_graph_break():
    log_w, k, _ = example(5, 20)
    torch.manual_seed(0)
    got = torch.compile(gumbel_topk_mask, fullgraph=True, backend="aot_eager")(log_w, k)
    torch.manual_seed(0)
    assert torch.equal(got, gumbel_topk_mask(log_w, k))


def test_public_functions(backend, device):
    log_w, k, uniform = (t.to(device) for t in example(4, 16))
    expected = gumbel_topk_mask(log_w, k, uniform=uniform, backend=backend)
    assert torch.equal(corruption.batched_gumbel_topk(log_w, k, uniform=uniform, backend=backend), expected)
    assert corruption._batched_gumbel_topk is corruption.batched_gumbel_topk
    one = corruption.gumbel_topk(log_w[0], int(k[0]), uniform=uniform[0], backend=backend)
    assert torch.equal(one, expected[0])
    first, second = (
        corruption.batched_gumbel_topk(log_w, k, torch.Generator().manual_seed(9), backend=backend) for _ in range(2)
    )
    assert torch.equal(first, second)
    drawn = corruption.gumbel_topk(log_w[0], 3, generator=torch.Generator().manual_seed(9), backend=backend)
    assert (drawn.shape, int(drawn.sum())) == ((16,), 3)
    again = corruption.gumbel_topk(log_w[0], 3, generator=torch.Generator().manual_seed(9), backend=backend)
    assert torch.equal(drawn, again)


W = torch.zeros(3, 4)
K = torch.ones(3, dtype=torch.int64)
U = torch.full((3, 4), 0.5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"log_w": [0.0]}, TypeError, "log_w must be a torch.Tensor, got list"),
        ({"log_w": W.long()}, ValueError, "log_w must have dtype float16, .* got int64"),
        ({"log_w": W[0]}, ValueError, r"log_w must have shape \[N, D\], got \(4,\)"),
        ({"k": 1.5}, TypeError, "k must be an int or a torch.Tensor, got float"),
        ({"k": True}, TypeError, "k must be an int or a torch.Tensor, got bool"),
        ({"k": -2}, ValueError, "k must be at least 0, got -2"),
        ({"k": torch.tensor([1, -5, 2])}, ValueError, "k must be at least 0, got -5 in row 1"),
        ({"k": K.float()}, ValueError, "k must have dtype int64, .* got float32"),
        ({"k": K[:2]}, ValueError, r"k must have shape \(3,\) .* got \(2,\)"),
        ({"uniform": 0.5}, TypeError, "uniform must be a torch.Tensor, got float"),
        ({"uniform": U.half()}, ValueError, "uniform must have dtype float32, float64, got float16"),
        ({"uniform": U[:, :3]}, ValueError, r"uniform must have shape \(3, 4\) .* got \(3, 3\)"),
        ({"uniform": U.to("meta")}, ValueError, "uniform must be on cpu like log_w, got meta"),
        ({"uniform": U, "seeds": K}, ValueError, "uniform excludes generator and seeds"),
        ({"uniform": U, "generator": torch.Generator()}, ValueError, "uniform excludes generator and seeds"),
        ({"seeds": K, "generator": torch.Generator()}, ValueError, "generator and seeds exclude each other"),
        ({"seeds": K[:1]}, ValueError, r"seeds must have shape \(3,\), one per row, got \(1,\)"),
        ({"backend": "cuda"}, ValueError, "backend must be one of auto, triton, torch, got 'cuda'"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        gumbel_topk_mask(**({"log_w": W, "k": K} | arguments))


def test_errors_of_the_single_row():
    with pytest.raises(TypeError, match=r"log_w must be a torch\.Tensor, got list"):
        corruption.gumbel_topk([0.0], 1)
    with pytest.raises(ValueError, match=r"log_w must have shape \[D\], got \(3, 4\)"):
        corruption.gumbel_topk(W, 1)
    with pytest.raises(TypeError, match=r"uniform must be a torch\.Tensor, got float"):
        corruption.gumbel_topk(W[0], 1, uniform=0.5)
    with pytest.raises(ValueError, match=r"uniform must have shape \[D\], got \(3, 4\)"):
        corruption.gumbel_topk(W[0], 1, uniform=U)


@pytest.mark.parametrize("k", [np.int64(2), np.int32(2), torch.tensor(2), torch.tensor([2])])
def test_k_of_one_row_in_any_form(k):
    uniform = torch.rand(5, generator=torch.Generator().manual_seed(0))
    expected = corruption.gumbel_topk(torch.zeros(5), 2, uniform=uniform)
    assert torch.equal(corruption.gumbel_topk(torch.zeros(5), k, uniform=uniform), expected)


@pytest.mark.parametrize("k", [2**63, 2**200, np.uint64(2**63)], ids=["2**63", "2**200", "numpy"])
@pytest.mark.parametrize(
    "routine",
    [
        lambda k: gumbel_topk_mask(torch.zeros(2, 5), k),
        lambda k: corruption.gumbel_topk(torch.zeros(5), k),
        lambda k: corruption.batched_gumbel_topk(torch.zeros(2, 5), k),
    ],
    ids=["mask", "one row", "rows"],
)
def test_a_k_beyond_64_bits(routine, k):
    with pytest.raises(ValueError, match=f"^k must be an int of 64 bits, got {k}$"):
        routine(k)
    assert routine(2**63 - 1).all()
