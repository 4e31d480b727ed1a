"""Checks of samples in several processes: a vocabulary split over ranks, rows split over ranks, and refusals."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from dllm_kernels import linear_sample
from tests.support.distributed_checks import B, D, L, Sent, V, check, mesh_of, raises, shard

OPTIONS = {
    "drawn": {"temperature": 0.7, "return_top": 5},
    "greedy": {"temperature": 0, "return_top": 5},
    "top_k": {"top_k": 12, "top_p": 0.83, "min_p": 0.07, "return_top": V},
    "min_p": {"softcap": 8.0, "min_p": 0.07, "untruncated_log_probs": True, "return_top": 5},
    "transformed": {"softcap": 8.0, "scale": 0.5, "skip_id": 11, "return_top": V},
}


def draw(columns=V):
    """Draw multiples of 1/4, whose logits are exact and often equal."""
    torch.manual_seed(0)
    h, w, b = (torch.randint(-3, 4, s).float() for s in ((B, L, D), (columns, D), (columns,)))
    return h, w / 4, b / 4, torch.arange(B) - 1


def same(got, expected):
    for name, a, b in zip(expected._fields, got, expected, strict=True):
        assert type(a) is torch.Tensor, name
        if a.is_floating_point():
            torch.testing.assert_close(a, b, msg=name)
        else:
            assert torch.equal(a, b), name


@check(2, options=OPTIONS)
@check(4, options=("top_k", "transformed"))
def tp_linear_sample(options):
    """Each rank has its part of the columns. A chunk sends its winners, the most likely ids and the statistics."""
    mesh, options = mesh_of("tp"), OPTIONS[options]
    h, w, b, seeds = draw()
    active = torch.arange(B * L).view(B, L) % 5 != 0
    parts = [shard(t, mesh, Shard(0)) for t in (w, b)]
    every = {"seeds": seeds, "active": active, **options}
    expected = linear_sample(h, w, bias=b, **every)
    for hidden in (h, shard(h, mesh, Replicate()), shard(h, mesh, Shard(1))):
        with Sent() as sent:
            got = linear_sample(hidden, parts[0], bias=parts[1], chunk_size=8, backend="torch", **every)
        same(got, expected)
        chunks = -(-int(active.sum()) // 8)
        each = 4 if {"top_k", "min_p"} & options.keys() else 3
        assert sum("gather" in name for name in sent.names) - (hidden is not h) <= each * chunks, sent.names
    few = {"seeds": seeds[:1], **options}
    got = linear_sample(h[:1, :4], parts[0], bias=parts[1], chunk_size=3, backend="triton", **few)
    same(got, linear_sample(h[:1, :4], w, bias=b, **few))


@check(4)
def tp_linear_sample_of_few_columns():
    """Some ranks hold no columns, or fewer than the requested number of most likely ids."""
    mesh = mesh_of("tp")
    for columns in (3, 5):
        h, w, _, seeds = draw(columns)
        for temperature in (0, 1.0):
            options = {"seeds": seeds, "temperature": temperature, "return_top": columns}
            for more in (
                {},
                {"top_k": columns - 1, "top_p": 0.83},
                {"min_p": 0.2, "softcap": 2.0, "untruncated_log_probs": True},
            ):
                every = options | more
                same(linear_sample(h, shard(w, mesh, Shard(0)), **every), linear_sample(h, w, **every))


@check(2)
def linear_sample_of_split_rows():
    """Rows of one batch are on several ranks. Each row is drawn by its own seed and number."""
    mesh = mesh_of("dp")
    h, w, b, seeds = draw()
    head = [shard(t, mesh, Replicate()) for t in (w, b)]
    expected = linear_sample(h, w, bias=b, seeds=seeds, return_top=2)
    for split in (0, 1):
        same(linear_sample(shard(h, mesh, Shard(split)), head[0], bias=head[1], seeds=seeds, return_top=2), expected)
    drawn = [
        linear_sample(hidden, weight, generator=torch.Generator().manual_seed(3))
        for hidden, weight in ((shard(h, mesh, Shard(1)), head[0]), (h, w))
    ]
    assert torch.equal(drawn[0].ids, drawn[1].ids)


@check(2)
def linear_sample_that_cannot_be_served():
    mesh = mesh_of("tp")
    h, w, _, _ = draw()
    message = "seeds or generator must be given where hidden or head is a DTensor, got neither"
    raises(ValueError, message, linear_sample, h, shard(w, mesh, Shard(0)))
    message = "top_k must be given with top_p if the vocabulary is split over ranks, got None"
    raises(ValueError, message, linear_sample, h, shard(w, mesh, Shard(0)), temperature=0, top_p=0.5)
    assert linear_sample(h, shard(w, mesh, Shard(0)), temperature=0).ids.shape == (B, L)
    assert dist.get_world_size() == 2
