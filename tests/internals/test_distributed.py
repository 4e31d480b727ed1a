"""The dimensions of a mesh that split a vocabulary."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

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
