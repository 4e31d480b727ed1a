r"""Divergence of student rows to a teacher that is known at K ids per row, as stored top-k log-probabilities are.

Over the K ids and one bucket for all other columns, with the student's masses p_k and r, the teacher's q_k and
1 - sum_k q_k,

    D = sum over the K + 1 buckets of f(p, q).

The statistics of a row are the log-probabilities at the ids and log r (``rows/_rest.py``). All that depends on them is
``[N, K + 1]``, and computed in float64. From hidden states it is an objective of row statistics, whose gradient is made
while a chunk of logits exists: two matrix products with a frozen head, three with a trainable head.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._checks._target_range import first_true
from dllm_kernels._graph._named import replaced
from dllm_kernels._graph._plain import all_plain, has_values, readable_without_sync
from dllm_kernels.ops.divergence import Divergence
from dllm_kernels.ops.row_objective import row_objective_unchecked
from dllm_kernels.ops.row_stats import row_stats_unchecked
from dllm_kernels.rows._call import Call, checked, name_of_rows, times_upstream
from dllm_kernels.rows._divergence_spec import checked_spec
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._interface import IGNORE
from dllm_kernels.rows._logits import LinearLogits, Logits, opened, rows_of
from dllm_kernels.rows._options import Options
from dllm_kernels.rows._transform import Transform

KINDS = ("kl", "rkl", "jsd")
NAMES = _checks.Names(targets="top_ids")
# Largest sum of K probabilities: the logarithms of a distribution, rounded to bfloat16, sum to less.
MOST_MASS = 1.05
EPS = torch.finfo(torch.float64).eps


def topk_divergence(
    logits: Logits, top_ids: Tensor, top_log_probs: Tensor, weights: Tensor | None = None, *,
    kind: str = "kl", tail: bool = True, beta: float | None = None, temperature: float = 1.0, reduction: str = "sum",
    softcap: float | None = None, scale: float | None = None, skip_id: int | None = None,
    check_targets: bool | None = None, backend: str = "auto",
) -> Divergence:  # fmt: skip
    r"""Weighted sum of the divergence of each row of student logits to a teacher that is known at K ids.

    .. math:: \text{loss} = \sum_i w_i \, T^2 D(p_i, q_i)

    p and q are distributions over K + 1 buckets: the K ids, and all other columns together. The teacher's mass of the
    last bucket is ``1 - sum(exp(top_log_probs))``, the student's is summed over the other columns, and both are
    accurate however small they are. A teacher whose K probabilities sum to 1, within the rounding of their logarithms,
    has no mass there, so ``rkl`` is infinite unless the student has none, either. With ``tail=False`` both are
    renormalised over the K ids instead. By the data-processing inequality, D over buckets is at most D over the
    vocabulary.

    ====== =====================================================================================
    kind   D
    ====== =====================================================================================
    kl     KL(q || p), the forward KL of distillation
    rkl    KL(p || q)
    jsd    beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p; 0: kl, 1: rkl
    ====== =====================================================================================

    The teacher is a constant. Rows of weight 0, and rows without an id, are neither read nor counted: their results and
    gradients are 0. A NaN affects only its own row. If no other column has a finite logit, there is no last bucket.

    Examples:
        >>> logits = torch.zeros(2, 10, requires_grad=True)
        >>> # the rest of the mass, 0.1 and 0.25, is elsewhere
        >>> teacher = torch.tensor([[0.7, 0.2], [0.5, 0.25]]).log()
        >>> out = topk_divergence(
        ...     logits, torch.tensor([[3, 4], [5, 1]]), teacher, torch.tensor([0.5, 0.5])
        ... )
        >>> [round(x, 4) for x in out.value.tolist()]
        [1.2928, 0.743]
        >>> out.loss.backward()

    Args:
        logits: ``[..., V]``, float16, bfloat16, float32 or float64; any strides. The student's logits.
        top_ids: ``[..., K]``, K >= 1, integers in ``[0, V)``, distinct in each row, in any order. -100 marks a missing
            entry, for rows of fewer than K ids. A repeated id raises a ValueError on a CPU and gives NaN in that row on
            a GPU and under ``torch.compile``. Any other value raises an IndexError on a CPU and gives NaN in that row
            on a GPU.
        top_log_probs: ``[..., K]``, floating, the teacher's log-probability of each id, a constant; ignored at missing
            ids. At float16 and bfloat16, rounding moves small masses into or out of the last bucket.
        weights: ``[...]``, bool or numeric constants; must not require a gradient. None: ones.
        kind: "kl", "rkl" or "jsd".
        tail: True: all other columns are one more bucket. The teacher's mass of it is 0 if the probabilities sum to 1,
            up to the rounding of ``top_log_probs``, or to more; ``rkl`` is then infinite. False: both distributions are
            renormalised over the K ids, and ``top_log_probs`` may be logits.
        beta: option of ``jsd``, in [0, 1]; None: 0.5.
        temperature: T > 0. The student's logits are divided by T, and value and loss are multiplied by T squared.
            ``top_log_probs`` must be those of the teacher's logits divided by T.
        reduction: "sum", or "none": ``loss`` is then ``[...]``, the weighted value of each row, and takes an arbitrary
            upstream gradient per row.
        softcap: c > 0 replaces each logit by ``c tanh(z / c)`` first, as in Gemma; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1. The division by
            ``temperature`` follows.
        skip_id: column that is never predicted, such as the MASK column. Its logit is -inf, its gradient is 0, and the
            NLL or log-probability of a target or id equal to it is NaN. None: every column can be predicted.
        check_targets: raise an IndexError that names the first out-of-range target or id of an active row. None: the
            environment variable ``DLLM_KERNELS_CHECK``, 1 or 0; if it is unset, True for eager calls on a CPU, and
            False elsewhere. True also rejects ``skip_id``, and costs a host sync on a GPU.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`Divergence`. ``acceptance_rate`` is ``sum min(p, q)`` over the buckets, an upper bound of the rate over
        the vocabulary. ``agree`` is True if the student's argmax is the first of the most likely ids of the teacher.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices do not match, a number is out of range, or a name is unknown. On CPU, also
            if a row holds an id twice, or with ``tail=True`` if its probabilities sum to more than 1.05.
        IndexError: an id is out of range and checked, see ``check_targets``.

    Source: :func:`divergence`, on the partition of the vocabulary into K ids and the rest.
    """
    options = Options(
        Transform(softcap, _tempered(scale, temperature), skip_id), check_targets=check_targets, backend=backend,
        with_lse=True, with_correct=True,
    )  # fmt: skip
    fn = _BucketDivergence.checked(kind, beta, tail, temperature)
    options = replaced(options, rest=fn.tail)
    call, teacher = _checked(logits, top_ids, options, top_log_probs, weights)
    per_row = _checks.is_per_row(reduction)
    if call.head is None or per_row or torch.compiler.is_compiling() or not has_values(call.x):
        return _result(fn, row_stats_unchecked(call, None), teacher, per_row)
    out = row_objective_unchecked(call, tuple(teacher), fn=partial(_weighted, fn))
    return replaced(_result(fn, out, teacher, False), loss=out.loss)


def linear_topk_divergence(
    hidden: Tensor, weight: Tensor, top_ids: Tensor, top_log_probs: Tensor, weights: Tensor | None = None, *,
    bias: Tensor | None = None, extra: _checks.Extra | None = None, kind: str = "kl", tail: bool = True,
    beta: float | None = None, temperature: float = 1.0, reduction: str = "sum", chunk_size: int | None = None,
    num_active: int | None = None, logits_dtype: torch.dtype | None = None, softcap: float | None = None,
    scale: float | None = None, skip_id: int | None = None, check_targets: bool | None = None, backend: str = "auto",
) -> Divergence:  # fmt: skip
    """Compute :func:`topk_divergence` of ``LinearLogits(hidden, weight, bias, extra, ...)``, whose arguments it takes.

    A row is active, for ``num_active``, if its weight is not 0 and it has an id.
    """
    logits = LinearLogits(hidden, weight, bias, extra, logits_dtype, chunk_size, num_active)
    return topk_divergence(
        logits, top_ids, top_log_probs, weights, kind=kind, tail=tail, beta=beta, temperature=temperature,
        reduction=reduction, softcap=softcap, scale=scale, skip_id=skip_id, check_targets=check_targets,
        backend=backend,
    )  # fmt: skip


class _Teacher(NamedTuple):
    """Constants of each row.

    Attributes:
        log_q: float64 ``[..., K]`` or, with a bucket for the rest, ``[..., K + 1]``; -inf at missing ids, NaN if an id
            is repeated.
        missing: bool ``[..., K]``.
        weights: ``[...]``, in the accumulation dtype; 0 for inactive rows.
    """

    log_q: Tensor
    missing: Tensor
    weights: Tensor


class _BucketDivergence(NamedTuple):
    """The divergence of a row over its buckets.

    Attributes:
        kind: "kl", "rkl" or "jsd".
        beta: option of "jsd".
        tail: True if there is a bucket for the rest.
        value_scale: factor of the value, the square of the temperature.
    """

    kind: str
    beta: float
    tail: bool
    value_scale: float

    @classmethod
    def checked(cls, kind: Any, beta: Any, tail: Any, temperature: float) -> _BucketDivergence:
        """Validate the options of a public function; a "jsd" of beta 0 or 1 becomes "kl" or "rkl"."""
        _checks.check_choice("kind", kind, KINDS)
        (term,) = checked_spec(kind, beta=beta).terms
        return cls(term.kind, term.options[0], _checks.checked_bool("tail", tail), float(temperature) ** 2)

    def __call__(self, stats: Any, log_q: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
        """Return (divergence, acceptance rate) of each row, in float64."""
        log_p = stats.log_probs.to(torch.float64).masked_fill(missing, -math.inf)
        if self.tail:
            rest = stats.rest.to(torch.float64).unsqueeze(-1)
            log_p = torch.cat([log_p, rest], -1)
            no_rest = torch.cat([torch.zeros_like(missing), rest == -math.inf], -1)
            log_q = log_q.masked_fill(no_rest, -math.inf)
        a = torch.minimum(self.normalized(log_p.detach()), log_q).exp().sum(-1)
        return self.value_scale * _of_rows(log_p, log_q, self), a

    def normalized(self, log_p: Tensor) -> Tensor:
        return log_p if self.tail else log_p - torch.logsumexp(log_p, -1, keepdim=True)

    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        if self.kind == "kl":
            return _kl(log_q, log_p)
        if self.kind == "rkl":
            return _kl(log_p, log_q)
        log_m = self.log_mixture(log_p, log_q)
        return self.beta * _kl(log_q, log_m) + (1 - self.beta) * _kl(log_p, log_m)

    def slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Return the derivative of the value by each entry of ``log_p``; it is 0 where p = 0, but for "kl"."""
        p = log_p.exp()
        if self.kind == "kl":
            return -log_q.exp()
        if self.kind == "rkl":
            slope = p * (log_p - log_q + 1)
        else:
            slope = (1 - self.beta) * p * (log_p - self.log_mixture(log_p, log_q))
        return slope.masked_fill(log_p == -math.inf, 0.0)

    def log_mixture(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        m = self.beta * log_q.exp() + (1 - self.beta) * log_p.exp()
        return torch.where(m == 0, 1.0, m).log()  # then p and q are 0, too


class _OfRows(torch.autograd.Function):
    """The divergence of each row; the gradient of a row without an upstream gradient is 0, whatever the row holds."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, log_q: Tensor, fn: _BucketDivergence) -> Tensor:
        ctx.save_for_backward(log_p, log_q)
        ctx.fn = fn
        return fn.value(fn.normalized(log_p), log_q)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        log_p, log_q = ctx.saved_tensors
        normalized = ctx.fn.normalized(log_p)
        slope = ctx.fn.slope(normalized, log_q)
        if not ctx.fn.tail:
            slope = slope - normalized.exp() * slope.sum(-1, keepdim=True)
        return times_upstream(slope, grads[0].unsqueeze(-1)), None, None


def _of_rows(log_p: Tensor, log_q: Tensor, fn: _BucketDivergence) -> Tensor:
    return _OfRows.apply(log_p, log_q, fn)  # type: ignore[no-untyped-call,no-any-return]


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute ``sum p (log p - log q)`` over the last dimension; buckets of p = 0 add 0."""
    none = log_p == -math.inf
    p, q = (t.masked_fill(none, 0.0) for t in (log_p, log_q))
    return (p.exp() * (p - q)).masked_fill(none, 0.0).sum(-1)


def _weighted(fn: _BucketDivergence, stats: Any, log_q: Tensor, missing: Tensor, weights: Tensor) -> Tensor:
    return fn(stats, log_q, missing)[0] * weights


def _result(fn: _BucketDivergence, stats: Any, teacher: _Teacher, per_row: bool) -> Divergence:
    """Build the result from the statistics of all rows."""
    weights, dtype = teacher.weights, teacher.weights.dtype
    inactive, inactive_value = weights == 0, stats.lse.detach()  # 0, or NaN if the bound is too small
    value, a = (torch.where(inactive, inactive_value, t.to(dtype)) for t in fn(stats, teacher.log_q, teacher.missing))
    loss = torch.where(inactive, inactive_value, weights * value)
    agree = stats.correct & ~a.isnan()
    return Divergence(loss if per_row else loss.sum(), value.detach(), a, agree)


def _tempered(scale: Any, temperature: Any) -> Any:
    return _checks.tempered_scale(scale, _checks.checked_temperature(temperature))


def _checked(logits: Any, top_ids: Any, options: Options, top_log_probs: Any, weights: Any) -> tuple[Call, _Teacher]:
    """Validate all tensors; return the call with each row's most likely id in front, and the teacher."""
    logits = opened(logits, options.transform)
    tail, x = options.rest, rows_of(logits)
    name = name_of_rows(NAMES, logits)
    _checks.check_float(name, x)
    ids, log_q, weights = all_plain(top_ids, top_log_probs, weights)
    _checks.check_ids("top_ids", ids)
    rows = tuple(x.shape[:-1])
    if ids.dim() != x.dim() or tuple(ids.shape[:-1]) != rows or ids.shape[-1] < 1:
        raise ValueError(
            f"top_ids must have shape {(*rows, 'K')}, that of {name} without its last dimension and K >= 1 ids, "
            f"got {tuple(ids.shape)}"
        )
    _checks.check_float("top_log_probs", log_q)
    _checks.check_shape("top_log_probs", log_q, ids.shape, "that of top_ids")
    _checks.check_constant("top_log_probs", log_q)
    if weights is None:
        weights = torch.ones(rows, device=x.device)
    _checks.check_weights("weights", weights, rows, f"that of {name} without its last dimension")
    _checks.check_constant("weights", weights, 'reduction="none" and loss * weights')
    _checks.check_same_device(name, x, top_log_probs=log_q, weights=weights, top_ids=ids)
    ids = ids.long()  # -100 is 156 in uint8
    missing = ids == IGNORE
    active = (weights != 0) & ~missing.all(-1)
    weights = torch.where(active, weights.detach(), 0).to(accum_dtype(x.dtype))
    call = checked(NAMES, logits, ids, options, active=active, several=True)
    repeated = _repeated(ids)
    unit = torch.finfo(accum_dtype(log_q.dtype)).eps / 2
    log_q = log_q.detach().to(torch.float64).masked_fill(missing, -math.inf)
    if readable_without_sync(ids) and readable_without_sync(log_q):
        total = log_q.exp().sum(-1)
        _check_values(ids, repeated & active, total, active & (total > MOST_MASS) if tail else None)
    else:
        log_q = log_q.masked_fill(repeated.unsqueeze(-1), math.nan)
    order = _best_first(log_q)
    ids, missing, log_q = (t.gather(-1, order) for t in (ids, missing, log_q))
    if tail:
        q = log_q.exp()
        rest = 1 - q.sum(-1, keepdim=True)
        rounding = unit * torch.special.entr(q).sum(-1, keepdim=True) + EPS  # of log_q in its own dtype, and of the sum
        log_q = torch.cat([log_q, rest.masked_fill(rest <= rounding, 0.0).log()], -1)
    else:
        log_q = log_q - torch.logsumexp(log_q, -1, keepdim=True)
    return replaced(call, ids=ids), _Teacher(log_q, missing, weights)


def _repeated(ids: Tensor) -> Tensor:
    """Return True for rows that hold an id twice."""
    ordered = ids.sort(-1).values
    following = ordered[..., 1:]
    return ((following == ordered[..., :-1]) & (following != IGNORE)).any(-1)


def _check_values(ids: Tensor, repeated: Tensor, total: Tensor, above: Tensor | None) -> None:
    """Raise ValueError for the first row with a repeated id, or with too much mass."""
    if (where := first_true(repeated)) is not None:
        raise ValueError(f"top_ids must hold each id once per row, got {ids[where].tolist()} at position {where}")
    if above is not None and (where := first_true(above)) is not None:
        raise ValueError(
            f"top_log_probs must be log-probabilities, which sum to at most 1, got a sum of {total[where].item():.4g} "
            f"at position {where}; pass the log_softmax over the vocabulary, or tail=False to renormalise over the ids"
        )


def _best_first(log_q: Tensor) -> Tensor:
    """Return the order of the entries in which the first largest has changed places with the first entry."""
    best = log_q.argmax(-1, keepdim=True)
    places = torch.arange(log_q.shape[-1], device=log_q.device).expand(log_q.shape)
    return torch.cat([best, places.scatter(-1, best, 0)[..., 1:]], -1)
