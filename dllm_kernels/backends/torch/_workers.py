"""Run jobs on several threads, in each of which torch uses one core.

torch splits each operation across all cores and waits for the slowest. A chain of short operations on blocks that fit
the cache therefore waits after every operation. If another process occupies a core, each wait lasts as long as that
process is scheduled. Here workers pull blocks from a queue, so no barrier is needed. PyTorch releases the GIL inside
operations, so threads suffice.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from dllm_kernels._graph._private import HAS_OPENMP

# More threads would contend for the GIL, which each operation on a block holds for a few microseconds.
MAX_THREADS = 16

Resource = TypeVar("Resource")


class _Pool:
    """Threads of this process. A forked child does not inherit its parent's threads and starts its own."""

    def __init__(self) -> None:
        self.reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        self.lock = threading.Lock()
        self.started: tuple[ThreadPoolExecutor, int] | None = None

    def at_least(self, count: int) -> ThreadPoolExecutor:
        """Return an executor with at least ``count`` threads, all started."""
        with self.lock:
            if self.started is None or self.started[1] < count:
                self.started = _start(count), count
            return self.started[0]


def _start(count: int) -> ThreadPoolExecutor:
    cores = torch.get_num_threads()
    executor = ThreadPoolExecutor(count, "dllm_kernels")
    started = threading.Barrier(count + 1)

    def on_one_core() -> None:
        torch.get_num_threads()  # initialises this thread's setting, which its first operation would overwrite
        torch.set_num_threads(1)
        started.wait()

    try:
        for _ in range(count):
            executor.submit(on_one_core)
        started.wait()
    except BaseException:
        started.abort()
        raise
    finally:  # each thread keeps its own setting, but the last value set also applies to threads started later
        torch.set_num_threads(cores)
    return executor


_pool = _Pool()


def num_threads() -> int:
    """Return the number of worker threads for CPU work; 1: the calling thread, on all cores that torch uses."""
    cores = torch.get_num_threads()
    if not HAS_OPENMP:
        return 1
    if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < cores:
        return 1  # the thread is bound to a core, as by OMP_PROC_BIND, and new threads would inherit the binding
    return min(cores, MAX_THREADS)


def run_jobs(jobs: Iterable[Callable[[Resource], object]], resources: Sequence[Resource]) -> None:
    """Call every job once, in any order, on as many threads as there are resources; return when all are done.

    Args:
        jobs: called with the resource of the thread that they run in. No two jobs may write to the same memory.
        resources: working memory, one per thread. The caller allocates it, so that the caller's profiler sees it. With
            a single one, the jobs run in the caller's thread.
    """
    if len(resources) == 1:
        for job in jobs:
            job(resources[0])
        return
    waiting = deque(jobs)
    executor = _pool.at_least(len(resources))
    running = [executor.submit(_work, waiting, resource) for resource in resources]
    try:
        for thread in running:
            thread.result()
    finally:  # after an error, no job begins, and none still writes when this returns
        waiting.clear()
        wait(running)


@torch.inference_mode()  # unlike no_grad, allows writing to inference tensors of the caller
def _work(waiting: deque[Callable[[Resource], object]], resource: Resource) -> None:
    while True:
        try:
            job = waiting.popleft()
        except IndexError:
            return
        job(resource)
