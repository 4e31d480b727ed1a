"""Row primitives of each backend."""

from __future__ import annotations

import functools

from dllm_kernels.rows._chain_rule import coefficients, nll_of_stats
from dllm_kernels.rows._interface import RowFunctions, RowPrimitives, StatsFunctions


@functools.cache
def row_primitives(triton: bool) -> RowPrimitives:
    """Return the row primitives of a backend; Triton is imported only if requested."""
    from dllm_kernels.backends.torch import _sample

    if triton:
        from dllm_kernels.backends.triton import divergence, linear_nll, row_stats, row_weights, sample, token_nll

        stats = StatsFunctions(row_stats.forward, row_stats.mix, row_stats.coefficients, row_stats.backward)
        return RowFunctions(
            stats, token_nll.nll, token_nll.weighted_nll, token_nll.nll_grad, linear_nll.nll_and_grad_,
            linear_nll.scale_, divergence.divergence, divergence.divergence_grad, divergence.row_norms, sample.sample,
            _sample.largest, _sample.truncated, mdlm_weights=row_weights.mdlm_weights,
        )  # fmt: skip
    from dllm_kernels.backends.torch import _divergence, _nll, _stats

    stats = StatsFunctions(_stats.forward, _stats.mix, coefficients, _stats.backward)
    divergence_functions = _divergence.divergence, _divergence.divergence_grad, _divergence.row_norms
    nll_functions = *nll_of_stats(stats), _nll.nll_and_grad_
    sample_functions = _sample.sample, _sample.largest, _sample.truncated
    return RowFunctions(stats, *nll_functions, _nll.scale_, *divergence_functions, *sample_functions)
