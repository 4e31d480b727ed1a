"""Calls that launch every kernel, with tiles of few columns and rows that end within one.

``python -m tools.ptx`` executes them and checks each access: none is outside of a tensor, and no program accesses what
another one writes. ``test_interpreter.py`` compares two interpreters on them.
"""

import pytest
import torch

from dllm_kernels import HybridDiffusionLLMLoss, ops
from dllm_kernels.rows._divergence import DivergenceRequest
from dllm_kernels.rows._divergence_spec import checked_spec
from tests.conftest import EXECUTED
from tests.support.parity import small_tiles
from tests.support.routines import FIRSTS, OTHERS, ROUTINES
from tests.support.statistics import EVERY_FLAG, FLAGS, differentiable

pytest.importorskip("triton")
from dllm_kernels.backends.triton import _tiles
from dllm_kernels.backends.triton import divergence as kernel

N, V, D, K = 4, 75, 6, 3  # three tiles of 32 columns, of which a compiled kernel has one per thread
B, L, MASK = 3, 37, 40
R, C = 5, 43  # of a selection; a program has two rows


def logits_and_targets(dtype):
    x = (3 * torch.randn(N, V)).to(dtype).requires_grad_()
    y = torch.tensor([0, V - 1, -100, V])
    return x, y


def token_nll(dtype, **options):
    x, y = logits_and_targets(dtype)
    out = ops.token_nll(x, y, with_correct=True, with_ids=True, backend="triton", **options)
    out.nll.backward(torch.randn(N, dtype=out.nll.dtype))


def weighted_nll(dtype, **options):
    x, y = logits_and_targets(dtype)
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0], dtype=torch.promote_types(dtype, torch.float32))
    out = ops.weighted_nll(x, y, weights, with_correct=True, with_ids=True, backend="triton", **options)
    out.loss.backward(torch.tensor(0.3, dtype=out.loss.dtype))


def weighted_linear_nll(dtype, bias_grad=True, **options):
    _, y = logits_and_targets(dtype)
    h, w, b = (torch.randn(s).to(dtype).requires_grad_() for s in ((N, D), (V, D), (V,)))
    b.requires_grad_(bias_grad)
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0])
    out = ops.weighted_linear_nll(
        h, w, y, weights, bias=b, chunk_size=2, with_correct=True, with_ids=True, backend="triton", **options
    )
    out.loss.backward()


def row_stats(dtype, **options):
    x, _ = logits_and_targets(dtype)
    ids = torch.randint(0, V, (N, K))
    mix = torch.rand(N), torch.rand(N) + 0.1
    out = ops.row_stats(x, ids, mix=mix, **EVERY_FLAG, backend="triton", **options)
    sum(t.sum() for t in differentiable(out)).backward()


def divergence(dtype, **options):
    x, y = logits_and_targets(dtype)
    t = (3 * torch.randn(N - 1, V)).to(dtype)
    weights = torch.tensor([1.0, 0.0, 2.0, 0.3])
    rows = torch.tensor([N - 2, 0, -1, N - 1])
    out = ops.divergence(x, t, weights, targets=y, teacher_rows=rows, backend="triton", **options)
    out.loss.backward(torch.tensor(0.3, dtype=out.loss.dtype))


def linear_divergence(dtype, **options):
    h, t, w = (torch.randn(s).to(dtype).requires_grad_() for s in ((N, D), (N, D), (V, D)))
    weights = torch.tensor([1.0, 0.0, 2.0, 0.3])
    ops.linear_divergence(h, w, t, weights, chunk_size=2, backend="triton", **options).loss.backward()


def ids_and_mask():
    return torch.randint(0, MASK, (B, L)), torch.rand(B, L) < 0.7


def corrupted(case, **options):
    case(*ids_and_mask(), **options, seeds=torch.arange(B), backend="triton")


def gumbel_topk(**options):
    ops.gumbel_topk_mask(torch.randn(R, C), torch.arange(R), **options, backend="triton")


def masked_diffusion(dtype):
    x, y = logits_and_targets(dtype)
    p_mask, on = torch.rand(1, N), torch.rand(1, N) < 0.7
    loss = HybridDiffusionLLMLoss(torch.tensor(0.3), backend="triton")
    count = torch.tensor(2.0)
    loss(x[None], y.clamp(max=V - 1)[None], on, p_mask, on, num_diffusion_tokens=count).total_loss.backward()


def linear_sample(dtype, **options):
    h, w = torch.randn(N, D).to(dtype), torch.randn(V, D).to(dtype)
    ops.linear_sample(h, w, seeds=torch.arange(N), chunk_size=2, backend="triton", **options)


def backward_of_a_multiple():
    h, w = (torch.randn(s, requires_grad=True) for s in ((N, 6), (V, 6)))
    (3 * ops.weighted_linear_nll(h, w, torch.arange(N), torch.rand(N), backend="triton").loss).backward()


def token_nll_in_place():
    x = torch.randn(N, V, requires_grad=True)
    nll = ops.token_nll(x * 1, torch.arange(N), inplace_backward=True, backend="triton").nll
    nll.sum().backward()


def linear_row_stats():
    h, w = (torch.randn(s, requires_grad=True) for s in ((N, 6), (V, 6)))
    mix = torch.rand(N), torch.rand(N) + 0.1
    out = ops.linear_row_stats(h, w, torch.arange(N), **FLAGS, mix=mix, chunk_size=2, backend="triton")
    sum(t.sum() for t in differentiable(out)).backward()


def divergence_without_teacher_rows():
    """In place: every row of the student refers to a row that the teacher does not have."""
    z, no_rows, known = torch.randn(1, N, V), torch.empty(1, 0, V), torch.zeros(N, dtype=torch.int64)
    kernel.divergence(z, DivergenceRequest(checked_spec("kl"), no_rows, torch.ones(N), known), with_grad=True)


STARTS = torch.arange(B) * L // (B - 1)
PADDED = FIRSTS | {name: ROUTINES[name] for name in ("uniform, block 7", "segments")}
TRANSFORM = {"softcap": 4.0, "scale": 0.7, "skip_id": V - 1}
CALLS = {
    **{f"token_nll, {d}": (lambda d=d: token_nll(d)) for d in (torch.float16, torch.float32, torch.float64)},
    "token_nll, split rows": lambda: token_nll(torch.float32),
    "token_nll, transformed, split rows": lambda: token_nll(torch.float32, **TRANSFORM),
    **{f"weighted_nll, {d}": (lambda d=d: weighted_nll(d)) for d in (torch.float16, torch.float64)},
    "weighted_nll, split rows": lambda: weighted_nll(torch.float32),
    **{f"weighted_linear_nll, {d}": (lambda d=d: weighted_linear_nll(d)) for d in (torch.float16, torch.float32)},
    "weighted_linear_nll, transformed": lambda: weighted_linear_nll(torch.float64, **TRANSFORM),
    **{f"row_stats, {d}": (lambda d=d: row_stats(d)) for d in (torch.float16, torch.float32)},
    **{f"masked diffusion, {d}": (lambda d=d: masked_diffusion(d)) for d in (torch.float32, torch.float64)},
    "row_stats, split rows": lambda: row_stats(torch.float16),
    "row_stats, transformed, split rows": lambda: row_stats(torch.float32, **TRANSFORM),
    "divergence": lambda: divergence(torch.float32, kind={"rkl": 0.5, "teacher_ce": 0.1, "ce": 0.2}),
    "divergence, sums first": lambda: divergence(torch.float16, kind={"jsd": 0.5, "lk": 1.0, "ce": 0.2}),
    "divergence, transformed": lambda: divergence(torch.float32, kind={"kl": 1.0, "ce": 0.2}, **TRANSFORM),
    "divergence, draft vocabulary": lambda: divergence(
        torch.float32, kind={"kl": 1.0, "ce": 0.2}, draft_to_target=torch.randperm(V)
    ),
    "linear_divergence": lambda: linear_divergence(torch.float32, kind="l1"),
    "linear_sample": lambda: linear_sample(torch.float16),
    "linear_sample, transformed": lambda: linear_sample(torch.float32, **TRANSFORM),
    "linear_sample, greedy": lambda: linear_sample(torch.float64, temperature=0),
    **{name: (lambda case=case: corrupted(case)) for name, case in ROUTINES.items()},
    **{f"{name}, padded": (lambda case=case: corrupted(case, start=STARTS)) for name, case in PADDED.items()},
    **{name: (lambda call=call: corrupted(call)) for name, call in OTHERS.items()},
    "gumbel_topk_mask": gumbel_topk,
    "gumbel_topk, padded": lambda: gumbel_topk(start=torch.arange(R) * C // (R - 1)),
    "gumbel_topk, given draws": lambda: gumbel_topk(uniform=torch.rand(R, C).clamp(1e-6, 1 - 1e-6)),
    "divergence, no row of the teacher": divergence_without_teacher_rows,
    "token_nll, in place": token_nll_in_place,
    "linear_row_stats, in place": linear_row_stats,
    "sequence, keys in memory": lambda: corrupted(ROUTINES["sequence"]),
    "gumbel_topk, keys in memory": gumbel_topk,
    "weighted_linear_nll, times 3": backward_of_a_multiple,
}


def call(name, monkeypatch):
    """Make a call with small tiles."""
    with monkeypatch.context() as patch:
        patch.setenv("DLLM_KERNELS_CHECK", "0")  # the calls have targets out of range
        small_tiles(patch, splits=3 if "split" in name else 1)
        if "in memory" in name:
            patch.setattr(_tiles, "select", lambda *_: _tiles.SelectTile(1, 32, 1, True))
        torch.manual_seed(0)
        CALLS[name]()


@pytest.mark.skipif(not EXECUTED, reason="accesses are checked by `make ptx`")
@pytest.mark.parametrize("name", CALLS)
def test_no_access_is_outside_of_a_tensor_or_races(name, monkeypatch):
    call(name, monkeypatch)
