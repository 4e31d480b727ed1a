"""Logits of ``fused_head`` alone: tensors whose values are computed when an operation needs them."""

from dllm_kernels.deferred._head import fused_head

__all__ = ["fused_head"]
