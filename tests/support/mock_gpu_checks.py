"""Checks of the package on a mock GPU: ``python -m tests.support.mock_gpu_checks FILE`` writes the outcome of each.

They run in a separate process, in which Triton compiles instead of interpreting. ``tests/kernels/test_mock_gpu.py`` has
one test per check.
"""

import functools
import itertools
import json
import math
import re
import sys
import time
import traceback
from pathlib import Path
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from dllm_kernels import corruption, losses, ops
from dllm_kernels.backends.triton import _launch, divergence
from dllm_kernels.rows import _chunks
from dllm_kernels.rows._divergence import DivergenceRequest
from dllm_kernels.rows._divergence_kinds import KINDS
from dllm_kernels.rows._divergence_spec import checked_spec
from tests.internals.test_torch_off_cpu import Launches
from tests.ops.test_host_syncs import CASES as WITH_SYNCS
from tests.ops.test_host_syncs import check_syncs
from tests.support.cases import CASES, FIRSTS
from tests.support.offsets import narrow_offsets
from tests.support.op_cases import FIRST_OPS, OF_EVERY_KIND, Rows
from tests.support.routines import ROUTINES, batch
from tests.support.statistics import FLAGS, differentiable
from tools import inspect_kernels, launches
from tools.gpus import GRID
from tools.kernel_files import SOURCES, launched_in
from tools.mock_gpu import MockGPU

CHECKS = {}


def check(function):
    """Register a check."""
    CHECKS[function.__name__] = function
    return function


def on_each(*targets):
    """Run a check on these targets, inside the mock, with the GPU as the default device."""

    def decorate(function):
        @functools.wraps(function)
        def run():
            for target in targets:
                with MockGPU(target) as gpu, torch.device("cuda"):
                    function(gpu)

        return run

    return decorate


def launched(gpu):
    return {launch.specimen.kernel for launch in gpu.launches}


@check
@on_each("sm_90")
def alignment_is_seen(gpu):
    for V in (126464, 50257):
        launches.token_nll((8, 512, V), torch.bfloat16)
    launches.token_nll((8, 512, 126464), torch.bfloat16, view=lambda t: t[..., 1:])
    forward = [s.types for s in gpu.specimens if s.kernel == "token_nll_fwd_split"]
    aligned = [s.constants["ALIGNED"] for s in gpu.specimens if s.kernel == "token_nll_fwd_split"]
    assert [types["logits_ptr"] for types in forward] == ["*bf16 D", "*bf16 D", "*bf16"]
    assert aligned == [True, False, False]


@check
@on_each("sm_90")
def the_split_of_a_row_does_not_depend_on_the_number_of_rows(gpu):
    found = set()
    for rows in (1, 100, 8192):
        launches.token_nll((1, rows, 126464), torch.bfloat16)
        launches.row_stats((rows, 126464), torch.bfloat16, mix=True)
        # A program of the coefficients processes several rows, and sums over the ids of each.
        over_logits = [e for e in gpu.launches if e.specimen.kernel != "row_stats_coefficients"]
        shares = {(e.specimen.kernel, e.arguments.get("SPLITS"), e.arguments.get("TILES")) for e in over_logits}
        found.add((frozenset(shares), frozenset((e.specimen.kernel, e.grid[0] / rows) for e in over_logits)))
        gpu.launches.clear()
    assert len(found) == 1


@check
@on_each("sm_90", "gfx942")
def a_weighted_sum_launches_few_kernels(gpu):
    """Each launch costs some 5 us of host time, and about as much GPU time if there are few rows."""
    logits = torch.empty(4, 1024, 126464, dtype=torch.bfloat16, requires_grad=True)
    targets, weights, one = torch.zeros(4, 1024, dtype=torch.int64), torch.rand(4, 1024), torch.ones(())
    with Launches() as forward:
        loss = ops.weighted_nll(logits, targets, weights).loss
    assert launched(gpu) == {"token_nll_fwd_split", "token_nll_merge"}
    assert len(gpu.launches) == 2
    assert forward.names == ["sum"]
    gpu.launches.clear()
    with Launches() as backward:
        torch.autograd.grad(loss, logits, one)
    assert [launch.specimen.kernel for launch in gpu.launches] == ["token_nll_bwd"]
    assert backward.names == []


@check
@on_each("sm_90")
def the_host_syncs_are_those_of_the_table(gpu):
    def reset():
        count, gpu.syncs = gpu.syncs, 0
        return count

    for case, trained, bounded in itertools.product(WITH_SYNCS, (False, True), (False, True)):
        check_syncs(case, trained, bounded, reset)


class PeakOfRows(TorchDispatchMode):
    """The largest number of bytes that tensors with rows of at least ``columns`` entries take at a time."""

    def __init__(self, columns):
        super().__init__()
        self.columns, self.live, self.peak = columns, {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, torch.Tensor) and not function.is_view and t.dim() and t.shape[-1] >= self.columns:
                storage = t.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {key: value for key, value in self.live.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.live.values()))
        return result


# Calls that keep one or several buffers of a chunk, with (hidden states, head, ids, mask).
OF_CHUNKS = {
    "weighted": lambda h, w, ids, on, **o: ops.weighted_linear_nll(h, w, ids, on, **o).loss,
    "rows": lambda h, w, ids, on, **o: ops.linear_token_nll(h, w, ids, **o).nll,
    "statistics": lambda h, w, ids, on, **o: ops.linear_row_stats(h, w, ids, entropy=True, **o).entropy,
    "own head": lambda h, w, ids, on, **o: ops.linear_divergence(h, w, h.detach(), teacher_weight=w.detach(), **o).loss,
    "fewer columns": lambda h, w, ids, on, **o: (
        ops.linear_divergence(
            h, w[: len(w) // 2], h.detach(), teacher_weight=w.detach(), draft_to_target=torch.arange(len(w) // 2), **o
        ).loss
    ),
    "sample": lambda h, w, ids, on, **o: ops.linear_sample(h, w, seeds=ids, min_p=0.1, **o).ids,
    "embedding": lambda h, w, ids, on, **o: ops.soft_embedding(h, w, w, **o),
}


@check
def the_chunks_fit_into_a_sixteenth_of_the_memory():
    """Otherwise, 8,192 rows with float32 logits and their gradient in bfloat16 would take 12.9 GB."""
    V, D, total = 262_144, 2304, 24 << 30
    for (name, call), logits_dtype in itertools.product(OF_CHUNKS.items(), (None, torch.float32)):
        with MockGPU("sm_90", memory=total) as gpu, torch.device("cuda"):
            gpu.active_share = 1.0
            h, w = (torch.empty(n, D, dtype=torch.bfloat16, requires_grad=True) for n in (16_384, V))
            ids, on = torch.zeros(len(h), dtype=torch.int64), torch.ones(len(h))
            # Within a dispatch mode, products with another dtype of the output would have temporary results.
            direct = mock.patch.object(_chunks, "is_in_torch_dispatch_mode", return_value=False)
            with direct, PeakOfRows(V // 2) as rows:
                out = call(h, w, ids, on, logits_dtype=logits_dtype)
                if out.requires_grad:
                    out.sum().backward()
        blocks = 4 * (256 << 20) if name == "sample" else 0  # of truncation in torch
        assert total / 32 < rows.peak <= total / 16 + blocks, (name, logits_dtype, rows.peak)


V, D = 126464, 512  # forward from logits splits a row of this length: one launch more
COUNT = {"num_diffusion_tokens": 100}
# Launches of forward and of backward, torch operations and kernels, with bool masks and a number as denominator:
# from logits, and from hidden states with a trainable head and all active rows in one chunk.
LAUNCHES = {
    "mdlm": ((6, 1), (23, 2)),
    "block diffusion": ((7, 1), (24, 2)),
    "hybrid": ((13, 1), (30, 2)),
    "dflash": ((20, 1), (36, 2)),
    "idlm": ((16, 1), (33, 2)),
    "scdd": ((122, 58), (139, 80)),
    "scdd, no uniform noise": ((25, 1), (42, 2)),
}


def calls_of_losses():
    """Return the losses of ``LAUNCHES`` and the arguments of a call after the rows."""
    ids, on, p_mask = (
        torch.zeros(4, 1024, dtype=torch.int64),
        torch.ones(4, 1024, dtype=torch.bool),
        torch.rand(4, 1024),
    )
    masked = ids, on, p_mask, on
    ar = {"loss_mask_ar": torch.rand(4, 1024), "num_ar_tokens": 100}
    noisy = {"noisy_input_ids": ids, "num_diffusion_tokens": 100}
    return {
        "mdlm": (losses.MDLMCrossEntropyLoss(), masked, COUNT),
        "block diffusion": (losses.BlockDiffusionCrossEntropyLoss(), masked, COUNT),
        "hybrid": (losses.HybridDiffusionLLMLoss(), masked, COUNT | ar),
        "dflash": (losses.DFlashDecayLoss(), (ids, on), {"num_tokens": 100, "block_size": 17}),
        "idlm": (losses.IDLMLoss(), (ids, on, on), COUNT | {"seq_len": 1024}),
        "scdd": (losses.SCDDLoss(5), masked, noisy),
        "scdd, no uniform noise": (losses.SCDDLoss(5, max_ratio=0.0), masked, noisy),
    }


def launches_of(gpu, call):
    """Return (result, number of launches)."""
    before = len(gpu.launches)
    with Launches() as operations:
        result = call()
    return result, len(operations.names) + len(gpu.launches) - before


@check
@on_each("sm_90", "gfx942")
def a_loss_launches_as_many_kernels_as_the_table_says(gpu):
    """A launch that comes back is a launch per step and per GPU of every training."""
    one, found = torch.ones(()), {}
    for name, (loss, arguments, options) in calls_of_losses().items():
        width = 2 if name in ("hybrid", "idlm") else 1
        logits, hidden = (torch.empty(4, width * 1024, n, dtype=torch.bfloat16, requires_grad=True) for n in (V, D))
        head = torch.empty(V, D, dtype=torch.bfloat16, requires_grad=True)
        counts = []
        for function, leaves in ((loss, [logits]), (loss.forward_fused, [hidden, head])):
            out, forward = launches_of(gpu, functools.partial(function, *leaves, *arguments, **options))
            backward = functools.partial(torch.autograd.grad, out.total_loss, leaves, one)
            counts.append((forward, launches_of(gpu, backward)[1]))
        found[name] = tuple(counts)
    assert found == LAUNCHES, found


@check
@on_each("sm_90", "gfx942")
def the_gradient_of_row_statistics_takes_two_launches(gpu):
    logits, ids = torch.empty(2, 256, V, dtype=torch.bfloat16, requires_grad=True), torch.zeros(2, 256, 3).long()
    stats = differentiable(ops.row_stats(logits, ids, **FLAGS, mix=(torch.rand(2, 256), torch.rand(2, 256))))
    upstream = [torch.rand(t.shape) for t in stats]
    _, count = launches_of(gpu, lambda: torch.autograd.grad(stats, logits, upstream))
    assert count == 2
    assert [launch.specimen.kernel for launch in gpu.launches[-2:]] == ["row_stats_coefficients", "row_stats_bwd"]


@check
@on_each("sm_90", "gfx942")
def the_target_is_looked_up_once_per_device(gpu):
    """Otherwise, each launch would wait some microseconds. Triton looks the target up when it compiles a kernel."""
    driver, callers = type(triton.runtime.driver.active), []

    def look_up(self):
        callers.append(sys._getframe(1).f_globals["__name__"])
        return self.target

    with mock.patch.object(driver, "get_current_target", look_up):
        for _ in range(3):
            launches.token_nll((2, 16, 5000), torch.bfloat16)
            launches.corrupt(corruption.corrupt_uniform, 8, 4096)
            launches.divergence_from_hidden((2, 16, 5000), torch.bfloat16, D=16, kind="kl")
    assert callers.count(_launch.__name__) == 1
    assert _launch.threads(4) == 4 * gpu.limits.warp_size
    assert _launch.on_nvidia() == (gpu.limits.backend == "cuda")


def rows_in_place(columns, dtype, **options):
    """Call all kernels over rows of logits that may overwrite their input."""
    launches.token_nll((2, 16, columns), dtype, **options)
    launches.from_hidden((2, 16, columns), dtype, D=16, frozen=True, **options)
    launches.row_stats((2, 16, columns), dtype, **FLAGS, mix=True, **options)
    for kind in ("kl", "l1"):
        launches.divergence_from_hidden((2, 16, columns), dtype, D=16, kind=kind, **options)


@check
@on_each("sm_90", "gfx942")
def no_program_has_more_threads_than_a_tile_columns(gpu):
    """Otherwise, a thread without a column reads another thread's, which a kernel in place may have overwritten."""
    sizes = {dtype.itemsize: dtype for dtype in launches.DTYPES}  # on which a tile depends
    for dtype in sizes.values():
        for columns in (1, 33, 64, 97, 130, 300, 1025, 5000, 50257):
            rows_in_place(columns, dtype)
        for columns in (97, 1025, 50257):
            rows_in_place(columns, dtype, softcap=30.0, skip_id=0)
    seen = {launch.specimen for launch in gpu.launches if "BLOCK_V" in launch.specimen.constants}
    threads = {s: s.options["num_warps"] * gpu.limits.warp_size for s in seen}
    assert {s.kernel for s in seen} >= set(IN_PLACE)
    assert [(s.kernel, s.constants["BLOCK_V"]) for s in seen if s.constants["BLOCK_V"] < threads[s]] == []
    # The limit of registers is for programs of 8 warps or more. A kernel of one warp spills with it.
    assert {s.options["num_warps"] for s in seen if s.options.get("maxnreg")} <= {8, 16}


IN_PLACE = ("token_nll_bwd", "linear_nll_rows", "row_stats_bwd", "divergence_rows")


@check
@on_each("sm_90")
def keys_in_memory_are_read_after_a_barrier(gpu):
    """The barriers of a reduction separate the keys from their readers on this GPU, too, which is not promised."""
    launches.topk(8, 131072)
    launches.corrupt(corruption.corrupt_blockwise, 8, 131072)
    kernels = {s.kernel: s for s in gpu.specimens if s.kernel.endswith("_long")}
    assert len(kernels) == 2
    for kernel, specimen in kernels.items():
        code = specimen.compile().asm["ttgir"]
        keys = re.findall(r"tt\.(load|store) .*: tensor<\d+x!tt\.ptr<i64>|(barrier)", code)
        order = [access or barrier for access, barrier in keys]
        assert order[:3] == ["store", "barrier", "load"], kernel
        assert "store" not in order[1:], kernel


@check
@on_each("sm_90", "gfx942")
def specs_have_kernels_of_their_own_and_numbers_have_none(gpu):
    """The cache keys of Triton, in memory and on disk, distinguish specs, but not their coefficients."""
    pairs = [dict.fromkeys(pair, 0.5) for pair in itertools.combinations(KINDS.keys() - {"lk_soft_ce"}, 2)]
    specs = [*map(checked_spec, (*KINDS.keys() - {"lk_soft_ce"}, *pairs))]
    specs += [checked_spec("lk", base="soft_ce")]
    logits = torch.empty(1, 16, 4096, dtype=torch.bfloat16)
    for spec in specs:
        request = DivergenceRequest(spec, logits, torch.ones(16), targets=torch.zeros(16).long())
        divergence.divergence(logits, request, with_grad=True)
    assert len(specs) == len(gpu.specimens) == len({s.key for s in gpu.specimens})
    assert len(specs) == len({s.source.hash() for s in gpu.specimens})
    for numbers in ({"beta": 0.25, "eta": 0.0}, {"beta": 1 / 3, "kl_scale": 0.0}, {"floor": 1e-3, "eta": 16.0}):
        for coefficient in (1.0, 0.1, 2.0**-60, 3.0):
            kinds = dict.fromkeys(("jsd", "nla", "lk"), coefficient)
            spec = checked_spec(kinds, **numbers)
            divergence.divergence(logits, DivergenceRequest(spec, logits, torch.ones(16)), with_grad=True)
    assert len(gpu.specimens) == len(specs) + 1


FROM_LOGITS = {"token_nll_fwd", "token_nll_bwd"}
FROM_HIDDEN = {"linear_nll_rows", "scale_inplace"}, {"linear_nll_rows"}
STATISTICS = {"row_stats_parts", "row_stats_merge", "row_stats_mix", "row_stats_coefficients", "row_stats_bwd"}
PARTS = STATISTICS - {"row_stats_mix"}
REST = PARTS - {"row_stats_coefficients"}  # the mass outside the ids has a gradient, so torch makes coefficients
TAUGHT = [{"divergence_rows", *more} for more in ((), ("token_nll_fwd",))]  # NLLs, if row weights need them
WEIGHTS = {"mdlm_weights"}
# Name in ``Case.kernels`` -> the kernels that a case may launch, from logits and from hidden states.
KERNELS = {
    "nll": ([FROM_LOGITS], [FROM_LOGITS, *FROM_HIDDEN]),
    "mdlm": ([FROM_LOGITS | WEIGHTS], [kernels | WEIGHTS for kernels in (FROM_LOGITS, *FROM_HIDDEN)]),
    "row_stats": ([STATISTICS], [STATISTICS]),
    "row_objective": ([PARTS], [PARTS | {"scale_inplace"}]),
    "topk_divergence": ([REST], [REST | {"scale_inplace"}]),
    "divergence": (TAUGHT, [*TAUGHT, *(kernels | {"scale_inplace"} for kernels in TAUGHT)]),
}


def own_kernels(stem):
    """Return the nonempty sets of kernels of the file, which an op without an entry in ``KERNELS`` may launch."""
    assert stem in SOURCES, f"{stem} is neither a key of KERNELS nor a file of kernels"
    names = [name.removeprefix("_") for name in launched_in(stem)]
    return [{*chosen} for n in range(len(names)) for chosen in itertools.combinations([*names, "scale_inplace"], n + 1)]


@check
@on_each("sm_90", "gfx942")
def every_loss_launches_kernels_forward_and_backward(gpu):
    B, L, V, D = 2, 12, 97, 16
    for case in CASES if gpu.limits.backend == "cuda" else FIRSTS:  # the kernels are the same, their tiles are not
        inputs, rows = case.draw(B, L, V), case.width * L
        shapes = {"logits": (B, rows, V), "hidden": (B, rows, D), "weight": (V, D), "bias": (V,)}
        t = {name: torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for name, shape in shapes.items()}
        from_logits, from_hidden = KERNELS.get(case.kernels) or (own_kernels(case.kernels),) * 2
        case.logits_form(t["logits"], inputs).sum().backward()
        assert launched(gpu) in from_logits, (case.name, launched(gpu))
        gpu.launches.clear()
        case.hidden_form(t["hidden"], t["weight"], t["bias"], inputs).sum().backward()
        assert launched(gpu) in from_hidden, (case.name, launched(gpu))
        gpu.launches.clear()
        assert all(tensor.grad is not None for tensor in t.values()), case.name


@check
@on_each("sm_90", "gfx942")
def grids_are_within_the_limits(gpu):
    for call in (*launches.real(), *launches.odd()):
        call()
    launches.token_nll((1, 65536, 262144), torch.bfloat16, with_ids=True)
    assert gpu.launches
    for launch in gpu.launches:
        assert grid_fits(launch, gpu.limits), (launch.specimen.kernel, launch.grid)


@check
@on_each("gfx942")
def grids_of_gradients_beyond_a_card_of_80_gb(gpu):
    launches.token_nll((1, 131072, 262144), torch.bfloat16)
    assert all(grid_fits(launch, gpu.limits) for launch in gpu.launches)


def grid_fits(launch, limits):
    threads = launch.specimen.options["num_warps"] * limits.warp_size  # of a program
    programs_fit = threads <= 1024 and all(0 < n <= most for n, most in zip(launch.grid, GRID, strict=True))
    return programs_fit and launch.grid[0] * threads <= (limits.threads_of_grid or math.inf)


def specimens_of(calls):
    """Return the kernels that each call launches, by the properties that distinguish them."""
    out = []
    for call in calls:
        with MockGPU("sm_90") as gpu, torch.device("cuda"):
            call()
            out.append({specimen.key for specimen in gpu.specimens})
    return out


@check
def kernels_do_not_depend_on_the_number_of_rows():
    for V in (262144, 126464, 50257):
        whole = [(1, N, V) for N in (1024, 1025, 4096, 65536, 2**31 // V + 1)]
        few = [(1, N, V) for N in (1, 2, 3, 16, 100, 200)]
        batches = [(B, L, 126464) for B, L in ((2, 1024), (3, 1024), (16, 1024), (2, 1001), (3, 997))]
        for shapes in (whole, few, batches):
            first, *rest = specimens_of(functools.partial(launches.token_nll, s, torch.bfloat16) for s in shapes)
            assert all(other == first for other in rest), shapes


@check
def kernels_do_not_depend_on_the_length_of_a_slice():
    """All rows but the last of each sequence: the distance of two sequences is a multiple of 16, or not."""
    but_the_last = functools.partial(torch.Tensor.narrow, dim=1, start=0)
    for call in (launches.token_nll, launches.row_stats, launches.divergence):
        for V in (126464, 50257):
            calls = (
                functools.partial(call, (4, L, V), torch.bfloat16, view=functools.partial(but_the_last, length=L - 1))
                for L in LENGTHS
            )
            first, *rest = specimens_of(calls)
            assert all(other == first for other in rest), (call.__name__, V)


def corruption_of(case, B, L):
    """Return a call of a corruption routine with empty tensors, and seeds of the rows."""
    with torch.device("cpu"):
        ids, *others = batch(B, L)
        inputs = case.inputs(ids)
    ids, loss_mask, seeds = (torch.empty_like(t, device="cuda") for t in (ids, *others))
    inputs = {name: torch.empty_like(t, device="cuda") for name, t in inputs.items()}
    return functools.partial(case.launch, ids, loss_mask, **inputs, seeds=seeds)


def corrupt(case, B, L):
    corruption_of(case, B, L)()


@check
def corruption_does_not_depend_on_the_number_of_rows():
    for name, case in ROUTINES.items():
        first, *rest = specimens_of(functools.partial(corrupt, case, B, 4096) for B in (2, 7, 16))
        assert all(other == first for other in rest), name
    for routine in (corruption.corrupt_uniform, corruption.corrupt_blockwise, corruption.corrupt_all_masked):
        first, *rest = specimens_of(functools.partial(launches.corrupt, routine, B, 4096) for B in (1, 2, 7, 16, 1000))
        assert all(other == first for other in rest), routine
    first, *rest = specimens_of(
        functools.partial(launches.topk, N, 64, k=k) for N, k in ((1, 1), (2, 3), (16, 16), (99, 64))
    )
    assert all(other == first for other in rest)


LENGTHS = (992, 993, 1000, 1008, 1023, 1024, 1025, 1040, 1056)  # multiples of 16, of 8, and others
ANY_LENGTH = {  # (function of the length, kernels for these lengths): a whole row is sorted in a tile of a power of two
    **{
        name: (functools.partial(corrupt, case, 8), 2 if case.number and case.columns(1000) == 1 else 1)
        for name, case in ROUTINES.items()
    },
    "the seed of a call": (lambda L: launches.corrupt(corruption.corrupt_uniform, 8, L), 1),
    "exact, keys in memory": (lambda L: launches.with_level(corruption.corrupt_uniform, 8, 8 * L, exact=True), 1),
    "complementary": (lambda L: launches.complement(8, L), 1),
    "sample_level": (lambda L: launches.levels(L), 1),
    "gumbel_topk": (lambda L: launches.topk(8, L), 2),
    "gumbel_topk, draws given": (lambda L: launches.topk(8, L, given=True), 2),
    "gumbel_topk, keys in memory": (lambda L: launches.topk(8, 8 * L), 1),
}


@check
@on_each("sm_90", "gfx942")
def a_length_is_no_kernel_of_its_own(gpu):
    """A new length must need no new kernel, because compiling it would stall a training with variable lengths."""
    for name, (call, most) in ANY_LENGTH.items():
        before = len(gpu.specimens)
        for L in LENGTHS:
            call(L)
        assert len(gpu.specimens) - before == most, (name, len(gpu.specimens) - before)


def needs_nothing_new(gpu, step, *captured):
    """Warm up with ``step()``, then call each of ``captured``, or ``step`` again, under capture; no kernel may be new.

    A new kernel has to be loaded, which makes the capture of a CUDA graph fail.
    """
    before = len(gpu.specimens)
    step()
    warm = len(gpu.specimens)
    with gpu.capturing():
        for again in captured or (step,):
            again()
    assert warm > before, "the warm-up launched nothing"
    new = [(s.kernel, [name for name, kind in s.types.items() if kind.startswith("*")]) for s in gpu.specimens[warm:]]
    assert not new, new


def beginning_at(begin, make, *shape, **options):
    """Return ``make(*shape)`` as a view that begins at this element of its memory."""
    return make(math.prod(shape) + begin, **options)[begin:].view(shape)


def call_ops(kind, rows, begin, V=32000, **options):
    """Call each op on logits of a kind, forward and backward; per-row tensors begin at this element of their memory."""
    given = functools.partial(beginning_at, begin)
    r = Rows(*(given(torch.zeros, *rows, dtype=d) for d in (torch.int64, torch.bool, torch.float32, torch.float32)))
    for case in (case for case in FIRST_OPS if kind in case.kinds):
        leaf = torch.empty(*rows, V if kind == "stored" else 512, dtype=torch.bfloat16, requires_grad=True)
        head = torch.empty(V, 512, dtype=torch.bfloat16, requires_grad=True)
        values = case.values(case(leaf if kind == "stored" else ops.LinearLogits(leaf, head, **options), r))
        if values:
            torch.autograd.grad(values, leaf, [given(torch.rand, *t.shape) for t in values])


@check
@on_each("sm_90", "gfx942")
def capture_from_logits_needs_no_new_kernel(gpu):
    for columns in (32000, V):  # rows are whole, or split over programs
        needs_nothing_new(gpu, *(functools.partial(call_ops, "stored", (2, 256), n, columns) for n in range(3)))


@check
@on_each("sm_90", "gfx942")
def capture_of_corruption_needs_no_new_kernel(gpu):
    needs_nothing_new(gpu, lambda: launches.corrupt(corruption.corrupt_blockwise, 8, 4096, block_size=32))
    needs_nothing_new(gpu, lambda: launches.corrupt(corruption.corrupt_uniform, 8, 4096))
    needs_nothing_new(gpu, lambda: launches.topk(8, 4096))


@check
@on_each("sm_90", "gfx942")
def capture_from_hidden_states_needs_no_new_kernel(gpu):
    needs_nothing_new(gpu, *(functools.partial(call_ops, "head", (8192,), begin) for begin in range(3)))


@check
@on_each("sm_90", "gfx942")
def capture_in_odd_chunks_needs_no_new_kernel(gpu):
    """The warm-up projects only the active rows, in one chunk. Under capture, all rows need a second chunk."""
    gpu.active_share = 0.25
    needs_nothing_new(gpu, *(functools.partial(call_ops, "head", (1024,), n, chunk_size=1001) for n in range(3)))


@check
@on_each("sm_90", "gfx942")
def corruption_is_one_launch_and_nothing_else(gpu):
    for name, case in ROUTINES.items():
        gpu.launches.clear()
        call = corruption_of(case, 8, 512)
        with Launches() as operations:
            call()
        assert (len(gpu.launches), operations.names) == (1, []) or not case.one_launch, (name, operations.names)


@check
@on_each("sm_90", "gfx942")
def no_gradient_is_kept_that_autograd_would_copy(gpu):
    logits = torch.empty(2, 8, 1000, dtype=torch.bfloat16, requires_grad=True)
    loss = ops.weighted_nll(logits, torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, 8)).loss
    with Launches() as operations:
        loss.backward()
    assert logits.grad is not None
    assert not {"clone", "copy_"} & set(operations.names), operations.names
    assert gpu.launches[-1].arguments["logits_ptr"].nbytes == logits.nbytes


@check
@on_each("sm_90", "gfx942")
def products_are_counted(gpu):
    N, V, D, chunks = 1024, 4096, 256, 4
    hidden = torch.empty(N, D, dtype=torch.bfloat16, requires_grad=True)
    head = torch.empty(V, D, dtype=torch.bfloat16, requires_grad=True)
    targets, weights = torch.zeros(N, dtype=torch.int64), torch.ones(N)
    counter = FlopCounterMode(display=False)
    with counter:
        options = {"num_active": N, "chunk_size": N // chunks}
        ops.weighted_linear_nll(hidden, head, targets, weights, **options).loss.backward()
    assert counter.get_total_flops() == 3 * 2 * N * V * D
    assert head.grad.dtype == head.dtype


def far_apart():
    """Yield calls for every kernel in which the offset of a row exceeds 32 bits."""
    large, many = (2, 65536, 50257), (1, 2**17, 50257)
    for kind, case in [(kind, case) for kind, case in OF_EVERY_KIND if case in FIRST_OPS]:
        of_kind = functools.partial(launches.of_op, case, kind, dtype=torch.bfloat16)
        if kind == "stored":
            yield functools.partial(of_kind, large)
            yield functools.partial(of_kind, (1, 1000, 3000001))
            yield functools.partial(of_kind, (4, 65537, 50257), view=lambda t: t[:, 1:])  # two strides of rows
        else:
            yield functools.partial(of_kind, many, chunk_size=2**17)
            yield functools.partial(of_kind, (1, 2**20, 4096), chunk_size=2**20)
    yield functools.partial(launches.row_stats, (1, 2**18, 64), torch.bfloat16, K=2**14)
    yield functools.partial(launches.from_hidden, many, torch.bfloat16, chunk_size=2**17)
    yield functools.partial(launches.divergence, (4, 65537, 50257), torch.bfloat16, view=lambda t: t[:, 1:])
    yield functools.partial(launches.masked_diffusion, large, torch.bfloat16)
    for kind in ("kl", "l1"):
        yield functools.partial(launches.divergence, large, torch.bfloat16, kind=kind)
        yield functools.partial(launches.divergence_from_hidden, many, torch.bfloat16, kind=kind, chunk_size=2**17)
    of_columns = functools.partial(launches.divergence_of_a_draft_vocabulary, kind="kl")
    yield functools.partial(of_columns, many, torch.bfloat16, chunk_size=2**17)
    yield functools.partial(launches.corrupt, corruption.corrupt_blockwise, 2**19, 4160, block_size=32)
    yield functools.partial(launches.corrupt, corruption.corrupt_blockwise, 2**19, 8192)
    yield functools.partial(launches.corrupt, corruption.corrupt_uniform, 2**19, 4160)
    yield functools.partial(launches.padded, corruption.corrupt_uniform, 2**19, 4160, segments=True)
    yield functools.partial(launches.mix, 2**19, 4160)
    yield functools.partial(launches.with_level, corruption.corrupt_uniform, 2**19, 4160, exact=True)
    yield functools.partial(launches.with_level, corruption.corrupt_uniform, 2**15, 131072, exact=True)
    yield functools.partial(launches.mix, 2**19, 64, wide=8192)
    for exact in (False, True):
        yield functools.partial(launches.with_level, corruption.corrupt_uniform, 2**19, 64, wide=8192, exact=exact)
    yield functools.partial(launches.corrupt, corruption.corrupt_uniform, 4160, 2**19, view=torch.t)
    yield functools.partial(launches.complement, 2**19, 4160)
    yield functools.partial(launches.levels, 2**20)
    yield functools.partial(launches.topk, 2**20, 4000)
    yield functools.partial(launches.topk, 2**19, 8000)
    yield functools.partial(launches.topk, 4000, 2**20, view=torch.t)


@check
@on_each("sm_90")
def offsets_past_32_bits_are_counted_in_64(gpu):
    for call in far_apart():
        call()
    everything = {s.kernel for s in launches.specimens("sm_90").values()}
    assert everything == launched(gpu), everything ^ launched(gpu)
    check_offsets(gpu.launches)


def check_offsets(launches):
    def seen(launch):
        return launch.specimen.key, launch.grid, *(v for v in launch.arguments.values() if type(v) is int)

    for launch in {seen(launch): launch for launch in launches}.values():
        narrow = narrow_offsets(launch.specimen.compile().asm["ttir"], launch.arguments, launch.grid)
        assert not narrow, "\n".join([f"{launch.specimen.kernel}: an offset exceeds 32 bits", *narrow])


@triton.jit
def _strided(x_ptr, stride_n, V, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0)
    if WIDE:
        n = n.to(tl.int64)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        tl.store(x_ptr + n * stride_n + v, 0.0, mask=v < V)


@check
@on_each("sm_90")
def an_offset_in_32_bits_is_found(gpu):
    x = torch.empty(70000, 40000)
    for rows, wide, found in ((50000, False, False), (70000, False, True), (70000, True, False)):
        _strided[(rows,)](x, x.stride(0), x.shape[1], WIDE=wide, BLOCK=128)
        launch = gpu.launches[-1]
        narrow = narrow_offsets(launch.specimen.compile().asm["ttir"], launch.arguments, launch.grid)
        assert len(narrow) == found, (rows, wide, narrow)
        assert all("tl.store(x_ptr + n * stride_n + v" in line for line in narrow)


def check_kernels(names):
    """Check the offsets of these kernels, and that none spills for bfloat16, or for what it takes instead of floats."""
    with MockGPU("sm_90") as gpu, torch.device("cuda"):
        for call in far_apart():
            call()
    missing = {*names} - {f"_{launch.specimen.kernel}" for launch in gpu.launches}
    assert not missing, f"no call of far_apart launches {', '.join(sorted(missing))}"
    check_offsets([launch for launch in gpu.launches if f"_{launch.specimen.kernel}" in names])
    for name, specimen in launches.specimens("sm_90").items():
        if f"_{specimen.kernel}" in names and specimen.dtype not in ("fp16", "fp32", "fp64"):
            assert inspect_kernels.report(name, specimen, "sm_90", roofline=False).spills == 0, f"{name} spills"
    print("no offset past 32 bits, no spilled register")


def main(out):
    """Run all checks and write name -> traceback, or an empty string for a check that passed."""
    results = {}
    for name, function in CHECKS.items():
        start = time.perf_counter()
        try:
            function()
            results[name] = ""
        except (Exception, pytest.fail.Exception):
            results[name] = traceback.format_exc()
        print(f"{name}: {time.perf_counter() - start:.2f} s {'' if results[name] == '' else 'FAILED'}", flush=True)
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    if sys.argv[1].startswith("_"):
        check_kernels(sys.argv[1:])
    else:
        main(sys.argv[1])
