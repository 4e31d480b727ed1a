"""The names and recipes of the divergences."""

import importlib.util

from dllm_kernels._backends.torch._divergence import KINDS
from dllm_kernels._core._recipes import DivergencePlan, checked_recipe
from tests.ops.test_divergence import MANY


def test_names():
    """Every kind has functions on both paths; aliases, twice tv and the ends of jsd are kinds that exist already."""
    assert (
        checked_recipe("kl_div") == checked_recipe("kl") == checked_recipe("jsd", beta=0) == checked_recipe({"kl": 1})
    )
    assert checked_recipe("rkl") == checked_recipe("jsd", beta=1.0)
    assert checked_recipe("lk_hybrid", alpha="mean").mean_alpha
    assert checked_recipe({"l1": 0.5, "tv": 1, "kl": 0}) == checked_recipe({"tv": 2.0})
    if importlib.util.find_spec("triton"):
        assert set(KINDS) == set(importlib.import_module("dllm_kernels._backends.triton.divergence").Kinds._fields)
    plan = DivergencePlan(checked_recipe(MANY, beta=0.3, base="soft_ce"))
    assert DivergencePlan.unpacked(plan.integers, plan.floats) == plan
