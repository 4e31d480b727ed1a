"""Requests for all statistics of a row, and their outputs by name, so that tests include a new statistic."""

from dllm_kernels import ops
from dllm_kernels.rows._stats_interface import StatsFlags, Upstream

FLAGS = dict.fromkeys(StatsFlags._fields, True)
EVERY_FLAG = {**FLAGS, "with_correct": True, "with_ids": True}
# Names of the outputs that are statistics of the softmax, and of those with a gradient.
STATISTICS = tuple(name for name in ops.RowStats._fields if name not in ("correct", "ids"))
DIFFERENTIABLE = tuple(name for name in STATISTICS if name in Upstream._fields)


def statistics(out):
    """Return the requested statistics of the result of ``row_stats``, or of its oracle, by name."""
    return {name: t for name in STATISTICS if (t := getattr(out, name)) is not None}


def differentiable(out):
    """Return the outputs of an op that have a gradient, in the order of its fields."""
    return [t for t in out if t is not None and t.requires_grad]
