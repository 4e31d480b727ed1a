"""Normalisation of the steps of a transform by the validation."""

import pytest

from dllm_kernels._utils import _checks
from dllm_kernels._utils._transform import NO_TRANSFORM, Transform
from tests.ops.test_transform import V

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_a_scale_of_one_is_omitted():
    assert _checks.checked_transform(V, scale=1) == NO_TRANSFORM
    assert _checks.checked_transform(V, 3, 1.0, 0) == Transform(3.0, None, 0)


def test_the_smallest_and_the_largest_factor_are_accepted():
    assert _checks.checked_transform(V, 1e-18, 1e18) == Transform(1e-18, 1e18, None)
