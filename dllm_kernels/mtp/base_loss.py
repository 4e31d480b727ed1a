"""Call any base loss, of this package or of the user, with the arguments that its forward accepts."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import nn

from dllm_kernels._utils._checks import type_name
from dllm_kernels.mtp.cross_entropy import PADDING, FusedLinearCrossEntropy
from dllm_kernels.mtp.head import head_bias, head_weight


def calculate_loss(loss_fn: nn.Module, **kwargs: Any) -> torch.Tensor:
    """Call a base loss with logits, or with hidden states and the LM head, depending on its ``forward``.

    Args:
        loss_fn: a loss whose ``forward`` takes ``lm_weight`` (it is then called with hidden states and the head) or
            ``logits``.
        **kwargs: ``labels``; ``logits`` or ``hidden_states``; ``model`` (for its LM head), ``lm_weight`` (the head, if
            the caller already has it), ``num_label_tokens``, ``loss_weights``, ``grad_reduce_group``, ``logits_dtype``.
            ``grad_reduce_group`` and ``logits_dtype`` are passed on if ``loss_fn`` takes them.

    Returns:
        The loss, 0-d.

    Raises:
        ValueError: the loss needs an LM head and the model has none, or has a head with more than weight and bias (an
            adapter, hooks) and ``lm_weight`` is not given; the input of the loss is missing; or the loss does not take
            an argument that changes its value: a count, weights, the bias of the LM head.
    """
    labels = _normalized_labels(required(kwargs, "labels", loss_fn), ignore_index_of(loss_fn))
    offered: dict[str, Any] = {
        "labels": labels,
        **{k: kwargs.get(k) for k in ("num_label_tokens", "loss_weights", "grad_reduce_group", "logits_dtype")},
    }
    if not is_linear(loss_fn):
        offered["logits"] = required(kwargs, "logits", loss_fn)
        return _call(loss_fn, offered)
    model, weight = kwargs.get("model"), kwargs.get("lm_weight")
    offered["hidden_states"] = required(kwargs, "hidden_states", loss_fn)
    offered["lm_weight"] = head_weight(model) if weight is None else weight
    offered["lm_bias"] = head_bias(model)
    return _call(loss_fn, offered)


def required(kwargs: Mapping[str, Any], name: str, loss_fn: nn.Module) -> Any:
    """Return the argument; raise ValueError if it is missing."""
    if kwargs.get(name) is None:
        raise ValueError(f"{name} must be given to {type_name(loss_fn)}, got None")
    return kwargs[name]


def _call(loss_fn: nn.Module, offered: Mapping[str, Any]) -> torch.Tensor:
    """Call the loss with the arguments that it takes, omitting arguments that are None."""
    parameters = _forward_parameters(loss_fn)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = {k: v for k, v in offered.items() if v is not None}
    known = given if takes_all else {k: v for k, v in given.items() if k in parameters}
    for name in ("num_label_tokens", "loss_weights", "lm_bias"):
        if name in given and name not in known:
            raise ValueError(f"{name} must be None for {type_name(loss_fn)}, whose forward does not take it")
    loss: torch.Tensor = loss_fn(**known)
    return loss


def _forward_parameters(loss_fn: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of ``forward``, of the instance if it overrides the class.

    A bound method of a loss that is constructed inside a compiled function cannot be inspected there.
    """
    forward = vars(loss_fn).get("forward")
    return inspect.signature(type(loss_fn).forward if forward is None else forward).parameters


def is_linear(loss_fn: nn.Module) -> bool:
    """Return True if the loss takes hidden states and the LM head instead of logits."""
    return "lm_weight" in _forward_parameters(loss_fn)


def is_our_linear(loss_fn: nn.Module) -> TypeGuard[FusedLinearCrossEntropy]:
    """Return True if the loss is a :class:`FusedLinearCrossEntropy` without overridden forward and without hooks."""
    if not isinstance(loss_fn, FusedLinearCrossEntropy) or type(loss_fn).forward is not FusedLinearCrossEntropy.forward:
        return False
    hooks = (loss_fn._forward_hooks, loss_fn._forward_pre_hooks, loss_fn._backward_hooks, loss_fn._backward_pre_hooks)
    return "forward" not in vars(loss_fn) and not any(hooks)


def ignore_index_of(loss_fn: nn.Module) -> int:
    """Return the ignore index of the loss."""
    value = getattr(loss_fn, "ignore_index", PADDING)
    return int(value) if isinstance(value, numbers.Integral) else PADDING


def checked_ignore_index(ignore_index: int | None, loss_fn: nn.Module) -> int:
    """Return the ``ignore_index`` of the loss; -100 and None are accepted too, because every loss ignores -100."""
    own = ignore_index_of(loss_fn)
    if ignore_index not in (None, PADDING, own):
        raise ValueError(f"ignore_index must be {PADDING} or that of loss_fn, {own}, got {ignore_index}")
    return own


def _normalized_labels(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Replace the padding of the data set, -100, by the ``ignore_index`` of the loss."""
    return labels if ignore_index == PADDING else labels.long().masked_fill(labels.long() == PADDING, ignore_index)
