"""The random bits as torch.compile sees them: opaque, for compiled code must not do their arithmetic.

The products pass 2^63 and wrap, as torch's own kernels and GPUs have it. In the C++ that inductor writes a signed product
that does so is undefined, and the compiler made other bits of some shapes.

Loaded only while a graph is traced, since registering costs import time.
"""

from __future__ import annotations

import torch

from dllm_kernels.ops._philox import Draw, words


@torch.library.custom_op("dllm_kernels::random_bits", mutates_args=())
def _random_bits_op(seed: torch.Tensor, rows: int, stream: int, blocks: int, columns: int) -> torch.Tensor:
    return words(seed, rows, Draw(stream, blocks, columns)).contiguous()


@_random_bits_op.register_fake
def _(seed: torch.Tensor, rows: int, stream: int, blocks: int, columns: int) -> torch.Tensor:
    return seed.new_empty((rows, blocks, columns))
