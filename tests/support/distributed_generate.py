"""Checks of generation in several processes: all ranks call a sharded model equally often, whatever their rows."""

import contextlib
import copy
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard

from dllm_kernels import diffusion_generate
from dllm_kernels.integrations.trl import diffusion_rollout
from tests.support.distributed_checks import check, mesh_of, shard

V, D, MASK, N = 21, 8, 20, 8
SEEDS = torch.tensor([3, -7, 2**61, 5])


class Denoiser(nn.Module):
    """Each token, its position, and the mean of all tokens, of which a buffer counts the calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.body, self.lm_head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V)
        self.places = nn.Parameter(torch.randn(32, D))
        self.register_buffer("calls", torch.zeros(()))
        self.double()

    def forward(self, ids, attention_mask=None):
        self.calls += 1
        x = self.embed(ids) + self.places[: ids.shape[1]]
        return self.lm_head(torch.tanh(self.body(x) + 2 * x.mean(1, keepdim=True)))


def sharded(model):
    for module in (model.body, model.lm_head, model):
        fully_shard(module)
    return model


def in_ddp(model):
    return nn.parallel.DistributedDataParallel(model)  # whose forward broadcasts the buffer of rank 0


def by_fsdp1(model):
    return FullyShardedDataParallel(model, ignored_modules=[model.lm_head], device_id=torch.device("cpu"))


PROMPTS = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [3, 2, 1]])
OPTIONS = {"mask_token_id": MASK, "max_new_tokens": N, "steps": N, "block_size": 2, "temperature": 1.0}


def every_call(model):
    """Return the number of calls of each rank."""
    calls = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(calls, getattr(model, "module", model).calls.float())
    return [int(n) for n in calls]


def partitioned(model):
    model.body.weight.ds_process_group = dist.group.WORLD  # as DeepSpeed ZeRO-3 does
    return model


WRAPPED = {f.__name__: f for f in (sharded, in_ddp, by_fsdp1)}


@check(2, wrapped=WRAPPED)
def generation_until_the_rows_of_all_ranks_have_ended(wrapped):
    """The rows of one rank end in their first block, those of the other never, or both later than in their own run."""
    model = Denoiser()
    whole = diffusion_generate(copy.deepcopy(model), PROMPTS, seeds=SEEDS, **OPTIONS)
    new = whole.ids[:, 3:]
    first_of_rank_0, later = new[:2, :2].unique().tolist(), [int(new[2, 5])]
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    for eos in (first_of_rank_0, later, []):
        expected = diffusion_generate(copy.deepcopy(model), PROMPTS, seeds=SEEDS, eos_token_id=eos, **OPTIONS)
        own = WRAPPED[wrapped](copy.deepcopy(model))
        found = diffusion_generate(own, PROMPTS[mine], seeds=SEEDS[mine], eos_token_id=eos, **OPTIONS)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs[mine])
        assert len(set(every_call(own))) == 1


def tensor_parallel(model):
    mesh = mesh_of("tp")
    for name in ("weight", "bias"):
        part = shard(getattr(model.lm_head, name).detach(), mesh, Shard(0))
        setattr(model.lm_head, name, nn.Parameter(part))
    return model


EVERY_OPTION = (
    {"remasking": "margin", "position_temperature": 0.2, "suppress_ids": [3, 4]},
    {"remasking": "entropy", "cfg_scale": 1.2, "top_k": 9},
    {"threshold": 0.2, "steps": None},
    {"threshold": 1.0, "steps": None, "infill": True, "max_new_tokens": 2},
    {"threshold": 0.15, "steps": 6, "infill": True, "cfg_scale": 0.5},
    {"infill": True, "steps": 10, "delay_eos": True},
)


@check(2, wrapped=("sharded", "tensor_parallel"))
def generation_with_every_option(wrapped):
    """Results equal those without other ranks, whose prompts have other lengths and numbers of holes."""
    model, prompts, seeds, r = Denoiser(), PROMPTS.clone(), SEEDS, dist.get_rank()
    prompts[0, 1] = prompts[2, 1:] = MASK
    if wrapped == "sharded":
        prompts, seeds = prompts[2 * r : 2 * r + 2, r:], seeds[2 * r : 2 * r + 2]
    for options in EVERY_OPTION:
        options = {**OPTIONS, "eos_token_id": [5, 6, 7], "seeds": seeds, **options}
        expected = diffusion_generate(copy.deepcopy(model), prompts, **options)
        own = (WRAPPED | {"tensor_parallel": tensor_parallel})[wrapped](copy.deepcopy(model))
        for ours, theirs in zip(diffusion_generate(own, prompts, **options), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert len(set(every_call(own))) == 1


@check(2)
def rollouts_of_trl_end_together():
    """The completion of one rank ends in its first block, those of the other never."""
    model, prompts, rank = Denoiser(), (PROMPTS[:1].tolist(), PROMPTS[1:].tolist()), dist.get_rank()

    def completions(model, rank, eos):
        trainer = SimpleNamespace(
            model=model, temperature=1.0, args=SimpleNamespace(max_completion_length=N),
            accelerator=SimpleNamespace(autocast=contextlib.nullcontext, device=torch.device("cpu")),
            processing_class=SimpleNamespace(pad_token_id=0, eos_token_id=eos),
        )  # fmt: skip
        torch.manual_seed(rank)
        return diffusion_rollout(MASK, steps=N, block_size=2)(prompts[rank], trainer)["completion_ids"]

    short, long = (completions(copy.deepcopy(model), r, None) for r in range(2))
    eos = short[0][0]
    assert not any(eos in row for row in long)
    for wrapped in (sharded, in_ddp, by_fsdp1, partitioned):
        own = wrapped(copy.deepcopy(model))
        assert completions(own, rank, eos) == ([[eos]] if rank == 0 else long)
        assert len(set(every_call(own))) == 1
