"""The row ops, one record each: forward, backward and shapes over N rows.

Autograd, torch.compile and DTensors are written once over these (``rows/_run.py``, ``rows/_eager.py``, ``rows/_compiled.py``,
``distributed/``): a new op is a new record, and a public function that makes its job and its plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from dllm_kernels.base._row_stats import StatsResult, Upstream
from dllm_kernels.base._rows import SKIP, as_blv
from dllm_kernels.rows import _chunks, _divergence, _soft_embedding, _stats
from dllm_kernels.rows._plan import LEAVES, OF_ROWS, Gradients, Job, Plan
from dllm_kernels.rows._results import Divergence, RowObjective, RowStats, TokenNLL, WeightedNLL, rounded, weighted_sum
from dllm_kernels.rows._teacher import Teacher

Tensor = torch.Tensor
Tensors = tuple[Tensor | None, ...]
Spec = tuple[tuple[int, ...], torch.dtype]
Backward = Callable[[Tensors, Tensors, Plan], Gradients]
LOGITS = "the logits, torch.nn.functional.linear(hidden, weight, bias)"
CROSS_ENTROPY = ("torch.nn.functional.cross_entropy", f"torch.nn.functional.cross_entropy on {LOGITS}")


class RowOp(NamedTuple):
    """What there is to know of a row op.

    Attributes:
        name: by which a compiled op finds the record.
        rows: (job as the caller gave it, plan) -> ids and ``active`` of N rows, as :class:`Job` has them below.
        forward: (job, plan) -> all that the op writes, None for what was not asked for.
        kept: (job, written, plan) -> the tensors that backward reads; the leaves first where it is not ``traced``.
        backward: (kept, upstream gradients, plan) -> gradients of the leaves; those not needed None.
        specs: (job, plan) -> shape and dtype of each tensor that forward writes, None where there is none.
        result: (plan, shape of the ids, shape of the rows, the written tensors that are shown) -> what the caller gets.
        shown: how many of the written tensors, the first ones, the caller gets.
        differentiable: how many of these have a gradient.
        instead: what has a second derivative, from logits and from hidden states.
        traced: plan -> a backward of a few torch operations, which a compiled graph had better see, or None.
        before_backward: (job, plan) -> what an eager backward calls first, or None.
    """

    name: str
    rows: Callable[[Job, Plan], tuple[Tensor, Tensor]]
    forward: Callable[[Job, Plan], Tensors]
    kept: Callable[[Job, Tensors, Plan], Tensors]
    backward: Backward
    specs: Callable[[Job, Plan], tuple[Spec | None, ...]]
    result: Callable[..., Any]
    shown: int
    differentiable: int
    instead: tuple[str, str]
    traced: Callable[[Plan], Backward | None] = lambda _: None
    before_backward: Callable[[Job, Plan], Callable[[], None] | None] | None = None


def row_targets(job: Job, plan: Plan) -> tuple[Tensor, Tensor]:
    """Targets ``[N, 1]`` and ``[N]``, ``SKIP`` in rows that do not count."""
    y = job.ids.detach().reshape(-1).to(torch.int64)
    off = None if job.active is None else job.active.detach().reshape(-1) == 0
    if plan.options.ignore_index != SKIP:
        ignored = y == plan.options.ignore_index
        y = y.masked_fill(y == SKIP, -1)  # a target like any other that no column has
        off = ignored if off is None else off | ignored
    if plan.options.transform.skip_id is not None:
        y = y.masked_fill(y == plan.options.transform.skip_id, -1)
    y = y.contiguous() if off is None else y.masked_fill(off, SKIP)
    return y.unsqueeze(1), y


def weighted_targets(job: Job, plan: Plan) -> tuple[Tensor, Tensor]:
    """As :func:`row_targets`; a row of weight 0 does not count either, unless the caller says which rows do."""
    return row_targets(job if job.active is not None else job._replace(active=job.weights), plan)


def row_ids(job: Job, plan: Plan) -> tuple[Tensor, Tensor]:
    """Ids ``[N, K]``, and ``SKIP`` in rows that are off and 0 in the others, ``[N]``."""
    N = job.x.shape[:-1].numel()
    ids = job.ids.detach().reshape(N, job.ids.shape[-1] if job.ids.dim() == job.x.dim() else 1)
    ids = ids.to(torch.int64).contiguous()
    if plan.options.transform.skip_id is not None:
        ids = ids.masked_fill(ids == plan.options.transform.skip_id, -1)
    zeros = ids.new_zeros(N)
    return ids, zeros if job.active is None else zeros.masked_fill(job.active.detach().reshape(-1) == 0, SKIP)


def _row_specs(job: Job, plan: Plan) -> tuple[Spec | None, ...]:
    """Of (nll, row_max, log_sum, correct)."""
    N = job.ids.shape[0]
    row = ((N,), plan.acc)
    return row, *(row if plan.keeps_lse(job) else None,) * 2, ((N,), torch.bool) if plan.options.with_correct else None


def _nll_result(plan: Plan, ids: torch.Size, _: torch.Size, *rows: Tensor | None) -> TokenNLL:
    nll, row_max, log_sum, correct = rows
    assert nll is not None
    lse = (row_max + log_sum).detach().view(ids) if plan.options.with_lse else None  # type: ignore[operator]
    return TokenNLL(nll.view(ids), lse, None if correct is None else correct.view(ids))


def _nll_forward(job: Job, plan: Plan) -> Tensors:
    return plan.primitives().nll(as_blv(job.x), job.active, **_nll_options(job, plan))


def _nll_options(job: Job, plan: Plan) -> dict[str, Any]:
    asked: dict[str, Any] = {"with_correct": plan.options.with_correct, "transform": plan.options.transform}
    return asked if plan.keeps_lse(job) else {**asked, "with_lse": False}


def _kept_rows(job: Job, written: Tensors, _: Plan) -> Tensors:
    """What the gradient from (row_max, log_sum) needs."""
    return (*job.leaves, job.active, *written[1:3])


def _grad_of_logits(kept: Tensors, scale: Tensor | None, factor: Tensor | None, plan: Plan) -> Gradients:
    logits, targets, stats = kept[0], kept[LEAVES], kept[LEAVES + 1 :]
    assert logits is not None
    inplace = plan.options.inplace_backward
    grad = logits.detach() if inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    plan.primitives().nll_grad(
        as_blv(logits), targets, scale, *stats, as_blv(grad), factor=factor, transform=plan.options.transform
    )
    if inplace:
        torch.autograd.graph.increment_version(logits)
    return Gradients(grad)


TOKEN_NLL = RowOp(
    "token_nll",
    row_targets,
    _nll_forward,
    _kept_rows,
    lambda kept, upstream, plan: _grad_of_logits(kept, upstream[0], None, plan),
    _row_specs,
    _nll_result,
    shown=4,
    differentiable=1,
    instead=CROSS_ENTROPY,
)


def _gradient_specs(job: Job, plan: Plan, head: torch.dtype | None = None) -> list[Spec | None]:
    """Contiguous, whatever the strides of the inputs; those of the head in the dtype ``head``, or its own."""
    wanted = zip(job.leaves, plan.needs, (None, head, head, None, head), strict=True)
    return [(tuple(t.shape), dtype or t.dtype) if need and t is not None else None for t, need, dtype in wanted]


def _weighted_specs(job: Job, plan: Plan) -> tuple[Spec | None, ...]:
    headroom = plan.narrow and any(plan.needs)
    grads = _gradient_specs(job, plan, plan.acc if headroom else None)
    return (((), plan.acc), *_row_specs(job, plan), *grads, ((), plan.acc) if headroom else None)


def _weighted_backward(kept: Tensors, upstream: Tensors, plan: Plan) -> Gradients:
    """What forward has made, scaled: in place, which is why it can be done only once."""
    if kept[LEAVES] is not None or upstream[0] is None:
        return _weighted_traced(kept, upstream, plan)
    for grad in kept[:LEAVES]:
        if grad is not None:
            plan.primitives().scale_(grad, upstream[0])
    return Gradients(*kept[:LEAVES])


def _weighted_traced(kept: Tensors, upstream: Tensors, _: Plan) -> Gradients:
    """The same, but nothing is written over."""
    *grads, headroom, weights = kept
    (grad_loss,) = upstream
    assert grad_loss is not None
    if headroom is None or weights is None:
        return Gradients(*(None if g is None else _times(g, grad_loss) for g in grads))
    of_rows, of_head = weights * grad_loss, grad_loss * headroom
    head = Gradients(*(None if g is None else _times(g, of_head) for g in _of_head(grads)))
    return head._replace(x=_scaled_rows(grads[0], of_rows), extra_x=_scaled_rows(grads[3], of_rows))


def _of_head(leaves: Sequence[Any]) -> Gradients:
    """Without the two of the rows: weight, bias and extra_weight."""
    return Gradients(*leaves)._replace(x=None, extra_x=None)


def _scaled_rows(grad: Tensor | None, factor: Tensor | None) -> Tensor | None:
    """Rows times a factor each, such as their upstream gradient; a row with a factor of 0 gets zeros whatever it holds."""
    if grad is None or factor is None:
        return None
    factor = factor.reshape(-1, 1)
    return torch.where(factor != 0, grad * factor, 0.0).to(grad.dtype)


def _times(grad: Tensor, factor: Tensor) -> Tensor:
    """Widened first: a float16 gradient times a 0-d factor would round the factor to float16."""
    return (grad.to(factor.dtype) * factor).to(grad.dtype)


class _Once:
    """Raises where gradients that were made in the forward pass are asked for twice, or would be lost."""

    def __init__(self, job: Job, plan: Plan) -> None:
        of_objective, of_nll = ("linear_row_objective", "linear_row_stats"), ("weighted_linear_nll", "linear_token_nll")
        self.name, self.instead = of_nll if plan.objective is None else of_objective
        if plan.pair is not None:
            self.name, self.instead = "linear_divergence", 'reduction="none"'
        self.consumed = False
        trained = zip(_of_head(job.leaves), plan.needs, strict=True)
        self.head = [weakref.ref(t) for t, trains in trained if trains and t is not None]

    def __call__(self) -> None:
        if self.consumed:
            raise RuntimeError(
                f"{self.name} made its gradients in the forward pass and gave them away in the first backward; "
                f"call the loss again for a second one, or use {self.instead}"
            )
        self.consumed = True
        _check_still_gathered(self.head)


def _check_still_gathered(head: Iterable[weakref.ref[Tensor]]) -> None:
    """Raise where FSDP2 has freed the gathered head before its gradient came: there the gradient would be lost.

    Backward does not read the head here, so nothing else would notice.
    """
    for parameter in (ref() for ref in head):
        if parameter is not None and parameter.numel() and not parameter.untyped_storage().size():
            raise RuntimeError(
                "weight, bias or extra[1] was freed before its gradient came, which would be lost: under fully_shard with "
                "reshard_after_forward=False, run the loss inside the head's forward (dllm_kernels.distributed.LossHead) "
                "where the head is also called by itself in the same step"
            )


def _weighted_result(plan: Plan, ids: torch.Size, rows: torch.Size, *shown: Tensor | None) -> WeightedNLL:
    loss, nll, *others = shown
    assert loss is not None
    return WeightedNLL(loss, *_nll_result(plan, ids, rows, nll, *others))


def _weighted_nll_forward(job: Job, plan: Plan) -> Tensors:
    """Each operation on ``[N]`` numbers is a launch on a GPU: where the kernels weigh the rows, torch only adds up."""
    assert job.weights is not None
    logits, primitives = as_blv(job.x), plan.primitives()
    asked = _nll_options(job, plan)
    found: tuple[Any, ...]
    if plan.read_beyond:
        found = primitives.nll(logits, job.active, **asked)
    else:
        weighted, *found = primitives.weighted_nll(logits, job.active, job.weights, **asked)  # type: ignore[assignment]
        if not plan.options.round_nll:
            return weighted.sum(), *found
    nll = rounded(found[0], plan)
    return weighted_sum(nll, job.weights, plan), nll, *found[1:]


def _weighted_nll_kept(job: Job, written: Tensors, plan: Plan) -> Tensors:
    return (*_kept_rows(job, written[1:], plan), job.weights)


def _weighted_nll_backward(kept: Tensors, upstream: Tensors, plan: Plan) -> Gradients:
    *rows, weights = kept
    return _grad_of_logits(tuple(rows), weights, upstream[0], plan)


WEIGHTED_NLL = RowOp(
    "weighted_nll",
    row_targets,
    _weighted_nll_forward,
    _weighted_nll_kept,
    _weighted_nll_backward,
    lambda job, plan: (((), plan.acc), *_row_specs(job, plan)),
    _weighted_result,
    shown=5,
    differentiable=1,
    instead=CROSS_ENTROPY,
)

WEIGHTED_LINEAR_NLL = RowOp(
    "weighted_linear_nll",
    weighted_targets,
    _chunks.weighted_forward,
    lambda job, written, _: (*written[5:], job.weights),
    _weighted_backward,
    _weighted_specs,
    _weighted_result,
    shown=5,
    differentiable=1,
    instead=CROSS_ENTROPY,
    traced=lambda _: _weighted_traced,
    before_backward=_Once,
)


def _linear_kept(job: Job, written: Tensors, plan: Plan) -> Tensors:
    return written[4:] if plan.needs.frozen else _kept_rows(job, written, plan)


def _linear_backward(kept: Tensors, upstream: Tensors, plan: Plan) -> Gradients:
    """With a frozen head the rows of what forward made for upstream gradients of 1, times theirs."""
    if plan.needs.frozen:
        x, extra_x = (_scaled_rows(t, upstream[0]) for t in kept)
        return Gradients(x, extra_x=extra_x)
    active, *stats = kept[LEAVES:]
    job = Job.of(kept[:LEAVES], (active, active, None, None, None))
    return _chunks.token_backward(job, plan, stats, upstream[0])  # type: ignore[arg-type]


def _linear_specs(job: Job, plan: Plan) -> tuple[Spec | None, ...]:
    x, _, _, extra_x, _ = _gradient_specs(job, plan) if plan.needs.frozen else [None] * LEAVES
    return (*_row_specs(job, plan), x, extra_x)


LINEAR_TOKEN_NLL = RowOp(
    "linear_token_nll",
    row_targets,
    _chunks.token_forward,
    _linear_kept,
    _linear_backward,
    _linear_specs,
    _nll_result,
    shown=4,
    differentiable=1,
    instead=CROSS_ENTROPY,
    traced=lambda plan: _linear_backward if plan.needs.frozen else None,
)


def _stats_forward(job: Job, plan: Plan) -> Tensors:
    found = (_stats.forward if job.weight is None else _stats.linear_forward)(job, plan)
    lse = found.row_max + found.log_sum if plan.options.with_lse else None
    return (
        found.log_probs, lse, found.entropy, found.mix, found.correct,
        found.row_max, found.log_sum, found.mix_weight,
    )  # fmt: skip


def _stats_kept(job: Job, written: Tensors, plan: Plan) -> Tensors:
    log_probs, _, entropy, _, _, row_max, log_sum, mix_weight = written
    return (*job.leaves, *job.of_rows, log_probs, row_max, log_sum, entropy, mix_weight)


def _stats_backward(kept: Tensors, upstream: Tensors, plan: Plan) -> Gradients:
    n = LEAVES + OF_ROWS
    job = Job.of(kept[:LEAVES], kept[LEAVES:n])
    log_probs, row_max, log_sum, entropy, mix_weight = kept[n:]
    found = StatsResult(log_probs, row_max, log_sum, entropy, mix_weight=mix_weight)  # type: ignore[arg-type]
    backward = _stats.backward if job.weight is None else _stats.linear_backward
    return backward(job, found, Upstream(*upstream), plan)


def _stats_specs(job: Job, plan: Plan) -> tuple[Spec | None, ...]:
    (N, K), acc, mix = job.ids.shape, plan.acc, job.a is not None
    row = ((N,), acc)
    part = row if plan.keeps_lse(job) else None
    return (
        ((N, K), acc), row if plan.options.with_lse else None, row if plan.options.entropy else None, row if mix else None,
        ((N,), torch.bool) if plan.options.with_correct else None, part, part, row if mix and any(plan.needs) else None,
    )  # fmt: skip


def _stats_result(_: Plan, ids: torch.Size, rows: torch.Size, log_probs: Tensor, *others: Tensor | None) -> RowStats:
    lse, entropy, mix, correct = (None if t is None else t.view(rows) for t in others)
    return RowStats(log_probs.view(ids), lse, entropy, mix, correct)  # type: ignore[arg-type]


ROW_STATS = RowOp(
    "row_stats",
    row_ids,
    _stats_forward,
    _stats_kept,
    _stats_backward,
    _stats_specs,
    _stats_result,
    shown=5,
    differentiable=4,
    instead=("torch.log_softmax and what follows from it", f"torch.log_softmax of {LOGITS}"),
)


def _objective_result(plan: Plan, ids: torch.Size, rows: torch.Size, *shown: Tensor | None) -> RowObjective:
    loss, value, log_probs, lse, entropy, correct = shown
    assert loss is not None
    assert log_probs is not None
    others = (None if t is None else t.view(rows) for t in (lse, entropy, correct))
    return RowObjective(loss, value.view(rows), log_probs.view(ids), *others)  # type: ignore[union-attr, arg-type]


ROW_OBJECTIVE = RowOp(
    "linear_row_objective",
    row_ids,
    _stats.objective_forward,
    lambda job, written, _: written[6:],
    _weighted_backward,
    lambda job, plan: (),  # a compiled graph has the statistics and what the caller makes of them
    _objective_result,
    shown=6,
    differentiable=1,
    instead=("", f"torch.log_softmax of {LOGITS}"),
    before_backward=_Once,
)


def _divergence_kept(job: Job, written: Tensors, plan: Plan) -> Tensors:
    assert job.weights is not None
    pair = _divergence.pair_of(plan)
    if _divergence.made_in_forward(plan):
        return written[5:]
    return (*job.leaves, job.ids, job.active, job.weights, written[4], *(pair.teacher or ()))


def _divergence_backward(kept: Tensors, upstream: Tensors, plan: Plan) -> Gradients:
    pair = _divergence.pair_of(plan)
    if _divergence.made_in_forward(plan):
        return _divergence_traced(kept, upstream, plan) if pair.per_row else _weighted_backward(kept, upstream, plan)
    ids, active, weights, mean_alpha, *teacher = kept[LEAVES:]
    plan = plan._replace(pair=pair._replace(teacher=Teacher(*teacher)))  # type: ignore[arg-type]
    job = Job.of(kept[:LEAVES], (ids, active, weights, None, None))
    return _divergence.backward(job, plan, mean_alpha, upstream[0])  # type: ignore[arg-type]


def _divergence_traced(kept: Tensors, upstream: Tensors, plan: Plan) -> Gradients:
    """What forward has made, scaled, and nothing written over."""
    if not _divergence.pair_of(plan).per_row:
        return _weighted_traced(kept, upstream, plan)
    factor = kept[-1] * upstream[0]  # type: ignore[operator]
    return Gradients(x=_scaled_rows(kept[0], factor), extra_x=_scaled_rows(kept[3], factor))


def _once_of_divergence(job: Job, plan: Plan) -> _Once | None:
    once = _divergence.made_in_forward(plan) and not _divergence.pair_of(plan).per_row
    return _Once(job, plan) if once else None


def _divergence_specs(job: Job, plan: Plan) -> tuple[Spec | None, ...]:
    pair, N = _divergence.pair_of(plan), job.ids.shape[0]
    row: Spec = ((N,), plan.acc)
    found = (row if pair.per_row else ((), plan.acc), row, row, ((N,), torch.bool))
    made = _divergence.made_in_forward(plan)
    headroom = made and plan.narrow and not pair.per_row
    grads = _gradient_specs(job, plan, plan.acc if headroom else None) if made else [None] * LEAVES
    mean = ((), plan.acc) if pair.recipe.mean_alpha else None
    return (*found, mean, *grads, ((), plan.acc) if headroom else None, row if made else None)


def _divergence_result(_: Plan, __: torch.Size, rows: torch.Size, *shown: Tensor | None) -> Divergence:
    loss, *others = shown
    assert loss is not None
    value, alpha, agree = (t.view(rows) for t in others)  # type: ignore[union-attr]
    return Divergence(loss.view(rows) if loss.dim() else loss, value, alpha, agree)


DIVERGENCE = RowOp(
    "divergence",
    row_ids,
    _divergence.forward,
    _divergence_kept,
    _divergence_backward,
    _divergence_specs,
    _divergence_result,
    shown=4,
    differentiable=1,
    instead=("torch.softmax and what follows from it", f"torch.softmax of {LOGITS}"),
    traced=lambda plan: _divergence_traced if _divergence.made_in_forward(plan) else None,
    before_backward=_once_of_divergence,
)


def _no_gradient(kept: Tensors, upstream: Tensors, plan: Plan) -> Gradients:
    raise AssertionError("its inputs are constants")


SOFT_EMBEDDING = RowOp(
    "soft_embedding",
    row_ids,
    lambda job, plan: (_soft_embedding.forward(job, plan),),
    lambda job, written, _: (),
    _no_gradient,
    lambda job, plan: (((job.x.shape[0], _soft_embedding.table_of(job).shape[1]), plan.dtype),),
    lambda plan, ids, rows, out: out.view(*rows, out.shape[-1]),
    shown=1,
    differentiable=0,
    instead=("", ""),
)

# Those that can stand in a compiled graph, by name.
ROW_OPS = {
    op.name: op
    for op in (TOKEN_NLL, WEIGHTED_NLL, WEIGHTED_LINEAR_NLL, LINEAR_TOKEN_NLL, ROW_STATS, DIVERGENCE, SOFT_EMBEDDING)
}
