"""Row primitives: the interface of a backend, and the layout of its arguments.

``logits`` is ``[B, L, V]`` with any batch and position strides; columns are adjacent. All other tensors are contiguous
``[N]``, one entry per row, N = B * L. ``acc`` is float32, or float64 for float64 logits. A row whose int64 target is
``IGNORE`` is inactive, and its logits are never read. Any other out-of-range target gives NaN.

All that read logits take their transform (``rows/_transform.py``). Statistics and softmax are those of the
transformed logits; gradients are with respect to the logits as given. No target equals ``skip_id``, because callers
replace such targets by -1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dllm_kernels.corruption._noise import Noise
from dllm_kernels.rows._divergence import DivergenceRequest, DivergenceResult, SavedStats
from dllm_kernels.rows._stats_interface import Coefficients, StatsRequest, StatsResult, Upstream
from dllm_kernels.rows._transform import Transform
from dllm_kernels.rows._truncation import Truncation

IGNORE = -100
P_MASK_MIN = 1e-8
NLL = tuple[Tensor, Any, Any, Tensor | None, Tensor | None]


class StatsPrimitives(Protocol):
    """Primitives of the row statistics of one backend; ``rows/_stats_interface.py`` has the equations."""

    def forward(self, logits: Tensor, request: StatsRequest) -> StatsResult:
        """Return the statistics of N rows; 0 / False in inactive rows."""

    def mix(
        self, logits: Tensor, request: StatsRequest, row_max: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the shares of F and W of these columns, for rows whose (M, log S) is known."""

    def coefficients(
        self, request: StatsRequest, result: StatsResult, upstream: Upstream
    ) -> tuple[Coefficients, Tensor, Tensor]:
        """Combine the upstream gradients of each row.

        Returns the coefficients, their size, and the targets of the rows with a gradient. ``_chain_rule.coefficients``
        is the implementation in plain torch.
        """

    def backward(
        self, logits: Tensor, request: StatsRequest, c: Coefficients, row_max: Any, log_sum: Any, out: Tensor
    ) -> None:
        """Write the gradient to ``out``, which may be the logits themselves; zeros in inactive rows.

        If ``request.through_transform`` is False, the gradient is with respect to the transformed logits: p for lse.
        If ``request.weights`` is given, an out-of-range id makes the gradient of its row NaN.
        """


class RowPrimitives(Protocol):
    """Row primitives of one backend, or those for a split vocabulary on top of them."""

    @property
    def stats(self) -> StatsPrimitives:
        """The row statistics. The NLL is minus the log-probability of one id.

        A backend without kernels for the NLL derives the next three primitives from these (``nll_of_stats``).
        """

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

    def weighted_nll(
        self, logits: Tensor, targets: Tensor, weights: Tensor, *, with_correct: bool, with_ids: bool = False,
        transform: Transform = ..., with_lse: bool = True,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return (weights * nll, then the results of ``nll``), with one weight per row, in acc.

        Rows of weight 0 are inactive too.
        """

    def nll_grad(
        self, logits: Tensor, targets: Tensor, scale: Tensor, row_max: Any, log_sum: Any, out: Tensor, *,
        factor: Tensor | None = None, transform: Transform = ...,
    ) -> None:  # fmt: skip
        """Write ``scale * (exp(logits - row_max - log_sum) - onehot)`` to ``out``.

        Writes zeros for inactive rows and rows of scale 0. ``out`` has the shape of the logits and any strides, and may
        be the logits. With a factor, 0-d on the device of the logits, the scale of every row other than these is
        multiplied by it.
        """

    def nll_and_grad_(
        self, logits: Tensor, targets: Tensor, scale: Tensor, *, with_correct: bool, with_ids: bool = False,
        transform: Transform = ...,
    ) -> NLL:  # fmt: skip
        """Compute ``nll`` and ``nll_grad`` of a chunk ``[C, V]`` in one call; the gradient overwrites the logits."""

    def scale_(self, t: Tensor, factor: Tensor) -> None:
        """Compute ``t *= factor`` for a 0-d factor on the device of t, without a host sync.

        Zeros stay zeros, whatever the factor is. Costs nothing if the factor is 1.
        """

    def divergence(self, logits: Tensor, request: DivergenceRequest, *, with_grad: bool) -> DivergenceResult:
        """Compare rows with a teacher's rows; see ``rows/_divergence.py``."""

    def divergence_grad(self, logits: Tensor, request: DivergenceRequest, saved: SavedStats, out: Tensor) -> None:
        """Write the gradient of ``divergence`` to ``out``; see ``rows/_divergence.py``."""

    def row_norms(
        self, logits: Tensor, transform: Transform, skip: Tensor | None, start: int, /
    ) -> tuple[Tensor, Tensor]:
        """Return norms and argmax of rows ``[C, V']``; see ``rows/_divergence.py``."""

    def sample(self, logits: Tensor, transform: Transform, noise: Noise | None, /) -> tuple[Tensor, Tensor]:
        """Return (score float64 ``[C]``, column int64 ``[C]``) of the largest score of each row ``[C, V]``.

        The score is ``x_v - ln(-ln u_v)``, with x the transformed logits and u the uniforms of ``noise``. Without noise
        it is x. The lowest column wins a tie. Every operation of a score is exact or rounded separately, so that equal
        logits give the same token on every device. The result for a row with NaN is undefined.
        """

    def largest(self, logits: Tensor, k: int, transform: Transform, /) -> tuple[Tensor, Tensor]:
        """Return (values ``[C, k]`` in acc, columns int64 ``[C, k]``) of the k largest transformed logits of each row.

        In descending order, the lowest column first among equals.
        """

    def truncated(self, logits: Tensor, transform: Transform, truncation: Truncation, /) -> Tensor:
        """Return the transformed logits ``[C, V]`` in acc, with -inf in the columns that the truncation excludes.

        The softmax of a row with NaN stays NaN.
        """

    @property
    def add_parts(self) -> Callable[[Tensor], Tensor] | None:
        """Return the sum of a tensor over all parts of a split row; may work in place. None if rows are whole."""

    @property
    def local_ids(self) -> Callable[[Tensor], Tensor] | None:
        """Convert ids of whole rows to columns of this part, else ``IGNORE``. None if rows are whole."""

    @property
    def part_of(self) -> Callable[[int], tuple[int, int]] | None:
        """Return (start, length) of the columns of a row of V that ``row_norms`` reads here. None if rows are whole."""

    @property
    def mdlm_weights(self) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """``(p_mask, noise_mask, loss_mask, factor, count, dtype)``: (w, w / max(count, 1)), shaped like the masks.

        ``w = factor * (noise_mask & loss_mask) / max(p_mask, P_MASK_MIN)``, and 0 outside the masks even if ``p_mask``
        is NaN. ``factor`` and ``count`` are numbers, tensors of one element, or None for 1. None if the caller computes
        it in plain torch (``losses/_base.py``), which a compiler fuses.
        """


class StatsFunctions(NamedTuple):
    """Functions that make up :class:`StatsPrimitives`."""

    forward: Any
    mix: Any
    coefficients: Any
    backward: Any


class RowFunctions(NamedTuple):
    """Functions that make up :class:`RowPrimitives`."""

    stats: StatsFunctions
    nll: Any
    weighted_nll: Any
    nll_grad: Any
    nll_and_grad_: Any
    scale_: Any
    divergence: Any
    divergence_grad: Any
    row_norms: Any
    sample: Any
    largest: Any
    truncated: Any
    add_parts: Any = None
    local_ids: Any = None
    part_of: Any = None
    mdlm_weights: Any = None


def column_of(y: Tensor, V: int) -> tuple[Tensor, Tensor | None]:
    """Return a column to read for each id, and a mask of the out-of-range ids.

    The mask is None if every id is in range, which is tested on a CPU only, because elsewhere it would be a host sync.
    """
    if y.is_cpu and V and y.numel():
        least, most = torch.aminmax(y)
        if least.item() >= 0 and most.item() < V:
            return y, None
    column = y.clamp(0, max(V - 1, 0))
    return column, column != y if V else torch.ones_like(y, dtype=torch.bool)


def as_blv(logits: Tensor) -> Tensor:
    """View logits ``[..., V]`` as ``[B, L, V]`` with adjacent columns; copies only if a view is impossible."""
    V = logits.shape[-1]
    if logits.stride(-1) != 1 and V > 1:
        logits = logits.contiguous()
    if logits.dim() == 3:
        return logits
    if logits.dim() < 3:
        return logits.view(1, 1, V) if logits.dim() == 1 else logits.unsqueeze(0)
    return logits.reshape(math.prod(logits.shape[:-2]), logits.shape[-2], V)
