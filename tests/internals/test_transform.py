"""Normalisation of the steps of a transform by the validation."""

import pytest

from dllm_kernels.rows._transform import NO_TRANSFORM, Transform, checked_transform
from tests.ops.test_transform import V

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_a_scale_of_one_is_omitted():
    assert checked_transform(V, scale=1) == NO_TRANSFORM
    assert checked_transform(V, 3, 1.0, 0) == Transform(3.0, None, 0)


def test_the_smallest_and_the_largest_factor_are_accepted():
    assert checked_transform(V, 1e-18, 1e18) == Transform(1e-18, 1e18, None)
