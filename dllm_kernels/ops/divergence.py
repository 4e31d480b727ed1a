r"""Weighted divergence of student rows to teacher rows, for distillation, without materializing the full logits.

p is the softmax of a row of the student's logits. q is the softmax of a row of the teacher's logits, a constant. a =
sum_v min(p_v, q_v) is the acceptance rate of speculative decoding with the student as the draft model. The kinds and
their gradients are defined in ``rows/_divergence_kinds.py``.

From hidden states, each chunk of rows of nonzero weight takes these steps. Two matrix products compute the student's
and the teacher's logits, each in a buffer that all chunks reuse. One pass over both computes the divergence, a and the
argmax match, and overwrites the student's logits with their gradient. One product computes the gradient of the hidden
states. If the head is trainable, one more product computes the gradient of the head. A frozen head that is shared with
the teacher therefore takes three products and the memory of two chunks. The unfused computation by autograd takes five
products and several tensors ``[N, V]``.

If the student has a smaller vocabulary, its columns of the teacher are compared. The teacher's whole rows are computed
and reduced to their maximum, sum of exponentials and argmax in one pass (``row_norms``), from which the acceptance rate
and the argmax match follow. The compared columns are then copied, one chunk at a time.

``lk`` with ``alpha="mean"`` needs an extra forward-only pass to compute the mean acceptance rate: two more matrix
products.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._graph._named import replaced
from dllm_kernels._graph._opaque import Spec, opaque
from dllm_kernels._graph._plain import all_plain, any_dtensor, readable_without_sync
from dllm_kernels.rows._call import (
    Call,
    checked,
    checked_rows,
    flat_ids,
    flat_values,
    name_of_rows,
    row_marks,
    times_upstream,
)
from dllm_kernels.rows._chunks import NO_FACTORS, Chunks, float16_scaling, no_autocast
from dllm_kernels.rows._divergence import SAVED_STATS, DivergenceRequest, DivergenceSpec, SavedStats, Whole
from dllm_kernels.rows._divergence_spec import Comparison, checked_spec
from dllm_kernels.rows._fused import Fused, first_order, outputs
from dllm_kernels.rows._interface import IGNORE, as_blv
from dllm_kernels.rows._kept_gradients import gradient_specs, keep_gradients, scale_gradients
from dllm_kernels.rows._logits import (
    Head,
    LinearLogits,
    Logits,
    both_opened,
    detached,
    flat_rows,
    rows_of,
    vocabulary_of,
)
from dllm_kernels.rows._options import Options
from dllm_kernels.rows._setup import NO_GRADIENTS, Gradients, NeedsGrad, Setup, Split, compute_dtype, stored
from dllm_kernels.rows._teacher import Teacher, gather, rows_at
from dllm_kernels.rows._transform import Transform

NAMES = _checks.Names()
TEACHER = _checks.Names(
    "teacher_logits", "targets", "teacher_weight", "teacher_bias", "teacher_hidden", "teacher_extra"
)
Kind = str | Mapping[str, float]
# Has a second derivative.
SOFTMAX = "torch.softmax and what follows from it"
SOFTMAX_OF_HEAD = "torch.softmax of the logits, torch.nn.functional.linear(hidden, weight, bias)"
# Largest size in bytes of a copy of the compared teacher columns.
COPY_BYTES = 64 << 20


class Divergence(NamedTuple):
    """A weighted sum of divergences, and the results of each row.

    All but ``loss`` are detached, have the shape of the rows, and are 0 or False for rows of weight 0.

    Attributes:
        loss: sum of weights * value, 0-d; with ``reduction="none"`` weights * value, of the shape of the rows. float32
            (float64 for float64 logits), differentiable.
        value: the divergence of each row, in nats, times the square of the temperature.
        acceptance_rate: ``sum_v min(p_v, q_v)``, the rate at which the teacher accepts tokens drawn by the student.
        agree: True if both have the same argmax (the lowest index wins a tie), bool. False if the rate is NaN.
    """

    loss: Tensor
    value: Tensor
    acceptance_rate: Tensor
    agree: Tensor


def divergence(
    logits: Logits, teacher_logits: Logits, weights: Tensor | None = None, *, kind: Kind = "kl",
    targets: Tensor | None = None, teacher_rows: Tensor | None = None, draft_to_target: Tensor | None = None,
    teacher: str = "draft", temperature: float = 1.0, reduction: str = "sum", beta: float | None = None,
    floor: float | None = None, eta: float | None = None, kl_scale: float | None = None, alpha: str | None = None,
    base: str | None = None, softcap: float | None = None, scale: float | None = None, skip_id: int | None = None,
    teacher_transform: Mapping[str, Any] | None = None, check_targets: bool | None = None, backend: str = "auto",
) -> Divergence:  # fmt: skip
    r"""Weighted sum of the divergence of each row of student logits to the teacher's row.

    .. math:: \text{loss} = \sum_i w_i \, T^2 \sum_k c_k D_k(p_i, q_i), \qquad
        p_i = \text{softmax}(z_i / T), \quad q_i = \text{softmax}(t_i / T)

    ========== =======================================================================================
    kind       D
    ========== =======================================================================================
    kl         KL(q || p), the forward KL of distillation; also ``kl_div``
    rkl        KL(p || q)
    jsd        beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p; 0: kl, 1: rkl
    tv         1 - a, a = sum min(p, q)
    l1         sum abs(p - q), which is 2 tv
    nla        -log(max(a, floor)); no gradient below the floor
    lk         lam kl + (1 - lam) tv, lam = kl_scale exp(-eta a) without a gradient; also ``lk_hybrid``
    soft_ce    -sum q log p
    teacher_ce -log p at the teacher's argmax
    ce         -log p at the target
    ========== =======================================================================================

    The teacher is a constant. Rows of weight 0 are read in neither model. A NaN affects only its own row. A logit of
    ``-inf`` is a probability of 0. In the gradient of a, p and q that are equal up to a relative difference of 2**-18
    (rounding) count as p <= q.

    From stored logits, the forward pass saves nine values per row. The backward pass reads the logits of both models
    once and can run more than once.

    From records (:class:`LinearLogits`), the logits of both models exist one chunk at a time. The forward pass computes
    the gradients, for rows of nonzero weight and for inputs that require a gradient. Backward scales them in place by
    the upstream gradient, so it can run only once. A call takes 3 matrix products with a frozen head, 4 with a
    trainable head, and 2 if no gradient is required. ``alpha="mean"`` takes 2 more. With ``reduction="none"`` a frozen
    head takes 3 products. A trainable head takes 6, because backward recomputes the logits. A smaller vocabulary
    multiplies the whole head of the teacher; its columns are copied one chunk at a time.

    If only one of the two models has stored logits, all logits of the other one are computed, too.

    Examples:
        >>> hidden, weight = torch.zeros(2, 8, requires_grad=True), torch.zeros(10, 8)
        >>> teacher = LinearLogits(torch.zeros(2, 4), torch.zeros(10, 4), softcap=30.0)
        >>> out = divergence(LinearLogits(hidden, weight), teacher, kind="soft_ce")
        >>> [round(x, 4) for x in out.value.tolist()]
        [2.3026, 2.3026]

    Args:
        logits: ``[..., V]``, float16, bfloat16, float32 or float64; any strides. The student's logits. A row is active,
            for ``num_active`` of a record, if its weight is not 0.
        teacher_logits: ``[..., V]`` or their record, of the dtype of ``logits``. The leading dimensions must be the
            leading dimensions of ``logits`` unless ``teacher_rows`` is given. A record with the weight and the bias of
            the student's shares their conversion. Its transform precedes the one of the call; its ``skip_id`` must be
            None with ``draft_to_target``. Its ``logits_dtype``, ``chunk_size`` and ``num_active`` are not read, because
            the chunks are those of ``logits``.
        weights: ``[...]``, bool or numeric constants; must not require a gradient. None: ones.
        kind: a name, or a dict of names and coefficients such as ``{"ce": 0.1, "l1": 0.9}``, all computed in one pass.
            A kind with coefficient 0 is omitted.
        targets: ``[...]`` integers in ``[0, V)``, for ``ce``. -100: no target, with ``ce`` 0. Any other value raises an
            IndexError on a CPU and gives NaN in that row on a GPU.
        teacher_rows: ``[...]`` integers: for each student row, the index of its teacher row. The index runs over the
            flattened leading dimensions of the teacher. Indices may repeat, in any order. An out-of-range index gives
            NaN in that row. The rows of a record are copied one chunk at a time. None: student and teacher have the
            same layout.
        draft_to_target: ``[V]`` integers, for a student with a smaller vocabulary: for each student token the teacher's
            column, all distinct. Offsets such as d2t of EAGLE-3 are converted by ``torch.arange(len(d2t)) + d2t``. The
            acceptance rate and the argmax match cover all columns of the teacher. None: both have the same vocabulary.
        teacher: distribution q of the loss with ``draft_to_target``. "draft": the softmax over these columns. "full":
            their probabilities in the softmax over all columns of the teacher, which sum to a mass M. kl and soft_ce
            are then weighted by M. a in tv, l1, nla and lk is the acceptance rate. rkl increases by -log M, jsd by
            -beta (1 - M) log beta. teacher_ce is 0 if the student does not have the argmax. ce does not change.
        temperature: T > 0. The logits of both models are divided by T, and value and loss are multiplied by T squared.
        reduction: "sum", or "none": ``loss`` is then ``[...]``, the weighted value of each row, and takes an arbitrary
            upstream gradient per row.
        beta: option of ``jsd``, in [0, 1]; None: 0.5.
        floor: option of ``nla``; None: 1e-5.
        eta: option of ``lk``, any number; None: 3.
        kl_scale: option of ``lk``, in [0, 1]; None: 1.
        alpha: option of ``lk``. "row": lam is computed from a of each row. "mean": lam is computed from the weighted
            mean of a over the call, which takes one more pass over the logits. None: "row".
        base: option of ``lk``: "kl" or "soft_ce", the divergence that lam multiplies; None: "kl".
        softcap: c > 0 replaces each logit by ``c tanh(z / c)`` first, as in Gemma; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1. The division by
            ``temperature`` follows.
        skip_id: column that is never predicted, such as the MASK column. Its logit is -inf, its gradient is 0, and the
            NLL or log-probability of a target or id equal to it is NaN. None: every column can be predicted. It is a
            column of the student.
        teacher_transform: ``{"softcap": ..., "scale": ..., "skip_id": ...}`` for the teacher's logits, ``{}`` for no
            transform. Its ``skip_id`` is a column after ``draft_to_target``. None: ``softcap``, ``scale`` and
            ``skip_id`` apply to the teacher's logits too.
        check_targets: raise an IndexError that names the first out-of-range target or id of an active row. None: the
            environment variable ``DLLM_KERNELS_CHECK``, 1 or 0; if it is unset, True for eager calls on a CPU, and
            False elsewhere. True also rejects ``skip_id``, and costs a host sync on a GPU. ``teacher_rows`` and
            ``draft_to_target`` are checked too.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`Divergence`. ``loss`` is differentiable in the logits, or in the tensors of the student's record.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices do not match, a number is out of range, an option belongs to another kind,
            or a kind or the backend is unknown. On CPU, also if ``draft_to_target`` holds a column twice.
        IndexError: a target, row or column is out of range and checked, see ``check_targets``.
        RuntimeError: a second backward pass through the same loss of records, with ``reduction="sum"``.

    Source: Agarwal et al. 2024, arXiv:2306.13649 (kl, rkl, jsd); Leviathan et al. 2023, arXiv:2211.17192, section 3.2
    (a); arXiv:2602.23881 (tv, nla, lk); Hinton et al. 2015, arXiv:1503.02531 (T squared).
    """
    spec = checked_spec(
        kind, teacher=teacher, beta=beta, floor=floor, eta=eta, kl_scale=kl_scale, alpha=alpha, base=base
    )
    options = Options(Transform(softcap, scale, skip_id), IGNORE, check_targets, backend)
    logits, raw_teacher = TeacherInput.opened(
        logits, options.transform, teacher_logits, teacher_rows, draft_to_target, teacher_transform
    )
    call = checked(NAMES, logits, _targets(logits, targets, weights, spec), options, weights=weights)
    compared = Compared.checked(NAMES, call, raw_teacher)
    per_row = _checks.is_per_row(reduction)
    return divergence_unchecked(*compared.under(spec, _checks.checked_temperature(temperature), per_row))


def linear_divergence(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, weights: Tensor | None = None, *,
    bias: Tensor | None = None, extra: _checks.Extra | None = None, teacher_weight: Tensor | None = None,
    teacher_bias: Tensor | None = None, teacher_extra: _checks.Extra | None = None, kind: Kind = "kl",
    targets: Tensor | None = None, teacher_rows: Tensor | None = None, draft_to_target: Tensor | None = None,
    teacher: str = "draft", temperature: float = 1.0, reduction: str = "sum", beta: float | None = None,
    floor: float | None = None, eta: float | None = None, kl_scale: float | None = None, alpha: str | None = None,
    base: str | None = None, chunk_size: int | None = None, num_active: int | None = None,
    logits_dtype: torch.dtype | None = None, softcap: float | None = None, scale: float | None = None,
    skip_id: int | None = None, teacher_transform: Mapping[str, Any] | None = None, check_targets: bool | None = None,
    backend: str = "auto",
) -> Divergence:  # fmt: skip
    """Compute :func:`divergence` of two ``LinearLogits(hidden, weight, bias, extra, ...)``, whose arguments it takes.

    The teacher's are ``teacher_hidden``, ``teacher_weight``, ``teacher_bias`` and ``teacher_extra``. Without
    ``teacher_weight`` it shares ``weight`` and ``bias``, but not ``extra``.
    """
    logits = LinearLogits(hidden, weight, bias, extra, logits_dtype, chunk_size, num_active)
    return divergence(
        logits, head_of_teacher(logits, teacher_hidden, teacher_weight, teacher_bias, teacher_extra), weights,
        kind=kind, targets=targets, teacher_rows=teacher_rows, draft_to_target=draft_to_target, teacher=teacher,
        temperature=temperature, reduction=reduction, beta=beta, floor=floor, eta=eta, kl_scale=kl_scale, alpha=alpha,
        base=base, softcap=softcap, scale=scale, skip_id=skip_id, teacher_transform=teacher_transform,
        check_targets=check_targets, backend=backend,
    )  # fmt: skip


def head_of_teacher(student: LinearLogits, hidden: Any, weight: Any, bias: Any, extra: Any) -> LinearLogits:
    """Return the record of a teacher, which shares the student's weight and bias if ``weight`` is None."""
    if weight is None:
        if bias is not None:
            raise ValueError("teacher_bias requires teacher_weight: the student's head is taken with its bias")
        weight, bias = student.weight, student.bias
    return LinearLogits(hidden, weight, bias, extra)


class TeacherInput(NamedTuple):
    """Teacher as the caller gave it.

    Attributes:
        logits: logits ``[..., V']`` or their record, or None.
        rows: ``teacher_rows`` of the public function, or None.
        columns: ``draft_to_target``, or None.
        transform: transform that follows the record's own.
        scale: name of the argument that has the scale of this transform.
    """

    logits: Any
    rows: Tensor | None
    columns: Tensor | None
    transform: Transform
    scale: str

    @classmethod
    def opened(
        cls, logits: Any, transform: Transform, teacher_logits: Any, rows: Any, columns: Any, fields: Any
    ) -> tuple[Any, TeacherInput]:
        """Open the logits of both models; return the student's, and the teacher with ``teacher_transform=fields``."""
        teacher_transform, scale = transform, "scale"
        if fields is not None:
            if not isinstance(fields, Mapping):
                raise TypeError(f"teacher_transform must be a dict or None, got {_checks.type_name(fields)}")
            for name in fields:
                if name not in Transform._fields:
                    known = ", ".join(Transform._fields)
                    raise ValueError(f"teacher_transform must have no keys but {known}, got {name!r}")
            teacher_transform, scale = Transform(**fields), "teacher_transform['scale']"
        logits, teacher_logits = both_opened(logits, teacher_logits, transform, teacher_transform)
        rows, columns = all_plain(rows, columns)
        return logits, cls(teacher_logits, rows, columns, teacher_transform, scale)


def _targets(logits: Any, targets: Any, weights: Any, spec: DivergenceSpec) -> Any:
    """Return the targets, by default all -100, and check that they and the weights fit the kinds."""
    x = rows_of(logits)
    _checks.check_float(name_of_rows(NAMES, logits), x)
    _checks.check_constant("weights", weights, 'reduction="none" and loss * weights')
    if targets is not None and not spec.wants_targets:
        raise ValueError("targets only apply to kind='ce', which alone reads them")
    if targets is None and spec.wants_targets:
        raise ValueError("targets must be given for kind 'ce', got None")
    return torch.full(x.shape[:-1], IGNORE, dtype=torch.int64, device=x.device) if targets is None else targets


def _tempered(transform: Transform, T: float, name: str) -> Transform:
    """Append a division by the temperature T to the transform, whose scale is the argument ``name``."""
    return replaced(transform, scale=_checks.tempered_scale(transform.scale, T, name))


class Compared(NamedTuple):
    """Validated call of the student and teacher.

    Attributes:
        call: the student's call.
        teacher: the teacher, a constant.
        transform: transform of the teacher's logits.
        scale: name of the argument that has the scale of this transform.
    """

    call: Call
    teacher: Teacher
    transform: Transform
    scale: str

    @classmethod
    def checked(cls, names: _checks.Names, call: Call, raw_teacher: TeacherInput) -> Compared:
        """Validate the teacher of a validated call; ``names``: those of the student's arguments.

        If one of the two models has stored logits, the other one's are stored, too.
        """
        student, logits, teacher_names = call.logits, raw_teacher.logits, TEACHER
        name, teacher_name, x = name_of_rows(names, student), name_of_rows(TEACHER, logits), rows_of(logits)
        shared = isinstance(student, LinearLogits) and student.shares_weight(logits)
        if shared:
            teacher_names = replaced(TEACHER, weight=names.weight, bias=names.bias)
        if isinstance(logits, LinearLogits) and logits.skip_id is not None and raw_teacher.columns is not None:
            raise ValueError(
                f"skip_id of teacher_logits must be None with draft_to_target, got {logits.skip_id}; pass the "
                'student\'s column, teacher_transform={"skip_id": ...}'
            )
        _checks.check_float(teacher_name, x)
        _checks.check_same_device(name, call.x, **{teacher_name: x})
        transform = raw_teacher.transform.checked(vocabulary_of(student))
        logits, composed, teacher_V = checked_rows(teacher_names, logits, call.ids, transform)
        transform = transform if composed is transform else composed.checked(teacher_V)
        call, logits = _same_form(call, logits)
        if isinstance(logits, LinearLogits) and isinstance(call.logits, LinearLogits):
            if compute_dtype(logits) != compute_dtype(call.logits):
                raise ValueError(f"{teacher_name} must have the dtype of {name}, {call.x.dtype}, got {x.dtype}")
        else:
            _checks.check_dtype(teacher_name, rows_of(logits), (call.x.dtype,))
        _check_rows(name, call, teacher_name, x, raw_teacher.rows)
        inverse = _checked_columns(name, call, teacher_name, teacher_V, raw_teacher.columns)
        logits = detached(logits)
        weight, bias, u, U = logits.head if isinstance(logits, LinearLogits) else (None, None, None, None)
        if shared:
            weight = bias = None
        teacher = Teacher(rows_of(logits), weight, bias, u, U, raw_teacher.rows, raw_teacher.columns, inverse)
        return cls(call, teacher, transform, raw_teacher.scale)

    def under(self, spec: DivergenceSpec, T: float, per_row: bool) -> tuple[Call, Teacher, Comparison]:
        """Return the arguments of :func:`divergence_unchecked` for validated options; T: the temperature."""
        spec = replaced(spec, full=False) if self.teacher.columns is None else spec
        options, weighted = self.call.options, self.call.weights is not None
        call = replaced(self.call, options=replaced(options, transform=_tempered(options.transform, T, "scale")))
        return call, self.teacher, Comparison(spec, _tempered(self.transform, T, self.scale), T * T, per_row, weighted)


def _same_form(call: Call, teacher: Logits) -> tuple[Call, Logits]:
    """Return both models as records, or both with stored logits, of the wider dtype if a record requires float32."""
    student = call.logits
    if isinstance(student, LinearLogits) == isinstance(teacher, LinearLogits):
        return call, teacher
    wide = next(z.logits_dtype for z in (student, teacher) if isinstance(z, LinearLogits))
    both = [stored(z) if isinstance(z, LinearLogits) else z for z in (student, teacher)]
    if wide is not None:
        both = [z.to(torch.promote_types(z.dtype, wide)) for z in both]
    return replaced(call, logits=both[0]), both[1]


def _check_rows(name: str, call: Call, teacher_name: str, teacher: Tensor, index: Tensor | None) -> None:
    rows, teacher_rows = tuple(call.rows), teacher.shape[:-1]
    if index is None:
        if tuple(teacher_rows) != rows:
            raise ValueError(
                f"{teacher_name} must have shape {(*rows, '*')}, the rows of {name}, unless teacher_rows is given, "
                f"got {tuple(teacher.shape)}"
            )
        return
    _checks.check_ids("teacher_rows", index)
    _checks.check_shape("teacher_rows", index, rows, f"that of {name} without its last dimension")
    _checks.check_same_device(name, call.x, teacher_rows=index)
    count, check = teacher_rows.numel(), call.options.check_targets
    if math.prod(rows) and not count:
        raise ValueError(f"{teacher_name} must have at least one row, got shape {tuple(teacher.shape)}")
    _checks.check_target_range(check, "teacher_rows", index, count, None, counted=call.weights)


def _checked_columns(name: str, call: Call, teacher_name: str, teacher_V: int, columns: Tensor | None) -> Tensor | None:
    """Validate the teacher's columns; return the student's column of each, or None if both have the same vocabulary."""
    V = vocabulary_of(call.logits)
    if columns is None:
        if teacher_V != V:
            raise ValueError(
                f"{teacher_name} must have the vocabulary of {name}, {V} columns, unless draft_to_target is given, "
                f"got {teacher_V}"
            )
        return None
    _checks.check_ids("draft_to_target", columns)
    _checks.check_shape("draft_to_target", columns, (V,), "an entry for each of the student's columns")
    _checks.check_same_device(name, call.x, draft_to_target=columns)
    known = readable_without_sync(columns)  # on a GPU it costs a sync
    check = True if known else call.options.check_targets
    _checks.check_target_range(check, "draft_to_target", columns, teacher_V, None)
    inverse = _inverse(columns, teacher_V)
    if known and int((inverse != IGNORE).sum()) != len(columns):
        raise ValueError(
            "draft_to_target must hold the distinct ids of the teacher's vocabulary, got repeated entries, which look "
            "like the offsets d2t of EAGLE-3; pass torch.arange(n) + d2t, with n the size of the draft's vocabulary"
        )
    return inverse


def _inverse(columns: Tensor, teacher_vocab_size: int) -> Tensor:
    """Return the student's column of each teacher column, int64 ``[V']``, IGNORE for those without one."""
    columns = columns.to(torch.int64)
    inside = columns.clamp(0, teacher_vocab_size - 1)
    ids = torch.arange(len(columns), device=columns.device).masked_fill_(inside != columns, IGNORE)
    none = torch.full((teacher_vocab_size,), IGNORE, dtype=torch.int64, device=columns.device)
    return none.scatter_reduce_(0, inside, ids, "amax")


def divergence_unchecked(
    call: Call, teacher: Teacher, comparison: Comparison, split: Split | None = None
) -> Divergence:
    """Compute :func:`divergence` of validated arguments."""
    if call.on_ranks or any_dtensor(*teacher):
        from dllm_kernels.distributed.run import on_this_rank

        sums = () if comparison.per_row else ("loss",)
        return on_this_rank(divergence_unchecked, call, sums=sums, teacher=teacher, comparison=comparison)  # type: ignore[no-any-return]
    setup, rows, head = Setup.of(call.logits, call.options, split), call.rows, call.head
    teacher = teacher.flat(from_hidden=head is not None)
    y = flat_ids(call.ids, rows, setup.transform).squeeze(1) if comparison.spec.wants_targets else None
    if call.weights is None:
        weights = torch.ones(rows.numel(), dtype=setup.accum_dtype, device=call.x.device)
    else:
        weights = flat_values(call.weights, setup.accum_dtype)
    constants = teacher, y, weights, comparison, setup
    if head is None:
        results = _Divergence.under(setup)(call.x, *constants)
    else:
        recomputed = comparison.per_row and any(setup.needs) and not setup.needs.frozen_head
        function = _RecomputedDivergence if recomputed else _LinearDivergence
        results = function.under(setup)(flat_rows(call.x), *constants, *head.flat)
    loss, value, acceptance_rate, agree = results[:4]
    loss = loss.view(rows) if comparison.per_row else loss
    return Divergence(loss, value.view(rows), acceptance_rate.view(rows), agree.view(rows))


class _Divergence(Fused):
    """Divergence of rows of logits; saves both sides and statistics of each row, so that backward reads them once."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, teacher: Teacher, ids: Tensor | None, weights: Tensor, comparison: Comparison,
        setup: Setup,
    ) -> Any:  # fmt: skip
        loss, *constant, mean, stats, argmax, norms = _compare_logits(logits, teacher, ids, weights, comparison, setup)
        ctx.save_for_backward(logits, ids, weights, mean, stats, argmax, norms, *teacher)
        ctx.comparison, ctx.setup = comparison, setup
        return outputs(ctx, [loss], constant)

    @staticmethod
    @first_order(SOFTMAX)
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> Any:
        logits, ids, weights, mean, stats, argmax, norms, *teacher = ctx.saved_tensors
        saved = _Saved(mean, stats, argmax, norms)
        (grad,) = _grad_of_logits(
            logits, Teacher(*teacher), ids, weights, grad_loss.contiguous(), saved, ctx.comparison, ctx.setup
        )
        return grad, None, None, None, None, None


class _LinearDivergence(Fused):
    """Weighted sum of divergences, or divergences of rows with a frozen head, from hidden states.

    Forward computes the gradients, and backward scales them. With a loss per row they are those for weights of 1, and
    the row sizes are the weights.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, teacher: Teacher, ids: Tensor | None, weights: Tensor, comparison: Comparison,
        setup: Setup, *head: Any,
    ) -> Any:  # fmt: skip
        parts = Head(*head)
        loss, *constant, _, x, weight, bias, u, U, loss_scale, row_size = _compare_hidden(
            hidden, parts, teacher, ids, weights, comparison, setup
        )
        once = None if comparison.per_row else ("linear_divergence", 'reduction="none"')
        saved = Gradients(x, weight, bias, u, U), loss_scale, row_size
        return outputs(ctx, [loss], constant, keep_gradients(ctx, hidden, parts, saved, setup, once))

    @staticmethod
    @first_order(SOFTMAX_OF_HEAD)
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> Any:
        grad_hidden, *grad_head = scale_gradients(ctx, grad_loss)
        return grad_hidden, None, None, None, None, None, *grad_head


class _RecomputedDivergence(Fused):
    """Divergences of rows from hidden states, with a trained head.

    The gradient of the head is a sum over rows with different upstream gradients, so backward recomputes the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, teacher: Teacher, ids: Tensor | None, weights: Tensor, comparison: Comparison,
        setup: Setup, *head: Any,
    ) -> Any:  # fmt: skip
        loss, value, rate, agree, mean, *_, row_size = _compare_hidden(
            hidden, Head(*head), teacher, ids, weights, comparison, setup
        )
        ctx.save_for_backward(hidden, *head, ids, weights if row_size is None else row_size, mean, *teacher)
        ctx.comparison, ctx.setup = comparison, setup
        return outputs(ctx, [loss], [value, rate, agree])

    @staticmethod
    @first_order(SOFTMAX_OF_HEAD)
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> Any:
        hidden, weight, bias, u, U, ids, weights, mean, *teacher = ctx.saved_tensors
        grad_hidden, *grad_head = _grad_of_hidden(
            hidden, Head(weight, bias, u, U), Teacher(*teacher), ids, weights, grad_loss.contiguous(), mean,
            ctx.comparison, ctx.setup,
        )  # fmt: skip
        return grad_hidden, None, None, None, None, None, *grad_head


class _Saved(NamedTuple):
    """Tensors for backward, besides the logits: the mean of a, :class:`SavedStats`, norms of the teacher."""

    mean_acceptance: Any
    stats: Any
    teacher_argmax: Any
    teacher_norms: Any


def _specs_of_rows(weights: Tensor, comparison: Comparison, setup: Setup) -> list[Spec]:
    """Return the specs of loss, value, acceptance rate, argmax match, and of the mean of a."""
    rows, acc = weights.shape, setup.accum_dtype
    mean = ((), acc) if comparison.spec.lam_of_mean else None
    return [(rows if comparison.per_row else (), acc), (rows, acc), (rows, acc), (rows, torch.bool), mean]


def _specs_of_logits(
    _logits: Tensor, teacher: Teacher, _ids: Any, weights: Tensor, comparison: Comparison, setup: Setup
) -> list[Spec]:
    (N,), acc, needed = weights.shape, setup.accum_dtype, any(setup.needs)
    with_norms = needed and comparison.spec.full and teacher.columns is not None
    specs: list[Spec] = [((N, SAVED_STATS), acc), ((N,), torch.int64)]
    return [
        *_specs_of_rows(weights, comparison, setup), *(specs if needed else (None, None)),
        ((N, 2), acc) if with_norms else None,
    ]  # fmt: skip


@opaque("divergence", _specs_of_logits)
def _compare_logits(
    logits: Tensor, teacher: Teacher, ids: Tensor | None, weights: Tensor, comparison: Comparison, setup: Setup
) -> list[Tensor | None]:
    """Return loss, value, acceptance rate, argmax match, and the fields of :class:`_Saved` that backward reads."""
    spec = comparison.spec
    with no_autocast(logits):
        mean = None
        if spec.lam_of_mean:
            rate = _compare_rows(logits, teacher, ids, weights, None, comparison, setup, with_whole=spec.full)[1]
            mean = _mean_acceptance(rate, weights, setup)
        value, rate, agree, stats, argmax, norms = _compare_rows(
            logits, teacher, ids, weights, mean, comparison, setup, with_whole=True
        )
        loss, value = _weighted(value, weights, comparison)
        if not any(setup.needs):
            return [loss.sum() if not comparison.per_row else loss, value, rate, agree, mean, None, None, None]
        norms = norms if spec.full else None
        return [loss if comparison.per_row else loss.sum(), value, rate, agree, mean, stats, argmax, norms]


def _mean_acceptance(rate: Tensor, weights: Tensor, setup: Setup) -> Tensor:
    """Return the weighted mean of a over the rows of all ranks."""
    total, count = torch.where(weights != 0, weights * rate, 0.0).sum(), weights.sum()
    if setup.split is None:
        return total / count
    return setup.split.all_reduce(total) / setup.split.all_reduce(count)


def _weighted(value: Tensor, weights: Tensor, comparison: Comparison) -> tuple[Tensor, Tensor]:
    """Return (weights * value, value) of each row, both times the ``value_scale``; 0 for rows of weight 0."""
    value = value * comparison.value_scale
    return torch.where(weights != 0, weights * value, 0.0), value


def _compare_rows(
    logits: Tensor, teacher: Teacher, ids: Tensor | None, weights: Tensor, mean: Tensor | None, comparison: Comparison,
    setup: Setup, *, with_whole: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Return value, a, argmax match, both fields of :class:`SavedStats` and the teacher's norms or None, of N rows."""
    logits, compare, norms_of = as_blv(logits), setup.primitives().divergence, None
    if teacher.columns is not None and with_whole:
        norms_of = teacher.norms_function(setup, comparison.teacher_transform)
    pairs = _pairs(logits, teacher, ids, weights, mean, comparison, setup, norms_of)
    if teacher.columns is None:
        ((_, _, request),) = pairs
        *results, saved = compare(logits, request, with_grad=False)
        assert saved is not None
        return *results, *saved, None
    value, acceptance = (weights.new_empty(weights.shape) for _ in range(2))
    stats, norms = (weights.new_empty(*weights.shape, size) for size in (SAVED_STATS, 2))
    agree, argmax = (torch.empty(value.shape, dtype=dtype, device=value.device) for dtype in (torch.bool, torch.int64))
    for here, place, request in pairs:
        *results, saved = compare(logits[place], request, with_grad=False)
        assert saved is not None
        for whole, part in zip((value, acceptance, agree, stats, argmax), (*results, *saved), strict=True):
            whole[here] = part
        if request.whole is not None:
            norms[here] = request.whole.norms
    return value, acceptance, agree, stats, argmax, norms


def _pairs(
    logits: Tensor, teacher: Teacher, ids: Tensor | None, scale: Tensor, mean: Tensor | None, comparison: Comparison,
    setup: Setup, norms_of: Callable[[Tensor, int], Whole] | None,
) -> Iterator[tuple[slice, tuple[slice, slice], DivergenceRequest]]:  # fmt: skip
    """Yield (slice of the N rows, slices of the logits ``[B, L, V]`` for it, the request of these rows).

    All rows are one slice, unless columns of the teacher are copied.
    """
    index, teacher_logits, request = teacher.rows, as_blv(teacher.x), _request(comparison, setup, mean)
    if teacher.columns is None:
        yield slice(None), (slice(None), slice(None)), request(teacher_logits, scale, index, ids)
        return
    # The size depends on all columns of the teacher, not on this rank's, because ranks that share a vocabulary must use
    # the same pieces: each ends in a collective.
    (B, L, _), teacher_V = logits.shape, teacher_logits.shape[-1]
    step = max(1, COPY_BYTES // max(teacher_V * logits.element_size(), 1))
    part_of = setup.primitives().part_of
    first, size = (0, teacher_V) if part_of is None else part_of(teacher_V)
    for b, start in itertools.product(range(B), range(0, L, step)):
        length, n = slice(start, min(start + step, L)), b * L + start
        here = slice(n, n + length.stop - start)
        rows = torch.arange(n, here.stop, device=scale.device) if index is None else index[here]
        whole_rows = rows_at(teacher_logits, rows)
        whole = None if norms_of is None else norms_of(whole_rows[:, first : first + size], first)
        t, y = gather(whole_rows, teacher.columns, 1), None if ids is None else ids[here]
        yield here, (slice(b, b + 1), length), request(t[None], scale[here], targets=y, whole=whole)


def _request(comparison: Comparison, setup: Setup, mean: Tensor | None) -> Callable[..., DivergenceRequest]:
    """Return a function that makes the request of some rows from (teacher, weights, teacher_rows, targets, whole)."""
    return partial(
        DivergenceRequest, comparison.spec, mean_acceptance=mean, transform=setup.transform,
        teacher_transform=comparison.teacher_transform,
    )  # fmt: skip


@opaque("divergence_grad", lambda logits, *_: [(logits.shape, logits.dtype)])
def _grad_of_logits(
    logits: Tensor, teacher: Teacher, ids: Tensor | None, weights: Tensor, grad_loss: Tensor, saved: _Saved,
    comparison: Comparison, setup: Setup,
) -> list[Tensor]:  # fmt: skip
    """Return the gradient of the logits, each row of it times its weight and upstream gradient."""
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    x, out = as_blv(logits), as_blv(grad)
    with no_autocast(logits):
        constant = _constant(ids, comparison, SavedStats(saved.stats, saved.teacher_argmax))
        weights = weights if constant is None else weights.masked_fill(constant, 0)
        scale = _upstream(weights, grad_loss, comparison)
        pairs = _pairs(x, teacher, ids, scale, saved.mean_acceptance, comparison, setup, None)
        for here, place, request in pairs:
            part = SavedStats(saved.stats[here], saved.teacher_argmax[here])
            if saved.teacher_norms is not None:
                request = request._replace(whole=Whole(saved.teacher_norms[here], part.teacher_argmax))
            setup.primitives().divergence_grad(x[place], request, part, out[place])
    return [grad]


def _upstream(weights: Tensor, grad_loss: Tensor, comparison: Comparison) -> Tensor:
    """Return the factor ``[N]`` of the gradient of each row's value."""
    return times_upstream(weights, grad_loss) * comparison.value_scale


def _constant(ids: Tensor | None, comparison: Comparison, saved: SavedStats) -> Tensor | None:
    """Return True for rows without a gradient, such as ignored ones; None if the kinds have no such rows."""
    if not comparison.spec.may_be_constant:
        return None
    no_target = None if ids is None else ids == IGNORE
    return comparison.spec.constant(saved.acceptance, saved.teacher_argmax == IGNORE, no_target)


def _computes_gradients(comparison: Comparison, setup: Setup) -> bool:
    """Return True if forward computes the gradients: if the loss is the sum, or if only rows need a gradient."""
    return any(setup.needs) and (not comparison.per_row or setup.needs.frozen_head)


def _specs_of_hidden(
    hidden: Tensor, head: Head, _teacher: Teacher, _ids: Any, weights: Tensor, comparison: Comparison, setup: Setup
) -> list[Spec]:
    computes, acc = _computes_gradients(comparison, setup), setup.accum_dtype
    scales = computes and setup.needs_loss_scaling and not comparison.per_row
    grads = gradient_specs(hidden, head, setup.needs if computes else NO_GRADIENTS, acc if scales else None)
    reads_size = computes or (any(setup.needs) and comparison.spec.may_be_constant)
    row_size = (weights.shape, acc) if scales or (comparison.per_row and reads_size) else None
    return [*_specs_of_rows(weights, comparison, setup), *grads, ((), acc) if scales else None, row_size]


@opaque("linear_divergence", _specs_of_hidden)
def _compare_hidden(
    hidden: Tensor, head: Head, teacher: Teacher, ids: Tensor | None, weights: Tensor, comparison: Comparison,
    setup: Setup,
) -> list[Tensor | None]:  # fmt: skip
    """Return loss, value, a, argmax match and mean of a; then what :class:`_LinearDivergence` saves, or None."""
    spec, computes = comparison.spec, _computes_gradients(comparison, setup)
    with no_autocast(hidden):
        scale = weights * comparison.value_scale
        row_size = scale if computes and (comparison.per_row or setup.needs_loss_scaling) else None
        factors, loss_scale, needs = NO_FACTORS, None, setup.needs if computes else NO_GRADIENTS
        if comparison.per_row:
            scale = torch.ones_like(weights)
        elif computes:
            scale, factors, loss_scale = float16_scaling(scale, setup)
            factors = factors._replace(hidden=None)  # applied in backward
        teacher, marks = teacher.converted(setup, with_whole=True), row_marks(weights) if comparison.weighted else None
        chunks = _chunks(hidden, head, teacher, marks, setup, needs, factors)
        mean = None
        if spec.lam_of_mean:
            rate = _compare_chunks(
                chunks, teacher, ids, scale, None, comparison, with_grad=False, with_whole=spec.full
            )[1]
            mean = _mean_acceptance(rate, weights, setup)
        value, rate, agree, constant = _compare_chunks(
            chunks, teacher, ids, scale, mean, comparison, with_grad=computes, with_whole=True
        )
        loss, value = _weighted(value, weights, comparison)
        loss = chunks.rows.checked_(loss)  # rows of weight 0 too
        row_size = None if row_size is None else chunks.rows.checked_(row_size)
        if comparison.per_row and any(setup.needs) and constant is not None:  # backward recomputes the others
            row_size = weights.masked_fill(constant, 0)
        grads = chunks.gradients(wide=loss_scale is not None) if computes else Gradients()
        return [
            loss if comparison.per_row else loss.sum(), value, rate, agree, mean, *grads, loss_scale, row_size
        ]  # fmt: skip


def _chunks(
    hidden: Tensor, head: Head, teacher: Teacher, marks: Tensor | None, setup: Setup, needs: NeedsGrad, factors: Any,
    listed: Tensor | None = None,
) -> Chunks:  # fmt: skip
    sizes = [len(head.weight if teacher.weight is None else teacher.weight)]
    if teacher.columns is not None:
        sizes.append(len(teacher.columns))
    others = [(size, setup.chunk_dtype) for size in sizes]
    return Chunks(hidden, head, marks, setup, needs, factors, listed=listed, others=others)


def _compare_chunks(
    chunks: Chunks, teacher: Teacher, ids: Tensor | None, scale: Tensor, mean: Tensor | None, comparison: Comparison, *,
    with_grad: bool, with_whole: bool, with_results: bool = True,
) -> list[Any]:  # fmt: skip
    """Return value, a, argmax match and :func:`_constant` of all rows from one pass over the chunks, or None for each.

    With ``with_grad``, accumulate the gradients for the factors ``scale [N]`` of each row's value. ``with_whole``: see
    :meth:`Teacher.logits_of`.
    """
    rows, acc, device = chunks.rows, chunks.setup.accum_dtype, chunks.logits.device
    marks_constant = not with_grad and comparison.spec.may_be_constant
    dtypes = (acc, acc, torch.bool, torch.bool if marks_constant else None)
    out = [rows.empty(dtype=dtype, device=device) if with_results and dtype else None for dtype in dtypes]
    request = _request(comparison, chunks.setup, mean)
    teacher_logits = teacher.logits_of(chunks, comparison.teacher_transform, with_whole=with_whole)
    for chunk, h, marks, logits in chunks:
        s = rows.take(scale, chunk).masked_fill(marks == IGNORE, 0)
        t, whole = teacher_logits(chunk)
        y = None if ids is None else rows.take(ids, chunk)
        chunk_request = request(t[None], s, targets=y, whole=whole)
        *results, saved = chunks.primitives.divergence(logits[None], chunk_request, with_grad=with_grad)
        if with_grad:
            chunks.add_gradients(chunk, h, marks, logits, s)
        rows.put_each(out, chunk, [*results, None if saved is None else _constant(y, comparison, saved)])
    return rows.finished(out)


@opaque("linear_divergence_grad", lambda hidden, head, *others: gradient_specs(hidden, head, others[-1].needs))
def _grad_of_hidden(
    hidden: Tensor, head: Head, teacher: Teacher, ids: Tensor | None, weights: Tensor, grad_loss: Tensor,
    mean: Tensor | None, comparison: Comparison, setup: Setup,
) -> Gradients:  # fmt: skip
    """Recompute the logits chunk by chunk; return the gradients of hidden states and head."""
    full = comparison.spec.full
    with no_autocast(hidden):
        scale, factors, loss_scale = float16_scaling(_upstream(weights, grad_loss, comparison), setup)
        marks = row_marks(weights)
        teacher = teacher.converted(setup, with_whole=full)
        listed = row_marks(scale)  # rows without an upstream gradient are not recomputed
        chunks = _chunks(hidden, head, teacher, marks, setup, setup.needs, factors, listed)
        _compare_chunks(
            chunks, teacher, ids, scale, mean, comparison, with_grad=True, with_whole=full, with_results=False
        )
        return chunks.gradients(loss_scale)
