"""Training loops from logits, computed from hidden states."""

from dllm_kernels.deferred._head import fused_head

__all__ = ["fused_head"]
