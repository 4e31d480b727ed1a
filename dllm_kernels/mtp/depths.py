"""Auxiliary loss: labels of each depth, and the sum over depths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from dllm_kernels import _checks
from dllm_kernels._checks import Extra
from dllm_kernels._graph._named import replaced
from dllm_kernels._graph._plain import all_plain, plain, plain_count, readable_without_sync
from dllm_kernels.head._parameters import gathered_once, head_bias, head_weight, projected
from dllm_kernels.losses._common import Count, shift_left
from dllm_kernels.losses._model_output import ModelOutput
from dllm_kernels.mtp import cross_entropy as base
from dllm_kernels.mtp.cross_entropy import CrossEntropy, FusedLinearCrossEntropy, normalized, position_weights, to_int64
from dllm_kernels.rows._interface import IGNORE
from dllm_kernels.rows._logits import LinearLogits, Logits, map_rows, opened, rows_of, vocabulary_of


@dataclass(frozen=True)
class MTPLossOutput:
    """Auxiliary loss and its parts.

    Attributes:
        loss: 0-d, ``scaling_factor / D`` times the sum of the parts.
        per_depth_losses: D 0-d tensors, unscaled, each with its autograd graph.
        weight_sum: 0-d, detached: sum of the label weights over all depths, before any denominator and the scaling. A
            label that is not ignored has the weight 1, or its ``loss_weights``.
    """

    loss: Tensor
    per_depth_losses: list[Tensor]
    weight_sum: Tensor | None = None


def mtp_labels(labels: Tensor, depth: int, ignore_index: int = IGNORE, seq_idx: Tensor | None = None) -> Tensor:
    """Shift labels left by depth + 1; ignore the end and labels from another packed sub-sequence.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.2: depth k predicts the token k positions further ahead.

    Args:
        labels: ``[B, S]`` or ``[S]`` integers.
        depth: index of the MTP depth, 0 .. D-1.
        ignore_index: label of ignored positions.
        seq_idx: shape of ``labels``; positions with equal values belong to one packed sub-sequence. None: no packing.

    Returns:
        A new int64 tensor of the shape of ``labels``.

    Raises:
        TypeError: ``depth`` or ``ignore_index`` is not an int, or ``seq_idx`` is not a tensor.
        ValueError: ``depth`` is negative, or ``seq_idx`` does not have the shape and device of ``labels``.
    """
    depth = _checks.checked_int("depth", depth, 0)
    ignore_index = _checks.checked_int64("ignore_index", ignore_index)
    labels = to_int64(labels)
    return _labels_of_depth(labels, depth, ignore_index, _sub_sequences(labels, None, seq_idx))


def _labels_of_depth(labels: Tensor, depth: int, ignore_index: int, seq_idx: Tensor | None) -> Tensor:
    """Compute :func:`mtp_labels` of validated arguments."""
    shifted = shift_left(labels, ignore_index, depth + 1)
    if seq_idx is None:
        return shifted
    return torch.where(shift_left(seq_idx, by=depth + 1) == seq_idx, shifted, ignore_index)


def _sub_sequences(labels: Tensor, cu_seqlens: Tensor | None, seq_idx: Tensor | None) -> Tensor | None:
    """Return the index of the packed sub-sequence of every label; ``seq_idx`` takes precedence over ``cu_seqlens``."""
    cu_seqlens, seq_idx = all_plain(cu_seqlens, seq_idx)
    if seq_idx is not None:
        _checks.check_tensor("seq_idx", seq_idx)
        _checks.check_same_device("labels", labels, seq_idx=seq_idx)
        if seq_idx.dim() == 1 and labels.dim() == 2:
            seq_idx = seq_idx.unsqueeze(0).expand(labels.shape[0], -1)
        elif seq_idx.dim() == 2 and labels.dim() == 1 and seq_idx.shape[0] == 1:
            seq_idx = seq_idx.squeeze(0)
        if seq_idx.shape != labels.shape:
            raise ValueError(
                f"seq_idx must have shape {tuple(labels.shape)} like labels, or [S], got {tuple(seq_idx.shape)}; under "
                "pipeline parallelism give each micro-batch its own piece"
            )
        return seq_idx
    if cu_seqlens is None:
        return None
    _checks.check_tensor("cu_seqlens", cu_seqlens)
    boundaries = cu_seqlens.squeeze(0) if cu_seqlens.dim() == 2 and cu_seqlens.shape[0] == 1 else cu_seqlens
    _checks.check_ndim("cu_seqlens", boundaries, 1, "[num_seqs + 1]")
    _checks.check_ids("cu_seqlens", boundaries)
    _checks.check_same_device("labels", labels, cu_seqlens=boundaries)
    boundaries = boundaries.long()  # positions may exceed the range of a narrow dtype
    S = labels.shape[-1]
    if readable_without_sync(boundaries):
        ends = boundaries.tolist()
        if ends[:1] != [0] or ends != sorted(ends) or ends[-1] > S:
            raise ValueError(f"cu_seqlens must rise from 0 to {S}, the length of labels, or less, got {ends}")
    positions = torch.arange(S, device=labels.device)
    # right=True: a boundary is the first position of the new sequence.
    return torch.searchsorted(boundaries[1:].contiguous(), positions, right=True).expand(labels.shape)


@overload
def calculate_mtp_loss(loss_fn: nn.Module, *, return_per_depth: Literal[False] = ..., **options: Any) -> Tensor: ...
@overload
def calculate_mtp_loss(loss_fn: nn.Module, *, return_per_depth: Literal[True], **options: Any) -> MTPLossOutput: ...
def calculate_mtp_loss(  # type: ignore[misc]  # the overloads only distinguish the return types
    loss_fn: nn.Module, *, mtp_per_depth_h: list[Tensor] | None = None,
    mtp_per_depth_logits: list[Logits] | None = None, mtp_per_depth_targets: Sequence[Tensor] | None = None,
    labels: Tensor, model: nn.Module, scaling_factor: float = 0.1, num_label_tokens: Count = None,
    ignore_index: int | None = IGNORE, cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None,
    lm_weight: Tensor | None = None, logits_dtype: torch.dtype | None = None, grad_reduce_group: Any = None,
    loss_weights: Tensor | None = None, return_per_depth: bool = False, lm_bias: Tensor | None = None,
    extra: Extra | None = None,
) -> Tensor | MTPLossOutput:  # fmt: skip
    r"""Compute the multi-token-prediction auxiliary loss.

    .. math:: L = \frac{\text{scaling\_factor}}{D} \sum_{k=0}^{D-1} \text{loss\_fn}(\text{depth } k,\;
              \text{labels shifted left by } k + 1)

    With :class:`FusedLinearCrossEntropy`, or logits that are records of one head, all depths are one call: one
    compaction of the counted rows and one pass over the LM head. A sharded head is gathered once.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv:2412.19437, eq. 24 (each depth) and 25 (their mean,
    scaled).

    Examples:
        >>> logits = [torch.zeros(1, 4, 10), torch.zeros(1, 4, 10)]  # two depths
        >>> # the labels of depth 0 are 1 4 1, those of depth 1 are 4 1
        >>> labels = torch.tensor([[3, 1, 4, 1]])
        >>> options = {
        ...     "labels": labels,
        ...     "model": torch.nn.Module(),
        ...     "num_label_tokens": 4,
        ...     "scaling_factor": 1.0,
        ... }
        >>> loss = calculate_mtp_loss(
        ...     MaskedCrossEntropy(), mtp_per_depth_logits=logits, **options
        ... )
        >>> round((loss / math.log(10)).item(), 4)  # (3 + 2) / 4, over two depths
        0.625

    Args:
        loss_fn: the base loss of the main path.
        mtp_per_depth_h: D tensors ``[B, S, H]`` (``[1, T, H]`` with flat labels), the hidden states of each depth.
        mtp_per_depth_logits: D tensors ``[B, S, V]`` or :class:`~dllm_kernels.ops.LinearLogits` instead; pass exactly
            one of the two.
        mtp_per_depth_targets: D tensors shaped like ``labels``, already shifted and masked; ``cu_seqlens`` and
            ``seq_idx`` must then be None.
        labels: ``[B, S]`` or ``[T]`` integers, not shifted.
        model: model with the LM head: ``get_output_embeddings()``, else a module named ``lm_head``, else a parameter
            with ``lm_head`` in its name.
        scaling_factor: weight of the auxiliary loss, a number or a 0-d tensor, a constant.
        num_label_tokens: divides each sum: global number of counted labels; int or 0-d tensor.
        ignore_index: -100, or the index of ``loss_fn``; in both cases positions without a label are ignored.
        cu_seqlens: ``[num_seqs + 1]`` offsets of packed sub-sequences; a boundary belongs to the new sub-sequence.
        seq_idx: ``[B, S]`` or ``[S]``, equal values within a packed sub-sequence; takes precedence over ``cu_seqlens``.
        lm_weight: ``[V, H]``, the head, if the caller has already gathered it, or if its class is not ``nn.Linear``.
        logits_dtype: dtype of the logits that the base loss computes from hidden states, if it takes that argument:
            see :meth:`FusedLinearCrossEntropy.forward`.
        grad_reduce_group: passed on if the base loss takes it.
        loss_weights: a factor per position of the outputs, shaped like ``labels`` and not shifted. At depth k, the
            factor of position i weights the label of position i + k + 1.
        return_per_depth: return an :class:`MTPLossOutput`. The parts carry their graphs, so with a trainable head the
            logits are computed twice.
        lm_bias: ``[V]``, the bias of the head; None: the bias of the model's head.
        extra: low-rank second part of the head, in its dtype, (u ``[..., r]``, one row per row of hidden states; U
            ``[V, r]``), or None. ``U u`` is added to the logits. u has one row per row of ``mtp_per_depth_h``.

    Returns:
        The scaled loss, 0-d; or :class:`MTPLossOutput`.

    Raises:
        TypeError: an argument that should be a tensor or a bool is not.
        ValueError: both or neither of hidden states and logits are given; ``ignore_index`` differs from the index of
            the loss; shapes do not match; or a base loss that takes hidden states is given logits, or ``lm_weight`` is
            None and the model has no LM head or one with more than weight and bias (an adapter, hooks).
    """
    return_per_depth = _checks.checked_bool("return_per_depth", return_per_depth)
    own_index = base.checked_ignore_index(ignore_index, loss_fn)
    dtype: dict[str, Any] = {"logits_dtype": _checks.checked_logits_dtype(logits_dtype)}
    factor = _checked_factor(scaling_factor)
    labels = to_int64(labels)
    outputs, name = _depth_outputs(loss_fn, mtp_per_depth_h, mtp_per_depth_logits, labels)
    if mtp_per_depth_targets is not None:
        targets = _checked_targets(mtp_per_depth_targets, len(outputs), labels, cu_seqlens, seq_idx)
    else:
        packed = _sub_sequences(labels, cu_seqlens, seq_idx)
        each = [_labels_of_depth(labels, k, own_index, packed) for k in range(len(outputs))]
        targets = [_Target(ids, "labels", k + 1) for k, ids in enumerate(each)]
    low_rank = _extra_of_depths(extra, outputs)
    factor = factor / len(outputs)
    from_hidden, are_logits = base.takes_hidden_states(loss_fn), name == "mtp_per_depth_logits"
    counts: dict[str, Any] = {"num_label_tokens": num_label_tokens, "loss_weights": loss_weights}
    if base.is_plain(loss_fn) and loss_fn.reduction != "none" and (from_hidden or (are_logits and extra is None)):
        if isinstance(loss_fn, FusedLinearCrossEntropy):
            weight = head_weight(model) if lm_weight is None else lm_weight
            bias = head_bias(model) if lm_bias is None else lm_bias
            pairs = zip(outputs, low_rank, strict=True)
            outputs = [loss_fn.record(rows_of(h), weight, bias, pair, logits_dtype) for h, pair in pairs]
        else:
            outputs = [opened(z, loss_fn.transform) for z in outputs]
        parts = _parts(loss_fn, name, outputs, targets, counts)
        return _loss_of_parts(parts, outputs, factor, return_per_depth)
    common = counts | dtype | {"model": model, "grad_reduce_group": grad_reduce_group, "lm_bias": lm_bias}
    explicit_head = not are_logits and not (lm_weight is None and lm_bias is None)
    if from_hidden or explicit_head:
        weight = head_weight(model) if lm_weight is None else lm_weight
        if explicit_head:
            names = replaced(base.NAMES, rows="mtp_per_depth_h[0]")
            _checks.check_rows(names, rows_of(outputs[0]), labels, (weight, lm_bias))
        common["lm_weight"] = gathered_once(weight, rows_of(outputs[0]))
    depths = zip(outputs, targets, low_rank, strict=True)
    losses = [_depth_loss(loss_fn, z, target, are_logits, extra=pair, **common) for z, target, pair in depths]
    total = torch.stack(losses).sum(0) * factor
    if not return_per_depth:
        return total
    plain_ids = [base.as_targets(target.ids, own_index) for target in targets]
    counted = [position_weights(rows_of(outputs[0]), ids, None, loss_weights) for ids in plain_ids]
    return MTPLossOutput(total, losses, torch.stack(counted).sum())


def _checked_factor(scaling_factor: Any) -> float | Tensor:
    """Validate the weight of the auxiliary loss; return a number or a plain 0-d tensor."""
    if scaling_factor is None:
        raise TypeError("scaling_factor must be a number or a 0-d tensor, got NoneType")
    _checks.check_count("scaling_factor", scaling_factor)
    _checks.check_constant("scaling_factor", scaling_factor)
    factor: float | Tensor = plain_count(scaling_factor)
    return factor.detach().reshape(()) if isinstance(factor, Tensor) else factor


_Part = tuple[ModelOutput, Tensor, Tensor, Tensor]


class _Target(NamedTuple):
    """Labels of one depth, the caller's name of the tensor that has them, and their offset in it."""

    ids: Tensor
    name: str
    shift: int = 0

    def check_range(self, loss_fn: CrossEntropy, ids: Tensor, V: int, counted: Tensor | None) -> None:
        """Check the range of the ids in rows whose entry of ``counted`` is not 0; None: all rows."""
        loss_fn.transform.check_targets(None, self.name, ids, V, counted=counted, shift=self.shift)


def _depth_outputs(
    loss_fn: nn.Module, hidden: list[Tensor] | None, logits: list[Logits] | None, labels: Tensor
) -> tuple[list[Logits], str]:
    """Return the outputs of all depths, and the name of the argument that has them."""
    if (hidden is None) == (logits is None):
        got = "neither" if hidden is None else "both"
        raise ValueError(f"exactly one of mtp_per_depth_h and mtp_per_depth_logits must be given, got {got}")
    if logits is not None and base.takes_hidden_states(loss_fn):
        raise ValueError(
            f"mtp_per_depth_h must be given to {_checks.type_name(loss_fn)}, which works from hidden states, got logits"
        )
    name, tensors = ("mtp_per_depth_h", hidden) if logits is None else ("mtp_per_depth_logits", logits)
    outputs: list[Logits] = _as_list(name, tensors)
    if not outputs:
        raise ValueError(f"{name} must hold at least one depth, got an empty list")
    for k, output in enumerate(outputs):
        _checks.check_float(f"{name}[{k}]", rows_of(output))
        if labels.dim() == 1 and rows_of(output).dim() == 3 and rows_of(output).shape[0] == 1:
            outputs[k] = map_rows(output, lambda t: t.squeeze(0))
        x = rows_of(outputs[k])
        if x.shape[:-1] != labels.shape:
            expected = (*labels.shape, *x.shape[-1:])
            raise ValueError(f"{name}[{k}] must have shape {expected} to go with labels, got {tuple(x.shape)}")
    return outputs, name


def _as_list(name: str, tensors: Any) -> list[Any]:
    """Return the tensors of all depths as a list, also those of a tensor ``[D, ...]``."""
    try:
        return list(tensors)
    except TypeError:
        raise TypeError(f"{name} must be a list of tensors, one per depth, got {_checks.type_name(tensors)}") from None


def _extra_of_depths(extra: Extra | None, outputs: list[Logits]) -> list[Extra | None]:
    """Return the low-rank part of the head for each depth, with rows laid out like the depth's output."""
    u, second = _checks.checked_pair("extra", extra, "(u, U)")
    if u is None:
        return [None] * len(outputs)
    if u.shape[:1] != (len(outputs),):
        raise ValueError(
            f"extra[0] must have shape ({len(outputs)}, B, S, r), one tensor of rows per depth, got {tuple(u.shape)}"
        )
    return [(v.squeeze(0) if v.dim() == rows_of(x).dim() + 1 else v, second) for v, x in zip(u, outputs, strict=True)]


def _checked_targets(
    targets: Sequence[Tensor], depths: int, labels: Tensor, cu_seqlens: Tensor | None, seq_idx: Tensor | None
) -> list[_Target]:
    if cu_seqlens is not None or seq_idx is not None:
        raise ValueError("mtp_per_depth_targets must not be combined with cu_seqlens or seq_idx")
    each = _as_list("mtp_per_depth_targets", targets)
    if len(each) != depths:
        raise ValueError(f"mtp_per_depth_targets must hold {depths} tensors, one per depth, got {len(each)}")
    for k, target in enumerate(each):
        _checks.check_ids(f"mtp_per_depth_targets[{k}]", target)
        _checks.check_shape(f"mtp_per_depth_targets[{k}]", target, labels.shape, "that of labels")
    return [_Target(target, f"mtp_per_depth_targets[{k}]") for k, target in enumerate(each)]


def _parts(
    loss_fn: CrossEntropy, name: str, outputs: list[Logits], targets: list[_Target], counts: dict[str, Any]
) -> list[_Part]:
    """Validate all depths; return rows, targets and weights of each, before and over the denominator."""
    base.check_sum_only(loss_fn.reduction, **counts)
    places = [f"{name}[{k}]" for k in range(len(outputs))]
    names = [replaced(base.NAMES, rows=at, hidden=at, targets=t.name) for at, t in zip(places, targets, strict=True)]
    checked = loss_fn.checked(*zip(names, outputs, [target.ids for target in targets], strict=True))
    base.check_loss_weights(targets[0].ids, counts["loss_weights"])
    parts = []
    for rows, target in zip(checked, targets, strict=True):
        ids = base.as_targets(target.ids, loss_fn.ignore_index)
        weights = position_weights(rows.x, ids, None, counts["loss_weights"])
        target.check_range(loss_fn, ids, rows.vocabulary, weights)
        parts.append((rows, ids, weights, normalized(weights, loss_fn.reduction, counts["num_label_tokens"])))
    return parts


def _loss_of_parts(
    parts: list[_Part], outputs: list[Logits], factor: float | Tensor, return_per_depth: bool
) -> Tensor | MTPLossOutput:
    """Compute the loss of validated depths, in one call if their logits are records of one head."""
    records = [z for z in outputs if isinstance(z, LinearLogits)]
    if len(records) == len(outputs) and all(z.same_head(records[0]) for z in records):
        rows, ids, weights, divided = _stacked(parts, records)
        if not return_per_depth:
            return rows.weighted(ids, divided * factor).loss
        sums = (rows.per_row(ids, divided).nll * divided).flatten(1).sum(1)
        return MTPLossOutput(sums.sum() * factor, list(sums.unbind()), weights.sum())
    losses = [rows.weighted(ids, divided).loss for rows, ids, _, divided in parts]
    total = torch.stack(losses).sum(0) * factor
    weights = torch.stack([part[2] for part in parts])
    return MTPLossOutput(total, losses, weights.sum()) if return_per_depth else total


def _stacked(parts: list[_Part], records: list[LinearLogits]) -> _Part:
    """Return the parts of all depths as one, for records of one head."""
    (first, *others), *tensors = zip(*parts, strict=True)
    stacked = first.stack(*others)
    assert stacked is not None  # the caller compared the heads
    bounds: list[Any] = [record.num_active for record in records]
    logits = replaced(stacked.logits, num_active=None if None in bounds else sum(bounds))
    ids, weights, divided = map(torch.stack, tensors)
    return replaced(stacked, logits=logits), ids, weights, divided


def _depth_loss(loss_fn: nn.Module, output: Logits, target: _Target, are_logits: bool, **common: Any) -> Tensor:
    rows: dict[str, Any] = {"hidden_states": output}
    if base.takes_hidden_states(loss_fn):
        V = common["lm_weight"].shape[0]
    else:
        weight, bias = common.pop("lm_weight", None), common.pop("lm_bias")
        logits = output if are_logits else projected(rows_of(output), common["model"], weight, bias)
        rows, V = {"logits": logits}, vocabulary_of(logits)
    if isinstance(loss_fn, CrossEntropy):  # check here, so that the error names the caller's tensor
        counted = plain(common["loss_weights"])
        if counted is not None:
            _checks.check_like("labels", target.ids, loss_weights=counted)
        target.check_range(loss_fn, base.as_targets(target.ids, loss_fn.ignore_index), V, counted)
    return base.calculate_loss(loss_fn, labels=target.ids, **rows, **common)
