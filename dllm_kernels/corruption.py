"""Corruption of clean tokens for training: masking, exact-count masking with a position bias, random tokens.

Every routine returns ``(noisy_input_ids, noise_mask, p_mask)``, each ``[B, L]``: ids in the dtype of the input, a bool
mask of the corrupted positions, and a float32 probability. Inputs are never written. On a GPU a routine is one kernel
launch, beside the draw of a seed; nothing waits for the GPU.

**Randomness.** Every draw is Philox 4x64-10, as ``numpy.random.Philox`` streams it, of a 64-bit seed and the position
(``dllm_kernels._random._philox`` holds the layout): the same bits on CPU and GPU, under Triton, torch and
torch.compile.

* ``generator``: one seed a call is drawn from it, row b is row b under that seed. A CPU generator serves tensors on any
  device, and the same state of it gives the same mask on all of them. A CUDA generator draws its seed on the GPU, and
  its stream of seeds is its own: torch gives a CUDA and a CPU generator of one ``manual_seed`` different numbers.
  ``None`` is the default generator of the tensors' device.
* ``seeds``: int64 ``[B]``, instead of a generator. Row b is then a function of ``seeds[b]``, of L and of the options
  alone, in whatever batch and on whatever device it is corrupted.

**The level**, the fraction of masked tokens, is drawn by the routine, or given as ``level``: ``[B]`` or ``[B, 1]``, one
a row, or ``[B, num_blocks]`` with blocks; used as it is, without ``eps``. ``sample_level`` draws levels that are spread
better than independent ones. A level outside [0, 1] is an error on the CPU; on a GPU, where looking would be a host
sync, it masks nothing or everything.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from dllm_kernels._corruption import _corrupt
from dllm_kernels._random import _philox
from dllm_kernels._utils import _checks
from dllm_kernels._utils._checks import INT_DTYPES, type_name
from dllm_kernels._utils._plain import is_dtensor
from dllm_kernels._utils._target_range import first_fraction
from dllm_kernels.ops.gumbel_topk import gumbel_topk_mask

__all__ = [
    "batched_gumbel_topk",
    "complementary",
    "corrupt_all_masked",
    "corrupt_blockwise",
    "corrupt_mix",
    "corrupt_uniform",
    "corrupt_uniform_random",
    "gumbel_topk",
    "sample_level",
]

P = ParamSpec("P")
Out = TypeVar("Out")

# Looked up here in a tenth of the time.
_LIMITS = {dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max) for dtype in INT_DTYPES}


def gumbel_topk(
    log_w: torch.Tensor,
    k: int | torch.Tensor,
    *,
    generator: torch.Generator | None = None,
    uniform: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Choose ``k`` positions without replacement, with odds given by their weights.

    ``score_i = log_w_i - ln(-ln u_i)``; the k largest are chosen, the lower index first among equals.

    Args:
        log_w: log-weights ``[D]``, floating; a position of -inf or NaN is never chosen.
        k: how many, an int or a 0-d tensor; more than the choosable positions means all of them.
        generator: what to draw from, see the module.
        uniform: the draws u ``[D]`` instead, float32 or float64, strictly inside (0, 1).
        backend: "auto", "triton" or "torch".

    Returns:
        bool ``[D]``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype or device that does not fit, or a negative k.

    Source: Kool, van Hoof and Welling 2019, arXiv:1903.06059, section 2.3.
    """
    _checks.check_tensor("log_w", log_w)
    _checks.check_ndim("log_w", log_w, 1, "[D]")
    if uniform is not None:
        _checks.check_tensor("uniform", uniform)
        _checks.check_ndim("uniform", uniform, 1, "[D]")
        uniform = uniform[None]
    if isinstance(k, torch.Tensor) and k.dim() == 0:
        k = k[None]
    return gumbel_topk_mask(log_w[None], k, uniform=uniform, generator=generator, backend=backend)[0]


def batched_gumbel_topk(
    log_w: torch.Tensor,
    k: torch.Tensor,
    generator: torch.Generator | None = None,
    *,
    seeds: torch.Tensor | None = None,
    uniform: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Choose ``k[i]`` positions of row i without replacement, with odds given by the row's weights.

    ``score_i = log_w_i - ln(-ln u_i)``; the k largest are chosen, the lower index first among equals.

    Args:
        log_w: log-weights ``[N, D]``, floating; a position of -inf or NaN is never chosen.
        k: how many of each row, an integer tensor ``[N]``, or an int for all; 0 gives a row of False.
        generator: what to draw from, see the module.
        seeds: int64 ``[N]`` instead: row n then depends on ``seeds[n]`` alone.
        uniform: the draws u ``[N, D]`` instead, float32 or float64, strictly inside (0, 1).
        backend: "auto", "triton" or "torch".

    Returns:
        bool ``[N, D]``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype or device that does not fit, a negative k, two sources of draws.

    Source: Kool, van Hoof and Welling 2019, arXiv:1903.06059, section 2.3.
    """
    return gumbel_topk_mask(log_w, k, uniform=uniform, generator=generator, seeds=seeds, backend=backend)


_batched_gumbel_topk = batched_gumbel_topk


def corrupt_uniform(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    mask_token_id: int,
    eps: float = 1e-3,
    generator: torch.Generator | None = None,
    *,
    level: torch.Tensor | None = None,
    exact: bool = False,
    seeds: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mask each supervised position independently, with one probability for each sequence.

    ``p_b = (1 - eps) t_b + eps``, ``t_b`` uniform in (0, 1); position i is masked where ``u_{b,i} < p_b``. With
    ``exact`` the number of masked positions is not random: of the n supervised positions of a row exactly
    ``round(p_b n)`` (half to even; at least one where n and p_b are not 0) are masked. Every such set is equally
    likely.

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: supervised positions ``[B, L]``, bool or number, nonzero is True.
        mask_token_id: the token that masks.
        eps: smallest probability, in [0, 1).
        generator: what to draw from, see the module.
        level: the p_b instead of drawn ones, floating ``[B]`` or ``[B, 1]``, in [0, 1], see the module.
        exact: mask an exact number of positions instead of drawing each independently.
        seeds: int64 ``[B]`` instead, one a row, see the module.
        backend: "auto", "triton" or "torch".

    Returns:
        ``(noisy_input_ids, noise_mask, p_mask)``, each ``[B, L]``; ``p_mask`` holds ``p_b``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype, device or range that does not fit, or both ``generator`` and ``seeds``.

    Source: Nie et al. 2025 (LLaDA), arXiv:2502.09992, section 2.2, the forward process of Eq. 3.
    """
    _check_batch(input_ids, loss_mask, optional=False)
    mask_id = checked_mask_id(mask_token_id, input_ids)
    if not isinstance(exact, bool):
        raise TypeError(f"exact must be a bool, got {type_name(exact)}")
    what = "exact" if exact else "mask"
    return _corrupted(what, input_ids, loss_mask, mask_id, None, eps, 1.0, level, generator, seeds, backend)


def corrupt_blockwise(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor | None,
    mask_token_id: int,
    block_size: int | None = None,
    eps: float = 1e-3,
    half_life_ratio: float = 0.25,
    generator: torch.Generator | None = None,
    *,
    level: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mask an exact fraction of every sequence or block; later positions are likelier where the fraction is small.

    ``m = (1 - eps) U + eps``, ``k = round(m length)`` (half to even), and k positions without replacement with
    ``log w_i = ln 2 / (half_life_ratio size) (1 - m) i``. ``size`` is L or ``block_size``; ``length`` counts the
    positions that are there, fewer in a short last block. k lies in [1, L] for a sequence, in [0, length] for a block.
    All positions take part; of the chosen ones the unsupervised are dropped afterwards.

    Examples:
        >>> ids, generator = torch.arange(12).reshape(1, 12), torch.Generator().manual_seed(0)
        >>> noisy, noise_mask, p_mask = corrupt_blockwise(ids, None, 99, block_size=4, generator=generator)
        >>> torch.equal(noisy, torch.where(noise_mask, 99, ids)), p_mask.shape
        (True, torch.Size([1, 12]))

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: supervised positions ``[B, L]``, bool or number, nonzero is True; None for all.
        mask_token_id: the token that masks.
        block_size: positions of a block; None for whole sequences.
        eps: smallest fraction of masked tokens, in [0, 1).
        half_life_ratio: distance over which a weight doubles as m goes to 0, as a fraction of ``size``; above 0.
        generator: what to draw from, see the module.
        level: the m instead of drawn ones, floating ``[B]``, ``[B, 1]`` or ``[B, num_blocks]``, in [0, 1], see the
            module.
        seeds: int64 ``[B]`` instead, one a row, see the module.
        backend: "auto", "triton" or "torch".

    Returns:
        ``(noisy_input_ids, noise_mask, p_mask)``, each ``[B, L]``; ``p_mask`` holds m.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype, device or range that does not fit, or both ``generator`` and ``seeds``.

    Source: the position bias w_i(m) = exp(lambda (1 - m) i) of Nemotron-Labs-Diffusion training; the selection of
    Kool, van Hoof and Welling 2019, arXiv:1903.06059, section 2.3.
    """
    _check_batch(input_ids, loss_mask, optional=True)
    mask_id = checked_mask_id(mask_token_id, input_ids)
    ratio = _checked_real("half_life_ratio", half_life_ratio)
    if not ratio > 0:
        raise ValueError(f"half_life_ratio must be above 0, got {ratio}")
    return _corrupted("topk", input_ids, loss_mask, mask_id, block_size, eps, ratio, level, generator, seeds, backend)


def corrupt_uniform_random(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    vocab_size: int,
    block_size: int | None = None,
    eps: float = 1e-3,
    generator: torch.Generator | None = None,
    *,
    level: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replace supervised positions by random tokens, with one probability for each sequence or block.

    ``t = (1 - eps) U + eps``; where ``u < t`` a supervised position becomes a token uniform over [0, vocab_size),
    which may be the token that was there.

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: supervised positions ``[B, L]``, bool or number, nonzero is True.
        vocab_size: how many tokens there are to draw from, at most 2^31.
        block_size: positions of a block; None for whole sequences.
        eps: smallest probability, in [0, 1).
        generator: what to draw from, see the module.
        level: the t instead of drawn ones, floating ``[B]``, ``[B, 1]`` or ``[B, num_blocks]``, in [0, 1], see the
            module.
        seeds: int64 ``[B]`` instead, one a row, see the module.
        backend: "auto", "triton" or "torch".

    Returns:
        ``(noisy_input_ids, noise_mask, p_mask)``, each ``[B, L]``; ``p_mask`` is all ones, for the loss is flat, or
        the given ``level``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype, device or range that does not fit, or both ``generator`` and ``seeds``.

    Source: Austin et al. 2021 (D3PM), arXiv:2107.03006, section 3.1, the uniform transition.
    """
    _check_batch(input_ids, loss_mask, optional=False)
    tokens = _checked_vocab_size(vocab_size, input_ids)
    return _corrupted("tokens", input_ids, loss_mask, tokens, block_size, eps, 1.0, level, generator, seeds, backend)


def corrupt_all_masked(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    mask_token_id: int,
    *,
    generator: torch.Generator | None = None,
    seeds: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mask every supervised position: ``noise = supervised``, ``p = 1``. Nothing is random.

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: supervised positions ``[B, L]``, bool or number, nonzero is True.
        mask_token_id: the token that masks.
        generator: not used, since nothing is drawn. Accepted so that all routines take the same arguments.
        seeds: not used.
        backend: "auto", "triton" or "torch".

    Returns:
        ``(noisy_input_ids, noise_mask, p_mask)``, each ``[B, L]``; ``p_mask`` is all ones.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype or device that does not fit.

    Source: the all-masked training of I-DLM, arXiv:2604.11035.
    """
    _check_batch(input_ids, loss_mask, optional=False)
    mask_id = checked_mask_id(mask_token_id, input_ids)
    return _run(_corrupt.corrupt, "all", input_ids, loss_mask, mask_id, None, 0.0, 1.0, None, None, backend)


def corrupt_mix(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    mask_token_id: int,
    vocab_size: int,
    *,
    mask_prob: torch.Tensor,
    uniform_prob: torch.Tensor,
    generator: torch.Generator | None = None,
    seeds: torch.Tensor | None = None,
    check: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask some supervised positions and replace others by a different token, with two probabilities for each sequence.

    One u is drawn for each position. Where ``u < mask_prob`` it becomes MASK. Where
    ``mask_prob <= u < mask_prob + uniform_prob`` it becomes a token uniform over the ``vocab_size - 2`` that are
    neither MASK nor the clean one, unless the clean one is MASK.

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: supervised positions ``[B, L]``, bool or number, nonzero is True.
        mask_token_id: the token that masks.
        vocab_size: how many tokens there are, MASK among them; from 3 to 2^31. Where MASK was added behind a
            tokenizer's own vocabulary, one more than that: an embedding's ``num_embeddings``, not the tokenizer's
            ``vocab_size``.
        mask_prob: probability of MASK, floating ``[B]`` or ``[B, 1]``.
        uniform_prob: probability of another token, of the same shape. Each lies in [0, 1], and so does the sum, up to
            1e-5.
        generator: what to draw from, see the module.
        seeds: int64 ``[B]`` instead, one a row, see the module.
        check: check the probabilities on a GPU too, which waits for it. Without the check, a row whose sum is too large
            is left unchanged on a GPU, and a negative probability counts as 0. On the CPU both are always an error.
        backend: "auto", "triton" or "torch".

    Returns:
        ``(noisy_input_ids, noise_mask)``, each ``[B, L]``; ``noise_mask`` is True where a position was masked or
        replaced, also where MASK replaced a clean MASK.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype, device or range that does not fit, or both ``generator`` and ``seeds``.

    Source: the forward process of SCDD, as NeMo AutoModel has it: absorbing and uniform transitions (D3PM, Austin et
    al. 2021, arXiv:2107.03006, section 3.1) side by side.
    """
    _check_batch(input_ids, loss_mask, optional=False)
    mask_id = checked_mask_id(mask_token_id, input_ids)
    vocab_size = _checked_vocab_size(vocab_size, input_ids)
    if vocab_size < 3:
        raise ValueError(f"vocab_size must be at least 3, got {vocab_size}")
    if not 0 <= mask_id < vocab_size:
        raise ValueError(
            f"mask_token_id must lie in [0, vocab_size) = [0, {vocab_size}), MASK being one of the vocab_size tokens, "
            f"got {mask_id}; are mask_token_id and vocab_size swapped, or was MASK added behind the vocabulary?"
        )
    p = _checked_of_row("mask_prob", mask_prob, input_ids)
    q = _checked_of_row("uniform_prob", uniform_prob, input_ids)
    if not isinstance(check, bool):
        raise TypeError(f"check must be a bool, got {type_name(check)}")
    seed = _philox.resolve_seed(input_ids.device, input_ids.shape[0], generator, seeds)
    return _run(_corrupt.mix_tokens, input_ids, loss_mask, mask_id, vocab_size, p, q, check, seed, backend)


def complementary(noise_mask: torch.Tensor, loss_mask: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Select the supervised positions that are not masked: ``supervised and not noise``.

    The two masks of such a pair together cover every supervised position once. A position that was masked with
    probability p is in the complement with probability 1 - p.

    Examples:
        >>> complementary(torch.tensor([[1, 0, 1, 0]]), loss_mask=torch.tensor([[0, 1, 1, 1]])).tolist()
        [[False, True, False, True]]

    Args:
        noise_mask: masked positions ``[B, L]``, bool or number, nonzero is True.
        loss_mask: supervised positions ``[B, L]``, bool or number, nonzero is True.
        backend: "auto", "triton" or "torch".

    Returns:
        bool ``[B, L]``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype or device that does not fit; on CPU, fractions in ``noise_mask`` where it is
            supervised.

    Source: Gong et al. 2025 (DiffuCoder), arXiv:2506.20639, section 4.2, the coupled sampling of coupled-GRPO.
    """
    _checks.check_tensor("noise_mask", noise_mask)
    _checks.check_ndim("noise_mask", noise_mask, 2, "[B, L]")
    _checks.check_mask("noise_mask", noise_mask, noise_mask.shape)
    _checks.check_mask("loss_mask", loss_mask, noise_mask.shape, "that of noise_mask")
    _checks.check_same_device("noise_mask", noise_mask, loss_mask=loss_mask)
    if (where := first_fraction(noise_mask, loss_mask)) is not None:
        raise ValueError(
            f"noise_mask must hold no fractions, got {noise_mask[where].item()} at position {where}; is it p_mask?"
        )
    return _run(_corrupt.complement, noise_mask, loss_mask, backend)


def sample_level(
    B: int,
    *,
    method: str = "uniform",
    low: float = 0.0,
    high: float = 1.0,
    generator: torch.Generator | None = None,
    seeds: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Levels (fractions of masked tokens) for the corruption routines, one per row.

    ========== ===================================================================================================
    uniform    independent ``u_b``
    antithetic ``u_b`` and ``1 - u_b`` in turn
    stratified ``(u + b / B) mod 1`` with one u: each B-th of [0, 1) holds one, and each level alone is uniform
    ========== ===================================================================================================

    They are scaled to [low, high]. The mean of B independent levels has variance 1 / (12 B), that of "stratified" ones
    1 / (12 B^2). So the part of a loss's variance that comes from the levels is smaller; the part that comes from which
    positions are masked is unchanged.

    Args:
        B: how many.
        method: "uniform", "antithetic" or "stratified".
        low: the smallest, at least 0.
        high: the largest, at most 1.
        generator: what to draw from, see the module.
        seeds: int64 ``[B]`` instead. A level of "uniform" is a function of its own seed (and is the u that
            ``corrupt_uniform`` draws under it); of the others, which couple the rows, of ``seeds[0]``, b and B.
        device: where the levels are wanted; by default where the generator or the seeds are, else on the CPU.
        backend: "auto", "triton" or "torch".

    Returns:
        float32 ``[B]``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a value, shape or device that does not fit, or both ``generator`` and ``seeds``.

    Source: the low-discrepancy sampler of Kingma et al. 2021, arXiv:2107.00630, appendix I.1, which BD3-LM and Duo use.
    """
    _checks.check_positive_int("B", B)
    _checks.check_choice("method", method, _corrupt.METHODS)
    low, high = _checked_real("low", low), _checked_real("high", high)
    if not 0 <= low <= high <= 1:
        raise ValueError(f"low and high must satisfy 0 <= low <= high <= 1, got {low} and {high}")
    if device is None:
        source = generator if seeds is None else seeds
        device = getattr(source, "device", "cpu")
    place = torch.device(device) if isinstance(device, str) else device
    seed = _philox.resolve_seed(place, B, generator, seeds)
    if seed.dim() and method != "uniform":
        seed = seed[0]
    return _run(_corrupt.sample_level, int(B), method, low, high, seed, backend)


def _corrupted(
    what: str, input_ids: torch.Tensor, loss_mask: torch.Tensor | None, token: int, block_size: int | None, eps: float,
    ratio: float, level: torch.Tensor | None, generator: torch.Generator | None, seeds: torch.Tensor | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Check what the routines have in common, draw a seed and call ``_corrupt.corrupt``."""
    eps = _checked_real("eps", eps)
    if not 0 <= eps < 1:
        raise ValueError(f"eps must lie in [0, 1), got {eps}")
    B, L = input_ids.shape
    blocks = 1
    if block_size is not None:
        _checks.check_positive_int("block_size", block_size)
        block_size = int(block_size)
        blocks = -(-L // block_size)
    if level is not None:
        level = _checked_of_row("level", level, input_ids, blocks)
    seed = _philox.resolve_seed(input_ids.device, B, generator, seeds)
    return _run(_corrupt.corrupt, what, input_ids, loss_mask, token, block_size, eps, ratio, level, seed, backend)


def _run(routine: Callable[P, Out], *args: P.args, **kwargs: P.kwargs) -> Out:
    """Call a routine of ``_corruption/_corrupt.py``; under torch.compile that is one op."""
    if torch.compiler.is_compiling():
        from dllm_kernels._corruption import _compiled

        return getattr(_compiled, routine.__name__)(*args, **kwargs)  # type: ignore[no-any-return]
    return routine(*args, **kwargs)


def _check_batch(input_ids: torch.Tensor, loss_mask: torch.Tensor | None, *, optional: bool) -> None:
    if _fit(input_ids, loss_mask):
        return
    _checks.check_ids("input_ids", input_ids)
    check_whole_tensor("input_ids", input_ids)
    _checks.check_ndim("input_ids", input_ids, 2, "[B, L]")
    if optional and loss_mask is None:
        return
    _checks.check_mask("loss_mask", loss_mask, input_ids.shape, "that of input_ids")
    check_whole_tensor("loss_mask", loss_mask)
    _checks.check_same_device("input_ids", input_ids, loss_mask=loss_mask)


def check_whole_tensor(name: str, tensor: object) -> None:
    """Raise a TypeError for a DTensor, of which a routine sees only the local rows."""
    if is_dtensor(tensor):
        raise TypeError(
            f"{name} must be a plain torch.Tensor, got DTensor; corrupt its to_local(), with seeds for its rows"
        )


def _fit(input_ids: torch.Tensor, loss_mask: torch.Tensor | None) -> bool:
    """Whether all is as it nearly always is: half the time of the checks that say what is not."""
    return (
        type(input_ids) is type(loss_mask) is torch.Tensor
        and input_ids.dtype in INT_DTYPES
        and loss_mask.dtype is torch.bool
        and (shape := input_ids.shape) == loss_mask.shape
        and len(shape) == 2
        and input_ids.device == loss_mask.device
    )


def checked_mask_id(mask_token_id: int, input_ids: torch.Tensor, name: str = "input_ids") -> int:
    """Convert the id of MASK to an int that the dtype of the ids holds; ``name`` is the argument that has the ids."""
    try:
        index = operator.index(None if isinstance(mask_token_id, bool) else mask_token_id)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"mask_token_id must be an int, got {type_name(mask_token_id)}") from None
    _check_fits("mask_token_id", index, input_ids, name)
    return index


def _check_fits(name: str, token: int, input_ids: torch.Tensor, ids_name: str = "input_ids") -> None:
    low, high = _LIMITS[input_ids.dtype]
    if not low <= token <= high:
        dtype = str(input_ids.dtype).removeprefix("torch.")
        raise ValueError(f"{name} must fit the {dtype} of {ids_name}, [{low}, {high}], got {token}")


def _checked_real(name: str, value: object) -> float:
    if type(value) is float:
        return value
    _checks.check_number(name, value, "a float")
    return float(value)  # type: ignore[arg-type]


def _checked_vocab_size(vocab_size: int, input_ids: torch.Tensor) -> int:
    _checks.check_positive_int("vocab_size", vocab_size)
    if vocab_size > 2**31:
        raise ValueError(f"vocab_size must be at most 2**31, got {vocab_size}")
    _check_fits("vocab_size - 1", vocab_size - 1, input_ids)
    return int(vocab_size)


def _checked_of_row(name: str, value: torch.Tensor, input_ids: torch.Tensor, blocks: int = 1) -> torch.Tensor:
    """Convert one number per row, or per block, to float32 ``[B, 1]`` or ``[B, blocks]``."""
    _checks.check_float(name, value)
    B = input_ids.shape[0]
    shapes = [(B,), (B, 1), *([(B, blocks)] if blocks > 1 else [])]
    if tuple(value.shape) not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {tuple(value.shape)}")
    _checks.check_same_device("input_ids", input_ids, **{name: value})
    _checks.check_constant(name, value)
    value = value.detach().to(torch.float32)  # it may require a gradient where gradients are off
    return value if value.dim() == 2 else value.view(-1, 1)
