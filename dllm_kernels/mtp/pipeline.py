"""Loss of the last stage of a pipeline schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dllm_kernels._checks import type_name
from dllm_kernels.head._parameters import gathered_once, head_weight
from dllm_kernels.mtp.cross_entropy import calculate_loss, checked_ignore_index, required, takes_hidden_states
from dllm_kernels.mtp.depths import calculate_mtp_loss
from dllm_kernels.rows._interface import IGNORE
from dllm_kernels.rows._logits import LinearLogits


def mtp_loss_scaling_factor(model: nn.Module, default: float = 0.1) -> float:
    """Return ``model.mtp_config.loss_scaling_factor``, or the default if the model has none."""
    config = getattr(model, "mtp_config", None)
    return default if config is None else float(getattr(config, "loss_scaling_factor", default))


class PipelineCausalLMLoss(nn.Module):
    """Loss of the last stage of a pipeline schedule: the main cross-entropy, and MTP in training mode.

    The last element of the stage's output may be ``seq_idx``, a 2-d int32 tensor. Each micro-batch then carries its
    ``seq_idx`` to the loss under any schedule.

    Args:
        loss_fn: the base loss.
        model: model of the last stage, for its LM head, ``training`` flag and MTP configuration.
        scaling_factor: weight of MTP. None: the ``mtp_loss_scaling_factor`` of the output, else
            ``mtp_config.loss_scaling_factor`` of the model, else 0.1.
        ignore_index: -100, or the index of ``loss_fn``.
        grad_reduce_group: passed on if the base loss takes it.

    Raises:
        ValueError: ``ignore_index`` differs from the index of the loss.
    """

    def __init__(
        self, loss_fn: nn.Module, model: nn.Module, scaling_factor: float | None = None,
        ignore_index: int | None = IGNORE, grad_reduce_group: Any = None,
    ) -> None:  # fmt: skip
        """Initialize; the arguments are documented on the class."""
        super().__init__()
        self.loss_fn, self.model = loss_fn, model
        self.scaling_factor, self.grad_reduce_group = scaling_factor, grad_reduce_group
        self.ignore_index = checked_ignore_index(ignore_index, loss_fn)
        self.cu_seqlens: Tensor | None = None

    @staticmethod
    def _extract_seq_idx_tail(output: Any) -> tuple[Tensor | None, Any]:
        """Split the trailing 2-d int32 tensor off a tuple: (seq_idx, rest), or (None, output) if there is none."""
        if isinstance(output, tuple) and output:
            last = output[-1]
            if isinstance(last, Tensor) and last.dtype == torch.int32 and last.dim() == 2:
                return last, output[:-1]
        return None, output

    def forward(self, output: Any, labels: Tensor) -> Tensor:
        """Compute the loss of one micro-batch.

        Args:
            output: logits ``[B, S, V]``, also as :class:`~dllm_kernels.ops.LinearLogits` (hidden states ``[B, S, H]``
                if ``loss_fn`` takes hidden states); an object or mapping with ``logits`` and, for MTP,
                ``mtp_per_depth_h`` or ``mtp_per_depth_logits`` and ``mtp_loss_scaling_factor``; or a tuple ``(logits,
                *mtp_per_depth_h[, seq_idx])`` with ``seq_idx`` a ``[B, S]`` int32 tensor.
            labels: ``[B, S]`` integers, not shifted for MTP.

        Returns:
            0-d loss.

        Raises:
            TypeError: ``output`` has another type, such as a list, or is a tuple without logits.
            ValueError: a base loss that takes hidden states is given a tuple, the head has more than weight and bias,
                or a tuple holds integers that are not a ``seq_idx``.
        """
        if isinstance(output, LinearLogits):  # a tuple itself
            output = {"logits": output}
        seq_idx, output = self._extract_seq_idx_tail(output)
        _check_output(output)
        linear = takes_hidden_states(self.loss_fn)
        if isinstance(output, tuple):
            if linear:
                raise ValueError(
                    f"output must not be a tuple for {type_name(self.loss_fn)}, which works from hidden states: a "
                    "pipeline stage with MTP returns logits first"
                )
            are_logits = getattr(self.model, "mtp_outputs_are_logits", False)
            others = "mtp_per_depth_logits" if are_logits else "mtp_per_depth_h"
            output = {"logits": output[0], others: output[1:]}
        hidden = output if isinstance(output, Tensor) else _final_hidden(output)
        logits = _field(output, "logits") if hasattr(output, "logits") or isinstance(output, Mapping) else output
        common: dict[str, Any] = {"model": self.model, "grad_reduce_group": self.grad_reduce_group}
        if linear:
            common |= self._head(required({"hidden_states": hidden}, "hidden_states", self.loss_fn))
        loss = calculate_loss(self._main_loss_fn(), logits=logits, hidden_states=hidden, labels=labels, **common)
        if not self.model.training or (depths := self._depths(output)) is None:
            return loss
        packing: dict[str, Any] = {"cu_seqlens": self.cu_seqlens, "seq_idx": seq_idx}
        common |= {"labels": labels, "scaling_factor": self._scaling(output), "ignore_index": self.ignore_index}
        if linear and "mtp_per_depth_h" in depths:
            common |= self._head(depths["mtp_per_depth_h"], common["lm_weight"])
        mtp: Tensor = calculate_mtp_loss(self.loss_fn, **depths, **packing, **common)
        return loss + mtp

    def _main_loss_fn(self) -> nn.Module:
        """Return the base loss of the main path."""
        return self.loss_fn

    def _head(self, hidden: Tensor | list[Tensor], lm_weight: Tensor | None = None) -> dict[str, Any]:
        """Return the head as arguments of the losses of ``hidden``, of the main path or of all depths.

        The weight is gathered once, for the main path; the depths get it as ``lm_weight``.
        """
        if lm_weight is None:
            assert isinstance(hidden, Tensor)
            lm_weight = gathered_once(head_weight(self.model), hidden)
        return {"lm_weight": lm_weight}

    @staticmethod
    def _depths(output: Any) -> dict[str, Any] | None:
        depths = {name: _field(output, name) for name in ("mtp_per_depth_h", "mtp_per_depth_logits")}
        lists = {name: list(value) for name, value in depths.items() if value is not None}
        return {name: value for name, value in lists.items() if value} or None  # no depths: no MTP

    def _scaling(self, output: Any) -> float:
        if self.scaling_factor is not None:
            return self.scaling_factor
        value = _field(output, "mtp_loss_scaling_factor")
        return mtp_loss_scaling_factor(self.model) if value is None else float(value)


def _check_output(output: Any) -> None:
    """Raise unless the output of a stage, without its ``seq_idx``, has one of the documented forms."""
    if isinstance(output, tuple):
        known = len(output) > 0 and isinstance(output[0], (Tensor, LinearLogits))
        for i, part in enumerate(output[1:], start=1):
            if isinstance(part, Tensor) and not part.is_floating_point():
                dtype = str(part.dtype).removeprefix("torch.")
                raise ValueError(
                    f"output[{i}] must be the floating output of an MTP depth, or at the end of the tuple seq_idx, "
                    f"int32 [B, S], got {dtype} of shape {tuple(part.shape)}"
                )
    else:
        known = isinstance(output, (Tensor, Mapping)) or hasattr(output, "logits")
        known = known or hasattr(output, "hidden_states")
    if not known:
        got = "a tuple without them" if isinstance(output, tuple) else type_name(output)
        raise TypeError(
            "output must be a tensor, a tuple whose first element is the logits, or an object or mapping with logits "
            f"or hidden_states, got {got}"
        )


def _field(output: Any, name: str) -> Any:
    """Return a field of a model output, which is an object or a mapping; None if missing."""
    value = getattr(output, name, None)
    return output.get(name) if value is None and isinstance(output, Mapping) else value


def _final_hidden(output: Any) -> Tensor | None:
    """Return ``hidden_states`` of a model output, or their last element if they are a sequence."""
    states = _field(output, "hidden_states")
    if isinstance(states, (list, tuple)):
        states = next((s for s in reversed(states) if s is not None), None)
    return states if isinstance(states, Tensor) else None


@dataclass
class MTPLossConfig:
    """Hyperparameters of the MTP loss.

    Attributes:
        scaling_factor: weight of MTP; None: the factor of the output or the model.
        ignore_index: -100, or the index of the base loss.
    """

    scaling_factor: float | None = None
    ignore_index: int | None = IGNORE

    def build(self, loss_fn: nn.Module, model: nn.Module, *, grad_reduce_group: Any = None) -> PipelineCausalLMLoss:
        """Build the pipeline loss for a base loss and a model."""
        return PipelineCausalLMLoss(loss_fn, model, self.scaling_factor, self.ignore_index, grad_reduce_group)
