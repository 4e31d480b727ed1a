"""Checks of the mean embedding in several processes: head and embedding split by vocabulary, gathered, and refusals."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import reference
from dllm_kernels import soft_embedding
from tests.support.distributed_checks import B, D, L, Sent, V, check, close, mesh_of, raises, shard

E = 3
TRANSFORMS = {"plain": {}, "softcap scale skip_id": {"softcap": 2.0, "scale": 0.6, "skip_id": 11}}


def draw(dtype=torch.float64):
    torch.manual_seed(0)
    tensors = [torch.randn(s).to(dtype) for s in ((B, L, D), (V, D), (V, E), (V,))]
    ids = torch.tensor([0, 9, 10, V - 1, -100, V, 5])[torch.arange(B * L) % 7].view(B, L)
    return tensors, 3 * torch.randn(B, L), ids


@check(2, transform=TRANSFORMS)
@check(4, transform=TRANSFORMS)
def tp_soft_embedding(transform):
    """Each rank has its part of the columns, with bumps at the edges of the shards.

    Each chunk sends one value per row, the logit with the bump. The embeddings are summed once at the end.

    The kernels run on seven rows, one per bumped id, because under Triton's interpreter a row takes as long as a call
    does elsewhere.
    """
    mesh, transform = mesh_of("tp"), TRANSFORMS[transform]
    (h, w, e, b), bump, ids = draw()
    active = torch.arange(B * L).view(B, L) % 5 != 0
    expected = reference.soft_embedding(h, w, e, b, bump, ids, active, **transform)
    parts = [shard(t, mesh, Shard(0)) for t in (w, e, b)]
    every, few = slice(None), slice(0, 7)

    def embed(hidden, rows, backend, chunk_size):
        selected = [t if rows == every else t.flatten(0, 1)[rows] for t in (bump, ids, active, expected)]
        with Sent() as sent:
            got = soft_embedding(
                hidden, parts[0], parts[1], bias=parts[2], bump=selected[0], bump_ids=selected[1], active=selected[2],
                chunk_size=chunk_size, backend=backend, **transform,
            )  # fmt: skip
        assert type(got) is torch.Tensor
        close(got, selected[3])
        assert sent.names.count("all_reduce") == 1 + -(-int(selected[2].sum()) // chunk_size)
        assert not any(n in (V, 10, 9, 5) for shape in sent.shapes[1:] for n in shape), sent.shapes

    for hidden in (h, shard(h, mesh, Replicate()), shard(h, mesh, Shard(1))):
        embed(hidden, every, "torch", 8)
    embed(h.flatten(0, 1)[few], few, "triton", 4)


@check(2)
def tp_soft_embedding_of_a_near_certain_token():
    """The token is on each rank in turn, also if its shard has no other column with a noticeable probability."""
    mesh = mesh_of("tp")
    table, ids = torch.eye(V), torch.tensor([0, V // 2 - 1, V // 2, V - 1])
    parts = [shard(table, mesh, Shard(0))] * 2
    torch.manual_seed(0)
    for t in (-20.0, -100.0, -torch.inf):
        for ahead in (0.0, 17.0, 90.0):
            h = torch.randn(4, V) + ahead * table[ids]
            bump = torch.full((4,), t)
            exact = reference.soft_embedding(h.double(), table.double(), table.double(), None, bump.double(), ids)
            got = soft_embedding(h, *parts, bump=bump, bump_ids=ids)
            torch.testing.assert_close(got, exact.float())


@check(2)
def tp_soft_embedding_in_bfloat16():
    """The parts of the ranks are summed in float32, and rounded once."""
    mesh = mesh_of("tp")
    (h, w, e, _), bump, ids = draw(torch.bfloat16)
    got = soft_embedding(h, shard(w, mesh, Shard(0)), shard(e, mesh, Shard(0)), bump=bump, bump_ids=ids)
    exact = reference.soft_embedding(h.double(), w.double(), e.double(), None, bump, ids)
    plain = reference.soft_embedding(h, w, e, None, bump, ids)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got.isnan(), exact.isnan())
    off, allowed = ((t.double() - exact).nan_to_num().abs().max() for t in (got, plain))
    assert off <= 2 * allowed


@check(2)
def fsdp_soft_embedding():
    """A tied head that FSDP2 shards is gathered once."""
    mesh = mesh_of("fsdp")
    (h, w, _, _), bump, ids = draw()
    head = nn.Linear(D, V, bias=False).double()
    head.weight = nn.Parameter(w)
    fully_shard(head, mesh=mesh)
    with Sent() as sent:
        got = soft_embedding(h, head.weight, head.weight, bump=bump, bump_ids=ids)
    assert sent.names == ["all_gather"], sent.names
    close(got, reference.soft_embedding(h, w, w, None, bump, ids))


@check(2)
def soft_embedding_that_cannot_be_served():
    mesh = mesh_of("tp")
    (h, w, e, _), _, _ = draw()
    split, whole = shard(w, mesh, Shard(0)), shard(w, mesh, Replicate())
    like = "embedding must be laid out like the LM head's weight, "
    raises(ValueError, f"{like}Shard(dim=0) over tp, got a plain tensor", soft_embedding, h, split, e)
    split_embedding = shard(e, mesh, Shard(0))
    raises(ValueError, f"{like}a plain tensor, got Shard(dim=0) over tp", soft_embedding, h, w, split_embedding)
    narrow = distribute_tensor(e.bfloat16(), mesh, [Shard(0)])
    raises(ValueError, "embedding must have the dtype of hidden", soft_embedding, h, split, narrow)
    rows = shard(h, mesh, Shard(1))
    message = (
        "hidden must not have its rows split over ranks that have the same columns of the head, "
        f"got rows ({B}, {L // 2})"
    )
    raises(ValueError, message, soft_embedding, rows, whole, shard(e, mesh, Replicate()))
    close(soft_embedding(rows.to_local(), w, e), reference.soft_embedding(h, w, e).chunk(2, 1)[dist.get_rank()])
