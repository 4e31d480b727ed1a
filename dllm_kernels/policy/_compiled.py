"""Gauss-Legendre quadrature as an opaque custom op for torch.compile, imported only while a graph is traced.

Tracing Newton's method would unroll it, and with a symbolic number of nodes it would build expressions without end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_kernels.policy import _quadrature


@torch.library.custom_op("dllm_kernels::quadrature_rule", mutates_args=())
def quadrature_rule(like: Tensor, num: int) -> Tensor:
    """See ``_quadrature.quadrature_rule``."""
    return _quadrature.quadrature_rule(like, num)


@quadrature_rule.register_fake
def _(like: Tensor, num: int) -> Tensor:
    return like.new_empty((2, num), dtype=torch.float32)
