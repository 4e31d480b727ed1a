"""Training loops from logits, computed from hidden states."""

from dllm_kernels.fused._head import FusedHead, fused_head

__all__ = ["FusedHead", "fused_head"]
