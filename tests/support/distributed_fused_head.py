"""Checks of ``fused_head`` in several processes: a loop from logits under DDP and FSDP2 equals one process."""

import contextlib
import itertools
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dllm_kernels import fused_head
from dllm_kernels.integrations.transformers import loss_in_head
from dllm_kernels.ops import weighted_linear_nll
from tests.support.distributed_checks import V, check, close, mesh_of, same_gradients

L, D, STEPS = 6, 5, 2


class Model(nn.Module):
    def __init__(self, tied=False, recompute=False, frozen=(), unused=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.lm_head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V, bias=not tied)
        self.recompute = recompute
        if tied:
            self.lm_head.weight = self.embed.weight
        for name in frozen:
            self.lm_head.get_parameter(name).requires_grad_(False)
        if unused:
            self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, ids, result=lambda logits, ids: {"logits": logits}):
        hidden = self.embed(ids)
        hidden = checkpoint(self.body, hidden, use_reentrant=False) if self.recompute else self.body(hidden)
        return result(self.lm_head(torch.tanh(hidden)), ids)


def batch(step, rank):
    g = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, V, (2, L), generator=g), torch.rand(2, L, generator=g) < 0.5


def loss_of(model, step, rank):
    ids, masked = batch(step, rank)
    logits = model(ids)["logits"]
    nll = F.cross_entropy(logits.float().transpose(1, 2), ids, reduction="none")
    selected = F.log_softmax(logits[masked], -1).gather(-1, ids[masked].unsqueeze(-1)).squeeze(-1)
    return (nll * masked / 0.5).sum() / ids.numel() - selected.exp().mean()


def expected(ranks, **options):
    """Gradients of one process, averaged over ranks."""
    model = Model(**options)
    for step in range(STEPS):
        for rank in range(ranks):
            (loss_of(model, step, rank) / ranks).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def own_unit(model, **options):
    fully_shard(model.lm_head, **options)
    return fully_shard(model, **options)


def in_root(model, **options):
    return fully_shard(model, **options)


def resharded_root(model, **options):
    return fully_shard(model, reshard_after_forward=True, **options)


def ddp(model):
    return DistributedDataParallel(model)


def ddp_searching(model):
    return DistributedDataParallel(model, find_unused_parameters=True)


def ddp_static(model):
    return DistributedDataParallel(model, static_graph=True)


def synced(model, on):
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(on)
    elif isinstance(model, DistributedDataParallel) and not model.static_graph:  # which learns from the first step
        model.require_backward_grad_sync = on


def fsdp1(model, original=True):
    return FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))


def fsdp1_flat(model):
    return fsdp1(model, original=False)


def fsdp1_own_unit(model):
    model.lm_head = fsdp1(model.lm_head)
    return fsdp1(model)


PLAIN_SETUPS = own_unit, in_root, resharded_root, ddp, ddp_searching, ddp_static, fsdp1, fsdp1_flat
SETUPS = {f.__name__: f for f in PLAIN_SETUPS}


def trains_as_one_process(setup, **options):
    """Accumulate two micro-batches, of which only the last one synchronizes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    grads, model = expected(ranks, **options), Model(**options)
    wrapped = setup(model)
    with fused_head(wrapped, on_logits="raise") as fused:
        for step in range(STEPS):
            synced(wrapped, step == STEPS - 1)
            loss_of(wrapped, step, rank).backward()
    assert fused.materialized == 0
    assert_gradients(wrapped, grads)


def assert_gradients(wrapped, grads):
    """Compare gradients of a wrapped model with those of a plain one, from the steps of an optimizer under FSDP1."""
    found = {name: p.grad for name, p in wrapped.named_parameters()}
    if isinstance(wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
            before = {name: p.detach().clone() for name, p in wrapped.named_parameters()}
        torch.optim.SGD(wrapped.parameters(), 1.0).step()
        with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
            found = {name: before[name] - p.detach() for name, p in wrapped.named_parameters()}
    plain = {name.replace("_fsdp_wrapped_module.", "").removeprefix("module."): g for name, g in found.items()}
    assert plain.keys() == grads.keys()
    for name, grad in plain.items():
        if grads[name] is None:
            assert grad is None or not grad.any(), name
        else:
            close(grad, grads[name], name)


@check(2, setup=SETUPS)
def fused_head_trains_as_one_process(setup):
    trains_as_one_process(SETUPS[setup])


@check(2, setup=SETUPS)
def fused_head_with_tied_weights_and_checkpointing(setup):
    if setup == "own_unit":  # a tied weight is in one unit
        return
    trains_as_one_process(SETUPS[setup], tied=True, recompute=True)


@check(2, setup=("ddp_searching", "ddp_static"))
def fused_head_with_frozen_and_unused_parameters(setup):
    """DDP searches forward's result for used parameters, which does not contain the head's weight yet."""
    for frozen in ((), ("weight",), ("weight", "bias")):
        trains_as_one_process(SETUPS[setup], frozen=frozen, unused=True)


@check(2, setup=("own_unit", "in_root", "ddp_searching", "ddp_static"))
def fused_head_materializes(setup):
    """An operation that needs the logits gets them from a sharded head too."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ids = [batch(0, r)[0] for r in range(ranks)]
    model = Model()
    for each in ids:
        (model(each)["logits"].softmax(-1)[..., 0].sum() / ranks).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    wrapped = SETUPS[setup](model := Model())
    with fused_head(wrapped, on_logits="allow") as fused:
        wrapped(ids[rank])["logits"].softmax(-1)[..., 0].sum().backward()
    assert fused.materialized == 1
    same_gradients(model, grads)


def nll(logits, ids):
    return F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")


def log_probs(logits, ids):
    return logits.log_softmax(-1).gather(-1, ids)


# What a model may return in place of its logits. Its wrapper sees it, adds hooks and may free parameters.
RESULTS = {
    "tuple": lambda z, ids: (z, z.argmax(-1)),
    "float": lambda z, ids: z.double(),
    "cap": lambda z, ids: 3 * torch.tanh(z / 3),
    "view": lambda z, ids: z.view(-1, V),
    "slice": lambda z, ids: z[:, :-1],
    "transposed": lambda z, ids: z.transpose(1, 2),
    "copy": lambda z, ids: z[:, 1:].clone(),
    "nll": nll,
    "reshaped nll": lambda z, ids: nll(z, ids).flatten()[2:],
    "loss": lambda z, ids: nll(z, ids).mean(),
    "logsumexp": lambda z, ids: z.logsumexp(-1),
    "kept logsumexp": lambda z, ids: z.logsumexp(-1, keepdim=True),
    "log-probability": lambda z, ids: log_probs(z, ids.unsqueeze(-1)).squeeze(-1),
    "log-probabilities": lambda z, ids: log_probs(z, torch.stack([ids, ids * 0], -1)),
    "logits of ids": lambda z, ids: z.gather(-1, torch.stack([ids, ids * 0], -1)),
}


def square_of(model, step, rank, result):
    out = model(batch(step, rank)[0], result)
    out = out[0] if isinstance(out, tuple) else out
    return (out.double() ** 2).mean()


@check(2, setup=(*SETUPS, "fsdp1_own_unit"))
def what_a_model_returns_under_fused_head(setup):
    """Values, gradients of two steps and warnings are those of plain logits, whatever the wrapper hooks."""
    for name, result in RESULTS.items():
        plain = Model()
        for step, rank in itertools.product(range(STEPS), range(2)):
            (square_of(plain, step, rank, result) / 2).backward()
        grads = {name: p.grad for name, p in plain.named_parameters()}
        warned = []
        for fused in (False, True):
            wrapped = {**SETUPS, "fsdp1_own_unit": fsdp1_own_unit}[setup](Model())
            context = fused_head(wrapped, on_logits="allow") if fused else contextlib.nullcontext()
            with warnings.catch_warnings(record=True) as caught, context:
                warnings.simplefilter("always")
                for step in range(STEPS):
                    square_of(wrapped, step, dist.get_rank(), result).backward()
            warned.append(Counter(str(w.message) for w in caught if "view" in str(w.message)))
        try:
            assert_gradients(wrapped, grads)
        except AssertionError as error:
            raise AssertionError(f"{setup}, {name}: {error}") from None
        assert warned[1] <= warned[0], (setup, name, warned)


@check(2)
def fused_head_of_an_fsdp1_unit_of_its_own():
    """FSDP1 frees the weight of the head before the loss, so the logits are computed."""
    wrapped = fsdp1_own_unit(Model())
    with (
        fused_head(wrapped, on_logits="raise"),
        pytest.raises(RuntimeError, match=r"FullyShardedDataParallel of the head, .* needs the logits .* fully_shard"),
    ):
        wrapped(batch(0, 0)[0])


@check(2)
def fused_head_under_mixed_precision():
    """FSDP2 casts the outputs of the model; the products stay in bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    for setup in (own_unit, in_root):
        wrapped = setup(Model(), mp_policy=policy)
        with fused_head(wrapped, on_logits="raise"):
            logits = wrapped(batch(0, dist.get_rank())[0])["logits"]
            assert logits.dtype == torch.float32
            assert logits.parts[0].dtype == torch.bfloat16
            logits.logsumexp(-1).sum().backward()
        assert all(p.grad is not None for p in wrapped.parameters())


@check(2)
def fused_head_of_a_split_vocabulary():
    """Under tensor parallelism the hooks of the plan lay out the logits, which are computed for them."""
    ids, masked = batch(0, 0)
    plain = Model()
    plain(ids)["logits"][masked].logsumexp(-1).sum().backward()
    model = Model()
    parallelize_module(model, mesh_of("tp"), {"lm_head": ColwiseParallel(use_local_output=False)})
    with fused_head(model, on_logits="allow"):
        model(ids)["logits"].full_tensor()[masked].logsumexp(-1).sum().backward()
    same_gradients(model, {name: p.grad for name, p in plain.named_parameters()})


@check(2, original=(False, True))
def the_loss_in_a_head_that_fsdp1_shards(original):
    """Between forwards, the weight of the head is flat or empty with ``use_orig_params``, and freed without."""
    ids = torch.tensor([[1, 2, 3, 0]]) + dist.get_rank()
    for own in (False, True):
        models = Model(), Model()
        for model in models:
            if own:
                model.lm_head = fsdp1(model.lm_head, original)
        wrapped = [fsdp1(model, original) for model in models]
        optimizers = [torch.optim.SGD(model.parameters(), 0.5) for model in wrapped]
        for optimizer in optimizers:
            optimizer.zero_grad()

        def loss(hidden, weight, bias):
            return weighted_linear_nll(hidden, weight, ids, torch.full(ids.shape, 0.25), bias=bias).loss

        with loss_in_head(models[0], loss):
            fused = wrapped[0](ids)["logits"]
        plain = F.cross_entropy(wrapped[1](ids)["logits"].flatten(0, 1), ids.flatten())
        close(fused, plain, "loss")
        for value, optimizer in zip((fused, plain), optimizers, strict=True):
            value.backward()
            optimizer.step()
        with FullyShardedDataParallel.summon_full_params(wrapped[0]):
            ours = {name: p.clone() for name, p in wrapped[0].named_parameters()}
        with FullyShardedDataParallel.summon_full_params(wrapped[1]):
            for name, p in wrapped[1].named_parameters():
                close(ours[name], p, name)


@check(2)
def a_local_shard_for_the_head_is_named():
    """Half of the vocabulary is no error by its shape."""
    weight = distribute_tensor(torch.randn(V, D), mesh_of("tp"), [Shard(0)])
    ids = torch.tensor([[0, V - 1]])
    message = r"got \d+ at position .*; a head or logits split over ranks must be a DTensor"
    with pytest.raises(IndexError, match=message):
        weighted_linear_nll(torch.randn(1, 2, D), weight.to_local(), ids, torch.ones(1, 2), check_targets=True)
