"""Return types of the row ops."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TokenNLL(NamedTuple):
    """Per-row results, each of the shape of the targets.

    Attributes:
        nll: negative log-likelihood in nats, float32 (float64 for float64 logits), differentiable. 0 for inactive rows.
        lse: logsumexp of the row, detached, or None unless requested. 0 for inactive rows.
        correct: True if the target is the argmax of its row (the lowest index wins a tie), bool, or None unless
            requested. False for inactive rows and for rows whose NLL is NaN.
        ids: argmax of the row (the lowest index wins a tie), int64, or None unless requested. -100 for inactive rows.
            If the softmax of a row is NaN, the lowest id that is not skipped.
    """

    nll: torch.Tensor
    lse: torch.Tensor | None = None
    correct: torch.Tensor | None = None
    ids: torch.Tensor | None = None


class RowStats(NamedTuple):
    """Statistics of each row of logits. Inactive rows are 0 or False.

    All but ``correct`` and ``ids`` are differentiable, also together. Floats are float32 (float64 for float64 logits),
    in nats. All but ``log_probs`` have the shape of the rows.

    Attributes:
        log_probs: log p of each id, of the shape of the ids; 0 for an id of -100.
        lse: logsumexp.
        entropy: ``-sum_v p_v log p_v``, or None unless requested.
        mix: ``sum_v log(a + b p_v)`` over the columns that are not skipped, or None unless requested.
        correct: True if the first id is the argmax (the lowest index wins a tie), bool, or None unless requested. False
            if its log-probability is NaN.
        ids: argmax of the row, not the ids of the call; see :class:`TokenNLL`.
    """

    log_probs: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor | None = None
    mix: torch.Tensor | None = None
    correct: torch.Tensor | None = None
    ids: torch.Tensor | None = None


class RowObjective(NamedTuple):
    """An objective and its statistics.

    All but ``loss`` are detached. All but ``loss`` and ``log_probs`` have the shape of the rows. Inactive rows are 0 or
    False.

    Attributes:
        loss: sum of ``value``, 0-d, float32 (float64 for float64 logits), differentiable.
        value: return value of ``fn`` for each row.
        log_probs: log p of each id, of the shape of the ids.
        lse: logsumexp.
        entropy: ``-sum_v p_v log p_v``, or None unless requested.
        correct: True if the first id is the argmax, bool, or None unless requested.
        ids: see :class:`RowStats`.
    """

    loss: torch.Tensor
    value: torch.Tensor
    log_probs: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor | None = None
    correct: torch.Tensor | None = None
    ids: torch.Tensor | None = None


class RestStats(NamedTuple):
    """Statistics of each row with the mass of all other columns; all but ``correct`` are differentiable.

    Attributes:
        log_probs: see :class:`RowStats`.
        lse: see :class:`RowStats`.
        rest: log of the probability of all columns but the ids; -inf if there are none.
        correct: see :class:`RowStats`.
        loss: see :class:`RowObjective`; None without an objective.
        value: see ``loss``.
    """

    log_probs: torch.Tensor
    lse: torch.Tensor
    rest: torch.Tensor
    correct: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    value: torch.Tensor | None = None


class LinearSample(NamedTuple):
    """A sampled token of each row and statistics of its distribution.

    All are detached. Floats are float32 (float64 for float64 inputs), in nats.

    If the distribution is truncated, log-probabilities and entropy are those of the truncated distribution, or of the
    full one with ``untruncated_log_probs``.

    Attributes:
        ids: the chosen token, int64, of the shape of the rows; -100 in inactive rows. If the softmax of a row is NaN,
            which ``log_probs`` shows, the lowest id that is not skipped.
        log_probs: log-probability of the chosen token; 0 in inactive rows.
        entropy: entropy of the distribution; 0 in inactive rows.
        top_ids: the K most likely tokens, int64 ``[..., K]``, in descending order, the lowest id first among equals;
            None unless requested. -100 in inactive rows.
        top_log_probs: log-probabilities of ``top_ids``, -inf outside a truncated distribution; None unless requested.
    """

    ids: torch.Tensor
    log_probs: torch.Tensor
    entropy: torch.Tensor
    top_ids: torch.Tensor | None = None
    top_log_probs: torch.Tensor | None = None


class WeightedNLL(NamedTuple):
    """A weighted sum of NLLs, and the results of each row.

    Attributes:
        loss: sum of weights * nll, 0-d, float32 (float64 for float64 logits), differentiable.
        nll: see :class:`TokenNLL`, but detached.
        lse: see :class:`TokenNLL`.
        correct: see :class:`TokenNLL`.
        ids: see :class:`TokenNLL`.
    """

    loss: torch.Tensor
    nll: torch.Tensor
    lse: torch.Tensor | None = None
    correct: torch.Tensor | None = None
    ids: torch.Tensor | None = None


class Divergence(NamedTuple):
    """A weighted sum of divergences, and the results of each row.

    All but ``loss`` are detached, have the shape of the rows, and are 0 or False for rows of weight 0.

    Attributes:
        loss: sum of weights * value, 0-d; with ``reduction="none"`` weights * value, of the shape of the rows. float32
            (float64 for float64 logits), differentiable.
        value: the divergence of each row, in nats, times the square of the temperature.
        acceptance_rate: ``sum_v min(p_v, q_v)``, the rate at which the teacher accepts tokens drawn by the student.
        agree: True if both have the same argmax (the lowest index wins a tie), bool. False if the rate is NaN.
    """

    loss: torch.Tensor
    value: torch.Tensor
    acceptance_rate: torch.Tensor
    agree: torch.Tensor
