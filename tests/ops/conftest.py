"""Fixtures of the tests of ops."""

import pytest
import torch

from tests.support.inputs import SOURCES, on_source
from tests.support.rows import PATHS, on_path


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    return on_path(request.param, monkeypatch)


@pytest.fixture(params=SOURCES, ids="-".join)
def source(request, monkeypatch):
    return on_source(request.param, monkeypatch)


@pytest.fixture
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()
