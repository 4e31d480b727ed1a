r"""Row primitives of the row statistics: the interface of a backend.

With d_v = z_v - M for the transformed logits z of a row and M its maximum, S = sum e^{d_v}, p_v = e^{d_v} / S:

    log p_k = d_k - log S,        lse = M + log S,        H = log S - sum_v e^{d_v} d_v / S,
    F = sum_v log(a + b p_v),     W = sum_v q_v,          q_v = b p_v / (a + b p_v) = e^{d_v} / (e^{d_v} + a S / b),

which the callers return as ``log_probs``, ``lse``, ``entropy`` (H) and ``mix`` (F), beside the argmax (``ids``) and
whether it is the first id (``correct``); and, for upstream gradients g of each output, with log p_v = d_v - log S,

    dL/dz_v = sum_k g_k [v = id_k] + p_v (A + B log p_v) + g_F q_v,
    A = g_lse - sum_k g_k - g_H H - g_F W,        B = -g_H.

A, B and g_F hold all per-row terms, so that one pass computes the gradient of any set of outputs. If a is 0, q_v = 1
and F = sum_v (d_v + log(b / S)): a p_v that float32 rounds to 0 enters neither a logarithm nor a quotient. In a product
d_v is clamped to ``FARTHEST``, far below any d_v with e^{d_v} > 0, because the product of 0 and -inf would be NaN.

``logits`` and ``out`` are ``[B, L, V]`` as in ``rows/_primitives.py``. Inactive rows are never read.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from dllm_kernels.rows._transform import NO_TRANSFORM, Transform

FARTHEST = -1e4


class StatsFlags(NamedTuple):
    """Statistics that flags of ``row_stats`` request: one number per row, computed by the backends.

    A field has the name of the flag, and of a field of :class:`StatsResult` and of the caller's result. The statistic
    is differentiable if :class:`Upstream` has a field of this name too.
    """

    entropy: bool = False

    @property
    def requested(self) -> list[str]:
        """Names of the requested statistics."""
        return [name for name, requested in zip(self._fields, self, strict=True) if requested]


NO_FLAGS = StatsFlags()


class StatsRequest(NamedTuple):
    """Request for statistics of N rows; all tensors are contiguous.

    Attributes:
        ids: int64 ``[N, K]``. ``IGNORE`` marks a missing id. Any other out-of-range id gives NaN.
        targets: int64 ``[N]``, ``IGNORE`` in inactive rows; other values are not read.
        a: coefficient of the mixture, ``[N]`` in the accumulation dtype, or None.
        b: see ``a``.
        transform: transform of the logits.
        flags: further statistics that are requested.
        correct: True if the argmax-match is requested.
        best: True if the argmax is requested.
        gradients: True if W is requested.
        whole: True if the columns are all columns of a row, False if they are a part of a split row.
        lse: True if (M, log S) are requested. Otherwise a backend may omit them if its backward pass does not read
            them.
        through_transform: True if the gradient is with respect to the logits, False for the transformed logits.
        weights: ``[N]`` or None. Rows of weight 0 are inactive too. Only ``_chain_rule.NLLOfStats`` sets it, for
            whole rows.
    """

    ids: Tensor
    targets: Tensor
    a: Tensor | None = None
    b: Tensor | None = None
    transform: Transform = NO_TRANSFORM
    flags: StatsFlags = NO_FLAGS
    correct: bool = False
    best: bool = False
    gradients: bool = False
    whole: bool = True
    lse: bool = True
    through_transform: bool = True
    weights: Tensor | None = None


Norms = tuple[Any, Any]  # (M, log S) of N rows


class StatsResult(NamedTuple):
    """Statistics of N rows: ``log_probs [N, K]``, all others ``[N]``; in the accumulation dtype, ``correct`` bool.

    ``best`` is the argmax, int64: the lowest column of a tie, ``IGNORE`` in inactive rows, and the lowest column that
    is not skipped if the softmax is NaN. ``row_max`` and ``log_sum`` are tensors if requested. ``rows/_rest.py``
    fills ``rest``, ``rest_max`` and ``rest_sum``.
    """

    log_probs: Tensor
    row_max: Any
    log_sum: Any
    entropy: Tensor | None = None
    mix: Tensor | None = None
    mix_weight: Tensor | None = None
    correct: Tensor | None = None
    best: Tensor | None = None
    rest: Tensor | None = None
    rest_max: Any = None
    rest_sum: Any = None

    @property
    def norms(self) -> Norms:
        """(M, log S)."""
        return self.row_max, self.log_sum


class Upstream(NamedTuple):
    """The differentiable outputs, ``[N, K]`` and ``[N]``, or their upstream gradients, contiguous; or None."""

    log_probs: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    mix: Tensor | None
    rest: Tensor | None


class Coefficients(NamedTuple):
    """Per-row terms of the gradient, g_k, A, B and g_F above: ``grad_ids [N, K]``, all others ``[N]``.

    ``rest_coef`` is the upstream gradient of log r. Only ``rows/_rest.py`` reads it.
    """

    grad_ids: Tensor
    p_coef: Tensor
    p_logp_coef: Tensor | None = None
    mix_coef: Tensor | None = None
    rest_coef: Tensor | None = None


Combined = tuple[Coefficients, Tensor, Tensor]  # with their size, and the targets of the rows with a gradient


class StatsPrimitives(Protocol):
    """Primitives of the row statistics of one backend, or those for a split vocabulary on top of them."""

    def forward(self, logits: Tensor, request: StatsRequest) -> StatsResult:
        """Return the statistics of N rows; 0 / False in inactive rows."""

    def mix(self, logits: Tensor, request: StatsRequest, norms: Norms) -> tuple[Tensor, Tensor | None]:
        """Return the shares of F and W of these columns, for rows whose norms are known."""

    def coefficients(self, request: StatsRequest, result: StatsResult, upstream: Upstream) -> Combined:
        """Combine the upstream gradients of each row; ``_chain_rule.coefficients`` does it in plain torch."""

    def backward(self, logits: Tensor, request: StatsRequest, c: Coefficients, norms: Norms, out: Tensor) -> None:
        """Write the gradient to ``out``, which may be the logits themselves; zeros in inactive rows.

        If ``request.through_transform`` is False, the gradient is with respect to the transformed logits: p for lse.
        If ``request.weights`` is given, an out-of-range id makes the gradient of its row NaN.
        """
