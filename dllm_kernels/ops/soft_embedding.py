r"""Mean embedding of what a model predicts, which self-conditioning gives back to a denoiser as its last prediction.

    e_i = sum_v p_iv E_v,      p_i = softmax(transform(W h_i + b) + t_i onehot(k_i)).

The probabilities exist one chunk at a time, in the memory of its logits. A chunk takes two products. Between them are
two passes
over the chunk: one reads it, one writes p over it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dllm_kernels._backends._rows import IGNORE
from dllm_kernels._core._inputs import GRAD_INPUTS, RowInputs
from dllm_kernels._core._plan import Options
from dllm_kernels._core._run import checked, run
from dllm_kernels._core._soft_embedding import SOFT_EMBEDDING
from dllm_kernels._utils import _changing, _checks
from dllm_kernels._utils._dtypes import accum_dtype
from dllm_kernels._utils._named import replaced
from dllm_kernels._utils._plain import plain
from dllm_kernels._utils._transform import Transform

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
    r"""Mean of the rows of ``embedding`` under each position's predicted distribution, from hidden states and LM head.

    .. math:: e_i = \sum_v p_{iv} E_v, \qquad
        p_i = \text{softmax}(\text{transform}(W h_i + b) + t_i \, \text{onehot}(k_i))

    Self-conditioning adds this to the input of the next denoising step. The result has no gradient, even where the
    inputs require one: all tensors are taken as constants. The logits exist one chunk at a time. The op takes two
    matrix products.

    Args:
        hidden: ``[..., D]``, float16, bfloat16, float32 or float64.
        head: ``[V, D]``, the LM head, of the dtype of ``hidden`` unless autocast is on.
        embedding: ``[V, E]``, of the same dtype. Where embedding and head are tied, pass the head. A factor that the
            model applies to its embeddings is left to the caller.
        bias: ``[V]`` or None.
        extra: as in :func:`weighted_linear_nll`.
        bump: t, a number or ``[...]``, added to the logit of ``bump_ids`` after the transform, for instance of a token
            that is already decided. -inf in a tensor takes the token out of its row. However certain the token is, no
            digits are lost.
        bump_ids: ``[...]`` integers, k; -100: no bump in this row. Any other value outside of ``[0, V)``, or
            ``skip_id``, gives NaN in its own row. ``bump`` and ``bump_ids`` go together.
        active: ``[...]``, bool or numeric. A row whose entry is 0 is not projected, and its result is 0. None: all
            rows.
        chunk_size: number of rows whose logits exist at a time; None: chosen from the sizes.
        num_active: an upper bound of the number of active rows. Without it the number is read back from a GPU. Too
            small a bound gives NaN.
        softcap: as in :func:`token_nll`.
        scale: as in :func:`token_nll`; a temperature T is 1 / T.
        skip_id: as in :func:`token_nll`.
        check_targets: raise an IndexError that names the first of ``bump_ids`` that is out of range; reads them back to
            the host. None follows the environment variable ``DLLM_KERNELS_CHECK``.
        backend: "auto", "triton" or "torch".

    Returns:
        ``[..., E]``, detached, in the dtype of ``hidden`` or that of autocast. With DTensors, head and embedding must
        be split by vocabulary in the same way, and every rank gets the whole result as a plain tensor.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices do not fit, a number is out of range, only one of ``bump`` and
            ``bump_ids`` is given, rows and head are split over ranks in ways that do not fit, or the backend is
            unknown.
        IndexError: ``check_targets`` is on and one of ``bump_ids`` is out of range.

    Source: the self-conditioning of DiffusionGemma; Chen et al. 2022, arXiv 2208.04202, section 3.2, for the idea.
    """
    _checks.check_float("hidden", hidden)
    if (bump is None) != (bump_ids is None):
        given = "bump_ids" if bump is None else "bump"
        raise ValueError(f"bump and bump_ids must both be given or neither, got {given} alone")
    if bump_ids is None:
        bump_ids = torch.full(hidden.shape[:-1], IGNORE, dtype=torch.int64, device=hidden.device)
    options = Options(
        Transform(softcap, scale, skip_id), check_targets=check_targets, backend=backend, chunk_size=chunk_size,
        num_active=num_active,
    )  # fmt: skip
    inputs, options = checked(NAMES, RowInputs(hidden, bump_ids, head, bias, active=active), options, extra=extra)
    _check_embedding(hidden, head, embedding)
    constants = {n: None if t is None else t.detach() for n, t in zip(GRAD_INPUTS, inputs.grad_inputs, strict=True)}
    constants["embedding"] = constants["weight"] if embedding is head else embedding.detach()  # tied
    inputs = replaced(inputs, **constants, bump=_checked_bump(hidden, bump))
    return run(SOFT_EMBEDDING, inputs, options)  # type: ignore[no-any-return]


def _check_embedding(hidden: torch.Tensor, head: torch.Tensor, embedding: torch.Tensor) -> None:
    _checks.check_float("embedding", embedding)
    V = head.shape[0]
    if embedding.dim() != 2 or embedding.shape[0] != V or embedding.shape[1] < 1:
        raise ValueError(
            f"embedding must have shape ({V}, E) with E >= 1, as many rows as head, got {tuple(embedding.shape)}"
        )
    _checks.check_same_device("hidden", hidden, embedding=embedding)
    _checks.check_dtypes("hidden", hidden, {"embedding": embedding})


def _checked_bump(hidden: torch.Tensor, bump: Any) -> torch.Tensor | None:
    """Validate the bump; return one value per row."""
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
    return torch.full(rows, float(bump), dtype=accum_dtype(hidden.dtype), device=hidden.device)
