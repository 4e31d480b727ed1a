"""LM heads that FSDP2 shards: gathered once per call, with a gradient that is reduced to the shards.

There are two ways to use such a head with a loss that takes hidden states.

1. Pass the sharded parameter to the loss, ``loss.forward_fused(hidden, model.lm_head.weight, ...)``, outside of the
   head's forward. There the weight is a DTensor. It is gathered once, in the dtype of the computation. Its gradient is
   reduced to the shards and divided by the number of data-parallel ranks, which is the convention of FSDP2. (A plain
   ``full_tensor()`` marks the gradient as replicated: every rank keeps its own share, and all others are lost.) Every
   backward pass reduces; under ``set_requires_gradient_sync(False)`` the gradients of the shards add up correctly.
2. Run the loss inside the head's forward: make the head a :class:`LossHead`. There FSDP2 has gathered the weight
   already, and reduces its gradient like that of any parameter, once per optimizer step if synchronisation is off.

The first way needs the parameter that FSDP2 shards. After a forward with ``reshard_after_forward=<int>`` the module
holds a copy whose gradient is lost, so this layout raises an error.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dllm_kernels._checks import check_gathered, check_number, check_tensor, type_name
from dllm_kernels.distributed import _layout
from dllm_kernels.distributed._layout import as_dtensor, is_strided, layout, shard_dim
from dllm_kernels.head._module import LINEAR_FORWARDS, check_linear_head
from dllm_kernels.rows._dtypes import dtype_of_products
from dllm_kernels.rows._fused import refuse_second_order

Result = TypeVar("Result")
# Module -> divisor of the gradients of its direct parameters. A parameter's attribute does not survive ``to_empty``,
# which swaps its contents, nor ``load_state_dict(assign=True)``, which replaces it.
_FACTORS: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()
_FACTOR = "_dllm_kernels_gradient_divide_factor"  # attribute of a parameter


class LossHead(nn.Linear):
    """LM head that can run the loss inside its forward, so that FSDP2 treats its weight like any other parameter.

    Example::

        model.lm_head = LossHead.of(model.lm_head)  # before fully_shard
        fully_shard(model.lm_head)
        fully_shard(model)
        ...
        out = model.lm_head(
            hidden, lambda h, weight, bias: loss_fn.forward_fused(h, weight, target_ids, ...)
        )

    FSDP2 casts the outputs of a forward to the ``output_dtype`` of its ``MixedPrecisionPolicy``. This applies to the
    logits, but not to the result of a loss, which stays float32. An enclosing FSDP unit still casts its own outputs.
    """

    @classmethod
    def of(cls, linear: nn.Linear) -> LossHead:
        """Make a head with the parameters of another one.

        Args:
            linear: computes ``hidden @ weight.T + bias`` and nothing else, and is not sharded yet.

        Raises:
            TypeError: ``linear`` is not an ``nn.Linear``.
            ValueError: ``linear`` overrides ``forward`` (an adapter), or has hooks or a parametrization, which would
                be lost.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be an nn.Linear, got {type_name(linear)}")
        check_linear_head(linear, "call the head itself and give its logits to the loss", replaced=True)
        head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        head.weight, head.bias = linear.weight, linear.bias
        return head

    def __call__(self, hidden: Tensor, loss: Callable[..., Any] | None = None) -> Any:
        """Call :meth:`forward` with its hooks; return the result of a loss as it was before the hooks."""
        if loss is None:
            return super().__call__(hidden)
        if not callable(loss):
            raise TypeError(f"loss must be a function of hidden states, weight and bias, got {type_name(loss)}")
        results: list[Any] = []

        def recorded_loss(*head: Any) -> Any:
            results.append(loss(*head))
            return results[-1]

        # FSDP2 registers its backward hooks on the tensors that the loss returned.
        super().__call__(hidden, recorded_loss)
        return results[-1]

    def forward(self, hidden: Tensor, loss: Callable[..., Any] | None = None) -> Any:
        """Return the logits, or ``loss(hidden, weight, bias)`` with the gathered parameters.

        Args:
            hidden: ``[..., D]``.
            loss: called with ``hidden``, the weight ``[V, D]`` and the bias ``[V]`` or None. Its result may be a tensor
                or a (named) tuple of tensors, in which FSDP2 finds the tensors to hook in backward. Forward hooks
                cannot replace the result.
        """
        return super().forward(hidden) if loss is None else loss(hidden, self.weight, self.bias)


LINEAR_FORWARDS.add(LossHead.forward)


def set_gradient_divide_factor(head: nn.Module | nn.Parameter | Iterable[nn.Parameter], factor: float) -> None:
    """Set the divisor of the gradient of a sharded head that a loss gathers, like the FSDP2 method of that name.

    The factor of FSDP2 cannot be read from a parameter. A training loop that changes it, for instance by
    ``model.set_gradient_divide_factor(1.0)``, must therefore call this function too.

    Args:
        head: the module, such as ``model.lm_head``, after ``fully_shard``. The factor applies to all parameters of the
            module and its submodules, also after ``to_empty`` or ``load_state_dict(assign=True)``. Alternatively one
            or several parameters. The factor then applies to these tensors only, and either call discards it.
        factor: positive. The default is the number of data-parallel ranks.

    Raises:
        TypeError: ``head`` is neither a module nor parameters, or ``factor`` is not a number.
        ValueError: ``factor`` is not positive and finite.
    """
    check_number("factor", factor)
    if not 0 < factor < math.inf:
        raise ValueError(f"factor must be positive and finite, got {factor}")
    modules = list(head.modules()) if isinstance(head, nn.Module) else []
    parameters = head.parameters() if isinstance(head, nn.Module) else head
    if not isinstance(parameters, Iterable):
        raise TypeError(f"head must be an nn.Module or parameters, got {type_name(parameters)}")
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        if not isinstance(parameter, nn.Parameter):
            raise TypeError(f"head must be an nn.Module or parameters, got {type_name(parameter)}")
        setattr(parameter, _FACTOR, factor)
    _FACTORS.update(dict.fromkeys(modules, factor))


def _divide_factor(weight: DTensor, default: float) -> float:
    """Return the last divisor that :func:`set_gradient_divide_factor` set for the parameter or its module."""
    module_factors = (f for module, f in _FACTORS.items() if id(weight) in map(id, module.parameters(recurse=False)))
    factor: float | None = getattr(weight, _FACTOR, None)
    return next(module_factors, default) if factor is None else factor


@_layout.outside_the_graph
def gather_head(weight: Tensor, hidden: Tensor, name: str = "the LM head's weight") -> Tensor:
    """Gather a head's weight or bias over the data-parallel mesh dimensions, for one or several uses.

    Args:
        weight: ``[V, D]`` or ``[V]``. A plain tensor is returned unchanged.
        hidden: the hidden states to multiply by it. The weight is gathered in their dtype, or in that of autocast.
        name: name of the tensor in error messages.

    Returns:
        A plain tensor or, if tensor parallelism splits the weight too, a DTensor over the tensor-parallel mesh
        dimensions. Its gradient is reduced to the shards of ``weight``, averaged over the data-parallel ranks.

    Raises:
        TypeError: ``weight`` or ``hidden`` is not a tensor.
        ValueError: the layout cannot be gathered, or the weight is empty; the message names the fix.
    """
    if not isinstance(weight, DTensor):
        if weight is not None:
            check_tensor(name, weight)
            check_gathered(**{name: weight})
        return weight
    check_tensor("hidden", hidden)
    tensor = _layout.tensor_parallel_dims(weight, hidden)
    data = [i for i in range(weight.device_mesh.ndim) if i not in tensor]
    _check_layout(name, weight, data, tensor)
    if not data:
        return weight
    mesh, placements = weight.device_mesh, weight.placements
    splits = [[i for i in tensor if shard_dim(placements[i]) == d] for d in range(weight.dim())]
    local_shape = (_layout.local_range(size, mesh, s)[1] for size, s in zip(weight.shape, splits, strict=True))
    inputs = weight, data, torch.Size(local_shape), dtype_of_products(hidden, weight)
    full: Tensor = _Gather.apply(*inputs)  # type: ignore[no-untyped-call]
    if not tensor:
        return full
    return as_dtensor(full, _submesh(weight, tensor), [placements[i] for i in tensor], weight.shape, weight.stride())


def _check_layout(name: str, weight: DTensor, data: Sequence[int], tensor: Sequence[int]) -> None:
    mesh = weight.device_mesh
    if any(p.is_partial() for p in weight.placements):
        got = layout(weight)
        raise ValueError(f"{name} must not be Partial, got {got}; redistribute it to Shard or Replicate first")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None and weight.placements == (Replicate(), Shard(0)):
        raise ValueError(
            f"{name} must not be what fully_shard(reshard_after_forward=<int>) leaves after a forward, got "
            f"{layout(weight)}: its gradient would be lost; run the loss inside the head's forward (LossHead) or shard "
            "the head with reshard_after_forward=True. If the mesh is your own, name its dimensions"
        )
    split_by_tensor = {shard_dim(weight.placements[i]) for i in tensor if mesh.size(i) > 1} - {None}
    for i in data:
        placement = weight.placements[i]
        if shard_dim(placement) in split_by_tensor and mesh.size(i) > 1 and not is_strided(placement):
            raise ValueError(
                f"{name} must be split by tensor parallelism first and then by fully_shard, got {layout(weight)}: the "
                "pieces that a tensor-parallel rank would have to gather do not lie side by side"
            )


def _submesh(weight: DTensor, dims: Sequence[int]) -> DeviceMesh:
    mesh = weight.device_mesh
    if len(dims) == mesh.ndim:
        return mesh
    names = [_layout.dim_name(mesh, i) for i in dims]
    if None in names:
        raise ValueError(
            f"the LM head's weight needs a mesh whose dimensions have names, got {layout(weight)}; name them in "
            "init_device_mesh"
        )
    return mesh[tuple(str(name) for name in names)]


class _Gather(torch.autograd.Function):
    """All-gather over the data-parallel mesh dimensions; in backward, sum to the shards and divide by the factor.

    The tensor-parallel part of the weight is treated as a separate tensor on the data-parallel submesh, split by
    ``Shard``. FSDP2's placement may be strided instead, if both split the same dimension. The gradient is summed in the
    dtype of the shard.
    """

    @staticmethod
    def forward(ctx: Any, weight: DTensor, data: Sequence[int], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        mesh = _submesh(weight, data)
        splits = [shard_dim(weight.placements[i]) for i in data]
        placements: list[Placement] = [Replicate() if d is None else Shard(d) for d in splits]
        ctx.weight_layout = (weight.device_mesh, weight.placements, weight.shape, weight.stride())
        ctx.dtype, ctx.factor = weight.dtype, _divide_factor(weight, mesh.size())
        ctx.mesh, ctx.placements, ctx.piece = mesh, placements, (shape, torch.empty(shape, device="meta").stride())
        piece = as_dtensor(weight.to_local().to(dtype), mesh, placements, *ctx.piece)
        return piece.redistribute(placements=[Replicate()] * mesh.ndim).to_local()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        instead = "torch.nn.functional.cross_entropy on the logits of the head itself"
        return *refuse_second_order(lambda grad: (_Gather._scatter(ctx, grad),), (grad,), instead), None, None, None

    @staticmethod
    def _scatter(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.to(ctx.dtype)
        if ctx.factor != 1:
            grad = grad / ctx.factor
        partial = as_dtensor(grad, ctx.mesh, [Partial()] * ctx.mesh.ndim, *ctx.piece)
        # Reduce over the sharded dimensions first, so that only a shard remains to be summed over the replicas.
        scattered = partial.redistribute(placements=[p if p.is_shard() else Partial() for p in ctx.placements])
        return as_dtensor(scattered.redistribute(placements=ctx.placements).to_local(), *ctx.weight_layout)
