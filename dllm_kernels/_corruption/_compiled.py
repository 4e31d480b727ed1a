"""Corruption routines as opaque custom ops for torch.compile, so that inductor generates no code for them.

Their integer products exceed 2^63 and wrap. Signed overflow is undefined in the C++ that inductor generates for a CPU,
and gave other bits. If the last block is short, inductor also left the end of an expanded or reshaped tensor unwritten.

Imported only while a graph is traced, because registration is slow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor

from dllm_kernels._corruption import _corrupt
from dllm_kernels._corruption._topk import choose
from dllm_kernels._random import _philox
from dllm_kernels._utils import _changing


def _mask(like: Tensor, *_: Any) -> Tensor:
    return like.new_empty(like.shape, dtype=torch.bool)


def _mixed(input_ids: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return input_ids.new_empty(input_ids.shape), _mask(input_ids)


def _corrupted(_: _corrupt.Routine, input_ids: Tensor, *__: Any) -> _corrupt.Corrupted:
    return *_mixed(input_ids), input_ids.new_empty(input_ids.shape, dtype=torch.float32)


def _op(function: Callable[..., Any], fake: Callable[..., Any], record: Any = None) -> Any:
    """Register ``function`` as a custom op; an additional last argument holds floats that vary, see ``_changing``.

    A schema has no named tuples. If the first argument is one, of type ``record``, the op takes its fields.
    """
    types = get_type_hints(function)
    result, n = types.pop("return"), len(record._fields) if record else 0
    if record:
        del types[next(iter(types))]
        types = get_type_hints(record) | types
    floats = [i for i, kind in enumerate(types.values()) if kind is float]

    def recorded(args: Sequence[Any]) -> Sequence[Any]:
        return [record(*args[:n]), *args[n:]] if record else args

    def run(*args: Any) -> Any:
        *plain, changing = args
        return function(*recorded(_with(plain, floats, _changing.unpacked([plain[i] for i in floats], changing))))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=type_) for name, type_ in types.items()]
    parameters.append(inspect.Parameter("changing", kind, annotation=Tensor | None))
    run.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
    op = torch.library.custom_op(f"dllm_kernels::{function.__name__}", run, mutates_args=())
    op.register_fake(lambda *args: fake(*recorded(args[:-1])))

    def call(*args: Any) -> Any:
        plain = [*args[0], *args[1:]] if record else list(args)
        numbers, changing = _changing.packed([plain[i] for i in floats])
        return op(*_with(plain, floats, numbers), changing)

    return call


def _with(args: list[Any], places: Sequence[int], numbers: Sequence[float]) -> list[Any]:
    for place, number in zip(places, numbers, strict=True):
        args[place] = number
    return args


corrupt = _op(_corrupt.corrupt, _corrupted, _corrupt.Routine)
mix_tokens = _op(_corrupt.mix_tokens, lambda _, input_ids, *__: _mixed(input_ids), _corrupt.Mix)
complement = _op(_corrupt.complement, _mask)
sample_level = _op(_corrupt.sample_level, lambda B, method, low, high, seed, _: seed.new_empty(B, dtype=torch.float32))
child_seeds = _op(_philox.child_seeds, lambda seeds, count: seeds.new_empty(seeds.shape[0], count))


@torch.library.custom_op("dllm_kernels::gumbel_topk_mask", mutates_args=())
def gumbel_topk_mask(
    log_w: Tensor, k: Tensor, uniform: Tensor | None, seed: Tensor | None, start: Tensor | None, backend: str
) -> Tensor:
    """See ``_topk.choose``."""
    return choose(log_w, k, uniform, seed, start, backend)


gumbel_topk_mask.register_fake(_mask)
