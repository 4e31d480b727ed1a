"""Find the LM head of a model, and check that a loss may use its weight and bias instead of calling it.

That is allowed only if the head computes exactly ``hidden @ weight.T + bias``. Anything else that it computes (an
adapter, a scale, hooks) would be omitted silently, and would not train.
"""

from __future__ import annotations

import sys
import types
from typing import Any, NamedTuple

from torch import Tensor, nn

from dllm_kernels._checks import type_name
from dllm_kernels._graph._private import is_kept_root

LINEAR_FORWARDS: set[object] = {nn.Linear.forward}  # classes of this package that compute the same add their forward
# Hooks from these packages gather, free and lay out the parameters, and compute nothing.
SHARDING = ("torch.distributed.", "deepspeed.")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def unwrapped(model: nn.Module | None) -> nn.Module | None:
    """Return the model inside DistributedDataParallel."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def head_module(model: nn.Module | None) -> nn.Module | None:
    """Return the LM head: ``get_output_embeddings()``, else a module ``lm_head`` that has a weight or is callable.

    Of a head that FSDP1 wraps alone it is the module inside, whose forward has the gathered parameters.
    """
    head, fsdp = _head_of(unwrapped(model)), sys.modules.get("torch.distributed.fsdp")
    while fsdp is not None and isinstance(head, fsdp.FullyShardedDataParallel):
        head = head.module
    return head


def fsdp1_unit(model: nn.Module, head: nn.Module) -> Any:
    """Return the innermost FSDP1 unit of a model that contains the head, or None."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    units = [] if fsdp is None else fsdp.FullyShardedDataParallel.fsdp_modules(model)
    return next((unit for unit in reversed(units) if any(module is head for module in unit.modules())), None)


def freed_after_forward(unit: Any) -> bool:
    """Return True if FSDP1 frees the parameters of this unit after its forward; call it within the forward of a model.

    All units but the root are freed, unless their strategy keeps the parameters until backward.
    """
    return unit is not None and not is_kept_root(unit)


def _head_of(model: nn.Module | None) -> nn.Module | None:
    if model is None:
        return None
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    if isinstance(head, nn.Module):
        return head
    named = (m for name, m in model.named_modules() if name.split(".")[-1] == "lm_head")
    return next((m for m in named if hasattr(m, "weight") or projects(m)), None)


class TokenRows(NamedTuple):
    """Weight and bias that PEFT calls a head with, of which it trains some rows (``trainable_token_indices``)."""

    weight: Tensor
    bias: Tensor | None
    out_features: int


def token_layer(head: object) -> Any:
    """Return the layer of PEFT that trains some rows of the head, or None."""
    peft, layer = sys.modules.get("peft.tuners.trainable_tokens.layer"), getattr(head, "token_adapter", head)
    return layer if peft is not None and isinstance(layer, peft.TrainableTokensLayer) else None


def token_rows(layer: Any) -> TokenRows:
    """Return weight and bias of a call of the layer. PEFT omits the bias of the head if it replaces rows."""
    base = layer.base_layer
    if layer.merged and (layer.disable_adapters or not layer.active_adapters):
        layer.unmerge()
    if layer.merged or layer.disable_adapters or not layer.active_adapters:
        return TokenRows(base.weight, base.bias, base.out_features)
    return TokenRows(layer.get_merged_weights(layer.active_adapters), None, base.out_features)


def projects(head: nn.Module) -> bool:
    """Return True if the module has a forward that computes logits, unlike parameter containers and embeddings."""
    has_forward = type(head).forward is not nn.Module.forward or "forward" in vars(head)
    return has_forward and not isinstance(head, nn.Embedding)


def check_linear_head(head: nn.Module, advice: str, *, replaced: bool = False) -> None:
    """Raise a ValueError if the head does anything beside ``hidden @ weight.T + bias``.

    A subclass of ``nn.Linear`` with its ``forward`` passes, because ``fully_shard`` makes one. A parametrized weight
    passes too, because it is recomputed on each access.

    Args:
        head: the LM head.
        advice: end of the message, which names the fix.
        replaced: another module takes over the head's parameters only, without its sharding hooks or parametrizations.
    """
    if projects(head) and (more := more_than_linear(head, replaced=replaced)):
        raise ValueError(
            "the LM head must do no more than an nn.Linear for a loss to use its weight in its place, got "
            f"{type_name(head)} with {more}; {advice}"
        )


def more_than_linear(head: nn.Module, *, replaced: bool = False) -> str | None:
    """Name an operation of the head beside ``hidden @ weight.T + bias``; None if :func:`check_linear_head` passes."""
    if (description := own_forward(head)) is not None:
        return description
    if type(head).forward not in LINEAR_FORWARDS:
        return "a forward of its own"
    if (hook := _hook(head, () if replaced else SHARDING)) is not None:
        return hook
    if replaced and any(not isinstance(p, nn.Parameter | None) for p in (head.weight, head.bias)):
        return "a parametrized weight or bias"
    return None


def own_forward(head: nn.Module) -> str | None:
    """Describe a ``forward`` that is set on the object, by accelerate or by a call that has not returned, or None."""
    forward = vars(head).get("forward")
    if forward is None or forward == types.MethodType(type(head).forward, head):
        return None
    if str(getattr(forward, "__module__", "")).startswith("dllm_kernels."):
        return (
            "the forward of another call that replaces the same head and has not returned (leave an enclosing "
            "fused_head first)"
        )
    return "a forward set on the object"


def check_hooks(head: nn.Module, advice: str) -> None:
    """Raise a ValueError if the head has hooks other than those of sharding."""
    if (hook := _hook(head, SHARDING)) is not None:
        raise ValueError(f"the LM head must have no hooks for a loss to run inside it, got {hook}; {advice}")


def _hook(head: nn.Module, tolerated: tuple[str, ...]) -> str | None:
    """Name a hook that is not tolerated, or return None."""
    for hooks in HOOKS:
        for hook in getattr(head, hooks).values():
            hook = getattr(hook, "func", hook)  # unwrap functools.partial
            if not tolerated or not str(getattr(hook, "__module__", "")).startswith(tolerated):
                return f"a hook, {getattr(hook, '__qualname__', type_name(hook))}"
    return None
