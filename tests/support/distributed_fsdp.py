"""Checks of FSDP2: the LM head sharded in every way ``fully_shard`` can, against one process with the whole batch."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint

import dllm_kernels as ours
from dllm_kernels import ops
from dllm_kernels.distributed import LossHead, gather_head, set_gradient_divide_factor, summed_over
from tests.support.distributed_checks import (
    NAMES,
    B,
    D,
    Job,
    L,
    Model,
    Sent,
    V,
    check,
    close,
    mesh_of,
    outside_forward,
    raises,
    same_gradients,
    shard,
)
from tests.support.parity import OUR_DRAWS, PLAIN_DRAWS, assert_as_good_as_plain, largest_error

FEW = ("hybrid", "MTP")  # two losses of one forward, and several calls of the head; every loss runs in three setups


class HeadWithMethod(nn.Linear):
    """A head with a method for the loss, which must be registered with FSDP2."""

    def compute(self, hidden, loss):
        return loss(hidden, self.weight, self.bias)


def own_unit(model, **options):
    """The head is a separate unit, and its parameters are used outside of its forward."""
    for module in (model.body, model.lm_head, model):
        fully_shard(module, **options)
    return outside_forward(model)


def in_root(model, **options):
    """The root unit owns the head, and the loss runs in the root's forward: the weight is a plain tensor there."""
    for module in (model.body, model):
        fully_shard(module, **options)
    return model


def after_root(model, **options):
    """The root unit owns the head, and its parameters are used after the root's forward."""
    in_root(model, **options)
    return outside_forward(model)


def loss_head(model, **options):
    """The loss runs in the forward of the head, which is a separate unit."""
    model.lm_head = LossHead.of(model.lm_head)
    own_unit(model, **options)
    return lambda ids, loss: model.lm_head(model(ids), loss)


def head_method(model, **options):
    """The loss runs in a method of the head that is registered with FSDP2."""
    own_unit(model, **options)
    register_fsdp_forward_method(model.lm_head, "compute")
    return lambda ids, loss: model.lm_head.compute(model(ids), loss)


SETUPS = {f.__name__: f for f in (own_unit, in_root, after_root, loss_head, head_method)}


def untouched(model):
    return model


def freeze(*names):
    """Freeze the parameters."""

    def frozen(model):
        for name in names:
            model.get_parameter(name).requires_grad_(False)
        return model

    return frozen


frozen_head = freeze("lm_head.weight", "lm_head.bias")


def tie(model):
    model.lm_head.weight = model.embed.weight
    return model


def compare(
    name, setup, *, prepare=untouched, bias=True, form="hidden", parts=None, part=None, factor=None, call=(), **options
):
    """Compare one step, its rows split over the data-parallel ranks, with one process; FSDP2 divides by their number.

    ``call`` holds options of the loss, ``options`` those of the setup.
    """
    parts, part = parts or dist.get_world_size(), dist.get_rank() if part is None else part
    job = Job(name, form, **dict(call))
    loss, grads = job.expected(prepare(Model(bias)), parts)
    model = prepare(Model(bias, HeadWithMethod))
    run = setup(model, **options)
    mine = job.loss(run, part, parts) * job.share(parts)
    (mine * (factor or parts)).backward()
    close(summed_over(mine) * parts / dist.get_world_size(), loss)
    same_gradients(model, grads)


@check(2, name=NAMES)
@check(4, name=FEW)
def fsdp_own_unit(name):
    compare(name, own_unit)


@check(2, name=("hybrid", "MTP"))
def fsdp_kernels(name):
    """The Triton kernels give equal results."""
    compare(name, own_unit, call={"backend": "triton"})


@check(2, name=NAMES)
def fsdp_in_root(name):
    compare(name, in_root)


@check(2, name=NAMES)
def fsdp_loss_head(name):
    compare(name, loss_head)


@check(2, name=FEW)
def fsdp_other_ways(name):
    for setup in (after_root, head_method):
        compare(name, setup)


@check(2, name=FEW)
def fsdp_reshard_after_forward(name):
    for setup in SETUPS.values():
        for reshard in (False, True):
            compare(name, setup, bias=not reshard, reshard_after_forward=reshard)


def logits_setup(setup):
    """Return the setup with logits, computed by the head, or by the root if the head belongs to it."""

    def with_logits(model, **options):
        run = setup(model, **options)
        if setup in (own_unit, loss_head):
            return lambda ids, loss: loss(model.lm_head(model(ids)))
        return lambda ids, loss: run(ids, lambda h, w, b: loss(nn.functional.linear(h, w, b)))

    return with_logits


@check(2, name=NAMES)
def fsdp_logits(name):
    """The losses from logits have equal gradients."""
    for setup in (own_unit, in_root, loss_head) if name in FEW else (own_unit,):
        compare(name, logits_setup(setup), form="logits")


@check(2, name=(*FEW, "row_stats"))
def fsdp_chunks_and_columns(name):
    """A call has several chunks; a head is split by hidden size."""
    compare(name, own_unit, call={"chunk_size": 3})
    compare(name, own_unit, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
    compare(name, in_root, call={"chunk_size": 3}, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)


@check(2, name=NAMES)
def fsdp_frozen_head(name):
    """The head is gathered, but no gradient of it is computed or sent; the gradient of the hidden states is correct."""
    for setup in (own_unit, in_root, loss_head) if name in FEW else (own_unit,):
        compare(name, setup, prepare=frozen_head)
    compare(name, logits_setup(own_unit), prepare=frozen_head, form="logits")


@check(2)
def fsdp_frozen_head_sends_no_gradient():
    model = Model()
    model.lm_head.requires_grad_(False)
    run, job = own_unit(model), Job("mdlm, counted", chunk_size=3)
    hidden = run(job.ids[:2], lambda h, w, b: (h.detach().requires_grad_(), w, b))
    inputs = {k: t[:2] if t.dim() else t for k, t in job.inputs.items()}
    with Sent() as sent:
        job.case.hidden_form(*hidden, inputs, chunk_size=3).backward()
    assert sent.names == ["all_gather", "all_gather"], sent.calls


@check(2, setup=("own_unit", "in_root", "loss_head"))
def fsdp_trained_bias_on_a_frozen_weight(setup):
    compare("mdlm, counted", SETUPS[setup], prepare=freeze("lm_head.weight"))


@check(4, name=NAMES)
def fsdp_hybrid_shard(name):
    """On a 2-D mesh, parameters are replicated over one dimension and sharded over the other."""
    mesh = mesh_of("replicate", "shard")
    for setup in (own_unit, in_root, loss_head) if name in FEW else (own_unit,):
        compare(name, setup, mesh=mesh)
    compare(name, logits_setup(own_unit), form="logits", mesh=mesh)


def split_by_vocabulary(setup, tp):
    """Return the setup with a head that tensor parallelism has split before."""

    def split(model, **options):
        head = model.lm_head
        for name, p in [*head.named_parameters()]:
            setattr(head, name, nn.Parameter(distribute_tensor(p.detach(), tp, [Shard(0)]), p.requires_grad))
        return setup(model, **options)

    return split


@check(4, name=NAMES)
def fsdp_over_tensor_parallel(name):
    """The head is split by vocabulary over one mesh dimension, and sharded with the model over the other."""
    mesh = mesh_of("dp", "tp")
    dp, tp = mesh["dp"], mesh["tp"]
    rows = {"parts": 2, "part": dp.get_local_rank()}
    for setup in (own_unit, in_root, loss_head) if name in FEW else (own_unit,):
        compare(name, split_by_vocabulary(setup, tp), mesh=dp, **rows)
    for setup in (own_unit, in_root, loss_head) if name in FEW else ():
        compare(name, split_by_vocabulary(setup, tp), prepare=frozen_head, mesh=dp, **rows)


@check(4)
def fsdp_over_tensor_parallel_sends_its_own_columns():
    """Each tensor-parallel rank gathers its columns of the head, and reduces their gradient once.

    Other traffic is per row.
    """
    mesh = mesh_of("dp", "tp")
    dp, tp = mesh["dp"], mesh["tp"]
    model, hidden = Model(bias=False), torch.randn(B, L, D).double().requires_grad_()
    split_by_vocabulary(own_unit, tp)(model, mesh=dp)
    with Sent() as sent:
        y, weights = torch.randint(0, V, (B, L)), torch.ones(B, L)
        ops.weighted_linear_nll(hidden, model.lm_head.weight, y, weights, chunk_size=10).loss.backward()
    head = [("all_gather", (5, D), 5 * D * 8), ("reduce_scatter", (10, D), 10 * D * 8)]
    rows = [("all_gather", (n, 3), n * 3 * 8) for n in (10, 10, 4)]
    assert sorted(sent.calls) == sorted([*head, *rows, ("all_reduce", (B, L, D), hidden.nbytes)]), sent.calls


@check(4, name=NAMES)
def fsdp_over_tensor_parallel_logits(name):
    """The logits of a head split by vocabulary are DTensors on the tensor-parallel mesh."""
    mesh = mesh_of("dp", "tp")
    dp, tp = mesh["dp"], mesh["tp"]

    def split_logits(model, **options):
        split_by_vocabulary(own_unit, tp)(model, **options)
        return lambda ids, loss: loss(model.lm_head(shard(model(ids), tp, Replicate())))

    compare(name, split_logits, form="logits", mesh=dp, parts=2, part=dp.get_local_rank())


def summing(setup, parameters_of):
    """Return the setup with the ranks' gradients summed instead of averaged."""

    def sums(model, **options):
        run = setup(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
        set_gradient_divide_factor(parameters_of(model.lm_head), 1.0)
        return run

    return sums


@check(2, name=FEW)
def fsdp_gradient_divide_factor(name):
    for setup in (own_unit, in_root, loss_head):
        compare(name, summing(setup, nn.Module.parameters), factor=1)


def replace_parameters(model, how):
    """Put equal values into other parameters before the first forward, as loading into a sharded model does."""
    values = {key: t.clone() for key, t in model.state_dict().items()}
    if how == "to_empty":
        model.to_empty(device="cpu")
    model.load_state_dict(values, assign=how == "assign")


@check(2, how=("assign", "to_empty"))
def fsdp_gradient_divide_factor_outlives_the_parameters(how):
    """The factor survives ``load_state_dict(assign=True)``, which replaces the parameters, and ``to_empty``."""
    for setup in (own_unit, in_root):

        def replaced(model, setup=setup):
            run, before = summing(setup, lambda head: head)(model), model.lm_head.weight
            replace_parameters(model, how)
            assert (model.lm_head.weight is before) == (how == "to_empty")
            return run

        compare("mdlm, counted", replaced, factor=1)


@check(2)
def gradient_divide_factor_of_a_parameter_without_a_module():
    """The factor is stored with the parameter."""
    hidden, y, w = torch.randn(B, L, D).double(), torch.randint(0, V, (B, L)), torch.randn(V, D).double()
    grads = []
    for factor in (1.0, 4.0):
        head = nn.Parameter(distribute_tensor(w, mesh_of("dp"), [Shard(0)]))
        set_gradient_divide_factor(head, factor)
        ops.weighted_linear_nll(hidden, head, y, torch.ones(B, L)).loss.backward()
        grads.append(head.grad)
    close(4 * grads[1], grads[0].full_tensor())


@check(2, name=FEW)
def fsdp_accumulation(name):
    """Each rank has two micro-batches, the first without synchronisation."""
    for k, setup in enumerate((*SETUPS.values(), logits_setup(own_unit))):
        bias = k % 2 == 0
        job, world = Job(name, "hidden" if setup in SETUPS.values() else "logits"), 2
        loss, grads = job.expected(Model(bias), 2 * world)
        model = Model(bias, HeadWithMethod)
        run, total = setup(model), 0
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            part = job.loss(run, 2 * dist.get_rank() + micro, 2 * world) * job.share(2 * world)
            (part * world).backward()
            total = total + part.detach()
        close(summed_over(total), loss)
        same_gradients(model, grads)


@check(2, name=("mdlm, counted", "MTP"))
def fsdp_checkpointing(name):
    """Backward recomputes the loss, and gathers again for it."""

    def checkpointed(setup, reentrant):
        def around(model, **options):
            run = setup(model, **options)
            again = functools.partial(checkpoint, use_reentrant=reentrant)
            return lambda ids, loss: run(ids, lambda *x: again(loss, *x))

        return around

    for setup in (own_unit, in_root, loss_head):
        for reentrant in (False, True):
            compare(name, checkpointed(setup, reentrant))


POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WITH_ORACLE = tuple(name for name in NAMES if name != "pipeline")


@check(2, name=WITH_ORACLE)
def fsdp_mixed_precision(name):
    """float32 parameters with bfloat16 computation are as close to float64 as plain PyTorch in bfloat16."""
    rounded = {key: t.bfloat16() for key, t in Model().state_dict().items()}

    def model(dtype):
        net = Model().to(dtype)
        net.load_state_dict(rounded)
        return net

    def plain(seed):
        """Compute each part in bfloat16, and sum their gradients in float32."""
        job, grads = Job(name, "oracle", seed, scaled=False), []
        for part in range(2):
            net = model(torch.bfloat16)
            (job.loss(outside_forward(net), part, 2) * job.share(2)).backward()
            grads.append([p.grad.float() for p in net.parameters()])
        return [a + b for a, b in zip(*grads, strict=True)]

    def exact(seed):
        return list(Job(name, "oracle", seed, scaled=False).expected(model(torch.float64), 2)[1].values())

    def sharded(setup, seed):
        form = "hidden" if setup in SETUPS.values() else "logits"
        job, net = Job(name, form, seed, scaled=False), model(torch.float32)
        (2 * job.loss(setup(net, mp_policy=POLICY), dist.get_rank(), 2) * job.share(2)).backward()
        return [p.grad.full_tensor() for p in net.parameters()]

    exact_grads = [exact(seed) for seed in range(PLAIN_DRAWS)]
    plain_grads = [plain(seed) for seed in range(PLAIN_DRAWS)]
    for setup in (*((in_root, loss_head) if name in FEW else ()), own_unit, logits_setup(own_unit)):
        got = [sharded(setup, seed) for seed in range(OUR_DRAWS)]
        for k, (label, _) in enumerate(Model().named_parameters()):
            exact_k = [e[k] for e in exact_grads]
            error = largest_error([p[k] for p in plain_grads], exact_k)
            assert_as_good_as_plain([g[k] for g in got], exact_k, error, label, (V, D, B * L))
            assert got[0][k].dtype == torch.float32


OUTPUT_IN_BF16 = MixedPrecisionPolicy(output_dtype=torch.bfloat16)


def rounding_loss_head(model, **options):
    """Return the setup with a :class:`LossHead` whose policy casts the output of its forward."""
    model.lm_head = LossHead.of(model.lm_head)
    fully_shard(model.lm_head, mp_policy=OUTPUT_IN_BF16, **options)
    fully_shard(model, **options)
    return lambda ids, loss: model.lm_head(model(ids), loss)


@check(2, name=NAMES)
def fsdp_output_dtype(name):
    """Neither the loss nor its upstream gradient is rounded; FSDP2's hooks still run."""
    for reshard in (False, True):
        compare(name, rounding_loss_head, reshard_after_forward=reshard)


@check(2)
def fsdp_output_dtype_of_counts():
    """301 is not a bfloat16 number, but logits are rounded by the policy.

    A head in a unit of several modules is included.
    """
    hidden, mask = torch.randn(301, 3, D), torch.ones(301, 3)
    head = LossHead.of(Model().float().lm_head)
    ids = head(hidden).argmax(-1)

    def loss(h, weight, bias):
        return ours.DFlashDecayLoss().forward_fused(h, weight, ids, mask, block_size=4, lm_head_bias=bias)

    expected = head(hidden, loss)
    assert expected.draft_correct_per_pos.tolist() == [301.0] * 3
    for separate_unit in (True, False):
        model = Model().float()
        model.lm_head = LossHead.of(model.lm_head)
        fully_shard(model.lm_head if separate_unit else [model.body, model.lm_head], mp_policy=OUTPUT_IN_BF16)
        fully_shard(model)
        model(ids)
        out = model.lm_head(hidden, loss)
        assert type(out) is type(expected)
        for got, plain in [(a, b) for a, b in zip(out, expected, strict=True) if b is not None]:
            assert got.dtype == plain.dtype != torch.bfloat16
            close(got, plain.detach())
        assert not separate_unit or model.lm_head(hidden).dtype == torch.bfloat16


@check(2)
def fsdp_gathers_once_a_call():
    """A call gathers and reduces weight and bias once, for any number of chunks.

    Nothing else has a vocabulary's size.
    """
    world, ragged = dist.get_world_size(), -(-V // dist.get_world_size())
    for chunk_size in (1, 5, None):
        for loss in (ops.weighted_linear_nll, lambda *x, **o: ops.linear_token_nll(*x[:3], active=x[3], **o)):
            model, hidden = Model(), torch.randn(B, L, D).double().requires_grad_()
            own_unit(model)
            with Sent() as sent:
                head = model.lm_head
                y, weights = torch.randint(0, V, (B, L)), torch.ones(B, L)
                loss(hidden, head.weight, y, weights, bias=head.bias, chunk_size=chunk_size)[0].sum().backward()
            assert sorted(sent.names) == ["all_gather"] * 2 + ["reduce_scatter"] * 2, sent.calls
            gathered, reduced = ragged * (D + 1) * 8, world * ragged * (D + 1) * 8
            assert sent.nbytes == gathered + reduced, sent.calls


@check(2)
def fsdp_gathers_in_the_dtype_of_the_computation():
    """A float32 shard is sent in bfloat16, in which it is used, and its gradient is summed in float32."""
    model = Model(bias=False).float()
    own_unit(model)
    hidden = torch.randn(B, L, D).bfloat16().requires_grad_()
    with Sent() as sent:
        out = ops.weighted_linear_nll(hidden, model.lm_head.weight, torch.randint(0, V, (B, L)), torch.ones(B, L))
        out.loss.backward()
    assert [n for *_, n in sent.calls] == [10 * D * 2, 20 * D * 4], sent.calls
    assert model.lm_head.weight.grad.dtype == torch.float32


@check(2)
def fsdp_several_uses_in_one_graph():
    """Two losses use the head, with its own forward in between; two other losses use a manually gathered head."""
    ids, y = torch.randint(0, V, (B, L)), torch.randint(0, V, (B, L))

    def loss(model, ids, y, gather):
        hidden, head = model(ids), model.lm_head
        first = ops.weighted_linear_nll(hidden, head.weight, y, torch.ones_like(y), bias=head.bias).loss
        logits = head(hidden)
        weight, bias = gather(head.weight, hidden), gather(head.bias, hidden)
        twice = [ops.linear_token_nll(hidden * k, weight, y, bias=bias).nll.square().sum() for k in (2, 3)]
        last = ops.weighted_linear_nll(hidden.sin(), head.weight, y, torch.ones_like(y)).loss
        return first + ops.token_nll(logits, y).nll.sum() + sum(twice) + last

    reference = Model()
    loss(reference, ids, y, lambda t, hidden: t).backward()
    for reshard in (True, False):
        model = Model()
        own_unit(model, reshard_after_forward=reshard)
        rank = dist.get_rank()
        (2 * loss(model, ids.chunk(2)[rank], y.chunk(2)[rank], gather_head)).backward()
        same_gradients(model, {name: p.grad for name, p in reference.named_parameters()})


@check(2)
def fsdp_mtp_finds_the_head():
    """MTP and the pipeline's loss take the head from the sharded model. From logits, they call forward many times."""
    job = Job("MTP")
    i = job.inputs
    for loss_fn in (ours.FusedLinearCrossEntropy(), ours.MaskedCrossEntropy()):

        def loss(model, rows, loss_fn=loss_fn):
            main, *depths = model(job.ids[rows]).chunk(3, 1)
            output = SimpleNamespace(logits=model.lm_head(main), hidden_states=main, mtp_per_depth_h=depths)
            out = ours.calculate_mtp_loss(
                loss_fn, mtp_per_depth_h=depths, labels=i["labels"][rows], model=model, seq_idx=i["seq_idx"][rows]
            )
            return out + ours.PipelineCausalLMLoss(loss_fn, model)(output, i["labels"][rows])

        reference = Model()
        loss(reference, slice(None)).backward()
        for setup in (own_unit, after_root):
            model = Model()
            setup(model)
            (2 * loss(model, slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2))).backward()
            same_gradients(model, {name: p.grad for name, p in reference.named_parameters()})


class Adapted(nn.Linear):
    """A head with an adapter, which a loss that takes the head's weight would omit."""

    def forward(self, hidden):
        return super().forward(hidden) + hidden.sum(-1, keepdim=True)


@check(2)
def fsdp_heads_that_do_more():
    """FSDP2's class and hooks are accepted. Another forward or hook is rejected, sharded or not."""
    job, loss_fn = Job("MTP"), ours.FusedLinearCrossEntropy()

    def loss(model):
        depths = model(job.ids).chunk(3, 1)[1:]
        return ours.calculate_mtp_loss(loss_fn, mtp_per_depth_h=depths, labels=job.inputs["labels"], model=model)

    for setup in (own_unit, after_root, loss_head):
        model = Model()
        setup(model)
        assert isinstance(model, FSDPModule)
        loss(model).backward()
        model.lm_head.register_forward_hook(lambda *_: None)
        raises(ValueError, "with a hook, fsdp_heads_that_do_more", loss, model)
    tied, split = Model(), Model()
    fully_shard([tied.embed, tied.lm_head])
    fully_shard(tied)
    parallelize_module(split.lm_head, mesh_of("tp"), ColwiseParallel(use_local_output=False))
    for model in (tied, split):
        assert model.lm_head._forward_hooks
        loss(model).backward()
    for setup in (own_unit, after_root):
        model = Model(head=Adapted)
        setup(model)
        raises(ValueError, "Adapted with a forward of its own", loss, model)
    model = Model()
    own_unit(model)
    raises(ValueError, "FSDPLinear with a hook, FSDPState", LossHead.of, model.lm_head)


@check(2, name=FEW)
def fsdp_tied_embeddings(name):
    """Embedding and head share a parameter, which FSDP2 requires in one unit: the root, or a unit of both."""

    def together(model):
        fully_shard(model.body)
        fully_shard([model.embed, model.lm_head])
        fully_shard(model)
        return outside_forward(model)

    for setup in (in_root, after_root, together):
        compare(name, setup, prepare=tie)
    compare(name, logits_setup(in_root), prepare=tie, form="logits")


@check(2)
def replicated_head_gets_the_average():
    """The head is a replicated DTensor, with different rows on each rank."""
    hidden, y, w = torch.randn(B, L, D).double(), torch.randint(0, V, (B, L)), torch.randn(V, D).double()
    w.requires_grad_()
    ops.weighted_linear_nll(hidden, w, y, torch.ones(B, L)).loss.backward()
    head = nn.Parameter(distribute_tensor(w.detach(), mesh_of("dp"), [Replicate()]))
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    ops.weighted_linear_nll(hidden[rows], head, y[rows], torch.ones(2, L)).loss.backward()
    close(2 * head.grad, w.grad)


@check(4)
def fsdp_layouts_that_cannot_be_served():
    """``reshard_after_forward`` with a number leaves a copy after a forward. Its gradient would be lost."""
    ids = torch.randint(0, V, (B, L))
    for setup in (own_unit, after_root):
        model = Model()
        setup(model, reshard_after_forward=2)
        hidden = model(ids)
        if setup is own_unit:
            model.lm_head(hidden)
        weight = model.lm_head.weight
        raises(ValueError, "reshard_after_forward=<int>", ops.linear_token_nll, hidden, weight, ids)
        raises(ValueError, "LossHead", gather_head, weight, hidden)
    compare("mdlm, counted", loss_head, reshard_after_forward=2)
    compare("mdlm, counted", own_unit, reshard_after_forward=2)  # its forward is never called


@check(2)
def fsdp_gradient_that_comes_too_late():
    """FSDP2 frees a head that a metric gathers, a loss takes, and forward calls, before the gradient of the loss."""
    ids = torch.randint(0, V, (B, L))
    for loss in (ops.weighted_linear_nll, lambda *x: ops.linear_token_nll(*x[:3])):
        model = Model()
        own_unit(model, reshard_after_forward=False)
        with torch.no_grad():
            model.lm_head(model(ids))
        hidden = model(ids)
        first = loss(hidden, model.lm_head.weight, ids, torch.ones(B, L))[0].sum()
        total = first + ops.token_nll(model.lm_head(hidden), ids).nll.sum()
        with pytest.raises(RuntimeError, match=r"freed|setStorage"):
            total.backward()


@check(2)
def fsdp_second_derivative():
    """A penalty on the gradient of the shards raises for every input, also for other uses of the gathered head."""
    ids = torch.randint(0, V, (B, L))

    def plain(hidden, weight, y):
        return torch.nn.functional.cross_entropy((hidden @ weight.t()).flatten(0, 1), y.flatten())

    for loss in (plain, lambda *x: ops.linear_token_nll(*x).nll.sum()):
        model = Model()
        own_unit(model)
        hidden, weight = model(ids).detach().requires_grad_(), model.lm_head.weight
        value = loss(hidden, gather_head(weight, hidden), ids)
        (g,) = torch.autograd.grad(value, weight, create_graph=True)
        total = value + g.to_local().square().sum()
        raises(RuntimeError, "no second derivative", torch.autograd.grad, total, [hidden])


@check(4)
def a_replicated_head_is_scattered_before_it_is_summed():
    """The replicas of a shard all-reduce the shard only."""
    weight = distribute_tensor(torch.randn(20, D), mesh_of("replicate", "shard"), [Replicate(), Shard(0)])
    full = gather_head(weight.requires_grad_(), torch.zeros(1, D))
    with Sent() as sent:
        full.sum().backward()
    assert [call[:2] for call in sent.calls] == [("reduce_scatter", (20, D)), ("all_reduce", (10, D))]
    close(weight.grad, torch.ones(20, D))


@check(4)
def a_strided_head_is_split_by_tensor_parallelism_first():
    """FSDP2 marks its dimension by a strided placement, whatever the names of the dimensions are."""
    mesh = mesh_of("replicate", "shard")
    places, whole = [_StridedShard(0, split_factor=2), Shard(0)], {"shape": (20, D), "stride": (D, 1)}
    weight = DTensor.from_local(torch.zeros(5, D), mesh, places, run_check=False, **whole)
    full = gather_head(weight, torch.zeros(1, D))
    assert full.placements == (Shard(0),)
    assert full.to_local().shape == (10, D)
