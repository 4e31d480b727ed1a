"""The register of checks that run in several processes, and what they share. ``tests/distributed_workers.py`` runs them."""

import functools
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

V, D, B, L = 19, 8, 4, 6
CHECKS = {2: {}, 4: {}}


def check(world, **parameter):
    """Register a check for a world size, once for every value of its parameter if it has one."""

    def register(function):
        if not parameter:
            CHECKS[world][function.__name__] = function
        for name, values in parameter.items():
            for value in values:
                CHECKS[world][f"{function.__name__}[{value}]"] = functools.partial(function, **{name: value})
        return function

    return register


@functools.cache
def mesh_of(*names):
    """A mesh over all processes: one dimension, or two of size 2."""
    world = dist.get_world_size()
    return init_device_mesh("cpu", (world,) if len(names) == 1 else (2, world // 2), mesh_dim_names=names)


def shard(t, mesh, *placements):
    """A tensor that is the same everywhere as a DTensor, differentiably: its gradient comes back whole."""
    whole = DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=placements)


def raises(error, match, function, *args, **options):
    with pytest.raises(error, match=re.escape(match)):
        function(*args, **options)


def close(got, expected):
    """Equal up to rounding in another order: the defaults of torch.testing for the dtype."""
    got = got.full_tensor() if isinstance(got, DTensor) else got
    torch.testing.assert_close(got, expected, equal_nan=True, check_dtype=got.dtype == expected.dtype)


def upstream(case, rows=B):
    return torch.randn(rows, L) * (torch.rand(rows, L) < 0.8) if case.per_row else torch.randn(())


def drawn(case, seed=0):
    torch.manual_seed(seed)
    return case.draw(B, L, V)


class Sent:
    """What this rank hands to collectives while it is entered: (name, shape, bytes) of each."""

    NAMES = ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor", "all_to_all_single", "broadcast")

    def __init__(self):
        self.calls = []

    def __enter__(self):
        from torch.distributed import _functional_collectives as functional

        self._patches = []
        for name in self.NAMES:
            self._watch(dist, name, 1 if name in ("all_gather_into_tensor", "reduce_scatter_tensor") else 0)
        for name in ("all_gather_tensor", "all_reduce", "reduce_scatter_tensor", "all_to_all_single", "broadcast"):
            if hasattr(functional, name):
                self._watch(functional, name, 0)
        for name in ("mesh_broadcast", "mesh_scatter"):
            from torch.distributed.tensor import _collective_utils

            self._watch(_collective_utils, name, 0)
        return self

    def _watch(self, module, name, position):
        original = getattr(module, name)

        @functools.wraps(original)
        def watched(*args, **options):
            t = args[position]
            self.calls.append((name, tuple(t.shape), t.numel() * t.element_size()))
            return original(*args, **options)

        patch = mock.patch.object(module, name, watched)
        patch.start()
        self._patches.append(patch)

    def __exit__(self, *_):
        for patch in self._patches:
            patch.stop()

    @property
    def shapes(self):
        return [shape for _, shape, _ in self.calls]

    @property
    def nbytes(self):
        return sum(n for *_, n in self.calls)
