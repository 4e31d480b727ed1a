"""What every loss that is a module takes besides its own: a transform of the logits."""

from __future__ import annotations

from typing import Any

from torch import nn

from dllm_kernels.base import _checks


class TransformedLoss(nn.Module):
    """A loss of logits that go through a transform first, as :func:`dllm_kernels.ops.token_nll` describes it.

    Args:
        softcap: c > 0 makes each logit ``c tanh(z / c)``, or None.
        scale: s > 0 multiplies each logit, after the cap, or None.
        skip_id: the column that is never predicted, or None.

    Raises:
        TypeError: one of them is no number, or ``skip_id`` no int.
        ValueError: one of them is out of range.
    """

    def __init__(self, softcap: float | None = None, scale: float | None = None, skip_id: int | None = None) -> None:
        super().__init__()
        _checks.check_transform(softcap, scale, skip_id)
        self.softcap = softcap
        self.scale = scale
        self.skip_id = skip_id

    @property
    def transform(self) -> dict[str, Any]:
        """The three as the ops take them."""
        return {"softcap": self.softcap, "scale": self.scale, "skip_id": self.skip_id}
