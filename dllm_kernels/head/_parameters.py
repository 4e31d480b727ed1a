"""Weight, bias and logits of a model's LM head."""

from __future__ import annotations

from torch import Tensor, nn

from dllm_kernels._checks import type_name
from dllm_kernels._graph._plain import is_dtensor
from dllm_kernels.head._module import check_linear_head, head_module, projects, token_layer, token_rows, unwrapped

FROM_LOGITS = "use a base loss from logits, such as MaskedCrossEntropy, whose logits the head computes"


def head_weight(model: nn.Module | None) -> Tensor:
    """Return the weight ``[V, D]`` of the LM head module, otherwise the parameter named ``lm_head``."""
    head = head_module(model)
    if head is not None:
        if (layer := token_layer(head)) is not None:
            return token_rows(layer).weight
        check_linear_head(head, FROM_LOGITS)
        if not isinstance(weight := getattr(head, "weight", None), Tensor):
            raise ValueError(f"the LM head must have a weight, got {type_name(head)}; {FROM_LOGITS}")
        return weight
    model = unwrapped(model)
    parameters = () if model is None else model.named_parameters(remove_duplicate=False)
    for name, parameter in parameters:
        if "lm_head" in name and not name.endswith("bias"):
            _check_owners(model, name)
            return parameter
    raise ValueError(
        "model must have get_output_embeddings(), a module named lm_head or a parameter with lm_head in its name, got "
        f"{type_name(model)}"
    )


def _check_owners(model: nn.Module | None, name: str) -> None:
    """Raise unless every module on the path to the parameter, from the module named ``lm_head`` on, is a plain head."""
    module, within = model, False
    for part in name.split(".")[:-1]:
        module, within = getattr(module, part), within or "lm_head" in part
        if within:
            check_linear_head(module, FROM_LOGITS)


def head_bias(model: nn.Module | None) -> Tensor | None:
    """Return the bias ``[V]`` of the LM head, or None."""
    head = head_module(model)
    if (layer := token_layer(head)) is not None:
        return token_rows(layer).bias
    bias = getattr(head, "bias", None)
    return bias if isinstance(bias, Tensor) else None


def projected(hidden: Tensor, model: nn.Module, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Compute logits by calling the head module, which gathers a sharded weight, or from the given head."""
    head = head_module(model) if weight is None else None
    if head is not None and projects(head):
        logits: Tensor = head(hidden)
        return logits
    weight, bias = head_weight(model) if weight is None else weight, head_bias(model) if bias is None else bias
    return nn.functional.linear(hidden, weight, bias)


def gathered_once(weight: Tensor, hidden: Tensor) -> Tensor:
    """Gather a sharded head for several uses, which then share one gather and one reduction of its gradient."""
    if not is_dtensor(weight):
        return weight
    from dllm_kernels.distributed.fsdp import gather_head

    return gather_head(weight, hidden)
