"""Jobs shared out among threads, in each of which torch runs on one core.

Torch cuts every operation into one part a core and waits for the last of them. A chain of short operations, each on a
block that fits the cache, waits at every link, and where another process holds one of the cores, each wait lasts as long
as the scheduler lets that process run. A thread that takes a new block when it is done with one waits for nobody. Torch
lets go of the interpreter while an operation runs, so threads are enough.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

# More threads than this would wait for the interpreter, which an operation on a block needs for a few microseconds.
MOST = 16

Resource = TypeVar("Resource")


class _Pool:
    """The threads of this process. A forked child has none of its parent's and starts its own."""

    def __init__(self) -> None:
        self.forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        self.lock = threading.Lock()
        self.executor: ThreadPoolExecutor | None = None
        self.size = 0

    def at_least(self, count: int) -> ThreadPoolExecutor:
        """An executor of ``count`` threads or more, all of them started."""
        with self.lock:
            if self.executor is None or self.size < count:
                self.executor, self.size = _start(count), count
            return self.executor


def _start(count: int) -> ThreadPoolExecutor:
    cores = torch.get_num_threads()
    executor = ThreadPoolExecutor(count, "dllm_kernels")
    started = threading.Barrier(count + 1)

    def on_one_core() -> None:
        torch.get_num_threads()  # which a thread's first operation would else do, and take the number of all others
        torch.set_num_threads(1)
        started.wait()

    try:
        for _ in range(count):
            executor.submit(on_one_core)
        started.wait()
    except BaseException:
        started.abort()
        raise
    finally:  # every thread has a number of its own, but the last one set is also that of threads yet to come
        torch.set_num_threads(cores)
    return executor


_pool = _Pool()


def how_many(device: torch.device) -> int:
    """Threads to share work on tensors of ``device`` among; 1: run it in the caller's, on all cores that torch takes."""
    cores = torch.get_num_threads()
    if device.type != "cpu" or not torch._C.has_openmp:  # without it, all threads have one number of cores
        return 1
    if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < cores:
        return 1  # bound to a core, as OMP_PROC_BIND binds it; threads that it starts would be bound to the same
    return min(cores, MOST)


def share_out(jobs: Iterable[Callable[[Resource], object]], resources: Sequence[Resource]) -> None:
    """Call every job once, in any order, on as many threads as there are resources; return when all are done.

    Args:
        jobs: called with the resource of the thread that they run in. No two may write to the same memory.
        resources: memory to work in, one a thread. The caller allocates it, so that its profiler sees it. A single one
            means that the jobs run in the caller's thread.
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
    finally:
        waiting.clear()


@torch.inference_mode()  # unlike no_grad it may write to the caller's tensors whatever mode they were made in
def _work(waiting: deque[Callable[[Resource], object]], resource: Resource) -> None:
    while True:
        try:
            job = waiting.popleft()
        except IndexError:
            return
        job(resource)
