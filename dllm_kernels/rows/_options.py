"""Options of a call, as public functions and losses take them as keywords."""

from __future__ import annotations

from typing import NamedTuple

from dllm_kernels import _checks
from dllm_kernels._graph._named import replaced
from dllm_kernels.rows._interface import IGNORE
from dllm_kernels.rows._transform import NO_TRANSFORM, Transform
from dllm_kernels.rows._truncation import Truncation


class Options(NamedTuple):
    """Options of a call as the caller gave them; :meth:`checked` validates them.

    Attributes:
        transform: transform of the logits, applied before the softmax.
        ignore_index: target that marks a row to skip.
        check_targets: True if an out-of-range target raises; None: see ``check_target_range``.
        backend: "auto", "triton" or "torch".
        with_lse: return the logsumexp.
        with_correct: return the argmax-match.
        with_ids: return the argmax.
        round_nll: round each NLL to the dtype of the logits before it is weighted.
        inplace_backward: write the gradient over the logits.
        rest: return the log-probability of all columns but the ids.
        with_best: return the log-probability of the argmax behind those of the ids.
        return_top: number of most likely ids to return, or None.
        top_k: see ``Truncation``, in ``rows/_truncation.py``; 0 is None.
        top_p: see ``Truncation``; 1 is None.
        min_p: see ``Truncation``; 0 is None.
        untruncated_log_probs: take log-probabilities and entropy from the softmax before its truncation.
    """

    transform: Transform = NO_TRANSFORM
    ignore_index: int = IGNORE
    check_targets: bool | None = None
    backend: str = "auto"
    with_lse: bool = False
    with_correct: bool = False
    with_ids: bool = False
    round_nll: bool = False
    inplace_backward: bool = False
    rest: bool = False
    with_best: bool = False
    return_top: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    untruncated_log_probs: bool = False

    def checked(self, V: int) -> Options:
        """Validate the options for rows of V logits, and convert them to Python types.

        Raises:
            TypeError: an option of the wrong type.
            ValueError: an option out of range. The backend is resolved by ``use_triton``.
        """
        flags = {name: getattr(self, name) for name in FLAGS}
        _checks.check_flags(**flags)
        return replaced(
            self,
            **{name: bool(value) for name, value in flags.items()},
            ignore_index=_checks.checked_int64("ignore_index", self.ignore_index),
            return_top=None if self.return_top is None else _checked_columns("return_top", self.return_top, 1, V),
            top_k=None if self.top_k is None else _checked_columns("top_k", self.top_k, 0, V) or None,
            top_p=_checks.checked_share("top_p", self.top_p, keeps_all=1),
            min_p=_checks.checked_share("min_p", self.min_p, keeps_all=0),
            transform=self.transform.checked(V),
        )

    @property
    def truncation(self) -> Truncation:
        """The truncation of the softmax."""
        return Truncation(self.top_k, self.top_p, self.min_p)


def _checked_columns(name: str, k: int, least: int, V: int) -> int:
    """Validate a number of columns, from ``least`` to V."""
    number = _checks.checked_int(name, k)
    if not least <= k <= V:
        raise ValueError(f"{name} must lie in [{least}, {V}], the size of the vocabulary, or be None, got {k}")
    return number


FLAGS = tuple(name for name, default in Options._field_defaults.items() if default is False)
