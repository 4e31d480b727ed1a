"""The row ops that a compiled call finds by their names."""

from dllm_kernels._core import _compiled, _divergence, _nll, _sample, _soft_embedding, _stats
from dllm_kernels._core._op import RowOp


def test_every_record_is_found_by_its_name():
    """As a compiled op looks for it."""
    modules = (_divergence, _nll, _sample, _soft_embedding, _stats)
    found = {op.name: op for module in modules for op in vars(module).values() if isinstance(op, RowOp)}
    records = {name: op for name, op in found.items() if op is not _stats.ROW_OBJECTIVE}  # which is never compiled
    assert records == _compiled.ROW_OPS
