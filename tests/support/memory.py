"""Memory that torch's own products take on a CPU, and memory that is freed without the garbage collector."""

import gc
from contextlib import contextmanager

import torch

from benchmarks.measure import peak_memory


def copied_by_products(rows, V, D, dtype):
    """Return the bytes that torch allocates for the products of a chunk ``[rows, V]`` beside their results.

    Without instructions for bfloat16, as under ``ATEN_CPU_CAPABILITY=default``, some processors copy to float32.
    """
    chunk, h, w = torch.zeros(rows, V, dtype=dtype), torch.zeros(rows, D, dtype=dtype), torch.zeros(V, D, dtype=dtype)
    out = torch.zeros(rows, D, dtype=dtype)
    products = (lambda _: torch.mm(h, w.t(), out=chunk), lambda _: torch.mm(chunk, w, out=out))
    for product in products:
        product(0)
    return max(peak_memory(product, "cpu") for product in products)


@contextmanager
def without_garbage_collection():
    """Free nothing but what no reference keeps, so that a reference cycle keeps its tensors."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
