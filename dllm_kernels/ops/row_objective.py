r"""Sums of a per-row function of softmax statistics: policy ratios, penalties, confidence losses, entropy bonuses.

    loss = sum_n fn(log p_n, lse_n, H_n, ...; aux_n).

From hidden states, ``fn`` and its gradient are evaluated once per chunk of rows, while the logits of the chunk exist.
The logits are therefore computed once: two matrix products with a frozen head, three with a trainable head. Calling
``linear_row_stats`` and combining the results afterwards takes three and four products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._graph._own_graph import own_graph
from dllm_kernels._graph._plain import all_plain, has_values
from dllm_kernels.ops.row_stats import NAMES, RestStats, RowStats, row_stats_unchecked
from dllm_kernels.rows import _stats
from dllm_kernels.rows._call import Call, checked, name_of_rows
from dllm_kernels.rows._chunks import Chunks, Factors, no_autocast
from dllm_kernels.rows._fused import Fused, first_order, outputs
from dllm_kernels.rows._interface import IGNORE
from dllm_kernels.rows._kept_gradients import keep_gradients, scale_gradients
from dllm_kernels.rows._logits import Head, LinearLogits, Logits, flat_rows
from dllm_kernels.rows._options import Options
from dllm_kernels.rows._setup import Gradients, Setup, Split
from dllm_kernels.rows._stats import OUTPUTS, RequestedStats
from dllm_kernels.rows._stats_interface import NO_FLAGS, StatsFlags, StatsResult, Upstream
from dllm_kernels.rows._transform import Transform

Fn = Callable[..., Tensor]


class RowObjective(NamedTuple):
    """An objective and its statistics.

    All but ``loss`` are detached. All but ``loss`` and ``log_probs`` have the shape of the rows. Inactive rows are 0 or
    False.

    Attributes:
        loss: sum of ``value``, 0-d, float32 (float64 for float64 logits), differentiable.
        value: return value of ``fn`` for each row.
        log_probs: log p of each id, of the shape of the ids.
        lse: logsumexp.
        entropy: ``-sum_v p_v log p_v``, or None unless requested.
        correct: True if the first id is the argmax, bool, or None unless requested.
        ids: see :class:`RowStats`.
    """

    loss: Tensor
    value: Tensor
    log_probs: Tensor
    lse: Tensor
    entropy: Tensor | None = None
    correct: Tensor | None = None
    ids: Tensor | None = None


def row_objective(
    logits: Logits, ids: Tensor, fn: Fn, *aux: Tensor, entropy: bool = False, active: Tensor | None = None,
    with_correct: bool = False, with_ids: bool = False, softcap: float | None = None, scale: float | None = None,
    skip_id: int | None = None, check_targets: bool | None = None, backend: str = "auto",
) -> RowObjective:  # fmt: skip
    r"""Sum over rows of a function of each row's statistics, such as log-probabilities and entropy.

    .. math:: \text{loss} = \sum_n \text{fn}(\text{stats}_n, \text{aux}_n)

    Examples:
        >>> # confidence loss of correctly predicted tokens
        >>> def entropy_of_correct(stats, weights):
        ...     return torch.where(stats.correct, stats.entropy, 0.0) * weights
        >>> logits = torch.eye(4, requires_grad=True)
        >>> targets = torch.tensor([0, 1, 3, 3])
        >>> weights = torch.ones(4)
        >>> out = row_objective(
        ...     logits, targets, entropy_of_correct, weights, entropy=True, with_correct=True
        ... )
        >>> out.correct.tolist(), (out.value > 0).tolist()
        ([True, True, False, True], [True, True, False, True])
        >>> out.loss.backward()

    Args:
        logits: ``[..., V]``, float16, bfloat16, float32 or float64; any strides.
        ids: ``[...]`` or ``[..., K]``, K >= 1, integers in ``[0, V)``. -100 marks a missing id, with log-probability 0.
            Any other out-of-range id raises an IndexError on a CPU, see ``check_targets``; on a GPU it gives NaN in
            that entry, as ``skip_id`` does everywhere. If the entry receives a gradient, the gradient of its row is NaN
            too.
        fn: called as ``fn(stats, *aux)`` with the :class:`RowStats` of R rows (``log_probs [R]`` or ``[R, K]``, the
            others ``[R]``) and the matching R rows of each ``aux`` tensor. It returns ``[R]``, computed by torch
            operations. It may be called several times, each time with a subset of the rows. The subset may include
            inactive rows, whose results are dropped. Tensors that ``fn`` closes over receive gradients if they require
            them. ``fn`` must not modify ``aux``, which are the caller's tensors. It must bound differences before their
            exponential: if ``exp`` overflows, a ``minimum``, ``clamp`` or ``where`` after it has a NaN gradient.
        aux: tensors ``[..., *]`` with one entry per row; must not require a gradient.
        entropy: True to compute ``stats.entropy`` for ``fn``; otherwise it is None.
        active: ``[...]``, bool or numeric; rows with entry 0 are omitted from the sum. None: all rows.
        with_correct: True to compute ``stats.correct`` for ``fn``, which is True if the first id is the argmax;
            otherwise it is None.
        with_ids: True to compute ``stats.ids`` for ``fn``, the argmax; otherwise it is None.
        softcap: c > 0 replaces each logit by ``c tanh(z / c)`` first, as in Gemma; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.
        skip_id: column that is never predicted, such as the MASK column. Its logit is -inf, its gradient is 0, and the
            NLL or log-probability of a target or id equal to it is NaN. None: every column can be predicted.
        check_targets: raise an IndexError that names the first out-of-range target or id of an active row. None: the
            environment variable ``DLLM_KERNELS_CHECK``, 1 or 0; if it is unset, True for eager calls on a CPU, and
            False elsewhere. True also rejects ``skip_id``, and costs a host sync on a GPU.
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
    if not callable(fn):
        raise TypeError(f"fn must be a function of the row statistics, got {_checks.type_name(fn)}")
    options = Options(
        Transform(softcap, scale, skip_id), check_targets=check_targets, backend=backend, with_lse=True,
        with_correct=with_correct, with_ids=with_ids,
    )  # fmt: skip
    flags = StatsFlags(entropy=_checks.checked_bool("entropy", entropy))
    call = checked(NAMES, logits, ids, options, active=active, several=True)
    aux = _checked_aux(call, aux)
    if call.head is None or torch.compiler.is_compiling() or not has_values(call.x):
        return _objective_of(fn, aux, row_stats_unchecked(call, None, flags), call)
    return row_objective_unchecked(call, aux, flags, fn=fn)  # type: ignore[no-any-return]


def linear_row_objective(
    hidden: Tensor, weight: Tensor, ids: Tensor, fn: Fn, *aux: Tensor, bias: Tensor | None = None,
    extra: _checks.Extra | None = None, entropy: bool = False, active: Tensor | None = None, with_correct: bool = False,
    with_ids: bool = False, chunk_size: int | None = None, num_active: int | None = None,
    logits_dtype: torch.dtype | None = None, softcap: float | None = None, scale: float | None = None,
    skip_id: int | None = None, check_targets: bool | None = None, backend: str = "auto",
) -> RowObjective:  # fmt: skip
    """Compute :func:`row_objective` of ``LinearLogits(hidden, weight, bias, extra, ...)``, whose arguments it takes."""
    logits = LinearLogits(hidden, weight, bias, extra, logits_dtype, chunk_size, num_active, softcap, scale, skip_id)
    return row_objective(
        logits, ids, fn, *aux, entropy=entropy, active=active, with_correct=with_correct, with_ids=with_ids,
        check_targets=check_targets, backend=backend,
    )  # fmt: skip


def _checked_aux(call: Call, aux: tuple[Any, ...]) -> tuple[Any, ...]:
    """Validate ``aux``; return it with DTensors gathered."""
    name, x = name_of_rows(NAMES, call.logits), call.x
    aux = all_plain(*aux)
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


def _objective_of(fn: Fn, aux: tuple[Tensor, ...], stats: RowStats, call: Call) -> RowObjective:
    """Evaluate the objective of computed statistics, differentiable through them."""
    active, bound = call.active, getattr(call.logits, "num_active", None)
    rows = stats.lse.dim()

    def flat(t: Any) -> Any:
        return None if t is None else t.flatten(0, rows - 1) if rows else t.unsqueeze(0)

    # Copies, because fn may modify its stats in place.
    copies = {name: None if t is None else t.detach().clone() for name, t in zip(stats._fields, stats, strict=True)}
    flat_stats = RowStats(*map(flat, stats))
    value = _checked_value(fn(flat_stats, *map(flat, aux)), flat_stats.lse).view(stats.lse.shape)
    value = value if active is None else torch.where(active != 0, value, 0.0)
    if bound is not None:  # fn may have ignored the NaN of a bound that is too small
        count = torch.ones_like(stats.lse) if active is None else active != 0
        value = torch.where(count.sum() > bound, math.nan, value)
    return _stats.record(RowObjective, {"loss": value.sum(), "value": value.detach(), **copies})  # type: ignore[no-any-return]


def row_objective_unchecked(
    call: Call, aux: tuple[Tensor, ...], flags: StatsFlags = NO_FLAGS, *, fn: Fn, split: Split | None = None
) -> Any:
    """Compute :func:`row_objective` of a validated call with a head and values; see :class:`Objective` for ``fn``.

    The result is a :class:`RestStats` if ``options.rest``.
    """
    if call.on_ranks:
        from dllm_kernels.distributed.run import on_this_rank

        return on_this_rank(row_objective_unchecked, call, {"aux": aux}, sums=("loss",), flags=flags, fn=fn)
    setup, rows, ids, head = Setup.of(call.logits, call.options, split), call.rows, call.ids, call.head
    assert head is not None
    requested = RequestedStats.of(call, None, flags, setup)
    flat_aux = tuple(t.detach().reshape(rows.numel(), *t.shape[len(rows) :]) for t in aux)
    objective = Objective(fn, ids.dim() == call.x.dim(), flat_aux)
    loss, value, *results = _LinearRowObjective.under(setup)(flat_rows(call.x), requested, objective, setup, *head.flat)
    fields = _stats.in_rows({"value": value, **_stats.by_name(results, requested, setup)}, call)
    return _stats.record(RestStats if requested.with_rest else RowObjective, {"loss": loss, **fields})


class _LinearRowObjective(Fused):
    """Sum of an objective; forward computes the gradients, and backward scales them. Never part of a graph."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, requested: RequestedStats, objective: Objective, setup: Setup, *head: Any
    ) -> tuple[Tensor, ...]:
        loss, value, result, saved = _objective(hidden, Head(*head), requested, objective, setup)
        link = keep_gradients(ctx, hidden, Head(*head), saved, setup, ("linear_row_objective", "linear_row_stats"))
        statistics, others = _stats.outputs_of(result)
        return outputs(ctx, [loss], [value, *statistics, *others], link)

    @staticmethod
    @first_order("torch.log_softmax of the logits, torch.nn.functional.linear(hidden, weight, bias)")
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> Any:
        grad_hidden, *grad_head = scale_gradients(ctx, grad_loss)
        return grad_hidden, None, None, None, *grad_head


def _objective(
    hidden: Tensor, head: Head, requested: RequestedStats, objective: Objective, setup: Setup
) -> tuple[Tensor, Tensor, StatsResult, tuple[Gradients, Tensor | None, Tensor | None]]:
    """Compute the loss, the value and the statistics of each row, and what ``keep_gradients`` saves.

    Each chunk of logits is computed once, then its statistics, their objective, and the gradient, which overwrites the
    logits. With loss scaling, each row's gradient lacks its size, and the head's the loss scale.
    """
    with torch.cuda.device_of(hidden), no_autocast(hidden):  # type: ignore[no-untyped-call]
        chunks = Chunks(hidden, head, requested.marks, setup, setup.needs)
        request = requested.request(setup, chunks.targets)
        rows, out, primitives = chunks.rows, requested.empty(chunks.rows, setup), chunks.primitives
        dtype, device, needed = setup.accum_dtype, hidden.device, any(setup.needs)
        value, sizes, loss_scale = rows.empty(dtype=dtype, device=device), None, None
        if needed and setup.needs_loss_scaling:
            sizes = rows.empty(dtype=dtype, device=device)
            loss_scale = torch.full((), torch.finfo(torch.float32).tiny, dtype=dtype, device=device)
        for chunk, h, targets, logits in chunks:
            here = _stats.chunk_request(request, rows, chunk, targets)
            result = _stats.statistics(primitives, logits[None], here, rest=requested.with_rest)
            part, upstream = objective.of(result, targets, [rows.take(t, chunk) for t in objective.aux], needed)
            rows.put_each([value, *out], chunk, [part, *result])
            if needed:
                c, size, with_gradient = _stats.coefficients(primitives, here, result, upstream)
                factors = None
                if sizes is not None and loss_scale is not None:
                    rows.put(sizes, chunk, size)
                    c = _stats.divided(c, size)
                    loss_scale, factor = chunks.raise_loss_scale(loss_scale, size)
                    factors = Factors(None, factor)
                here = here._replace(targets=with_gradient)
                _stats.write_gradient(primitives, logits[None], here, c, result, logits[None])
                chunks.add_gradients(chunk, h, with_gradient, logits, size, factors)
        value, row_size, *whole = rows.finished([value, sizes, *out])
        grads = chunks.gradients(wide=loss_scale is not None) if needed else Gradients()
        return value.sum(), value, StatsResult(*whole), (grads, loss_scale, row_size)


class Objective(NamedTuple):
    """The caller's function, ``fn(stats, *aux) -> [R]`` of R rows.

    Attributes:
        fn: the function.
        several: True if the caller's ids have one dimension more than the rows.
        aux: tensors ``[N, *]``.
    """

    fn: Fn
    several: bool
    aux: tuple[Tensor, ...]

    def of(self, result: StatsResult, targets: Tensor, aux: Sequence[Tensor], needed: bool) -> tuple[Tensor, Upstream]:
        """Return (value per row, gradients of the sum of values with respect to the statistics).

        The value of an inactive row is 0. The gradient of a statistic that ``fn`` does not use is None.
        """
        statistics, constant = _stats.outputs_of(result)
        leaves = Upstream(*[None if t is None else t.detach().clone().requires_grad_(needed) for t in statistics])
        fields: dict[str, Any] = dict(zip(OUTPUTS, (*leaves, *constant), strict=True))
        # Enabled outside of autograd too, so that a tensor that fn closes over shows that it requires a gradient.
        with own_graph(), torch.set_grad_enabled(needed or torch.is_grad_enabled()):
            if not self.several:
                fields["log_probs"] = fields["log_probs"].squeeze(1)
            stats = _stats.record(RowStats if result.rest is None else RestStats, fields)
            value = torch.where(targets != IGNORE, _checked_value(self.fn(stats, *aux), stats.lse), 0.0)
            return value.detach(), Upstream(*_gradients(value.sum(), leaves))


def _gradients(total: Tensor, leaves: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Differentiate an objective with respect to the statistics; raise if it depends on another leaf."""
    if total.grad_fn is None or not total.requires_grad:
        return [None for _ in leaves]
    wrt = [t for t in leaves if t is not None]
    if not {id(t) for t in _leaves_of(total)} <= {id(t) for t in wrt}:
        raise ValueError(
            "fn must not use a tensor that requires a gradient, which it would not get; detach it, or compute the "
            "objective from linear_row_stats"
        )
    grads = iter(torch.autograd.grad(total, wrt, allow_unused=True))
    return [None if t is None or (g := next(grads)) is None else g.contiguous() for t in leaves]


def _checked_value(value: Any, lse: Tensor) -> Tensor:
    """Validate the value that ``fn`` returned for R rows; cast it to the dtype of their logsumexp ``lse [R]``."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = f"dtype {value.dtype}" if isinstance(value, Tensor) else _checks.type_name(value)
        raise TypeError(f"fn must return a floating tensor, got {got}")
    if value.shape != lse.shape:
        raise ValueError(
            f"fn must return one number for each of its {lse.numel()} rows, got shape {tuple(value.shape)}"
        )
    return value.to(lse.dtype)


def _leaves_of(t: Tensor) -> Iterator[Tensor]:
    """Yield the leaf tensors of the graph of ``t``."""
    seen: set[Any] = set()
    waiting = [t.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        waiting += [following for following, _ in node.next_functions]
