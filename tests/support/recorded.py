"""Ops that a loss runs, recorded where losses call them."""

from typing import NamedTuple

import torch

from dllm_kernels.losses import _model_output

SUFFIX = "_unchecked"


class Run(NamedTuple):
    """Name of the op, its rows (logits or hidden states), and its keyword arguments."""

    op: str
    x: torch.Tensor
    keywords: dict


def record_ops(replace, result=None):
    """Record the ops of all losses from now on; ``replace(owner, name, value)`` sets an attribute.

    The recorded ops return ``result``, or run if it is None.
    """
    runs = []

    def recording(name, function):
        def recorded(x, *head, **keywords):
            runs.append(Run(name.removesuffix(SUFFIX), x, keywords))
            return function(x, *head, **keywords) if result is None else result

        return recorded

    for name, function in list(vars(_model_output).items()):
        if name.endswith(SUFFIX):
            replace(_model_output, name, recording(name, function))
    return runs
