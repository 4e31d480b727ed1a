r"""Weighted divergence of student rows to teacher rows, for distillation, without materializing the full logits.

p is the softmax of a row of the student's logits. q is the softmax of a row of the teacher's logits, a constant. a =
sum_v min(p_v, q_v) is the acceptance rate of speculative decoding with the student as the draft model.

From hidden states, each chunk of rows of nonzero weight takes these steps. Two matrix products compute the student's
and the teacher's logits. One pass over both computes the divergence, a and the argmax match, and overwrites the
student's logits with their gradient. One product computes the gradient of the hidden states. If the head is trainable,
one more product computes the gradient of the head. A frozen head that is shared with the teacher therefore takes three
products and the memory of two chunks. The unfused computation by autograd takes five products and several tensors
``[N, V]``.

The kinds and their gradients are defined in ``_backends/torch/_divergence.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from dllm_kernels._backends._divergence import DivergenceSpec
from dllm_kernels._backends._rows import IGNORE
from dllm_kernels._core._divergence import DIVERGENCE
from dllm_kernels._core._divergence_spec import DivergencePlan, checked_spec
from dllm_kernels._core._inputs import RowInputs
from dllm_kernels._core._plan import Options, compute_dtype
from dllm_kernels._core._results import Divergence
from dllm_kernels._core._run import checked, run
from dllm_kernels._utils import _checks
from dllm_kernels._utils._deferred import from_hidden_states
from dllm_kernels._utils._named import replaced
from dllm_kernels._utils._plain import all_plain, readable_without_sync
from dllm_kernels._utils._transform import Transform

SEPARATE_HEAD = _checks.Names("teacher_hidden", "targets", "teacher_weight", "teacher_bias")
SHARED_HEAD = _checks.Names("teacher_hidden", "targets", "weight", "bias")
Kind = str | Mapping[str, float]


@from_hidden_states("linear_divergence")
def divergence(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    kind: Kind = "kl",
    targets: torch.Tensor | None = None,
    teacher_rows: torch.Tensor | None = None,
    draft_to_target: torch.Tensor | None = None,
    teacher: str = "draft",
    temperature: float = 1.0,
    reduction: str = "sum",
    beta: float | None = None,
    floor: float | None = None,
    eta: float | None = None,
    kl_scale: float | None = None,
    alpha: str | None = None,
    base: str | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
    teacher_transform: Mapping[str, Any] | None = None,
    check_targets: bool | None = None,
    backend: str = "auto",
) -> Divergence:
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
    (rounding) count as p <= q. The forward pass saves nine values per row. The backward pass reads the logits of both
    models once and can run more than once.

    Args:
        logits: {logits} The student's logits.
        teacher_logits: ``[..., V]``, of the dtype of ``logits``. Its leading dimensions must be the leading dimensions
            of ``logits`` unless ``teacher_rows`` is given.
        weights: {weights} None: ones.
        kind: a name, or a dict of names and coefficients such as ``{"ce": 0.1, "l1": 0.9}``, all computed in one pass.
            A kind with coefficient 0 is omitted.
        targets: {divergence_targets}
        teacher_rows: ``[...]`` integers: for each student row, the index of its teacher row. The index runs over the
            flattened leading dimensions of the teacher. Indices may repeat, in any order. An out-of-range index gives
            NaN in that row. None: student and teacher have the same layout.
        draft_to_target: {draft_to_target} None: both have the same vocabulary.
        teacher: {teacher}
        temperature: {divergence_temperature}
        reduction: {divergence_reduction}
        beta: {jsd_beta}
        floor: {nla_floor}
        eta: {lk_eta}
        kl_scale: {lk_kl_scale}
        alpha: {lk_alpha}
        base: {lk_base}
        softcap: {softcap}
        scale: {scale} The division by ``temperature`` follows.
        skip_id: {skip_id} It is a column of the student.
        teacher_transform: {teacher_transform}
        check_targets: {check_targets} ``teacher_rows`` and ``draft_to_target`` are checked too.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`Divergence`.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices do not match, a number is out of range, an option belongs to another kind,
            or a kind or the backend is unknown. On CPU, also if ``draft_to_target`` holds a column twice.
        IndexError: a target, row or column is out of range and checked, see ``check_targets``.

    Source: Agarwal et al. 2024, arXiv:2306.13649 (kl, rkl, jsd); Leviathan et al. 2023, arXiv:2211.17192, section 3.2
    (a); arXiv:2602.23881 (tv, nla, lk); Hinton et al. 2015, arXiv:1503.02531 (T squared).
    """
    spec = checked_spec(
        kind, teacher=teacher, beta=beta, floor=floor, eta=eta, kl_scale=kl_scale, alpha=alpha, base=base
    )
    _checks.check_float("logits", logits)
    targets, weights = _defaults(logits, targets, weights, spec)
    options = Options(Transform(softcap, scale, skip_id), IGNORE, check_targets, backend)
    inputs, options = checked(_checks.LOGITS, RowInputs(logits, targets, weights=weights), options)
    _checks.check_float("teacher_logits", teacher_logits)
    _checks.check_dtype("teacher_logits", teacher_logits, (logits.dtype,))
    if teacher_logits.dim() == 0 or teacher_logits.shape[-1] == 0:
        raise ValueError(f"teacher_logits must have shape [..., V] with V >= 1, got {tuple(teacher_logits.shape)}")
    inputs = _with_teacher(inputs, teacher_logits, teacher_rows, draft_to_target)
    return _run_divergence("logits", inputs, options, spec, temperature, reduction, teacher_transform)


def linear_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    extra: _checks.Extra | None = None,
    teacher_weight: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    teacher_extra: _checks.Extra | None = None,
    kind: Kind = "kl",
    targets: torch.Tensor | None = None,
    teacher_rows: torch.Tensor | None = None,
    draft_to_target: torch.Tensor | None = None,
    teacher: str = "draft",
    temperature: float = 1.0,
    reduction: str = "sum",
    beta: float | None = None,
    floor: float | None = None,
    eta: float | None = None,
    kl_scale: float | None = None,
    alpha: str | None = None,
    base: str | None = None,
    chunk_size: int | None = None,
    num_active: int | None = None,
    logits_dtype: torch.dtype | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
    teacher_transform: Mapping[str, Any] | None = None,
    check_targets: bool | None = None,
    backend: str = "auto",
) -> Divergence:
    r"""Compute :func:`divergence` from hidden states and LM heads; the logits of both models exist one chunk at a time.

    The forward pass computes the gradients, for rows of nonzero weight and for inputs that require a gradient. Backward
    scales them in place by the upstream gradient, so it can run only once. A call takes 3 matrix products with a frozen
    head, 4 with a trainable head, and 2 if no gradient is required. ``alpha="mean"`` takes 2 more. With
    ``reduction="none"`` a frozen head takes 3 products. A trainable head takes 6, because backward recomputes the
    logits.

    Args:
        hidden: {hidden} The student's hidden states.
        weight: {weight} It is the student's.
        teacher_hidden: ``[..., D']``, of the dtype of ``hidden``, a constant. Its leading dimensions must be the
            leading dimensions of ``hidden`` unless ``teacher_rows`` is given.
        weights: {weights} None: ones.
        bias: ``[V]``, the bias of ``weight``, or None.
        extra: {extra} It is part of the student's head.
        teacher_weight: ``[V', D']``, the teacher's LM head. None: the teacher shares ``weight`` and ``bias``, but not
            ``extra``.
        teacher_bias: ``[V']``, the bias of ``teacher_weight``, or None.
        teacher_extra: low-rank second part of the teacher's head, (u, one row per row of ``teacher_hidden``; U
            ``[V', r]``), a constant, or None.
        kind: a name in the table of :func:`divergence`, or a dict of names and coefficients, all computed in one pass.
        targets: {divergence_targets}
        teacher_rows: ``[...]`` integers: for each student row, the index of its row of ``teacher_hidden``. The rows are
            copied one chunk at a time. None: student and teacher have the same layout.
        draft_to_target: {draft_to_target} The whole head of the teacher is multiplied. Its columns are copied one chunk
            at a time. None: both have the same vocabulary.
        teacher: {teacher}
        temperature: {divergence_temperature}
        reduction: {divergence_reduction}
        beta: {jsd_beta}
        floor: {nla_floor}
        eta: {lk_eta}
        kl_scale: {lk_kl_scale}
        alpha: {lk_alpha}
        base: {lk_base}
        chunk_size: {chunk_size} It applies to each of the two models.
        num_active: {num_active} A row is active if its weight is not 0.
        logits_dtype: {logits_dtype}
        softcap: {softcap}
        scale: {scale} The division by ``temperature`` follows.
        skip_id: {skip_id} It is a column of the student.
        teacher_transform: {teacher_transform}
        check_targets: {check_targets} ``teacher_rows`` and ``draft_to_target`` are checked too.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`Divergence`. ``loss`` is differentiable in hidden, weight, bias and extra.

    Raises:
        TypeError: as in :func:`divergence`.
        ValueError: as in :func:`divergence`, and ``chunk_size`` < 1.
        IndexError: as in :func:`divergence`.
        RuntimeError: a second backward pass through the same loss, with ``reduction="sum"``.

    Source: as in :func:`divergence`, of the projected hidden states.
    """
    spec = checked_spec(
        kind, teacher=teacher, beta=beta, floor=floor, eta=eta, kl_scale=kl_scale, alpha=alpha, base=base
    )
    _checks.check_float("hidden", hidden)
    targets, weights = _defaults(hidden, targets, weights, spec)
    options = Options(
        Transform(softcap, scale, skip_id), IGNORE, check_targets, backend, chunk_size, num_active, logits_dtype
    )
    inputs, options = checked(
        _checks.LINEAR, RowInputs(hidden, targets, weight, bias, weights=weights), options, extra=extra
    )
    names, head = SEPARATE_HEAD, (teacher_weight, teacher_bias)
    if teacher_weight is None:
        if teacher_bias is not None:
            raise ValueError(
                "teacher_bias must be None without teacher_weight: the student's head is taken with its bias"
            )
        names, head = SHARED_HEAD, (weight, bias)
    _checks.check_rows(names, teacher_hidden, inputs.ids, *head)
    teacher_head_weight: Any = head[0]
    if compute_dtype(teacher_hidden, teacher_head_weight) != compute_dtype(hidden, weight):
        raise ValueError(f"teacher_hidden must have the dtype of hidden, {hidden.dtype}, got {teacher_hidden.dtype}")
    u, second = _checks.checked_extra(names, teacher_hidden, teacher_head_weight, teacher_extra, "teacher_extra")
    inputs = _with_teacher(
        inputs, teacher_hidden, teacher_rows, draft_to_target, teacher_weight=teacher_weight, teacher_bias=teacher_bias,
        teacher_extra_x=u, teacher_extra_weight=second,
    )  # fmt: skip
    return _run_divergence("hidden", inputs, options, spec, temperature, reduction, teacher_transform)


def _defaults(x: torch.Tensor, targets: Any, weights: Any, spec: DivergenceSpec) -> tuple[Any, Any]:
    """Return (targets, weights), by default all -100 and all ones."""
    _checks.check_constant("weights", weights, 'reduction="none" and loss * weights')
    rows = x.shape[:-1]
    if targets is None:
        if spec.wants_targets:
            raise ValueError("targets must be given for kind 'ce', got None")
        targets = torch.full(rows, IGNORE, dtype=torch.int64, device=x.device)
    elif not spec.wants_targets:
        raise ValueError("targets must be None without kind 'ce', which alone reads them")
    return targets, torch.ones(rows, dtype=torch.float32, device=x.device) if weights is None else weights


def _with_teacher(
    inputs: RowInputs, x: torch.Tensor, rows: Any, columns: Any, **others: torch.Tensor | None
) -> RowInputs:
    """Add the teacher's tensors as constants; gather row and column indices that are DTensors."""
    rows, columns = all_plain(rows, columns)
    others = {name: t.detach() if isinstance(t, torch.Tensor) else t for name, t in others.items()}
    return replaced(inputs, teacher_x=x.detach(), teacher_rows=rows, teacher_columns=columns, **others)


def _run_divergence(
    name: str, inputs: RowInputs, options: Options, spec: DivergenceSpec, temperature: Any, reduction: Any,
    teacher_transform: Any,
) -> Divergence:  # fmt: skip
    """Validate the teacher and the remaining options and run the op; ``name`` is the argument with the student rows."""
    x, teacher, rows, columns = inputs.x, inputs.teacher_x, inputs.teacher_rows, inputs.teacher_columns
    teacher_head = inputs.weight if inputs.teacher_weight is None else inputs.teacher_weight
    V = x.shape[-1] if inputs.weight is None else inputs.weight.shape[0]
    teacher_vocab_size = teacher.shape[-1] if teacher_head is None else teacher_head.shape[0]
    _check_rows(name, x, teacher, rows)
    _check_columns(name, x, V, teacher_vocab_size, columns)
    if rows is not None:
        count = teacher.shape[:-1].numel()
        _checks.check_target_range(options.check_targets, "teacher_rows", rows, count, None, counted=inputs.weights)
    if columns is None:
        spec = replaced(spec, full=False)
    else:
        always = True if readable_without_sync(columns) else options.check_targets  # a sync on a GPU
        _checks.check_target_range(always, "draft_to_target", columns, teacher_vocab_size, None)
        inverse = _inverse(columns, teacher_vocab_size)
        _check_distinct(columns, inverse)
        inputs = replaced(inputs, teacher_inverse=inverse)
    per_row = _checks.is_per_row(reduction)
    T = _checks.checked_temperature(temperature)
    own = "scale" if teacher_transform is None else "teacher_transform['scale']"
    transform = _tempered(_checked_transform(teacher_transform, V, options.transform), T, own)
    options = replaced(options, transform=_tempered(options.transform, T, "scale"))
    config = DivergencePlan(spec, transform, T * T, per_row)
    inputs = replaced(inputs, active=inputs.weights)
    return run(DIVERGENCE, inputs, options, divergence=config)  # type: ignore[no-any-return]


def _check_rows(name: str, x: torch.Tensor, teacher: torch.Tensor, index: torch.Tensor | None) -> None:
    rows, teacher_rows = tuple(x.shape[:-1]), tuple(teacher.shape[:-1])
    _checks.check_same_device(name, x, **{f"teacher_{name}": teacher})
    if index is not None:
        _checks.check_ids("teacher_rows", index)
        _checks.check_shape("teacher_rows", index, rows, f"that of {name} without its last dimension")
        _checks.check_same_device(name, x, teacher_rows=index)
        if math.prod(rows) and not math.prod(teacher_rows):
            raise ValueError(f"teacher_{name} must have at least one row, got shape {tuple(teacher.shape)}")
    elif teacher_rows != rows:
        raise ValueError(
            f"teacher_{name} must have shape {(*rows, '*')}, the rows of {name}, unless teacher_rows is given, "
            f"got {tuple(teacher.shape)}"
        )


def _check_columns(name: str, x: torch.Tensor, V: int, teacher_vocab_size: int, columns: torch.Tensor | None) -> None:
    if columns is not None:
        _checks.check_ids("draft_to_target", columns)
        _checks.check_shape("draft_to_target", columns, (V,), "an entry for each of the student's columns")
        _checks.check_same_device(name, x, draft_to_target=columns)
    elif teacher_vocab_size != V:
        raise ValueError(
            f"teacher_{name} must have the vocabulary of {name}, {V} columns, unless draft_to_target is given, "
            f"got {teacher_vocab_size}"
        )


def _check_distinct(columns: torch.Tensor, inverse: torch.Tensor) -> None:
    """Raise ValueError if a teacher column is repeated. Skipped on GPU, because it would cost a sync."""
    if not readable_without_sync(columns) or int((inverse != IGNORE).sum()) == len(columns):
        return
    raise ValueError(
        "draft_to_target must hold the distinct ids of the teacher's vocabulary, got repeated entries, which look like "
        "the offsets d2t of EAGLE-3; pass torch.arange(n) + d2t, with n the size of the draft's vocabulary"
    )


def _inverse(columns: torch.Tensor, teacher_vocab_size: int) -> torch.Tensor:
    """Return the student's column of each teacher column, int64 ``[V']``, IGNORE for those without one."""
    columns = columns.to(torch.int64)
    inside = columns.clamp(0, teacher_vocab_size - 1)
    ids = torch.arange(len(columns), device=columns.device).masked_fill_(inside != columns, IGNORE)
    none = torch.full((teacher_vocab_size,), IGNORE, dtype=torch.int64, device=columns.device)
    return none.scatter_reduce_(0, inside, ids, "amax")


def _checked_transform(given: Any, V: int, students: Transform) -> Transform:
    """Validate the teacher's own transform; default to the student's."""
    if given is None:
        return students
    if not isinstance(given, Mapping):
        raise TypeError(f"teacher_transform must be a dict or None, got {_checks.type_name(given)}")
    for name in given:
        if name not in Transform._fields:
            raise ValueError(f"teacher_transform must have no keys but {', '.join(Transform._fields)}, got {name!r}")
    return _checks.checked_transform(V, **given)


def _tempered(transform: Transform, T: float, name: str) -> Transform:
    """Append a division by the temperature T to the transform, whose scale is the argument ``name``."""
    return replaced(transform, scale=_checks.tempered_scale(transform.scale, T, name))
