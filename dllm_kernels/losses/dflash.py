"""DFlash and its family: cross-entropy of a block-diffusion draft model, weighted by position decay or by D-PACE."""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._checks import Extra
from dllm_kernels._graph._named import replaced
from dllm_kernels._graph._plain import all_plain
from dllm_kernels.losses._block_weights import MEAN_EPS, Counts, PerOffset, counts_per_offset, size_of_blocks
from dllm_kernels.losses._common import Count, DLLMLossOutput, as_batch, single_loss, sum_of_rows
from dllm_kernels.losses._draft import LOSS_TYPES, DraftCall, DraftLoss
from dllm_kernels.ops.token_nll import token_nll_unchecked
from dllm_kernels.rows._call import checked
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._logits import LinearLogits, Logits
from dllm_kernels.rows._options import Options
from dllm_kernels.rows._transform import Transform


class DFlashDecayLoss(DraftLoss):
    r"""Cross-entropy of the drafted tokens, with larger weights for earlier positions of a block.

    Pass ``block_size`` with every call whose rows hold several blocks. Without it each sequence is one block, whose
    weights decay from its first row to its last. Rows in blocks, ``[B, blocks, k, V]``, need no ``block_size``: k is
    their number of rows per block.

    .. math:: \text{loss} = \frac{1}{N} \sum_i w_{k(i)} m_i \, \text{nll}_i, \qquad w_k = e^{-(k-1)/\gamma}

    k = 1, 2, ... counts the predicted positions of a block, after the given anchor token. m is ``block_mask``. A wrong
    token early in a block also rejects all later tokens of the block, so early positions have larger weights. Rows
    whose ``block_mask`` is 0 are not read.

    With other ``position_weights``, :func:`dpace_weights` computes ``w m`` from the draft's own probability of each
    target token, the constant :math:`q = e^{-\text{nll}}`. These weights are known only after the forward pass. From
    hidden states, a trainable head therefore computes the logits twice, and a frozen head once.

    Source: the DFlash paper, eq. 4; defaults of gamma in appendix A.1: 7, 5, 4 for blocks of 16, 10, 8. D-PACE,
    arXiv 2605.18810, for the other weights.

    Examples:
        >>> # two blocks of an anchor and three drafted tokens
        >>> target_ids = torch.tensor([[5, 2, 7, 1, 4, 4]])
        >>> logits = 9.0 * torch.nn.functional.one_hot(target_ids, 10).float()
        >>> logits[0, 2] = 0  # the last token of the first block is wrong
        >>> out = DFlashDecayLoss()(
        ...     logits, target_ids, block_mask=torch.ones(1, 6), block_size=4
        ... )
        >>> {name: round(value.item(), 2) for name, value in draft_accuracy(out).items()}
        {'draft_acc': 0.83, 'draft_acc_k1': 1.0, 'draft_acc_k2': 1.0, 'draft_acc_k3': 0.5}
        >>> acceptance_length(out, torch.ones(1, 6), block_size=4).item()
        2.5

    Args:
        loss_gamma: gamma of the decay, not 0; a negative one makes the weights grow. None: every row has the weight 1.
            "paper": 7, 5, 4 for a ``block_size`` of 16, 10, 8. Used with ``position_weights="decay"`` only.
        use_fused_linear_ce: attribute for the training loop: True to call :meth:`forward_fused` with hidden states,
            False to call :meth:`forward` with logits. The methods ignore it.
        chunk_size: rows per chunk of logits in :meth:`forward_fused`. Larger chunks take more memory and mean fewer,
            larger matrix products. None: chosen from the sizes. It is an attribute of the same name, which stays None
            in this case.
        normalize: denominator N. "tokens": ``num_tokens``; if None the loss is a sum. "rows": ``num_tokens``, or if
            None the sum of ``block_mask``. "mean": the sum of the weights plus 1e-6. "blocks": the number of blocks
            with a valid row, which is one whose ``block_mask`` is not 0. "sequences": the number of sequences with a
            valid row. "sequence_blocks": the sum of each sequence is divided by its number of blocks with a valid row.
            The total is divided by the number of sequences with a valid row.
        position_weights: "decay", or weights of :func:`dpace_weights`: "dpace" is S, "prefix" C and "continuation" S /
            C. The names used by trainers are accepted too.
        dpace_alpha: alpha of :func:`dpace_weights`, in [0, 1].
        loss_type: name of the position weights in SpecForge and in NeMo AutoModel's next release, instead of
            ``position_weights``: "dflash" is "decay", and the others have equal names. None: ``position_weights``. The
            attribute of this name follows ``position_weights``.
        anchor_row: True: a block has ``block_size`` rows, the first of which is the anchor's and predicts the token
            after it. The k-th row of a block then still predicts its k-th token. False: a block has ``block_size - 1``
            rows.
        softcap: c > 0 replaces each logit by ``c tanh(z / c)`` first, as in Gemma; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.
        skip_id: column that is never predicted, such as the MASK column. Its logit is -inf, its gradient is 0, and the
            NLL or log-probability of a target or id equal to it is NaN. None: every column can be predicted.
        reduction: "total", or "none" to also return the loss of each row. Then ``row_losses`` is ``w m nll`` and
            ``row_weights`` is ``w m``.
        backend: "auto", "triton" or "torch".

    Raises:
        TypeError: ``chunk_size`` is not an int, ``dpace_alpha`` is not a number, ``use_fused_linear_ce`` or
            ``anchor_row`` is not a bool.
        ValueError: ``normalize`` or ``position_weights`` is unknown, ``dpace_alpha`` is outside [0, 1], or
            ``chunk_size`` < 1. Every call checks the settings again.
    """

    def __init__(
        self, loss_gamma: float | str | None = 7.0, use_fused_linear_ce: bool = False, chunk_size: int | None = None,
        normalize: str = "tokens", *, position_weights: str = "decay", dpace_alpha: float = 0.5,
        loss_type: str | None = None, anchor_row: bool = False, softcap: float | None = None,
        scale: float | None = None, skip_id: int | None = None, reduction: str = "total", backend: str = "auto",
    ) -> None:  # fmt: skip
        """Initialize; the arguments are documented on the class."""
        if loss_type is not None:
            _checks.check_choice("loss_type", loss_type, LOSS_TYPES)
            if position_weights not in ("decay", LOSS_TYPES[loss_type]):
                raise ValueError(f"position_weights must agree with loss_type={loss_type!r}, got {position_weights!r}")
            position_weights = LOSS_TYPES[loss_type]
        super().__init__(
            Transform(softcap, scale, skip_id), loss_gamma, normalize, position_weights, dpace_alpha, anchor_row,
            reduction=reduction, backend=backend,
        )  # fmt: skip
        self.chunk_size = _checks.checked_size("chunk_size", chunk_size)
        self.use_fused_linear_ce = _checks.checked_bool("use_fused_linear_ce", use_fused_linear_ce)

    @property
    def loss_type(self) -> str:
        """Name of ``position_weights`` in SpecForge and NeMo AutoModel."""
        return "dflash" if self._weighting == "decay" else self._weighting

    @loss_type.setter
    def loss_type(self, name: str) -> None:
        _checks.check_choice("loss_type", name, LOSS_TYPES)
        self.position_weights = LOSS_TYPES[name]

    def forward(
        self, logits: Logits, target_ids: Tensor, block_mask: Tensor, num_tokens: int | Tensor | None = None,
        block_size: int | None = None, *, num_blocks: int | Tensor | None = None,
        num_sequences: int | Tensor | None = None, prefix: Tensor | None = None,
    ) -> DLLMLossOutput:  # fmt: skip
        """Compute the loss and the draft accuracy from logits.

        If each call receives the counts of the whole step, the losses of its micro-batches and ranks add up to the loss
        of the whole step. Packed input without a batch dimension, ``[T, V]`` with targets and mask ``[T]`` and a prefix
        ``[blocks]``, is a batch of one sequence.

        Rows in blocks, ``[B, blocks, k, V]`` with targets and mask ``[B, blocks, k]``, give the results of the same
        rows as ``[B, blocks * k, V]`` with the ``block_size`` of k rows, which may be omitted. Results per row have the
        shape of the targets.

        Args:
            logits: ``[B, T, V]`` of the predicted positions. T is blocks * (block_size - 1), or blocks * block_size
                with ``anchor_row``. Or ``[B, blocks, k, V]``.
            target_ids: ``[B, T]`` or ``[B, blocks, k]`` integers. A target of -100 has NLL 0 and never counts as
                correct.
            block_mask: of the shape of ``target_ids``, 0 for rows that predict nothing. Fractions are weights. A
                constant.
            num_tokens: the loss is divided by ``max(num_tokens, 1)``; int or 0-d tensor. None: as described with
                ``normalize``. Used with "tokens" and "rows" only.
            block_size: positions of a block, the anchor included. The weights restart at each block, and accuracy is
                counted per offset. None: each sequence ``[T]`` is one block, and no accuracy is counted; rows in blocks
                have that of k rows.
            num_blocks: N with ``normalize="blocks"``, as ``max(n, 1)``; None: the blocks of this call with a valid row.
                With "sequence_blocks" a tensor ``[B]``: the number of blocks with a valid row in each full sequence,
                for calls that hold only a part of each sequence. Not used otherwise.
            num_sequences: N with "sequences" and "sequence_blocks", as ``max(n, 1)``; None: the sequences of this call
                with a valid row. Not used otherwise.
            prefix: ``[B, blocks]`` integers, the number l of tokens at the start of each block that the draft is given,
                the anchor included, as from :func:`sample_prefix`. Rows k < l are not read and do not count, and
                ``w_k = e^(-(k - l) / gamma)`` from k = l on. None: 1. With the decay and a ``block_size`` only.

        Returns:
            :class:`DLLMLossOutput` with ``total_loss == dllm_loss`` and the counts, or None for the counts if
            ``block_size`` is None or T is not a multiple of the block rows. ``weight_sum`` is the sum of ``w m``.

        Raises:
            TypeError: an argument that should be a tensor is not.
            ValueError: shapes, dtypes or devices do not match, T is not a whole number of blocks, ``block_size`` is not
                that of blocks of k rows, the paper has no gamma for ``block_size``, or on CPU a prefix is outside [1,
                rows of a block].
        """
        counts = Counts(num_tokens, num_blocks, num_sequences)
        call = self._call(logits, target_ids, block_mask, block_size, counts, prefix)
        return _in_blocks_of(target_ids, call.output(call.cross_entropy()))

    def forward_fused(
        self, hidden: Tensor, lm_head_weight: Tensor, target_ids: Tensor, block_mask: Tensor, num_tokens: Count = None,
        block_size: int | None = None, lm_head_bias: Tensor | None = None, *, num_blocks: Count = None,
        num_sequences: Count = None, prefix: Tensor | None = None, extra: Extra | None = None,
        num_active: int | None = None, logits_dtype: torch.dtype | None = None,
    ) -> DLLMLossOutput:  # fmt: skip
        """Compute :meth:`forward` of ``LinearLogits(hidden, lm_head_weight, lm_head_bias, extra, ...)``.

        The gradient is computed in the forward pass, for the rows that are not masked. A frozen head takes two matrix
        products. A trainable head takes three with the decay, and four with other weights, because the logits are then
        recomputed. A frozen head with a trainable ``extra[1]`` takes two and three. In a drafter's Markov head,
        ``extra[0]`` is the embedding of the previous token.
        """
        logits = LinearLogits(hidden, lm_head_weight, lm_head_bias, extra, logits_dtype, num_active=num_active)
        return DFlashDecayLoss.forward(
            self, logits, target_ids, block_mask, num_tokens, block_size, num_blocks=num_blocks,
            num_sequences=num_sequences, prefix=prefix,
        )  # fmt: skip

    def forward_with_token_nll(
        self, logits: Logits, target_ids: Tensor, block_mask: Tensor, num_tokens: Count = None,
        block_size: int | None = None, *, num_blocks: Count = None, num_sequences: Count = None,
        prefix: Tensor | None = None,
    ) -> tuple[DLLMLossOutput, Tensor]:  # fmt: skip
        """Compute the loss as :meth:`forward`, and the NLL of each row.

        NeMo AutoModel has announced a method of this name, and not released it. Its results may differ.

        Args:
            logits, target_ids, block_mask, num_tokens, block_size, num_blocks, num_sequences, prefix: as in
                :meth:`forward`.

        Returns:
            (output, token_nll): the output of :meth:`forward`, and ``[B, T]`` or ``[B, blocks, k]``, the NLL without
            weights, 0 for rows that are not read. Both are differentiable, also together, with any gradient per row.

        Raises:
            TypeError: as in :meth:`forward`.
            ValueError: as in :meth:`forward`.
        """
        counts = Counts(num_tokens, num_blocks, num_sequences)
        call = self._call(logits, target_ids, block_mask, block_size, counts, prefix)
        result = call.cross_entropy(per_row=True)
        assert result.value is not None
        nll = result.value.reshape(target_ids.shape) if target_ids.dim() == 3 else result.value
        return _in_blocks_of(target_ids, call.output(result)), nll

    def weighted_mean(self, token_nll: Tensor, weights: Tensor) -> Tensor:
        """Compute ``sum(weights * token_nll) / (sum(weights) + 1e-6)``, as ``normalize="mean"`` does.

        NeMo AutoModel has announced a method of this name, and not released it. Its arguments may differ.

        Args:
            token_nll: ``[B, T]`` or ``[B, blocks, k]``, the NLL of each row, differentiable.
            weights: of the shape of ``token_nll``, constants, such as those of :meth:`position_weights`. Rows of weight
                0 are not read.

        Returns:
            0-d, float32 (float64 for float64 ``token_nll``).

        Raises:
            TypeError: an argument is not a tensor.
            ValueError: shapes, dtypes or devices do not match, or ``weights`` requires a gradient.
        """
        _checks.check_float("token_nll", token_nll)
        _checks.check_weights("weights", weights, token_nll.shape, "that of token_nll")
        _checks.check_same_device("token_nll", token_nll, weights=weights)
        _checks.check_constant("weights", weights)
        token_nll, weights = all_plain(token_nll, weights)
        dtype = accum_dtype(token_nll.dtype)
        token_nll, weights = token_nll.to(dtype), weights.to(dtype)
        return sum_of_rows(token_nll, weights / (weights.sum() + MEAN_EPS))

    def _call(
        self, logits: Logits, target_ids: Tensor, block_mask: Tensor, block_size: int | None, counts: Counts,
        prefix: Tensor | None,
    ) -> DraftCall:  # fmt: skip
        """Check the arguments of a call."""
        rows = self._rows(logits, self._options())
        if rows.packed(target_ids):
            rows, counts = rows.as_batch(), counts.as_batch()
            target_ids, block_mask, prefix = map(as_batch, (target_ids, block_mask, prefix))
        elif rows.has_blocks(target_ids):
            block_size = size_of_blocks(rows.names.targets, target_ids, block_size, self.anchor_row)
            _checks.check_weights("block_mask", block_mask, target_ids.shape, f"that of {rows.names.targets}")
            rows, target_ids, block_mask = rows.blocks_as_sequences(), target_ids.flatten(1), block_mask.flatten(1)
        rows = rows.checked(target_ids)
        weighting = self._checked_weighting()
        target_ids, block_mask = all_plain(target_ids, block_mask)
        _checks.check_masks_like("target_ids", target_ids, block_mask=block_mask)
        _checks.check_constant("block_mask", block_mask)
        rows.check_targets(target_ids, block_mask)
        counts, block_size = self._checked_counts(counts, target_ids), _checks.checked_size("block_size", block_size)
        if prefix is not None:
            block_mask, prefix = self._checked_prefix(prefix, block_mask, block_size)
        return DraftCall(
            weighting, self._returns_rows(), rows, target_ids, block_mask, block_size, counts, prefix=prefix
        )

    def _decay_weights(self, T: int, block_size: int | None, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """Compute the decay of T predicted positions ``[T]``, for external callers."""
        return self._checked_weighting().decay(T, block_size, device, dtype)

    @staticmethod
    def _draft_acc_per_pos(correct: Tensor, block_mask: Tensor, block_size: int | None) -> PerOffset:
        """Count correct and valid rows per offset of blocks of ``block_size - 1`` rows, for external callers."""
        return counts_per_offset(correct, block_mask, None if block_size is None else block_size - 1)

    def _reduce(
        self, token_nll: Tensor, block_mask: Tensor, num_tokens: Count, block_size: int | None,
        draft_correct_per_pos: Tensor | None = None, draft_count_per_pos: Tensor | None = None, *,
        num_blocks: Count = None, num_sequences: Count = None,
    ) -> DLLMLossOutput:  # fmt: skip
        """Weight, mask, sum and normalize a per-token NLL ``[B, T]`` that was computed elsewhere.

        This method and ``_chunk_nll`` exist for external callers. :meth:`forward` and :meth:`forward_fused` pass the
        weights to one op instead, so overriding either method does not change them.
        """
        _checks.check_float("token_nll", token_nll)
        _checks.check_ndim("token_nll", token_nll, 2, "[B, T]")
        _checks.check_mask("block_mask", block_mask, token_nll.shape, "that of token_nll")
        token_nll = token_nll.to(accum_dtype(token_nll.dtype))
        mask = block_mask.to(token_nll.dtype)
        weighting, counts = self._checked_weighting(), Counts(num_tokens, num_blocks, num_sequences)
        weights = weighting.row_weights(mask, block_size, torch.exp(-token_nll.detach()), None)
        out = single_loss(sum_of_rows(token_nll, weighting.normalized(weights, mask, block_size, counts)), weights)
        return replaced(out, draft_correct_per_pos=draft_correct_per_pos, draft_count_per_pos=draft_count_per_pos)

    @staticmethod
    def _chunk_nll(
        hidden_chunk: Tensor, lm_head_weight: Tensor, lm_head_bias: Tensor | None, target_chunk: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return NLL and argmax match ``[chunk]`` of rows ``[chunk, D]``; the NLL is differentiable per row."""
        names = _checks.Names("logits", "target_chunk", "lm_head_weight", "lm_head_bias", "hidden_chunk")
        logits = LinearLogits(hidden_chunk, lm_head_weight, lm_head_bias)
        rows = token_nll_unchecked(checked(names, logits, target_chunk, Options(with_correct=True)))
        assert rows.correct is not None
        return rows.nll, rows.correct


def _in_blocks_of(target_ids: Tensor, out: DLLMLossOutput) -> DLLMLossOutput:
    """Return the output with its results per row in the shape of targets ``[B, blocks, k]``; unchanged for others."""
    if target_ids.dim() != 3:
        return out
    per_row = {name: getattr(out, name) for name in ("draft_correct", "row_losses", "row_weights")}
    return replaced(out, **{name: t.reshape(target_ids.shape) for name, t in per_row.items() if t is not None})
