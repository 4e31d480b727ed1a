"""Row primitives: what a backend offers, and the function of each backend that does it.

Each primitive is an abstract method of :class:`RowPrimitives`, a line of the same name per backend below, and a method
of ``ShardPrimitives`` (``distributed/vocab_parallel.py``). A class that lacks one cannot be instantiated.

``logits`` is ``[B, L, V]`` with any batch and position strides; columns are adjacent. All other tensors are contiguous
``[N]``, one entry per row, N = B * L. ``acc`` is float32, or float64 for float64 logits. A row whose int64 target is
``IGNORE`` is inactive, and its logits are never read. Any other out-of-range target gives NaN.

All that read logits take their transform (``rows/_transform.py``). Statistics and softmax are those of the
transformed logits; gradients are with respect to the logits as given. No target equals ``skip_id``, because callers
replace such targets by -1.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from dllm_kernels.corruption._noise import Noise
from dllm_kernels.rows import _chain_rule
from dllm_kernels.rows._divergence import DivergenceRequest, DivergenceResult, SavedStats
from dllm_kernels.rows._interface import NLL
from dllm_kernels.rows._stats_interface import StatsPrimitives
from dllm_kernels.rows._transform import Transform
from dllm_kernels.rows._truncation import Truncation


class RowPrimitives(ABC):
    """Row primitives of one backend, or those for a split vocabulary on top of them.

    Attributes:
        stats: the row statistics. The NLL is minus the log-probability of one id, so that a backend without kernels for
            the NLL derives ``nll``, ``weighted_nll`` and ``nll_grad`` from them (``NLLOfStats``).
        add_parts: returns the sum of a tensor over all parts of a split row; may work in place. None if rows are whole.
        local_ids: converts ids of whole rows to columns of this part, else ``IGNORE``. None if rows are whole.
        part_of: returns (start, length) of the columns of a row of V that ``row_norms`` reads here. None if rows are
            whole.
        mdlm_weights: ``(p_mask, noise_mask, loss_mask, factor, count, dtype)``: (w, w / max(count, 1)), shaped like the
            masks. ``w = factor * (noise_mask & loss_mask) / max(p_mask, P_MASK_MIN)``, and 0 outside the masks even if
            ``p_mask`` is NaN. ``factor`` and ``count`` are numbers, tensors of one element, or None for 1. None if the
            caller computes it in plain torch (``losses/_base.py``), which a compiler fuses.
    """

    stats: StatsPrimitives
    add_parts: Callable[[Tensor], Tensor] | None = None
    local_ids: Callable[[Tensor], Tensor] | None = None
    part_of: Callable[[int], tuple[int, int]] | None = None
    mdlm_weights: Callable[..., tuple[Tensor, Tensor]] | None = None

    @abstractmethod
    def nll(
        self, logits: Tensor, targets: Tensor, *, with_correct: bool, with_ids: bool = False,
        transform: Transform = ..., with_lse: bool = True,
    ) -> NLL:  # fmt: skip
        """Return (nll, row_max, log_sum, correct, best): ``[N]`` of dtype acc; bool and int64 ``[N]``, or None.

        Reads each active row once. ``log_sum`` is log(sum(exp(row - row_max))). Inactive rows are 0 or False, and
        ``IGNORE`` in ``best``, the argmax as in :class:`StatsResult`. Without
        ``with_lse`` a backend may return None for row_max and log_sum, if its ``nll_grad`` of whole rows does not read
        them.
        """

    @abstractmethod
    def weighted_nll(self, logits: Tensor, targets: Tensor, weights: Tensor, **options: Any) -> tuple[Any, ...]:
        """Return (weights * nll, then the results of ``nll``), with one weight per row, in acc.

        Rows of weight 0 are inactive too. ``options``: those of ``nll``.
        """

    @abstractmethod
    def nll_grad(
        self, logits: Tensor, targets: Tensor, scale: Tensor, row_max: Any, log_sum: Any, out: Tensor, *,
        factor: Tensor | None = None, transform: Transform = ...,
    ) -> None:  # fmt: skip
        """Write ``scale * (exp(logits - row_max - log_sum) - onehot)`` to ``out``.

        Writes zeros for inactive rows and rows of scale 0. ``out`` has the shape of the logits and any strides, and may
        be the logits. With a factor, 0-d on the device of the logits, the scale of every row other than these is
        multiplied by it.
        """

    @abstractmethod
    def nll_and_grad_(
        self, logits: Tensor, targets: Tensor, scale: Tensor, *, with_correct: bool, with_ids: bool = False,
        transform: Transform = ...,
    ) -> NLL:  # fmt: skip
        """Compute ``nll`` and ``nll_grad`` of a chunk ``[C, V]`` in one call; the gradient overwrites the logits."""

    @abstractmethod
    def scale_(self, t: Tensor, factor: Tensor) -> None:
        """Compute ``t *= factor`` for a 0-d factor on the device of t, without a host sync.

        Zeros stay zeros, whatever the factor is. If the factor is 1, t is neither read nor written, except in plain
        torch on other devices than a CPU, where a test would be a host sync. t is contiguous.
        """

    @abstractmethod
    def divergence(self, logits: Tensor, request: DivergenceRequest, *, with_grad: bool) -> DivergenceResult:
        """Compare rows with a teacher's rows; see ``rows/_divergence.py``."""

    @abstractmethod
    def divergence_grad(self, logits: Tensor, request: DivergenceRequest, saved: SavedStats, out: Tensor) -> None:
        """Write the gradient of ``divergence`` to ``out``; see ``rows/_divergence.py``."""

    @abstractmethod
    def row_norms(self, logits: Tensor, transform: Transform, skip: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
        """Return norms and argmax of rows ``[C, V']``; see ``rows/_divergence.py``."""

    @abstractmethod
    def sample(self, logits: Tensor, transform: Transform, noise: Noise | None, /) -> tuple[Tensor, Tensor]:
        """Return (score float64 ``[C]``, column int64 ``[C]``) of the largest score of each row ``[C, V]``.

        The score is ``x_v - ln(-ln u_v)``, with x the transformed logits and u the uniforms of ``noise``. Without noise
        it is x. The lowest column wins a tie. Every operation of a score is exact or rounded separately, so that equal
        logits give the same token on every device. The result for a row with NaN is undefined.
        """

    @abstractmethod
    def largest(self, logits: Tensor, k: int, transform: Transform, /) -> tuple[Tensor, Tensor]:
        """Return (values ``[C, k]`` in acc, columns int64 ``[C, k]``) of the k largest transformed logits of each row.

        In descending order, the lowest column first among equals.
        """

    @abstractmethod
    def truncated(self, logits: Tensor, transform: Transform, truncation: Truncation, /) -> Tensor:
        """Return the transformed logits ``[C, V]`` in acc, with -inf in the columns that the truncation excludes.

        The softmax of a row with NaN stays NaN.
        """


@functools.cache
def row_primitives(triton: bool) -> RowPrimitives:
    """Return the row primitives of a backend; Triton is imported only if requested."""
    return _triton_primitives() if triton else _torch_primitives()


def _triton_primitives() -> RowPrimitives:
    from dllm_kernels.backends.torch import _sample as torch_sample
    from dllm_kernels.backends.triton import divergence as _divergence
    from dllm_kernels.backends.triton import linear_nll, row_stats, row_weights, token_nll
    from dllm_kernels.backends.triton import sample as _sample

    class TritonPrimitives(RowPrimitives):
        stats = row_stats
        nll = staticmethod(token_nll.nll)
        weighted_nll = staticmethod(token_nll.weighted_nll)
        nll_grad = staticmethod(token_nll.nll_grad)
        nll_and_grad_ = staticmethod(linear_nll.nll_and_grad_)
        scale_ = staticmethod(linear_nll.scale_)
        divergence = staticmethod(_divergence.divergence)
        divergence_grad = staticmethod(_divergence.divergence_grad)
        row_norms = staticmethod(_divergence.row_norms)
        sample = staticmethod(_sample.sample)
        largest = staticmethod(torch_sample.largest)
        truncated = staticmethod(torch_sample.truncated)
        mdlm_weights = staticmethod(row_weights.mdlm_weights)

    return TritonPrimitives()


def _torch_primitives() -> RowPrimitives:
    from dllm_kernels.backends.torch import _divergence, _nll, _sample, _stats

    class TorchStats(StatsPrimitives):
        forward = staticmethod(_stats.forward)
        mix = staticmethod(_stats.mix)
        coefficients = staticmethod(_chain_rule.coefficients)
        backward = staticmethod(_stats.backward)

    class TorchPrimitives(_chain_rule.NLLOfStats, RowPrimitives):
        stats = TorchStats()
        nll_and_grad_ = staticmethod(_nll.nll_and_grad_)
        scale_ = staticmethod(_nll.scale_)
        divergence = staticmethod(_divergence.divergence)
        divergence_grad = staticmethod(_divergence.divergence_grad)
        row_norms = staticmethod(_divergence.row_norms)
        sample = staticmethod(_sample.sample)
        largest = staticmethod(_sample.largest)
        truncated = staticmethod(_sample.truncated)

    return TorchPrimitives()
