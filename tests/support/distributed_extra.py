"""Checks of a two-part head in several processes: the second part split like the head, sharded, in several layouts."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import reference
from dllm_kernels import ops
from dllm_kernels.distributed import summed_over
from tests.support.cases import BY_NAME
from tests.support.distributed_checks import B, D, L, Sent, V, check, close, drawn, mesh_of, raises, shard, upstream
from tests.support.distributed_layouts import as_it_is, over, summed_over_rows
from tests.support.parity import assert_parity

R = 3
NAMES = ("weighted_nll", "token_nll", "row_stats", "row_objective", "dflash, dpace")


def call(case, inputs, h, w, b, extra, **options):
    arguments = case.arguments("hidden", h, inputs, (w, b)) | {"extra": extra}
    out = case.output("hidden", arguments, **options)
    return out if isinstance(out, torch.Tensor) else out.total_loss


def plain(case, inputs):
    return lambda h, w, b, u, second: case.oracle(reference.linear_logits(h, w, b, extra=(u, second)), inputs)


def extra_parity(name, hidden_laid, head_laid, u_laid=as_it_is, dtype=torch.float64, rows=B, **options):
    """Compare a loss with the oracle. The functions distribute hidden states, both parts of the head, and u."""
    case = BY_NAME[name]
    inputs = drawn(case, rows=rows)

    def ours(h, w, b, u, second):
        extra = u_laid(u), head_laid(second)
        return call(case, inputs, hidden_laid(h), head_laid(w), head_laid(b), extra, **{"backend": "torch"} | options)

    def leaves(_):
        shapes = (rows, L, D), (V, D), (V,), (rows, L, R), (V, R)
        return [torch.randn(shape).to(dtype) for shape in shapes], upstream(case, rows)

    assert_parity(ours, plain(case, inputs), leaves)


@check(2, name=NAMES)
def tp_extra(name):
    """Both parts are split by vocabulary, with several chunks.

    The rows of each part are plain, equal on every rank, or split over the ranks.
    """
    of = functools.partial(over, mesh_of("tp"))
    layouts = [
        (as_it_is, as_it_is), (as_it_is, of(Replicate())), (as_it_is, of(Shard(2))),
        (of(Shard(1)), as_it_is), (of(Shard(1)), of(Shard(1))), (of(Shard(1)), of(Shard(0))),
    ]  # fmt: skip
    for hidden_laid, u_laid in layouts if name == NAMES[0] else [layouts[0], layouts[4]]:
        extra_parity(name, hidden_laid, of(Shard(0)), u_laid, chunk_size=5)


@check(2)
def tp_extra_in_every_dtype_and_through_the_kernels():
    head_laid = over(mesh_of("tp"), Shard(0))
    for dtype, backend in ((torch.float16, "torch"), (torch.bfloat16, "torch"), (torch.float32, "triton")):
        extra_parity("weighted_nll", as_it_is, head_laid, dtype=dtype, rows=2, chunk_size=5, backend=backend)


@check(2, name=NAMES[:3])
def split_rows_with_extra(name):
    """The rows are split over the ranks, every rank has both parts of the head, and u is split or plain."""
    rows, head_laid = (over(mesh_of("tp"), placement) for placement in (Shard(1), Replicate()))
    for u_laid in (rows, as_it_is):
        extra_parity(name, rows, head_laid, u_laid)


@check(4)
def rows_and_vocabulary_with_extra():
    """On a 2-D mesh, the rows are split over one dimension, and both parts of the head by vocabulary over the other."""
    mesh = mesh_of("dp", "tp")
    rows = over(mesh, Shard(0), Replicate())
    for u_laid in (rows, as_it_is):
        extra_parity("weighted_nll", rows, functools.partial(summed_over_rows, mesh), u_laid)


@check(2)
def a_frozen_head_with_a_second_part_sends_nothing_as_long_as_the_vocabulary():
    mesh = mesh_of("tp")
    h, w, u, second = (torch.randn(s).double() for s in ((B, L, D), (V, D), (B, L, R), (V, R)))
    parts = [distribute_tensor(t, mesh, [Shard(0)]) for t in (w, second)]
    parts[1].requires_grad_()
    with Sent() as sent:
        loss = ops.weighted_linear_nll(
            h.requires_grad_(), parts[0], torch.ones(B, L, dtype=torch.long), torch.ones(B, L), extra=(u, parts[1])
        ).loss
        loss.backward()
    assert parts[0].grad is None
    assert parts[1].grad.placements == (Shard(0),)
    assert not any(n in (V, 10, 9) for shape in sent.shapes for n in shape)


class Drafter(nn.Module):
    """A small model with a Markov head: a table row per token, whose product is added to the logits of the LM head."""

    def __init__(self, trains_head=False):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.table = nn.Embedding(V, D), nn.Embedding(V, R)
        self.body, self.lm_head = nn.Linear(D, D), nn.Linear(D, V, bias=False)
        self.markov = nn.Linear(R, V, bias=False)
        self.lm_head.requires_grad_(trains_head)
        self.double()

    def forward(self, ids):
        return self.body(self.embed(ids)).tanh(), self.table(ids)


def step(model, case, inputs, ids, **options):
    hidden, u = model(ids)
    value = call(case, inputs, hidden, model.lm_head.weight, None, (u, model.markov.weight), backend="torch", **options)
    return value.sum()


def compare(name, mesh, part, parts, prepare, shards_head=True, trains_head=False):
    """Compare one step on each rank's own sequences with one process; FSDP2 divides by the number of ranks.

    A head that is not sharded is whole on every rank, like a target model's.
    """
    case = BY_NAME[name]
    inputs = drawn(case)
    ids = torch.randint(0, V, (B, L))
    one, model = Drafter(trains_head), Drafter(trains_head)
    loss = step(one, case, inputs, ids)
    loss.backward()
    prepare(model)
    for unit in (model.lm_head, model.markov) if shards_head else (model.markov,):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=set() if shards_head else {model.lm_head.weight})
    my_inputs = {k: t.chunk(parts)[part] if t.dim() else t for k, t in inputs.items()}
    mine = step(model, case, my_inputs, ids.chunk(parts)[part])
    (mine * parts).backward()
    close(summed_over(mine.detach()) * parts / dist.get_world_size(), loss.detach())
    for (label, got), (_, wanted) in zip(model.named_parameters(), one.named_parameters(), strict=True):
        assert (got.grad is None) == (wanted.grad is None), label
        if wanted.grad is not None:
            assert isinstance(got.grad, DTensor) == isinstance(got, DTensor)
            close(got.grad, wanted.grad, label)


@check(2, name=("weighted_nll", "token_nll", "dflash, dpace"))
@check(4, name=("weighted_nll",))
def fsdp_extra(name):
    """FSDP2 shards the second part. The head is whole on every rank, or sharded too, frozen or not."""
    world, mesh = dist.get_world_size(), mesh_of("fsdp")
    for shards_head, trains_head in ((False, False), (True, False), (True, True)):
        compare(name, mesh, dist.get_rank(), world, lambda model: None, shards_head, trains_head)


@check(2)
def fsdp_extra_in_mixed_precision():
    """The second part is gathered in the compute dtype. Its gradient has the dtype of the shard."""
    mesh, model = mesh_of("fsdp"), Drafter().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    model.lm_head.bfloat16()
    for unit in (model.markov, model.table, model.embed, model.body):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    case = BY_NAME["weighted_nll"]
    with torch.autocast("cpu", torch.bfloat16):
        step(model, case, drawn(case), torch.randint(0, V, (B, L))).backward()
    assert model.markov.weight.grad.dtype == torch.float32
    assert model.markov.weight.grad.full_tensor().isfinite().all()
    assert model.markov.weight.grad.full_tensor().abs().sum() > 0


@check(4)
def fsdp_over_tensor_parallel_extra():
    """Both parts are split by vocabulary over one mesh dimension, and the second is also sharded over the other."""
    mesh = mesh_of("dp", "tp")
    dp, tp = mesh["dp"], mesh["tp"]

    def prepare(model):
        for head in (model.lm_head, model.markov):
            weight = distribute_tensor(head.weight.detach(), tp, [Shard(0)])
            head.weight = nn.Parameter(weight, head.weight.requires_grad)

    compare("weighted_nll", dp, dp.get_local_rank(), 2, prepare)


@check(2)
def extra_that_cannot_be_served():
    mesh, other = mesh_of("tp"), mesh_of("another")
    h, w, u, second = (torch.randn(s) for s in ((B, L, D), (V, D), (B, L, R), (V, R)))
    y = torch.ones(B, L, dtype=torch.long)
    split, whole = shard(w, mesh, Shard(0)), shard(w, mesh, Replicate())
    like = "extra[1] must be laid out like the LM head's weight, "
    tp = shard(second, mesh, Shard(0))
    partial = DTensor.from_local(second, mesh, [Partial()], run_check=False)
    for message, head, part in (
        (f"{like}Shard(dim=0) over tp, got a plain tensor", split, second),
        (f"{like}a plain tensor, got Shard(dim=0) over tp", w, tp),
        (f"{like}Replicate() over tp, got Shard(dim=0)", whole, tp),
        ("extra[1] must not be Partial", split, partial),
        ("extra[1] must have the dtype of hidden", split, tp.bfloat16()),
    ):
        raises(ValueError, message, ops.linear_token_nll, h, head, y, extra=(u, part))
    elsewhere = shard(u, other, Replicate()), tp
    here = shard(h, mesh, Replicate())
    message = "extra[0] must be on the mesh of the hidden states"
    raises(ValueError, message, ops.linear_token_nll, here, split, y, extra=elsewhere)
