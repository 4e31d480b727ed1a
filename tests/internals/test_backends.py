"""The backends: threads and blocks of the torch path, its memory, the rows that it reads, and scores of samples."""

import contextlib
import functools
import math
import multiprocessing
import os
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import reference
from benchmarks.measure import peak_memory
from dllm_kernels import linear_sample, soft_embedding
from dllm_kernels.backends.torch import _blocks, _sample, _workers
from dllm_kernels.backends.torch._workers import run_jobs
from dllm_kernels.corruption import _noise
from dllm_kernels.corruption._noise import Noise
from dllm_kernels.losses import MDLMCrossEntropyLoss
from dllm_kernels.ops import (
    LinearLogits,
    divergence,
    linear_token_nll,
    row_stats,
    token_log_probs,
    token_nll,
    weighted_linear_nll,
    weighted_nll,
)
from dllm_kernels.ops.linear_sample import largest_of
from dllm_kernels.rows import _chunks, _primitives
from dllm_kernels.rows._transform import NO_TRANSFORM
from tests.conftest import DEVICE
from tests.ops.test_token_nll import inputs
from tests.support.memory import copied_by_products
from tests.support.parity import small_blocks, value_and_grads

GRAIN = 2048  # torch runs an operation on fewer numbers than this on one core


@pytest.fixture(autouse=True)
def _two_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class LargeOperations(TorchDispatchMode):
    """Record the names of the operations on many numbers in the thread that enters it, except for views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in (*args, out) if isinstance(t, torch.Tensor)]
        makes = not func.is_view and "empty" not in func.__name__ and "detach" not in func.__name__
        if makes and max((t.numel() for t in tensors), default=0) > GRAIN:
            self.names.append(func.__name__)
        return out


@pytest.mark.everyday(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_callers_thread_starts_no_operation_that_waits_for_all_cores(share, dtype):
    """A busy core makes a chain of such operations ten times slower. Only lookups of one entry per row are allowed."""
    logits = torch.randn(1, 160, 32000, dtype=dtype).requires_grad_()
    targets, weights = torch.randint(32000, (1, 160)), torch.rand(1, 160) + 0.1
    weights[torch.rand(1, 160) > share] = 0
    with LargeOperations() as seen:
        loss = weighted_nll(logits, targets, weights, backend="torch").loss
        loss.backward()
    allowed = {"index.Tensor", "index_put_.default", "_index_put_impl_.default"}  # one entry per row
    assert set(seen.names) <= allowed
    expected = value_and_grads(lambda x: reference.weighted_nll(x, targets, weights), [logits], torch.tensor(1.0))
    torch.testing.assert_close(loss.detach(), expected[0])
    torch.testing.assert_close(logits.grad, expected[1])


def test_the_rows_of_a_chunk_are_distributed_too():
    hidden, head = torch.randn(160, 4).requires_grad_(), torch.randn(32000, 4).requires_grad_()
    targets, weights = torch.randint(32000, (160,)), torch.rand(160) + 0.1
    with LargeOperations() as seen:
        weighted_linear_nll(hidden, head, targets, weights, backend="torch").loss.backward()
    products = {"mm.out", "mm.default", "addmm_.default", "t.default"}
    assert set(seen.names) - products <= {"index.Tensor", "index_put_.default", "index_fill_.int_Scalar"}


def test_every_job_runs_once_on_a_thread_of_one_core():
    seen, resources = [], ["a", "b", "c"]
    jobs = [lambda resource, i=i: seen.append((i, resource, torch.get_num_threads())) for i in range(100)]
    run_jobs(jobs, resources)
    assert sorted(i for i, _, _ in seen) == list(range(100))
    assert {cores for _, _, cores in seen} == {1}
    assert {resource for _, resource, _ in seen} <= set(resources)


def test_with_a_single_resource_the_caller_runs_the_jobs():
    seen = []
    run_jobs([lambda resource: seen.append((resource, threading.get_ident()))] * 3, ["mine"])
    assert seen == [("mine", threading.get_ident())] * 3


def test_the_thread_count_of_other_threads_is_unchanged():
    many = threading.active_count() + 1  # more threads than exist: all start anew
    run_jobs([lambda _: None] * 9, [None] * many)
    assert torch.get_num_threads() == 2
    seen = []
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert seen == [2]


def test_threads_that_cannot_all_start_end(monkeypatch):
    """As in a container that limits their number."""
    before, start = set(threading.enumerate()), threading.Thread.start
    first = iter([start])
    monkeypatch.setattr(threading.Thread, "start", lambda thread: next(first)(thread))
    with pytest.raises(StopIteration):
        _workers._start(2)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def test_an_error_in_a_job_is_raised_and_stops_the_rest():
    done = []

    def job(i):
        if i == 0:
            raise ValueError("the first one")
        done.append(i)

    with pytest.raises(ValueError, match="the first one"):
        run_jobs([lambda _, i=i: job(i) for i in range(10_000)], [None, None])
    assert len(done) < 10_000
    run_jobs([lambda _: done.clear()], [None, None])  # the threads remain usable for the next caller
    assert done == []


@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_any_grad_mode(grad_mode, monkeypatch):
    small_blocks(monkeypatch, threads=2)
    torch.manual_seed(0)
    with grad_mode():
        logits, targets = torch.randn(4, 11), torch.randint(11, (4,))
        nll = token_nll(logits.requires_grad_(grad_mode is torch.enable_grad), targets, backend="torch").nll
        torch.testing.assert_close(nll, reference.token_nll(logits, targets))


def test_callers_in_several_threads_at_once(monkeypatch):
    small_blocks(monkeypatch, threads=2)
    torch.manual_seed(0)
    cases = [(torch.randn(50, 11), torch.randint(11, (50,))) for _ in range(4)]
    results = [None] * 4

    def call(i):
        results[i] = value_and_grads(
            lambda x: token_nll(x, cases[i][1], backend="torch").nll, [cases[i][0]], cases[i][0][:, 0]
        )

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (logits, targets), got in zip(cases, results, strict=True):
        expected = value_and_grads(lambda x, y=targets: reference.token_nll(x, y), [logits], logits[:, 0])
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)


def _sum_in_a_child(numbers, answer):
    found = []
    run_jobs([lambda _, n=n: found.append(n) for n in numbers], [None, None])
    answer.put(sum(found))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_starts_new_threads():
    """In a DataLoader worker, for example, the parent's threads do not exist, and waiting for them would hang."""
    run_jobs([lambda _: None] * 3, [None, None])
    fork = multiprocessing.get_context("fork")
    answer = fork.Queue()
    child = fork.Process(target=_sum_in_a_child, args=(range(10), answer))
    child.start()
    child.join(60)
    alive = child.is_alive()
    child.kill()
    assert not alive
    assert answer.get(timeout=10) == 45


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no thread is bound to a core here")
def test_a_caller_bound_to_one_core_starts_no_threads():
    """The threads would be bound to the same core."""
    cores = os.sched_getaffinity(0)
    if len(cores) > 1:
        assert _workers.num_threads() == 2
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert _workers.num_threads() == 1
    finally:
        os.sched_setaffinity(0, cores)


def test_num_threads_threads(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64), raising=False)
    for cores in (1, 3, 40):
        torch.set_num_threads(cores)
        assert _workers.num_threads() == min(cores, _workers.MAX_THREADS)
    monkeypatch.setattr(_workers, "HAS_OPENMP", False)
    assert _workers.num_threads() == 1


@pytest.mark.parametrize("threads", [1, 2, 8, 16])
@pytest.mark.parametrize("V", [1, 1000, 262_144])
def test_blocks(V, threads, monkeypatch):
    """All threads together work on a small part of the rows at a time, but each thread has enough work."""
    torch.set_num_threads(threads)
    monkeypatch.setattr(_blocks, "num_threads", lambda: threads)
    for rows in (1, 100, 10_000, 1_000_000):
        team, size = _blocks.partition(rows, V, torch.float32, on_cpu=True)
        assert team in (1, threads)
        assert _blocks.partition(rows, V, torch.float32, True, 3) == _blocks.partition(rows, 3 * V, torch.float32, True)
        assert size >= 1
        at_work, whole = team * size * V * 4, rows * V * 4
        smallest = max(_blocks.BLOCK_BYTES // 4, V * 4)
        assert at_work <= max(whole / 4, team * smallest, _blocks.COMMON_BLOCK_BYTES)
        assert size * V * 4 <= max(_blocks.COMMON_BLOCK_BYTES, V * 4)
        if team > 1:
            assert whole > _blocks.COMMON_BLOCK_BYTES


def test_a_row_larger_than_a_block_is_a_block(monkeypatch):
    monkeypatch.setattr(_blocks, "num_threads", lambda: 1)
    assert _blocks.partition(3, _blocks.COMMON_BLOCK_BYTES, torch.float32, on_cpu=True) == (1, 1)
    assert _blocks.partition(3, _blocks.DEVICE_BLOCK_BYTES, torch.float32, on_cpu=False) == (1, 1)


def test_blocks_off_the_cpu_have_at_least_256_mib_or_all_rows():
    for V in (1, 1000, 126_464, 1 << 28):
        for rows in (1, 8, 10_000):
            threads, size = _blocks.partition(rows, V, torch.float32, on_cpu=False)
            assert threads == 1
            assert size == rows or (256 << 20) <= size * V * 4 < (256 << 20) + V * 4


def test_a_row_of_minus_infinity_adds_nothing_as_a_shard(monkeypatch):
    """Its maximum is finite and its sum is 0, so that other shards of the row can be added."""
    small_blocks(monkeypatch, threads=2)
    logits = torch.full((1, 3, 5), -math.inf)
    targets = torch.zeros(3, dtype=torch.int64)
    nll, row_max, log_sum, correct, _ = _primitives.row_primitives(triton=False).nll(logits, targets, with_correct=True)
    assert nll.isnan().all()
    assert row_max.isfinite().all()
    assert (log_sum == -math.inf).all()
    assert not correct.any()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_between_the_listed_ones_are_zeros(dtype, size):
    """This includes rows before and after the blocks, in memory that held NaN."""
    rows, values = torch.tensor([1, 2, 5, 6, 9]), torch.arange(1.0, 16.0).view(5, 3)
    out = torch.full((2, 6, 3), math.nan, dtype=dtype)
    index = _blocks.RowIndex.of(torch.zeros(12).index_fill(0, rows, 1), 0)
    target = _blocks.with_zeros_between(out, index, size)
    assert isinstance(target, _blocks.RowScatter)
    (buffers,) = _blocks.buffers_for(1, size, out, narrow=True, padded=True)
    for block, part in zip(target.blocks(size), values.split(size), strict=True):
        target.store(block, target.output_buffer(block, buffers.wide[: len(part)]).copy_(part), buffers)
    assert torch.equal(out.view(12, 3), torch.zeros(12, 3).index_copy_(0, rows, values).to(dtype))


# Memory


ROWS, WIDE, NARROW, CHUNK = 1024, 16384, 8, 512


def leaf(*shape, dtype):
    return torch.randn(shape).to(dtype).requires_grad_()


def blocks(rows, dtype=torch.float32):
    """Return the bytes of the blocks of all threads; those of 16 bits are also gathered."""
    threads, size = _blocks.partition(rows, WIDE, torch.float32, True)
    return threads * size * WIDE * (4 if dtype == torch.float32 else 6)


# Each returns a step, the least and the most bytes at a time, and a number that ``most`` must not reach.


def one_gradient(dtype, inplace=False):
    """Neither a float32 copy nor a saved softmax; with the gradient in place, nothing of that size."""
    logits, targets, active = leaf(ROWS, WIDE, dtype=dtype), torch.randint(0, WIDE, (ROWS,)), torch.arange(ROWS) % 2

    def step(_):
        token_nll(logits, targets, active=active, inplace_backward=inplace).nll.sum().backward()
        logits.grad = None

    more = blocks(ROWS, dtype) + 256 * ROWS
    return step, 0, logits.nbytes * (not inplace) + more, logits.nbytes * (1.5 - inplace)


def one_gradient_of_statistics(dtype):
    logits, ids = leaf(ROWS, WIDE, dtype=dtype), torch.randint(0, WIDE, (ROWS, 2))
    mix = torch.rand(2, ROWS)

    def step(_):
        out = [t for t in row_stats(logits, ids, entropy=True, mix=(*mix,), backend="torch") if t is not None]
        torch.autograd.backward(out, [torch.ones_like(t) for t in out])
        logits.grad = None

    return step, 0, logits.nbytes + 5 * blocks(ROWS, dtype), 2 * logits.nbytes


def one_chunk(dtype, trains_head=True, of_rows=False):
    """Neither ``[N, V]`` nor a float32 copy of a chunk exists at any time, forward or backward."""
    hidden, weight, bias = leaf(ROWS, NARROW, dtype=dtype), leaf(WIDE, NARROW, dtype=dtype), leaf(WIDE, dtype=dtype)
    weight, bias = (t.requires_grad_(trains_head) for t in (weight, bias))
    targets, weights = torch.randint(0, WIDE, (ROWS,)), (torch.arange(ROWS) % 3 != 0).float()

    def step(_):
        options = {"bias": bias, "chunk_size": CHUNK}
        if of_rows:
            linear_token_nll(hidden, weight, targets, active=weights != 0, **options).nll.sum().backward()
        else:
            weighted_linear_nll(hidden, weight, targets, weights, **options).loss.backward()
        hidden.grad = weight.grad = bias.grad = None

    logits = CHUNK * WIDE * dtype.itemsize
    grads = 2 * ROWS * NARROW * 4 + (WIDE * NARROW + WIDE) * (4 + 2 * dtype.itemsize) * trains_head
    slab = 4 * CHUNK * _chunks.SLAB  # of the gradient, in float32 for the product that sums grad_weight
    more = grads + max(blocks(CHUNK), slab if dtype != torch.float32 else 0) + 32 * ROWS
    assert more < CHUNK * WIDE * 4  # so a float32 copy of the chunk would exceed the bound
    return step, logits, logits + copied_by_products(CHUNK, WIDE, NARROW, dtype) + more, None


def one_chunk_of_a_mean_embedding(dtype, softcap=None):
    hidden, weight = (leaf(n, NARROW, dtype=dtype).detach() for n in (ROWS, WIDE))
    ids = torch.randint(0, WIDE, (ROWS,))

    def step(_):
        soft_embedding(hidden, weight, weight, bump=2.0, bump_ids=ids, softcap=softcap, chunk_size=CHUNK)

    logits, more = CHUNK * WIDE * dtype.itemsize, 2 * blocks(CHUNK) + 200 * ROWS
    assert more < CHUNK * WIDE * 4
    out = ROWS * NARROW * dtype.itemsize
    return step, logits, logits + out + copied_by_products(CHUNK, WIDE, NARROW, dtype) + more, None


def two_chunks_of_samples(dtype, return_top=None):
    hidden, weight = (leaf(n, NARROW, dtype=torch.float32).detach() for n in (ROWS, WIDE))
    logits = CHUNK * WIDE * 4

    def step(_):
        linear_sample(hidden, weight, seeds=torch.tensor(1), return_top=return_top, chunk_size=CHUNK)

    return step, logits, 2 * logits, None


PEAKS = {
    "one gradient": one_gradient,
    "in place": functools.partial(one_gradient, inplace=True),
    "statistics": one_gradient_of_statistics,
    "one chunk": one_chunk,
    "one chunk, frozen": functools.partial(one_chunk, trains_head=False),
    "one chunk of rows": functools.partial(one_chunk, of_rows=True),
    "mean embedding": one_chunk_of_a_mean_embedding,
    "mean embedding, capped": functools.partial(one_chunk_of_a_mean_embedding, softcap=5.0),
    "samples": two_chunks_of_samples,
    "samples with the most likely ids": functools.partial(two_chunks_of_samples, return_top=4),
}


@pytest.mark.everyday(5)
@pytest.mark.skipif(DEVICE != "cpu", reason="measures the CPU's allocator")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", PEAKS)
def test_peak_memory(name, dtype):
    step, least, most, limit = PEAKS[name](dtype)
    step(0)
    assert least <= peak_memory(step, "cpu") <= most
    assert limit is None or most < limit


@pytest.mark.usefixtures("poisoned_memory")
def test_the_forward_pass_reads_only_active_rows(monkeypatch):
    """This tests the torch path. For Triton's kernels, only NaN in inactive rows tests it."""
    logits, targets = inputs((2, 4))
    seen = []
    load = _blocks.RowGather.load
    monkeypatch.setattr(_blocks.RowGather, "load", lambda *args: seen.append(load(*args).clone()) or load(*args))
    active = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1]], device=DEVICE)
    targets[0, [1, 2]], targets[1, 3] = torch.tensor([1, -100], device=DEVICE), 2
    token_nll(logits, targets, active=active, with_correct=True, backend="torch")
    assert torch.equal(torch.cat(seen), logits.flatten(0, 1)[[1, 7]])


# Samples


@pytest.mark.usefixtures("poisoned_memory")
def test_columns_excluded_by_bounds_on_a_cpu_do_not_win():
    """Computing all scores of the row, as other devices do, gives the same largest score, to the bit."""
    spreads = torch.tensor([0.0, 1.0, 5.0, 40.0, 1e4]).repeat(40)
    x = torch.randn(200, 300) * spreads[:, None]
    noise = Noise(torch.arange(200), torch.arange(200) % 7, 5)
    score, ids = _sample.sample(x, NO_TRANSFORM, noise)
    every = _sample._scores(x.double(), _noise.high(noise, 300), _noise.low(noise, 300))
    assert every.dtype == torch.float64
    assert torch.equal(ids, every.argmax(1))
    assert torch.equal(score, every.amax(1))


@pytest.mark.usefixtures("poisoned_memory")
def test_the_kernel_finds_the_same_scores():
    """The scores are equal to the bit: the kernel's largest score holds all 48 bits of a uniform."""
    kernel = pytest.importorskip("dllm_kernels.backends.triton.sample")
    torch.manual_seed(0)
    x = (torch.randn(4, 300) * torch.tensor([0.0, 1.0, 5.0, 40.0])[:, None]).to(DEVICE)
    noise = Noise(torch.arange(4, device=DEVICE) - 2, torch.arange(4, device=DEVICE) * 2, 5)
    every = _sample._scores(x.double(), _noise.high(noise, 300), _noise.low(noise, 300))
    score, ids = kernel.sample(x, NO_TRANSFORM, noise)
    assert torch.equal(ids, every.argmax(1))
    assert torch.equal(score, every.amax(1))


def test_the_largest_log_probs_are_computed_on_the_device_of_the_rows(monkeypatch):
    """Kernels are launched on the current device, which must be that of the tensors, although this is no custom op."""
    kernels = pytest.importorskip("dllm_kernels.backends.triton.row_stats")
    guarded, launched, forward = [], [], kernels.forward

    @contextlib.contextmanager
    def device_of(t):
        guarded.append(t.device)
        yield
        guarded.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(kernels, "forward", lambda *args: launched.append(guarded[:]) or forward(*args))
    monkeypatch.setenv("DLLM_KERNELS_BACKEND", "triton")
    hidden, weight = torch.randn(3, 8, device=DEVICE), torch.randn(37, 8, device=DEVICE)
    largest_of(LinearLogits(hidden, weight), 2, log_probs=True)
    assert launched == [[hidden.device]]


# Small calls

N, V = 9, 37


class Counted(TorchDispatchMode):
    """Count the operations that run under it."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(call):
    call()  # work that is done only once
    with Counted() as seen:
        call()
    return seen.count


def rows(dtype):
    """Draw logits with every kind of row, ids and active rows; NaN only in inactive rows."""
    torch.manual_seed(0)
    logits, ids = (3 * torch.randn(N, V, device="cpu")).to(dtype), torch.randint(V, (N,), device="cpu")
    active = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1, 0], device="cpu")
    logits[2] = math.nan
    logits[3, 5:9] = logits[3].max()
    ids[3] = 6
    logits[4, ::2] = -math.inf
    ids[4] = 1
    return logits, ids, active


def of_one_row(row, logits=None, target=None):
    """Return the inputs with other logits, or another id, in one row."""

    def changed(x, ids, active):
        at = torch.tensor([row], device="cpu")
        x = x if logits is None else x.index_fill(0, at, logits)
        return x, ids if target is None else ids.index_fill(0, at, target), active

    return changed


SPECIAL = {
    "nothing": lambda x, ids, active: (x, ids, active),
    "all active": lambda x, ids, active: (x.nan_to_num(0, neginf=-1.0), ids, torch.ones_like(active)),
    "impossible target": of_one_row(1, target=V),
    "no target": of_one_row(1, target=-100),
    "NaN": of_one_row(1, math.nan),
    "minus infinity": of_one_row(6, -math.inf),
    "improbable target": of_one_row(4, target=0),
    "nothing active": lambda x, ids, active: (x, ids, torch.zeros_like(active)),
    "columns apart": lambda x, ids, active: (x.t().contiguous().t(), ids, active),
}


def run_nll(x, ids, active):
    out = token_nll(x, ids, active=active, with_lse=True, backend="torch")
    return out.nll, out.lse


def run_weighted(x, ids, active):
    out = weighted_nll(x, ids, active * 0.3, backend="torch")
    return out.loss, out.nll


def run_weighted_with_lse(x, ids, active):
    out = weighted_nll(x, ids, active * 0.3, with_lse=True, backend="torch")
    return out.loss, out.nll, out.lse


def run_stats(x, ids, active):
    return row_stats(x, torch.stack([ids, ids], -1), entropy=True, active=active, backend="torch")[:3]


def run_log_probs(x, ids, active):
    return token_log_probs(x, ids, active=active, backend="torch")[:1]


def run_every_token(x, ids, _):
    return token_log_probs(x.nan_to_num(0), ids, with_entropy=True, backend="torch")


def run_loss(x, ids, active):
    loss, p_mask = MDLMCrossEntropyLoss(backend="torch"), torch.full((1, N), 0.3, device="cpu")
    out = loss(x[None], ids[None], active[None], p_mask, torch.ones_like(active)[None], num_diffusion_tokens=7)
    return out.weight_sum, out.total_loss  # total_loss, the second one, has an upstream gradient of 2


OPS = (run_nll, run_weighted, run_weighted_with_lse, run_stats, run_log_probs, run_every_token, run_loss)


def outputs(op, x, *others):
    """Return all outputs, and the gradient of a weighted sum of them."""
    x = x.detach().requires_grad_()
    found = op(x, *others)
    total = sum((k + 1) * t.sum() for k, t in enumerate(found) if t.requires_grad)
    return [*(t.detach() for t in found), *torch.autograd.grad(total, x)]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.covering(2, most=2)
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_one_block_gives_the_bits_of_one_row_per_block(op, dtype, special, monkeypatch):
    inputs = SPECIAL[special](*rows(dtype))
    one_block = outputs(op, *inputs)
    small_blocks(monkeypatch)
    for got, expected in zip(one_block, outputs(op, *inputs), strict=True):
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("output", ["lse", "entropy"])
def test_a_row_without_an_id_or_a_gradient_may_have_any_value(output, value):
    logits, ids = torch.randn(3, V, device="cpu"), torch.tensor([4, -100, 2], device="cpu")
    logits[1] = value
    logits.requires_grad_()
    found = getattr(row_stats(logits, ids, entropy=True, backend="torch"), output)
    (grad,) = torch.autograd.grad(found[[0, 2]].sum(), logits)
    assert (grad[1] == 0).all()
    assert grad.isfinite().all()
    assert grad[[0, 2]].count_nonzero() == 2 * V


@pytest.mark.parametrize("op", [run_nll, run_loss])
def test_backward_of_a_small_call_rejects_logits_changed_in_place(op):
    logits, ids, active = rows(torch.float32)
    x = logits.requires_grad_() * 1.0
    found = op(x, ids, active)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(t.sum() for t in found).backward()


def test_operations_of_small_calls():
    """Limits are slightly above the current numbers. Plain PyTorch needs 2, some 20, and some 40 for a masked loss."""
    logits, ids = torch.randn(1, 1, 100, device="cpu"), torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    assert operations(lambda: token_log_probs(logits, ids, backend="torch")) <= 20
    leaves = [torch.randn(s, device="cpu", requires_grad=True) for s in ((3, 4), (100, 4), (100,))]
    targets, weights = torch.zeros(3, dtype=torch.int64, device="cpu"), torch.ones(3, device="cpu")
    with torch.no_grad():  # as without requires_grad
        hidden, weight, bias = leaves
        count = operations(lambda: weighted_linear_nll(hidden, weight, targets, weights, bias=bias, backend="torch"))
    assert count <= 51
    teacher = torch.randn(1, 1, 100, device="cpu")
    assert operations(lambda: divergence(logits, teacher, kind="jsd", backend="torch")) <= 89  # finite at once

    def both():
        out = token_log_probs(x, ids, with_entropy=True, backend="torch")
        (out.log_probs + out.entropy).sum().backward()

    x = logits.clone().requires_grad_()
    assert operations(both) <= 97
    logits, ids = torch.randn(2, 64, 1000, device="cpu", requires_grad=True), torch.zeros(2, 64, dtype=torch.int64)
    ids[0, 0] = -100  # found to be valid without an operation
    noise, p_mask = torch.arange(128).view(2, 64) % 2 == 0, torch.full((2, 64), 0.5)
    loss = MDLMCrossEntropyLoss(backend="torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        count = operations(lambda: loss(logits, ids, noise, p_mask, torch.ones_like(noise)).total_loss.backward())
    finally:
        torch.set_num_threads(before)
    assert count <= 70
