"""Whether a loss may use an LM head's weight and bias in place of the head, which then is never called.

Only where the head is nothing but ``hidden @ weight.T + bias``: whatever else it computes (an adapter, a scale, hooks) would
be left out without a word, and would not train.
"""

from __future__ import annotations

from torch import nn

from dllm_kernels._utils._checks import type_name

LINEAR_FORWARDS: set[object] = {nn.Linear.forward}  # a class of ours that computes the same adds its own
# These gather, free and lay out the parameters, and compute nothing.
SHARDING = ("torch.distributed.", "deepspeed.")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def projects(head: nn.Module) -> bool:
    """Whether the module has a forward that makes logits: a holder of parameters has none, an embedding looks up tokens."""
    has_forward = type(head).forward is not nn.Module.forward or "forward" in vars(head)
    return has_forward and not isinstance(head, nn.Embedding)


def check_plain_head(head: nn.Module, advice: str, *, replaced: bool = False) -> None:
    """Raise a ValueError if the head does anything beside ``hidden @ weight.T + bias``.

    A subclass of ``nn.Linear`` with its ``forward`` passes, as ``fully_shard`` makes one, and so does a parametrized weight,
    which is made anew wherever it is read.

    Args:
        head: the LM head.
        advice: what to do about it, the end of the message.
        replaced: another module takes over the head's parameters and nothing else of it: not the hooks by which it is
            sharded, nor a parametrization.
    """
    if projects(head) and (more := _more_than_linear(head, () if replaced else SHARDING, replaced)):
        raise ValueError(
            "the LM head must do no more than an nn.Linear for a loss to use its weight in its place, got "
            f"{type_name(head)} with {more}; {advice}"
        )


def _more_than_linear(head: nn.Module, tolerated: tuple[str, ...], replaced: bool) -> str | None:
    if "forward" in vars(head):
        return "a forward set on the object"
    if type(head).forward not in LINEAR_FORWARDS:
        return "a forward of its own"
    for hooks in HOOKS:
        for hook in getattr(head, hooks).values():
            hook = getattr(hook, "func", hook)  # what a functools.partial is of
            if not tolerated or not str(getattr(hook, "__module__", "")).startswith(tolerated):
                return f"a hook, {getattr(hook, '__qualname__', type_name(hook))}"
    if replaced and any(not isinstance(p, nn.Parameter | None) for p in (head.weight, head.bias)):
        return "a parametrized weight or bias"
    return None
