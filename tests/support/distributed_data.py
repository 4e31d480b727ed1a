"""Checks of data parallelism: any split of a batch over ranks and micro-batches has the gradients of one process."""

import itertools

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import dllm_kernels as ours
from dllm_kernels import ops
from dllm_kernels.distributed import gather_head, global_token_count, summed_over
from dllm_kernels.mtp import mtp_labels
from tests.support.cases import BLOCK, BY_NAME
from tests.support.distributed_checks import BY_NAME as BY_JOB
from tests.support.distributed_checks import (
    NAMES,
    B,
    D,
    Job,
    L,
    Model,
    V,
    all_close,
    check,
    close,
    drawn,
    mesh_of,
    outside_forward,
    raises,
    same_gradients,
)

# Count of the inputs of one call -> the mask whose entries it counts.
COUNTED = {
    "num_diffusion_tokens": lambda i: (
        i["loss_mask"] if "loss_mask" in i else i["answer_mask"][:, 1:] & (i["valid_mask"][:, 1:] != 0)
    ),
    "num_ar_tokens": lambda i: i["loss_mask_ar"][:, 1:],
    "num_tokens": lambda i: (
        i["valid_mask"][:, :-1] & i["valid_mask"][:, 1:]
        if "valid_mask" in i
        else i["block_mask" if "block_mask" in i else "loss_mask"]
    ),
    "num_blocks": lambda i: (i["block_mask"] != 0).unflatten(1, (-1, BLOCK - 1)).any(-1),
    "num_sequences": lambda i: (i["block_mask"] != 0).any(1),
    "num_label_tokens": lambda i: i["labels"] != -100,
}


def count_globally(job, part=0, parts=1, group=None):
    """Replace the counts by those of this rank's masks, summed over the ranks. With one part, count the whole masks."""
    inputs = {name: job.cut(t, part, parts) for name, t in job.inputs.items()}
    for name in job.inputs.keys() & COUNTED.keys():
        mask = COUNTED[name](inputs)
        job.inputs[name] = (mask != 0).sum() if parts == 1 else global_token_count(mask, group)
    return job


def as_ints(job):
    for name in job.inputs.keys() & COUNTED.keys():
        job.inputs[name] = int(job.inputs[name])
    return job


def summed_gradients(model):
    for p in model.parameters():
        p.grad = summed_over(p.grad)


def accumulate(job, model, micros, form):
    """Run every micro-batch of this rank, then sum over the ranks."""
    rank, parts = dist.get_rank(), dist.get_world_size() * micros
    total = torch.zeros((), dtype=torch.float64)
    for micro in range(micros):
        loss = job.loss(outside_forward(model, form), rank * micros + micro, parts) * job.share(parts)
        loss.backward()
        total += loss.detach()
    summed_gradients(model)
    return summed_over(total)


@check(2, name=NAMES)
@check(4, name=("hybrid", "MTP"))
def data_parallel(name):
    """From logits and hidden states; micro-batches; counts as ints, as tensors, and from all ranks' masks."""
    world = dist.get_world_size()
    splits = [(1, "tensors"), (2, "ints"), (2, "masks")] if world == 2 else [(1, "masks")]
    for form, (micros, counts) in itertools.product(("logits", "hidden"), splits):
        whole, job = Job(name, form), Job(name, form)
        if counts == "masks":
            whole, job = count_globally(whole), count_globally(job, dist.get_rank(), world)
        elif counts == "ints":
            job = as_ints(job)
        loss, grads = whole.expected(Model(), world * micros)
        model = Model()
        close(accumulate(job, model, micros, form), loss)
        same_gradients(model, grads)


@check(2)
@check(4)
def counts_over_ranks():
    """Masks of any dtype give a 0-d int64 without a host sync; a group of some ranks is possible."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mask = torch.rand(world, B, L) < 0.5
    for dtype in (torch.bool, torch.int32, torch.float32):
        count = global_token_count(mask[rank].to(dtype) * (2 if dtype != torch.bool else 1))
        assert count.dtype == torch.int64
        assert count.shape == ()
        assert count == mask.sum()
    values = torch.tensor([rank + 0.5, 1.0], requires_grad=True)
    total = summed_over(values)
    close(total, torch.tensor([world * (world - 1) / 2 + 0.5 * world, float(world)]))
    assert not total.requires_grad
    close(values.detach(), torch.tensor([rank + 0.5, 1.0]))
    if world == 4:
        mesh = mesh_of("dp", "tp")
        mine = [r for r in range(4) if r % 2 == rank % 2]
        assert global_token_count(mask[rank], mesh["dp"].get_group()) == mask[mine].sum()


@check(2)
def sums_of_other_strides():
    """A collective sums memory; the strides of two ranks may order the elements differently."""
    values = torch.arange(6.0).view(2, 3)
    mine = values if dist.get_rank() == 0 else values.T.contiguous().T
    close(summed_over(mine), 2 * values)
    close(summed_over(mine[:, :2]), 2 * values[:, :2])
    close(summed_over(torch.ones(1).expand(3)), torch.full((3,), 2.0))


@check(2)
def sums_of_bad_input():
    mesh, rank = mesh_of("dp"), dist.get_rank()
    others = [dist.new_group([r]) for r in range(2)][1 - rank]
    whole = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    for function, name in ((summed_over, "t"), (global_token_count, "mask")):
        raises(TypeError, f"{name} must be a plain torch.Tensor, got DTensor; pass its to_local() or ", function, whole)
        raises(ValueError, "group must contain this rank, got a group of other ranks", function, torch.ones(2), others)
        got = "group must be a torch.distributed.ProcessGroup or None, got "
        raises(TypeError, got + "str", function, torch.ones(2), "dp")
        raises(TypeError, got + "torch.distributed.device_mesh.DeviceMesh; pass its get", function, torch.ones(2), mesh)
    raises(TypeError, "hidden must be a torch.Tensor, got NoneType", gather_head, whole, None)
    raises(ValueError, "t must have a numeric dtype, got bool; pass t.sum()", summed_over, torch.tensor([True]))


def outside(wrapped):
    head = wrapped.module.lm_head
    return lambda ids, loss: loss(wrapped(ids), head.weight, head.bias)


def inside_from_logits(wrapped):
    return lambda ids, loss: wrapped(ids, lambda *x: loss(torch.nn.functional.linear(*x)))


@check(2, name=NAMES)
def distributed_data_parallel(name):
    """DDP averages gradients: the loss in the model's forward, and outside of it; accumulation."""
    for way in (lambda wrapped: wrapped, outside, inside_from_logits):
        for micros in (1, 2):
            parts, job = 2 * micros, Job(name, "logits" if way is inside_from_logits else "hidden")
            loss, grads = job.expected(Model(), parts)
            wrapped = DistributedDataParallel(Model())
            total = torch.zeros((), dtype=torch.float64)
            for micro in range(micros):
                wrapped.require_backward_grad_sync = micro == micros - 1
                part = job.loss(way(wrapped), dist.get_rank() * micros + micro, parts) * job.share(parts)
                (2 * part).backward()
                total += part.detach()
            close(summed_over(total), loss)
            same_gradients(wrapped.module, grads)


@check(2)
def distributed_data_parallel_mtp_finds_the_head():
    job = Job("MTP")
    i, rows = job.inputs, slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    for loss_fn in (ours.FusedLinearCrossEntropy(), ours.MaskedCrossEntropy()):

        def loss(model, rows, loss_fn=loss_fn):
            return ours.calculate_mtp_loss(
                loss_fn, mtp_per_depth_h=list(model(job.ids[rows]).chunk(3, 1)), labels=i["labels"][rows], model=model,
                num_label_tokens=i["num_label_tokens"], seq_idx=i["seq_idx"][rows],
            )  # fmt: skip

        reference, model = Model(), Model()
        loss(reference, slice(None)).backward()
        wrapped = DistributedDataParallel(model)
        (2 * loss(wrapped, rows)).backward()
        same_gradients(model, {name: p.grad for name, p in reference.named_parameters()})


def case_names(condition):
    """Return the names of the cases with plain logits for which this holds."""
    return [case.name for case in BY_JOB.values() if not case.transform and condition(case)]


UNSHIFTED = case_names(lambda case: not case.shifted and not case.counted_locally)
SHIFTED = case_names(lambda case: case.shifted)


@check(2, name=UNSHIFTED)
def context_parallel(name):
    """Plain tensors, with a part of every sequence on each rank: the sum of the ranks' losses is that of the whole.

    A split lies between two blocks of DFlash.
    """

    class AlongTheSequence(Job):
        def cut(self, t, part, parts):
            return t.chunk(parts, 1)[part] if isinstance(t, torch.Tensor) and t.dim() else t

    assert L // 2 % (BLOCK - 1) == 0
    for form in ("logits", "hidden"):
        job = AlongTheSequence(name, form)
        loss, grads = Job(name, form).expected(Model(), 2)
        model = Model()
        close(accumulate(job, model, 1, form), loss)
        same_gradients(model, grads)


class Outputs:
    """A model's output as several tensors instead of one with all of them side by side."""

    def __init__(self, outputs):
        self.outputs = outputs

    def chunk(self, number, dim):
        return self.outputs

    def __getitem__(self, rows):
        return self.outputs[rows[1].start is not None]


def along_the_sequence(model, mesh, job):
    """Return a function from ids to hidden states of this rank's part of the sequences, as a DTensor or several."""

    def local_part(ids):
        return DTensor.from_local(model(ids.chunk(2, 1)[dist.get_rank()]), mesh, [Shard(1)])

    if not job.case.separate:
        return local_part
    return lambda ids: Outputs([local_part(part) for part in ids.chunk(job.case.width, 1)])


@check(2, name=SHIFTED)
def context_parallel_shifted(name):
    """DTensors split along the sequence, with whole targets and masks on every rank, have the loss of the whole.

    The gradient of a head that is a DTensor is summed. With a plain head, each rank has its share, as for the rest of
    the model.
    """
    mesh, job = mesh_of("cp"), Job(name)
    loss, grads = Job(name).expected(Model(), 1)
    for dtensor in (True, False):
        model = Model()
        hidden = along_the_sequence(model, mesh, job)
        head = [model.lm_head.weight, model.lm_head.bias]
        if dtensor:
            head = [DTensor.from_local(p, mesh, [Replicate()]) for p in head]
        value = job.loss(lambda ids, function, hidden=hidden, head=head: function(hidden(ids), *head))
        value.backward()
        close(value.detach(), loss)
        for key, p in model.named_parameters():
            if not (dtensor and "lm_head" in key):
                p.grad = summed_over(p.grad)
        same_gradients(model, grads)


# The two halves of hybrid, cut from one DTensor, are no longer split.
@check(2, name=[name for name in SHIFTED if name != "hybrid"])
def context_parallel_shifted_fsdp(name):
    """FSDP2 shards the model over the ranks that split the sequence, and averages their gradients."""
    mesh, job = mesh_of("cp"), Job(name)
    loss, grads = Job(name).expected(Model(), 1)
    model = Model()
    for module in (model.body, model.lm_head, model):
        fully_shard(module, mesh=mesh)
    hidden = along_the_sequence(model, mesh, job)
    value = job.loss(lambda ids, function: function(hidden(ids), model.lm_head.weight, model.lm_head.bias))
    (2 * value).backward()
    close(value.detach(), loss)
    same_gradients(model, grads)


@check(2, name=SHIFTED)
def context_parallel_shifted_logits(name):
    mesh, job, model = mesh_of("cp"), Job(name, "logits"), Model()
    loss, grads = Job(name, "logits").expected(Model(), 1)

    def everywhere(ids, function):
        return function(DTensor.from_local(model.lm_head(model(ids.chunk(2, 1)[dist.get_rank()])), mesh, [Shard(1)]))

    value = job.loss(everywhere)
    value.backward()
    close(value.detach(), loss)
    summed_gradients(model)
    same_gradients(model, grads)


@check(2)
def context_parallel_targets_of_mtp():
    """Plain tensors: labels are shifted over the whole sequences first, then split like the hidden states."""
    job, rank = Job("MTP"), dist.get_rank()
    i, h = job.inputs, [torch.randn(B, L, D).double() for _ in range(2)]
    w = torch.randn(V, D).double()
    targets = [mtp_labels(i["labels"], k, seq_idx=i["seq_idx"]) for k in range(2)]

    def gradients(cut):
        leaves, head = [cut(t).clone().requires_grad_() for t in h], w.clone().requires_grad_()
        ours.calculate_mtp_loss(
            ours.FusedLinearCrossEntropy(), mtp_per_depth_h=leaves, mtp_per_depth_targets=[cut(t) for t in targets],
            labels=cut(i["labels"]), model=torch.nn.Module(), lm_weight=head, num_label_tokens=i["num_label_tokens"],
        ).backward()  # fmt: skip
        return [t.grad for t in leaves], head.grad

    whole, head = gradients(lambda t: t)
    parts, part_of_head = gradients(lambda t: t.chunk(2, 1)[rank])
    close(summed_over(part_of_head), head)
    all_close(parts, [t.chunk(2, 1)[rank] for t in whole])
    loss_fn, common = ours.FusedLinearCrossEntropy(), {"mtp_per_depth_h": h, "model": torch.nn.Module(), "lm_weight": w}
    expected = ours.calculate_mtp_loss(loss_fn, **common, **i)
    del i["seq_idx"]
    close(ours.calculate_mtp_loss(loss_fn, mtp_per_depth_targets=targets, **common, **i), expected)


@check(2)
def context_parallel_shifted_by_hand():
    """A plain split of a shifted loss omits the pair at the border; the primitive on shifted targets includes it."""
    inputs, rank = drawn(BY_NAME["encoder AR"]), dist.get_rank()
    ids, valid = inputs["input_ids"], inputs["valid_mask"]
    valid[0, L // 2 - 1 : L // 2 + 1] = True  # a pair across the border
    x = torch.randn(B, L, V).double()
    pairs = valid[:, :-1] & valid[:, 1:]
    whole = ours.encoder_ar_loss(x, ids, valid, num_tokens=1)
    here = slice(rank * L // 2, (rank + 1) * L // 2)
    split = ours.encoder_ar_loss(x[:, here], ids[:, here], valid[:, here], num_tokens=1)
    border = ops.token_nll(x[:, L // 2 - 1], ids[:, L // 2], active=pairs[:, L // 2 - 1]).nll.sum()
    assert border > 0
    close(summed_over(split) + border, whole)
    weights = torch.nn.functional.pad(pairs, (0, 1)).double()
    targets = mtp_labels(ids, 0)
    kept = ops.weighted_nll(x[:, here], targets[:, here], weights[:, here]).loss
    close(summed_over(kept), whole)


@check(2)
def draft_accuracy_over_ranks():
    """The accuracies equal those of one process with the whole batch."""
    inputs, rank, world = drawn(BY_NAME["dflash"]), dist.get_rank(), dist.get_world_size()
    inputs["block_mask"] = (inputs["block_mask"] != 0).float()
    x = torch.randn(B, L, V)
    x.scatter_add_(2, inputs["target_ids"].clamp(min=0).unsqueeze(2), torch.full((B, L, 1), 2.0))
    loss = ours.DFlashDecayLoss()
    expected = ours.draft_accuracy(loss(x, **inputs, block_size=BLOCK))
    parts = {name: t.chunk(world)[rank] if t.dim() else t for name, t in inputs.items()}
    got = ours.draft_accuracy(loss(x.chunk(world)[rank], **parts, block_size=BLOCK), group=dist.group.WORLD)
    assert got.keys() == expected.keys() == {"draft_acc", *(f"draft_acc_k{k}" for k in range(1, BLOCK))}
    assert 0 < expected["draft_acc"] < 1
    for name, value in expected.items():
        close(got[name], value)


@check(2)
def acceptance_length_over_ranks():
    """The result equals that of one process, although the ranks have different numbers of blocks, and one has none."""
    rank, world = dist.get_rank(), dist.get_world_size()
    correct, mask = torch.rand(world, 4 * L) < 0.7, (torch.rand(world, 4 * L) < 0.6).float()
    mask[-1] = 0
    given = torch.randint(1, BLOCK, (world, 4 * L // (BLOCK - 1)))
    for bonus, prefix in ((False, None), (True, None), (True, given)):
        expected = ours.acceptance_length(correct, mask, BLOCK, bonus=bonus, prefix=prefix)
        mine = slice(rank, rank + 1)
        options = {"bonus": bonus, "group": dist.group.WORLD, "prefix": prefix if prefix is None else prefix[mine]}
        got = ours.acceptance_length(correct[mine], mask[mine], BLOCK, **options)
        assert 0 < expected < BLOCK
        close(got, expected)
