"""Private names of torch, each with the reason for its use. Checked on torch 2.11, 2.13 and 2.15.

No other file of the package reads one, except ``_version`` of a tensor, which autograd's documentation names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack as outside_transforms,  # values that a transform of torch.func closes over
)
from torch._subclasses.fake_tensor import FakeTensor  # no public name tells that a tensor has no data
from torch.utils._python_dispatch import (
    is_in_torch_dispatch_mode,  # FlopCounterMode has no formula for products with ``out=`` or ``out_dtype``
    is_traceable_wrapper_subclass,  # quantized weights, whose values no kernel can read
)

if TYPE_CHECKING:
    from torch.autograd import Function as PlainFunction
else:  # the base of Function, whose ``apply`` does not search its arguments for wrappers of torch.func
    from torch.autograd.function import _SingleLevelFunction as PlainFunction

__all__ = [
    "FakeTensor", "PlainFunction", "is_in_torch_dispatch_mode", "is_traceable_wrapper_subclass", "outside_transforms",
]  # fmt: skip
Function = TypeVar("Function", bound=Callable[..., Any])
_C: Any = torch._C
# Methods of a subclass run on the subclass itself; public is only ``torch.overrides``, which enters a mode per call.
plainly = _C.DisableTorchFunctionSubclass
# A tensor of given shape, strides and dtype without memory: what ``torch.Tensor._make_wrapper_subclass`` is for.
wrapper = Tensor._make_wrapper_subclass
# ``torch.compiler.disable`` imports torch._dynamo, which takes seconds.
_disable_dynamo: Any = torch._disable_dynamo  # type: ignore[attr-defined]
# A change of the graph of a tensor that does not change its values.
preserve_version = torch.autograd.grad_mode._unsafe_preserve_version_counter
# Without OpenMP all threads share one setting of the number of cores.
HAS_OPENMP: bool = _C.has_openmp


def disable_dynamo(function: Function) -> Function:
    """Keep Dynamo out of a function."""
    return _disable_dynamo(function)  # type: ignore[no-any-return]


def transforms_active() -> bool:
    """Return True within a transform of ``torch.func``, whose wrappers of tensors no kernel can read."""
    return bool(_C._are_functorch_transforms_active())


def batched_by_autograd(t: Tensor) -> bool:
    """Return True for an upstream gradient of ``torch.autograd.grad(..., is_grads_batched=True)``."""
    return bool(_C._functorch.is_legacy_batchedtensor(t))


def backward_task() -> int:
    """Return the number of the backward pass that autograd runs in this thread, which recomputes checkpoints, or -1."""
    return int(_C._current_graph_task_id())


def views_tracked() -> Any:
    """Return a context in which views share the graph of changes in place, as they do not below autograd."""
    return _C._SetExcludeDispatchKeyGuard(_C.DispatchKey.ADInplaceOrView, False)


def saved_tensors_hooks_enabled() -> bool:
    """Return False where setting hooks of saved tensors would raise."""
    return bool(_C._autograd._saved_tensors_hooks_is_enabled())


def saved_tensors_hooks() -> Any:
    """Return the innermost hooks of saved tensors, as a checkpoint or ``save_on_cpu`` sets them, or None."""
    return _C._autograd._top_saved_tensors_default_hooks(True)


def may_recompute() -> bool:
    """Return True if hooks of saved tensors are set that may recompute them, as those of an activation checkpoint."""
    hooks = saved_tensors_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", None) != "torch.autograd.graph"  # save_on_cpu


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors share memory; on the meta device, pointers are equal for all tensors."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def constant_while_traced(function: Function) -> Function:
    """Mark a function to call while a graph is traced, once for each graph; ``torch.compiler`` imports Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def ordered_effect(op: Any) -> None:
    """Keep a custom op without outputs from being eliminated."""
    from torch._library.effects import EffectType  # imported lazily, because it is slow

    op.register_effect(EffectType.ORDERED)


def is_kept_root(unit: Any) -> bool:
    """Return True if FSDP1 keeps the parameters of this unit after its forward."""
    return bool(unit._is_root) or unit.sharding_strategy.name not in ("FULL_SHARD", "HYBRID_SHARD")
