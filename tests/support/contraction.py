"""Pytest plugin: run the tests that compare bits, while each specialisation of a kernel fuses other sums of products.

Two compiled kernels, or two specialisations of one, may round differently, so no test may ask them for equal bits. Load
it by ``-p tests.support.contraction``. Of the collected tests it keeps those that run kernels and compare bits.
"""

import inspect
import re

import pytest

from tests.support.interpreter import products_fused_by_specialisation

BITS = re.compile(r"torch\.equal|[ra]tol=0(\.0)?\b|same_bits|rows_that_differ|\"[ra]tol\": 0\b")


def compares_bits_of_kernels(item):
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    runs_kernels = any(isinstance(value, str) and value.startswith("triton") for value in values)
    source = inspect.getsource(item.module if "assert_same(" in inspect.getsource(item.function) else item.function)
    return (runs_kernels or item.path.parent.name == "kernels") and bool(BITS.search(source))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if compares_bits_of_kernels(item)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    if "fused_products" in item.fixturenames:
        return (yield)
    with products_fused_by_specialisation():
        return (yield)
