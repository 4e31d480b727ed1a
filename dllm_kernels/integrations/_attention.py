"""Test whether a model attends to later tokens: change the second half and compare hidden states of the first.

A model is causal if the first half does not depend on the second, although the second half depends on the first. The
halves are tested at two borders, one position apart, because attention that is causal between blocks does not cross the
border of a block. The other condition excludes models that mix no positions yet, for example because the output
projection of their attention is initialised to 0.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dllm_kernels._graph._plain import is_dtensor
from dllm_kernels.head._module import unwrapped
from dllm_kernels.rows._dtypes import accum_dtype

# Larger buffers are constants (attention masks, quantized weights), of which a copy may not fit into memory.
MAX_BUFFER = 2**20
# Changes below this fraction of those in the other direction are rounding.
ROUNDING = 1e-3


def on_any_rank(device: torch.device, *results: bool | Tensor) -> list[bool]:
    """Return 0-d results as bools, True if they are True on any rank, so that all ranks raise or none does."""
    flags = torch.stack([torch.as_tensor(x, device=device).int() for x in results])
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    return [bool(x) for x in flags.tolist()]


def dependence(
    model: nn.Module, inputs: Mapping[str, Any], hidden_of: Callable[[nn.Module, dict[str, Any]], Tensor | None]
) -> tuple[bool | Tensor, bool | Tensor]:
    """Return (later, earlier): True if positions depend on later, or on earlier tokens; or if they cannot be tested.

    Every rank calls the model the same number of times, whatever its batch is, because sharded models communicate.

    Args:
        model: the model as it is trained, in its wrappers.
        inputs: arguments of the model, ``input_ids`` ``[B, L]`` among them.
        hidden_of: calls the model with the given arguments; returns the input of its LM head, or None.
    """
    ids = inputs["input_ids"]
    changed, position = torch.where(ids == 0, 1, 0).to(ids.dtype), torch.arange(ids.shape[1], device=ids.device)
    fixed = {name: value for name, value in inputs.items() if name != "labels"}
    if isinstance(attention := fixed.get("attention_mask"), Tensor) and attention.shape == ids.shape:
        fixed["attention_mask"] = torch.ones_like(attention)  # padding must not hide a dependence
    middle = (ids.shape[1] + 1) // 2
    compared = position < middle - 1, position < middle, position >= middle  # tokens that stay and are compared
    others = [torch.where(where, ids, changed) for where in compared]
    model = _without_wrappers(model)
    with unchanged(model, ids.device):
        outputs = [hidden_of(model, {**fixed, "input_ids": x}) for x in (ids, *others)]
    rows = [_rows(hidden, ids) for hidden in outputs if hidden is not None]
    if len(rows) < len(outputs) or any(x is None for x in rows):
        return True, True
    before, *after = (x.to(accum_dtype(x.dtype)) for x in rows)
    *from_later, from_earlier = [(before - x)[:, where].norm() for x, where in zip(after, compared, strict=True)]
    return torch.stack(from_later).amax() > ROUNDING * from_earlier, from_earlier > 0


def _rows(hidden: Any, ids: Tensor) -> Any:
    """Return the hidden states as ``[B, L, D]``; None if their rows are other positions."""
    whole = hidden.full_tensor() if is_dtensor(hidden) else hidden
    return whole.reshape(*ids.shape, -1) if whole.shape[:-1].numel() == ids.numel() else None


def _without_wrappers(model: Any) -> Any:
    """Remove ``torch.compile`` and DDP, which is not needed without gradients and would change its state."""
    inner: Any = unwrapped(model)
    inner = getattr(inner, "_orig_mod", inner)  # of torch.compile
    return model if inner is model else _without_wrappers(inner)


@contextlib.contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluate the model without gradients; then restore modes, buffers, generators and the sharding of parameters."""
    modules = list(model.modules())
    modes = [module.training for module in modules]
    buffers = [
        (module._buffers, name, buffer, buffer.clone(), buffer._version)
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.numel() <= MAX_BUFFER and not buffer.is_inference()
    ]
    devices, kind = ([device], device.type) if device.type in ("cuda", "xpu") else ([], "cuda")  # those of fork_rng
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    eager: Any = contextlib.nullcontext()
    if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and the import takes a second
        eager = torch.compiler.set_stance("force_eager")
    with torch.random.fork_rng(devices, device_type=kind), torch.no_grad(), eager:
        try:
            model.eval()
            yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
                if fsdp is not None and isinstance(module, fsdp.FSDPModule):  # the root stays unsharded
                    module.reshard()
            for owner, name, buffer, copy, version in buffers:
                owner[name] = buffer
                if buffer._version != version:
                    buffer.copy_(copy)
