"""Two processes with the losses of ``tests/support/nemo_lora.py`` and an LM head that FSDP2 shards.

Run by ``tests/support/distributed_workers.py``. The results of each rank are those from the hidden states with the
sharded head, and from the logits of an unsharded one, with parameter gradients averaged over the ranks.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support import nemo_lora as host

WORLD = 2


def own_unit(model):
    fully_shard(model.get_output_embeddings())
    fully_shard(model)


UNITS = {"a unit of its own": own_unit, "in the root": fully_shard}


def plain(results):
    return {k: g.full_tensor() if isinstance(g, DTensor) else g for k, g in results.items()}


def averaged(results):
    for name, grad in results.items():
        if name not in ("loss", "hidden") and grad is not None:
            dist.all_reduce(grad.div_(WORLD))
    return results


def sharded(loss, kind, unit):
    """Compute the results of a rank on its own sequence."""
    rank, (hidden, *rest) = dist.get_rank(), host.batch()
    own = (hidden.detach()[:, rank : rank + 1].requires_grad_(), *(t[rank : rank + 1] for t in rest))
    from_hidden_states, from_logits = host.LOSSES[loss]
    options = {} if kind == "PEFT" else {"dropout": 0.4, "dropout_position": "pre"}
    expected = averaged(host.results(from_logits, host.adapted(kind, **options), own))
    model = host.adapted(kind, **options)
    UNITS[unit](model)
    return plain(host.results(from_hidden_states, model, own)), expected


def split_by_tensor_parallelism(placement):
    """Return the error of an adapter that tensor parallelism splits."""
    model = host.adapted()
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    head = model.lm_head
    for linear in (head.lora_A, head.lora_B):
        linear.weight = torch.nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [placement]))
    try:
        host.results(host.calculate_loss, model, host.batch())
    except ValueError as error:
        return str(error)


def main(out, cases):
    """Write the results of all ranks to a file: of the cases, and of adapters split by tensor parallelism."""
    with host.fused():
        found = {case: sharded(*case) for case in map(tuple, cases)}
        found["tensor parallel"] = [split_by_tensor_parallelism(p) for p in (Replicate(), Shard(0))]
    everywhere = [None] * WORLD
    dist.all_gather_object(everywhere, found)
    if dist.get_rank() == 0:
        torch.save(everywhere, out)
    dist.destroy_process_group()
