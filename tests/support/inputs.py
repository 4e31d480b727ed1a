"""The two inputs of every op and loss: stored logits, and the record of logits that a head makes of hidden states."""

import math

import pytest
import torch
import torch.nn.functional as F

from dllm_kernels.ops import LinearLogits
from dllm_kernels.rows._logits import detached, map_rows
from tests.conftest import DEVICE
from tests.support.rows import HEAD_PATHS, PATHS, on_path

__all__ = [
    "EVERY_KIND", "KINDS", "SHAPES", "SOURCES", "Source", "detached", "exact", "map_rows", "on_source", "skip_unjudged",
]  # fmt: skip
KINDS = ("stored", "head")
# Kinds and code paths. A frozen head has another backward pass than one that is trained.
EVERY_KIND = (*KINDS, "frozen", "low rank")
SOURCES = [(kind, path) for kind in EVERY_KIND for path in (PATHS if kind == "stored" else HEAD_PATHS)]
# Shapes of rows as in ``tests/support/rows.py``. In 16 bits, logits of few rows may be exact by luck.
SHAPES = (((1,), 1), ((2, 2), 2), ((5,), 3), ((3, 3), 16), ((4, 3), 53), ((2, 1, 6), 17))


class Source:
    """Logits of one kind, as a function of the tensors that receive gradients, the leaves.

    The leaves of "stored" are logits, of "head" hidden states, weight and bias, of "frozen" hidden states, and of "low
    rank" hidden states, weight, bias, u and U.

    Attributes:
        kind: one of ``EVERY_KIND``.
        backend: backend of the calls.
        options: options of the head, such as ``chunk_size``.
    """

    def __init__(self, kind, backend="auto", **options):
        self.kind, self.backend, self.options = kind, backend, options

    def leaves(self, shape, V, dtype=torch.float32, *, D=5, R=3, seed=0, size=4.0):
        """Draw the leaves of logits ``[*shape, V]``; ``size``: of stored logits."""
        torch.manual_seed(seed)
        shapes = [(*shape, D), (V, D), (V,), (*shape, R), (V, R)]
        if self.kind == "stored":
            return [(size * torch.randn(*shape, V)).to(DEVICE, dtype)]
        if self.kind == "low rank":  # bounded, because in a sum of two products few large logits have all of the error
            return [(2 * torch.rand(s) - 1).to(DEVICE, dtype) for s in shapes]
        leaves = [torch.randn(s).to(DEVICE, dtype) for s in shapes[:3]]
        if self.kind == "head":
            return leaves
        self.constants = leaves[1:]
        return leaves[:1]

    def spoil(self, leaves, rows, value=torch.nan):
        """Write into rows: logits, hidden states, or those of the low-rank part."""
        with torch.no_grad():
            leaves[3 if self.kind == "low rank" else 0][rows] = value

    def _head(self, leaves):
        """Return hidden states, weight, bias and the low-rank part."""
        if self.kind == "frozen":
            leaves = [*leaves, *(t.to(leaves[0].dtype) for t in self.constants)]
        return *leaves[:3], tuple(leaves[3:]) or None

    def argument(self, *leaves, **options):
        """Return the argument of an op or a loss: the logits, or their record with further options of the head."""
        return leaves[0] if self.kind == "stored" else LinearLogits(*self._head(leaves), **self.options | options)

    def logits(self, *leaves, active=None):
        """Return the logits for an oracle, differentiable in the leaves; inactive rows are read as 0."""

        def read(rows):
            return rows if active is None else torch.where(active.unsqueeze(-1), rows, 0.0)

        if self.kind == "stored":
            return read(leaves[0])
        hidden, weight, bias, extra = self._head(leaves)
        logits = F.linear(read(hidden), weight, bias)
        return logits if extra is None else logits + F.linear(read(extra[0]), extra[1])


def skip_unjudged(source, dtype, shape=()):
    """Skip 16-bit heads of which plain PyTorch or the interpreter says nothing."""
    if source.kind == "low rank" and dtype.itemsize == 2 and shape and math.prod(shape) < 9:
        pytest.skip("plain PyTorch may be exact by luck in the few logits that are a sum of two products")
    if source.kind != "stored" and dtype == torch.bfloat16 and source.backend == "triton" and DEVICE == "cpu":
        pytest.skip("the interpreter truncates to bfloat16 where a GPU rounds")


def on_source(kind_and_path, monkeypatch, chunk_size=4):
    """Return the source of one of ``SOURCES``, and set its code path."""
    kind, path = kind_and_path
    if kind == "stored":
        return Source(kind, on_path(path, monkeypatch))
    return Source(kind, on_path(path, monkeypatch, splits=2), chunk_size=chunk_size)


def exact(kind, logits, **options):
    """Return logits of one kind that equal ``logits``: these, or the record of them before an identity as head.

    A row with NaN or an infinity becomes NaN in all columns.
    """
    if kind == "stored":
        return logits
    return LinearLogits(logits, torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device), **options)
