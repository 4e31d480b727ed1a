"""Checks of the pipeline's loss in real schedules: two stages against one process with the whole batch."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import dllm_kernels as ours
import reference
from tests.support.cases import BY_NAME
from tests.support.distributed_checks import B, D, L, V, check, close, drawn, mesh_of, raises, same_gradients

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
OUTPUTS = ("hidden depths", "logit depths", "hidden depths, packed", "logits", "hidden states")
MICROBATCHES = 4


class FirstStage(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.body = nn.Embedding(V, D), nn.Linear(D, D)
        self.double()

    def forward(self, ids):
        return self.body(self.embed(ids)).tanh()


class LastStage(nn.Module):
    """A stage that returns the outputs named by ``output``.

    They are logits or hidden states, MTP depths, and the index of packed sub-sequences.
    """

    def __init__(self, output):
        super().__init__()
        torch.manual_seed(3)
        self.body, self.lm_head = nn.Linear(D, D), nn.Linear(D, V)
        self.mtp = nn.ModuleList(nn.Linear(D, D) for _ in range(2 if "depths" in output else 0))
        self.mtp_config = SimpleNamespace(loss_scaling_factor=0.3)
        self.mtp_outputs_are_logits = "logit depths" in output
        self.output = output
        self.double()

    def forward(self, hidden, seq_idx=None):
        hidden = self.body(hidden).sin()
        if self.output == "hidden states":
            return hidden
        depths = [module(hidden).tanh() for module in self.mtp]
        if self.mtp_outputs_are_logits:
            depths = [self.lm_head(h) for h in depths]
        if not depths:
            return self.lm_head(hidden)
        return (self.lm_head(hidden), *depths, *(() if seq_idx is None else (seq_idx,)))


def batch(output):
    """Draw token ids, labels, and the keyword arguments of the last stage; each row has another packing."""
    torch.manual_seed(4)
    ids, labels = torch.randint(0, V, (B, L)), torch.randint(0, V, (B, L))
    labels = torch.where(torch.rand(B, L) < 1 / 6, -100, labels)
    packed = (torch.arange(L) >= torch.arange(1, B + 1).unsqueeze(1)).int()
    return ids, labels, {"seq_idx": packed} if "packed" in output else {}


def schedule_loss(model, output):
    """Return the loss for a schedule, which requires one on every rank but calls only that of the last stage."""
    fused = output == "hidden states"
    return ours.PipelineCausalLMLoss(ours.FusedLinearCrossEntropy() if fused else ours.MaskedCrossEntropy(), model)


def plain_loss(last, output, labels, training):
    """Compute the reference from the last stage's output, with logits from its hidden states."""
    outputs = output if isinstance(output, tuple) else (output,)
    packed = outputs[-1].dtype == torch.int32
    main, *depths = outputs[:-1] if packed else outputs
    if last.output == "hidden states":
        main = last.lm_head(main)
    if not last.mtp_outputs_are_logits:
        depths = [last.lm_head(h) for h in depths]
    loss = reference.masked_cross_entropy(main, labels)
    if not training or not depths:
        return loss
    return loss + reference.mtp_loss(depths, labels, 0.3, seq_idx=outputs[-1] if packed else None).loss


def expected(output, factor=1.0, training=True):
    """Compute loss and gradients of both stages in one process, by the reference."""
    first, last = FirstStage(), LastStage(output)
    ids, labels, extra = batch(output)
    loss = plain_loss(last, last(first(ids), **extra), labels, training)
    (loss * factor).backward()
    return loss.detach(), [{n: p.grad for n, p in stage.named_parameters()} for stage in (first, last)]


def run(schedule, output, stage, model, extra, method="step", group=None, rows=slice(None), **options):
    """Run one step of a schedule on this rank; return the losses of all micro-batches."""
    ids, labels, _ = batch(output)
    ids, labels, losses = ids[rows], labels[rows], []
    pipeline = schedule(
        PipelineStage(model, stage, 2, torch.device("cpu"), group=group), MICROBATCHES // (B // len(ids)),
        loss_fn=schedule_loss(model, output), **options,
    )  # fmt: skip
    step = getattr(pipeline, method)
    if stage == 0:
        step(ids)
    else:
        step(target=labels, losses=losses, **{key: t[rows] for key, t in extra.items()})
    return losses


@check(2, output=OUTPUTS)
def pipeline_schedules(output):
    """The gradients of both stages and the sum of the losses are correct, with the schedule's own scale and without."""
    stage, extra = dist.get_rank(), batch(output)[2]
    for schedule in SCHEDULES.values():
        for scale in (True, False):
            model = LastStage(output) if stage else FirstStage()
            losses = run(schedule, output, stage, model, extra, scale_grads=scale)
            loss, grads = expected(output, 1 / MICROBATCHES if scale else 1.0)
            if stage:
                close(torch.stack(losses).sum(), loss)
            same_gradients(model, grads[stage])


@check(2)
def pipeline_in_evaluation():
    """Only the main loss is computed, without a gradient."""
    output, stage = "hidden depths, packed", dist.get_rank()
    model = LastStage(output) if stage else FirstStage()
    with torch.no_grad():
        losses = run(ScheduleGPipe, output, stage, model.eval(), batch(output)[2], "eval")
    if stage:
        loss = expected(output, training=False)[0]
        close(torch.stack(losses).sum(), loss)
        assert loss < expected(output)[0]
    assert all(p.grad is None for p in model.parameters())


@check(4, output=OUTPUTS)
def pipeline_of_sharded_stages(output):
    """Each of two stages is sharded by FSDP2 over two ranks with different rows."""
    mesh = mesh_of("dp", "pp")
    dp, pp = mesh["dp"], mesh["pp"]
    stage, part, extra = pp.get_local_rank(), dp.get_local_rank(), batch(output)[2]
    for schedule in SCHEDULES.values():
        model = LastStage(output) if stage else FirstStage()
        if stage:
            fully_shard(model.lm_head, mesh=dp)
        fully_shard(model, mesh=dp)
        rows = slice(part * B // 2, (part + 1) * B // 2)
        run(schedule, output, stage, model, extra, group=pp.get_group(), rows=rows, scale_grads=False)
        same_gradients(model, expected(output, 1 / 2)[1][stage])  # FSDP2 averages the two


@check(2)
def pipeline_output_that_cannot_be_served():
    """A stage cannot return MTP outputs as a tuple if the loss takes hidden states."""
    last = LastStage("hidden states")
    outputs, labels = (torch.zeros(B, L, D).double(),) * 2, torch.zeros(B, L, dtype=torch.long)
    raises(ValueError, "logits first", schedule_loss(last, last.output), outputs, labels)


@check(2, form=("logits", "hidden states"))
def pipeline_of_a_diffusion_loss(form):
    """With any other loss, a schedule passes a single target, which can hold ids and masks, stacked."""
    i, stage = drawn(BY_NAME["mdlm, counted"]), dist.get_rank()
    count, names = i.pop("num_diffusion_tokens"), ("target_ids", "noise_mask", "p_mask", "loss_mask")
    target = torch.stack([i[name].double() for name in names], dim=1)

    def loss_fn(output, target):
        ids, noise_mask, p_mask, loss_mask = target.unbind(1)
        loss, masks = ours.MDLMCrossEntropyLoss(), (ids.long(), noise_mask, p_mask, loss_mask)
        options = {"num_diffusion_tokens": count}
        if form == "logits":
            return loss(output, *masks, **options).total_loss
        options["lm_head_bias"] = last.lm_head.bias
        return loss.forward_fused(output, last.lm_head.weight, *masks, **options).total_loss

    ids = batch(form)[0]
    first, last = FirstStage(), LastStage(form)
    expected = loss_fn(last(first(ids)), target)
    expected.backward()
    grads = [{n: p.grad for n, p in model.named_parameters()} for model in (first, last)]
    for schedule in SCHEDULES.values():
        first, last = FirstStage(), LastStage(form)
        model, losses = (first, last)[stage], []
        pipeline = schedule(PipelineStage(model, stage, 2, torch.device("cpu")), B, loss_fn=loss_fn, scale_grads=False)
        if stage:
            pipeline.step(target=target, losses=losses)
            close(torch.stack(losses).sum(), expected.detach())
        else:
            pipeline.step(ids)
        same_gradients(model, grads[stage])
