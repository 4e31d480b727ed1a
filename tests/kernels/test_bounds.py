"""No kernel accesses memory beside a tensor: each tensor begins or ends at an inaccessible page.

A load without its mask gives correct numbers if the memory beside the tensor is mapped. On a GPU, such a load is
occasionally an illegal access.
"""

import ctypes
import faulthandler
import math
import mmap
import multiprocessing
import signal
import sys

import pytest
import torch

from dllm_kernels import HybridDiffusionLLMLoss, corruption, ops
from tests.conftest import DEVICE, usually
from tests.support import interpreter
from tests.support.parity import small_tiles

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    DEVICE != "cpu" or sys.platform != "linux", reason="pages are closed by mprotect, around memory of the CPU"
)
PAGE = mmap.PAGESIZE
N, V, D, K = 4, 43, 6, 3
B, L, MASK = 3, 21, 40


class Guarded:
    """Memory between two inaccessible pages, for tensors that lie at one end of it."""

    def __init__(self, at_end):
        self.at_end, self.kept = at_end, []
        self.protect = ctypes.CDLL(None, use_errno=True).mprotect
        self.protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

    def allocate(self, count):
        inside = -(-count // PAGE) * PAGE
        memory = mmap.mmap(-1, inside + 2 * PAGE)
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        self.kept.append((memory, view))
        address = ctypes.addressof(view)
        for closed in (address, address + PAGE + inside):
            assert self.protect(closed, PAGE, 0) == 0, ctypes.get_errno()
        start = PAGE + (inside - count if self.at_end else 0)
        return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=start)

    def copy(self, t):
        """Return a contiguous copy of ``t`` in guarded memory."""
        if t.numel() == 0:
            return t.clone()
        return self.allocate(t.numel() * t.element_size()).view(t.dtype).view(t.shape).copy_(t)


def logits_and_targets(guarded, dtype):
    x = guarded.copy((3 * torch.randn(N, V)).to(dtype)).requires_grad_()
    y = guarded.copy(torch.tensor([0, V - 1, -100, V]))
    return x, y


def token_nll(guarded, dtype, **options):
    x, y = logits_and_targets(guarded, dtype)
    out = ops.token_nll(x, y, with_correct=True, with_ids=True, backend="triton", **options)
    out.nll.backward(guarded.copy(torch.randn(N, dtype=out.nll.dtype)))


def weighted_nll(guarded, dtype, **options):
    x, y = logits_and_targets(guarded, dtype)
    weights = guarded.copy(torch.tensor([1.0, 0.5, 2.0, 0.0], dtype=torch.promote_types(dtype, torch.float32)))
    out = ops.weighted_nll(x, y, weights, with_correct=True, with_ids=True, backend="triton", **options)
    out.loss.backward(guarded.copy(torch.tensor(0.3, dtype=out.loss.dtype)))


def weighted_linear_nll(guarded, dtype, bias_grad=True, **options):
    _, y = logits_and_targets(guarded, dtype)
    h, w, b = (guarded.copy(torch.randn(s).to(dtype)).requires_grad_() for s in ((N, D), (V, D), (V,)))
    b.requires_grad_(bias_grad)
    weights = guarded.copy(torch.tensor([1.0, 0.5, 2.0, 0.0]))
    out = ops.weighted_linear_nll(
        h, w, y, weights, bias=b, chunk_size=2, with_correct=True, with_ids=True, backend="triton", **options
    )
    out.loss.backward()


def row_stats(guarded, dtype, **options):
    x, _ = logits_and_targets(guarded, dtype)
    ids = guarded.copy(torch.randint(0, V, (N, K)))
    mix = guarded.copy(torch.rand(N)), guarded.copy(torch.rand(N) + 0.1)
    out = ops.row_stats(x, ids, entropy=True, mix=mix, with_correct=True, with_ids=True, backend="triton", **options)
    sum(t.sum() for t in out[:4]).backward()


def divergence(guarded, dtype, **options):
    x, y = logits_and_targets(guarded, dtype)
    t = guarded.copy((3 * torch.randn(N - 1, V)).to(dtype))
    weights = guarded.copy(torch.tensor([1.0, 0.0, 2.0, 0.3]))
    rows = guarded.copy(torch.tensor([N - 2, 0, -1, N - 1]))
    out = ops.divergence(x, t, weights, targets=y, teacher_rows=rows, backend="triton", **options)
    out.loss.backward(guarded.copy(torch.tensor(0.3, dtype=out.loss.dtype)))


def linear_divergence(guarded, dtype, **options):
    h, t, w = (guarded.copy(torch.randn(s).to(dtype)).requires_grad_() for s in ((N, D), (N, D), (V, D)))
    weights = guarded.copy(torch.tensor([1.0, 0.0, 2.0, 0.3]))
    ops.linear_divergence(h, w, t, weights, chunk_size=2, backend="triton", **options).loss.backward()


def ids_and_mask(guarded):
    return guarded.copy(torch.randint(0, MASK, (B, L))), guarded.copy(torch.rand(B, L) < 0.7)


def corrupted(routine, *arguments, **options):
    def run(guarded):
        given = {name: guarded.copy(value) if torch.is_tensor(value) else value for name, value in options.items()}
        seeds = guarded.copy(torch.arange(B))
        getattr(corruption, routine)(*ids_and_mask(guarded), *arguments, **given, seeds=seeds, backend="triton")

    return run


def gumbel_topk(guarded, **options):
    log_w, k = guarded.copy(torch.randn(N, V)), guarded.copy(torch.arange(N))
    given = {name: guarded.copy(value) for name, value in options.items()}
    ops.gumbel_topk_mask(log_w, k, **given, backend="triton")


def masked_diffusion(guarded, dtype):
    x, y = logits_and_targets(guarded, dtype)
    x, y, p_mask, on = (
        x[None],
        guarded.copy(y.clamp(max=V - 1)[None]),
        guarded.copy(torch.rand(1, N)),
        guarded.copy(torch.rand(1, N) < 0.7),
    )
    alpha, count = (guarded.copy(torch.tensor(number)) for number in (0.3, 2.0))
    loss = HybridDiffusionLLMLoss(alpha, backend="triton")
    loss(x, y, on, p_mask, on, num_diffusion_tokens=count).total_loss.backward()


def linear_sample(guarded, dtype, **options):
    h, w, seeds = (guarded.copy(t) for t in (torch.randn(N, D).to(dtype), torch.randn(V, D).to(dtype), torch.arange(N)))
    ops.linear_sample(h, w, seeds=seeds, chunk_size=2, backend="triton", **options)


STARTS = torch.arange(B) * L // (B - 1)
TRANSFORM = {"softcap": 4.0, "scale": 0.7, "skip_id": V - 1}
RUNS = {
    **{f"token_nll, {d}": (lambda g, d=d: token_nll(g, d)) for d in (torch.float16, torch.float32, torch.float64)},
    "token_nll, split rows": lambda g: token_nll(g, torch.float32),
    "token_nll, transformed, split rows": lambda g: token_nll(g, torch.float32, **TRANSFORM),
    **{f"weighted_nll, {d}": (lambda g, d=d: weighted_nll(g, d)) for d in (torch.float16, torch.float64)},
    "weighted_nll, split rows": lambda g: weighted_nll(g, torch.float32),
    **{f"weighted_linear_nll, {d}": (lambda g, d=d: weighted_linear_nll(g, d)) for d in (torch.float16, torch.float32)},
    "weighted_linear_nll, transformed": lambda g: weighted_linear_nll(g, torch.float64, **TRANSFORM),
    **{f"row_stats, {d}": (lambda g, d=d: row_stats(g, d)) for d in (torch.float16, torch.float32)},
    **{f"masked diffusion, {d}": (lambda g, d=d: masked_diffusion(g, d)) for d in (torch.float32, torch.float64)},
    "row_stats, split rows": lambda g: row_stats(g, torch.float16),
    "row_stats, transformed, split rows": lambda g: row_stats(g, torch.float32, **TRANSFORM),
    "divergence": lambda g: divergence(g, torch.float32, kind={"rkl": 0.5, "teacher_ce": 0.1, "ce": 0.2}),
    "divergence, sums first": lambda g: divergence(g, torch.float16, kind={"jsd": 0.5, "lk": 1.0, "ce": 0.2}),
    "divergence, transformed": lambda g: divergence(g, torch.float32, kind={"kl": 1.0, "ce": 0.2}, **TRANSFORM),
    "divergence, draft vocabulary": lambda g: divergence(
        g, torch.float32, kind={"kl": 1.0, "ce": 0.2}, draft_to_target=g.copy(torch.randperm(V))
    ),
    "linear_divergence": lambda g: linear_divergence(g, torch.float32, kind="l1"),
    "linear_sample": lambda g: linear_sample(g, torch.float16),
    "linear_sample, transformed": lambda g: linear_sample(g, torch.float32, **TRANSFORM),
    "linear_sample, greedy": lambda g: linear_sample(g, torch.float64, temperature=0),
    "corrupt_uniform": corrupted("corrupt_uniform", MASK),
    "corrupt_uniform, exact": corrupted("corrupt_uniform", MASK, level=torch.linspace(0.1, 0.9, B), exact=True),
    "corrupt_blockwise": corrupted("corrupt_blockwise", MASK),
    "corrupt_blockwise, blocks": corrupted("corrupt_blockwise", MASK, 8, level=torch.linspace(0, 1, 3 * B).view(B, 3)),
    "corrupt_uniform, padded blocks": corrupted("corrupt_uniform", MASK, block_size=8, start=STARTS),
    "corrupt_uniform, padded segments": corrupted(
        "corrupt_uniform", MASK, segment_ids=torch.arange(B * L).view(B, L) % 5 - 1, start=STARTS
    ),
    "corrupt_blockwise, padded": corrupted("corrupt_blockwise", MASK, start=STARTS),
    "corrupt_uniform_random": corrupted("corrupt_uniform_random", MASK, 5),
    "corrupt_all_masked": corrupted("corrupt_all_masked", MASK),
    "corrupt_mix": corrupted(
        "corrupt_mix", MASK, MASK + 1, mask_prob=torch.linspace(0, 0.5, B), uniform_prob=torch.linspace(0.4, 0.1, B)
    ),
    "complementary": lambda g: corruption.complementary(ids_and_mask(g)[1], ids_and_mask(g)[1], backend="triton"),
    "gumbel_topk": gumbel_topk,
    "gumbel_topk, padded": lambda g: gumbel_topk(g, start=torch.arange(N) * V // (N - 1)),
    "gumbel_topk, given draws": lambda g: gumbel_topk(g, uniform=torch.rand(N, V).clamp(1e-6, 1 - 1e-6)),
}


CONTEXT = multiprocessing.get_context("forkserver")  # a fork of this process may not run backward passes
CONTEXT.set_forkserver_preload([__name__])


def in_a_child(function, *args, context=CONTEXT):
    """Call the function in a separate process and return its exit code, below 0 for a signal."""
    process = context.Process(target=without_faulthandler, args=(function, *args))
    process.start()
    process.join(120)
    process.kill()
    return process.exitcode


def without_faulthandler(function, *args):
    faulthandler.disable()
    torch.set_num_threads(1)
    function(*args)


def run(name, at_end):
    """Run a call on guarded tensors. In launchers, ``torch.empty`` and ``torch.empty_like`` return guarded memory."""
    guarded, empty = Guarded(at_end), torch.empty

    def guarded_empty(*size, **options):
        return guarded.copy(empty(*size, **options))

    def guarded_empty_like(t, **options):
        return guarded_empty(t.shape, **({"dtype": t.dtype} | options))

    with pytest.MonkeyPatch.context() as patch, interpreter.checked_overflow():
        patch.setenv("DLLM_KERNELS_CHECK", "0")
        patch.setattr(torch, "empty", guarded_empty)
        patch.setattr(torch, "empty_like", guarded_empty_like)
        small_tiles(patch, splits=3 if "split" in name else 1)
        torch.manual_seed(0)
        RUNS[name](guarded)


def read_beside(past):
    """Read inside of a guarded tensor, and at ``past`` numbers from its beginning."""
    x = Guarded(at_end=past > 0).copy(torch.randn(N, V))
    read = ctypes.c_float.from_address
    assert math.isfinite(read(x.data_ptr() + 4 * (past - 1 if past > 0 else 0)).value)
    print(read(x.data_ptr() + 4 * past).value)


def run_at_both_ends(names, begun):
    """Run the calls, and count in ``begun`` how many have begun."""
    for name in names:
        begun.value += 1
        run(name, at_end=True)
        run(name, at_end=False)


# The same kernels run in another dtype, which is a multiple of the same number of bytes, or transformed.
CONTAINED = {
    *("token_nll, torch.float32", "weighted_nll, torch.float64", "weighted_linear_nll, torch.float32"),
    *("row_stats, torch.float32", "masked diffusion, torch.float64"),
}


OF_CI = tuple(name for name in RUNS if name not in CONTAINED)
EACH = 9  # calls per process, because the first call of a process takes a second


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "names",
    [*(OF_CI[i : i + EACH] for i in range(0, len(OF_CI), EACH)), *usually((), [(sorted(CONTAINED),)])],
    ids=lambda names: names[0],
)
def test_nothing_beside_a_tensor_is_touched(names):
    begun = CONTEXT.Value("i", 0)
    code = in_a_child(run_at_both_ends, names, begun)
    assert code == 0, f"exit code {code} of {names[begun.value - 1]!r}"


@pytest.mark.parametrize("past", [-1, V * N])
def test_memory_beside_is_inaccessible(past):
    assert in_a_child(read_beside, past, context=multiprocessing.get_context("fork")) == -signal.SIGSEGV
