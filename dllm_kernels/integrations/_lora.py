r"""Take an LM head with adapters of PEFT apart, so that a loss computes what the head computes.

A LoRA adapter adds :math:`s B A h` to the logits, which is the low-rank part of a head: ``extra=(s A h, B)``. Several
active adapters are one of the sum of their ranks. Everything else that PEFT can make of a head (DoRA, quantized bases,
...) raises an error that names it. Nothing here imports PEFT: a model that uses it has done so.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import nn

from dllm_kernels._utils._checks import type_name
from dllm_kernels._utils._head import check_hooks, check_plain_head


class Head(NamedTuple):
    """A head as the losses take it: weight ``[V, D]``, bias ``[V]`` or None, low-rank part or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    extra: tuple[torch.Tensor, torch.Tensor] | None = None


def check_head(head: nn.Module | None, advice: str) -> None:
    """Raise ValueError unless :func:`of_rows` can take the head apart; ``advice`` ends the message."""
    module = _chosen(head)
    if not _is_lora(module):
        _check_linear(module, advice)
        return
    check_hooks(module, advice)
    _check_linear(module.base_layer, advice)
    for name in _active(module):
        if name in module.lora_variant:  # DoRA and others
            _refuse(module.lora_variant[name], advice)
        _check_linear(module.lora_B[name], advice)


def of_rows(head: nn.Module, hidden: torch.Tensor) -> Head:
    """Take apart a head that :func:`check_head` accepts, for hidden states ``[..., D]``.

    Call it in the head's forward pass, where sharded parameters are gathered. ``A h`` is computed by the adapter's own
    modules (dropout included), so that autograd trains A; the loss trains B.
    """
    module: Any = _chosen(head)
    if not _is_lora(module):
        return Head(module.weight, module.bias)
    base, rows, columns, bias, dtype = module.base_layer, [], [], module.base_layer.bias, hidden.dtype
    if module.disable_adapters and module.merged:
        module.unmerge()
    for name in _active(module):
        a, b, s = module.lora_A[name], module.lora_B[name], module.scaling[name]
        hidden = module._cast_input_dtype(hidden, a.weight.dtype)
        rows.append(a(module.lora_dropout[name](hidden)) * s)
        columns.append(b.weight)
        if b.bias is not None:
            bias = b.bias * s if bias is None else bias + b.bias * s
    if not rows:
        return Head(base.weight, bias)
    # PEFT keeps the adapters of a 16-bit head in float32. The products of the head are in the dtype of its rows.
    u, columns_of_u = torch.cat([r.to(dtype) for r in rows], -1), torch.cat([c.to(dtype) for c in columns], 1)
    return Head(base.weight, None if bias is None else bias.to(dtype), (u, columns_of_u))


def _active(head: Any) -> list[str]:
    """Names of the adapters that add to the logits."""
    if head.disable_adapters or head.merged:
        return []
    return [name for name in head.active_adapters if name in head.lora_A]


def _chosen(head: nn.Module | None) -> Any:
    """Return the copy of the head that trains in place of it (``modules_to_save``), or the head itself."""
    peft: Any = sys.modules.get("peft.utils.other")
    if peft is None or not isinstance(head, peft.ModulesToSaveWrapper):
        return head
    if head.disable_adapters or not head.active_adapters:
        return head.original_module
    return head.modules_to_save[head.active_adapters[0]]


def _is_lora(head: Any) -> bool:
    """Whether it is PEFT's LoRA of an ``nn.Linear``. Its classes for quantized bases are others."""
    peft: Any = sys.modules.get("peft.tuners.lora.layer")
    return peft is not None and type(head) is peft.Linear


def _check_linear(head: Any, advice: str) -> None:
    if not isinstance(head, nn.Linear) or tuple(head.weight.shape) != (head.out_features, head.in_features):
        _refuse(head, advice)
    check_plain_head(head, advice)


def _refuse(head: object, advice: str) -> None:
    raise ValueError(f"the LM head must be an nn.Linear for the loss to run inside it, got {type_name(head)}; {advice}")
