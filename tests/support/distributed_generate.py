"""Checks of generation in several processes: all ranks call a sharded model equally often, whatever their rows."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from dllm_kernels import diffusion_generate
from tests.support.distributed_checks import check

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

    def forward(self, ids):
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
