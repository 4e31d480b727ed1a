r"""Sums of a per-row function of softmax statistics: policy ratios, penalties, confidence losses, entropy bonuses.

    loss = sum_n fn(log p_n, lse_n, H_n, ...; aux_n).

From hidden states, ``fn`` and its gradient are evaluated once per chunk of rows, while the logits of the chunk exist.
The logits are therefore computed once: two matrix products with a frozen head, three with a trainable head. Calling
``linear_row_stats`` and combining the results afterwards takes three and four products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dllm_kernels._core._inputs import RowInputs
from dllm_kernels._core._plan import Options
from dllm_kernels._core._results import RowObjective, RowStats
from dllm_kernels._core._run import checked, run
from dllm_kernels._core._stats import ROW_OBJECTIVE, ROW_STATS, Objective, checked_value
from dllm_kernels._utils import _checks
from dllm_kernels._utils._deferred import from_hidden_states
from dllm_kernels._utils._named import replaced
from dllm_kernels._utils._plain import all_plain, has_values, plain
from dllm_kernels._utils._transform import Transform
from dllm_kernels.ops.row_stats import LINEAR, LOGITS, row_stats

Fn = Callable[..., torch.Tensor]


@from_hidden_states("linear_row_objective")
def row_objective(
    logits: torch.Tensor,
    ids: torch.Tensor,
    fn: Fn,
    *aux: torch.Tensor,
    entropy: bool = False,
    active: torch.Tensor | None = None,
    with_correct: bool = False,
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
    check_targets: bool | None = None,
    backend: str = "auto",
) -> RowObjective:
    r"""Sum over rows of a function of each row's statistics, such as log-probabilities and entropy.

    .. math:: \text{loss} = \sum_n \text{fn}(\text{stats}_n, \text{aux}_n)

    Examples:
        >>> def entropy_of_correct(stats, weights):  # confidence loss of correctly predicted tokens
        ...     return torch.where(stats.correct, stats.entropy, 0.0) * weights
        >>> logits, targets, weights = torch.eye(4, requires_grad=True), torch.tensor([0, 1, 3, 3]), torch.ones(4)
        >>> out = row_objective(logits, targets, entropy_of_correct, weights, entropy=True, with_correct=True)
        >>> out.correct.tolist(), (out.value > 0).tolist()
        ([True, True, False, True], [True, True, False, True])
        >>> out.loss.backward()

    Args:
        logits: {logits}
        ids: {ids}
        fn: called as ``fn(stats, *aux)`` with the :class:`RowStats` of R rows (``log_probs [R]`` or ``[R, K]``, the
            others ``[R]``) and the matching R rows of each ``aux`` tensor. It returns ``[R]``, computed by torch
            operations. It may be called several times, each time with a subset of the rows. The subset may include
            inactive rows, whose results are dropped. Tensors that ``fn`` closes over receive gradients if they require
            them. ``fn`` must not modify ``aux``, which are the caller's tensors. It must bound differences before their
            exponential: if ``exp`` overflows, a ``minimum``, ``clamp`` or ``where`` behind it has a NaN gradient.
        aux: tensors ``[..., *]`` with one entry per row; must not require a gradient.
        entropy: True to compute ``stats.entropy`` for ``fn``; otherwise it is None.
        active: ``[...]``, bool or numeric; rows with entry 0 are omitted from the sum. None: all rows.
        with_correct: True to compute ``stats.correct`` for ``fn``, which is True if the first id is the argmax;
            otherwise it is None.
        softcap: {softcap}
        scale: {scale}
        skip_id: {skip_id}
        check_targets: {check_targets}
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`RowObjective`. ``loss`` is differentiable in the logits; all other fields are detached.

    Raises:
        TypeError: ``fn`` is not callable or does not return a floating tensor, or an argument has the wrong type.
        ValueError: ``fn`` returns a shape other than ``[R]``, an ``aux`` tensor requires a gradient, shapes, dtypes or
            devices do not match, a number is out of range, or the backend is unknown.
        IndexError: an id is out of range and checked, see ``check_targets``.

    Source: policy ratios with a k3 penalty as in arXiv 2402.03300, focal losses as in arXiv 1708.02002.
    """
    aux, active = _checked_aux(fn, logits, aux, LOGITS.rows), plain(active)
    stats = row_stats(
        logits, ids, entropy=entropy, active=active, with_correct=with_correct, softcap=softcap, scale=scale,
        skip_id=skip_id, check_targets=check_targets, backend=backend,
    )  # fmt: skip
    return _objective_of(fn, aux, stats, active)


def linear_row_objective(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    fn: Fn,
    *aux: torch.Tensor,
    bias: torch.Tensor | None = None,
    extra: _checks.Extra | None = None,
    entropy: bool = False,
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
) -> RowObjective:
    r"""Compute :func:`row_objective` from hidden states and the LM head; the logits are computed once, chunk by chunk.

    The forward pass computes the gradient and backward only scales it in place, so backward can run only once. Under
    ``torch.compile`` the graph contains :func:`linear_row_stats` followed by ``fn``, which takes one more matrix
    product.

    Examples:
        >>> def clipped(stats, old, ref, advantages):  # the clipped policy ratio with a k3 penalty of GRPO
        ...     log_ratio = stats.log_probs - old  # bounded before the exponential, see the notes on fn
        ...     above, below = log_ratio.clamp(max=math.log(1.2)), log_ratio.clamp(math.log(0.8), math.log(3))
        ...     ratio = torch.where(advantages > 0, above, below).exp()
        ...     away = (ref - stats.log_probs).clamp(-20, 20)
        ...     return 0.04 * (away.exp() - away - 1) - ratio * advantages
        >>> hidden, weight = torch.zeros(1, 3, 8, requires_grad=True), torch.zeros(10, 8)
        >>> tokens = torch.tensor([[3, 1, 4]])
        >>> old, mask, advantages = torch.full((1, 3), -math.log(10)), torch.tensor([[1, 1, 0]]), torch.ones(1, 3)
        >>> out = linear_row_objective(hidden, weight, tokens, clipped, old, old, advantages, active=mask)
        >>> round((out.loss / mask.sum()).item(), 4)  # the ratio is 1, the penalty 0
        -1.0
        >>> out.loss.backward()

    Args:
        hidden: {hidden}
        weight: {weight}
        ids: {ids}
        fn: called as ``fn(stats, *aux)`` once per chunk of R rows; see :func:`row_objective`.
        aux: tensors ``[..., *]`` with one entry per row; must not require a gradient.
        bias: ``[V]`` or None.
        extra: {extra}
        entropy: True to compute ``stats.entropy`` for ``fn``; otherwise it is None.
        active: ``[...]``, bool or numeric; rows with entry 0 are omitted from the sum and not projected. None: all
            rows.
        with_correct: True to compute ``stats.correct`` for ``fn``, which is True if the first id is the argmax of the
            logits rounded to the compute dtype; otherwise it is None.
        chunk_size: {chunk_size}
        num_active: {num_active}
        logits_dtype: {logits_dtype}
        softcap: {softcap}
        scale: {scale}
        skip_id: {skip_id}
        check_targets: {check_targets}
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`RowObjective`. ``loss`` is differentiable in hidden, weight, bias and extra; all other fields are
        detached.

    Raises:
        TypeError: as in :func:`row_objective`.
        ValueError: as in :func:`row_objective`, and ``chunk_size`` < 1.
        IndexError: as in :func:`row_objective`.
        RuntimeError: a second backward pass through the same loss.

    Source: :func:`row_objective` of the projected hidden states.
    """
    aux = _checked_aux(fn, hidden, aux, LINEAR.rows)
    options = Options(
        Transform(softcap, scale, skip_id), check_targets=check_targets, backend=backend, chunk_size=chunk_size,
        num_active=num_active, logits_dtype=logits_dtype, with_lse=True, with_correct=with_correct, entropy=entropy,
    )  # fmt: skip
    inputs, options = checked(
        LINEAR, RowInputs(hidden, ids, weight, bias, active=active), options, extra=extra, several=True
    )
    if torch.compiler.is_compiling() or not has_values(hidden):
        return _objective_of(fn, aux, run(ROW_STATS, inputs, options), inputs.active, options.num_active)
    objective = Objective(fn, several=inputs.ids.dim() == hidden.dim())
    return run(ROW_OBJECTIVE, replaced(inputs, aux=aux), options, objective=objective)  # type: ignore[no-any-return]


def _checked_aux(fn: Any, x: Any, aux: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """Validate ``fn`` and ``aux``; return ``aux`` with DTensors gathered."""
    if not callable(fn):
        raise TypeError(f"fn must be a function of the row statistics, got {_checks.type_name(fn)}")
    aux = all_plain(*aux)
    _checks.check_tensor(name, x)
    rows = tuple(x.shape[:-1])
    for i, t in enumerate(aux):
        _checks.check_tensor(f"aux[{i}]", t)
        if tuple(t.shape[: len(rows)]) != rows:
            raise ValueError(
                f"aux[{i}] must have shape {(*rows, '*')} ({name} without its last dimension), got {tuple(t.shape)}"
            )
        _checks.check_same_device(name, x, **{f"aux[{i}]": t})
        _checks.check_constant(f"aux[{i}]", t)
    return aux


def _objective_of(
    fn: Fn, aux: tuple[torch.Tensor, ...], stats: RowStats, active: torch.Tensor | None, num_active: int | None = None
) -> RowObjective:
    """Evaluate the objective of computed statistics, differentiable through them."""
    rows = stats.lse.dim()
    log_probs, lse, entropy, _, correct = (
        None if t is None else t.detach().clone() for t in stats
    )  # copies, because fn may modify its stats in place
    flat = [None if t is None else t.flatten(0, rows - 1) if rows else t.unsqueeze(0) for t in (*stats, *aux)]
    value = checked_value(fn(RowStats(*flat[:5]), *flat[5:]), flat[1]).view(stats.lse.shape)  # type: ignore[arg-type]
    value = value if active is None else torch.where(active != 0, value, 0.0)
    if num_active is not None:  # fn may have ignored the NaN of a bound that is too small
        count = torch.ones_like(stats.lse) if active is None else active != 0
        value = torch.where(count.sum() > num_active, math.nan, value)
    return RowObjective(value.sum(), value.detach(), log_probs, lse, entropy, correct)  # type: ignore[arg-type]
