r"""The mean embedding of what a model predicts: how a denoiser is told its own last guess (self-conditioning).

    e_i = sum_v p_iv E_v,      p_i = softmax(transform(W h_i + b) + t_i onehot(b_i)).

The probabilities exist one chunk at a time, where its logits were: two products, and in between two passes over the chunk, one
that reads it and one that writes p over it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dllm_kernels.base import _changing, _checks
from dllm_kernels.base._plain import plain
from dllm_kernels.base._rows import SKIP
from dllm_kernels.base._transform import Transform
from dllm_kernels.rows._call import checked, do
from dllm_kernels.rows._plan import Job, Options
from dllm_kernels.rows._records import SOFT_EMBEDDING

NAMES = _checks.Names("hidden", "bump_ids", "head", "bias")


def soft_embedding(
    hidden: torch.Tensor,
    head: torch.Tensor,
    embedding: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    extra: _checks.Extra | None = None,
    bump: float | torch.Tensor | None = None,
    bump_ids: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    chunk_size: int | None = None,
    num_active: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
    check_targets: bool | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    r"""Mean of the rows of ``embedding`` under each row's distribution, from hidden states and the LM head.

    .. math:: e_i = \sum_v p_{iv} E_v, \qquad p_i = \text{softmax}(\text{transform}(W h_i + b) + t_i \, \text{onehot}(k_i))

    All tensors are taken as constants: the result has no gradient, whatever requires one, as self-conditioning uses it. The
    logits exist one chunk at a time and are never written out; two products.

    Args:
        hidden: ``[..., D]``, float16, bfloat16, float32 or float64.
        head: ``[V, D]``, the LM head, of the dtype of ``hidden`` unless autocast is on.
        embedding: ``[V, E]``, likewise; the head itself where both are tied. A factor that the model has behind its embedding
            is left to the caller.
        bias: ``[V]`` or None.
        extra: as in :func:`weighted_linear_nll`.
        bump: t, a number or ``[...]``, added to the logit of ``bump_ids`` behind the transform, as for a token that has been
            decided already. A token of probability p with a bump leaves 1 - p + p e^t of the row: for a t far below 0 and nearly
            all of the probability this is a difference of two numbers near 1, and the result has as few digits: its relative
            error is about eps / (1 - p + p e^t), and where that nears 1 its weights do not sum to 1.
        bump_ids: ``[...]`` integers, k; -100: none in this row. Anything else outside of ``[0, V)``, or ``skip_id``, gives NaN
            in its own row. Given if ``bump`` is, and only then.
        active: ``[...]``, bool or numeric; a row whose entry is zero is not projected, and zeros. None: every row counts.
        chunk_size: rows of logits that exist at a time; None chooses.
        num_active: an upper bound of the number of active rows, which saves reading it back from a GPU. Too small a bound
            gives NaN.
        softcap: as in :func:`token_nll`.
        scale: as in :func:`token_nll`; a temperature T is 1 / T.
        skip_id: as in :func:`token_nll`.
        check_targets: raise an IndexError that names the first bad one of ``bump_ids``; reads them back to the host. None
            follows the environment variable ``DLLM_KERNELS_CHECK``.
        backend: "auto", "triton" or "torch".

    Returns:
        ``[..., E]``, detached, in the dtype of ``hidden``, or that of autocast. DTensors: a head split by vocabulary, with an
        ``embedding`` split alike, gives the whole on every rank, a plain tensor.

    Raises:
        TypeError: an argument is not a tensor, or no number.
        ValueError: shapes, dtypes or devices that do not fit, a number out of range, one of ``bump`` and ``bump_ids`` without
            the other, rows split over ranks that are not the head's, or an unknown backend.
        IndexError: ``check_targets`` found a bad id.

    Source: the self-conditioning of DiffusionGemma; Chen et al. 2022, arXiv 2208.04202, section 3.2, for the idea.
    """
    _checks.check_float("hidden", hidden)
    if (bump is None) != (bump_ids is None):
        given = "bump_ids" if bump is None else "bump"
        raise ValueError(f"bump and bump_ids must both be given or neither, got {given} alone")
    ids = bump_ids
    if ids is None:
        ids = torch.full(hidden.shape[:-1], SKIP, dtype=torch.int64, device=hidden.device)
    options = Options(
        Transform(softcap, scale, skip_id), check_targets=check_targets, backend=backend, chunk_size=chunk_size,
        num_active=num_active,
    )  # fmt: skip
    job, options = checked(NAMES, Job(hidden, head, bias, ids, active), options, extra=extra)
    _check_embedding(hidden, head, embedding)
    leaves = [None if t is None else t.detach() for t in job.leaves]
    job = Job.of(leaves, job.of_rows, leaves[1] if embedding is head else embedding.detach())
    return do(SOFT_EMBEDDING, job._replace(weights=_checked_bump(hidden, bump)), options)  # type: ignore[no-any-return]


def _check_embedding(hidden: torch.Tensor, head: torch.Tensor, embedding: torch.Tensor) -> None:
    _checks.check_float("embedding", embedding)
    V = head.shape[0]
    if embedding.dim() != 2 or embedding.shape[0] != V or embedding.shape[1] < 1:
        raise ValueError(
            f"embedding must have shape ({V}, E) with E >= 1, as many rows as head, got {tuple(embedding.shape)}"
        )
    _checks.check_same_device("hidden", hidden, embedding=embedding)
    _checks.check_table_dtype(hidden, embedding)


def _checked_bump(hidden: torch.Tensor, bump: Any) -> torch.Tensor | None:
    """A number a row."""
    if bump is None:
        return None
    rows = hidden.shape[:-1]
    if isinstance(bump, torch.Tensor):
        bump = plain(bump)
        _checks.check_mask("bump", bump, rows, "that of hidden without its last dimension")
        _checks.check_same_device("hidden", hidden, bump=bump)
        return bump  # type: ignore[no-any-return]
    _checks.check_number("bump", bump, "a number or a tensor")
    if not -math.inf < bump < math.inf:
        raise ValueError(f"bump must be finite, got {_changing.shown(bump)}")
    return torch.full(rows, float(bump), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
