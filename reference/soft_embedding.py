"""Expected embedding under the predicted distribution of each row."""

from __future__ import annotations

import torch

from reference.linear_nll import Extra, linear_logits
from reference.token_nll import IGNORE_INDEX
from reference.transform import possible_targets, transformed


def soft_embedding(
    hidden: torch.Tensor,
    head: torch.Tensor,
    embedding: torch.Tensor,
    bias: torch.Tensor | None = None,
    bump: torch.Tensor | None = None,
    bump_ids: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    *,
    extra: Extra | None = None,
    **transform: float | int | None,
) -> torch.Tensor:
    """Compute ``softmax(transform(logits) + bump * onehot(bump_ids)) @ embedding`` per row.

    Args:
        hidden: ``[..., D]``, floating.
        head: the LM head ``[V, D]``.
        embedding: ``[V, E]``.
        bias: optional ``[V]``.
        bump: optional ``[...]``, added to the transformed logit of ``bump_ids``.
        bump_ids: ``[...]``, integer; -100: no bump in this row. Any other id out of range, or ``skip_id``, gives NaN.
        active: optional mask ``[...]``; nonzero is True. Inactive rows give zeros.
        extra: low-rank second part of the head, as in :func:`reference.linear_nll.linear_logits`.
        transform: ``softcap``, ``scale``, ``skip_id``.

    Returns:
        ``[..., E]`` in the dtype of ``hidden``, to which the probabilities are rounded too.

    Source: the self-conditioning of DiffusionGemma.
    """
    z = transformed(linear_logits(hidden, head, bias, active, extra), **transform)  # type: ignore[arg-type]
    if bump is not None and bump_ids is not None:
        ids = possible_targets(bump_ids, transform.get("skip_id"))  # type: ignore[arg-type]
        column = torch.arange(z.shape[-1], device=z.device) == ids[..., None]
        lost = (ids != IGNORE_INDEX) & ~column.any(-1)
        z = torch.where(column, z + bump.to(z.dtype)[..., None], z).masked_fill(lost[..., None], torch.nan)
    out = torch.softmax(z, -1).to(hidden.dtype) @ embedding
    return out if active is None else torch.where(active.bool()[..., None], out, 0.0)
