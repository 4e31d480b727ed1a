"""The corruption routines as torch.compile sees them: opaque ops, of which it writes no code of its own.

Their integer products pass 2^63 and wrap. In the C++ that inductor writes for a CPU that is undefined, and its compiler
made other bits of them; where the last block is short, inductor left the end of a spread or reshaped tensor unwritten.

Loaded only while a graph is traced, since registering costs import time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dllm_kernels._random import _corrupt, _philox
from dllm_kernels._random._topk import choose
from dllm_kernels._utils import _changing


def _mask(like: Tensor, *_: Any) -> Tensor:
    return like.new_empty(like.shape, dtype=torch.bool)


def _mixed(input_ids: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return input_ids.new_empty(input_ids.shape), _mask(input_ids)


def _corrupted(what: str, input_ids: Tensor, *_: Any) -> _corrupt.Corrupted:
    return *_mixed(input_ids), input_ids.new_empty(input_ids.shape, dtype=torch.float32)


def _op(function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Its floats may change from call to call (``_changing``): an argument more, at the end, has those that do."""
    name = function.__name__
    floats = [i for i, p in enumerate(inspect.signature(function).parameters.values()) if p.annotation == "float"]
    schema = torch.library.infer_schema(function, mutates_args=()).replace(") ->", ", Tensor? changing) ->")

    def run(*args: Any) -> Any:
        *plain, changing = args
        return function(*_with(plain, floats, _changing.unpacked([plain[i] for i in floats], changing)))

    op = torch.library.custom_op(f"dllm_kernels::{name}", run, mutates_args=(), schema=schema)
    op.register_fake(lambda *args: fake(*args[:-1]))

    def call(*args: Any) -> Any:
        numbers, changing = _changing.packed([args[i] for i in floats])
        return op(*_with(list(args), floats, numbers), changing)

    return call


def _with(args: list[Any], places: Sequence[int], numbers: Sequence[float]) -> list[Any]:
    for place, number in zip(places, numbers, strict=True):
        args[place] = number
    return args


corrupt = _op(_corrupt.corrupt, _corrupted)
mix_tokens = _op(_corrupt.mix_tokens, _mixed)
complement = _op(_corrupt.complement, _mask)
sample_level = _op(_corrupt.sample_level, lambda B, method, low, high, seed, _: seed.new_empty(B, dtype=torch.float32))
child_seeds = _op(_philox.child_seeds, lambda seeds, count: seeds.new_empty(len(seeds), count))


@torch.library.custom_op("dllm_kernels::gumbel_topk_mask", mutates_args=())
def gumbel_topk_mask(log_w: Tensor, k: Tensor, uniform: Tensor | None, seed: Tensor | None, backend: str) -> Tensor:
    """``_topk.choose``."""
    return choose(log_w, k, uniform, seed, backend)


gumbel_topk_mask.register_fake(_mask)
