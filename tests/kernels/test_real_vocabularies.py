"""The kernels with the tiles of real vocabularies, up to 512 threads, on few rows; most other tests have small tiles.

Every result is compared with the torch path by the rule of ``tests/support/parity.py``.
"""

import pytest
import torch

from dllm_kernels import ops
from tests.conftest import DEVICE, INTERPRETED
from tests.support.parity import assert_as_good_as_plain, largest_error, same
from tests.support.routines import ROUTINES

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter knows no threads")
VOCABULARIES = [126464, 50257, 32000]
HALF, SINGLE = torch.bfloat16, torch.float32
ALL = {"softcap": 30.0, "scale": 0.7, "skip_id": 5}
WEIGHTS = torch.tensor([[0.5, 2.0, 1.0]], device=DEVICE)
KINDS = ["kl", "l1", "jsd", "rkl", {"ce": 0.1, "lk": 1.0}]


def outputs(function, leaf, backend):
    """Return the results of an op, and the gradient of their sum with a weight for each element."""
    leaf = leaf.clone().requires_grad_()
    found = [t for t in function(leaf, backend=backend) if t is not None]
    differentiable = [t for t in found if t.requires_grad]
    upstream = [torch.linspace(0.5, 1.5, t.numel(), device=DEVICE).view(t.shape).to(t) for t in differentiable]
    (grad,) = torch.autograd.grad(differentiable, leaf, upstream)
    return [t.detach() for t in (*found, grad)]


def compare(function, leaf, V):
    kernels, plain = (outputs(function, leaf, backend) for backend in ("triton", "torch"))
    exact = outputs(function, leaf.double(), "torch")
    sizes = {V, leaf.shape[-1]}
    for k, (got, p, e) in enumerate(zip(kernels, plain, exact, strict=True)):
        if got.is_floating_point():
            assert_as_good_as_plain([got], [e], largest_error([p], [e]), f"result {k}", sizes)
        else:
            assert same(got, p, f"result {k}")


def drawn(*shape, dtype=HALF, seed=0, scale=4.0):
    torch.manual_seed(seed)
    return (scale * torch.randn(*shape, device=DEVICE)).to(dtype)


@pytest.mark.covering(2, most=2)
@pytest.mark.parametrize("steps", [{}, ALL], ids=["plain", "transformed"])
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("V", VOCABULARIES)
def test_nll(V, dtype, steps):
    y, logits = torch.tensor([[7, V - 1, -100]], device=DEVICE), drawn(1, 3, V, dtype=dtype)
    compare(lambda x, **o: ops.token_nll(x, y, with_correct=True, with_lse=True, **o, **steps), logits, V)
    compare(lambda x, **o: ops.weighted_nll(x, y, WEIGHTS, **o, **steps)[:1], logits, V)
    hidden, head = drawn(1, 3, 16, dtype=dtype), drawn(V, 16, dtype=dtype, scale=1.0)
    for op, more in ((ops.weighted_linear_nll, [WEIGHTS]), (ops.linear_token_nll, [])):
        compare(lambda h, op=op, more=more, **o: op(h, head.to(h.dtype), y, *more, **o, **steps)[:1], hidden, V)


@pytest.mark.parametrize("view", ["sliced", "shifted", "longer"])
def test_views(view):
    """Rows of another stride than columns, which begin anywhere relative to 16 bytes."""
    logits = drawn(1, 4, 50264)
    part = {"sliced": lambda x: x[..., 1:], "shifted": lambda x: x[:, 1:], "longer": lambda x: x[..., :-3]}[view]
    rows = part(logits).shape
    y = torch.randint(0, rows[-1], rows[:-1], device=DEVICE)
    compare(lambda x, **o: ops.token_nll(part(x), y, with_correct=True, **o), logits, 50264)
    compare(lambda x, **o: ops.row_stats(part(x), y[..., None], entropy=True, **o)[:3], logits, 50264)


@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("dtype", [HALF, SINGLE, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("V", VOCABULARIES[:2])
def test_row_stats(V, dtype):
    ids, logits = torch.tensor([[[7, 0], [V - 1, 3], [5, 5]]], device=DEVICE), drawn(1, 3, V, dtype=dtype)
    mix = torch.rand(2, 1, 3, device=DEVICE, dtype=torch.promote_types(dtype, SINGLE))
    options = {"entropy": True, "with_correct": True}
    compare(
        lambda x, **o: ops.row_stats(x, ids, mix=(*mix.to(torch.promote_types(x.dtype, SINGLE)),), **options, **o),
        logits,
        V,
    )
    many = torch.tensor([[[7] * 9, [3] * 9, [1] * 9]], device=DEVICE)
    compare(lambda x, **o: ops.row_stats(x, many, **o, **ALL)[:2], logits, V)


@pytest.mark.covering(2, most=2)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("V", VOCABULARIES[:2])
def test_divergence(V, dtype, kind):
    teacher, logits = drawn(1, 3, V, dtype=dtype, seed=2), drawn(1, 3, V, dtype=dtype)
    more = {"targets": torch.tensor([[7, V - 1, 3]], device=DEVICE)} if "ce" in kind else {}
    compare(lambda x, **o: ops.divergence(x, teacher.to(x.dtype), WEIGHTS, kind=kind, **more, **o)[:1], logits, V)
    hidden, of_teacher, head = (drawn(*s, 16, dtype=dtype, scale=1.0) for s in ((1, 3), (1, 3), (V,)))
    more |= {"kind": kind, "temperature": 0.7}
    compare(
        lambda h, **o: ops.linear_divergence(h, head.to(h.dtype), of_teacher.to(h.dtype), WEIGHTS, **more, **o)[:1],
        hidden,
        V,
    )


@pytest.mark.parametrize("kind", ["kl", "jsd"])
@pytest.mark.parametrize("teacher", ["draft", "full"])
def test_divergence_of_a_draft_vocabulary(teacher, kind):
    V, count = VOCABULARIES[1:]
    hidden, of_teacher, head, large = (
        drawn(*s, 16, scale=1.0, seed=k) for k, s in enumerate(((1, 3), (1, 3), (count,), (V,)))
    )
    columns = torch.randperm(V, device=DEVICE)[:count].sort().values
    options = {"kind": kind, "teacher": teacher, "draft_to_target": columns}

    def call(h, **o):
        heads = head.to(h.dtype), of_teacher.to(h.dtype), WEIGHTS
        return ops.linear_divergence(h, *heads, teacher_weight=large.to(h.dtype), **options, **o)[:1]

    compare(call, hidden, V)


@pytest.mark.parametrize("V", VOCABULARIES[:2])
def test_samples(V):
    hidden, head = drawn(2, 1, 16, scale=1.0), drawn(V, 16, scale=1.0)
    seeds = torch.tensor([3, 4], device=DEVICE)
    for more in ({}, {"temperature": 0.7, "softcap": 30.0, "skip_id": 5}, {"temperature": 0}):
        kernels, plain = (ops.linear_sample(hidden, head, seeds=seeds, backend=b, **more) for b in ("triton", "torch"))
        assert torch.equal(kernels[0], plain[0])


@pytest.mark.parametrize("D", [32, 4096, 8192])
def test_selection_and_corruption(D):
    torch.manual_seed(1)
    uniform, weights = torch.rand(2, D, device=DEVICE), torch.randn(2, D, device=DEVICE)
    k = torch.tensor([D // 3, 1], device=DEVICE)
    masks = [ops.gumbel_topk_mask(weights, k, uniform=uniform, backend=b) for b in ("triton", "torch")]
    assert same(*masks)
    ids, mask = torch.randint(0, 1000, (2, D), device=DEVICE), torch.rand(2, D, device=DEVICE) < 0.9
    seeds = torch.tensor([3, 4], device=DEVICE)
    for name, case in ROUTINES.items():
        assert same(*(case(ids, mask, seeds=seeds, backend=b) for b in ("triton", "torch"))), name
