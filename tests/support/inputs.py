"""The two inputs of every op and loss: stored logits, and the record of logits that a head makes of hidden states."""

import pytest
import torch
import torch.nn.functional as F

from dllm_kernels.ops import LinearLogits
from tests.conftest import DEVICE
from tests.support.rows import HEAD_PATHS, PATHS, on_head_path, on_path

KINDS = ("stored", "head")
# Kinds and code paths. A frozen head has another backward pass than one that is trained.
SOURCES = tuple(
    (kind, path) for kind in (*KINDS, "frozen") for path in (PATHS if kind == "stored" else HEAD_PATHS)
)  # fmt: skip


class Source:
    """Logits of one kind, as a function of the tensors that receive gradients, the leaves.

    The leaves of "stored" are logits, those of "head" hidden states, weight and bias, and of "frozen" hidden states.

    Attributes:
        kind: "stored", "head" or "frozen".
        backend: backend of the calls.
        options: options of the head, such as ``chunk_size``.
    """

    def __init__(self, kind, backend="auto", **options):
        self.kind, self.backend, self.options = kind, backend, options

    def leaves(self, shape, V, dtype=torch.float32, *, D=5, seed=0, size=4.0):
        """Draw the leaves of logits ``[*shape, V]``, each row finite and in its own memory."""
        torch.manual_seed(seed)
        shapes = [(*shape, V)] if self.kind == "stored" else [(*shape, D), (V, D), (V,)]
        factor = size if self.kind == "stored" else 1.0
        leaves = [(factor * torch.randn(s)).to(DEVICE, dtype) for s in shapes]
        self.constants = leaves[1:] if self.kind == "frozen" else []
        return leaves[:1] if self.kind == "frozen" else leaves

    def _tensors(self, leaves):
        return [*leaves, *(t.to(leaves[0].dtype) for t in self.constants)] if self.kind == "frozen" else leaves

    def argument(self, *leaves, **options):
        """Return the argument of an op or a loss: the logits, or their record with further options of the head."""
        first, *head = self._tensors(leaves)
        return LinearLogits(first, *head, **self.options | options) if head else first

    def logits(self, *leaves, active=None):
        """Return the logits for an oracle, differentiable in the leaves; inactive rows are read as 0."""
        first, *head = self._tensors(leaves)
        first = first if active is None else torch.where(active.unsqueeze(-1), first, 0.0)
        return F.linear(first, *head) if head else first


def skip_truncated(source, dtype):
    """Skip a head in bfloat16 whose product the interpreter computes."""
    if source.kind != "stored" and dtype == torch.bfloat16 and source.backend == "triton" and DEVICE == "cpu":
        pytest.skip("the interpreter truncates to bfloat16 where a GPU rounds")


def on_source(kind_and_path, monkeypatch, **options):
    """Return the source of one of ``SOURCES``, and set its code path; chunks have 4 rows."""
    kind, path = kind_and_path
    if kind == "stored":
        return Source(kind, on_path(path, monkeypatch))
    return Source(kind, on_head_path(path, monkeypatch), **{"chunk_size": 4, **options})


def exact(kind, logits, **options):
    """Return logits of one kind that equal ``logits``: these, or the record of them before an identity as head.

    A row with NaN or an infinity becomes NaN in all columns.
    """
    if kind == "stored":
        return logits
    return LinearLogits(logits, torch.eye(logits.shape[-1], dtype=logits.dtype, device=DEVICE), **options)
