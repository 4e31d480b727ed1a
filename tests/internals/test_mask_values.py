"""The test whether Python can read the values of a tensor."""

from torch._subclasses.fake_tensor import FakeTensorMode

from dllm_kernels._graph import _plain
from tests.losses.test_mask_values import ON


def test_tensors_without_readable_values():
    assert _plain.readable_without_sync(ON)
    assert not _plain.readable_without_sync(None)
    assert not _plain.readable_without_sync(ON.to("meta"))
    with FakeTensorMode() as mode:
        assert not _plain.readable_without_sync(mode.from_tensor(ON))
