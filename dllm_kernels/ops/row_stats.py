r"""Per-row softmax statistics: log p at given ids, logsumexp, entropy, a sum of log-mixtures, argmax-match.

For what no sum of weighted NLLs is: policy gradients (log-probabilities with ratios and clipping on top, entropy
bonuses), distances between distributions that are known at a few ids, bounds with a sum over the whole vocabulary in
them. All outputs but ``correct`` take an upstream gradient at once, and one backward pass serves them all
(``_backends/_row_stats.py``).
"""

from __future__ import annotations

import torch

from dllm_kernels._core._inputs import RowInputs
from dllm_kernels._core._plan import Options
from dllm_kernels._core._results import RowStats
from dllm_kernels._core._run import call
from dllm_kernels._core._stats import ROW_STATS
from dllm_kernels._utils import _checks
from dllm_kernels._utils._transform import Transform

Mix = tuple[torch.Tensor, torch.Tensor]
LOGITS = _checks.Names("logits", "ids")
LINEAR = _checks.Names("hidden", "ids", "weight", "bias")


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
    r"""Statistics of the softmax p of each active row of logits, differentiable together.

    .. math::
        \log p_k, \qquad \text{lse} = \log \sum_v e^{z_v}, \qquad H = -\sum_v p_v \log p_v, \qquad
        F = \sum_v \log(a + b p_v)

    F sums over the columns that are not skipped. A row whose entry of ``active`` is zero is not read: its results and
    its gradient are 0 even where it holds NaN. A row whose upstream gradients are 0 has the gradient 0. A NaN stays in
    its own row. A logit of ``-inf`` is a probability of 0: it adds nothing to H, and log a to F. A row of only ``-inf``
    gives NaN, and an ``lse`` of -inf.

    Examples:
        >>> logits, ids = torch.zeros(2, 10, requires_grad=True), torch.tensor([[3, 4], [5, -100]])
        >>> out = row_stats(logits, ids, entropy=True)
        >>> [[round(x, 4) for x in row] for row in out.log_probs.tolist()]
        [[-2.3026, -2.3026], [-2.3026, 0.0]]
        >>> (out.log_probs.sum() - 0.01 * out.entropy.sum()).backward()  # one pass for all of them

    Args:
        logits: ``[..., V]``, float16, bfloat16, float32 or float64; any strides.
        ids: ``[...]`` or ``[..., K]``, K >= 1, integers in ``[0, V)``; -100: none, log p is 0. Anything else, or
            ``skip_id``, gives NaN in its own place and, where a gradient comes to it, in its row of the gradient.
        entropy: also return H.
        mix: (a, b), each ``[...]``, floating, not negative, taken as constants (detached): also return F. a = 0 and b =
            0 are legal; F is -inf where a logarithm is.
        active: ``[...]``, bool or numeric; zero switches a row off. None: every row counts.
        with_correct: also return whether the first id is the argmax.
        softcap: c > 0 makes each logit ``c tanh(z / c)``, as Gemma's are; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.
        skip_id: a column that is never predicted, such as MASK's: its logit counts as -inf, and as an id it gives NaN.
        check_targets: raise an IndexError naming the first bad id (a host sync); None: where ``DLLM_KERNELS_CHECK=1``.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`RowStats`.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices that do not fit, a number out of range, or an unknown backend.
        IndexError: ``check_targets`` is on and an id is out of range.
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

    As :func:`row_stats`. Backward makes the logits again, so that nothing of the vocabulary's size is kept. It takes 3
    matrix products with a frozen head, 4 with a trainable one, and 1 where nothing requires a gradient.

    Args:
        hidden: ``[..., D]``, float16, bfloat16, float32 or float64.
        weight: ``[V, D]``, the LM head, of the dtype of ``hidden`` unless autocast is on.
        ids: ``[...]`` or ``[..., K]``, K >= 1, integers in ``[0, V)``; -100: none, log p is 0. Anything else, or
            ``skip_id``, gives NaN in its own place and, where a gradient comes to it, in its row of the gradient.
        bias: ``[V]`` or None.
        extra: a second part of the head, of its dtype: (u ``[..., r]``, U ``[V, r]``) adds ``U u`` to the logits; or
            None.
        entropy: also return the entropy.
        mix: (a, b), each ``[...]``, floating, not negative, taken as constants (detached): also return F. a = 0 and b =
            0 are legal; F is -inf where a logarithm is.
        active: ``[...]``, rows to project; None: all.
        with_correct: also return whether the first id is the argmax, of logits rounded to the compute dtype.
        chunk_size: number of rows whose logits exist at a time; None: chosen from the sizes.
        num_active: an upper bound of the number of active rows, else read back from a GPU. Too small a bound gives NaN.
        logits_dtype: torch.float32 keeps the logits of float16 and bfloat16 operands in float32, where argmax and ties
            are judged too; their gradient is rounded once, before its products. None: the dtype of the operands.
        softcap: c > 0 makes each logit ``c tanh(z / c)``, as Gemma's are; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.
        skip_id: a column that is never predicted, such as MASK's: its logit counts as -inf, and as an id it gives NaN.
        check_targets: raise an IndexError naming the first bad id (a host sync); None: where ``DLLM_KERNELS_CHECK=1``.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`RowStats`, differentiable in hidden, weight, bias and extra.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices that do not fit, ``chunk_size`` < 1, a number out of range, or an unknown
            backend.
        IndexError: ``check_targets`` is on and an id is out of range.
    """
    a, b = _checks.checked_pair("mix", mix, "(a, b)")
    options = Options(
        Transform(softcap, scale, skip_id), check_targets=check_targets, backend=backend, chunk_size=chunk_size,
        num_active=num_active, logits_dtype=logits_dtype, with_lse=True, with_correct=with_correct, entropy=entropy,
    )  # fmt: skip
    inputs = RowInputs(hidden, ids, weight, bias, active=active, mix_a=a, mix_b=b)
    return call(ROW_STATS, LINEAR, inputs, options, extra=extra, several=True)  # type: ignore[no-any-return]
