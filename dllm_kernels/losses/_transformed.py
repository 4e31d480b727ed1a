"""What every loss that is a module takes besides its own: a transform of the logits, what it returns of its rows, a backend."""

from __future__ import annotations

from typing import Any

from torch import nn

from dllm_kernels._core._plan import Options
from dllm_kernels._utils import _checks
from dllm_kernels._utils._transform import Transform
from dllm_kernels.losses._common import REDUCTIONS


class TransformedLoss(nn.Module):
    """A loss of logits that go through a transform first, as :func:`dllm_kernels.ops.token_nll` describes it."""

    def __init__(
        self,
        softcap: float | None = None,
        scale: float | None = None,
        skip_id: int | None = None,
        reduction: str = "total",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        _checks.check_transform(softcap, scale, skip_id)
        self.softcap = softcap
        self.scale = scale
        self.skip_id = skip_id
        self.reduction = reduction
        self._gives_rows()
        self.backend = backend

    def _options(self, **others: Any) -> Options:
        """What the ops are asked for; made at each call, since these are attributes that may have been assigned since."""
        return Options(Transform(self.softcap, self.scale, self.skip_id), backend=self.backend, **others)

    def _gives_rows(self) -> bool:
        """Whether the output has the loss of each row. Looked at at each call: an attribute may have been assigned since."""
        if self.reduction == "total":
            return False
        _checks.check_choice("reduction", self.reduction, REDUCTIONS)
        return True
