"""Corruption of clean tokens for training: masking, exact-count masking with a position bias, random tokens.

Every ``corrupt_*`` routine returns ``(noisy_input_ids, noise_mask, p_mask)``, each ``[B, L]``: ids in the dtype of the
input, a bool mask of the corrupted positions, and float32 probabilities. (``corrupt_mix`` returns no ``p_mask``.)
Inputs are not modified. On a GPU a routine is one kernel launch, plus the draw of a seed, without a host sync. The
numbering of segments, and the half lives of left-padded rows in ``corrupt_blockwise``, add some small launches.

**Randomness.** Every random number is computed by Philox 4x64-10 from a 64-bit seed and the position, in the order of
``numpy.random.Philox``. ``dllm_kernels.corruption._philox`` documents the layout. The bits are equal on CPU and
GPU, under Triton, torch and torch.compile.

* ``generator``: one seed per call is drawn from it. Row b uses this seed with the row index b. A CPU generator can be
  used for tensors on any device and gives the same mask on all of them. A CUDA generator draws its seed on the GPU.
  With equal ``manual_seed`` its seeds differ from the seeds of a CPU generator, because torch implements them
  differently. ``None``: the default generator of the device of the tensors.
* ``seeds``: int64 ``[B]``, instead of a generator. Row b then depends only on ``seeds[b]``, L and the options, in any
  batch and on any device.
* ``start``: int64 ``[B]``, the first column of each row that is not left padding. The row is corrupted as if it began
  there: draw i belongs to column ``start[b] + i``, blocks are counted from ``start[b]``, and the length of the row is
  ``L - start[b]``. With equal ``seeds``, a row therefore has the same noise with and without left padding. Columns
  before ``start[b]`` never change.

**Level.** The level is the fraction of masked tokens. A routine draws it, or uses the argument ``level`` unchanged,
without ``eps``. ``level`` has one value per row (``[B]`` or ``[B, 1]``), or one value per block (``[B, num_blocks]``)
or segment (``[B, L]``). ``sample_level`` draws levels that are more evenly spread than independent levels. A level
outside [0, 1] raises ValueError on CPU. On a GPU it masks nothing or everything, because a check would cost a host
sync.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._checks import INT_DTYPES, type_name
from dllm_kernels._checks._target_range import first_fraction
from dllm_kernels._graph._named import replaced
from dllm_kernels.corruption import _seeds
from dllm_kernels.corruption._corrupt import METHODS, Mix, Routine, complement, corrupt, mix_tokens
from dllm_kernels.corruption._corrupt import sample_level as _sample_level
from dllm_kernels.corruption._gumbel_topk import check_start, gumbel_topk_mask

__all__ = [
    "batched_gumbel_topk", "complementary", "corrupt_all_masked", "corrupt_blockwise", "corrupt_mix", "corrupt_uniform",
    "corrupt_uniform_random", "gumbel_topk", "sample_level",
]  # fmt: skip

# Cached, because a dict lookup takes a tenth of the time of torch.iinfo.
_LIMITS = {dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max) for dtype in INT_DTYPES}


def gumbel_topk(
    log_w: Tensor, k: int | Tensor, *, generator: torch.Generator | None = None,
    uniform: Tensor | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Choose ``k`` positions without replacement, with odds given by their weights.

    The positions with the k largest ``score_i = log_w_i - ln(-ln u_i)`` are chosen. The lower index wins a tie.

    Args:
        log_w: log-weights ``[D]``, floating; positions with log-weight -inf or NaN are never chosen.
        k: number of positions to choose, an int or a 0-d tensor. If it exceeds the number of positions that can be
            chosen, all of them are chosen.
        generator: source of one seed per call, which each row uses with its index. A CPU generator can be used for
            tensors on any device and gives the same result on all of them. None: the default generator of the device.
        uniform: uniform numbers u ``[D]`` to use instead of a generator, float32 or float64, strictly inside (0, 1).
        backend: "auto", "triton" or "torch".

    Returns:
        bool ``[D]``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not match, or k is negative.

    Source: Kool, van Hoof and Welling 2019, arXiv:1903.06059, section 2.3.
    """
    _checks.check_tensor("log_w", log_w)
    _checks.check_ndim("log_w", log_w, 1, "[D]")
    if uniform is not None:
        _checks.check_tensor("uniform", uniform)
        _checks.check_ndim("uniform", uniform, 1, "[D]")
        uniform = uniform[None]
    if isinstance(k, Tensor) and k.dim() == 0:
        k = k[None]
    return gumbel_topk_mask(log_w[None], k, uniform=uniform, generator=generator, backend=backend)[0]


def batched_gumbel_topk(
    log_w: Tensor, k: Tensor, generator: torch.Generator | None = None, *, seeds: Tensor | None = None,
    uniform: Tensor | None = None, start: Tensor | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Choose ``k[i]`` positions of row i without replacement, with odds given by the row's weights.

    The positions with the k largest ``score_i = log_w_i - ln(-ln u_i)`` are chosen. The lower index wins a tie.

    Args:
        log_w: log-weights ``[N, D]``, floating; positions with log-weight -inf or NaN are never chosen.
        k: number of positions to choose per row, an integer tensor ``[N]``, or an int for all rows; 0 gives a row of
            False.
        generator: source of one seed per call, which each row uses with its index. A CPU generator can be used for
            tensors on any device and gives the same result on all of them. None: the default generator of the device.
        seeds: int64 ``[N]``, instead of a generator: row n then depends only on ``seeds[n]``.
        uniform: uniform numbers u ``[N, D]`` to use instead of a generator, float32 or float64, strictly inside (0, 1).
        start: int64 ``[N]``, the first column of each row that is not padding: draw i belongs to column
            ``start[n] + i``, and columns before ``start[n]`` are never chosen. None: 0. Not with ``uniform``.
        backend: "auto", "triton" or "torch".

    Returns:
        bool ``[N, D]``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not match, k is negative, ``start`` is out of range or combined with
            ``uniform``, or more than one of ``generator``, ``seeds`` and ``uniform`` is given.

    Source: Kool, van Hoof and Welling 2019, arXiv:1903.06059, section 2.3.
    """
    return gumbel_topk_mask(log_w, k, uniform=uniform, generator=generator, seeds=seeds, start=start, backend=backend)


_batched_gumbel_topk = batched_gumbel_topk


def corrupt_uniform(
    input_ids: Tensor, loss_mask: Tensor, mask_token_id: int, eps: float = 1e-3,
    generator: torch.Generator | None = None, *, level: Tensor | None = None, exact: bool = False,
    block_size: int | None = None, segment_ids: Tensor | None = None, seeds: Tensor | None = None,
    start: Tensor | None = None, backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Mask each supervised position independently, with one probability per sequence, block or segment.

    ``p = (1 - eps) t + eps``, with t uniform in (0, 1). Position i of row b is masked if ``u_{b,i} < p``. There is one
    t per row, with ``block_size`` one per block, and with ``segment_ids`` one per segment. In every position,
    ``noise / p`` has the expectation 1, unless ``exact`` is set. With ``exact`` the number of masked positions is
    fixed: ``round(p n)`` of the n supervised positions of a row, rounded half to even. It is at least one if n and p
    are not 0. All subsets of this size are equally likely. ``noise / p`` then has the expectation
    ``round(p n) / (p n)``, which is above 1 if ``p n < 1``.

    Examples:
        >>> ids, seeds = torch.arange(8).reshape(1, 8), torch.tensor([1])
        >>> # two packed documents, then padding
        >>> documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1]])
        >>> _, noise_mask, p_mask = corrupt_uniform(
        ...     ids, ids >= 0, 99, segment_ids=documents, seeds=seeds
        ... )
        >>> p_mask[0].unique_consecutive().shape, noise_mask[0, 7].item()
        (torch.Size([3]), False)

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: ``[B, L]``, bool or numeric, nonzero for supervised positions; as integers, 0 and 1.
        mask_token_id: id of the MASK token.
        eps: smallest probability, in [0, 1]; 1 masks every supervised position.
        generator: source of one seed per call, which each row uses with its index. A CPU generator can be used for
            tensors on any device and gives the same result on all of them. None: the default generator of the device.
        level: levels to use instead of drawn ones, unchanged, without ``eps``; floating, in [0, 1]. A level outside [0,
            1] raises ValueError on CPU. On a GPU it corrupts nothing or everything, because a check would cost a host
            sync. Here p, of shape ``[B]`` or ``[B, 1]``, with blocks also ``[B, num_blocks]``, with segments also ``[B,
            L]``, where column j belongs to the j-th segment of a row.
        exact: True to mask a fixed number of positions instead of drawing each position independently. Not with
            ``block_size`` or ``segment_ids``.
        block_size: positions per block; the last may be short. The noise of block diffusion (BD3-LM). None: no blocks.
        segment_ids: integers ``[B, L]``. Positions of a row with equal ids are one segment, such as a document in a
            packed row. Segments are numbered in the order in which they begin, so that other ids for the same segments
            change nothing. Positions with a negative id are in no segment and never masked. None: no segments.
        seeds: int64 ``[B]``, one seed per row, instead of a generator. Row b then depends only on ``seeds[b]``, L and
            the options, in any batch and on any device.
        start: int64 ``[B]``, in [0, L], the first column of each row that is not left padding; None: 0. The row is
            corrupted as if it began there, so that with ``seeds`` it has the same noise as without padding. Columns
            before it never change. Checked on CPU; on a GPU it is clamped, because a check would cost a host sync.
        backend: "auto", "triton" or "torch".

    Returns:
        ``(noisy_input_ids, noise_mask, p_mask)``, each ``[B, L]``; ``p_mask`` holds p, and 1 at positions outside all
        blocks and segments, which are never masked.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not match, a value is out of range, or both ``generator`` and ``seeds``
            are given.

    Source: Nie et al. 2025 (LLaDA), arXiv:2502.09992, section 2.2, the forward process of Eq. 3; with blocks, Arriola
    et al. 2025 (BD3-LM), arXiv:2503.09573, section 3.1.
    """
    check_batch(input_ids, loss_mask)
    mask_id = checked_mask_id(mask_token_id, input_ids)
    _checks.check_flags(exact=exact)
    if exact and not (block_size is None and segment_ids is None):
        raise ValueError("exact must be False with block_size or segment_ids, got True")
    if block_size is not None and segment_ids is not None:
        raise ValueError("block_size and segment_ids exclude each other: expected one of them, got both")
    routine = Routine("exact" if exact else "mask", mask_id, block_size, eps)
    batch = _Batch(input_ids, loss_mask, level, segment_ids, start)
    return _corrupted(routine, batch, generator, seeds, backend)


def corrupt_blockwise(
    input_ids: Tensor, loss_mask: Tensor | None, mask_token_id: int, block_size: int | None = None, eps: float = 1e-3,
    half_life_ratio: float = 0.25, generator: torch.Generator | None = None, *, level: Tensor | None = None,
    seeds: Tensor | None = None, start: Tensor | None = None, backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Mask a fixed fraction of every sequence or block; if the fraction is small, later positions are more likely.

    With ``m = (1 - eps) U + eps``, ``k = round(m length)`` positions (half to even) are chosen without replacement with
    ``log w_i = ln 2 / (half_life_ratio size) (1 - m) i``. ``size`` is L or ``block_size``. ``length`` is the number of
    positions, which is smaller in a short last block. k is clamped to [1, L] for a sequence and to [0, length] for a
    block. Selection runs over all positions; unsupervised positions are then removed from the chosen set.

    This is not the noise of block diffusion as in BD3-LM. Because of the position bias, m is not the probability with
    which a position is masked. With the defaults, the expectation of ``noise / m`` rises from 0.60 at the first
    position of a block of 32 to 1.60 at the last. A loss with the weight ``1 / p_mask`` therefore counts later
    positions more. For the noise of BD3-LM, in which this expectation is 1 in every position, use
    :func:`corrupt_uniform` with ``block_size``.

    Examples:
        >>> ids = torch.arange(12).reshape(1, 12)
        >>> generator = torch.Generator().manual_seed(0)
        >>> noisy, noise_mask, p_mask = corrupt_blockwise(
        ...     ids, None, 99, block_size=4, generator=generator
        ... )
        >>> torch.equal(noisy, torch.where(noise_mask, 99, ids)), p_mask.shape
        (True, torch.Size([1, 12]))

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: ``[B, L]``, bool or numeric, nonzero for supervised positions; as integers, 0 and 1. None: all
            positions.
        mask_token_id: id of the MASK token.
        block_size: positions per block; None: the full sequence is one block.
        eps: smallest fraction of masked tokens, in [0, 1].
        half_life_ratio: distance over which a weight doubles in the limit m = 0, as a fraction of ``size``; above 0.
        generator: source of one seed per call, which each row uses with its index. A CPU generator can be used for
            tensors on any device and gives the same result on all of them. None: the default generator of the device.
        level: levels to use instead of drawn ones, unchanged, without ``eps``; floating, in [0, 1]. A level outside [0,
            1] raises ValueError on CPU. On a GPU it corrupts nothing or everything, because a check would cost a host
            sync. Here m, of shape ``[B]``, ``[B, 1]`` or ``[B, num_blocks]``.
        seeds: int64 ``[B]``, one seed per row, instead of a generator. Row b then depends only on ``seeds[b]``, L and
            the options, in any batch and on any device.
        start: int64 ``[B]``, in [0, L], the first column of each row that is not left padding; None: 0. The row is
            corrupted as if it began there, so that with ``seeds`` it has the same noise as without padding. Columns
            before it never change. Checked on CPU; on a GPU it is clamped, because a check would cost a host sync.
        backend: "auto", "triton" or "torch".

    Returns:
        ``(noisy_input_ids, noise_mask, p_mask)``, each ``[B, L]``; ``p_mask`` holds m.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not match, a value is out of range, or both ``generator`` and ``seeds``
            are given.

    Source: the position bias w_i(m) = exp(lambda (1 - m) i) of Nemotron-Labs-Diffusion training; the selection of
    Kool, van Hoof and Welling 2019, arXiv:1903.06059, section 2.3.
    """
    check_batch(input_ids, loss_mask, optional=True)
    mask_id = checked_mask_id(mask_token_id, input_ids)
    ratio = _checked_real("half_life_ratio", half_life_ratio)
    if not ratio > 0:
        raise ValueError(f"half_life_ratio must be above 0, got {ratio}")
    routine = Routine("topk", mask_id, block_size, eps, ratio)
    return _corrupted(routine, _Batch(input_ids, loss_mask, level, start=start), generator, seeds, backend)


def corrupt_uniform_random(
    input_ids: Tensor, loss_mask: Tensor, vocab_size: int, block_size: int | None = None, eps: float = 1e-3,
    generator: torch.Generator | None = None, *, level: Tensor | None = None, seeds: Tensor | None = None,
    start: Tensor | None = None, backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Replace supervised positions by random tokens, with one probability per sequence or block.

    ``t = (1 - eps) U + eps``. If ``u < t``, a supervised position becomes a token drawn uniformly from [0, vocab_size),
    possibly the clean token.

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: ``[B, L]``, bool or numeric, nonzero for supervised positions; as integers, 0 and 1.
        vocab_size: number of tokens to draw from, at most 2^31.
        block_size: positions per block; None: the full sequence is one block.
        eps: smallest probability, in [0, 1].
        generator: source of one seed per call, which each row uses with its index. A CPU generator can be used for
            tensors on any device and gives the same result on all of them. None: the default generator of the device.
        level: levels to use instead of drawn ones, unchanged, without ``eps``; floating, in [0, 1]. A level outside [0,
            1] raises ValueError on CPU. On a GPU it corrupts nothing or everything, because a check would cost a host
            sync. Here t, of shape ``[B]``, ``[B, 1]`` or ``[B, num_blocks]``.
        seeds: int64 ``[B]``, one seed per row, instead of a generator. Row b then depends only on ``seeds[b]``, L and
            the options, in any batch and on any device.
        start: int64 ``[B]``, in [0, L], the first column of each row that is not left padding; None: 0. The row is
            corrupted as if it began there, so that with ``seeds`` it has the same noise as without padding. Columns
            before it never change. Checked on CPU; on a GPU it is clamped, because a check would cost a host sync.
        backend: "auto", "triton" or "torch".

    Returns:
        ``(noisy_input_ids, noise_mask, p_mask)``, each ``[B, L]``. ``p_mask`` is the given ``level``; otherwise it is
        all ones, because the loss has no weight 1/t.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not match, a value is out of range, or both ``generator`` and ``seeds``
            are given.

    Source: Austin et al. 2021 (D3PM), arXiv:2107.03006, section 3.1, the uniform transition.
    """
    check_batch(input_ids, loss_mask)
    tokens = _checked_vocab_size(vocab_size, input_ids)
    routine = Routine("tokens", tokens, block_size, eps)
    return _corrupted(routine, _Batch(input_ids, loss_mask, level, start=start), generator, seeds, backend)


def corrupt_all_masked(
    input_ids: Tensor, loss_mask: Tensor, mask_token_id: int, *, generator: torch.Generator | None = None,
    seeds: Tensor | None = None, start: Tensor | None = None, backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Mask every supervised position: ``noise = supervised``, ``p = 1``. Deterministic.

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: ``[B, L]``, bool or numeric, nonzero for supervised positions; as integers, 0 and 1.
        mask_token_id: id of the MASK token.
        generator: not used; accepted, and checked, so that all routines take the same arguments.
        seeds: not used; checked like ``generator``.
        start: int64 ``[B]``, in [0, L], the first column of each row that is not left padding; None: 0. The row is
            corrupted as if it began there, so that with ``seeds`` it has the same noise as without padding. Columns
            before it never change. Checked on CPU; on a GPU it is clamped, because a check would cost a host sync.
        backend: "auto", "triton" or "torch".

    Returns:
        ``(noisy_input_ids, noise_mask, p_mask)``, each ``[B, L]``; ``p_mask`` is all ones.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not match.

    Source: the all-masked training of I-DLM, arXiv:2604.11035.
    """
    check_batch(input_ids, loss_mask)
    mask_id = checked_mask_id(mask_token_id, input_ids)
    _seeds.check_sources(generator, seeds, input_ids.shape[:1], input_ids.device)
    start = checked_start(start, input_ids)
    noisy, noise, p_mask = corrupt(input_ids, loss_mask, None, None, start, None, Routine("all", mask_id), backend)
    return noisy, noise, p_mask


def corrupt_mix(
    input_ids: Tensor, loss_mask: Tensor, mask_token_id: int, vocab_size: int, *, mask_prob: Tensor,
    uniform_prob: Tensor, generator: torch.Generator | None = None, seeds: Tensor | None = None,
    start: Tensor | None = None, check: bool = False, backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mask some supervised positions and replace others by a different token, with two probabilities per sequence.

    One u is drawn per position. If ``u < mask_prob``, the position becomes MASK. If
    ``mask_prob <= u < mask_prob + uniform_prob``, it becomes a token drawn uniformly from the ``vocab_size - 2`` tokens
    that are neither MASK nor the clean token. A clean MASK is not replaced by another token.

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: ``[B, L]``, bool or numeric, nonzero for supervised positions; as integers, 0 and 1.
        mask_token_id: id of the MASK token.
        vocab_size: number of tokens including MASK, from 3 to 2^31. If MASK was appended to the vocabulary of a
            tokenizer, this is one more than the tokenizer's ``vocab_size``: the ``num_embeddings`` of the embedding.
        mask_prob: probability of MASK, floating ``[B]`` or ``[B, 1]``.
        uniform_prob: probability of another token, of the shape of ``mask_prob``. Both probabilities and their sum must
            lie in [0, 1], up to 1e-5 for the sum.
        generator: source of one seed per call, which each row uses with its index. A CPU generator can be used for
            tensors on any device and gives the same result on all of them. None: the default generator of the device.
        seeds: int64 ``[B]``, one seed per row, instead of a generator. Row b then depends only on ``seeds[b]``, L and
            the options, in any batch and on any device.
        start: int64 ``[B]``, in [0, L], the first column of each row that is not left padding; None: 0. The row is
            corrupted as if it began there, so that with ``seeds`` it has the same noise as without padding. Columns
            before it never change. Checked on CPU; on a GPU it is clamped, because a check would cost a host sync.
        check: True to check the probabilities on a GPU too, which costs a host sync. Otherwise, on a GPU, a row whose
            sum is too large is left unchanged, and a negative probability counts as 0. On CPU the probabilities are
            always checked.
        backend: "auto", "triton" or "torch".

    Returns:
        ``(noisy_input_ids, noise_mask)``, each ``[B, L]``; ``noise_mask`` is True if a position was masked or replaced,
        including a clean MASK that was masked.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not match, a value is out of range, or both ``generator`` and ``seeds``
            are given.

    Source: the forward process of SCDD as in NeMo AutoModel: a mixture of absorbing and uniform transitions (D3PM,
    Austin et al. 2021, arXiv:2107.03006, section 3.1).
    """
    check_batch(input_ids, loss_mask)
    mask_id = checked_mask_id(mask_token_id, input_ids)
    vocab_size = _checked_vocab_size(vocab_size, input_ids)
    if vocab_size < 3:
        raise ValueError(f"vocab_size must be at least 3, got {vocab_size}")
    if mask_id >= vocab_size:
        raise ValueError(
            f"mask_token_id must lie in [0, vocab_size) = [0, {vocab_size}), MASK being one of the vocab_size tokens, "
            f"got {mask_id}; are mask_token_id and vocab_size swapped, or was MASK added behind the vocabulary?"
        )
    p = _checked_per_row("mask_prob", mask_prob, input_ids)
    q = _checked_per_row("uniform_prob", uniform_prob, input_ids)
    check = _checks.checked_bool("check", check)
    start = checked_start(start, input_ids)
    seed = _seeds.resolve_seed(input_ids.device, input_ids.shape[0], generator, seeds)
    mix = Mix(mask_id, vocab_size, check)
    noisy, noise = mix_tokens(input_ids, loss_mask, p, q, seed, start, mix, backend)
    return noisy, noise


def complementary(noise_mask: Tensor, loss_mask: Tensor, *, backend: str = "auto") -> Tensor:
    """Select the supervised positions that are not masked: ``supervised and not noise``.

    A mask and its complement together cover every supervised position once. A position that is masked with probability
    p is in the complement with probability 1 - p.

    Examples:
        >>> complementary(
        ...     torch.tensor([[1, 0, 1, 0]]), loss_mask=torch.tensor([[0, 1, 1, 1]])
        ... ).tolist()
        [[False, True, False, True]]

    Args:
        noise_mask: ``[B, L]``, bool or numeric, nonzero for masked positions.
        loss_mask: ``[B, L]``, bool or numeric, nonzero for supervised positions; as integers, 0 and 1.
        backend: "auto", "triton" or "torch".

    Returns:
        bool ``[B, L]``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not match; on CPU, ``noise_mask`` holds fractions at supervised
            positions.

    Source: Gong et al. 2025 (DiffuCoder), arXiv:2506.20639, section 4.2, the coupled sampling of coupled-GRPO.
    """
    _checks.check_tensor("noise_mask", noise_mask)
    _checks.check_ndim("noise_mask", noise_mask, 2, "[B, L]")
    for name, mask in (("noise_mask", noise_mask), ("loss_mask", loss_mask)):
        _checks.check_whole_tensor(name, mask)
    _checks.check_mask("noise_mask", noise_mask, noise_mask.shape)
    _checks.check_mask("loss_mask", loss_mask, noise_mask.shape, "that of noise_mask", no_ids=True)
    _checks.check_same_device("noise_mask", noise_mask, loss_mask=loss_mask)
    if (where := first_fraction(noise_mask, loss_mask)) is not None:
        got = noise_mask[where].item()
        raise ValueError(f"noise_mask must hold no fractions, got {got} at position {where}; is it p_mask?")
    (mask,) = complement(noise_mask, loss_mask, backend)
    return mask


def sample_level(
    B: int, *, method: str = "uniform", low: float = 0.0, high: float = 1.0, generator: torch.Generator | None = None,
    seeds: Tensor | None = None, device: torch.device | str | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Sample noise levels (fractions of masked tokens) for the corruption routines, one per row.

    ========== ===================================================================================================
    uniform    independent ``u_b``
    antithetic ``u_b`` and ``1 - u_b`` in turn
    stratified ``(u + b / B) mod 1`` with one u: each B-th of [0, 1) holds one, and each level alone is uniform
    ========== ===================================================================================================

    The levels are scaled to [low, high]. The mean of B independent levels has variance 1 / (12 B); the mean of B
    "stratified" levels has variance 1 / (12 B^2). Stratified levels therefore reduce the variance of a loss that is due
    to the levels. The variance due to the choice of masked positions is unchanged.

    Args:
        B: number of levels.
        method: "uniform", "antithetic" or "stratified".
        low: lower bound, at least 0.
        high: upper bound, at most 1.
        generator: source of one seed per call, which each row uses with its index. A CPU generator can be used for
            tensors on any device and gives the same result on all of them. None: the default generator of the device.
        seeds: int64 ``[B]``, instead of a generator. With "uniform", a level depends only on the seed of its row, and
            equals the u that ``corrupt_uniform`` draws with this seed. The other methods couple the rows, so their
            levels depend on ``seeds[0]``, b and B.
        device: device of the result; None: the device of the generator or the seeds, otherwise the CPU.
        backend: "auto", "triton" or "torch".

    Returns:
        float32 ``[B]``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value is out of range, shapes or devices do not match, or both ``generator`` and ``seeds`` are
            given.

    Source: the low-discrepancy sampler of Kingma et al. 2021, arXiv:2107.00630, appendix I.1, used by BD3-LM and Duo.
    """
    B = _checks.checked_int("B", B, 1, _checks.MOST_SIZE)
    _checks.check_choice("method", method, METHODS)
    low, high = _checked_real("low", low), _checked_real("high", high)
    if not 0 <= low <= high <= 1:
        raise ValueError(f"low and high must satisfy 0 <= low <= high <= 1, got {low} and {high}")
    seed = _seeds.resolve_seed(_seeds.device_of(device, generator, seeds), B, generator, seeds)
    if seed.dim() and method != "uniform":
        seed = seed[0]
    (level,) = _sample_level(seed, B, method, low, high, backend)
    return level


class _Batch(NamedTuple):
    """Tensor arguments of a routine."""

    input_ids: Tensor
    loss_mask: Tensor | None
    level: Tensor | None
    segment_ids: Tensor | None = None
    start: Tensor | None = None


def _corrupted(
    routine: Routine, batch: _Batch, generator: torch.Generator | None, seeds: Tensor | None, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Validate the arguments common to all routines, draw a seed and corrupt."""
    input_ids, loss_mask, level, segment_ids, start = batch
    eps, block_size, columns = _checked_real("eps", routine.eps), routine.block_size, 1
    if not 0 <= eps <= 1:
        raise ValueError(f"eps must lie in [0, 1], got {eps}")
    B, L = input_ids.shape
    if (block_size := _checks.checked_size("block_size", block_size)) is not None:
        columns = -(-L // block_size)
    if segment_ids is not None:
        _checks.check_whole_tensor("segment_ids", segment_ids)
        _checks.check_like("input_ids", input_ids, INT_DTYPES, segment_ids=segment_ids)
        columns = L
    if level is not None:
        level = _checked_per_row("level", level, input_ids, columns)
    start = checked_start(start, input_ids)
    seed = _seeds.resolve_seed(input_ids.device, B, generator, seeds)
    routine = replaced(routine, block_size=block_size, eps=eps)
    noisy, noise, p_mask = corrupt(input_ids, loss_mask, level, seed, start, segment_ids, routine, backend)
    return noisy, noise, p_mask


def check_batch(
    input_ids: Tensor, loss_mask: Tensor | None, name: str = "input_ids", *, optional: bool = False
) -> None:
    """Validate ids and mask; ``name`` is the argument with the ids. With ``optional``, the mask may be None."""
    if _fit(input_ids, loss_mask):
        return
    _checks.check_ids(name, input_ids)
    _checks.check_whole_tensor(name, input_ids)
    _checks.check_ndim(name, input_ids, 2, "[B, L]")
    if optional and loss_mask is None:
        return
    _checks.check_whole_tensor("loss_mask", loss_mask)
    _checks.check_mask("loss_mask", loss_mask, input_ids.shape, f"that of {name}", no_ids=True)
    _checks.check_same_device(name, input_ids, loss_mask=loss_mask)


def checked_start(start: Tensor | None, input_ids: Tensor, name: str = "input_ids") -> Tensor | None:
    """Validate the first column of each row; ``name`` is the argument with the ids."""
    if start is not None:
        _checks.check_whole_tensor("start", start)
        check_start(start, input_ids, name)
    return start


def _fit(input_ids: Tensor, loss_mask: Tensor | None) -> bool:
    """Return True if the common case is valid, at half the cost of the detailed checks; False is inconclusive."""
    return (
        type(input_ids) is type(loss_mask) is Tensor
        and input_ids.layout is loss_mask.layout is torch.strided
        and not (input_ids.is_nested or loss_mask.is_nested)
        and input_ids.dtype in INT_DTYPES
        and loss_mask.dtype is torch.bool
        and (shape := input_ids.shape) == loss_mask.shape
        and len(shape) == 2
        and input_ids.device == loss_mask.device
    )


def checked_mask_id(mask_token_id: int, input_ids: Tensor, name: str = "input_ids") -> int:
    """Convert the MASK id to an int that fits the dtype of the ids; ``name`` is the argument with the ids."""
    try:
        index = operator.index(None if isinstance(mask_token_id, bool) else mask_token_id)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"mask_token_id must be an int, got {type_name(mask_token_id)}") from None
    if index < 0:
        raise ValueError(f"mask_token_id must not be negative, got {index}")
    _check_fits("mask_token_id", index, input_ids, name)
    return index


def _check_fits(name: str, token: int, input_ids: Tensor, ids_name: str = "input_ids") -> None:
    low, high = _LIMITS[input_ids.dtype]
    if not low <= token <= high:
        dtype = str(input_ids.dtype).removeprefix("torch.")
        raise ValueError(f"{name} must fit the {dtype} of {ids_name}, [{low}, {high}], got {token}")


def _checked_real(name: str, value: object) -> float:
    if type(value) is float:
        return value
    _checks.check_number(name, value, "a float")
    return float(value)  # type: ignore[arg-type]


def _checked_vocab_size(vocab_size: int, input_ids: Tensor) -> int:
    vocab_size = _checks.checked_int("vocab_size", vocab_size, 1)
    if vocab_size > 2**31:
        raise ValueError(f"vocab_size must be at most 2**31, got {vocab_size}")
    _check_fits("vocab_size - 1", vocab_size - 1, input_ids)
    return vocab_size


def _checked_per_row(name: str, value: Tensor, input_ids: Tensor, blocks: int = 1) -> Tensor:
    """Convert one value per row, or per block, to float32 ``[B, 1]`` or ``[B, blocks]``."""
    _checks.check_float(name, value)
    _checks.check_whole_tensor(name, value)
    B = input_ids.shape[0]
    shapes = [(B,), (B, 1), *([(B, blocks)] if blocks > 1 else [])]
    if tuple(value.shape) not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {tuple(value.shape)}")
    _checks.check_same_device("input_ids", input_ids, **{name: value})
    _checks.check_constant(name, value)
    value = value.detach().to(torch.float32)  # detach, because it may require grad under no_grad
    return value if value.dim() == 2 else value.view(-1, 1)
