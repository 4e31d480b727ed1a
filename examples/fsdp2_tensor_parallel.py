"""FSDP2 over tensor parallelism: the vocabulary of the LM head is sharded over ``tp``, the whole model over ``dp``.

torchrun --nproc-per-node 4 examples/fsdp2_tensor_parallel.py      # 2 x 2; gloo on CPU, NCCL on GPUs (not tested)
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from dllm_kernels import MDLMCrossEntropyLoss, corrupt_uniform
from dllm_kernels.distributed import global_token_count, summed_over

V, MASK, D, B, L = 65, 64, 32, 8, 16  # V need not be divisible by tp


class Model(nn.Module):
    """Small model whose forward returns hidden states."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)  # the same weights on every rank
        self.embed = nn.Embedding(V, D)
        self.layers = nn.ModuleList(nn.Conv1d(D, D, 3, padding=1) for _ in range(2))
        self.lm_head = nn.Linear(D, V)

    def forward(self, ids):  # noqa: D102
        x = self.embed(ids).transpose(1, 2)
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.transpose(1, 2).contiguous()


def main(steps=20, tp=2):
    """Train and return the loss of the whole batch for each step; every rank returns the same values."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    dp = mesh["dp"]

    model = Model().to(device)
    parallelize_module(model.lm_head, mesh["tp"], ColwiseParallel(use_local_output=False))
    for module in (*model.layers, model.lm_head, model):
        fully_shard(module, mesh=dp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_fn, losses = MDLMCrossEntropyLoss(), []

    for step in range(steps):
        # Samples of this data-parallel rank. Its tensor-parallel peers share the seeds and so draw the same noise.
        mine = step * B + torch.arange(B).chunk(dp.size())[dp.get_local_rank()]
        ids = ((7 * mine[:, None] + torch.arange(L)) % MASK).to(device)
        loss_mask = torch.ones(ids.shape, device=device)
        noisy, noise_mask, p_mask = corrupt_uniform(ids, loss_mask, MASK, eps=0.1, seeds=mine.to(device))

        count = global_token_count(loss_mask, dp.get_group())  # over the ranks that have different rows
        out = loss_fn.forward_fused(
            model(noisy), model.lm_head.weight, ids, noise_mask, p_mask, loss_mask,
            num_diffusion_tokens=count, lm_head_bias=model.lm_head.bias,
        )  # fmt: skip
        optimizer.zero_grad()
        (dp.size() * out.total_loss).backward()  # FSDP2 divides gradients by the data-parallel ranks
        optimizer.step()
        losses.append(summed_over(out.total_loss.detach(), dp.get_group()).item())
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    found = main(*map(int, sys.argv[1:]))
    if dist.get_rank() == 0:
        print(f"loss {found[0]:.3f} in the first step, {found[-1]:.3f} in the last")
    dist.destroy_process_group()
