"""LM heads taken apart: weight, bias, adapters, hooks and sharding; nothing here computes a loss."""
