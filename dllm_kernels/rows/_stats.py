"""The row statistics over N rows, forward and backward, eager and compiled alike: of logits, or of a head's, chunk by chunk.

A head's logits exist in one buffer that every chunk re-uses, and are made again in backward, in which the gradient is
written over them. Nothing else of a row's length is kept.
"""

from __future__ import annotations

import torch

from dllm_kernels.base._row_stats import Coefficients, StatsRequest, StatsResult, Upstream
from dllm_kernels.base._rows import SKIP, as_blv
from dllm_kernels.rows._chunks import Chunks, Factors, no_autocast, unit_scale
from dllm_kernels.rows._plan import NO_GRADIENTS, Gradients, Job, Plan


def forward(job: Job, plan: Plan) -> StatsResult:
    """Of rows of logits ``[..., V]``."""
    return StatsResult(*plan.primitives().stats.forward(as_blv(job.x), _request(job, plan)))


def backward(job: Job, found: StatsResult, upstream: Upstream, plan: Plan) -> Gradients:
    """The gradient of the logits, contiguous, in their dtype."""
    logits, request = job.x, _request(job, plan)
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    c = Coefficients.of(upstream, request, found)
    request = _with_gradient(request, c.size(upstream))
    plan.primitives().stats.backward(as_blv(logits), request, c, found.row_max, found.log_sum, as_blv(grad))
    return Gradients(grad)


def linear_forward(job: Job, plan: Plan) -> StatsResult:
    """Of rows of hidden states: one product a chunk."""
    with no_autocast(job):
        request, chunks = _request(job, plan), Chunks(job, plan, NO_GRADIENTS)
        rows, out = chunks.rows, _empty(chunks, request, plan.acc)
        for chunk, _, active, logits in chunks:
            part = chunks.primitives.stats.forward(logits[None], _part(chunks, chunk, request, active))
            rows.put_each(out, chunk, part)
        found = StatsResult(*rows.finished(out))
        return found if found.log_probs is out[0] else found._replace(log_probs=found.log_probs.clone())


def linear_backward(job: Job, found: StatsResult, upstream: Upstream, plan: Plan) -> Gradients:
    """The gradients of what makes the logits: these once more, then a product for each input that wants one."""
    with no_autocast(job):
        request = _request(job, plan)
        c = Coefficients.of(upstream, request, found)
        size = c.size(upstream)
        request = _with_gradient(request, size)
        if plan.narrow:
            c = c.over(torch.where(size == 0, 1.0, size))
        size, factors, headroom = unit_scale(size, plan)
        chunks = Chunks(job._replace(active=request.active), plan, plan.needs, factors)
        take = chunks.rows.take
        for chunk, h, active, logits in chunks:
            part = Coefficients(*(None if t is None else take(t, chunk) for t in c))  # type: ignore[arg-type]
            row_max, log_sum = take(found.row_max, chunk), take(found.log_sum, chunk)
            here = _part(chunks, chunk, request, active)
            chunks.primitives.stats.backward(logits[None], here, part, row_max, log_sum, logits[None])
            chunks.add_gradients(chunk, h, active, logits, take(size, chunk))
        return chunks.gradients(headroom)


def objective_forward(job: Job, plan: Plan) -> tuple[torch.Tensor | None, ...]:
    """(loss, value, log_probs, lse, entropy, correct), the gradients that the plan needs, a headroom and sizes or None.

    The statistics of a chunk, the objective of them, and the gradient over its logits, which are made once. Where the plan is
    ``narrow``, the gradients are those of ``_chunks.weighted_forward``: the sizes stand in the place of the weights.
    """
    with no_autocast(job):
        request, chunks = _request(job, plan), Chunks(job, plan, plan.needs)
        rows, out = chunks.rows, _empty(chunks, request, plan.acc)
        device, needed = chunks.logits.device, any(plan.needs)
        value, sizes, headroom = rows.empty(dtype=plan.acc, device=device), None, None
        if plan.narrow and needed:
            sizes = rows.empty(dtype=plan.acc, device=device)
            headroom = torch.full((), torch.finfo(torch.float32).tiny, dtype=plan.acc, device=device)
        for chunk, h, active, logits in chunks:
            here = _part(chunks, chunk, request, active)
            found = StatsResult(*chunks.primitives.stats.forward(logits[None], here))
            objective = plan.objective.map(lambda t, chunk=chunk: rows.take(t, chunk))
            part, upstream = objective.of(found, active, needed)
            rows.put_each([value, *out], chunk, [part, *found])
            if needed:
                c = Coefficients.of(upstream, here, found)
                size = c.size(upstream).masked_fill(active == SKIP, 0)
                factors = None
                if sizes is not None and headroom is not None:
                    rows.put(sizes, chunk, size)
                    c = c.over(torch.where(size == 0, 1.0, size))
                    headroom, factor = chunks.raised(headroom, size)
                    factors = Factors(None, factor)
                here = _with_gradient(here, size)
                chunks.primitives.stats.backward(logits[None], here, c, found.row_max, found.log_sum, logits[None])
                chunks.add_gradients(chunk, h, here.active, logits, size, factors)
        value, log_probs, row_max, log_sum, entropy, _, _, correct = rows.finished([value, *out])
        loss, lse = value.sum(), row_max + log_sum
        grads = chunks.gradients(wide=headroom is not None) if needed else Gradients()
        return (
            loss,
            value,
            log_probs,
            lse,
            entropy,
            correct,
            *grads,
            headroom,
            None if sizes is None else rows.whole(sizes),
        )


def _request(job: Job, plan: Plan) -> StatsRequest:
    """What the plan asks of rows that are flattened already."""
    o = plan.options
    assert job.active is not None
    return StatsRequest(
        job.ids,
        job.active,
        job.a,
        job.b,
        o.transform,
        o.entropy,
        o.with_correct,
        any(plan.needs),
        lse=plan.keeps_lse(job),
    )


def _with_gradient(request: StatsRequest, size: torch.Tensor) -> StatsRequest:
    """Rows without a gradient switched off: theirs is 0 whatever they hold."""
    return request._replace(active=request.active.masked_fill(size == 0, SKIP))


def _part(chunks: Chunks, chunk: slice, request: StatsRequest, active: torch.Tensor) -> StatsRequest:
    a, b = (None if t is None else chunks.rows.take(t, chunk) for t in (request.a, request.b))
    return request._replace(ids=chunks.rows.take(request.ids, chunk), active=active, a=a, b=b)


def _empty(chunks: Chunks, request: StatsRequest, acc: torch.dtype) -> list[torch.Tensor | None]:
    """The fields of :class:`StatsResult`, for the chunks to fill."""
    rows, device, mix = chunks.rows, chunks.logits.device, request.a is not None
    wanted = (True, True, request.entropy, mix, mix and request.gradients)
    made = [rows.empty(dtype=acc, device=device) if w else None for w in wanted]
    correct = rows.empty(dtype=torch.bool, device=device) if request.correct else None
    return [rows.empty(request.ids.shape[1], dtype=acc, device=device), *made, correct]
