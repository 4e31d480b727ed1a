"""The dimensions of a mesh that split a vocabulary."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dllm_kernels.distributed import _divergence, _layout, fsdp
from dllm_kernels.distributed._layout import tensor_parallel_dims

STRIDED = _StridedShard(0, split_factor=2)


MESHES = {
    "one that is named so": (("dp", "tp"), (Shard(0), Shard(0)), [1]),
    "neither": (("a", "b"), (Shard(0), Shard(0)), []),
    "no names": (None, (Shard(0), Replicate()), []),
    "what was split before FSDP2 split it": (None, (STRIDED, Shard(0)), [1]),
    "a split of another dimension": (None, (STRIDED, Shard(1)), []),
    "no split beside it": (None, (STRIDED, Replicate()), []),
}


@pytest.mark.parametrize(("names", "placements", "expected"), MESHES.values(), ids=MESHES)
def test_dimensions_of_tensor_parallelism_without_a_process_group(names, placements, expected):
    weight = SimpleNamespace(device_mesh=SimpleNamespace(mesh_dim_names=names), placements=placements)
    assert tensor_parallel_dims(weight, torch.zeros(2, 3)) == expected


def test_a_sum_over_ranks_leaves_its_input_without_a_process_group(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda t, group: t.mul_(2))
    t = torch.ones(3, requires_grad=True)
    out = _layout.sum_over(t, [None])
    assert out.tolist() == [2, 2, 2]
    assert t.tolist() == [1, 1, 1]


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), STRIDED, Replicate()], ids=str)
def test_an_order_of_splits_without_a_process_group(data, placement):
    """FSDP must split the pieces of tensor parallelism, unless it has one rank or splits another dimension."""
    mesh = SimpleNamespace(ndim=2, mesh_dim_names=("dp", "tp"), size=(data, 2).__getitem__)
    weight = SimpleNamespace(device_mesh=mesh, placements=(placement, Shard(0)))
    refused = data > 1 and placement == Shard(0)
    with pytest.raises(ValueError, match=r"^weight must be split by tensor") if refused else nullcontext():
        fsdp._check_layout("weight", weight, [0], [1])


def test_the_rows_of_a_teacher_are_shared_evenly_without_a_process_group(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 4)
    for rank, part in enumerate([(0, 2), (2, 2), (4, 1), (5, 0)]):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group, rank=rank: rank)
        assert _divergence.part_of(SimpleNamespace(group=None), 5) == part


def test_a_divisor_belongs_to_a_module_and_its_later_parameters():
    head, other = (torch.nn.Sequential(torch.nn.Linear(2, 3)) for _ in range(2))
    fsdp.set_gradient_divide_factor(head, 3.0)
    head.load_state_dict(other.state_dict(), assign=True)
    assert [fsdp._divide_factor(t, 8.0) for m in (head, other) for t in m.parameters()] == [3.0, 3.0, 8.0, 8.0]
    fsdp.set_gradient_divide_factor(head[0].bias, 2.0)
    assert [fsdp._divide_factor(t, 8.0) for t in head.parameters()] == [3.0, 2.0]
