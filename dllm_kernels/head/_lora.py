r"""Split an LM head with LoRA adapters into weight, bias and low-rank part, the fields of ``LinearLogits``.

A LoRA adapter of PEFT or NeMo AutoModel adds :math:`s B A h` to the logits. It is passed as the low-rank part of the
head, ``extra=(s A h, B)``. Several active PEFT adapters are concatenated into one adapter with the sum of their ranks.
All other variants of a head (DoRA, quantized bases, ...) raise an error that names the variant. This module does not
import PEFT or NeMo AutoModel, because a model that uses them has already imported them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dllm_kernels._checks import is_freed, type_name
from dllm_kernels._graph._plain import is_dtensor
from dllm_kernels._graph._private import is_traceable_wrapper_subclass
from dllm_kernels.head._module import check_hooks, check_linear_head, own_forward, token_layer, token_rows
from dllm_kernels.head._parameters import gathered_once
from dllm_kernels.rows._logits import Head, LinearLogits

_CLAIM = threading.Lock()  # held from the check of a head to its replacement, so that one of two threads raises


class Adapter(NamedTuple):
    """An adapter that adds ``b(a(dropped(h)) * scale)`` to the logits."""

    a: nn.Linear
    b: nn.Linear
    scale: float
    dropped: Callable[[Tensor], Tensor]


def is_adapted(head: nn.Module) -> bool:
    """Return True for LoRA of PEFT or NeMo AutoModel, and for a copy or rows that PEFT trains in place of the head."""
    return _chosen(head) is not head or _is_peft(head) or _is_nemo(head) or token_layer(head) is not None


def takes_apart(head: nn.Module) -> bool:
    """Return True if :func:`check_head` accepts the head."""
    try:
        check_head(head, "")
    except ValueError:
        return False
    return True


def check_head(head: nn.Module | None, advice: str) -> None:
    """Raise ValueError unless :func:`linear_logits` supports the head; ``advice`` ends the message."""
    module = _chosen(head)
    if module is not head:
        _check_call(head, advice)
    if _is_nemo(module):
        _check_nemo(module, advice)
        return
    if (layer := token_layer(module)) is not None:
        for called in (module, layer):
            _check_call(called, advice)
        _check_linear(layer.base_layer, advice)
        return
    if not _is_peft(module):
        _check_linear(module, advice)
        return
    _check_call(module, advice)
    _check_linear(module.base_layer, advice)
    for name in _active(module):
        if name in module.lora_variant:  # DoRA and others
            _refuse(module.lora_variant[name], advice)
        _check_linear(module.lora_A[name], advice)
        _check_linear(module.lora_B[name], advice)


class SplitHead(NamedTuple):
    """Linear layer of a head, the adapters that were active on it, and the layer's parameters at that time."""

    base: Any
    adapters: list[Adapter]
    weight: Tensor
    bias: Tensor | None
    merges: Callable[[], tuple[str, ...]]  # names of the adapters whose product is in the weight now
    merged: tuple[str, ...]

    @property
    def out_features(self) -> int:
        """Number of classes; of a flattened weight, as sharding leaves it, that of the layer."""
        classes: int = self.weight.shape[0] if self.weight.dim() == 2 else self.base.out_features
        return classes

    @property
    def identity(self) -> tuple[float, ...]:
        """Layer, parameters and adapters, equal for calls of one function."""
        adapters = [part for a in self.adapters for part in (id(a.a), id(a.b), a.scale)]
        return (*map(id, (self.base, self.weight, self.bias)), *adapters)

    def parameters(self) -> list[Tensor | None]:
        """Return weight and bias of the layer, and of each adapter's B, as the modules hold them now."""
        return [t for module in (self.base, *(a.b for a in self.adapters)) for t in (module.weight, module.bias)]

    def filled(self, parts: Sequence[Any]) -> tuple[Any, ...]:
        """Return the parts of a head call; parameters that sharding has freed since are gathered, without a graph."""
        like, u, *parameters = parts
        if not any(map(is_freed, parameters)):
            return tuple(parts)
        pairs = zip(parameters, self.parameters(), strict=True)
        return like, u, *(gathered_once(now, like).detach().to(t.dtype) if is_freed(t) else t for t, now in pairs)  # type: ignore[arg-type]


def split(head: nn.Module) -> SplitHead:
    """Return the layer and the active adapters of a head that :func:`check_head` accepts."""
    module: Any = _chosen(head)
    if _is_peft(module) and module.disable_adapters and module.merged:
        module.unmerge()
    base = module.base_layer if _is_peft(module) else module
    if (layer := token_layer(module)) is not None:
        base = token_rows(layer)

    def merges() -> tuple[str, ...]:
        return tuple(module.merged_adapters) if _is_peft(module) else ()

    return SplitHead(base, _adapters(module), base.weight, base.bias, merges, merges())


def low_rank_rows(head: SplitHead, hidden: Tensor | Sequence[Tensor]) -> Tensor | None:
    """Compute ``s A h`` of all adapters, including dropout, so that A receives its gradient by autograd.

    For several hidden states of equal shape, it is computed one after another, as in calls of the head, and stacked in
    a new first dimension.
    """
    if not head.adapters:
        return None
    if not isinstance(hidden, Tensor):
        return torch.stack([low_rank_rows(head, h) for h in hidden])  # type: ignore[misc]
    # Cast, because PEFT keeps the adapters of a 16-bit head in float32, and the head is computed in the dtype of the
    # rows.
    return torch.cat([_low_rank(hidden, adapter).to(hidden.dtype) for adapter in head.adapters], -1)


def weights(head: SplitHead, like: Tensor, u: Tensor | None, parameters: Sequence[Tensor | None] | None = None) -> Head:
    """Return the head whose low-rank rows are ``u``, in the dtype of the hidden states ``like``."""
    weight, bias, *adapters = head.parameters() if parameters is None else parameters
    if u is None:
        return Head(weight, bias)  # type: ignore[arg-type]
    columns = torch.cat([gathered_once(b, like).to(like.dtype) for b in adapters[::2]], 1)  # type: ignore[arg-type]
    for adapter, b in zip(head.adapters, adapters[1::2], strict=True):
        if b is not None:
            adapter_bias = gathered_once(b, like) * adapter.scale
            bias = adapter_bias if bias is None else gathered_once(bias, like) + adapter_bias
    return Head(weight, None if bias is None else bias.to(like.dtype), u, columns)  # type: ignore[arg-type]


class Replacement:
    """Forward of a head within a context. A copy of the head, by deepcopy or pickle, has the forward of its class."""

    def __init__(self, head: nn.Module, forward: Callable[..., Any]) -> None:
        self.head, self.forward = head, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        head = memo.get(id(self.head), self.head)
        return types.MethodType(type(head).forward, head)

    def __reduce__(self) -> Any:
        return getattr, (self.head, "forward")  # while the attributes of the copy are not set yet


@contextlib.contextmanager
def replaced_forward(head: Any, forward: Callable[..., Any], advice: str) -> Iterator[None]:
    """Set ``head.forward`` within the context, then restore the previous one, maybe an attribute of the object.

    Raises:
        ValueError: :func:`check_head` does not accept the head.
    """
    with _CLAIM:
        check_head(head, advice)
        before = {name: value for name, value in vars(head).items() if name == "forward"}
        head.forward = forward
    try:
        yield
    finally:
        vars(head).pop("forward", None)
        vars(head).update(before)


def linear_logits(head: nn.Module, hidden: Tensor) -> LinearLogits:
    """Return the record of the logits of hidden states ``[..., D]``, for a head that :func:`check_head` accepts.

    ``A h`` is computed here. The gradient of B is computed by the loss. Sharded adapter parameters are gathered, except
    in the forward pass of the head, where they are already gathered.

    Raises:
        ValueError: tensor parallelism splits an adapter, and ``hidden`` is not a DTensor.
    """
    parts = split(head)
    tensors = weights(parts, hidden, low_rank_rows(parts, hidden))
    return LinearLogits(hidden, tensors.weight, tensors.bias, tensors.extra)


def _adapters(head: Any) -> list[Adapter]:
    """Return the adapters that add to the logits."""
    if _is_nemo(head):
        p = head.dropout_p if head.dropout_position == "pre" else 0.0
        return [Adapter(head.lora_A, head.lora_B, head.scale, lambda h: F.dropout(h, p, head.training))]
    return [_peft_adapter(head, name) for name in _active(head)] if _is_peft(head) else []


def _peft_adapter(head: Any, name: str) -> Adapter:
    a, dropout = head.lora_A[name], head.lora_dropout[name]

    def dropped(hidden: Tensor) -> Tensor:
        result: Tensor = dropout(head._cast_input_dtype(hidden, a.weight.dtype))
        return result

    return Adapter(a, head.lora_B[name], head.scaling[name], dropped)


def _low_rank(hidden: Tensor, adapter: Adapter) -> Tensor:
    """Compute ``s A h``."""
    h, a = adapter.dropped(hidden), adapter.a
    if is_dtensor(h):
        u: Tensor = a(h)
        return u * adapter.scale
    if not is_dtensor(a.weight) and a.weight.dtype == h.dtype:
        # A copy, because FSDP2 may free the gathered weight of one call of the head before the backward of another.
        return F.linear(h, a.weight.clone(), a.bias) * adapter.scale
    weight = gathered_once(a.weight, h)
    if is_dtensor(weight):
        raise ValueError(
            "the adapter of the LM head must not be split by tensor parallelism for hidden states that are not a "
            f"DTensor, got {tuple(weight.placements)}; use a base loss from logits"  # type: ignore[attr-defined]
        )
    return F.linear(h, weight.to(h.dtype)) * adapter.scale


def _active(head: Any) -> list[str]:
    """Return the names of the active PEFT adapters."""
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


def _is_peft(head: Any) -> bool:
    """Return True for PEFT's LoRA of an ``nn.Linear``, also if ``fully_shard`` derived its class.

    PEFT uses other classes for most quantized bases. :func:`_check_shape` rejects the rest, whose weight is a tensor
    subclass.
    """
    peft: Any = sys.modules.get("peft.tuners.lora.layer")
    return peft is not None and getattr(type(head), "forward", None) is peft.Linear.forward


def _is_nemo(head: Any) -> bool:
    """Return True for LoRA of NeMo AutoModel, also if ``fully_shard`` or the framework derived its class.

    The Triton variant computes the same function.
    """
    nemo: Any = sys.modules.get("nemo_automodel.components._peft.lora")
    forward = getattr(type(head), "forward", None)
    return nemo is not None and forward in (nemo.LinearLoRA.forward, nemo.TritonLinearLoRA.forward)


def _check_nemo(head: Any, advice: str) -> None:
    refused = {
        "DoRA": head.use_dora,
        "dropout after lora_B": head.dropout_position == "post" and head.dropout_p > 0 and head.training,
        "a base layer that is quantized or of another library": getattr(head, "super_fwd", None) is not None,
    }
    for what, present in refused.items():
        if present:
            _refuse(head, advice, f" with {what}")
    _check_call(head, advice)
    _check_shape(head, advice)
    for linear in (head.lora_A, head.lora_B):
        _check_linear(linear, advice)


def _check_call(head: Any, advice: str) -> None:
    """Raise ValueError if a call of a head, of a class that is supported, does more than the class."""
    if (description := own_forward(head)) is not None:
        _refuse(head, advice, f" with {description}")
    check_hooks(head, advice)


def _check_linear(head: Any, advice: str) -> None:
    _check_shape(head, advice)
    check_linear_head(head, advice)


def _check_shape(head: Any, advice: str) -> None:
    if not isinstance(head, nn.Linear):
        _refuse(head, advice)
    # torchao's quantized weights are tensor subclasses in a plain layer.
    if is_traceable_wrapper_subclass(head.weight) and not is_dtensor(head.weight):
        _refuse(head, advice, f" with a weight of {type_name(head.weight)}")
    # Not compared with out_features, which F.linear does not read. FSDP1 and ZeRO-3 flatten it outside of the forward.
    if head.weight.dim() not in (1, 2) or not head.weight.is_floating_point():
        dtype = str(head.weight.dtype).removeprefix("torch.")
        _refuse(head, advice, f" with a weight {tuple(head.weight.shape)} of {dtype}")


def _refuse(head: object, advice: str, what: str = "") -> None:
    raise ValueError(
        f"the LM head must be an nn.Linear for the loss to run inside it, got {type_name(head)}{what}; {advice}"
    )
