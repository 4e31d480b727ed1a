"""Functions that distribute a tensor, for checks that compare several layouts."""

from torch.distributed.tensor import Partial, Replicate, Shard

from tests.support.distributed_checks import shard


def over(mesh, *placements):
    """Return a function that distributes a tensor over the mesh."""
    return lambda t: shard(t, mesh, *placements)


def as_it_is(t):
    return t


def summed_over_rows(mesh, t):
    """Split a head by vocabulary; its gradients are summed over the data-parallel ranks, which have different rows."""
    whole = shard(t, mesh, Replicate(), Replicate()).to_local(grad_placements=[Partial(), Replicate()])
    return shard(whole, mesh["tp"], Shard(0))
