r"""Multi-token prediction (MTP): the auxiliary loss, the base losses it runs on, and its pipeline wrapper.

Depth k = 0 .. D-1 predicts the token k + 2 positions ahead of its input, so its labels are the labels shifted left by
k + 1; positions without such a label, and positions whose label lies in another packed sub-sequence, are ignored:

    L_MTP = scaling_factor / D * sum_k CE(depth k, labels shifted by k + 1).

Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2, eq. 24 and 25.
"""

from __future__ import annotations

import inspect
import itertools
import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, overload

import torch
from torch import nn

from dllm_kernels.ops import _checks, linear_token_nll, token_nll, weighted_linear_nll, weighted_nll
from dllm_kernels.ops._head import check_plain_head, projects
from dllm_kernels.ops._plain import all_plain, is_dtensor, plain_count

PADDING = -100
FROM_LOGITS = "take a base loss from logits, such as MaskedCrossEntropy, whose logits come from the head itself"
REDUCTIONS = ("sum", "mean", "none")
Count = int | torch.Tensor | None
LOGITS = _checks.Names("logits", "labels")
HIDDEN = _checks.Names("hidden_states", "labels", "lm_weight", "lm_bias")


@dataclass(frozen=True)
class MTPLossOutput:
    """The auxiliary loss and its parts.

    Attributes:
        loss: 0-d, ``scaling_factor / D`` times the sum of the parts.
        per_depth_losses: D 0-d tensors, unscaled, each with its autograd graph.
    """

    loss: torch.Tensor
    per_depth_losses: list[torch.Tensor]


class MaskedCrossEntropy(nn.Module):
    """Cross-entropy from logits that leaves out ignored and masked positions.

    Args:
        fp32_upcast: the loss is always computed in float32 (float64 for float64 logits). False rounds each token's NLL
            to the dtype of the logits, which is what a cross-entropy computed in that dtype returns.
        ignore_index: label to leave out; -100 is left out as well.
        reduction: "sum", "mean" (over the positions that count; 0 when there are none) or "none".
        backend: "auto", "triton" or "torch".

    Raises:
        TypeError: an ``ignore_index`` that is not an int.
        ValueError: an unknown ``reduction``.
    """

    def __init__(
        self, fp32_upcast: bool = True, ignore_index: int = PADDING, reduction: str = "sum", *, backend: str = "auto"
    ) -> None:
        super().__init__()
        self.fp32_upcast = fp32_upcast
        self.ignore_index = _checked_index(ignore_index)
        self.reduction = _checked_reduction(reduction)
        self.backend = backend

    def forward(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        mask: torch.Tensor | None = None,
        num_label_tokens: Count = None,
        loss_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the loss.

        Args:
            logits: ``[..., V]``, any float dtype.
            labels: ``[...]`` integers; not modified. Leading dimensions may be merged in one of both, as in ``[B, S, V]``
                with ``[B * S]``; ``[S, B]`` beside ``[B, S, V]`` is refused, though it has as many entries.
            mask: one entry a label, in any shape, or one for all, or None; 0 leaves a position out.
            num_label_tokens: divides the sum (a count of 0 gives 0); int or 0-d tensor. Only with ``reduction="sum"``.
            loss_weights: of the shape of ``labels`` or None, a factor per position. Only with ``reduction="sum"``.

        Returns:
            0-d loss; with ``reduction="none"`` one number a position, flattened.

        Raises:
            TypeError: an argument that should be a tensor is not.
            ValueError: shapes, dtypes or devices that do not fit, or an option that needs ``reduction="sum"``.
        """
        _check_sum_only(self.reduction, num_label_tokens=num_label_tokens, loss_weights=loss_weights)
        _check_rows(LOGITS, self.ignore_index, logits, labels)
        rows = _rows_of(logits, labels)
        weights = _position_weights(logits, labels, self.ignore_index, mask, loss_weights).reshape(rows)
        targets = _targets(labels, self.ignore_index).reshape(rows)
        if self.reduction == "none":
            nll = token_nll(logits, targets, active=weights, ignore_index=PADDING, backend=self.backend).nll.flatten()
            return nll if self.fp32_upcast else nll.to(logits.dtype).to(nll.dtype)
        weights = _normalized(weights, self.reduction, num_label_tokens)
        return weighted_nll(
            logits, targets, weights, ignore_index=PADDING, round_nll=not self.fp32_upcast, backend=self.backend
        ).loss


class FusedLinearCrossEntropy(nn.Module):
    """Cross-entropy from hidden states and the LM head; the logits exist one chunk at a time.

    Args:
        ignore_index: label to leave out; -100 is left out as well.
        logit_softcapping: must be 0; soft-capped logits are not supported.
        reduction: "sum", "mean" (over the positions that count; 0 when there are none) or "none".
        impl: accepted so that a configuration written for another implementation still loads; there is one here.
        chunk_size: rows of logits that exist at a time; None chooses.
        backend: "auto", "triton" or "torch".

    Raises:
        TypeError: an ``ignore_index`` or a ``chunk_size`` that is not an int.
        ValueError: an unknown ``reduction``, ``chunk_size`` < 1, or ``logit_softcapping`` other than 0.
    """

    def __init__(
        self,
        ignore_index: int = PADDING,
        logit_softcapping: float = 0,
        reduction: str = "sum",
        impl: str = "cce",
        *,
        chunk_size: int | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if logit_softcapping:
            raise ValueError(
                f"logit_softcapping must be 0, got {logit_softcapping}: soft-capped logits are not supported; "
                "use MaskedCrossEntropy on the capped logits"
            )
        if chunk_size is not None:
            _checks.check_positive_int("chunk_size", chunk_size)
        self.ignore_index = _checked_index(ignore_index)
        self.logit_softcapping = logit_softcapping
        self.reduction = _checked_reduction(reduction)
        self.impl = impl
        self.chunk_size = chunk_size
        self.backend = backend

    def forward(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor,
        lm_weight: torch.Tensor,
        num_label_tokens: Count = None,
        grad_reduce_group: Any = None,
        loss_weights: torch.Tensor | None = None,
        *,
        lm_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the loss.

        Args:
            hidden_states: ``[..., D]``.
            labels: ``[...]`` integers; not modified.
            lm_weight: ``[V, D]``; may be sharded (a DTensor).
            num_label_tokens: divides the sum (a count of 0 gives 0); int or 0-d tensor. Only with ``reduction="sum"``.
            grad_reduce_group: accepted for compatibility and not needed: a sharded head carries its own mesh, over which
                its gradient is reduced.
            loss_weights: ``[...]`` or None, a factor per position. Only with ``reduction="sum"``.
            lm_bias: ``[V]`` or None.

        Returns:
            0-d loss; with ``reduction="none"`` one number a position, flattened.

        Raises:
            TypeError: an argument that should be a tensor is not.
            ValueError: shapes, dtypes or devices that do not fit, or an option that needs ``reduction="sum"``.
        """
        _check_sum_only(self.reduction, num_label_tokens=num_label_tokens, loss_weights=loss_weights)
        _check_rows(HIDDEN, self.ignore_index, hidden_states, labels, lm_weight, lm_bias)
        _checks.check_shape("labels", labels, hidden_states.shape[:-1], "that of hidden_states without its last dimension")
        weights = _position_weights(hidden_states, labels, self.ignore_index, None, loss_weights)
        targets = _targets(labels, self.ignore_index)
        options: dict[str, Any] = {"bias": lm_bias, "chunk_size": self.chunk_size, "backend": self.backend}
        if self.reduction == "none":
            return linear_token_nll(hidden_states, lm_weight, targets, active=weights, **options).nll.flatten()
        weights = _normalized(weights, self.reduction, num_label_tokens)
        return weighted_linear_nll(hidden_states, lm_weight, targets, weights, **options).loss


def _checked_reduction(reduction: str) -> str:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    return reduction


def _check_rows(
    names: _checks.Names, ignore_index: int, rows: torch.Tensor, labels: torch.Tensor, *head: torch.Tensor | None
) -> None:
    V = _checks.check_rows(names, rows, labels, *head)
    _checks.check_target_range(None, names.targets, _targets(labels, ignore_index), V)


def _checked_index(ignore_index: int) -> int:
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, numbers.Integral):
        raise TypeError(f"ignore_index must be an int, got {type(ignore_index).__name__}")
    return int(ignore_index)


def _rows_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Size:
    """Shape of the rows of logits, which that of labels equals once adjacent dimensions of the one are merged."""
    _checks.check_ids("labels", labels)
    rows, shape = logits.shape[:-1], labels.shape
    if shape != rows and not (rows.numel() == shape.numel() and (_merges(rows, shape) or _merges(shape, rows))):
        raise ValueError(
            f"labels must have shape {tuple(rows)} like logits without its last dimension, or that with dimensions merged, "
            f"got {tuple(shape)}"
        )
    _checks.check_same_device("logits", logits, labels=labels)
    return rows


def _merges(fine: torch.Size, coarse: torch.Size) -> bool:
    """Whether dimensions of ``fine`` that lie side by side, merged, are ``coarse``; both have as many entries."""
    ends = list(itertools.accumulate(fine, operator.mul, initial=1))
    return all(end in ends for end in itertools.accumulate(coarse, operator.mul))


def _check_sum_only(reduction: str, **options: object) -> None:
    for name, value in options.items():
        if value is not None and reduction != "sum":
            raise ValueError(f"{name} is only supported when reduction is 'sum', got reduction={reduction!r}")
    _checks.check_count("num_label_tokens", options.get("num_label_tokens"))
    _checks.check_constant("num_label_tokens", options.get("num_label_tokens"))


def _position_weights(
    like: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    mask: torch.Tensor | None,
    loss_weights: torch.Tensor | None,
) -> torch.Tensor:
    """Weight of every position, 0 where its label is ignored or its mask is 0; in the dtype of sums over ``like``."""
    mask, loss_weights = all_plain(mask, loss_weights)
    labels = _widened(labels)
    dtype = torch.promote_types(like.dtype, torch.float32)
    counts = (labels != ignore_index) & (labels != PADDING)
    if mask is not None:
        _checks.check_tensor("mask", mask)
        mask = mask.reshape(-1).expand(labels.numel()) if mask.numel() == 1 else mask.reshape(-1)
        _checks.check_mask("mask", mask, (labels.numel(),), "one entry per label")
        _checks.check_same_device("labels", labels, mask=mask)
        counts = counts & (mask.reshape(labels.shape) != 0)
    if loss_weights is None:
        return counts.to(dtype)
    _checks.check_mask("loss_weights", loss_weights, labels.shape, "that of labels")
    _checks.check_same_device("labels", labels, loss_weights=loss_weights)
    _checks.check_constant("loss_weights", loss_weights)
    return torch.where(counts, loss_weights.detach().to(dtype), 0.0)


def _targets(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Labels as the ops take them, -100 where they are ignored; a label that the loss ignores is no bad target."""
    labels = _widened(labels)
    return labels if ignore_index == PADDING else labels.masked_fill(labels == ignore_index, PADDING)


def _widened(labels: torch.Tensor) -> torch.Tensor:
    """Labels, whole, as int64: a narrower type may not hold -100, and 156 equals it as uint8."""
    (labels,) = all_plain(labels)
    _checks.check_ids("labels", labels)
    return labels.long()


def _normalized(weights: torch.Tensor, reduction: str, num_label_tokens: Count) -> torch.Tensor:
    """Weights over their denominator; a denominator of 0 gives weights of 0, never NaN."""
    if reduction == "mean":
        return weights / weights.sum().clamp(min=1)
    count = plain_count(num_label_tokens)
    if count is None:
        return weights
    if isinstance(count, torch.Tensor):
        count = count.detach().reshape(()).to(weights.dtype)
        return weights / torch.where(count != 0, count, torch.inf)
    return weights / count if count else torch.zeros_like(weights)


def calculate_loss(loss_fn: nn.Module, **kwargs: Any) -> torch.Tensor:
    """Call a base loss with what it takes: logits, or hidden states and the LM head.

    Args:
        loss_fn: a loss whose ``forward`` takes ``lm_weight`` (then it gets hidden states and the head) or ``logits``.
        **kwargs: ``labels``; ``logits`` or ``hidden_states``; ``model`` (for its LM head), ``lm_weight`` (the head, when
            the caller has it already), ``num_label_tokens``, ``loss_weights``, ``grad_reduce_group``, ``logits_dtype``.
            ``grad_reduce_group`` and ``logits_dtype`` are passed on where ``loss_fn`` takes them.

    Returns:
        The loss, 0-d.

    Raises:
        ValueError: the loss needs an LM head and the model has none, or one that is more than its weight and bias (an
            adapter, hooks) and not handed over as ``lm_weight``; its input is missing; or it does not take what its value
            depends on: a count, weights, the bias of the LM head.
    """
    labels = _normalized_labels(_required(kwargs, "labels", loss_fn), _ignore_index(loss_fn))
    offered: dict[str, Any] = {
        "labels": labels,
        **{k: kwargs.get(k) for k in ("num_label_tokens", "loss_weights", "grad_reduce_group", "logits_dtype")},
    }
    if not _is_linear(loss_fn):
        offered["logits"] = _required(kwargs, "logits", loss_fn)
        return _call(loss_fn, offered)
    model, weight = kwargs.get("model"), kwargs.get("lm_weight")
    offered["hidden_states"] = _required(kwargs, "hidden_states", loss_fn)
    offered["lm_weight"] = _head_weight(model) if weight is None else weight
    offered["lm_bias"] = _head_bias(model)
    return _call(loss_fn, offered)


def _required(kwargs: Mapping[str, Any], name: str, loss_fn: nn.Module) -> Any:
    if kwargs.get(name) is None:
        raise ValueError(f"{name} is needed by {type(loss_fn).__name__}, got None")
    return kwargs[name]


def _call(loss_fn: nn.Module, offered: Mapping[str, Any]) -> torch.Tensor:
    """Call with the arguments that the loss takes; those that are None are left to its defaults."""
    parameters = _forward_parameters(loss_fn)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = {k: v for k, v in offered.items() if v is not None}
    known = given if takes_all else {k: v for k, v in given.items() if k in parameters}
    for name in ("num_label_tokens", "loss_weights", "lm_bias"):
        if name in given and name not in known:
            raise ValueError(f"{name} must be None for {type(loss_fn).__name__}, whose forward does not take it")
    loss: torch.Tensor = loss_fn(**known)
    return loss


def _forward_parameters(loss_fn: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Parameters of ``forward``, of the class where the loss has none of its own.

    A method bound to a loss that is made inside a compiled function cannot be inspected there.
    """
    forward = vars(loss_fn).get("forward")
    return inspect.signature(type(loss_fn).forward if forward is None else forward).parameters


def _is_linear(loss_fn: nn.Module) -> bool:
    """Whether the loss takes hidden states and the LM head instead of logits."""
    return "lm_weight" in _forward_parameters(loss_fn)


def _is_our_linear(loss_fn: nn.Module) -> TypeGuard[FusedLinearCrossEntropy]:
    """Whether calling the loss is calling :class:`FusedLinearCrossEntropy` and nothing more: not overridden, no hooks."""
    if not isinstance(loss_fn, FusedLinearCrossEntropy) or type(loss_fn).forward is not FusedLinearCrossEntropy.forward:
        return False
    hooks = (loss_fn._forward_hooks, loss_fn._forward_pre_hooks, loss_fn._backward_hooks, loss_fn._backward_pre_hooks)
    return "forward" not in vars(loss_fn) and not any(hooks)


def _ignore_index(loss_fn: nn.Module) -> int:
    value = getattr(loss_fn, "ignore_index", PADDING)
    return int(value) if isinstance(value, numbers.Integral) else PADDING


def _checked_ignore_index(ignore_index: int | None, loss_fn: nn.Module) -> int:
    """The loss's own ``ignore_index``; -100 and None always fit, since -100 is left out whatever the loss's is."""
    own = _ignore_index(loss_fn)
    if ignore_index not in (None, PADDING, own):
        raise ValueError(f"ignore_index must be {PADDING} or that of loss_fn, {own}, got {ignore_index}")
    return own


def _normalized_labels(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Labels with the padding of the data set, -100, written as the loss's own ``ignore_index``."""
    return labels if ignore_index == PADDING else labels.long().masked_fill(labels.long() == PADDING, ignore_index)


def _unwrapped(model: nn.Module | None) -> nn.Module | None:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _head_module(model: nn.Module | None) -> nn.Module | None:
    """The LM head: ``get_output_embeddings()``, else a module named ``lm_head`` that has a weight or can be called."""
    model = _unwrapped(model)
    if model is None:
        return None
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    if isinstance(head, nn.Module):
        return head
    named = (m for name, m in model.named_modules() if name.split(".")[-1] == "lm_head")
    return next((m for m in named if hasattr(m, "weight") or projects(m)), None)


def _head_weight(model: nn.Module | None) -> torch.Tensor:
    """The LM head's weight ``[V, D]``, to be used in its place: of the module, else of a parameter named ``lm_head``."""
    head = _head_module(model)
    if head is not None:
        check_plain_head(head, FROM_LOGITS)
        if not isinstance(weight := getattr(head, "weight", None), torch.Tensor):
            raise ValueError(f"the LM head must have a weight, got {type(head).__name__}; {FROM_LOGITS}")
        return weight
    model = _unwrapped(model)
    parameters = () if model is None else model.named_parameters(remove_duplicate=False)
    for name, parameter in parameters:
        if "lm_head" in name and not name.endswith("bias"):
            _check_owners(model, name)
            return parameter
    raise ValueError(
        "model has no LM head: it needs get_output_embeddings(), a module named lm_head or a parameter with lm_head in "
        f"its name; got {type(model).__name__}"
    )


def _check_owners(model: nn.Module | None, name: str) -> None:
    """Raise unless a parameter stands for the modules around it, from the one with ``lm_head`` in its name inwards."""
    module, within = model, False
    for part in name.split(".")[:-1]:
        module, within = getattr(module, part), within or "lm_head" in part
        if within:
            check_plain_head(module, FROM_LOGITS)


def _head_bias(model: nn.Module | None) -> torch.Tensor | None:
    bias = getattr(_head_module(model), "bias", None)
    return bias if isinstance(bias, torch.Tensor) else None


def _logits_of(hidden: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """Logits through the head module, whose own forward gathers it where it is sharded."""
    head = _head_module(model)
    if head is not None and projects(head):
        logits: torch.Tensor = head(hidden)
        return logits
    return nn.functional.linear(hidden, _head_weight(model), _head_bias(model))


def _gathered_once(weight: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """A sharded head gathered for several uses, so that they share one gather and one reduction of its gradient."""
    if not is_dtensor(weight):
        return weight
    from dllm_kernels.distributed.fsdp import gather_head

    gathered: torch.Tensor = gather_head(weight, hidden)
    return gathered


def mtp_labels(
    labels: torch.Tensor, depth: int, ignore_index: int = PADDING, seq_idx: torch.Tensor | None = None
) -> torch.Tensor:
    """Labels of one depth: shifted left by depth + 1, ignored where there is none or it is of another sub-sequence.

    Args:
        labels: ``[B, S]`` or ``[S]`` integers.
        depth: 0 .. D-1.
        ignore_index: what marks a position that does not count.
        seq_idx: as ``labels``; equal numbers mark one packed sub-sequence. None: no packing.

    Returns:
        A new int64 tensor of the shape of ``labels``.
    """
    labels = _widened(labels)
    shift = min(depth + 1, labels.shape[-1])
    shifted = nn.functional.pad(labels[..., shift:], (0, shift), value=ignore_index)
    if seq_idx is None:
        return shifted
    source = nn.functional.pad(seq_idx[..., shift:], (0, shift))
    return torch.where(source == seq_idx, shifted, ignore_index)


def _sub_sequences(
    labels: torch.Tensor, cu_seqlens: torch.Tensor | None, seq_idx: torch.Tensor | None
) -> torch.Tensor | None:
    """Index of the packed sub-sequence of every label; ``seq_idx`` wins over ``cu_seqlens``."""
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
    boundaries = boundaries.long()  # a short type may hold them, and not every position
    positions = torch.arange(labels.shape[-1], device=labels.device)
    # right=True: the position of a boundary is the first of the new sequence.
    return torch.searchsorted(boundaries[1:].contiguous(), positions, right=True).expand(labels.shape)


@overload
def calculate_mtp_loss(
    loss_fn: nn.Module,
    *,
    mtp_per_depth_h: list[torch.Tensor] | None = ...,
    mtp_per_depth_logits: list[torch.Tensor] | None = ...,
    mtp_per_depth_targets: Sequence[torch.Tensor] | None = ...,
    labels: torch.Tensor,
    model: nn.Module,
    scaling_factor: float = ...,
    num_label_tokens: Count = ...,
    ignore_index: int | None = ...,
    cu_seqlens: torch.Tensor | None = ...,
    seq_idx: torch.Tensor | None = ...,
    lm_weight: torch.Tensor | None = ...,
    logits_dtype: torch.dtype | None = ...,
    grad_reduce_group: Any = ...,
    loss_weights: torch.Tensor | None = ...,
    return_per_depth: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def calculate_mtp_loss(
    loss_fn: nn.Module,
    *,
    mtp_per_depth_h: list[torch.Tensor] | None = ...,
    mtp_per_depth_logits: list[torch.Tensor] | None = ...,
    mtp_per_depth_targets: Sequence[torch.Tensor] | None = ...,
    labels: torch.Tensor,
    model: nn.Module,
    scaling_factor: float = ...,
    num_label_tokens: Count = ...,
    ignore_index: int | None = ...,
    cu_seqlens: torch.Tensor | None = ...,
    seq_idx: torch.Tensor | None = ...,
    lm_weight: torch.Tensor | None = ...,
    logits_dtype: torch.dtype | None = ...,
    grad_reduce_group: Any = ...,
    loss_weights: torch.Tensor | None = ...,
    return_per_depth: Literal[True],
) -> MTPLossOutput: ...
def calculate_mtp_loss(
    loss_fn: nn.Module,
    *,
    mtp_per_depth_h: list[torch.Tensor] | None = None,
    mtp_per_depth_logits: list[torch.Tensor] | None = None,
    mtp_per_depth_targets: Sequence[torch.Tensor] | None = None,
    labels: torch.Tensor,
    model: nn.Module,
    scaling_factor: float = 0.1,
    num_label_tokens: Count = None,
    ignore_index: int | None = PADDING,
    cu_seqlens: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    lm_weight: torch.Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    grad_reduce_group: Any = None,
    loss_weights: torch.Tensor | None = None,
    return_per_depth: bool = False,
) -> torch.Tensor | MTPLossOutput:
    r"""Compute the multi-token-prediction auxiliary loss.

    .. math:: L = \frac{\text{scaling\_factor}}{D} \sum_{k=0}^{D-1} \text{loss\_fn}(\text{depth } k,\;
              \text{labels shifted left by } k + 1)

    With :class:`FusedLinearCrossEntropy` all depths go through one call: one compaction of the rows that count, one pass
    over the LM head, which is gathered once where it is sharded.

    Args:
        loss_fn: the base loss, as on the main path.
        mtp_per_depth_h: D tensors ``[B, S, H]`` (``[1, T, H]`` with flat labels), the hidden states of each depth.
        mtp_per_depth_logits: D tensors ``[B, S, V]`` instead; exactly one of both.
        mtp_per_depth_targets: D tensors shaped like ``labels``, shifted and masked already; then neither ``cu_seqlens``
            nor ``seq_idx`` may be given.
        labels: ``[B, S]`` or ``[T]`` integers, not shifted.
        model: owns the LM head: ``get_output_embeddings()``, else a module named ``lm_head``, else a parameter with
            ``lm_head`` in its name.
        scaling_factor: weight of the auxiliary loss.
        num_label_tokens: global number of labels that count, which divides each sum; int or 0-d tensor.
        ignore_index: -100, or that of ``loss_fn``; either way positions without a label do not count.
        cu_seqlens: ``[num_seqs + 1]`` offsets of packed sub-sequences; a boundary belongs to the new one.
        seq_idx: ``[B, S]`` or ``[S]``, equal numbers within a packed sub-sequence; wins over ``cu_seqlens``.
        lm_weight: ``[V, H]``, the head, when the caller has gathered it already or vouches for one of another class.
        logits_dtype: passed on to a base loss that takes it.
        grad_reduce_group: passed on to a base loss that takes it.
        loss_weights: a factor per label, shaped like ``labels``.
        return_per_depth: return an :class:`MTPLossOutput`. The parts carry their graphs, so with a trainable head the
            logits are then made twice.

    Returns:
        The scaled loss, 0-d; or :class:`MTPLossOutput`.

    Raises:
        ValueError: both or none of hidden states and logits; an ``ignore_index`` other than the loss's; shapes that do
            not fit; a base loss that takes hidden states given logits, or given a model without an LM head or with one
            that is more than its weight and bias (an adapter, hooks) and not handed over as ``lm_weight``.
    """
    own_index = _checked_ignore_index(ignore_index, loss_fn)
    _checks.check_ids("labels", labels)
    labels = _widened(labels)
    outputs, are_logits = _depth_outputs(loss_fn, mtp_per_depth_h, mtp_per_depth_logits, labels)
    if mtp_per_depth_targets is not None:
        targets = _given_targets(mtp_per_depth_targets, len(outputs), labels, cu_seqlens, seq_idx)
        origins = [(f"mtp_per_depth_targets[{k}]", 0) for k in range(len(outputs))]
    else:
        packed = _sub_sequences(labels, cu_seqlens, seq_idx)
        targets = [mtp_labels(labels, k, own_index, packed) for k in range(len(outputs))]
        origins = [("labels", k + 1) for k in range(len(outputs))]
    factor = scaling_factor / len(outputs)
    common: dict[str, Any] = {"num_label_tokens": num_label_tokens, "loss_weights": loss_weights}
    if _is_our_linear(loss_fn) and loss_fn.reduction != "none":
        weight = _head_weight(model) if lm_weight is None else lm_weight
        bias = _head_bias(model)
        for k, (output, target, origin) in enumerate(zip(outputs, targets, origins, strict=True)):
            names = HIDDEN._replace(rows=f"mtp_per_depth_h[{k}]", targets=origin[0])
            _checks.check_rows(names, output, target, weight, bias)
            _check_targets(loss_fn, target, weight.shape[0], *origin)
        total, losses = _fused_depths(loss_fn, outputs, targets, weight, bias, factor, return_per_depth, **common)
    else:
        common |= {"logits_dtype": logits_dtype, "grad_reduce_group": grad_reduce_group, "model": model}
        if _is_linear(loss_fn):
            common["lm_weight"] = _gathered_once(_head_weight(model) if lm_weight is None else lm_weight, outputs[0])
        losses = [
            _depth_loss(loss_fn, output, target, are_logits, origin, **common)
            for output, target, origin in zip(outputs, targets, origins, strict=True)
        ]
        total = torch.stack(losses).sum(0) * factor
    return MTPLossOutput(total, losses) if return_per_depth else total


def _depth_outputs(
    loss_fn: nn.Module,
    hidden: list[torch.Tensor] | None,
    logits: list[torch.Tensor] | None,
    labels: torch.Tensor,
) -> tuple[list[torch.Tensor], bool]:
    if (hidden is None) == (logits is None):
        got = "neither" if hidden is None else "both"
        raise ValueError(f"exactly one of mtp_per_depth_h and mtp_per_depth_logits must be given, got {got}")
    if logits is not None and _is_linear(loss_fn):
        raise ValueError(
            f"mtp_per_depth_h must be given to {type(loss_fn).__name__}, which works from hidden states, got logits"
        )
    outputs = list(hidden if hidden is not None else logits or [])
    if not outputs:
        raise ValueError("mtp_per_depth_h or mtp_per_depth_logits must hold at least one depth, got an empty list")
    for k, output in enumerate(outputs):
        _checks.check_float(f"mtp_per_depth_{'h' if logits is None else 'logits'}[{k}]", output)
    if labels.dim() == 1:
        outputs = [o.squeeze(0) if o.dim() == 3 and o.shape[0] == 1 else o for o in outputs]
    for k, output in enumerate(outputs):
        if output.shape[:-1] != labels.shape:
            raise ValueError(
                f"the output of MTP depth {k} must have shape {(*labels.shape, output.shape[-1])} to go with labels, "
                f"got {tuple(output.shape)}"
            )
    return outputs, logits is not None


def _given_targets(
    targets: Sequence[torch.Tensor],
    depths: int,
    labels: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
) -> list[torch.Tensor]:
    if cu_seqlens is not None or seq_idx is not None:
        raise ValueError("mtp_per_depth_targets must not be combined with cu_seqlens or seq_idx")
    if len(targets) != depths:
        raise ValueError(f"mtp_per_depth_targets must hold {depths} tensors, one per depth, got {len(targets)}")
    for k, target in enumerate(targets):
        _checks.check_ids(f"mtp_per_depth_targets[{k}]", target)
        _checks.check_shape(f"mtp_per_depth_targets[{k}]", target, labels.shape, "that of labels")
    return list(targets)


def _check_targets(loss_fn: nn.Module, targets: torch.Tensor, V: int, name: str, shift: int) -> None:
    """On request, look for bad targets of one depth; the message says where the caller's own tensor has them."""
    if isinstance(loss_fn, MaskedCrossEntropy | FusedLinearCrossEntropy):
        _checks.check_target_range(None, name, _targets(targets, loss_fn.ignore_index), V, shift=shift)


def _depth_loss(
    loss_fn: nn.Module,
    output: torch.Tensor,
    labels: torch.Tensor,
    are_logits: bool,
    origin: tuple[str, int],
    **common: Any,
) -> torch.Tensor:
    if _is_linear(loss_fn):
        _check_targets(loss_fn, labels, common["lm_weight"].shape[0], *origin)
        return calculate_loss(loss_fn, hidden_states=output, labels=labels, **common)
    logits = output if are_logits else _logits_of(output, common["model"])
    _check_targets(loss_fn, labels, logits.shape[-1], *origin)
    return calculate_loss(loss_fn, logits=logits, labels=labels, **common)


def _fused_depths(
    loss_fn: FusedLinearCrossEntropy,
    outputs: list[torch.Tensor],
    targets: list[torch.Tensor],
    lm_weight: torch.Tensor,
    lm_bias: torch.Tensor | None,
    factor: float,
    return_per_depth: bool,
    *,
    num_label_tokens: Count,
    loss_weights: torch.Tensor | None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """All depths stacked along a new first dimension and sent through one call."""
    _check_sum_only(loss_fn.reduction, num_label_tokens=num_label_tokens, loss_weights=loss_weights)
    weights = [
        _normalized(
            _position_weights(outputs[0], t, loss_fn.ignore_index, None, loss_weights),
            loss_fn.reduction,
            num_label_tokens,
        )
        for t in targets
    ]
    targets = [_targets(t, loss_fn.ignore_index) for t in targets]
    hidden, labels, row_weights = torch.stack(outputs), torch.stack(targets), torch.stack(weights)
    options: dict[str, Any] = {"bias": lm_bias, "chunk_size": loss_fn.chunk_size, "backend": loss_fn.backend}
    if not return_per_depth:
        return weighted_linear_nll(hidden, lm_weight, labels, row_weights * factor, **options).loss, []
    nll = linear_token_nll(hidden, lm_weight, labels, active=row_weights, **options).nll
    losses = (nll * row_weights).flatten(1).sum(1)
    return losses.sum() * factor, list(losses.unbind())


def mtp_loss_scaling_factor(model: nn.Module, default: float = 0.1) -> float:
    """``model.mtp_config.loss_scaling_factor``, or the default where the model does not say."""
    config = getattr(model, "mtp_config", None)
    return default if config is None else float(getattr(config, "loss_scaling_factor", default))


class PipelineCausalLMLoss(nn.Module):
    """The loss of a pipeline schedule's last stage: the main cross-entropy, and MTP while the model trains.

    Each micro-batch brings its own ``seq_idx`` as the last element of the stage's output, a 2-d int32 tensor, which is
    how it reaches the loss whatever the schedule.

    Args:
        loss_fn: the base loss.
        model: the last stage's model, for its LM head, ``training`` and MTP configuration.
        scaling_factor: weight of MTP; None takes the output's ``mtp_loss_scaling_factor``, else the model's
            ``mtp_config.loss_scaling_factor``, else 0.1.
        ignore_index: -100, or that of ``loss_fn``.
        grad_reduce_group: passed on to a base loss that takes it.

    Raises:
        ValueError: an ``ignore_index`` other than the loss's.
    """

    def __init__(
        self,
        loss_fn: nn.Module,
        model: nn.Module,
        scaling_factor: float | None = None,
        ignore_index: int | None = PADDING,
        grad_reduce_group: Any = None,
    ) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.model = model
        self.scaling_factor = scaling_factor
        self.ignore_index = _checked_ignore_index(ignore_index, loss_fn)
        self.grad_reduce_group = grad_reduce_group
        self.cu_seqlens: torch.Tensor | None = None

    @staticmethod
    def _extract_seq_idx_tail(output: Any) -> tuple[torch.Tensor | None, Any]:
        """(seq_idx, the rest): the trailing 2-d int32 tensor of a tuple, else (None, output)."""
        if isinstance(output, tuple) and output:
            last = output[-1]
            if isinstance(last, torch.Tensor) and last.dtype == torch.int32 and last.dim() == 2:
                return last, output[:-1]
        return None, output

    def forward(self, output: Any, labels: torch.Tensor) -> torch.Tensor:
        """Compute the loss of one micro-batch.

        Args:
            output: logits ``[B, S, V]`` (hidden states ``[B, S, H]`` where ``loss_fn`` takes those); an object or mapping
                with ``logits`` and, for MTP, ``mtp_per_depth_h`` or ``mtp_per_depth_logits`` and
                ``mtp_loss_scaling_factor``; or a tuple ``(logits, *mtp_per_depth_h[, seq_idx])`` with ``seq_idx`` a
                ``[B, S]`` int32 tensor.
            labels: ``[B, S]`` integers, not shifted for MTP.

        Returns:
            0-d loss.

        Raises:
            ValueError: a base loss that takes hidden states given a tuple, or a head that is more than its weight and bias.
        """
        seq_idx, output = self._extract_seq_idx_tail(output)
        linear = _is_linear(self.loss_fn)
        if isinstance(output, tuple):
            if linear:
                raise ValueError(
                    f"output must not be a tuple for {type(self.loss_fn).__name__}, which works from hidden states: a "
                    "pipeline stage with MTP returns logits first"
                )
            output = self._from_tuple(output)
        hidden = output if isinstance(output, torch.Tensor) else _final_hidden(output)
        logits = _field(output, "logits") if hasattr(output, "logits") or isinstance(output, Mapping) else output
        common: dict[str, Any] = {"model": self.model, "grad_reduce_group": self.grad_reduce_group}
        if linear:
            common["lm_weight"] = self._lm_weight(_required({"hidden_states": hidden}, "hidden_states", self.loss_fn))
        loss = calculate_loss(self.loss_fn, logits=logits, hidden_states=hidden, labels=labels, **common)
        if not self.model.training or (depths := self._depths(output)) is None:
            return loss
        packing: dict[str, Any] = {"cu_seqlens": self.cu_seqlens, "seq_idx": seq_idx}
        common |= {"labels": labels, "scaling_factor": self._scaling(output), "ignore_index": self.ignore_index}
        mtp: torch.Tensor = calculate_mtp_loss(self.loss_fn, **depths, **packing, **common)
        return loss + mtp

    def _lm_weight(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head, gathered once for the main loss and all depths."""
        return _gathered_once(_head_weight(self.model), hidden)

    def _from_tuple(self, output: tuple[torch.Tensor, ...]) -> Any:
        name = "mtp_per_depth_logits" if getattr(self.model, "mtp_outputs_are_logits", False) else "mtp_per_depth_h"
        return _StageOutput(output[0], **{name: list(output[1:]) or None})

    @staticmethod
    def _depths(output: Any) -> dict[str, Any] | None:
        depths = {name: _field(output, name) for name in ("mtp_per_depth_h", "mtp_per_depth_logits")}
        given = {name: list(value) for name, value in depths.items() if value is not None}
        return given or None

    def _scaling(self, output: Any) -> float:
        if self.scaling_factor is not None:
            return self.scaling_factor
        value = _field(output, "mtp_loss_scaling_factor")
        return mtp_loss_scaling_factor(self.model) if value is None else float(value)


@dataclass
class _StageOutput:
    logits: torch.Tensor
    mtp_per_depth_h: list[torch.Tensor] | None = None
    mtp_per_depth_logits: list[torch.Tensor] | None = None


def _field(output: Any, name: str) -> Any:
    """A field of a model output, be it an object or a mapping; None where it has none of that name."""
    value = getattr(output, name, None)
    return output.get(name) if value is None and isinstance(output, Mapping) else value


def _final_hidden(output: Any) -> torch.Tensor | None:
    """The last hidden states of a model output: its ``hidden_states``, or the last of them."""
    states = _field(output, "hidden_states")
    if isinstance(states, (list, tuple)):
        states = next((s for s in reversed(states) if s is not None), None)
    return states if isinstance(states, torch.Tensor) else None


@dataclass
class MTPLossConfig:
    """Hyperparameters of the MTP loss.

    Attributes:
        scaling_factor: weight of MTP; None keeps the model's own.
        ignore_index: -100, or that of the base loss.
    """

    scaling_factor: float | None = None
    ignore_index: int | None = PADDING

    def build(self, loss_fn: nn.Module, model: nn.Module, *, grad_reduce_group: Any = None) -> PipelineCausalLMLoss:
        """Make the pipeline loss for a base loss and a model."""
        return PipelineCausalLMLoss(
            loss_fn,
            model,
            scaling_factor=self.scaling_factor,
            ignore_index=self.ignore_index,
            grad_reduce_group=grad_reduce_group,
        )
