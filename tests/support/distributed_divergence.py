"""Divergences in several processes: split vocabularies, sharded heads, split rows, and teachers with other layouts."""

import importlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reference
from dllm_kernels import ops
from tests.support.distributed_checks import B, D, L, Sent, V, all_close, check, close, mesh_of, shard
from tests.support.parity import assert_parity

DIVERGENCE = importlib.import_module("dllm_kernels.ops.divergence")  # the package exports the function of this name
KINDS = {
    "kl": {"kind": "kl"},
    "lk, mean": {"kind": "lk", "alpha": "mean", "reduction": "none"},
    "all others": {
        "kind": {"rkl": 0.5, "jsd": 1.0, "tv": 1.0, "nla": 0.3, "soft_ce": 0.2, "teacher_ce": 0.1, "ce": 0.1},
        "temperature": 1.5, "softcap": 4.0, "skip_id": 12, "beta": 0.3,
    },
}  # fmt: skip
kinds = {"name": tuple(KINDS)}


def drawn(name, V=V):
    """Draw everything besides the student: weights, the teacher's hidden states in another order, and the options."""
    torch.manual_seed(0)
    weights = torch.rand(B, L) * (torch.rand(B, L) < 0.8)
    rows = torch.randint(0, 2 * L, (B, L))
    targets = {"targets": torch.randint(0, 12, (B, L)).index_fill(1, torch.tensor([2]), -100)}
    targets = targets if name == "all others" else {}
    return torch.randn(2, L, D).double(), {"weights": weights, "teacher_rows": rows, **KINDS[name], **targets}


def upstream(options):
    return torch.randn(B, L) if "reduction" in options else torch.randn(())


def draw(options, V=V):
    return lambda _: ([torch.randn(s).double() for s in ((B, L, D), (V, D), (V,))], upstream(options))


def hidden_parity(mesh, name, hidden_layout, teacher_layout, head_layout, **more):
    """Compare a divergence from hidden states in these layouts (None: a plain tensor) with the oracle."""
    teacher, options = drawn(name)

    def ours(h, w, b):
        h, t = (x if s is None else shard(x, mesh, s) for x, s in ((h, hidden_layout), (teacher, teacher_layout)))
        w, b = (shard(x, mesh, head_layout) for x in (w, b))
        return ops.linear_divergence(h, w, t, bias=b, backend="torch", **more, **options).loss

    assert_parity(
        ours, lambda h, w, b: reference.linear_divergence(h, w, teacher, bias=b, **options).loss, draw(options)
    )


@check(2, **kinds)
def tp_divergence(name):
    """A shared head is split by vocabulary.

    Hidden states are plain, equal on every rank, or split over the same ranks.
    """
    for layouts in ((None, None), (Shard(1), Replicate()), (Shard(0), Shard(1))):
        hidden_parity(mesh_of("tp"), name, *layouts, Shard(0), chunk_size=5)


@check(2)
def tp_divergence_to_a_head_of_its_own():
    """The teacher's head, with a second part, is split like the student's, whole, or has some columns selected."""
    mesh, (teacher, options) = mesh_of("tp"), drawn("all others")
    weight, bias, u, second = (torch.randn(s).double() for s in ((V, D), (V,), (2, L, 3), (V, 3)))
    columns = torch.randperm(V)
    for split, picked in ((True, False), (False, False), (True, True), (False, True)):
        options_here = options | ({"draft_to_target": columns} if picked else {})
        head = [distribute_tensor(t, mesh, [Shard(0)]) if split else t for t in (weight, bias, second)]

        def ours(h, w, b, head=head, options_here=options_here):
            w, b = (shard(x, mesh, Shard(0)) for x in (w, b))
            out = ops.linear_divergence(
                h, w, teacher, bias=b, teacher_weight=head[0], teacher_bias=head[1], teacher_extra=(u, head[2]),
                backend="torch", **options_here,
            )  # fmt: skip
            return out.loss

        def oracle(h, w, b, options_here=options_here):
            own = {"teacher_weight": weight, "teacher_bias": bias, "teacher_extra": (u, second)}
            return reference.linear_divergence(h, w, teacher, bias=b, **own, **options_here).loss

        assert_parity(ours, oracle, draw(options))


@check(2, **kinds)
def tp_divergence_of_logits(name):
    """Logits are split by vocabulary, or by rows.

    The teacher's have the same layout, are whole on every rank, or plain.
    """
    mesh, (_, options) = mesh_of("tp"), drawn(name)
    teacher_logits = 2 * torch.randn(2, L, V).double()
    for logits_layout, teacher_layout in (
        (Shard(2), Shard(2)),
        (Shard(2), None),
        (Shard(1), Replicate()),
        (Shard(0), Shard(0)),
        (None, Shard(2)),
    ):
        t = teacher_logits if teacher_layout is None else distribute_tensor(teacher_logits, mesh, [teacher_layout])

        def ours(z, t=t, p=logits_layout):
            z = z if p is None else shard(z, mesh, p)
            return ops.divergence(z, t, backend="torch", **options).loss

        def leaves(_):
            return [2 * torch.randn(B, L, V).double()], upstream(options)

        assert_parity(ours, lambda z: reference.divergence(z, teacher_logits, **options).loss, leaves)


@check(2)
def backward_of_split_logits_sends_nothing():
    """Backward reads the statistics of whole rows that forward gathered."""
    mesh = mesh_of("tp")
    for name in KINDS:
        _, options = drawn(name)
        leaf = shard(torch.randn(B, L, V), mesh, Shard(2)).detach().requires_grad_()
        loss = ops.divergence(leaf, torch.randn(2, L, V), backend="torch", **options).loss.sum()
        with Sent() as sent:
            (grad,) = torch.autograd.grad(loss, leaf)
        assert grad.to_local().abs().sum() > 0
        assert sent.calls == [], name


@check(4)
def every_rank_copies_the_same_pieces_of_the_teacher():
    """Each piece ends in a collective, so ranks with other shard sizes, or without columns, need the same pieces."""
    mesh = mesh_of("tp")
    for Vd in (V, 2):
        z, t, w, columns = torch.randn(B, L, Vd), torch.randn(B, L, V + 1), torch.rand(B, L), torch.randperm(V + 1)[:Vd]
        for rows in (1, 5):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(DIVERGENCE, "COPY_BYTES", rows * t[0, 0].nbytes)
                got, want = z.clone().requires_grad_(), z.clone().requires_grad_()
                options = {"kind": {"kl": 1.0, "tv": 0.5}, "draft_to_target": columns}
                out = ops.divergence(shard(got, mesh, Shard(2)), t, w, backend="torch", **options)
                expected = reference.divergence(want, t, w, **options)
                all_close(out, expected)
                out.loss.backward()
                expected.loss.backward()
                close(got.grad, want.grad)


@check(2)
def metrics_of_a_smaller_vocabulary():
    """Ranks share the student's vocabulary, and the teacher's whole rows for their normalisers."""
    mesh, (teacher, options) = mesh_of("tp"), drawn("all others")
    columns, own = torch.randperm(3 * V + 1)[:V], torch.randn(3 * V + 1, D).double()
    logits = torch.nn.functional.linear(teacher, own)
    h, w = torch.randn(B, L, D).double(), torch.randn(V, D).double()
    for name in ("draft", "full"):
        given = options | {"draft_to_target": columns, "teacher": name, "skip_id": 3}
        for form in ("hidden", "logits"):
            leaf = (h if form == "hidden" else torch.nn.functional.linear(h, w)).clone().requires_grad_()
            want = leaf.detach().clone().requires_grad_()
            if form == "hidden":
                split = {"teacher_weight": distribute_tensor(own, mesh, [Shard(0)]), "backend": "torch"}
                out = ops.linear_divergence(leaf, shard(w, mesh, Shard(0)), teacher, chunk_size=5, **split, **given)
                expected = reference.linear_divergence(want, w, teacher, teacher_weight=own, **given)
            else:
                out = ops.divergence(shard(leaf, mesh, Shard(2)), logits, backend="torch", **given)
                expected = reference.divergence(want, logits, **given)
            all_close(out, expected)
            out.loss.sum().backward()
            expected.loss.sum().backward()
            close(leaf.grad, want.grad)


@check(2)
def a_teacher_whose_rows_one_rank_has():
    """The layout, not the local rows, decides whether a rank gathers: a batch of one is split over all ranks."""
    mesh = mesh_of("tp")
    h, t, w, own = (torch.randn(s).double() for s in ((1, L, D), (1, L, D), (V, D), (V, D)))
    for teacher_layout in (Shard(0), Shard(1), Replicate()):
        for head_layout in (Shard(0), Replicate()):
            theirs, head = distribute_tensor(t, mesh, [teacher_layout]), distribute_tensor(own, mesh, [head_layout])

            def ours(h, w, theirs=theirs, head=head):
                h, w = shard(h, mesh, Shard(0)), shard(w, mesh, Shard(0))
                return ops.linear_divergence(h, w, theirs, kind="kl", teacher_weight=head, backend="torch").loss

            assert_parity(
                ours,
                lambda h, w: reference.linear_divergence(h, w, t, kind="kl", teacher_weight=own).loss,
                lambda _: ([h, w], torch.randn(())),
            )


@check(2)
@check(4)
def special_rows_of_a_divergence():
    """Further outputs; ties over shards, rows of -inf in one shard, of NaN, without a teacher's row, and of weight 0.

    With three columns, one rank of four holds none.
    """
    inf, nan = float("inf"), float("nan")
    z = torch.tensor([[0, 0, 0], [-inf, -inf, 2], [0, 1, nan], [1, 0, 0], [nan, 0, 0], [3, 1, 2]]).double()
    t = torch.tensor([[0, 0, 0], [0, -inf, -inf], [0, 1, 2], [0, 0, nan], [0, 0, 0], [3, 1, 2]]).double()
    rows, weights, targets = torch.tensor([[0, 1, 2, 3, 4, 9], [1, 1, 1, 1, 0, 1], [0, 2, 0, 0, 1, 2]])
    mesh = mesh_of("tp")
    for kind in ("kl", "nla", "jsd", {"ce": 1.0, "teacher_ce": 1.0}):
        options = {"kind": kind, "teacher_rows": rows} | ({"targets": targets} if isinstance(kind, dict) else {})
        leaf, same = z.clone().requires_grad_(), z.clone().requires_grad_()
        out = ops.divergence(shard(leaf, mesh, Shard(1)), distribute_tensor(t, mesh, [Shard(1)]), weights, **options)
        want = reference.divergence(same, t, weights, **options)
        for got, expected in zip(out[1:], want[1:], strict=True):
            close(got, expected.detach(), str(kind))
        got, expected = (torch.autograd.grad(o.loss, leaf_)[0] for o, leaf_ in ((out, leaf), (want, same)))
        known = torch.tensor([0, 1, 4])  # a row without a value has a NaN gradient here, and NaN entries there
        close(got[known], expected[known], str(kind))
        assert got[[2, 3, 5]].isnan().all()


@check(2, name=("kl", "lk, mean"))
def split_rows_of_a_divergence(name):
    """The rows are split over the ranks, and every rank has the whole head. The mean of a is that of all rows."""
    hidden_parity(mesh_of("dp"), name, Shard(1), None, Replicate())


@check(2)
def fsdp_divergence():
    """FSDP2 shards a head that both share, trainable or frozen, or a separate head of the teacher."""
    rank, mesh = dist.get_rank(), mesh_of("fsdp")
    torch.manual_seed(0)
    hidden, teacher = (torch.randn(B, L, D).double() for _ in range(2))
    for trains, own in ((True, False), (False, False), (True, True)):
        heads = [nn.Linear(D, V, bias=False).double().requires_grad_(trains) for _ in range(2)]
        for i, head in enumerate(heads):  # equal on every rank, and in the run of one process
            nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(i))
        weights = [head.weight.detach().clone().requires_grad_(trains) for head in heads]
        h, same = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
        own_weight = weights[1] if own else None
        want = reference.linear_divergence(same, weights[0], teacher, teacher_weight=own_weight, kind="tv")
        want.loss.backward()
        for head in heads:
            fully_shard(head, mesh=mesh)
        world, options = dist.get_world_size(), {"kind": "tv", "backend": "torch"}
        mine, theirs = (x.chunk(world)[rank] for x in (h, teacher))
        options["teacher_weight"] = heads[1].weight if own else None
        out = ops.linear_divergence(mine, heads[0].weight, theirs, **options)
        (out.loss * world).backward()
        close(out.acceptance_rate, want.acceptance_rate.chunk(world)[rank])
        close(h.grad.chunk(world)[rank] / world, same.grad.chunk(world)[rank])
        assert heads[1].weight.grad is None
        if trains:
            assert isinstance(heads[0].weight.grad, DTensor)
            close(heads[0].weight.grad, weights[0].grad)


@check(2)
def a_split_divergence_sends_nothing_as_long_as_the_vocabulary():
    mesh, (teacher, options) = mesh_of("tp"), drawn("all others")
    weight = distribute_tensor(torch.randn(V, D).double(), mesh, [Shard(0)])
    with Sent() as sent:
        h = torch.randn(B, L, D).double().requires_grad_()
        ops.linear_divergence(h, weight, teacher, **options).loss.backward()
    assert sent.shapes
    assert not any(n in (V, 10, 9) for shape in sent.shapes for n in shape)
