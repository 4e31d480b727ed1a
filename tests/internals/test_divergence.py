"""The names and specs of the divergences."""

import importlib.util

from dllm_kernels._backends.torch._divergence import KINDS
from dllm_kernels._core._divergence_spec import DivergencePlan, checked_spec
from tests.ops.test_divergence import MANY


def test_names():
    """Every kind has functions on both paths; aliases, twice tv and the ends of jsd are kinds that exist already."""
    assert checked_spec("kl_div") == checked_spec("kl") == checked_spec("jsd", beta=0) == checked_spec({"kl": 1})
    assert checked_spec("rkl") == checked_spec("jsd", beta=1.0)
    assert checked_spec("lk_hybrid", alpha="mean").mean_alpha
    assert checked_spec({"l1": 0.5, "tv": 1, "kl": 0}) == checked_spec({"tv": 2.0})
    if importlib.util.find_spec("triton"):
        assert set(KINDS) == set(importlib.import_module("dllm_kernels._backends.triton.divergence").Kinds._fields)
    plan = DivergencePlan(checked_spec(MANY, beta=0.3, base="soft_ce"))
    assert DivergencePlan.unpacked(plan.integers, plan.floats) == plan
