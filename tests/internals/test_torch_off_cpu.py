"""The torch path off the CPU: launches and host syncs of every row op, and correct results without reading a value."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_kernels import ops
from dllm_kernels.distributed import _divergence
from dllm_kernels.distributed._layout import VocabShard
from dllm_kernels.rows._divergence import DivergenceRequest
from dllm_kernels.rows._divergence_spec import checked_spec
from tests.support.parity import small_blocks

CHUNKS = 2
D = 16
KINDS = {"kl": 1.0, "jsd": 0.5, "nla": 0.5, "teacher_ce": 0.1, "ce": 0.1}


class AllColumns(VocabShard):
    """A split vocabulary with one rank, which holds all columns."""

    def gather(self, part):
        return part[None]

    def add_parts(self, part):
        return part


def split_divergence(x, teacher, ids, p):
    """Run forward and backward of the primitive; the gradient comes last."""
    shard = AllColumns(0, x.shape[-1], x.shape[-1], x.shape[-1], None)
    arguments = shard, x.detach(), DivergenceRequest(checked_spec(KINDS), teacher, p.view(-1), targets=ids.view(-1))
    *found, kept = _divergence.divergence(*arguments, with_grad=False)
    out = torch.empty_like(x)
    _divergence.divergence_grad(*arguments, kept, out)
    return *found, out


class Op(NamedTuple):
    """A call of a row op.

    Attributes:
        record: name of its record.
        call: from logits (student, teacher, ids, weights), or from hidden states (hidden, head, ids, weights).
        launches: limit of forward and backward together; of ``CHUNKS`` chunks.
        syncs: of forward, and of backward. One for each call of a primitive that compacts rows, one for all chunks.
    """

    record: str
    call: Callable[..., Sequence[torch.Tensor | None]]
    launches: int
    syncs: tuple[int, int]


ALL: dict[str, Any] = {"softcap": 30.0, "skip_id": 3, "backend": "torch"}
HEAD: dict[str, Any] = {"chunk_size": 256, "backend": "torch"}
OF_LOGITS = {
    "token_nll": Op(
        "token_nll",
        lambda x, t, ids, p: ops.token_nll(
            x, ids, active=p, with_correct=True, with_ids=True, with_lse=True, backend="torch"
        ),
        69, (1, 1),
    ),
    "weighted_nll": Op("weighted_nll", lambda x, t, ids, p: ops.weighted_nll(x, ids, p, backend="torch"), 53, (1, 1)),
    "row_stats": Op(
        "row_stats", lambda x, t, ids, p: ops.row_stats(x, ids, entropy=True, mix=(p, p), active=p, **ALL), 168, (1, 1)
    ),
    "divergence": Op(
        "divergence", lambda x, t, ids, p: ops.divergence(x, t, p, kind=KINDS, targets=ids, **ALL), 365, (1, 1)
    ),
    "divergence of a split vocabulary": Op("divergence", split_divergence, 336, (2, 0)),
}  # fmt: skip
OF_HIDDEN = {
    "weighted_linear_nll": Op(
        "weighted_linear_nll", lambda h, w, ids, p: ops.weighted_linear_nll(h, w, ids, p, **HEAD), 110, (1, 0)
    ),
    "linear_token_nll": Op(
        "linear_token_nll", lambda h, w, ids, p: ops.linear_token_nll(h, w, ids, active=p, **HEAD),
        155, (1 + CHUNKS, 1 + CHUNKS),
    ),
    "linear_row_stats": Op(
        "row_stats", lambda h, w, ids, p: ops.linear_row_stats(h, w, ids, entropy=True, active=p, **HEAD),
        222, (1 + CHUNKS, 1 + CHUNKS),
    ),
    "linear_divergence": Op(
        "divergence", lambda h, w, ids, p: ops.linear_divergence(h, w, h.detach(), p, kind=KINDS, targets=ids, **HEAD),
        405, (1 + CHUNKS, 0),
    ),
    "soft_embedding": Op(
        "soft_embedding",
        lambda h, w, ids, p: (ops.soft_embedding(h.detach(), w.detach(), w.detach(), active=p, **HEAD),),
        115, (1 + 2 * CHUNKS, 0),
    ),
    "linear_sample": Op(
        "linear_sample",
        lambda h, w, ids, p: ops.linear_sample(h.detach(), w.detach(), seeds=ids, return_top=4, active=p, **HEAD),
        4200, (1 + CHUNKS, 0),  # Philox by integer products, on two blocks per chunk
    ),
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Count operations that launch a kernel: all except views and allocations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if not function.is_view and not name.startswith(("empty", "new_empty", "detach", "alias", "_unsafe_view")):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def differentiable_sum(found):
    return sum(t.sum() for t in found if t is not None and t.requires_grad)


@pytest.fixture
def gpu():
    pytest.importorskip("triton")
    from tools.mock_gpu import MockGPU

    with MockGPU("sm_90") as gpu, torch.device("cuda"):
        yield gpu


def counted(gpu, call, *leaves):
    """Return (launches, syncs) of forward and of backward. Any other read of a value raises."""
    with Launches() as forward:
        found = call(*leaves)
    total, syncs, gpu.syncs = differentiable_sum(found), gpu.syncs, 0
    with Launches() as backward:
        if isinstance(total, torch.Tensor):
            total.backward()
    return (len(forward.names), syncs), (len(backward.names), gpu.syncs)


def logits_of(rows, V):
    leaves = [torch.empty(1, rows, V, dtype=torch.bfloat16) for _ in range(2)]
    return leaves[0].requires_grad_(), leaves[1], torch.zeros(1, rows, dtype=torch.int64), torch.rand(1, rows)


@pytest.mark.parametrize("name", OF_LOGITS)
def test_launches_and_syncs_from_logits(name, gpu):
    op = OF_LOGITS[name]
    (forward, first), (backward, second) = counted(gpu, op.call, *logits_of(512, 126_464))
    assert (first, second) == op.syncs
    assert forward + backward <= op.launches


@pytest.mark.everyday(2)
@pytest.mark.parametrize("name", OF_LOGITS)
def test_launches_depend_on_bytes_and_not_on_rows(name, gpu):
    """Up to 256 MiB of active rows in the dtype of sums are one block, for any number of rows.

    Twice as many are two blocks.
    """
    V = 1 << 16
    rows_per_block = (256 << 20) // (4 * V)
    launches = []
    for active in (64, rows_per_block, 2 * rows_per_block):
        gpu.syncs = 0
        launches.append([n for n, _ in counted(gpu, OF_LOGITS[name].call, *logits_of(2 * active, V))])
    assert launches[0] == launches[1]
    assert sum(launches[1]) < sum(launches[2]) < 2 * sum(launches[1])


@pytest.mark.everyday(2)
@pytest.mark.parametrize("name", OF_HIDDEN)
def test_launches_and_syncs_from_hidden_states(name, gpu):
    """The products of the gradient are included. A chunk is far smaller than 256 MiB, and is therefore one block."""
    op = OF_HIDDEN[name]
    rows = 2 * CHUNKS * HEAD["chunk_size"]  # half of them active
    h, w = torch.empty(rows, D, dtype=torch.bfloat16), torch.empty(32000, D, dtype=torch.bfloat16)
    leaves = (h.requires_grad_(), w.requires_grad_(), torch.zeros(rows, dtype=torch.int64), torch.rand(rows))
    (forward, first), (backward, second) = counted(gpu, op.call, *leaves)
    assert (first, second) == op.syncs
    assert forward + backward <= op.launches


N, V = 12, 37
LAYOUTS = {
    "dense": lambda x: x,
    "sliced": lambda x: torch.cat([x, x], -1)[..., :V],
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}
RESULTS = {
    **{name: op.call for name, op in OF_LOGITS.items()},
    "over the logits": lambda x, t, ids, p: ops.token_nll(
        x * 1.0, ids, active=p, inplace_backward=True, backend="torch"
    ),
    "mix without a": lambda x, t, ids, p: ops.row_stats(
        x.nan_to_num(0, 1, -1), ids, mix=(p.round(), 1 - 0 * p), active=p, skip_id=3, backend="torch"
    ),
    "of any rows of the teacher": lambda x, t, ids, p: ops.divergence(
        x, t, p, kind=KINDS, targets=ids, teacher_rows=torch.arange(N).view(2, -1).flip(0, 1) - 1, backend="torch"
    ),
    "of one row after the other": lambda x, t, ids, p: ops.divergence(
        x, t, torch.ones_like(p), kind=KINDS, targets=ids, teacher_rows=torch.arange(N).view(2, -1), backend="torch"
    ),
}


def special(dtype):
    """Draw student, teacher, ids and weights with NaN, infinities and impossible ids, in active and inactive rows."""
    torch.manual_seed(0)
    x, t = ((3 * torch.randn(2, N // 2, V)).to(dtype) for _ in range(2))
    ids, p = torch.randint(V, (2, N // 2)), torch.rand(2, N // 2) + 0.1
    p.view(-1)[[1, 4, 5, 10]] = 0
    rows, teacher = x.view(N, V), t.view(N, V)
    rows[1], rows[4], teacher[5], teacher[1] = math.nan, math.inf, math.nan, -math.inf  # of weight 0
    rows[2, ::2], teacher[3, 1::2] = -math.inf, -math.inf
    rows[6, 7], rows[7], teacher[8, 9] = math.nan, -math.inf, math.nan
    ids.view(-1)[[0, 3, 9]] = torch.tensor([V, -100, -1])
    ids.view(-1)[2] = 1
    return x, t, ids, p


def computed(call, x, *others):
    """Return the results, and the gradient of a sum in which they have distinct weights."""
    x = x.detach().clone().requires_grad_() if x.is_contiguous() else x.detach().requires_grad_()
    found = [t for t in call(x, *others) if t is not None]
    total = sum((k + 1) * t.sum() for k, t in enumerate(found) if t.requires_grad)
    grads = torch.autograd.grad(total, x) if isinstance(total, torch.Tensor) else ()
    return [*(t.detach() for t in found), *grads]


@pytest.mark.everyday(36)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("blocks", ["one block", "a row per block"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RESULTS)
def test_results_without_reading_a_value(name, dtype, layout, blocks, monkeypatch):
    """Tensors that claim not to be on a CPU take the path of other devices.

    Results are equal, and inactive rows are zeros.
    """
    x, t, ids, p = special(dtype)
    x, t = LAYOUTS[layout](x), LAYOUTS[layout](t)
    expected = computed(RESULTS[name], x, t, ids, p)
    if blocks == "a row per block":
        small_blocks(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False))
    for reads in ("numpy", "item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, reads, None)
    got = computed(RESULTS[name], x, t, ids, p)
    monkeypatch.undo()
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    if name != "of one row after the other":
        off = got[-1].reshape(N, V)[[1, 4, 5, 10]]
        assert torch.equal(off, torch.zeros_like(off))


@pytest.mark.usefixtures("unchecked")
def test_a_chunk_without_reading_a_value(monkeypatch):
    """NLL and gradient of a chunk in one pass are zero in inactive rows, without a list of the active rows."""
    *_, ids, p = special(torch.float32)
    h, w = torch.randn(N, D), torch.randn(V, D)
    ids[0, 0] = 3

    def call():
        leaves = h.clone().requires_grad_(), w.clone().requires_grad_()
        out = ops.weighted_linear_nll(*leaves, ids.view(-1), p.view(-1), num_active=N, backend="torch")
        return out.loss, *torch.autograd.grad(out.loss, leaves)

    expected = call()
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False))
    for a, b in zip(call(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
