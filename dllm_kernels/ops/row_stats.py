r"""Per-row softmax statistics: log p at given ids, logsumexp, entropy, a sum of log-mixtures, argmax-match.

For objectives that are not a weighted sum of NLLs. Examples are policy gradients (ratios and clipping of
log-probabilities, entropy bonuses), distances between distributions that are known at a few ids, and bounds with a sum
over the vocabulary. All outputs except ``correct`` are differentiable, and one backward pass handles all their upstream
gradients (``_backends/_row_stats.py``).
"""

from __future__ import annotations

import torch

from dllm_kernels._core._inputs import RowInputs
from dllm_kernels._core._plan import Options
from dllm_kernels._core._results import RowStats
from dllm_kernels._core._run import call
from dllm_kernels._core._stats import ROW_STATS
from dllm_kernels._utils import _checks
from dllm_kernels._utils._deferred import from_hidden_states
from dllm_kernels._utils._transform import Transform

Mix = tuple[torch.Tensor, torch.Tensor]
LOGITS = _checks.Names("logits", "ids")
LINEAR = _checks.Names("hidden", "ids", "weight", "bias")


@from_hidden_states("linear_row_stats")
def row_stats(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    entropy: bool = False,
    mix: Mix | None = None,
    active: torch.Tensor | None = None,
    with_correct: bool = False,
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
    check_targets: bool | None = None,
    backend: str = "auto",
) -> RowStats:
    r"""Statistics of the softmax p of each active row of logits, differentiable in one backward pass.

    .. math::
        \log p_k, \qquad \text{lse} = \log \sum_v e^{z_v}, \qquad H = -\sum_v p_v \log p_v, \qquad
        F = \sum_v \log(a + b p_v)

    F sums over all columns except ``skip_id``. Rows with ``active`` 0 are not read: their results and gradients are 0
    even if they hold NaN. A row whose upstream gradients are all 0 has the gradient 0. A NaN logit affects only its own
    row. A logit of ``-inf`` is a probability of 0: it adds 0 to H and log a to F. A row of only ``-inf`` has an ``lse``
    of -inf; its log-probabilities, H and F are NaN.

    Examples:
        >>> logits, ids = torch.zeros(2, 10, requires_grad=True), torch.tensor([[3, 4], [5, -100]])
        >>> out = row_stats(logits, ids, entropy=True)
        >>> [[round(x, 4) for x in row] for row in out.log_probs.tolist()]
        [[-2.3026, -2.3026], [-2.3026, 0.0]]
        >>> (out.log_probs.sum() - 0.01 * out.entropy.sum()).backward()  # one backward pass

    Args:
        logits: {logits}
        ids: {ids}
        entropy: also return H.
        mix: {mix}
        active: ``[...]``, bool or numeric; rows with entry 0 are inactive. None: all rows.
        with_correct: also return the argmax match: True if the first id is the argmax.
        softcap: {softcap}
        scale: {scale}
        skip_id: {skip_id}
        check_targets: {check_targets}
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`RowStats`.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices do not match, a number is out of range, or the backend is unknown.
        IndexError: an id is out of range and checked, see ``check_targets``.

    Source: the definitions. The bound of :class:`SCDDLoss` uses F, the sum of log-mixtures.
    """
    a, b = _checks.checked_pair("mix", mix, "(a, b)")
    options = Options(
        Transform(softcap, scale, skip_id), check_targets=check_targets, backend=backend, with_lse=True,
        with_correct=with_correct, entropy=entropy,
    )  # fmt: skip
    inputs = RowInputs(logits, ids, active=active, mix_a=a, mix_b=b)
    return call(ROW_STATS, LOGITS, inputs, options, several=True)  # type: ignore[no-any-return]


def linear_row_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    extra: _checks.Extra | None = None,
    entropy: bool = False,
    mix: Mix | None = None,
    active: torch.Tensor | None = None,
    with_correct: bool = False,
    chunk_size: int | None = None,
    num_active: int | None = None,
    logits_dtype: torch.dtype | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
    check_targets: bool | None = None,
    backend: str = "auto",
) -> RowStats:
    r"""Statistics of ``softmax(weight @ hidden + bias)`` of each active row; the logits exist one chunk at a time.

    See :func:`row_stats`. Backward recomputes the logits, so no tensor of vocabulary size is saved. Forward and
    backward together take 3 matrix products with a frozen head and 4 with a trainable head. Forward alone takes 1.

    Args:
        hidden: {hidden}
        weight: {weight}
        ids: {ids}
        bias: ``[V]`` or None.
        extra: {extra}
        entropy: also return the entropy.
        mix: {mix}
        active: ``[...]``, bool or numeric, nonzero for the rows to project; None: all rows.
        with_correct: also return the argmax match: True if the first id is the argmax of the logits rounded to the
            compute dtype.
        chunk_size: {chunk_size}
        num_active: {num_active}
        logits_dtype: {logits_dtype}
        softcap: {softcap}
        scale: {scale}
        skip_id: {skip_id}
        check_targets: {check_targets}
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`RowStats`, differentiable in hidden, weight, bias and extra.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices do not match, ``chunk_size`` < 1, a number is out of range, or the backend
            is unknown.
        IndexError: an id is out of range and checked, see ``check_targets``.

    Source: :func:`row_stats` of the projected hidden states.
    """
    a, b = _checks.checked_pair("mix", mix, "(a, b)")
    options = Options(
        Transform(softcap, scale, skip_id), check_targets=check_targets, backend=backend, chunk_size=chunk_size,
        num_active=num_active, logits_dtype=logits_dtype, with_lse=True, with_correct=with_correct, entropy=entropy,
    )  # fmt: skip
    inputs = RowInputs(hidden, ids, weight, bias, active=active, mix_a=a, mix_b=b)
    return call(ROW_STATS, LINEAR, inputs, options, extra=extra, several=True)  # type: ignore[no-any-return]
