r"""Samples from hidden states and the LM head: chosen tokens, their log-probabilities and entropies, without logits.

The logits exist one chunk at a time, from one matrix product. A token is drawn by the Gumbel-max trick (Gumbel 1954;
Maddison, Tarlow, Minka 2014, arXiv 1411.0030): with independent uniforms u_v,

    argmax_v x_v - ln(-ln u_v)

has the distribution softmax(x). It needs neither the normalizer nor a second pass over the row. u depends only on the
seed of the row and the column (``corruption/_philox.py``), not on chunk, batch or device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._graph._opaque import Spec, opaque
from dllm_kernels._graph._plain import any_dtensor, plain
from dllm_kernels.corruption._noise import Noise
from dllm_kernels.corruption._seeds import check_sources, resolve_seed
from dllm_kernels.rows._call import Call, as_linear_logits, checked, flat_index, row_marks
from dllm_kernels.rows._chunks import Chunks, no_autocast
from dllm_kernels.rows._interface import IGNORE
from dllm_kernels.rows._logits import Head, LinearLogits, Logits, flat_rows
from dllm_kernels.rows._options import Options
from dllm_kernels.rows._setup import Setup, Split
from dllm_kernels.rows._stats_interface import StatsFlags, StatsRequest
from dllm_kernels.rows._transform import NO_TRANSFORM, Transform
from dllm_kernels.rows._truncation import NO_TRUNCATION, Truncation

NAMES = _checks.Names("hidden", "active", "head")


class LinearSample(NamedTuple):
    """A sampled token of each row and statistics of its distribution.

    All are detached. Floats are float32 (float64 for float64 inputs), in nats.

    If the distribution is truncated, log-probabilities and entropy are those of the truncated distribution, or of the
    full one with ``untruncated_log_probs``.

    Attributes:
        ids: the chosen token, int64, of the shape of the rows; -100 in inactive rows. If the softmax of a row is NaN,
            which ``log_probs`` shows, the lowest id that is not skipped.
        log_probs: log-probability of the chosen token; 0 in inactive rows.
        entropy: entropy of the distribution; 0 in inactive rows.
        top_ids: the K most likely tokens, int64 ``[..., K]``, in descending order, the lowest id first among equals;
            None unless requested. -100 in inactive rows.
        top_log_probs: log-probabilities of ``top_ids``, -inf outside a truncated distribution; None unless requested.
    """

    ids: Tensor
    log_probs: Tensor
    entropy: Tensor
    top_ids: Tensor | None = None
    top_log_probs: Tensor | None = None


def linear_sample(
    hidden: Logits, head: Tensor | None = None, *, temperature: float = 1.0, seeds: Tensor | None = None,
    generator: torch.Generator | None = None, bias: Tensor | None = None, extra: _checks.Extra | None = None,
    top_k: int | None = None, top_p: float | None = None, min_p: float | None = None,
    untruncated_log_probs: bool = False, return_top: int | None = None, active: Tensor | None = None,
    chunk_size: int | None = None, num_active: int | None = None, logits_dtype: torch.dtype | None = None,
    softcap: float | None = None, scale: float | None = None, skip_id: int | None = None, backend: str = "auto",
) -> LinearSample:  # fmt: skip
    r"""Choose a token for each row of hidden states: the most likely one, or a sample at a temperature.

    .. math:: x = \text{transform}(W h + b) / T, \qquad \text{id} = \text{arg max}_v \; x_v - \ln(-\ln u_v)

    The sample is exact: unless requested, no probability is truncated, and nothing is sorted. The uniform u of a column
    has 48 bits of the Philox stream of the row's seed. Equal logits therefore give the same token on CPU and GPU, in
    any batch, with any ``chunk_size``, and with a sharded vocabulary. However, the matrix product may round differently
    for another chunk size or device, so that the logits differ in the last bit. The result has no gradient.

    ``top_k``, ``top_p`` and ``min_p`` restrict the argmax to the support S of a truncated distribution. They apply to
    softmax(x), that is after the transform and the temperature, in this order, as in Hugging Face's ``generate``. The
    sample has the distribution softmax(x) restricted to S and renormalized. Of equally likely tokens at the border of S
    the lowest ids stay. Truncation runs in torch for both backends, on one chunk of logits in float32.

    Examples:
        >>> hidden = torch.eye(3)
        >>> head = torch.tensor([[0.0, 1.0, 5.0], [4.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
        >>> # the lowest id wins a tie
        >>> linear_sample(hidden, head, temperature=0).ids.tolist()
        [1, 0, 0]
        >>> out = linear_sample(hidden, head, seeds=torch.tensor([1, 2, 3]), return_top=2)
        >>> out.top_ids.tolist()
        [[1, 0], [0, 1], [0, 1]]
        >>> # one token each
        >>> linear_sample(
        ...     hidden, head, seeds=torch.tensor([1, 2, 3]), top_p=0.3
        ... ).ids.tolist()
        [1, 0, 0]

    Args:
        hidden: ``[..., D]``, float16, bfloat16, float32 or float64. Or :class:`LinearLogits`, with ``head`` None.
        head: ``[V, D]``, the LM head, of the dtype of ``hidden`` unless autocast is on.
        temperature: T >= 0. The transformed logits are divided by T. 0 selects the most likely token, and the lowest id
            wins a tie; log-probabilities and entropy are then computed with T = 1.
        seeds: int64, of the shape of some leading dimensions of ``hidden``. With all of them, such as ``[B, L]`` for
            ``[B, L, D]``, each row has a seed. With fewer, such as ``[B]``, each sequence has a seed, and its rows are
            numbered in order. Equal seeds give equal noise, so use new seeds at each step. Not read at T = 0.
        generator: source of one seed per call, if ``seeds`` is None; None: the default generator of the device.
        bias: ``[V]`` or None.
        extra: low-rank second part of the head, in its dtype, (u ``[..., r]``, one row per row of hidden states; U
            ``[V, r]``), or None. ``U u`` is added to the logits.
        top_k: sample only from the k most likely tokens; None or 0: from all.
        top_p: then only from the fewest most likely tokens whose probability, among the tokens left by ``top_k``, is at
            least p, in (0, 1]; None or 1: from all. If the vocabulary is split over ranks, it needs ``top_k``.
        min_p: then only from the tokens whose probability is at least ``min_p`` times the largest, in [0, 1]; None or
            0: from all.
        untruncated_log_probs: True to return log-probabilities and entropy of softmax(x), False for those of the
            truncated distribution.
        return_top: also return the K most likely tokens of each row; None: not returned.
        active: ``[...]``, bool or numeric. Rows with entry 0 are not projected. None: all rows.
        chunk_size: rows per chunk of logits; None: chosen from the sizes and the memory of the device.
        num_active: upper bound on the number of active rows; None: read back from a GPU, a host sync. If the bound is
            too small, all floating results and all gradients are NaN, flags are False, and the ids of ``with_ids`` are
            -100.
        logits_dtype: torch.float32 keeps the logits of float16 and bfloat16 operands in float32, also for ties. None:
            the dtype of the operands.
        softcap: c > 0 replaces each logit by ``c tanh(z / c)`` first, as in Gemma; None: no cap.
        scale: s > 0 multiplies each logit, after the cap; None: 1.
        skip_id: column that is never chosen, such as the MASK column, not the only one; None: every column can be
            chosen.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`LinearSample`: ids, log-probabilities and entropies, and ids and log-probabilities of the
        ``return_top`` most likely tokens. Without truncation, log-probabilities equal the results of
        :func:`token_log_probs` at the same temperature.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices do not match, a number is out of range, the backend is unknown, or both
            ``seeds`` and ``generator`` are given. Also if both are None and an input is a DTensor, because the ranks
            would draw different noise.

    Source: the Gumbel-max trick, Gumbel 1954; Maddison, Tarlow, Minka 2014, arXiv 1411.0030, section 2. Truncation: Fan
    et al. 2018, arXiv 1805.04833 (top-k); Holtzman et al. 2020, arXiv 1904.09751 (top-p); Nguyen et al. 2024, arXiv
    2407.01082 (min-p); the order of transformers' ``GenerationMixin._get_logits_processor``.
    """
    logits = as_linear_logits(hidden, head, bias, extra, logits_dtype, chunk_size, num_active)
    x = logits.hidden
    _checks.check_float("hidden", x)
    _checks.check_number("temperature", temperature)
    _checks.check_factor("scale", scale)
    seeds = plain(seeds)
    _check_sources(x, seeds, generator)
    noise: dict[str, Any] = {}
    if temperature != 0:
        scale = _checks.tempered_scale(scale, _checks.checked_temperature(temperature, "0, or positive"))
        if seeds is None and generator is None and any_dtensor(x, logits.weight):
            raise ValueError("seeds or generator must be given where hidden or head is a DTensor, got neither")
        noise = _seeds_and_numbers(x, seeds, generator)
    options = Options(
        Transform(softcap, scale, skip_id), check_targets=False, backend=backend, return_top=return_top, top_k=top_k,
        top_p=top_p, min_p=min_p, untruncated_log_probs=untruncated_log_probs,
    )  # fmt: skip
    rows_only = torch.zeros((), dtype=torch.int64, device=x.device).expand(x.shape[:-1])  # there are no targets
    call = checked(NAMES, logits, rows_only, options, active=active).detached
    call.options.transform.check_leaves_a_column(logits.weight.shape[0])
    return linear_sample_unchecked(call, **noise)


def _check_sources(hidden: Tensor, seeds: Any, generator: Any) -> None:
    """Validate the sources of noise, also at T = 0, which does not read them."""
    rows = hidden.shape[:-1]
    check_sources(generator, seeds, None, hidden.device)
    if seeds is not None and (seeds.dim() > len(rows) or seeds.shape != rows[: seeds.dim()]):
        raise ValueError(
            f"seeds must have the shape of leading dimensions of hidden, of {tuple(rows)}, got {tuple(seeds.shape)}"
        )


def _seeds_and_numbers(hidden: Tensor, seeds: Tensor | None, generator: torch.Generator | None) -> dict[str, Tensor]:
    """Return the seed of each row, and the index of the row among the rows with that seed."""
    rows = hidden.shape[:-1]
    if seeds is None:
        seeds = resolve_seed(hidden.device, 1, generator, None)
    rest = rows[seeds.dim() :]
    row_numbers = torch.arange(rest.numel(), device=hidden.device).view(rest)
    seeds = seeds.reshape(seeds.shape + (1,) * len(rest)).expand(rows)
    return {"seeds": seeds, "row_numbers": row_numbers.expand(rows)}


def linear_sample_unchecked(
    call: Call, *, seeds: Tensor | None = None, row_numbers: Tensor | None = None, split: Split | None = None
) -> LinearSample:
    """Compute :func:`linear_sample` of validated constants; ``seeds`` and ``row_numbers [...]`` are None at T = 0."""
    if call.on_ranks:
        from dllm_kernels.distributed.run import on_this_rank

        return on_this_rank(linear_sample_unchecked, call, {"seeds": seeds, "row_numbers": row_numbers})  # type: ignore[no-any-return]
    options, rows, head = call.options, call.rows, call.head
    assert head is not None
    setup = Setup.of(call.logits, options, split)
    if setup.splits_rows and options.top_p is not None and options.top_k is None:  # the whole row would be sorted
        raise ValueError("top_k must be given with top_p if the vocabulary is split over ranks, got None; pass both")
    seeds, row_numbers = (None if t is None else flat_index(t) for t in (seeds, row_numbers))
    ids, log_probs, entropy = _sample(
        flat_rows(call.x), head.flat, row_marks(call.active), seeds, row_numbers, options.return_top or 0,
        options.truncation, options.untruncated_log_probs, setup,
    )  # fmt: skip
    if options.return_top is None:
        return LinearSample(ids[:, 0].clone().view(rows), log_probs[:, 0].clone().view(rows), entropy.view(rows))
    top = (*rows, options.return_top)
    return LinearSample(
        ids[:, 0].clone().view(rows), log_probs[:, 0].clone().view(rows), entropy.view(rows),
        ids[:, 1:].clone().view(top), log_probs[:, 1:].clone().view(top),
    )  # fmt: skip


def _specs(hidden: Tensor, *args: Any) -> list[Spec]:
    *_, k, _truncation, _untruncated, setup = args
    N = hidden.shape[0]  # len() would specialise the graph
    return [((N, 1 + k), torch.int64), ((N, 1 + k), setup.accum_dtype), ((N,), setup.accum_dtype)]


@opaque("linear_sample", _specs)
def _sample(
    hidden: Tensor, head: Head, marks: Tensor | None, seeds: Tensor | None, row_numbers: Tensor | None, k: int,
    truncation: Truncation, untruncated_log_probs: bool, setup: Setup,
) -> list[Tensor]:  # fmt: skip
    """Return (ids, log-probabilities ``[N, 1 + k]``, entropy) of N rows, the chosen token first.

    ``marks [N]``: ``IGNORE`` in inactive rows; None if every row is active. Chooses a token in each row of a chunk;
    then computes log-probabilities of it and of the k most likely tokens.
    """
    transform, truncates = setup.transform, truncation != NO_TRUNCATION
    with no_autocast(hidden):
        others = [(len(head.weight), setup.accum_dtype)] if truncates else []
        chunks = Chunks(hidden, head, marks, setup, others=others)
        rows, primitives, device = chunks.rows, chunks.primitives, hidden.device
        ids = rows.empty(1 + k, dtype=torch.int64, device=device)
        log_probs = rows.empty(1 + k, dtype=setup.accum_dtype, device=device)
        entropy = rows.empty(dtype=setup.accum_dtype, device=device)
        for chunk, _, targets, logits in chunks:
            noise = None
            if seeds is not None and row_numbers is not None:
                noise = Noise(rows.take(seeds, chunk), rows.take(row_numbers, chunk))
            whole = truncated = logits, transform
            if truncates:
                truncated = primitives.truncated(*whole, truncation), NO_TRANSFORM
            chosen = primitives.sample(*truncated, noise)[1].unsqueeze(1)
            if k:
                chosen = torch.cat([chosen, primitives.largest(logits, k, transform)[1]], 1)
            x, x_transform = whole if untruncated_log_probs else truncated
            request = StatsRequest(chosen, targets, transform=x_transform, flags=StatsFlags(entropy=True))
            result = primitives.stats.forward(x[None], request)
            rows.put_each([ids, log_probs, entropy], chunk, [chosen, result.log_probs, result.entropy])
        ids, log_probs, entropy = rows.finished([ids, log_probs, entropy])
    # If the softmax is NaN any id will do, but it must be valid, because an embedding would read out of bounds.
    ids = ids.masked_fill(log_probs[:, :1].isnan(), transform.first_column)
    if marks is not None:
        ids = ids.masked_fill((marks == IGNORE).unsqueeze(1), IGNORE)
    return [ids, log_probs, entropy]


def largest_of(logits: LinearLogits, k: int, *, log_probs: bool) -> tuple[Tensor, Tensor]:
    """Return the k largest transformed logits, or log-probabilities, and their ids, ``[..., k]``; no DTensors.

    In descending order, the lowest id first among equals. No gradient.
    """
    options = Options(check_targets=False, return_top=k)
    rows_only = torch.zeros((), dtype=torch.int64, device=logits.hidden.device).expand(logits.hidden.shape[:-1])
    call = checked(NAMES, logits, rows_only, options).detached
    setup = Setup.of(call.logits, call.options)
    hidden, head = flat_rows(call.x), call.head
    assert head is not None
    with torch.cuda.device_of(hidden), no_autocast(hidden):  # type: ignore[no-untyped-call]
        chunks = Chunks(hidden, head.flat, None, setup)
        rows = chunks.rows
        values = rows.empty(k, dtype=setup.accum_dtype, device=hidden.device)
        ids = rows.empty(k, dtype=torch.int64, device=hidden.device)
        for chunk, _, targets, z in chunks:
            part, chosen = chunks.primitives.largest(z, k, setup.transform)
            if log_probs:
                request = StatsRequest(chosen, targets, transform=setup.transform)
                part = chunks.primitives.stats.forward(z[None], request).log_probs
            rows.put_each([values, ids], chunk, [part, chosen])
        values, ids = rows.finished([values, ids])
    return values.view(*call.rows, k), ids.view(*call.rows, k)
