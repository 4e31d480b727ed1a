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
from tests.support.op_cases import FIRST_OPS, OP_BY_NAME, Rows
from tests.support.parity import small_tiles
from tests.support.routines import FIRSTS, OTHERS, ROUTINES

pytest.importorskip("triton")
from dllm_kernels.backends.triton import _tiles
from dllm_kernels.backends.triton import divergence as kernel

N, V, D = 4, 75, 6  # three tiles of 32 columns, of which a compiled kernel has one per thread
B, L, MASK = 3, 37, 40
R, C = 5, 43  # of a selection; a program has two rows


TARGETS = torch.tensor([0, V - 1, -100, V])
WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 0.0])


def logits(dtype):
    return (3 * torch.randn(N, V)).to(dtype).requires_grad_()


def record(dtype):
    h, w, b = (torch.randn(s).to(dtype).requires_grad_() for s in ((N, D), (V, D), (V,)))
    return ops.LinearLogits(h, w, b, chunk_size=2)


def of_case(case, x, **options):
    """Run an op forward and backward, with targets out of range and a row of weight 0."""
    weights = WEIGHTS.to(torch.float64 if getattr(x, "dtype", None) == torch.float64 else torch.float32)
    rows = Rows(TARGETS, torch.ones(N, dtype=torch.bool), weights, torch.rand(N) + 0.1)
    values = case.values(case(x, rows, backend="triton", **case.accepted(**options)))
    if values:
        torch.autograd.backward(values, [torch.rand_like(t) for t in values])


def divergence(dtype, **options):
    t = (3 * torch.randn(N - 1, V)).to(dtype)
    rows = torch.tensor([N - 2, 0, -1, N - 1])
    out = ops.divergence(logits(dtype), t, WEIGHTS, targets=TARGETS, teacher_rows=rows, backend="triton", **options)
    out.loss.backward(torch.tensor(0.3, dtype=out.loss.dtype))


def ids_and_mask():
    return torch.randint(0, MASK, (B, L)), torch.rand(B, L) < 0.7


def corrupted(case, **options):
    case(*ids_and_mask(), **options, seeds=torch.arange(B), backend="triton")


def gumbel_topk(**options):
    ops.gumbel_topk_mask(torch.randn(R, C), torch.arange(R), **options, backend="triton")


def masked_diffusion(dtype):
    x, y = logits(dtype), TARGETS
    p_mask, on = torch.rand(1, N), torch.rand(1, N) < 0.7
    loss = HybridDiffusionLLMLoss(torch.tensor(0.3), backend="triton")
    count = torch.tensor(2.0)
    loss(x[None], y.clamp(max=V - 1)[None], on, p_mask, on, num_diffusion_tokens=count).total_loss.backward()


def backward_of_a_multiple():
    h, w = (torch.randn(s, requires_grad=True) for s in ((N, 6), (V, 6)))
    (3 * ops.weighted_linear_nll(h, w, torch.arange(N), torch.rand(N), backend="triton").loss).backward()


def token_nll_in_place():
    x = torch.randn(N, V, requires_grad=True)
    nll = ops.token_nll(x * 1, torch.arange(N), inplace_backward=True, backend="triton").nll
    nll.sum().backward()


def divergence_without_teacher_rows():
    """In place: every row of the student refers to a row that the teacher does not have."""
    z, no_rows, known = torch.randn(1, N, V), torch.empty(1, 0, V), torch.zeros(N, dtype=torch.int64)
    kernel.divergence(z, DivergenceRequest(checked_spec("kl"), no_rows, torch.ones(N), known), with_grad=True)


STARTS = torch.arange(B) * L // (B - 1)
PADDED = FIRSTS | {name: ROUTINES[name] for name in ("uniform, block 7", "segments")}
TRANSFORM = {"softcap": 4.0, "scale": 0.7, "skip_id": V - 1}
TWO_IDS = OP_BY_NAME["row_stats, two ids of all rows"]
STORED = [*(case for case in FIRST_OPS if "stored" in case.kinds), TWO_IDS]
OF_HEAD = [case for case in FIRST_OPS if "head" in case.kinds]
CALLS = {
    **{
        f"{case.name}, {d}": lambda case=case, d=d: of_case(case, logits(d))
        for case in STORED
        for d in (torch.float16, torch.float32, torch.float64)
    },
    **{
        f"{case.name}, split rows{with_}": lambda case=case, o=o: of_case(case, logits(torch.float32), **o)
        for case in STORED
        for with_, o in (("", {}), (", transformed", TRANSFORM))
    },
    **{
        f"{case.name}, head, {d}": lambda case=case, d=d, o=o: of_case(case, record(d), **o)
        for case in OF_HEAD
        for d, o in ((torch.float16, {}), (torch.float32, TRANSFORM))
    },
    **{f"masked diffusion, {d}": (lambda d=d: masked_diffusion(d)) for d in (torch.float32, torch.float64)},
    "divergence, two kinds": lambda: divergence(torch.float32, kind={"rkl": 0.5, "teacher_ce": 0.1, "ce": 0.2}),
    "divergence, sums first": lambda: divergence(torch.float16, kind={"jsd": 0.5, "lk": 1.0, "ce": 0.2}),
    "divergence, transformed": lambda: divergence(torch.float32, kind={"kl": 1.0, "ce": 0.2}, **TRANSFORM),
    "divergence, draft vocabulary": lambda: divergence(
        torch.float32, kind={"kl": 1.0, "ce": 0.2}, draft_to_target=torch.randperm(V)
    ),
    "linear_sample, greedy": lambda: of_case(OP_BY_NAME["linear_sample, greedy"], record(torch.float64)),
    **{name: (lambda case=case: corrupted(case)) for name, case in ROUTINES.items()},
    **{f"{name}, padded": (lambda case=case: corrupted(case, start=STARTS)) for name, case in PADDED.items()},
    **{name: (lambda call=call: corrupted(call)) for name, call in OTHERS.items()},
    "gumbel_topk_mask": gumbel_topk,
    "gumbel_topk, padded": lambda: gumbel_topk(start=torch.arange(R) * C // (R - 1)),
    "gumbel_topk, given draws": lambda: gumbel_topk(uniform=torch.rand(R, C).clamp(1e-6, 1 - 1e-6)),
    "divergence, no row of the teacher": divergence_without_teacher_rows,
    "token_nll, in place": token_nll_in_place,
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
