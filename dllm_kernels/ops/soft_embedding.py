r"""Expected embedding of the predicted token, the input of self-conditioned denoisers at the next step.

    e_i = sum_v p_iv E_v,      p_i = softmax(transform(W h_i + b) + t_i onehot(k_i)).

The probabilities exist one chunk at a time and overwrite the logits of the chunk. A chunk takes two matrix products.
Between them are two passes over the chunk: the first computes the normalizer, the second overwrites the logits with p.
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
    logits_dtype: torch.dtype | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
    check_targets: bool | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    r"""Compute the expected row of ``embedding`` under the predicted distribution of each position.

    .. math:: e_i = \sum_v p_{iv} E_v, \qquad
        p_i = \text{softmax}(\text{transform}(W h_i + b) + t_i \, \text{onehot}(k_i))

    Self-conditioning adds the result to the input of the next denoising step. All tensors are constants: the result has
    no gradient, even if the inputs require one. The logits exist one chunk at a time. The op takes two matrix products.

    Args:
        hidden: {hidden}
        head: {weight}
        embedding: ``[V, E]``, of the dtype of ``hidden`` unless autocast is on. If embedding and head are tied, pass
            the head. The caller must apply any factor by which the model scales its embeddings.
        bias: ``[V]`` or None.
        extra: {extra}
        bump: t, a number or ``[...]``, added to the logit of ``bump_ids`` after the transform, for example the logit of
            a token that is already decided. -inf in a tensor excludes the token from its row. A large bump causes no
            loss of precision.
        bump_ids: k, ``[...]`` integers; -100: no bump in this row. Any other value outside ``[0, V)`` raises an
            IndexError on a CPU and gives NaN in that row on a GPU; ``skip_id`` gives NaN. Required with ``bump``; None
            without it.
        active: ``[...]``, bool or numeric. Rows with entry 0 are not projected, and their result is 0. None: all rows.
        chunk_size: {chunk_size}
        num_active: {num_active}
        logits_dtype: torch.float32 keeps the logits of float16 and bfloat16 operands in float32. The probabilities are
            rounded once, to the dtype of the operands, before they multiply the embedding. None: the dtype of the
            operands.
        softcap: {softcap}
        scale: {scale}
        skip_id: column that is never predicted, such as the MASK column; its probability is 0. None: every column can
            be predicted.
        check_targets: {check_targets} The ids are ``bump_ids``.
        backend: "auto", "triton" or "torch".

    Returns:
        ``[..., E]``, detached, in the dtype of ``hidden``, or in the autocast dtype. With DTensors, head and embedding
        must be sharded over the vocabulary in the same way. Every rank returns the full result as a plain tensor.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices do not match, a number is out of range, only one of ``bump`` and
            ``bump_ids`` is given, rows and head have incompatible shardings, or the backend is unknown.
        IndexError: an entry of ``bump_ids`` is out of range and checked, see ``check_targets``.

    Source: self-conditioning as in DiffusionGemma; introduced by Chen et al. 2022, arXiv 2208.04202, section 3.2.
    """
    _checks.check_float("hidden", hidden)
    if (bump is None) != (bump_ids is None):
        given = "bump_ids" if bump is None else "bump"
        raise ValueError(f"bump and bump_ids must both be given or neither, got {given} alone")
    if bump_ids is None:
        bump_ids = torch.full(hidden.shape[:-1], IGNORE, dtype=torch.int64, device=hidden.device)
    options = Options(
        Transform(softcap, scale, skip_id), check_targets=check_targets, backend=backend, chunk_size=chunk_size,
        num_active=num_active, logits_dtype=logits_dtype,
    )  # fmt: skip
    inputs, options = checked(NAMES, RowInputs(hidden, bump_ids, head, bias, active=active), options, extra=extra)
    _check_embedding(hidden, head, embedding)
    constants = {n: None if t is None else t.detach() for n, t in zip(GRAD_INPUTS, inputs.grad_inputs, strict=True)}
    constants["embedding"] = constants["weight"] if embedding is head else embedding.detach()  # tied
    inputs = replaced(inputs, **constants, bump=_checked_bump(hidden, bump))
    return run(SOFT_EMBEDDING, inputs, options)  # type: ignore[no-any-return]


def _check_embedding(hidden: torch.Tensor, head: torch.Tensor, embedding: torch.Tensor) -> None:
    _checks.check_float("embedding", embedding)
    _checks.check_gathered(embedding=embedding)
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
        _checks.check_weights("bump", bump, rows, "that of hidden without its last dimension")
        _checks.check_same_device("hidden", hidden, bump=bump)
        return bump  # type: ignore[no-any-return]
    _checks.check_number("bump", bump, "a number or a tensor")
    if not -math.inf < bump < math.inf:
        raise ValueError(f"bump must be finite, got {_changing.printable(bump)}")
    return torch.full(rows, float(bump), dtype=accum_dtype(hidden.dtype), device=hidden.device)
