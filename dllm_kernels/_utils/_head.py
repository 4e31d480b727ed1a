"""Find the LM head of a model, and check that a loss may use its weight and bias instead of calling it.

That is allowed only if the head computes exactly ``hidden @ weight.T + bias``. Anything else that it computes (an
adapter, a scale, hooks) would be omitted silently, and would not train.
"""

from __future__ import annotations

import sys
import types

from torch import nn

from dllm_kernels._utils._checks import type_name

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


def _head_of(model: nn.Module | None) -> nn.Module | None:
    if model is None:
        return None
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    if isinstance(head, nn.Module):
        return head
    named = (m for name, m in model.named_modules() if name.split(".")[-1] == "lm_head")
    return next((m for m in named if hasattr(m, "weight") or projects(m)), None)


def trains_tokens(head: object) -> bool:
    """Return True for a head of which PEFT trains some rows (``trainable_token_indices``): ``weight`` merges them."""
    peft = sys.modules.get("peft.utils.other")
    return peft is not None and isinstance(head, getattr(peft, "TrainableTokensWrapper", ()))


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
    if (own := own_forward(head)) is not None:
        return own
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
        return "the forward of another call that replaces the same head and has not returned"
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
