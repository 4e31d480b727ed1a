"""Row statistics and objectives of row statistics, from logits, or chunk by chunk from hidden states and the LM head.

The logits of a head are computed in one buffer that all chunks reuse. Backward recomputes them and overwrites them by
their gradient. Nothing else of length V per row is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from dllm_kernels._backends._row_stats import Coefficients, StatsRequest, StatsResult, Upstream, coefficients
from dllm_kernels._backends._rows import IGNORE, StatsPrimitives, as_blv
from dllm_kernels._core import _op
from dllm_kernels._core._inputs import NO_GRADIENTS, Gradients, RowInputs
from dllm_kernels._core._old_chunks import Chunks, Factors, no_autocast, unit_scale
from dllm_kernels._core._old_nll import SCALES, STATS_OUTPUTS, scale_in_place, scales_loss
from dllm_kernels._core._plan import Plan
from dllm_kernels._core._rest import rest_backward, with_rest
from dllm_kernels._core._results import RestObjective, RestStats, RowObjective, RowStats
from dllm_kernels._utils._checks import type_name
from dllm_kernels._utils._own_graph import own_graph

Tensor = torch.Tensor


def row_ids(inputs: RowInputs, plan: Plan) -> tuple[Tensor, Tensor]:
    """Flatten ids to ``[N, K]``; targets ``[N]`` are ``IGNORE`` in inactive rows and 0 in all others."""
    N = inputs.x.shape[:-1].numel()
    ids = inputs.ids.detach().reshape(N, inputs.ids.shape[-1] if inputs.ids.dim() == inputs.x.dim() else 1)
    ids = ids.to(torch.int64).contiguous()
    if plan.options.transform.skip_id is not None:
        ids = ids.masked_fill(ids == plan.options.transform.skip_id, -1)
    zeros = ids.new_zeros(N)
    return ids, zeros if inputs.active is None else zeros.masked_fill(inputs.active.detach().reshape(-1) == 0, IGNORE)


def _forward(inputs: RowInputs, plan: Plan) -> _op.Outputs:
    if plan.from_hidden:
        result = _linear_forward(inputs, plan)
    else:
        result = _statistics(as_blv(inputs.x), _request(inputs, plan), plan)
    return {**result._asdict(), "lse": result.row_max + result.log_sum if plan.options.with_lse else None}


def _statistics(logits: Tensor, request: StatsRequest, plan: Plan) -> StatsResult:
    """Compute the statistics of logits ``[B, L, V]``."""
    primitives = plan.primitives()
    result = StatsResult(*primitives.stats.forward(logits, request))
    return with_rest(primitives, logits, request, result) if plan.options.rest else result


def _write_gradient(
    logits: Tensor, request: StatsRequest, c: Coefficients, grad_rest: Tensor | None, result: StatsResult, plan: Plan,
    out: Tensor,
) -> None:  # fmt: skip
    """Write the gradient with respect to the logits to ``out``; both ``[B, L, V]``, and maybe the same tensor."""
    primitives = plan.primitives()
    if grad_rest is None:
        primitives.stats.backward(logits, request, c, result.row_max, result.log_sum, out)
    else:
        rest_backward(primitives, logits, request, c, grad_rest, result, out)


def _linear_forward(inputs: RowInputs, plan: Plan) -> StatsResult:
    """Compute the statistics with one matrix product per chunk."""
    with no_autocast(inputs):
        request, chunks = _request(inputs, plan), Chunks(inputs, plan, NO_GRADIENTS)
        rows, out = chunks.rows, _empty(chunks, request, plan.accum_dtype, rest=plan.options.rest)
        for chunk, _, targets, logits in chunks:
            part = _statistics(logits[None], _part(chunks, chunk, request, targets), plan)
            rows.put_each(out, chunk, part)
        result = StatsResult(*rows.finished(out))
        return result if result.log_probs is out[0] else result._replace(log_probs=result.log_probs.clone())


def _backward(inputs: RowInputs, outputs: _op.Outputs, upstream: _op.Outputs, plan: Plan) -> Gradients:
    """Compute the gradient of the logits; from hidden states, recompute the logits of each chunk first."""
    result = StatsResult(*(outputs.get(name) for name in StatsResult._fields))  # type: ignore[arg-type]
    of_outputs = Upstream(*(upstream.get(name) for name in Upstream._fields))
    request, logits = _request(inputs, plan), inputs.x
    primitives = plan.primitives().stats
    c, size, targets = _coefficients(primitives, request, result, of_outputs)
    request = request._replace(targets=targets)
    if not plan.from_hidden:
        grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        _write_gradient(as_blv(logits), request, c, of_outputs.rest, result, plan, as_blv(grad))
        return Gradients(grad)
    with no_autocast(inputs):
        grad_rest = of_outputs.rest
        if plan.needs_loss_scaling:
            c, grad_rest = _over(c, grad_rest, size)
        size, factors, loss_scale = unit_scale(size, plan)
        chunks = Chunks(inputs, plan, plan.needs, factors, targets=request.targets)
        take = chunks.rows.take
        for chunk, h, targets, logits in chunks:
            part = Coefficients(*(None if t is None else take(t, chunk) for t in c))  # type: ignore[arg-type]
            whole = (result.log_probs, result.row_max, result.log_sum)
            rest = (None if t is None else take(t, chunk) for t in result[-3:])
            of_chunk = StatsResult._make([*(take(t, chunk) for t in whole), None, None, None, None, *rest])
            here = _part(chunks, chunk, request, targets)
            of_rest = None if grad_rest is None else take(grad_rest, chunk)
            _write_gradient(logits[None], here, part, of_rest, of_chunk, plan, logits[None])
            chunks.add_gradients(chunk, h, targets, logits, take(size, chunk))
        return chunks.gradients(loss_scale)


def _request(inputs: RowInputs, plan: Plan) -> StatsRequest:
    """Make the request for the statistics that the plan asks for, from flattened inputs."""
    o = plan.options
    return StatsRequest(
        inputs.ids, inputs.targets, inputs.mix_a, inputs.mix_b, o.transform, o.entropy, o.with_correct, any(plan.needs),
        lse=plan.keeps_normalizer,
    )  # fmt: skip


def _coefficients(
    primitives: StatsPrimitives, request: StatsRequest, result: StatsResult, upstream: Upstream
) -> tuple[Coefficients, Tensor, Tensor]:
    """Combine the upstream gradients of each row; the backends do so for all outputs except ``rest``."""
    combine = primitives.coefficients if upstream.rest is None else coefficients
    return combine(request, result, upstream)


def _over(c: Coefficients, grad_rest: Tensor | None, size: Tensor) -> tuple[Coefficients, Tensor | None]:
    """Divide all terms of a row by its entry of ``size``, if it is not 0."""
    size = torch.where(size == 0, 1.0, size)
    return c.over(size), None if grad_rest is None else grad_rest / size


def _part(chunks: Chunks, chunk: slice, request: StatsRequest, targets: Tensor) -> StatsRequest:
    a, b = (None if t is None else chunks.rows.take(t, chunk) for t in (request.a, request.b))
    return request._replace(ids=chunks.rows.take(request.ids, chunk), targets=targets, a=a, b=b)


def _empty(chunks: Chunks, request: StatsRequest, dtype: torch.dtype, *, rest: bool) -> list[Tensor | None]:
    """Allocate the fields of :class:`StatsResult`, for the chunks to fill."""
    rows, device, mix = chunks.rows, chunks.logits.device, request.a is not None
    requested = (True, True, request.entropy, mix, mix and request.gradients, rest, rest, rest)
    *floats, log_rest, rest_max, rest_sum = [rows.empty(dtype=dtype, device=device) if w else None for w in requested]
    correct = rows.empty(dtype=torch.bool, device=device) if request.correct else None
    log_probs = rows.empty(request.ids.shape[1], dtype=dtype, device=device)
    return [log_probs, *floats, correct, log_rest, rest_max, rest_sum]


_LOG_PROBS = _op.Output(
    "log_probs", lambda inputs, plan: (tuple(inputs.ids.shape), plan.accum_dtype), differentiable=True, like_ids=True
)
_LSE = _op.Output("lse", _op.per_row(lambda plan: plan.options.with_lse), differentiable=True)
_ENTROPY = _op.Output("entropy", _op.per_row(lambda plan: plan.options.entropy), differentiable=True)
_CORRECT = _op.Output("correct", _op.per_row(lambda plan: plan.options.with_correct, dtype=torch.bool))
_REST = _op.Output("rest", _op.per_row(lambda plan: plan.options.rest), differentiable=True)
_PARTS_OF_REST = ("rest", "rest_max", "rest_sum")
_INPUTS = ("x", "weight", "bias", "extra_x", "extra_weight", "ids", "targets", "mix_a", "mix_b")


def _row_stats(*, rest: Tensor | None = None, **others: Any) -> RowStats | RestStats:
    if rest is None:
        return RowStats(**others)
    return RestStats(others["log_probs"], others["lse"], rest, others["correct"])


ROW_STATS = _op.RowOp(
    name="row_stats",
    rows=row_ids,
    outputs=(
        _LOG_PROBS, _LSE, _ENTROPY,
        _op.Output("mix", _op.per_row(lambda plan: plan.with_mix), differentiable=True),
        _REST, _CORRECT, *STATS_OUTPUTS,
        _op.Output("mix_weight", _op.per_row(lambda plan: plan.with_mix and any(plan.needs)), public=False),
        *(_REST._replace(name=name, differentiable=False, public=False) for name in _PARTS_OF_REST[1:]),
    ),
    forward=_forward,
    saved=lambda _: (_INPUTS, ("log_probs", "row_max", "log_sum", "entropy", "mix_weight", *_PARTS_OF_REST)),
    backward=_backward,
    result=_row_stats,
    instead=("torch.log_softmax and what follows from it", f"torch.log_softmax of {_op.LOGITS}"),
)  # fmt: skip


class Objective(NamedTuple):
    """``fn(stats, *aux) -> [R]`` of R rows.

    Attributes:
        fn: the caller's function.
        several: True if the caller's ids have one dimension more than the rows.
    """

    fn: Callable[..., Tensor]
    several: bool

    def of(self, result: StatsResult, targets: Tensor, aux: Sequence[Tensor], needed: bool) -> tuple[Tensor, Upstream]:
        """Return (value per row, gradients of the sum of values with respect to the statistics).

        The value of an inactive row is 0. The gradient of a statistic that ``fn`` does not use is None.
        """
        given = (result.log_probs, result.row_max + result.log_sum, result.entropy, result.rest)
        leaves: list[Any] = [None if t is None else t.detach().clone().requires_grad_(needed) for t in given]
        log_probs, lse, entropy, rest = leaves
        # Enabled outside of autograd too, so that a tensor that fn closes over shows that it requires a gradient.
        with own_graph(), torch.set_grad_enabled(needed or torch.is_grad_enabled()):
            log_probs = log_probs if self.several else log_probs.squeeze(1)
            stats = _row_stats(
                log_probs=log_probs, lse=lse, entropy=entropy, mix=None, rest=rest, correct=result.correct
            )
            value = torch.where(targets != IGNORE, checked_value(self.fn(stats, *aux), lse), 0.0)
            *upstream, of_rest = _gradients(value.sum(), leaves)
        return value.detach(), Upstream._make([*upstream, None, of_rest])


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
    return [None if t is None else next(grads) for t in leaves]


def checked_value(value: Any, lse: Tensor) -> Tensor:
    """Validate the value that ``fn`` returned for R rows; cast it to the dtype of their logsumexp ``lse [R]``."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = f"dtype {value.dtype}" if isinstance(value, Tensor) else type_name(value)
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


def _objective_forward(inputs: RowInputs, plan: Plan) -> _op.Outputs:
    """Compute the loss, the value and the statistics per row, and the gradients that the plan needs.

    Each chunk of logits is computed once, then its statistics, their objective, and the gradient, which overwrites the
    logits. With loss scaling, backward multiplies each row's gradient by ``row_size``, and the head's by
    ``loss_scale``.
    """
    with no_autocast(inputs):
        request, chunks = _request(inputs, plan), Chunks(inputs, plan, plan.needs)
        rows, out = chunks.rows, _empty(chunks, request, plan.accum_dtype, rest=plan.options.rest)
        device, needed = chunks.logits.device, any(plan.needs)
        value, sizes, loss_scale = rows.empty(dtype=plan.accum_dtype, device=device), None, None
        if scales_loss(plan):
            sizes = rows.empty(dtype=plan.accum_dtype, device=device)
            loss_scale = torch.full((), torch.finfo(torch.float32).tiny, dtype=plan.accum_dtype, device=device)
        for chunk, h, targets, logits in chunks:
            here = _part(chunks, chunk, request, targets)
            result = _statistics(logits[None], here, plan)
            aux = [rows.take(t, chunk) for t in inputs.aux]
            part, upstream = plan.objective.of(result, targets, aux, needed)
            rows.put_each([value, *out], chunk, [part, *result])
            if needed:
                c, size, with_gradient = _coefficients(chunks.primitives.stats, here, result, upstream)
                factors, grad_rest = None, upstream.rest
                if sizes is not None and loss_scale is not None:
                    rows.put(sizes, chunk, size)
                    c, grad_rest = _over(c, grad_rest, size)
                    loss_scale, factor = chunks.raise_loss_scale(loss_scale, size)
                    factors = Factors(None, factor)
                here = here._replace(targets=with_gradient)
                _write_gradient(logits[None], here, c, grad_rest, result, plan, logits[None])
                chunks.add_gradients(chunk, h, here.targets, logits, size, factors)
        value, row_size, *whole = rows.finished([value, sizes, *out])
        stats = StatsResult(*whole)
        grads = chunks.gradients(wide=loss_scale is not None) if needed else Gradients()
        of_call = {"loss": value.sum(), "value": value, "loss_scale": loss_scale, "row_size": row_size}
        return {**stats._asdict(), "lse": stats.row_max + stats.log_sum, **of_call, **_op.as_outputs(grads)}


def _row_objective(*, rest: Tensor | None = None, **others: Any) -> RowObjective | RestObjective:
    if rest is None:
        return RowObjective(**others)
    of_others = [others[name] for name in ("loss", "value", "log_probs", "lse")]
    return RestObjective._make([*of_others, rest, others["correct"]])


ROW_OBJECTIVE = _op.RowOp(
    name="linear_row_objective",
    rows=row_ids,
    outputs=(
        _op.Output("loss", _op.scalar(), differentiable=True),
        _op.Output("value", _op.per_row()),
        *(out._replace(differentiable=False) for out in (_LOG_PROBS, _LSE, _ENTROPY, _REST, _CORRECT)),
        *_op.gradient_outputs(lambda _: True, scaled=scales_loss),
        *SCALES,
    ),
    forward=_objective_forward,
    saved=lambda _: ((), (*_op.GRADS, "loss_scale", "row_size")),
    backward=scale_in_place,
    result=_row_objective,
    instead=("", f"torch.log_softmax of {_op.LOGITS}"),
    before_backward=partial(_op.SingleUseBackward, "linear_row_objective", "linear_row_stats"),
)
