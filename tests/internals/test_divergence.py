"""The names and specs of the divergences, and when a teacher's head is converted."""

import importlib.util

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_kernels import ops
from dllm_kernels._backends.torch._divergence import KINDS
from dllm_kernels._core._divergence_spec import DivergencePlan, checked_spec
from tests.ops.test_divergence import MANY


def test_names():
    """Every kind has functions on both paths; aliases, twice tv and the ends of jsd are kinds that exist already."""
    assert checked_spec("kl_div") == checked_spec("kl") == checked_spec("jsd", beta=0) == checked_spec({"kl": 1})
    assert checked_spec("rkl") == checked_spec("jsd", beta=1.0)
    assert checked_spec("lk_hybrid", alpha="mean").lam_of_mean
    assert checked_spec({"l1": 0.5, "tv": 1, "kl": 0}) == checked_spec({"tv": 2.0})
    if importlib.util.find_spec("triton"):
        assert set(KINDS) == set(importlib.import_module("dllm_kernels._backends.triton.divergence").Kinds._fields)
    plan = DivergencePlan(checked_spec(MANY, beta=0.3, base="soft_ce"))
    assert DivergencePlan.unpacked(plan.integers, plan.floats) == plan


class Casts(TorchDispatchMode):
    """Shapes of the tensors that are cast or picked, and "read back" where the number of nonzero elements is."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.nonzero.default:
            self.seen.append("read back")
        elif function in (torch.ops.aten._to_copy.default, torch.ops.aten.index_select.default):
            self.seen.append(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_the_teacher_s_head_is_ready_before_the_number_of_rows_is_read_back(reduction):
    """On a GPU, which would idle meanwhile; and it is converted once a pass over the rows, not once a chunk."""
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    head, columns = torch.randn(9, 5), torch.randperm(9)[:7]
    with Casts() as casts, torch.autocast("cpu", torch.bfloat16):
        ops.linear_divergence(
            hidden, weight, torch.randn(6, 5), torch.ones(6), teacher_weight=head, draft_to_target=columns,
            reduction=reduction, chunk_size=2, kind="lk", alpha="mean",
        ).loss.sum().backward()  # fmt: skip
    of_head = [i for i, what in enumerate(casts.seen) if what in ((9, 5), (7, 5))]
    read_back = [i for i, what in enumerate(casts.seen) if what == "read back"]
    passes = 1 if reduction == "sum" else 2
    assert len(of_head) == 2 * passes  # picked, then cast
    assert of_head[1] < read_back[0]
