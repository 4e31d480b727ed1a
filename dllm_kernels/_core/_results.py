"""Return types of the row ops."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TokenNLL(NamedTuple):
    """Per-row results, each of the shape of the targets.

    Attributes:
        nll: negative log-likelihood in nats, float32 (float64 for float64 logits), differentiable. 0 for inactive rows.
        lse: logsumexp of the row, detached, or None unless requested. 0 for inactive rows.
        correct: whether the target is the argmax of its row (the lowest index wins a tie), bool, or None when not asked
            for. False for inactive rows and for rows whose NLL is NaN.
    """

    nll: torch.Tensor
    lse: torch.Tensor | None = None
    correct: torch.Tensor | None = None


class RowStats(NamedTuple):
    """Statistics of each row of logits; all but ``correct`` are differentiable together. 0 or False for inactive rows.

    Float32 (float64 for float64 logits), in nats; of the shape of the rows but for the first.

    Attributes:
        log_probs: log p of each id, of the shape of the ids; 0 for an id of -100.
        lse: logsumexp.
        entropy: ``-sum_v p_v log p_v``, or None unless requested.
        mix: ``sum_v log(a + b p_v)`` over the columns that are not skipped, or None unless requested.
        correct: whether the first id is the argmax (the lowest index wins a tie), bool, or None unless requested. False
            where its log-probability is NaN.
    """

    log_probs: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor | None = None
    mix: torch.Tensor | None = None
    correct: torch.Tensor | None = None


class RowObjective(NamedTuple):
    """An objective and its statistics. All but ``loss`` are detached, all but ``log_probs`` have the rows' shape.

    Attributes:
        loss: sum of ``value``, 0-d, float32 (float64 for float64 logits), differentiable.
        value: what ``fn`` returned for each row; 0 for inactive rows, like the rest.
        log_probs: log p of each id, of the shape of the ids.
        lse: logsumexp.
        entropy: ``-sum_v p_v log p_v``, or None unless requested.
        correct: whether the first id is the argmax, bool, or None unless requested.
    """

    loss: torch.Tensor
    value: torch.Tensor
    log_probs: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor | None = None
    correct: torch.Tensor | None = None


class LinearSample(NamedTuple):
    """A token of each row and its distribution, detached; floats are float32 (float64 for float64 inputs), in nats.

    Attributes:
        ids: the chosen token, int64, of the shape of the rows; -100 in inactive rows. In a row whose softmax is NaN,
            as ``log_probs`` shows, the lowest id that is not skipped.
        log_probs: its log-probability; 0 in inactive rows.
        entropy: of the distribution; 0 in inactive rows.
        top_ids: the K most likely tokens, int64 ``[..., K]``, in descending order, the lowest id first among equals; or
            None unless requested. -100 as in ``ids``.
        top_log_probs: their log-probabilities, or None unless requested.
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
        nll: per-row NLL, detached; else as in :class:`TokenNLL`.
        lse: as in :class:`TokenNLL`.
        correct: as in :class:`TokenNLL`.
    """

    loss: torch.Tensor
    nll: torch.Tensor
    lse: torch.Tensor | None = None
    correct: torch.Tensor | None = None


class Divergence(NamedTuple):
    """A weighted sum of divergences and what it was made of; all but ``loss`` detached, of the shape of the rows.

    Attributes:
        loss: sum of weights * value, 0-d, or each row's, of the shape of the rows, with ``reduction="none"``; float32
            (float64 for float64 logits), differentiable.
        value: the divergence of each row, in nats, times the square of the temperature; 0 for rows of weight 0, like
            the rest.
        acceptance_rate: ``sum_v min(p_v, q_v)``, the rate at which the teacher accepts what the student draws.
        agree: whether both have the same argmax (the lowest index wins a tie), bool. False where the rate is NaN.
    """

    loss: torch.Tensor
    value: torch.Tensor
    acceptance_rate: torch.Tensor
    agree: torch.Tensor
