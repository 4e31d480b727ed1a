"""The ops as torch.compile sees them: opaque and functional, so that a compiled step has no graph break.

The whole chunk loop is one op each way. What an op returns is all it writes, and a tensor: an empty one stands for None.
The plan travels packed, as integers and floats, and a tensor of those that change. Loaded only while a graph is traced,
since registering costs import time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dllm_kernels.ops import _chunks, _stats
from dllm_kernels.ops._plan import LinearJob, LinearStatsJob, Needs, Plan
from dllm_kernels.ops._rows import as_blv
from dllm_kernels.ops._stats_rows import Ask, Found, Upstream

Tensors = tuple[Tensor, ...]
Three = tuple[Tensor, Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]
Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Eight = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Nine = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def token_nll(logits: Tensor, targets: Tensor, plan: Plan) -> Tensors:
    """As ``_eager.token_nll``."""
    out: Four = _token_nll(logits, targets, *plan.pack())
    return out


def weighted_linear_nll(job: LinearJob, plan: Plan) -> Tensors:
    """As ``_eager.weighted_linear_nll``."""
    out: Nine = _weighted_linear_nll(*job[:5], *plan.pack())
    return out[:5]


def linear_token_nll(job: LinearJob, plan: Plan) -> Tensors:
    """As ``_eager.linear_token_nll``."""
    out: Five = _linear_token_nll(*job[:4], *plan.pack())
    return out[:4]


def row_stats(logits: Tensor, ask: Ask, plan: Plan) -> tuple[Tensor | None, ...]:
    """As ``_eager.row_stats``."""
    return _asked_for(_row_stats(logits, ask.ids, ask.marks, _mix(ask), *plan.pack()), ask)


def linear_row_stats(job: LinearStatsJob, ask: Ask, plan: Plan) -> tuple[Tensor | None, ...]:
    """As ``_eager.linear_row_stats``."""
    return _asked_for(_linear_row_stats(*job[:3], ask.ids, ask.marks, _mix(ask), *plan.pack()), ask)


def _mix(ask: Ask) -> Tensor | None:
    """(a, b) as one tensor ``[2, N]``."""
    return None if ask.a is None or ask.b is None else torch.stack([ask.a, ask.b])


def _ask_of(plan: Plan, ids: Tensor, marks: Tensor, mix: Tensor | None) -> Ask:
    return _stats.ask_of(plan, ids, marks, *((None, None) if mix is None else mix.unbind()))


def _present(t: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if t is None else t


def _traced(args: tuple[Any, ...]) -> Plan:
    """The plan from an op's arguments where they may be no real tensors: without the factors that change."""
    return Plan.unpack(*args[-3:-1])


def _fake_rows(targets: Tensor, plan: Plan) -> list[Tensor]:
    """(nll, row_max, log_sum, correct)."""
    dtypes = (plan.acc, plan.acc, plan.acc, torch.bool)
    return [targets.new_empty(targets.shape[0], dtype=dtype) for dtype in dtypes]


def _fake_gradients(job: LinearJob, plan: Plan, head: torch.dtype | None = None) -> list[Tensor]:
    """Contiguous, whatever the strides of the inputs; those of the head in the dtype ``head``, or its own."""
    wanted = zip(job[:3], plan.needs, (None, head, head), strict=True)
    return [
        t.new_empty(t.shape, dtype=dtype) if need and t is not None else job.hidden.new_empty(0)
        for t, need, dtype in wanted
    ]


@torch.library.custom_op("dllm_kernels::token_nll", mutates_args=())
def _token_nll(
    logits: Tensor, targets: Tensor, packed: list[int], factors: list[float], changing: Tensor | None
) -> Four:
    plan = Plan.unpack(packed, factors, changing)
    nll, row_max, log_sum, _, correct = plan.primitives().row_stats(
        as_blv(logits), targets, with_correct=plan.with_correct, transform=plan.transform
    )
    return nll, row_max, log_sum, _present(correct, nll).to(torch.bool)


@_token_nll.register_fake
def _(logits: Tensor, targets: Tensor, *packed: Any) -> Tensors:
    *rows, correct = _fake_rows(targets, plan := _traced(packed))
    return (*rows, correct if plan.with_correct else correct.new_empty(0))


@torch.library.custom_op("dllm_kernels::token_nll_backward", mutates_args=())
def _token_nll_backward(
    logits: Tensor,
    targets: Tensor,
    grad_nll: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    packed: list[int],
    factors: list[float],
    changing: Tensor | None,
) -> Tensor:
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    plan = Plan.unpack(packed, factors, changing)
    plan.primitives().row_grad(
        as_blv(logits), targets, grad_nll.contiguous(), row_max, log_sum, as_blv(grad), transform=plan.transform
    )
    return grad


@_token_nll_backward.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _token_nll_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    *saved, packed, factors, changing = inputs
    ctx.packed = packed, factors
    _, row_max, log_sum, correct = output
    ctx.save_for_backward(*saved, row_max, log_sum, changing)
    ctx.mark_non_differentiable(row_max, log_sum, correct)


def _token_nll_grad(ctx: Any, grad_nll: Tensor, *_: Any) -> tuple[Any, ...]:
    logits, targets, row_max, log_sum, changing = ctx.saved_tensors
    grad = _token_nll_backward(logits, targets, grad_nll, row_max, log_sum, *ctx.packed, changing)
    return grad, *(None,) * 4


_token_nll.register_autograd(_token_nll_grad, setup_context=_token_nll_setup)


@torch.library.custom_op("dllm_kernels::weighted_linear_nll", mutates_args=())
def _weighted_linear_nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor,
    packed: list[int],
    factors: list[float],
    changing: Tensor | None,
) -> Nine:
    job = LinearJob(hidden, weight, bias, targets, weights)
    out = _chunks.weighted_forward(job, Plan.unpack(packed, factors, changing))
    *grads, headroom = out.gradients
    made = (*(_present(g, hidden) for g in grads), _present(headroom, out.loss))
    return (out.loss, *(t.clone() for t in out.rows), *made)  # type: ignore[return-value]


@_weighted_linear_nll.register_fake
def _(*args: Any) -> Tensors:
    job, plan = LinearJob(*args[:-3]), _traced(args)
    loss = job.hidden.new_empty((), dtype=plan.acc)
    makes_headroom = plan.narrow and any(plan.needs)
    grads = _fake_gradients(job, plan, plan.acc if makes_headroom else None)
    return (loss, *_fake_rows(job.targets, plan), *grads, loss.new_empty(() if makes_headroom else 0))


def _weighted_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    ctx.needs = _traced(inputs).needs
    ctx.dtypes = tuple(None if t is None else t.dtype for t in inputs[:3])
    ctx.save_for_backward(*output[5:], inputs[4])
    ctx.mark_non_differentiable(*output[1:])


def _weighted_grad(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Any, ...]:
    *grads, headroom, weights = ctx.saved_tensors
    head = grad_loss * headroom if headroom.dim() == 0 else grad_loss
    of_hidden = (weights * grad_loss).unsqueeze(1) if headroom.dim() == 0 else grad_loss
    # widened first: a float16 gradient times a 0-d factor would round the factor to float16
    scaled = [
        (grad.to(factor.dtype) * factor).to(dtype) if need else None
        for grad, factor, need, dtype in zip(grads, (of_hidden, head, head), ctx.needs, ctx.dtypes, strict=True)
    ]
    return *scaled, *(None,) * 5


_weighted_linear_nll.register_autograd(_weighted_grad, setup_context=_weighted_setup)


@torch.library.custom_op("dllm_kernels::linear_token_nll", mutates_args=())
def _linear_token_nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    packed: list[int],
    factors: list[float],
    changing: Tensor | None,
) -> Five:
    rows, unit_grad = _chunks.token_forward(
        LinearJob(hidden, weight, bias, targets), Plan.unpack(packed, factors, changing)
    )
    return (*(t.clone() for t in rows), _present(unit_grad, hidden))  # type: ignore[return-value]


@_linear_token_nll.register_fake
def _(*args: Any) -> Tensors:
    job, plan = LinearJob(*args[:-3]), _traced(args)
    unit_grad, *_ = _fake_gradients(job, replace(plan, needs=Needs(plan.needs.frozen)))
    return (*_fake_rows(job.targets, plan), unit_grad)


@torch.library.custom_op("dllm_kernels::linear_token_nll_backward", mutates_args=())
def _linear_token_nll_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    stats: list[Tensor],
    packed: list[int],
    factors: list[float],
    changing: Tensor | None,
) -> Three:
    row_max, log_sum, grad_nll = stats
    job, plan = LinearJob(hidden, weight, bias, targets), Plan.unpack(packed, factors, changing)
    grads = _chunks.token_backward(job, plan, (row_max, log_sum), grad_nll)
    return tuple(_present(g, hidden) for g in grads)  # type: ignore[return-value]


@_linear_token_nll_backward.register_fake
def _(*args: Any) -> Tensors:
    return tuple(_fake_gradients(LinearJob(*args[:4]), _traced(args)))


def _linear_token_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    *job, packed, factors, changing = inputs
    ctx.packed = packed, factors
    _, row_max, log_sum, _, unit_grad = output
    ctx.frozen = _traced(inputs).needs.frozen
    ctx.save_for_backward(*((unit_grad,) if ctx.frozen else (*job, row_max, log_sum, changing)))
    ctx.mark_non_differentiable(*output[1:])


def _linear_token_grad(ctx: Any, grad_nll: Tensor, *_: Any) -> tuple[Any, ...]:
    if ctx.frozen:
        return _chunks.scale_rows(ctx.saved_tensors[0], grad_nll), *(None,) * 6
    *job, row_max, log_sum, changing = ctx.saved_tensors
    grads = _linear_token_nll_backward(*job, [row_max, log_sum, grad_nll], *ctx.packed, changing)
    wanted = (g if need else None for g, need in zip(grads, Plan.unpack(*ctx.packed).needs, strict=True))
    return *wanted, *(None,) * 4


_linear_token_nll.register_autograd(_linear_token_grad, setup_context=_linear_token_setup)


def _asked_for(out: Tensors, ask: Ask) -> tuple[Tensor | None, ...]:
    """The five results that the caller sees."""
    wanted = (True, True, ask.entropy, ask.a is not None, ask.correct)
    return tuple(t if w else None for t, w in zip(out, wanted, strict=False))


def _stats_out(found: Found) -> Eight:
    """Those five, and what else backward needs: (row_max, log_sum, mix_weight)."""
    lse = found.row_max + found.log_sum
    entropy, mix, weight = (_present(t, lse) for t in (found.entropy, found.mix, found.mix_weight))
    correct = _present(found.correct, lse).to(torch.bool)
    return found.log_probs, lse, entropy, mix, correct, found.row_max, found.log_sum, weight


def _fake_stats(ids: Tensor, mix: bool, plan: Plan) -> Tensors:
    N = ids.shape[0]
    wanted = (True, plan.with_entropy, mix, plan.with_correct, True, True, mix and any(plan.needs))
    rows = [ids.new_empty(N if w else 0, dtype=torch.bool if i == 3 else plan.acc) for i, w in enumerate(wanted)]
    return (ids.new_empty(ids.shape, dtype=plan.acc), *rows)


def _save_stats(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    *saved, packed, factors, changing = inputs
    ctx.packed = packed, factors
    ctx.save_for_backward(*saved, changing, *output)
    ctx.mark_non_differentiable(*output[4:])


def _stats_and_upstream(saved: list[Tensor], grads: tuple[Tensor, ...], mix: bool, plan: Plan) -> list[Tensor | None]:
    """What a backward op takes: log_probs, row_max, log_sum, entropy, mix_weight, and the gradients of four outputs."""
    log_probs, _, entropy, _, _, row_max, log_sum, weight = saved
    g_log_probs, g_lse, g_entropy, g_mix, *_ = grads
    with_entropy = plan.with_entropy
    return [
        log_probs, row_max, log_sum, entropy if with_entropy else None, weight if mix else None,
        g_log_probs, g_lse, g_entropy if with_entropy else None, g_mix if mix else None,
    ]  # fmt: skip


def _unpacked(stats: list[Tensor | None]) -> tuple[Found, Upstream]:
    log_probs, row_max, log_sum, entropy, weight, *up = stats
    found = Found(log_probs, row_max, log_sum, entropy, mix_weight=weight)  # type: ignore[arg-type]
    return found, Upstream(*(None if g is None else g.contiguous() for g in up))


@torch.library.custom_op("dllm_kernels::row_stats", mutates_args=())
def _row_stats(
    logits: Tensor,
    ids: Tensor,
    marks: Tensor,
    mix: Tensor | None,
    packed: list[int],
    factors: list[float],
    changing: Tensor | None,
) -> Eight:
    plan = Plan.unpack(packed, factors, changing)
    return _stats_out(_stats.forward(logits, _ask_of(plan, ids, marks, mix), plan))


@_row_stats.register_fake
def _(*args: Any) -> Tensors:
    return _fake_stats(args[1], args[3] is not None, _traced(args))


@torch.library.custom_op("dllm_kernels::row_stats_backward", mutates_args=())
def _row_stats_backward(
    logits: Tensor, ids: Tensor, marks: Tensor, mix: Tensor | None, stats: list[Tensor | None],
    packed: list[int], factors: list[float], changing: Tensor | None,
) -> Tensor:  # fmt: skip
    plan = Plan.unpack(packed, factors, changing)
    return _stats.backward(logits, _ask_of(plan, ids, marks, mix), *_unpacked(stats), plan)


@_row_stats_backward.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _row_stats_grad(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    logits, ids, marks, mix, changing, *out = ctx.saved_tensors
    stats = _stats_and_upstream(out, grads, mix is not None, Plan.unpack(*ctx.packed))
    return _row_stats_backward(logits, ids, marks, mix, stats, *ctx.packed, changing), *(None,) * 6


_row_stats.register_autograd(_row_stats_grad, setup_context=_save_stats)


@torch.library.custom_op("dllm_kernels::linear_row_stats", mutates_args=())
def _linear_row_stats(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, marks: Tensor, mix: Tensor | None,
    packed: list[int], factors: list[float], changing: Tensor | None,
) -> Eight:  # fmt: skip
    plan = Plan.unpack(packed, factors, changing)
    ask = _ask_of(plan, ids, marks, mix)
    return _stats_out(_stats.linear_forward(LinearStatsJob(hidden, weight, bias, ids), ask, plan))


@_linear_row_stats.register_fake
def _(*args: Any) -> Tensors:
    return _fake_stats(args[3], args[5] is not None, _traced(args))


@torch.library.custom_op("dllm_kernels::linear_row_stats_backward", mutates_args=())
def _linear_row_stats_backward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, marks: Tensor,
    mix_and_stats: list[Tensor | None], packed: list[int], factors: list[float], changing: Tensor | None,
) -> Three:  # fmt: skip
    plan = Plan.unpack(packed, factors, changing)
    mix, *stats = mix_and_stats
    ask = _ask_of(plan, ids, marks, mix)
    grads = _stats.linear_backward(LinearStatsJob(hidden, weight, bias, ids), ask, *_unpacked(stats), plan)
    return tuple(_present(g, hidden) for g in grads)  # type: ignore[return-value]


@_linear_row_stats_backward.register_fake
def _(*args: Any) -> Tensors:
    return tuple(_fake_gradients(LinearJob(*args[:4]), _traced(args)))


def _linear_row_stats_grad(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    hidden, weight, bias, ids, marks, mix, changing, *out = ctx.saved_tensors
    plan = Plan.unpack(*ctx.packed)
    stats = _stats_and_upstream(out, grads, mix is not None, plan)
    made = _linear_row_stats_backward(hidden, weight, bias, ids, marks, [mix, *stats], *ctx.packed, changing)
    return *(g if need else None for g, need in zip(made, plan.needs, strict=True)), *(None,) * 6


_linear_row_stats.register_autograd(_linear_row_stats_grad, setup_context=_save_stats)
