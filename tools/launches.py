"""Calls of the public functions that together launch every kernel, for compilation and inspection.

``real`` has the sizes of real training in every dtype. It covers both sides of every choice of a launcher: a row whole
or split, with or without the correct flag, keys in registers or in memory. ``odd`` has unusual inputs: vocabularies and
strides that are not multiples of 16 bytes, masks of every kind, sizes of 1, offsets past 2**31.

Every op with a file of kernels of its name has calls in both, from its ``OpCase`` in ``tests/``. It is loaded by name,
because tests import tools.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.shapes import DFLASH_4B, GEMMA_CANVAS, LLADA_SHORT
from dllm_kernels import ops
from dllm_kernels.corruption import (
    complementary,
    corrupt_all_masked,
    corrupt_blockwise,
    corrupt_mix,
    corrupt_uniform,
    corrupt_uniform_random,
    sample_level,
)
from dllm_kernels.losses import HybridDiffusionLLMLoss, MDLMCrossEntropyLoss
from dllm_kernels.rows._divergence_kinds import NAMES
from dllm_kernels.rows._divergence_spec import checked_spec
from dllm_kernels.rows._stats_interface import StatsFlags
from tools.mock_gpu import MockGPU, Specimen

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
REAL_LOGITS = (LLADA_SHORT.batch, LLADA_SHORT.length, LLADA_SHORT.vocab)
FEW_ROWS = (GEMMA_CANVAS.batch, GEMMA_CANVAS.length, GEMMA_CANVAS.vocab)
SHORT_ROWS = (4, 1024, 16000)  # no launcher splits these rows
REAL_HIDDEN = (DFLASH_4B.batch, DFLASH_4B.length, DFLASH_4B.vocab)

STATISTICS: dict[str, Any] = dict.fromkeys(StatsFlags._fields, True)  # that a flag requests
ALL_STEPS: dict[str, Any] = {"softcap": 30.0, "scale": 1 / 0.7, "skip_id": 126336}
SOME_STEPS: tuple[dict[str, Any], ...] = ({"softcap": 30.0}, {"scale": 1 / 0.7}, {"scale": 1 / 0.7, "skip_id": 126336})

Call = Callable[[], object]


def with_own_kernels() -> list[tuple[str, Any]]:
    """Return (kind of logits, ``OpCase``) of the ops whose kernels no other call here launches."""
    found = importlib.import_module("tests.support.op_cases").OF_EVERY_KIND
    return [(kind, case) for kind, case in found if case.kernels is None]


def real() -> Iterator[Call]:
    """Yield calls with the sizes of real training."""
    for form, case in with_own_kernels():
        for dtype in DTYPES:
            for steps in ({}, ALL_STEPS):
                yield partial(of_op, case, form, REAL_LOGITS if form == "stored" else REAL_HIDDEN, dtype, **steps)
    for dtype in DTYPES:
        for shape in (REAL_LOGITS, FEW_ROWS, SHORT_ROWS):
            yield partial(token_nll, shape, dtype, with_correct=True)
            yield partial(token_nll, shape, dtype, with_ids=True)
            yield partial(weighted_nll, shape, dtype)
            yield partial(token_nll, shape, dtype)
        yield partial(from_hidden, REAL_HIDDEN, dtype, frozen=True, with_correct=True)
        yield partial(from_hidden, REAL_HIDDEN, dtype, frozen=True, with_ids=True)
        yield partial(from_hidden, REAL_HIDDEN, dtype, frozen=True)
    for shape in (REAL_LOGITS, SHORT_ROWS):
        yield partial(weighted_nll, shape, torch.bfloat16, with_correct=True)
    yield partial(from_hidden, REAL_HIDDEN, torch.bfloat16, num_active=5000)
    yield from transformed()
    for dtype in DTYPES:
        yield partial(row_stats, REAL_LOGITS, dtype, **STATISTICS, mix=True, with_correct=True)
        yield partial(row_stats, REAL_LOGITS, dtype, **STATISTICS, with_ids=True)
    alone: tuple[dict[str, Any], ...] = ({}, *({name: True} for name in STATISTICS), {"mix": True})
    for requested in alone:
        yield partial(row_stats, REAL_LOGITS, torch.bfloat16, **requested)
    yield partial(row_stats_from_hidden, REAL_HIDDEN, torch.bfloat16)
    for dtype in DTYPES:
        yield partial(masked_diffusion, SHORT_ROWS, dtype)
    yield from divergences()
    for dtype in DTYPES:
        yield partial(sample, REAL_HIDDEN, dtype)
    yield partial(sample, REAL_HIDDEN, torch.bfloat16, temperature=0)
    yield partial(sample, FEW_ROWS, torch.bfloat16, softcap=30.0, temperature=0.7, skip_id=5)
    for size in (32, 4096, 131072):
        yield partial(topk, 8, size)
        yield partial(topk, 8, size, given=True)
        yield partial(corrupt, corrupt_blockwise, 8, max(size, 4096), block_size=size)
    for routine in (corrupt_uniform, corrupt_all_masked, corrupt_uniform_random):
        yield partial(corrupt, routine, 8, 4096)
    yield partial(corrupt, corrupt_uniform_random, 8, 4096, block_size=32)
    yield partial(mix, 8, 4096)
    for options in ({}, {"exact": True}):
        yield partial(with_level, corrupt_uniform, 8, 4096, **options)
    yield partial(with_level, corrupt_uniform, 8, 131072, exact=True)
    yield partial(complement, 8, 4096)
    yield partial(levels, 8)


def transformed() -> Iterator[Call]:
    """Yield calls with a transform of the logits: all of its steps in every dtype, some of them in bfloat16."""
    for dtype in DTYPES:
        for flag in (None, "with_correct", "with_ids"):
            flags: dict[str, Any] = {} if flag is None else {flag: True}
            yield partial(token_nll, REAL_LOGITS, dtype, **flags, **ALL_STEPS)
            yield partial(token_nll, SHORT_ROWS, dtype, **flags, **(ALL_STEPS | {"skip_id": 0}))
            yield partial(from_hidden, REAL_HIDDEN, dtype, frozen=True, **flags, **ALL_STEPS)
    for steps in SOME_STEPS:
        yield partial(token_nll, REAL_LOGITS, torch.bfloat16, with_correct=True, **steps)
        yield partial(from_hidden, REAL_HIDDEN, torch.bfloat16, frozen=True, **steps)
    yield partial(token_nll, SHORT_ROWS, torch.bfloat16, with_correct=True, scale=1 / 0.7)


# Each kind with separate passes or functions, and the largest possible sum of kinds.
KINDS: tuple[str | dict[str, float], ...] = (
    "kl",
    "l1",
    "jsd",
    "rkl",
    {"ce": 0.1, "lk": 1.0},
    dict.fromkeys(NAMES, 0.1),
)


def divergences() -> Iterator[Call]:
    """Yield calls of the divergence: kinds, dtypes, steps of a transform, with and without a gradient."""
    for kind in KINDS:
        yield partial(divergence_from_hidden, REAL_HIDDEN, torch.bfloat16, kind=kind)
    for kind in ("kl", "l1"):
        for dtype in DTYPES[1:]:
            yield partial(divergence_from_hidden, REAL_HIDDEN, dtype, kind=kind)
        yield partial(divergence_from_hidden, REAL_HIDDEN, torch.bfloat16, kind=kind, temperature=0.7)
        yield partial(divergence_from_hidden, REAL_HIDDEN, torch.bfloat16, kind=kind, **ALL_STEPS)
        yield partial(divergence, REAL_LOGITS, torch.bfloat16, kind=kind)
    yield partial(divergence_from_hidden, REAL_HIDDEN, torch.bfloat16, kind=KINDS[-1], **ALL_STEPS)
    for teacher in ("draft", "full"):
        yield partial(divergence_of_a_draft_vocabulary, REAL_HIDDEN, torch.bfloat16, kind="kl", teacher=teacher)
        yield partial(divergence_of_a_draft_vocabulary, REAL_HIDDEN, torch.bfloat16, kind=KINDS[-1], teacher=teacher)


def odd() -> Iterator[Call]:
    """Yield calls with unusual inputs that a caller may pass."""
    for form, case in with_own_kernels():
        for dtype in DTYPES:
            for shape in ((8, 512, 50257), (2, 17, 1)):
                yield partial(of_op, case, form, shape, dtype)
        for view in (_shifted, _of_longer_rows, _transposed, _misaligned) if form == "stored" else ():
            yield partial(of_op, case, form, (4, 1025, 126464), torch.bfloat16, view=view)
    for dtype in (torch.bfloat16, torch.float32):
        yield partial(token_nll, (8, 512, 50257), dtype, with_correct=True)
        yield partial(token_nll, (8, 512, 50257), dtype, with_ids=True)
        yield partial(from_hidden, (8, 512, 50257), dtype, frozen=True)
        yield partial(from_hidden, (8, 512, 32000), dtype, frozen=True, with_correct=True)
        yield partial(
            from_hidden, (8, 512, 32000), dtype, frozen=True, with_correct=True, **(ALL_STEPS | {"skip_id": 1})
        )
        for kind in KINDS:
            yield partial(divergence_from_hidden, (8, 512, 32000), dtype, kind=kind)
        yield partial(divergence_from_hidden, (8, 512, 32000), dtype, kind="l1", **(ALL_STEPS | {"skip_id": 1}))
    for shape in ((1, 96, 50257), (1, 1, 1), (2, 17, 1), (3, 1, 129)):
        yield partial(token_nll, shape, torch.bfloat16)
    yield partial(from_hidden, (1, 1, 1), torch.bfloat16, D=1)
    for view in (_shifted, _of_longer_rows, _transposed, _misaligned):
        yield partial(token_nll, (4, 1025, 126464), torch.bfloat16, view=view)
    for rows in (torch.bool, torch.int64, torch.float16):
        yield partial(token_nll, REAL_LOGITS, torch.bfloat16, rows=rows)
    yield partial(weighted_nll, (8, 512, 50257), torch.float16, with_correct=True)
    yield partial(token_nll, (8, 512, 50257), torch.bfloat16, with_correct=True, **(ALL_STEPS | {"skip_id": 1}))
    for shape in ((1, 131072, 32768), (2, 65536, 50257)):  # 2**32 logits and more
        yield partial(token_nll, shape, torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        yield partial(row_stats, (8, 512, 50257), dtype, K=5, **STATISTICS, mix=True)
        yield partial(row_stats, (8, 512, 50257), dtype, K=100, **STATISTICS, mix=True)
    yield partial(row_stats, (2, 17, 1), torch.bfloat16, mix=True)
    for view in (_shifted, _transposed, _misaligned):
        yield partial(row_stats, (4, 1025, 126464), torch.bfloat16, view=view, **STATISTICS, with_correct=True)
    yield partial(row_stats, REAL_LOGITS, torch.float32, **STATISTICS, mix=True, softcap=30.0, scale=0.7, skip_id=5)
    for mask in (torch.float32, torch.bfloat16, torch.int64):
        yield partial(masked_diffusion, (2, 17, 129), torch.bfloat16, mask=mask)
    for kind in KINDS[::5]:
        yield partial(divergence, (8, 512, 50257), torch.bfloat16, kind=kind)
        yield partial(divergence, (2, 17, 1), torch.float32, kind=kind)
    for view in (_shifted, _of_longer_rows, _transposed, _misaligned):
        yield partial(divergence, (4, 1025, 126464), torch.bfloat16, view=view)
    for dtype in DTYPES:  # without a gradient: only forward applies the transform
        yield partial(soft_embedding, (8, 512, 50257), dtype, softcap=30.0, scale=0.7, skip_id=5)
        yield partial(sample, (8, 512, 50257), dtype, softcap=30.0, scale=0.7, skip_id=5)
        yield partial(sample, (2, 17, 1), dtype, temperature=0)
    for ids, mask in ((torch.int32, torch.bool), (torch.int64, torch.float32)):
        yield partial(corrupt, corrupt_uniform, 8, 4096, ids=ids, mask=mask)
        yield partial(corrupt, corrupt_blockwise, 8, 4096, ids=ids, mask=mask, block_size=32)
    for B, L, size in ((1, 1, 1), (1, 50, 32), (3, 100, 7), (7, 5000, None), (524288, 4160, 32)):
        yield partial(corrupt, corrupt_blockwise, B, L, block_size=size, own_seeds=True)
    for L, size in ((50, 32), (100, 7), (5000, None)):
        yield partial(corrupt, corrupt_uniform_random, 3, L, block_size=size, own_seeds=True)
    yield partial(corrupt, corrupt_blockwise, 8, 64, mask=None, block_size=4)
    yield partial(mix, 3, 100, own_seeds=True)
    yield partial(with_level, corrupt_blockwise, 3, 100, block_size=32)
    yield partial(with_level, corrupt_uniform_random, 3, 100)
    for view in (_shifted, _transposed):
        yield partial(corrupt, corrupt_blockwise, 9, 4097, view=view, block_size=32)
        yield partial(corrupt, corrupt_uniform, 9, 4097, view=view)
    for options in ({}, {"exact": True}, {"block_size": 32}, {"segments": True}):
        yield partial(padded, corrupt_uniform, 8, 4096, **options)
    yield partial(padded, corrupt_uniform, 8, 4096, segments=True, own_seeds=False, start=None)
    yield partial(padded, corrupt_uniform, 8, 64, segments=True, start=None)
    yield partial(padded, corrupt_uniform, 2, 131072, exact=True)
    for size in (None, 32):
        yield partial(padded, corrupt_blockwise, 8, 4096, block_size=size)
        yield partial(padded, corrupt_uniform_random, 8, 4096, block_size=size)
    yield partial(padded, corrupt_blockwise, 2, 131072)
    yield partial(padded, corrupt_all_masked, 8, 4096)
    yield partial(mix, 8, 4096, own_seeds=True, start=_starts(8))
    for D in (32, 4096, 131072):
        yield partial(topk, 8, D, start=_starts(8))
    for dtype, (N, D) in ((torch.float64, (1, 1)), (torch.bfloat16, (5, 33)), (torch.bfloat16, (524288, 4160))):
        yield partial(topk, N, D, dtype, k=3)
    yield partial(topk, 4096, 64, view=_transposed)


def specimens(target: str, calls: Callable[[], Iterator[Call]] = real) -> dict[str, Specimen]:
    """Return the kernels that the calls launch, by unique names."""
    with MockGPU(target) as gpu, torch.device("cuda"):
        for call in calls():
            call()
    return named(gpu.specimens)


def of_op(
    case: Any,
    kind: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    D: int = 2560,
    view: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    **options: Any,
) -> None:
    """Call the op of an ``OpCase``, forward and backward; ``options``: those of a head that is not frozen, too."""
    *rows, V = shape
    if kind == "stored":
        logits: Any = view(torch.empty(shape, dtype=dtype)).requires_grad_()
        rows = [*logits.shape[:-1]]
    else:
        hidden, head = (torch.empty(*s, D, dtype=dtype, requires_grad=True) for s in (rows, (V,)))
        of_head = {name: options.pop(name) for name in ops.LinearLogits._fields if name in options}
        logits = ops.LinearLogits(hidden, head, **of_head)
    ids, on = torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.bool)
    inputs = importlib.import_module(type(case).__module__).Rows.of(ids, on, torch.ones(rows))
    values = case.values(case(logits, inputs, **case.accepted(**options)))
    if values:
        sum(t.sum() for t in values).backward()


def token_nll(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    rows: torch.dtype | None = None,
    view: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    **options: Any,
) -> None:
    """Call ``ops.token_nll`` forward and backward; ``rows`` is the dtype of the mask of active rows."""
    logits = view(torch.empty(shape, dtype=dtype)).requires_grad_()
    targets = torch.zeros(logits.shape[:-1], dtype=torch.int64)
    active = None if rows is None else torch.ones(logits.shape[:-1], dtype=rows)
    ops.token_nll(logits, targets, active=active, **options).nll.sum().backward()  # type: ignore[no-untyped-call]


def weighted_nll(shape: tuple[int, ...], dtype: torch.dtype, **options: Any) -> None:
    """Call ``ops.weighted_nll`` forward and backward."""
    logits = torch.empty(shape, dtype=dtype, requires_grad=True)
    targets = torch.zeros(shape[:-1], dtype=torch.int64)
    loss = ops.weighted_nll(logits, targets, torch.rand(shape[:-1]), with_lse=True, **options).loss
    loss.backward()  # type: ignore[no-untyped-call]


def from_hidden(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    D: int = 2560,
    frozen: bool = False,
    **options: Any,
) -> None:
    """Call both NLL ops from hidden states: the weighted op, and the op whose backward recomputes the logits."""
    *rows, V = shape
    hidden = torch.empty(*rows, D, dtype=dtype, requires_grad=True)
    head = torch.empty(V, D, dtype=dtype, requires_grad=not frozen)
    targets = torch.zeros(rows, dtype=torch.int64)
    loss = ops.weighted_linear_nll(hidden, head, targets, torch.rand(rows), **options).loss
    loss.backward()  # type: ignore[no-untyped-call]
    ops.linear_token_nll(hidden, head, targets, **options).nll.sum().backward()  # type: ignore[no-untyped-call]


def row_stats(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    K: int = 2,
    mix: bool = False,
    view: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    **options: Any,
) -> None:
    """Call ``ops.row_stats`` forward and backward, with a gradient for every requested output."""
    logits = view(torch.empty(shape, dtype=dtype)).requires_grad_()
    rows = logits.shape[:-1]
    ids = torch.zeros(*rows, K, dtype=torch.int64)
    _backward(ops.row_stats(logits, ids, mix=_mixture(rows) if mix else None, **options))


def masked_diffusion(shape: tuple[int, int, int], dtype: torch.dtype, *, mask: torch.dtype = torch.bool) -> None:
    """Call the MDLM loss and the hybrid loss, with numbers and with tensors as factor and denominator."""
    logits, rows = torch.empty(shape, dtype=dtype), shape[:-1]
    ids, on, p_mask = torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=mask), torch.rand(rows)
    numbers: tuple[Any, ...] = (None, 2, torch.tensor(2.0))
    for number in numbers:
        MDLMCrossEntropyLoss()(logits, ids, on, p_mask, on, num_diffusion_tokens=number)
        if number is not None:
            HybridDiffusionLLMLoss(number)(logits, ids, on, p_mask, on, num_diffusion_tokens=number)


def row_stats_from_hidden(shape: tuple[int, ...], dtype: torch.dtype, *, D: int = 2560, **options: Any) -> None:
    """Call ``ops.linear_row_stats`` forward and backward, with all outputs."""
    *rows, V = shape
    hidden, head = (torch.empty(*s, D, dtype=dtype, requires_grad=True) for s in (rows, (V,)))
    ids = torch.zeros(rows, dtype=torch.int64)
    _backward(ops.linear_row_stats(hidden, head, ids, **STATISTICS, mix=_mixture(rows), **options))


def divergence(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    view: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    **options: Any,
) -> None:
    """Call ``ops.divergence`` forward and backward, with the teacher's rows in another order."""
    logits, teacher = view(torch.empty(shape, dtype=dtype)).requires_grad_(), view(torch.empty(shape, dtype=dtype))
    rows, targets = (torch.zeros(logits.shape[:-1], dtype=torch.int64) for _ in range(2))
    options |= {"targets": targets} if checked_spec(options.get("kind", "kl")).wants_targets else {}
    loss = ops.divergence(logits, teacher, torch.rand(rows.shape), teacher_rows=rows, **options).loss
    loss.backward()  # type: ignore[no-untyped-call]


def divergence_of_a_draft_vocabulary(
    shape: tuple[int, ...], dtype: torch.dtype, *, D: int = 2560, columns: int = 32000, **options: Any
) -> None:
    """Call ``ops.linear_divergence`` forward and backward, with a student of fewer columns than the teacher."""
    *rows, V = shape
    hidden, teacher, head, of_teacher = (torch.empty(*s, D, dtype=dtype) for s in (rows, rows, (columns,), (V,)))
    options |= {"targets": torch.zeros(rows, dtype=torch.int64)} if checked_spec(options["kind"]).wants_targets else {}
    options |= {"teacher_weight": of_teacher, "draft_to_target": torch.arange(columns)}
    loss = ops.linear_divergence(hidden.requires_grad_(), head, teacher, torch.rand(rows), **options).loss
    loss.backward()  # type: ignore[no-untyped-call]


def divergence_from_hidden(shape: tuple[int, ...], dtype: torch.dtype, *, D: int = 2560, **options: Any) -> None:
    """Call ``ops.linear_divergence`` forward and backward, with one frozen head for both models."""
    *rows, V = shape
    hidden, teacher, head = (torch.empty(*s, D, dtype=dtype) for s in (rows, rows, (V,)))
    options |= {"targets": torch.zeros(rows, dtype=torch.int64)} if checked_spec(options["kind"]).wants_targets else {}
    loss = ops.linear_divergence(hidden.requires_grad_(), head, teacher, torch.rand(rows), **options).loss
    loss.backward()  # type: ignore[no-untyped-call]


def soft_embedding(shape: tuple[int, ...], dtype: torch.dtype, *, D: int = 2560, **options: Any) -> None:
    """Call ``ops.soft_embedding`` with a bump in every row."""
    *rows, V = shape
    hidden, head = (torch.empty(*s, D, dtype=dtype) for s in (rows, (V,)))
    ops.soft_embedding(hidden, head, head, bump=1.0, bump_ids=torch.zeros(rows, dtype=torch.int64), **options)


def sample(shape: tuple[int, ...], dtype: torch.dtype, *, D: int = 2560, **options: Any) -> None:
    """Call ``ops.linear_sample`` with one seed per sequence."""
    *rows, V = shape
    hidden, head = (torch.empty(*s, D, dtype=dtype) for s in (rows, (V,)))
    ops.linear_sample(hidden, head, seeds=torch.zeros(rows[0], dtype=torch.int64), **options)


def _mixture(rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(*rows), torch.ones(*rows)


def _backward(out: ops.RowStats) -> None:
    sum(t.sum() for t in out if t is not None and t.requires_grad).backward()  # type: ignore[union-attr]


def topk(
    N: int,
    D: int,
    dtype: torch.dtype = torch.float32,
    *,
    k: int | None = None,
    given: bool = False,
    start: torch.Tensor | None = None,
    view: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
) -> None:
    """Call ``ops.gumbel_topk_mask`` with one count for all rows or one per row, and with passed or internal draws."""
    log_w = view(torch.empty(N, D, dtype=dtype))
    counts = torch.zeros(log_w.shape[0], dtype=torch.int64) if k is None else k
    ops.gumbel_topk_mask(log_w, counts, uniform=torch.rand(log_w.shape) if given else None, start=start)


def corrupt(
    routine: Callable[..., object],
    B: int,
    L: int,
    *,
    ids: torch.dtype = torch.int64,
    mask: torch.dtype | None = torch.bool,
    view: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    own_seeds: bool = False,
    **options: Any,
) -> None:
    """Call a corruption routine; without ``seeds``, the rows share one seed."""
    input_ids = view(torch.zeros(B, L, dtype=ids))
    loss_mask = None if mask is None else view(torch.ones(B, L, dtype=mask))
    if own_seeds:
        options["seeds"] = torch.zeros(input_ids.shape[0], dtype=torch.int64)
    routine(input_ids, loss_mask, 126000, **options)


def padded(
    routine: Callable[..., object],
    B: int,
    L: int,
    *,
    segments: bool = False,
    own_seeds: bool = True,
    **options: Any,
) -> None:
    """Call a corruption routine with left padding, or with segments."""
    if segments:
        options["segment_ids"] = torch.zeros(B, L, dtype=torch.int64)
    corrupt(routine, B, L, own_seeds=own_seeds, **{"start": _starts(B), **options})


def _starts(B: int) -> torch.Tensor:
    return torch.zeros(B, dtype=torch.int64)


def mix(B: int, L: int, *, wide: int = 1, own_seeds: bool = False, **options: Any) -> None:
    """Call ``corrupt_mix`` with one probability per row, a column of a tensor that is ``wide``."""
    seeds = torch.zeros(B, dtype=torch.int64) if own_seeds else None
    ids, mask = torch.zeros(B, L, dtype=torch.int64), torch.ones(B, L, dtype=torch.bool)
    probability = torch.zeros(B, wide)[:, 0]
    corrupt_mix(ids, mask, 126000, 126464, mask_prob=probability, uniform_prob=probability, seeds=seeds, **options)


def complement(B: int, L: int) -> None:
    """Call ``complementary``."""
    complementary(torch.zeros(B, L, dtype=torch.bool), torch.ones(B, L, dtype=torch.bool))


def levels(B: int) -> None:
    """Call ``sample_level`` with a seed on the GPU."""
    sample_level(B, method="stratified", seeds=torch.zeros(B, dtype=torch.int64))


def with_level(routine: Callable[..., object], B: int, L: int, *, wide: int = 1, **options: Any) -> None:
    """Call a corruption routine with one level per row, a column of a tensor that is ``wide``."""
    corrupt(routine, B, L, level=torch.zeros(B, wide)[:, 0], **options)


def _shifted(t: torch.Tensor) -> torch.Tensor:
    return t[:, 1:]


def _of_longer_rows(t: torch.Tensor) -> torch.Tensor:
    return t[..., :-3]


def _transposed(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(0, 1)


def _misaligned(t: torch.Tensor) -> torch.Tensor:
    return t[..., 1:]


def named(found: list[Specimen]) -> dict[str, Specimen]:
    """Name specimens by kernel, dtype of the data, enabled flags, and further features where needed to be unique."""
    out: dict[str, Specimen] = {}
    for kernel in dict.fromkeys(s.kernel for s in found):
        alike = [s for s in found if s.kernel == kernel]
        for specimen, words in zip(alike, _telling([_features(s) for s in alike]), strict=True):
            said = [word for word in words if not any(other.startswith(f"{word}=") for other in words)]
            out[f"{kernel}[{', '.join((specimen.dtype, *said))}]"] = specimen
    assert len(out) == len(found), "two specimens have the same name"
    return out


def _features(specimen: Specimen) -> dict[str, str]:
    """Return the features that a name may contain, flags first."""
    warps = specimen.options["num_warps"]
    values: dict[str, Any] = {"dtype": specimen.dtype} | specimen.constants | specimen.types | {"num_warps": warps}
    flags = [name for name, value in values.items() if isinstance(value, bool)]
    return {name: str(values[name]) for name in dict.fromkeys(("dtype", *flags, *values))}


def _telling(alike: list[dict[str, str]]) -> list[list[str]]:
    """For each specimen, return the flags that differ within the group, and features that split the remaining ties."""
    groups: list[tuple[str, ...]] = [(features["dtype"],) for features in alike]
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
    """Abbreviate a feature; a feature that is off or None is omitted."""
    if value in ("True", "False", "None"):
        return [name.removeprefix("HAS_").removeprefix("WITH_").lower()] if value == "True" else []
    return [f"{name.removesuffix('_ptr')}={value}"]
