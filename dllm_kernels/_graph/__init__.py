"""Custom ops, changing floats, autograd state, kinds of tensors: all that touches torch's private names."""
