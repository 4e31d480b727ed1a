"""Logits of ``fused_head`` alone: tensors whose values are computed when an operation needs them."""
