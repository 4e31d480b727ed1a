"""Descriptions of arguments that docstrings share."""

from pathlib import Path

from dllm_kernels._graph._doc import SHARED


def test_every_shared_description_is_used_by_several_docstrings():
    package = Path(__file__).parents[2] / "dllm_kernels"
    sources = "".join(path.read_text() for path in package.rglob("*.py"))
    assert not [key for key in SHARED if sources.count(f": {{{key}}}") < 2]  # both forms of an op, at the least
