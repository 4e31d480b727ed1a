"""Distribution of blocks among single-core threads: the thread of each block, and effects on the process."""

import math
import multiprocessing
import os
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import reference
from dllm_kernels.backends.torch import _blocks, _workers
from dllm_kernels.backends.torch._workers import run_jobs
from dllm_kernels.ops import token_nll, weighted_linear_nll, weighted_nll
from dllm_kernels.rows import _primitives
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
    run_jobs([lambda _: None] * 9, [None] * (_workers._pool.size + 1))  # one thread more than exist: all start anew
    assert torch.get_num_threads() == 2
    seen = []
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert seen == [2]


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
    monkeypatch.setattr(torch._C, "has_openmp", False)
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
        target.store(block, target.room(block, buffers.wide[: len(part)]).copy_(part), buffers)
    assert torch.equal(out.view(12, 3), torch.zeros(12, 3).index_copy_(0, rows, values).to(dtype))
