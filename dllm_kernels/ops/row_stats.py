r"""Per-row softmax statistics: log p at given ids, logsumexp, entropy, a sum of log-mixtures, argmax-match.

For objectives that are not a weighted sum of NLLs. Examples are policy gradients (ratios and clipping of
log-probabilities, entropy bonuses), distances between distributions that are known at a few ids, and bounds with a sum
over the vocabulary. All outputs except ``correct`` and ``ids`` are differentiable, and one backward pass handles all
their upstream gradients (``rows/_stats_interface.py``).

From hidden states, the logits are computed in one buffer that all chunks of rows reuse. Backward recomputes them and
overwrites them by their gradient. Nothing else of length V per row is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._graph._opaque import Spec, opaque
from dllm_kernels._graph._plain import all_plain
from dllm_kernels.rows import _stats
from dllm_kernels.rows._call import Call, checked, name_of_rows
from dllm_kernels.rows._chunks import Chunks, float16_scaling, no_autocast
from dllm_kernels.rows._fused import Fused, first_order, outputs
from dllm_kernels.rows._interface import as_blv
from dllm_kernels.rows._kept_gradients import gradient_specs
from dllm_kernels.rows._logits import Head, LinearLogits, Logits, flat_rows
from dllm_kernels.rows._options import Options
from dllm_kernels.rows._setup import Gradients, Setup, Split
from dllm_kernels.rows._stats import RequestedStats
from dllm_kernels.rows._stats_interface import NO_FLAGS, StatsFlags, StatsResult, Upstream
from dllm_kernels.rows._transform import Transform

Mix = tuple[Tensor, Tensor]
NAMES = _checks.Names(targets="ids")
# Statistics that no backward pass reads, and outputs that it reads as copies, because the caller may write into them.
NOT_READ, COPIED = ("mix", "correct", "best"), ("log_probs", "rest", *StatsFlags._fields)


class RowStats(NamedTuple):
    """Statistics of each row of logits. Inactive rows are 0 or False.

    All but ``correct`` and ``ids`` are differentiable, also together. Floats are float32 (float64 for float64 logits),
    in nats. All but ``log_probs`` have the shape of the rows.

    Attributes:
        log_probs: log p of each id, of the shape of the ids; 0 for an id of -100.
        lse: logsumexp.
        entropy: ``-sum_v p_v log p_v``, or None unless requested.
        mix: ``sum_v log(a + b p_v)`` over the columns that are not skipped, or None unless requested.
        correct: True if the first id is the argmax (the lowest index wins a tie), bool, or None unless requested. False
            if its log-probability is NaN.
        ids: argmax of the row, not the ids of the call; see :class:`TokenNLL`.
    """

    log_probs: Tensor
    lse: Tensor
    entropy: Tensor | None = None
    mix: Tensor | None = None
    correct: Tensor | None = None
    ids: Tensor | None = None


class RestStats(NamedTuple):
    """Statistics of each row with the mass of all other columns; all but ``correct`` are differentiable.

    Attributes:
        log_probs: see :class:`RowStats`.
        lse: see :class:`RowStats`.
        rest: log of the probability of all columns but the ids; -inf if there are none.
        correct: see :class:`RowStats`.
        loss: see :class:`RowObjective`; None without an objective.
        value: see ``loss``.
    """

    log_probs: Tensor
    lse: Tensor
    rest: Tensor
    correct: Tensor | None = None
    loss: Tensor | None = None
    value: Tensor | None = None


def row_stats(
    logits: Logits, ids: Tensor, *, entropy: bool = False, mix: Mix | None = None, active: Tensor | None = None,
    with_correct: bool = False, with_ids: bool = False, softcap: float | None = None, scale: float | None = None,
    skip_id: int | None = None, check_targets: bool | None = None, backend: str = "auto",
) -> RowStats:  # fmt: skip
    r"""Statistics of the softmax p of each active row of logits, differentiable in one backward pass.

    .. math::
        \log p_k, \qquad \text{lse} = \log \sum_v e^{z_v}, \qquad H = -\sum_v p_v \log p_v, \qquad
        F = \sum_v \log(a + b p_v)

    F sums over all columns except ``skip_id``. Rows with ``active`` 0 are not read: their results and gradients are 0
    even if they hold NaN. A row whose upstream gradients are all 0 has the gradient 0. A NaN logit affects only its own
    row. A logit of ``-inf`` is a probability of 0: it adds 0 to H and log a to F. A row of only ``-inf`` has an ``lse``
    of -inf; its log-probabilities, H and F are NaN.

    Examples:
        >>> logits = torch.zeros(2, 10, requires_grad=True)
        >>> ids = torch.tensor([[3, 4], [5, -100]])
        >>> out = row_stats(logits, ids, entropy=True)
        >>> [[round(x, 4) for x in row] for row in out.log_probs.tolist()]
        [[-2.3026, -2.3026], [-2.3026, 0.0]]
        >>> (out.log_probs.sum() - 0.01 * out.entropy.sum()).backward()  # one backward pass

    Args:
        logits: ``[..., V]``, float16, bfloat16, float32 or float64; any strides.
        ids: ``[...]`` or ``[..., K]``, K >= 1, integers in ``[0, V)``. -100 marks a missing id, with log-probability 0.
            Any other out-of-range id raises an IndexError on a CPU, see ``check_targets``; on a GPU it gives NaN in
            that entry, as ``skip_id`` does everywhere. If the entry receives a gradient, the gradient of its row is NaN
            too.
        entropy: also return H.
        mix: (a, b), each ``[...]``, floating, not negative, constants (detached): also return F. a = 0 and b = 0 are
            legal; F is -inf if one of its logarithms is.
        active: ``[...]``, bool or numeric; rows with entry 0 are inactive. None: all rows.
        with_correct: also return the argmax match: True if the first id is the argmax.
        with_ids: also return the predicted id, the argmax of the transformed logits; takes no second product or pass.
        softcap: c > 0 replaces each logit by ``c tanh(z / c)`` first, as in Gemma; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.
        skip_id: column that is never predicted, such as the MASK column. Its logit is -inf, its gradient is 0, and the
            NLL or log-probability of a target or id equal to it is NaN. None: every column can be predicted.
        check_targets: raise an IndexError that names the first out-of-range target or id of an active row. None: the
            environment variable ``DLLM_KERNELS_CHECK``, 1 or 0; if it is unset, True for eager calls on a CPU, and
            False elsewhere. True also rejects ``skip_id``, and costs a host sync on a GPU.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`RowStats`.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices do not match, a number is out of range, or the backend is unknown.
        IndexError: an id is out of range and checked, see ``check_targets``.

    Source: the definitions. The bound of :class:`SCDDLoss` uses F, the sum of log-mixtures.
    """
    flags = StatsFlags(entropy=_checks.checked_bool("entropy", entropy))
    _checks.checked_pair("mix", mix, "(a, b)")
    options = Options(
        Transform(softcap, scale, skip_id), check_targets=check_targets, backend=backend, with_lse=True,
        with_correct=with_correct, with_ids=with_ids,
    )  # fmt: skip
    call = checked(NAMES, logits, ids, options, active=active, several=True)
    return row_stats_unchecked(call, _checked_mix(call, mix), flags)  # type: ignore[no-any-return]


def linear_row_stats(
    hidden: Tensor, weight: Tensor, ids: Tensor, *, bias: Tensor | None = None, extra: _checks.Extra | None = None,
    entropy: bool = False, mix: Mix | None = None, active: Tensor | None = None, with_correct: bool = False,
    with_ids: bool = False, chunk_size: int | None = None, num_active: int | None = None,
    logits_dtype: torch.dtype | None = None, softcap: float | None = None, scale: float | None = None,
    skip_id: int | None = None, check_targets: bool | None = None, backend: str = "auto",
) -> RowStats:  # fmt: skip
    """Compute :func:`row_stats` of ``LinearLogits(hidden, weight, bias, extra, ...)``, whose arguments it takes."""
    logits = LinearLogits(hidden, weight, bias, extra, logits_dtype, chunk_size, num_active, softcap, scale, skip_id)
    return row_stats(
        logits, ids, entropy=entropy, mix=mix, active=active, with_correct=with_correct, with_ids=with_ids,
        check_targets=check_targets, backend=backend,
    )  # fmt: skip


def row_stats_of_best(logits: Logits, ids: Tensor, *, entropy: bool, check_targets: bool | None) -> RowStats:
    """Compute :func:`row_stats` with ``with_ids``; ``log_probs [..., K + 1]`` has that of the argmax last."""
    options = Options(check_targets=check_targets, with_lse=True, with_ids=True, with_best=True)
    call = checked(NAMES, logits, ids, options, several=True)
    return row_stats_unchecked(call, None, StatsFlags(entropy=entropy))  # type: ignore[no-any-return]


def _checked_mix(call: Call, mix: Mix | None) -> Any:
    """Validate the tensors of a mixture; return them with DTensors gathered."""
    if mix is None:
        return None
    name = name_of_rows(NAMES, call.logits)
    mix = all_plain(*mix)
    for i, t in enumerate(mix):
        part = f"mix[{i}]"
        _checks.check_float(part, t)
        _checks.check_shape(part, t, call.rows, f"that of {name} without its last dimension")
        _checks.check_same_device(name, call.x, **{part: t})
        _checks.check_constant(part, t)
        _checks.check_none_negative(part, t)
    return mix


def row_stats_unchecked(call: Call, mix: Mix | None, flags: StatsFlags = NO_FLAGS, split: Split | None = None) -> Any:
    """Compute :func:`row_stats` of a validated call; :class:`RestStats` if ``options.rest``."""
    if call.on_ranks:
        from dllm_kernels.distributed.run import on_this_rank

        return on_this_rank(row_stats_unchecked, call, {"mix": mix}, flags=flags)
    setup = Setup.of(call.logits, call.options, split)
    requested = RequestedStats.of(call, mix, flags, setup)
    head = call.head
    if head is None:
        results = _RowStats.under(setup)(call.logits, requested, setup)
    else:
        results = _LinearRowStats.under(setup)(flat_rows(call.x), requested, setup, *head.flat)
    fields = _stats.in_rows(_stats.by_name(results, requested, setup), call)
    return _stats.record(RestStats if requested.with_rest else RowStats, fields)


class _RowStats(Fused):
    """Statistics of rows of logits; backward computes the softmax again."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, requested: RequestedStats, setup: Setup) -> tuple[Tensor, ...]:
        return _saved(ctx, [logits], StatsResult(*_row_stats(logits, requested, setup)), requested, setup)

    @staticmethod
    @first_order("torch.log_softmax and what follows from it")
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (logits,), requested, result, upstream = _restored(ctx, grads)
        (grad,) = _row_stats_grad(logits, requested, result, upstream, ctx.setup)
        return grad, None, None


class _LinearRowStats(Fused):
    """Statistics of rows of hidden states; backward computes the logits again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, requested: RequestedStats, setup: Setup, *head: Any) -> tuple[Tensor, ...]:
        result = StatsResult(*_linear_row_stats(hidden, Head(*head), requested, setup))
        return _saved(ctx, [hidden, *head], result, requested, setup)

    @staticmethod
    @first_order("torch.log_softmax of the logits, torch.nn.functional.linear(hidden, weight, bias)")
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (hidden, *head), requested, result, upstream = _restored(ctx, grads)
        grad_hidden, *grad_head = _linear_row_stats_grad(hidden, Head(*head), requested, result, upstream, ctx.setup)
        return grad_hidden, None, None, *grad_head


def _saved(
    ctx: Any, inputs: Sequence[Tensor | None], result: StatsResult, requested: RequestedStats, setup: Setup
) -> tuple[Tensor, ...]:
    """Save what :func:`_restored` returns; return the outputs of a Function."""
    if requested.with_best:  # the argmax is one more id; its log-probability is -log S
        requested = requested._replace(ids=torch.cat([requested.ids, result.best[:, None]], 1))  # type: ignore[index]
        result = result._replace(log_probs=torch.cat([result.log_probs, -result.log_sum[:, None]], 1))
    ctx.flags, ctx.with_rest, ctx.setup = requested.flags, requested.with_rest, setup
    if any(setup.needs):
        fields = zip(StatsResult._fields, result, strict=True)
        stats = [None if t is None or name in NOT_READ else t.clone() if name in COPIED else t for name, t in fields]
        ctx.save_for_backward(requested.ids, requested.marks, requested.mix_a, requested.mix_b, *stats, *inputs)
    return outputs(ctx, *_stats.outputs_of(result, lse=setup.with_lse))


def _restored(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[list[Any], RequestedStats, StatsResult, Upstream]:
    """Return the inputs, the constants per row, the statistics and the upstream gradients."""
    ids, marks, mix_a, mix_b, *others = ctx.saved_tensors
    stats, inputs = others[: len(StatsResult._fields)], others[len(StatsResult._fields) :]
    requested = RequestedStats(ids, marks, mix_a, mix_b, ctx.flags, ctx.with_rest)
    upstream = _stats.by_name([None if g is None else g.contiguous() for g in grads], requested, ctx.setup)
    return inputs, requested, StatsResult(*stats), _stats.record(Upstream, upstream)


def _keeps_normalizer(requested: RequestedStats, setup: Setup) -> bool:
    """Return True if (row_max, log_sum) of logits is a result, or read by a backward pass."""
    if setup.with_lse or setup.triton or setup.splits_rows or requested.mix_a is not None:
        return True
    return any(requested.flags) and any(setup.needs)


def _specs(_logits: Tensor, requested: RequestedStats, setup: Setup) -> list[Spec]:
    return requested.specs(setup, lse=_keeps_normalizer(requested, setup))


@opaque("row_stats", _specs)
def _row_stats(logits: Tensor, requested: RequestedStats, setup: Setup) -> StatsResult:
    """Compute the statistics of logits."""
    request = requested.request(setup, lse=_keeps_normalizer(requested, setup))
    return _stats.statistics(setup.primitives(), as_blv(logits), request, rest=requested.with_rest)


@opaque("row_stats_grad", lambda logits, *_: [(logits.shape, logits.dtype)])
def _row_stats_grad(
    logits: Tensor, requested: RequestedStats, result: StatsResult, upstream: Upstream, setup: Setup
) -> tuple[Tensor]:
    """Compute the gradient with respect to the logits."""
    request, primitives = requested.request(setup), setup.primitives()
    c, _, targets = _stats.coefficients(primitives, request, result, upstream)
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    request = request._replace(targets=targets)
    _stats.write_gradient(primitives, as_blv(logits), request, c, result, as_blv(grad))
    return (grad,)


@opaque("linear_row_stats", lambda _hidden, _head, requested, setup: requested.specs(setup))
def _linear_row_stats(hidden: Tensor, head: Head, requested: RequestedStats, setup: Setup) -> StatsResult:
    """Compute the statistics of hidden states ``[N, D]`` with one matrix product per chunk."""
    with no_autocast(hidden):
        chunks = Chunks(hidden, head, requested.marks, setup)
        request, rows, out = requested.request(setup, chunks.targets), chunks.rows, requested.empty(chunks.rows, setup)
        for chunk, _, targets, logits in chunks:
            chunk_request = _stats.chunk_request(request, rows, chunk, targets)
            part = _stats.statistics(chunks.primitives, logits[None], chunk_request, rest=requested.with_rest)
            rows.put_each(out, chunk, part)
        result = StatsResult(*rows.finished(out))
        return result if result.log_probs is out[0] else result._replace(log_probs=result.log_probs.clone())


@opaque("linear_row_stats_grad", lambda hidden, head, *others: gradient_specs(hidden, head, others[-1].needs))
def _linear_row_stats_grad(
    hidden: Tensor, head: Head, requested: RequestedStats, result: StatsResult, upstream: Upstream, setup: Setup
) -> Gradients:
    """Recompute the logits chunk by chunk, and compute the gradients."""
    with no_autocast(hidden):
        request = requested.request(setup)
        c, size, with_gradient = _stats.coefficients(setup.primitives(), request, result, upstream)
        if setup.needs_loss_scaling:
            c = _stats.divided(c, size)
        size, factors, loss_scale = float16_scaling(size, setup)
        # Not read by what follows.
        result = result._replace(**dict.fromkeys(("mix_weight", *StatsFlags._fields)))  # type: ignore[arg-type]
        chunks = Chunks(hidden, head, request.targets, setup, setup.needs, factors, listed=with_gradient)
        rows = chunks.rows
        for chunk, h, targets, logits in chunks:
            chunk_request = _stats.chunk_request(request, rows, chunk, targets)
            chunk_result = StatsResult(*[None if t is None else rows.take(t, chunk) for t in result])  # type: ignore[arg-type]
            terms = _stats.each(lambda t, chunk=chunk: rows.take(t, chunk), c)  # type: ignore[misc]
            _stats.write_gradient(chunks.primitives, logits[None], chunk_request, terms, chunk_result, logits[None])
            chunks.add_gradients(chunk, h, targets, logits, rows.take(size, chunk))
        return chunks.gradients(loss_scale)
