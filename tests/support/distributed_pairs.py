"""Checks of features against each other on two ranks: each pair of values once, against one process."""

import contextlib
import copy
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dllm_kernels import HybridDiffusionLLMLoss, fused_head
from dllm_kernels.distributed import LossHead
from tests.support.distributed_checks import BY_NAME, NAMES, Job, V, all_close, check, close, mesh_of
from tests.support.distributed_checks import Model as Plain
from tests.support.distributed_fused_head import assert_gradients
from tests.support.pairs import pairs

TABLE = {
    "layout": [
        "own unit", "root", "resharded root", "loss head", "DDP", "DDP, static", "FSDP1", "FSDP1, flat",
        "FSDP1, own unit", "vocabulary",
    ],
    "loss": NAMES,
    "form": ["hidden", "logits", "deferred"],
    "place": ["inside", "outside"],
    "head": ["trained", "frozen", "frozen weight", "tied", "no bias"],
    "checkpoint": ["no", "body", "reentrant body", "loss"],
    "micros": ["one", "synchronized", "synchronized last"],
    "scale": [1.0, 1024.0],
    "before": ["nothing", "no_grad", "inference", "frozen head", "copied model"],
    "chunk_size": [None, 2],  # from hidden states
}  # fmt: skip
FSDP2 = "own unit", "root", "resharded root", "loss head"
FSDP1 = "FSDP1", "FSDP1, flat", "FSDP1, own unit"


def excluded(case):
    """Return True for values that no training loop takes together."""
    layout, form, place, head = (case.get(name, "") for name in ("layout", "form", "place", "head"))
    if form == "hidden" and (layout == "FSDP1, own unit" or (layout in FSDP1 and place == "outside")):
        return True  # refused, see tests/ops/test_errors.py
    if head == "tied" and layout in ("own unit", "loss head", "FSDP1, own unit", "vocabulary"):
        return True
    if layout == "FSDP1, flat" and head in ("frozen", "frozen weight"):  # one flat parameter, trained or not
        return True
    if layout.startswith(("FSDP1", "DDP")) and case.get("before") == "frozen head":  # gradients are fixed at wrapping
        return True
    if layout in (*FSDP1, *FSDP2) and case.get("before") == "inference":  # their buffers would be tensors of this mode
        return True
    if case.get("before") == "frozen head" and head not in ("", "trained", "no bias"):
        return True
    if layout == "DDP, static" and case.get("micros") == "synchronized last":  # it learns from the first step
        return True
    return layout in ("DDP", "DDP, static") and case.get("before") == "copied model"


CASES = pairs(TABLE, excluded)


class Model(Plain):
    """A model that calls its loss in its forward, or returns what the loss takes."""

    def __init__(self, case, head=nn.Linear):
        super().__init__(bias=case["head"] != "no bias")
        if head is LossHead:
            self.lm_head = LossHead.of(self.lm_head)
        self.case = case
        if case["head"] == "tied":
            self.lm_head.weight = self.embed.weight
        if case["head"] in ("frozen", "frozen weight"):
            self.lm_head.weight.requires_grad_(False)
        if case["head"] == "frozen":
            self.lm_head.bias.requires_grad_(False)

    def hidden(self, ids):
        x = self.embed(ids)
        if self.case["checkpoint"] in ("body", "reentrant body"):
            return checkpoint(self.body, x, use_reentrant=self.case["checkpoint"] != "body").tanh()
        return self.body(x).tanh()

    def forward(self, ids, loss=None):
        hidden = self.hidden(ids)
        if loss is not None:
            return self.loss_of(hidden, loss)
        return hidden if self.takes_hidden else self.lm_head(hidden)

    @property
    def takes_hidden(self):
        return self.case["form"] in ("hidden", "oracle") or self.case["layout"] in ("own unit", "loss head")

    def loss_of(self, out, loss):
        """Compute the loss from the result of forward or from hidden states."""
        if self.case["form"] in ("hidden", "oracle"):
            return loss(out, self.lm_head.weight, self.lm_head.bias)
        return loss(out if out.shape[-1] == V else self.lm_head(out))


def wrapped(case):
    """Return the wrapped model, and the function that runs it and the loss."""
    model, layout = Model(case, LossHead if case["layout"] == "loss head" else nn.Linear), case["layout"]
    if case["before"] == "copied model":
        model = copy.deepcopy(model)
    whole = model
    fsdp1 = functools.partial(
        FullyShardedDataParallel, use_orig_params=layout != "FSDP1, flat", device_id=torch.device("cpu")
    )
    if layout.startswith("DDP"):
        whole = DistributedDataParallel(model, static_graph=layout == "DDP, static")
    elif layout == "FSDP1, own unit":
        model.lm_head = fsdp1(model.lm_head)
    elif layout == "vocabulary":
        plan = ColwiseParallel(use_local_output=False)
        if case["form"] == "hidden":
            plan = ColwiseParallel()
        parallelize_module(model, mesh_of("tp"), {"lm_head": plan})
    elif layout in FSDP2:
        if layout in ("own unit", "loss head"):
            fully_shard(model.lm_head)
        fully_shard(model, reshard_after_forward=layout == "resharded root")
    if layout in FSDP1:
        whole = fsdp1(model)

    def run(ids, loss):
        if layout == "loss head" and case["form"] == "hidden":
            return model.lm_head(whole(ids), loss)
        if case["place"] == "inside":
            return whole(ids, loss)
        return model.loss_of(whole(ids), loss)

    return model, whole, run


@contextlib.contextmanager
def synchronized(whole, on):
    """Reduce the gradients of the backward passes within the context, or only add them up."""
    if isinstance(whole, FullyShardedDataParallel | DistributedDataParallel):
        with contextlib.nullcontext() if on else whole.no_sync():
            yield
        return
    if hasattr(whole, "set_requires_gradient_sync"):
        whole.set_requires_gradient_sync(on)
    yield


def expected(case, job, parts):
    """Compute loss and gradients of the whole batch with one plain model and the oracle."""
    plain = Model(case | {"checkpoint": "no", "form": job.form})
    loss = sum(job.loss(plain, part, parts) for part in range(parts)) * job.share(parts)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in plain.named_parameters()}


@check(2, layout=TABLE["layout"])
def pairs_of_features(layout):
    for number, case in enumerate(CASES):
        if case["layout"] == layout:
            try:
                compare(case, number)
            except Exception as error:
                raise AssertionError(f"{case}: {error}") from error


def compare(case, seed):
    """Compare loss and gradients of a case with one process."""
    parallel = case["layout"] != "vocabulary"
    world, rank = (2, dist.get_rank()) if parallel else (1, 0)
    micros = 1 if case["micros"] == "one" else 2
    of_form = "hidden" if case["form"] == "hidden" else "logits"
    options = {"chunk_size": case["chunk_size"]} if of_form == "hidden" and case["chunk_size"] else {}
    job = Job(case["loss"], of_form, seed=seed, **options)
    oracle = Job(case["loss"], "oracle" if BY_NAME[case["loss"]].equation else of_form, seed=seed)
    value, grads = expected(case, oracle, world * micros)
    model, whole, run = wrapped(case)
    around = fused_head(whole, on_logits="allow") if case["form"] == "deferred" else contextlib.nullcontext()

    def loss_of(part):
        def function(ids, loss):
            if case["checkpoint"] == "loss":
                return run(ids, functools.partial(checkpoint, loss, use_reentrant=False))
            return run(ids, loss)

        return job.loss(function, part, world * micros) * job.share(world * micros)

    total = 0.0
    with around:
        if case["before"] in ("no_grad", "inference"):
            with torch.no_grad() if case["before"] == "no_grad" else torch.inference_mode():
                loss_of(rank * micros)
        if case["before"] == "frozen head":
            model.lm_head.requires_grad_(False)
            loss_of(rank * micros).backward()
            assert all(p.grad is None for p in model.lm_head.parameters())
            model.lm_head.requires_grad_(True)
            model.zero_grad()
        for micro in range(micros):
            with synchronized(whole, micro == micros - 1 or case["micros"] == "synchronized"):
                mine = loss_of(rank * micros + micro)
                (mine * world * case["scale"]).backward()
            total = total + mine.detach()
    if parallel:
        dist.all_reduce(total)
    close(total, value)
    assert_gradients(whole, {name: g if g is None else g * case["scale"] for name, g in grads.items()})


@check(2)
def a_compiled_hybrid_loss_of_two_slices():
    """Slices made outside of the compiled function; a graph cannot return a view of a DTensor."""
    torch.compiler.reset()
    z, y, on = torch.randn(2, 8, V), torch.randint(0, V, (2, 4)), torch.ones(2, 4)
    loss, found = HybridDiffusionLLMLoss(), []
    for function in (loss, torch.compile(loss, backend="aot_eager")):
        whole = distribute_tensor(z, mesh_of("tp"), [Shard(2)]).requires_grad_()
        out = function(whole[:, :4], y, on, on, on, causal_logits=whole[:, 4:], loss_mask_ar=on).total_loss
        out.backward()
        found.append((out.detach(), whole.grad.full_tensor()))
    all_close(*found)
