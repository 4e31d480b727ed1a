r"""Samples from hidden states and the LM head: chosen tokens, their log-probabilities and entropies, without logits.

The logits exist one chunk at a time, from one matrix product. A token is drawn by the Gumbel-max trick (Gumbel 1954;
Maddison, Tarlow, Minka 2014, arXiv 1411.0030): with independent uniforms u_v,

    argmax_v x_v - ln(-ln u_v)

has the distribution softmax(x). It needs neither the normalizer nor a second pass over the row. u depends only on the
seed of the row and the column (``_random/_philox.py``), not on chunk, batch or device.
"""

from __future__ import annotations

from typing import Any

import torch

from dllm_kernels._core._inputs import GRAD_INPUTS, RowInputs
from dllm_kernels._core._plan import Options
from dllm_kernels._core._results import LinearSample
from dllm_kernels._core._run import checked, run
from dllm_kernels._core._sample import LINEAR_SAMPLE
from dllm_kernels._random._philox import check_sources, resolve_seed
from dllm_kernels._utils import _checks
from dllm_kernels._utils._named import replaced
from dllm_kernels._utils._plain import any_dtensor, plain
from dllm_kernels._utils._transform import Transform

NAMES = _checks.Names("hidden", "active", "head", "bias")


def linear_sample(
    hidden: torch.Tensor,
    head: torch.Tensor,
    *,
    temperature: float = 1.0,
    seeds: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    bias: torch.Tensor | None = None,
    extra: _checks.Extra | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    untruncated_log_probs: bool = False,
    return_top: int | None = None,
    active: torch.Tensor | None = None,
    chunk_size: int | None = None,
    num_active: int | None = None,
    logits_dtype: torch.dtype | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
    backend: str = "auto",
) -> LinearSample:
    r"""Choose a token for each row of hidden states: the most likely one, or a sample at a temperature.

    .. math:: x = \text{transform}(W h + b) / T, \qquad \text{id} = \arg\max_v \; x_v - \ln(-\ln u_v)

    The sample is exact: unless requested, no probability is truncated, and nothing is sorted. The uniform u of a column
    has 48 bits of the Philox stream of the row's seed. Equal logits therefore give the same token on CPU and GPU, in
    any batch, with any ``chunk_size``, and with a sharded vocabulary. However, the matrix product may round differently
    for another chunk size or device, so that the logits differ in the last bit. The result has no gradient.

    ``top_k``, ``top_p`` and ``min_p`` restrict the argmax to the support S of a truncated distribution. They apply to
    softmax(x), that is after the transform and the temperature, in this order, as in Hugging Face's ``generate``. The
    sample has the distribution softmax(x) restricted to S and renormalized. Of equally likely tokens at the border of S
    the lowest ids stay. Truncation runs in torch for both backends, on one chunk of logits in float32.

    Examples:
        >>> hidden, head = torch.eye(3), torch.tensor([[0.0, 1.0, 5.0], [4.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
        >>> linear_sample(hidden, head, temperature=0).ids.tolist()  # the lowest id wins a tie
        [1, 0, 0]
        >>> out = linear_sample(hidden, head, seeds=torch.tensor([1, 2, 3]), return_top=2)
        >>> out.top_ids.tolist()
        [[1, 0], [0, 1], [0, 1]]
        >>> linear_sample(hidden, head, seeds=torch.tensor([1, 2, 3]), top_p=0.3).ids.tolist()  # one token each
        [1, 0, 0]

    Args:
        hidden: {hidden}
        head: {weight}
        temperature: T >= 0. The transformed logits are divided by T. 0 selects the most likely token, and the lowest id
            wins a tie; log-probabilities and entropy are then computed with T = 1.
        seeds: int64, of the shape of some leading dimensions of ``hidden``. With all of them, such as ``[B, L]`` for
            ``[B, L, D]``, each row has a seed. With fewer, such as ``[B]``, each sequence has a seed, and its rows are
            numbered in order. Equal seeds give equal noise, so use new seeds at each step. Not read at T = 0.
        generator: source of one seed per call, if ``seeds`` is None; None: the default generator of the device.
        bias: ``[V]`` or None.
        extra: {extra}
        top_k: sample only from the k most likely tokens; None: from all.
        top_p: then only from the fewest most likely tokens whose probability, among the tokens left by ``top_k``, is at
            least p, in (0, 1]; None or 1: from all. If the vocabulary is split over ranks, it needs ``top_k``.
        min_p: then only from the tokens whose probability is at least ``min_p`` times the largest, in [0, 1]; None or
            0: from all.
        untruncated_log_probs: True to return log-probabilities and entropy of softmax(x), False for those of the
            truncated distribution.
        return_top: also return the K most likely tokens of each row; None: not returned.
        active: ``[...]``, bool or numeric. Rows with entry 0 are not projected. None: all rows.
        chunk_size: {chunk_size}
        num_active: {num_active}
        logits_dtype: torch.float32 keeps the logits of float16 and bfloat16 operands in float32, also for ties. None:
            the dtype of the operands.
        softcap: {softcap}
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
    _checks.check_float("hidden", hidden)
    _checks.check_number("temperature", temperature)
    _checks.check_factor("scale", scale)
    rows, seeds = hidden.shape[:-1], plain(seeds)
    _check_sources(hidden, seeds, generator)
    noise: dict[str, Any] = {}
    if temperature != 0:
        scale = _checks.tempered_scale(scale, _checks.checked_temperature(temperature, "0, or positive"))
        if seeds is None and generator is None and any_dtensor(hidden, head):
            raise ValueError("seeds or generator must be given where hidden or head is a DTensor, got neither")
        noise = _seeds_and_numbers(hidden, seeds, generator)
    options = Options(
        Transform(softcap, scale, skip_id), check_targets=False, backend=backend, chunk_size=chunk_size,
        num_active=num_active, logits_dtype=logits_dtype, return_top=return_top, top_k=top_k, top_p=top_p, min_p=min_p,
        untruncated_log_probs=untruncated_log_probs,
    )  # fmt: skip
    ids = torch.zeros((), dtype=torch.int64, device=hidden.device).expand(rows)  # placeholder until sampled
    inputs, options = checked(NAMES, RowInputs(hidden, ids, head, bias, active=active), options, extra=extra)
    if skip_id is not None and head.shape[0] == 1:
        raise ValueError(f"skip_id must leave a column to choose, got {skip_id} and a head of one column")
    constants = {n: None if t is None else t.detach() for n, t in zip(GRAD_INPUTS, inputs.grad_inputs, strict=True)}
    return run(LINEAR_SAMPLE, replaced(inputs, **constants, **noise), options)  # type: ignore[no-any-return]


def _check_sources(hidden: torch.Tensor, seeds: Any, generator: Any) -> None:
    """Validate the sources of noise, also at T = 0, which does not read them."""
    rows = hidden.shape[:-1]
    check_sources(generator, seeds, None, hidden.device)
    if seeds is not None and (seeds.dim() > len(rows) or seeds.shape != rows[: seeds.dim()]):
        raise ValueError(
            f"seeds must have the shape of leading dimensions of hidden, of {tuple(rows)}, got {tuple(seeds.shape)}"
        )


def _seeds_and_numbers(
    hidden: torch.Tensor, seeds: torch.Tensor | None, generator: torch.Generator | None
) -> dict[str, torch.Tensor]:
    """Return the seed of each row, and the index of the row among the rows with that seed."""
    rows = hidden.shape[:-1]
    if seeds is None:
        seeds = resolve_seed(hidden.device, 1, generator, None)
    rest = rows[seeds.dim() :]
    row_numbers = torch.arange(rest.numel(), device=hidden.device).view(rest)
    seeds = seeds.reshape(seeds.shape + (1,) * len(rest)).expand(rows)
    return {"seeds": seeds, "row_numbers": row_numbers.expand(rows)}
