"""The row primitives in plain torch."""
