"""Calls of the public functions whose launches are all the kernels there are: what is compiled and inspected.

``real`` holds the sizes of real training, both sides of every choice that a launcher makes (a row whole or split, with or
without the correct flag, registers or memory) in every dtype. ``odd`` holds what a caller may bring besides: vocabularies
and strides that 16 bytes do not divide, masks of every kind, sizes of 1, offsets past 2**31.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.mock_gpu import MockGPU, Specimen
from benchmarks.shapes import DFLASH_4B, GEMMA_CANVAS, HYBRID, LLADA_SHORT, Shape
from dllm_kernels import corruption, ops

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# Runs on the mock GPU, which is also the default device then.
Call = Callable[[MockGPU], object]


def real() -> Iterator[Call]:
    """Calls at the sizes of real training."""
    for dtype in DTYPES:
        yield from _from_logits(dtype)
        yield from _from_hidden(dtype)
    for size in (32, 4096, 131072):
        yield lambda _, size=size: _topk(size)
        yield lambda _, size=size: corruption.corrupt_blockwise(*_batch(8, size), 5, block_size=size)
    yield lambda _: corruption.corrupt_uniform(*_batch(8, 4096), 5)
    yield lambda _: corruption.corrupt_uniform_random(*_batch(8, 4096), 126464)
    yield lambda _: corruption.corrupt_uniform_random(*_batch(8, 4096), 126464, block_size=32)
    yield lambda _: corruption.corrupt_all_masked(*_batch(8, 4096), 5)


def odd() -> Iterator[Call]:
    """Calls with what else a caller may bring."""
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((8, 512, 50257), (1, 96, 50257), (1, 1, 1), (3, 1, 129), (2, 17, 1)):
            yield lambda _, dtype=dtype, shape=shape: _backward(_token(_logits(shape, dtype), with_correct=True))
            yield lambda _, dtype=dtype, shape=shape: _linear(dtype, shape, with_correct=True)
    for change in (_shifted, _of_longer_rows, _transposed, _misaligned):
        yield lambda _, change=change: _backward(_token(change(_logits((4, 1025, 126464), torch.bfloat16))))
    for rows in (None, torch.bool, torch.int64, torch.float16, torch.float64):
        yield lambda _, rows=rows: _backward(_token(_logits((4, 1024, 126464), torch.bfloat16), rows))
        yield lambda _, rows=rows: _backward(_token(_logits((1, 64, 126464), torch.bfloat16), rows))
        yield lambda gpu, rows=rows: _captured(gpu, rows)
    yield lambda _: _backward(_token(_logits((1, 131072, 32768), torch.bfloat16)))  # 2**32 logits
    yield lambda _: _backward(_token(_logits((2, 65536, 50257), torch.bfloat16)))
    for ids in (torch.int32, torch.int64):
        for mask in (torch.bool, torch.int64, torch.float32):
            for routine in (corruption.corrupt_uniform, corruption.corrupt_blockwise):
                yield lambda _, r=routine, ids=ids, mask=mask: r(*_batch(8, 4096, ids, mask), 5)
    for B, L, size in ((1, 1, 1), (1, 50, 32), (3, 100, 7), (7, 5000, None), (524288, 4160, 32)):
        yield lambda _, B=B, L=L, size=size: corruption.corrupt_blockwise(*_batch(B, L), 5, block_size=size)
        yield lambda _, B=B, L=L, size=size: corruption.corrupt_uniform_random(*_batch(B, L), 9, block_size=size)
    yield lambda _: corruption.corrupt_blockwise(torch.zeros(8, 64, dtype=torch.int64), None, 5, block_size=4)
    yield lambda _: corruption.corrupt_blockwise(*(t.t() for t in _batch(4096, 8)), 5, seeds=_seeds(8))
    yield lambda _: corruption.corrupt_uniform(*(t[:, 1:] for t in _batch(8, 4097)), 5, seeds=_seeds(8))
    for dtype in (torch.bfloat16, torch.float64):
        for shape in ((1, 1), (5, 33), (524288, 4160)):
            yield lambda _, d=dtype, s=shape: ops.gumbel_topk_mask(torch.empty(s, dtype=d), 3, seeds=_seeds(s[0]))
    yield lambda _: ops.gumbel_topk_mask(torch.empty(4096, 64).t(), torch.zeros(64, dtype=torch.int32))


def specimens(target: str, calls: Callable[[], Iterator[Call]] = real) -> dict[str, Specimen]:
    """The kernels that the calls launch, by a name that tells them apart."""
    with MockGPU(target) as gpu, torch.device("cuda"):
        for call in calls():
            call(gpu)
    return named(gpu.specimens)


def named(found: list[Specimen]) -> dict[str, Specimen]:
    """Specimens by kernel, type of what it works on, flags that are on, and whatever else tells them apart."""
    out: dict[str, Specimen] = {}
    for kernel in dict.fromkeys(s.kernel for s in found):
        alike = [s for s in found if s.kernel == kernel]
        for specimen, words in zip(alike, _telling([_features(s) for s in alike]), strict=True):
            out[f"{kernel}[{', '.join((specimen.dtype, *words))}]"] = specimen
    assert len(out) == len(found), "two specimens have one name"
    return out


def _features(specimen: Specimen) -> dict[str, str]:
    """What a name may mention, flags first."""
    values = {"dtype": specimen.dtype} | specimen.constants | specimen.types | {"num_warps": specimen.options["num_warps"]}
    flags = [name for name, value in values.items() if isinstance(value, bool)]
    return {name: str(values[name]) for name in dict.fromkeys(("dtype", *flags, *values))}


def _telling(alike: list[dict[str, str]]) -> list[list[str]]:
    """For each of them the flags that are not all alike, and what splits those that flags leave together."""
    groups = [(features["dtype"],) for features in alike]
    told: list[list[str]] = [[] for _ in alike]
    for name in dict.fromkeys(name for features in alike for name in features):
        values = [features.get(name, "") for features in alike]
        finer = [(*group, value) for group, value in zip(groups, values, strict=True)]
        flag = set(values) == {"True", "False"}
        if not flag and len(set(finer)) == len(set(groups)):
            continue
        groups = finer
        for words, value in zip(told, values, strict=True):
            words += _word(name, value)
    return told


def _word(name: str, value: str) -> list[str]:
    """A feature in few letters; what is off or not given is not worth any."""
    if value in ("True", "False", "None"):
        return [name.removeprefix("HAS_").removeprefix("WITH_").lower()] if value == "True" else []
    return [f"{name.removesuffix('_ptr')}={value}"]


def _from_logits(dtype: torch.dtype) -> Iterator[Call]:
    for shape in (LLADA_SHORT, GEMMA_CANVAS):
        sizes = (shape.batch, shape.length, shape.vocab)
        yield lambda _, sizes=sizes: _backward(_token(_logits(sizes, dtype), with_correct=True))
        yield lambda _, sizes=sizes: _backward(_weighted(_logits(sizes, dtype)))


def _from_hidden(dtype: torch.dtype) -> Iterator[Call]:
    shape = DFLASH_4B
    sizes = (shape.batch, shape.length, shape.vocab)
    yield lambda _: _linear(dtype, sizes, frozen=True, with_correct=True)
    yield lambda _: _linear(dtype, sizes, num_active=5000)


def _logits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def _token(logits: torch.Tensor, rows: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    targets = torch.zeros(logits.shape[:-1], dtype=torch.int64)
    active = None if rows is None else torch.ones(logits.shape[:-1], dtype=rows)
    return ops.token_nll(logits, targets, active=active, **options).nll.sum()


def _weighted(logits: torch.Tensor, **options: Any) -> torch.Tensor:
    targets = torch.zeros(logits.shape[:-1], dtype=torch.int64)
    return ops.weighted_nll(logits, targets, torch.rand(logits.shape[:-1]), with_lse=True, **options).loss


def _backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def _linear(dtype: torch.dtype, shape: tuple[int, int, int], frozen: bool = False, D: int = 2560, **options: Any) -> None:
    """Both ops from hidden states, the weighted one and the one whose backward makes the logits again."""
    *rows, V = shape
    hidden = torch.empty(*rows, D, dtype=dtype, requires_grad=True)
    head = torch.empty(V, D, dtype=dtype, requires_grad=not frozen)
    targets = torch.zeros(rows, dtype=torch.int64)
    _backward(ops.weighted_linear_nll(hidden, head, targets, torch.rand(rows), **options).loss)
    _backward(ops.linear_token_nll(hidden, head, targets, **options).nll.sum())


def _captured(gpu: MockGPU, rows: torch.dtype | None) -> None:
    hidden = torch.empty(1024, 512, dtype=torch.bfloat16, requires_grad=True)
    head = torch.empty(32000, 512, dtype=torch.bfloat16)
    active = None if rows is None else torch.ones(1024, dtype=rows)
    with gpu.capturing():
        _backward(ops.linear_token_nll(hidden, head, torch.zeros(1024, dtype=torch.int64), active=active).nll.sum())


def _shifted(logits: torch.Tensor) -> torch.Tensor:
    return logits[:, :-1]


def _of_longer_rows(logits: torch.Tensor) -> torch.Tensor:
    return logits[..., :-3]


def _transposed(logits: torch.Tensor) -> torch.Tensor:
    return logits.transpose(0, 1)


def _misaligned(logits: torch.Tensor) -> torch.Tensor:
    return logits[..., 1:]


def _batch(
    B: int, L: int, ids: torch.dtype = torch.int64, mask: torch.dtype = torch.bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(B, L, dtype=ids), torch.ones(B, L, dtype=mask)


def _seeds(B: int) -> torch.Tensor:
    return torch.zeros(B, dtype=torch.int64)


def _topk(size: int) -> None:
    log_w, k = torch.empty(8, size), torch.zeros(8, dtype=torch.int64)
    ops.gumbel_topk_mask(log_w, k)
    ops.gumbel_topk_mask(log_w, k, uniform=torch.rand(8, size))
