"""NLL ops: per row or as a weighted sum, from logits or from hidden states and the LM head."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from dllm_kernels._backends._rows import IGNORE, as_blv
from dllm_kernels._core import _op
from dllm_kernels._core._inputs import NO_GRADIENTS, Gradients, RowInputs
from dllm_kernels._core._old_chunks import NO_FACTORS, Chunks, no_autocast, unit_scale
from dllm_kernels._core._plan import Plan
from dllm_kernels._core._results import TokenNLL, WeightedNLL

Tensor = torch.Tensor
CROSS_ENTROPY = ("torch.nn.functional.cross_entropy", f"torch.nn.functional.cross_entropy on {_op.LOGITS}")
STATS: _op.Names = ("row_max", "log_sum")

_NLL_OUTPUTS = (
    _op.Output("nll", _op.per_row(), differentiable=True),
    _op.Output("lse", _op.per_row(lambda plan: plan.options.with_lse)),
    _op.Output("correct", _op.per_row(lambda plan: plan.options.with_correct, dtype=torch.bool)),
)
STATS_OUTPUTS = tuple(_op.Output(name, _op.per_row(lambda plan: plan.keeps_normalizer), public=False) for name in STATS)


def row_targets(inputs: RowInputs, plan: Plan) -> tuple[Tensor, Tensor]:
    """Flatten targets to ``[N, 1]`` and ``[N]``, with ``IGNORE`` in inactive rows."""
    y = inputs.ids.detach().reshape(-1).to(torch.int64)
    inactive = None if inputs.active is None else inputs.active.detach().reshape(-1) == 0
    if plan.options.ignore_index != IGNORE:
        ignored = y == plan.options.ignore_index
        y = y.masked_fill(y == IGNORE, -1)  # -100 is an out-of-range target like any other here
        inactive = ignored if inactive is None else inactive | ignored
    if plan.options.transform.skip_id is not None:
        y = y.masked_fill(y == plan.options.transform.skip_id, -1)
    y = y.contiguous() if inactive is None else y.masked_fill(inactive, IGNORE)
    return y.unsqueeze(1), y


def weighted_targets(inputs: RowInputs, plan: Plan) -> tuple[Tensor, Tensor]:
    """Flatten targets like :func:`row_targets`; rows of weight 0 are inactive too, unless ``active`` is given."""
    return row_targets(inputs if inputs.active is not None else inputs._replace(active=inputs.weights), plan)


def rounded(nll: Tensor, plan: Plan) -> Tensor:
    """Round the NLL to the dtype of the logits, if requested, like a cross-entropy computed in that dtype."""
    return nll.to(plan.logits_dtype).to(nll.dtype) if plan.options.round_nll else nll


def weighted_sum(nll: Tensor, weights: Tensor, plan: Plan) -> Tensor:
    """Sum weights * nll. If rows of weight 0 are active, their NaN are masked out."""
    product = nll * weights
    return (product.masked_fill_(weights == 0, 0.0) if plan.mask_zero_weight else product).sum()


def _named(plan: Plan, nll: Any, row_max: Any, log_sum: Any, correct: Any) -> _op.Outputs:
    """Name the per-row outputs that all four ops share."""
    lse = row_max + log_sum if plan.options.with_lse else None
    return {"nll": nll, "lse": lse, "correct": correct, "row_max": row_max, "log_sum": log_sum}


def _nll_forward(inputs: RowInputs, plan: Plan) -> _op.Outputs:
    return _named(plan, *plan.primitives().nll(as_blv(inputs.x), inputs.targets, **plan.nll_options))


def _logits_gradient(
    inputs: RowInputs, outputs: _op.Outputs, plan: Plan, scale: Tensor | None, factor: Tensor | None
) -> Gradients:
    """Compute the gradient of the logits from the saved (row_max, log_sum)."""
    logits, inplace = inputs.x, plan.options.inplace_backward
    grad = logits.detach() if inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    plan.primitives().nll_grad(
        as_blv(logits), inputs.targets, scale, *(outputs.get(name) for name in STATS), as_blv(grad), factor=factor,
        transform=plan.options.transform,
    )  # fmt: skip
    if inplace:
        torch.autograd.graph.increment_version(logits)
    return Gradients(grad)


TOKEN_NLL = _op.RowOp(
    name="token_nll",
    rows=row_targets,
    outputs=(*_NLL_OUTPUTS, *STATS_OUTPUTS),
    forward=_nll_forward,
    saved=lambda _: (("x", "targets"), STATS),
    backward=lambda inputs, outputs, upstream, plan: _logits_gradient(inputs, outputs, plan, upstream["nll"], None),
    result=TokenNLL,
    instead=CROSS_ENTROPY,
)


def _weighted_nll_forward(inputs: RowInputs, plan: Plan) -> _op.Outputs:
    """Compute the loss and the per-row results; the primitive multiplies by the weights.

    On a GPU each torch op on ``[N]`` is a kernel launch, so that only the sum is left to torch.
    """
    logits, primitives, options = as_blv(inputs.x), plan.primitives(), plan.nll_options
    results: Any
    if plan.mask_zero_weight:
        results = primitives.nll(logits, inputs.targets, **options)
    else:
        weighted, *results = primitives.weighted_nll(logits, inputs.targets, inputs.weights, **options)
        if not plan.options.round_nll:
            return {"loss": weighted.sum(), **_named(plan, *results)}
    nll = rounded(results[0], plan)
    return {"loss": weighted_sum(nll, inputs.weights, plan), **_named(plan, nll, *results[1:])}


_LOSS = _op.Output("loss", _op.scalar(), differentiable=True)
_WEIGHTED_OUTPUTS = (_LOSS, _NLL_OUTPUTS[0]._replace(differentiable=False), *_NLL_OUTPUTS[1:])

WEIGHTED_NLL = _op.RowOp(
    name="weighted_nll",
    rows=row_targets,
    outputs=(*_WEIGHTED_OUTPUTS, *STATS_OUTPUTS),
    forward=_weighted_nll_forward,
    saved=lambda _: (("x", "targets", "weights"), STATS),
    backward=lambda inputs, outputs, upstream, plan: _logits_gradient(
        inputs, outputs, plan, inputs.weights, upstream["loss"]
    ),
    result=WeightedNLL,
    instead=CROSS_ENTROPY,
)


def scales_loss(plan: Plan) -> bool:
    """Return True if the gradients computed in forward are those of a scaled loss, see :func:`unit_scale`."""
    return plan.needs_loss_scaling and any(plan.needs)


SCALES = (
    _op.Output("loss_scale", _op.scalar(scales_loss), public=False),
    _op.Output("row_size", _op.per_row(scales_loss), public=False),
)


def _weighted_linear_forward(inputs: RowInputs, plan: Plan) -> _op.Outputs:
    """Compute the loss, the per-row results, and the gradients that the plan needs.

    If the plan needs loss scaling, backward multiplies the gradients of the rows by their weights, ``row_size``, and
    those of the head by ``loss_scale``. The gradients of the head are then in the accumulation dtype.
    """
    with no_autocast(inputs):
        needed = any(plan.needs)
        scale, factors, loss_scale = unit_scale(inputs.weights, plan) if needed else (None, NO_FACTORS, None)
        factors = factors._replace(hidden=None)  # applied in backward
        chunks = Chunks(inputs, plan, plan.needs, factors)
        nll, *stats = chunks.run(scale, with_stats=plan.options.with_lse)
        nll = rounded(nll, plan)
        grads = chunks.gradients(wide=loss_scale is not None)
        loss = weighted_sum(nll, inputs.weights, plan)
        row_size = None if loss_scale is None else chunks.rows.checked_(inputs.weights.clone())
        scales = {"loss_scale": loss_scale, "row_size": row_size}
        return {"loss": loss, **_named(plan, nll, *stats), **_op.as_outputs(grads), **scales}


def scale_in_place(inputs: RowInputs, outputs: _op.Outputs, upstream: _op.Outputs, plan: Plan) -> Gradients:
    """Scale the gradients saved by forward in place; this can therefore run only once."""
    if outputs.get("loss_scale") is not None or upstream["loss"].dim():
        return scale_copies(inputs, outputs, upstream, plan)
    grads = _op.gradients_of(outputs)
    for grad in grads:
        if grad is not None:
            plan.primitives().scale_(grad, upstream["loss"])
    return grads


def scale_copies(inputs: RowInputs, outputs: _op.Outputs, upstream: _op.Outputs, _: Plan) -> Gradients:
    """Scale the gradients saved by forward out of place.

    With loss scaling or a loss per row, each row's gradient is also multiplied by its ``row_size``.
    """
    grads, loss_scale, grad_loss = _op.gradients_of(outputs), outputs.get("loss_scale"), upstream["loss"]
    if loss_scale is None and not grad_loss.dim():
        return Gradients(*(None if g is None else _times(g, grad_loss) for g in grads))
    of_rows = outputs["row_size"] * grad_loss
    of_head = grad_loss if loss_scale is None else grad_loss * loss_scale
    head = Gradients(*(None if g is None else _times(g, of_head) for g in grads._replace(x=None, extra_x=None)))
    return head._replace(x=_op.scaled_rows(grads.x, of_rows), extra_x=_op.scaled_rows(grads.extra_x, of_rows))


def _times(grad: Tensor, factor: Tensor) -> Tensor:
    """Multiply in the dtype of the factor, because float16 times a 0-d factor would round the factor to float16."""
    return (grad.to(factor.dtype) * factor).to(grad.dtype)


WEIGHTED_LINEAR_NLL = _op.RowOp(
    name="weighted_linear_nll",
    rows=weighted_targets,
    outputs=(
        *_WEIGHTED_OUTPUTS, *_op.gradient_outputs(lambda _: True, scaled=scales_loss),
        *SCALES,
    ),
    forward=_weighted_linear_forward,
    saved=lambda _: ((), (*_op.GRADS, "loss_scale", "row_size")),
    backward=scale_in_place,
    result=WeightedNLL,
    instead=CROSS_ENTROPY,
    inline_backward=lambda _: scale_copies,
    before_backward=partial(_op.SingleUseBackward, "weighted_linear_nll", "linear_token_nll"),
)  # fmt: skip


def _linear_keeps_stats(plan: Plan) -> bool:
    """Return True if (row_max, log_sum) are read: by the logsumexp, or by a backward that recomputes the logits."""
    return plan.options.with_lse or (any(plan.needs) and not plan.needs.frozen_head)


def _linear_forward(inputs: RowInputs, plan: Plan) -> _op.Outputs:
    """Compute the per-row results; with a frozen head also the gradients of the rows for upstream gradients of 1."""
    with no_autocast(inputs):
        frozen = plan.needs.frozen_head
        ones = torch.ones(len(inputs.x), dtype=plan.accum_dtype, device=inputs.x.device) if frozen else None
        chunks = Chunks(inputs, plan, plan.needs if frozen else NO_GRADIENTS)
        results = chunks.run(ones, with_stats=_linear_keeps_stats(plan))
        return {**_named(plan, *results), **_op.as_outputs(chunks.gradients())}


def _linear_backward(inputs: RowInputs, outputs: _op.Outputs, upstream: _op.Outputs, plan: Plan) -> Gradients:
    """Frozen head: multiply the saved gradients of the rows by the upstream ones. Otherwise recompute the logits."""
    if plan.needs.frozen_head:
        x, extra_x = (_op.scaled_rows(outputs.get(name), upstream["nll"]) for name in ("grad_x", "grad_extra_x"))
        return Gradients(x, extra_x=extra_x)
    with no_autocast(inputs):
        scale = upstream["nll"].reshape(-1).to(plan.accum_dtype).contiguous()
        scale, factors, loss_scale = unit_scale(scale, plan)
        chunks = Chunks(inputs, plan, plan.needs, factors)
        for chunk, h, y, logits in chunks:
            s, row_max, log_sum = (chunks.rows.take(t, chunk) for t in (scale, *(outputs[name] for name in STATS)))
            chunks.primitives.nll_grad(
                logits[None], y, s, row_max, log_sum, logits[None], transform=plan.options.transform
            )
            chunks.add_gradients(chunk, h, y, logits, s)
        return chunks.gradients(loss_scale)


LINEAR_TOKEN_NLL = _op.RowOp(
    name="linear_token_nll",
    rows=row_targets,
    outputs=(
        *_NLL_OUTPUTS, *(_op.Output(name, _op.per_row(_linear_keeps_stats), public=False) for name in STATS),
        *_op.gradient_outputs(lambda plan: plan.needs.frozen_head, ("x", "extra_x")),
    ),
    forward=_linear_forward,
    saved=lambda plan: (
        ((), ("grad_x", "grad_extra_x"))
        if plan.needs.frozen_head
        else (("x", "weight", "bias", "extra_x", "extra_weight", "targets"), STATS)
    ),
    backward=_linear_backward,
    result=TokenNLL,
    instead=CROSS_ENTROPY,
    inline_backward=lambda plan: _linear_backward if plan.needs.frozen_head else None,
)  # fmt: skip
