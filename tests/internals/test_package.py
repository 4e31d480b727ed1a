"""Row ops that compiled calls find by name, and descriptions of arguments that docstrings share."""

from pathlib import Path

from dllm_kernels._core import _compiled, _divergence, _nll, _sample, _soft_embedding, _stats
from dllm_kernels._core._op import RowOp
from dllm_kernels._utils._doc import SHARED


def test_every_record_is_found_by_its_name():
    """A compiled op looks a record up by its name."""
    modules = (_divergence, _nll, _sample, _soft_embedding, _stats)
    found = {op.name: op for module in modules for op in vars(module).values() if isinstance(op, RowOp)}
    records = {name: op for name, op in found.items() if op is not _stats.ROW_OBJECTIVE}  # which is never compiled
    assert records == _compiled.ROW_OPS


def test_every_shared_description_is_used_by_several_docstrings():
    package = Path(__file__).parents[2] / "dllm_kernels"
    sources = "".join(path.read_text() for path in package.rglob("*.py"))
    assert not [key for key in SHARED if sources.count(f": {{{key}}}") < 2]  # both forms of an op, at the least
