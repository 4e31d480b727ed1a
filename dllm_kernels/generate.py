r"""Generation with a masked diffusion language model: MASK tokens, decoded over a number of steps, without logits.

The new tokens of a row begin as MASK. They form blocks, decoded from left to right. In each step the model predicts all
masked tokens of the current block from both sides, and the step keeps some of the predictions. The others stay masked
(remasking).

    predict   y_i ~ p(y_i | prompt, decoded tokens, MASK)             for every masked token i of the block
    keep      the n_s tokens with the largest score: the confidence log p(y_i | ...), another statistic of the
              prediction, or a random number

A block of n tokens with s steps keeps floor(n / s) tokens per step, and one more in the first n mod s steps. The step
runs inside the LM head (:func:`dllm_kernels.linear_sample`): the head projects only the masked tokens of the block, one
chunk at a time, and ``[B, L, V]`` logits never exist.

**Random bits.** Each row has a seed, and counts the steps in which it has a masked token in the block. Child s + 1 of
the seed (``dllm_kernels.corruption._philox``) is the seed of its step s. The tokens of the step are rows under this
seed, numbered from the first token of the block. Its position draws, numbered in the same way, are the uniforms of
Gumbel noise of the positions (``position_temperature``). The position draws of child 0, one per new token, are the
scores of random remasking. ``seeds`` are the seeds of the rows. With a generator, one seed per call is drawn from it,
and its child seed b is the seed of row b.

With ``infill``, the first block and the draws of child 0 begin at the first token of the row that is not padding. Rows
with different padding share columns, so token j of the first block has its own seed, child j of the seed of the step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dllm_kernels import _checks, ops
from dllm_kernels._checks._target_range import first_true
from dllm_kernels._graph._named import replaced
from dllm_kernels._graph._plain import has_values, is_dtensor, readable_without_sync
from dllm_kernels.corruption import _gumbel, _philox, _rules, _seeds, _topk, checked_mask_id
from dllm_kernels.distributed import calls
from dllm_kernels.head import _lora
from dllm_kernels.head._in_head import HeadFunction, HeadOutput, head_of, running_in_head
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._logits import LinearLogits, cast_head, map_rows

__all__ = ["DiffusionGeneration", "diffusion_generate"]

REMASKING = "confidence", "margin", "entropy", "random"
PROBABILITY_SCORES = "confidence", "margin"  # whose scores are compared with a threshold
Predict = Callable[[HeadFunction], Tensor]  # returns what a function of the logits computes in a call of the model


class DiffusionGeneration(NamedTuple):
    """Return type of :func:`diffusion_generate`: P tokens of the prompt, then N new tokens in each row.

    ``policy_views(out.ids, out.generated, mask_token_id, "trace", step_map=out.step_map)`` are the views of the
    decoding.

    Attributes:
        ids: int64 ``[B, P + N]``, the prompt and the new tokens; the padding token after the first EOS.
        generated: bool ``[B, P + N]``, True for the decoded tokens: the new ones up to and including the first EOS, and
            with ``infill`` those of the prompt.
        log_probs: float32 ``[B, P + N]`` (float64 for a float64 model), in nats: the log-probability of each generated
            token at the step that decoded it, in the distribution from which it was drawn; 0 elsewhere.
        step_map: int64 ``[B, P + N]``, the step of the row that decoded each generated token, from 0; -1 elsewhere.
            Steps in which the row has no masked token in the block are not counted.
    """

    ids: Tensor
    generated: Tensor
    log_probs: Tensor
    step_map: Tensor


class Block(NamedTuple):
    """Block of the new tokens [start, stop), and its number of steps; None: until all of its tokens are decoded."""

    start: int
    stop: int
    steps: int | None


def schedule(length: int, block_size: int, steps: int | None, *, infill: bool = False) -> list[Block]:
    """Split the steps over the blocks in proportion to their new tokens.

    The plan does not depend on the prompts, which differ between ranks. With ``infill``, steps beyond one per new token
    belong to the first block.

    Raises:
        ValueError: there are fewer steps than blocks or, without ``infill``, more than tokens.
    """
    spans = [(start, min(start + block_size, length)) for start in range(0, length, block_size) or range(1)]
    if steps is None:
        return [Block(*span, None) for span in spans]
    if infill and steps < len(spans):
        raise ValueError(f"steps must be at least {len(spans)}, the number of blocks, got {steps}")
    if not (infill or len(spans) <= steps <= length):
        raise ValueError(
            f"steps must lie between the number of blocks and that of tokens, {len(spans)} and {length}, got {steps}"
        )
    shared, whole = min(steps, length), max(length, 1)
    per_block = [shared * stop // whole - shared * start // whole for start, stop in spans]
    per_block[0] += steps - shared
    return [Block(*span, n) for span, n in zip(spans, per_block, strict=True)]


def diffusion_generate(
    model: nn.Module, prompt_ids: Tensor, *, mask_token_id: int, max_new_tokens: int, steps: int | None = None,
    block_size: int | None = None, remasking: str = "confidence", position_temperature: float = 0.0,
    threshold: float | None = None, temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None,
    min_p: float | None = None, cfg_scale: float = 0.0, suppress_ids: int | Collection[int] | Tensor | None = None,
    attention_mask: Tensor | None = None, eos_token_id: int | Collection[int] | Tensor | None = None,
    delay_eos: bool = False, pad_token_id: int | None = None, infill: bool = False, shift: bool = False,
    seeds: Tensor | None = None, generator: torch.Generator | None = None, head: nn.Module | None = None,
    model_kwargs: Mapping[str, Any] | None = None, logits_dtype: torch.dtype | None = None,
    chunk_size: int | None = None, backend: str = "auto",
) -> DiffusionGeneration:  # fmt: skip
    """Continue prompts with a masked diffusion language model, without a tensor of logits.

    The model is called as ``model(ids)``, or ``model(ids, attention_mask=...)`` if a mask is given, in evaluation mode
    and without gradients, on a copy of ids and mask. Afterwards every submodule is in its earlier mode. During the
    call, the model cannot be used elsewhere, not even in another thread. The model must return the output of its LM
    head unchanged: a tensor, an object or a mapping with ``logits``, or a tuple that begins with it. A cast of it
    changes no result.

    **Steps.** Blocks have steps in proportion to their tokens, so that ``steps=N`` is one token per step. A step of a
    block with M masked tokens in the row and s steps left decodes the ceil(M / s) tokens with the largest score. The
    lowest position wins a tie. Except that MASK is never sampled, the most likely tokens (``temperature=0``) are those
    of LLaDA's sampler.

    **Scores** are statistics of the prediction at temperature 1, without truncation, as in LLaDA's sampler. At another
    temperature, and with a truncation, they take a second matrix product of the masked tokens; the returned
    ``log_probs`` are those of the distribution of the samples.

    **Guidance.** With ``cfg_scale=w``, the logits are (1 + w) z - w z_u, where z_u are those of the row with MASK in
    place of the prompt. The model is called once per step, on both versions of the rows, ``[2B, P + N]``. Because the
    head is linear, the hidden states are combined, and the head projects as many rows as without guidance.

    **Seeds.** With ``seeds``, row b depends only on ``seeds[b]``, its prompt and the options, in any batch, with any
    left padding, to the extent that the hidden states of the model do not depend on batch and padding. Equal hidden
    states give equal tokens on CPU and GPU.

    **EOS.** A row ends after its first new EOS token. It is no longer projected after the block that holds it, and the
    generation stops after the block in which the last row ends. If the forward of the model communicates (FSDP2, tensor
    parallelism, buffers of DDP), this is the last row of all ranks, so that all ranks call the model the same number of
    times.

    Examples:
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.body = torch.nn.Embedding(10, 8)
        ...         self.lm_head = torch.nn.Linear(8, 10)
        ...
        ...     def forward(self, ids):
        ...         return self.lm_head(self.body(ids))
        >>> prompt = torch.tensor([[1, 2, 3]])
        >>> out = diffusion_generate(
        ...     Model(), prompt, mask_token_id=9, max_new_tokens=4, steps=4, block_size=2
        ... )
        >>> out.ids.shape, out.generated.tolist()
        (torch.Size([1, 7]), [[False, False, False, True, True, True, True]])
        >>> out.step_map.tolist()  # equal confidences: from left to right
        [[-1, -1, -1, 0, 1, 2, 3]]

    Args:
        model: masked diffusion LM, in DDP or not; with FSDP2 the head may be sharded.
        prompt_ids: ``[B, P]``, integers; P may be 0. MASK tokens in it are decoded with ``infill`` only.
        mask_token_id: id of the MASK token; never sampled.
        max_new_tokens: N, the number of new tokens per row; may be 0 with ``infill``.
        steps: denoising steps, from the number of blocks to N. With ``infill`` there may be more, for the first block.
            None, with ``threshold`` only: no bound.
        block_size: tokens per block; the last block may be shorter. None: one block.
        remasking: score of a predicted token. "confidence": its probability. "margin": the difference of the two
            largest probabilities. "entropy": minus the entropy of the prediction. "random": a random number.
        position_temperature: t > 0 draws the tokens of a step without replacement from softmax(score / t), by the seed
            of the row; 0 takes those with the largest score. Not with "random" or ``threshold``.
        threshold: q in [0, 1]. A step also decodes every token whose score, "confidence" or "margin", is at least q.
            A block ends when its tokens are decoded, so that ``steps`` is an upper bound. None: no threshold.
        temperature: T >= 0 of the samples; 0 selects the most likely token.
        top_k: as in :func:`linear_sample`.
        top_p: as in :func:`linear_sample`.
        min_p: as in :func:`linear_sample`.
        cfg_scale: w >= 0 of classifier-free guidance; 0: none.
        suppress_ids: id, or several ids, of tokens that are never sampled. Their probability is 0 in scores, too.
        attention_mask: ``[B, P]``, bool or numeric, 0 for left padding. The model receives it with N ones after it, in
            the same dtype. None: the model receives no mask.
        eos_token_id: id, or several ids (a list, set or tensor), of the tokens that end a row; None: every row has N
            tokens.
        delay_eos: True to rank predictions of an EOS after all others of the step; they never reach the threshold.
        pad_token_id: id after the first EOS; None: the (first) EOS token.
        infill: True to decode the MASK tokens of the prompt, with the first block. An EOS among them does not end the
            row.
        shift: True for a model whose row i predicts token i + 1 (Dream, DiffuCoder). Every prompt must have a token.
        seeds: int64 ``[B]``, one seed per row. Not read if nothing is drawn.
        generator: source of one seed per call, if ``seeds`` is None; None: the default generator of the device.
        head: the LM head; None: ``model.get_output_embeddings()``, otherwise a module named ``lm_head``. An
            ``nn.Linear``, or LoRA, a trained copy or trained rows of one (PEFT, NeMo AutoModel).
        model_kwargs: further keyword arguments of each call of the model, such as ``position_ids [B, P + N]``. With
            ``cfg_scale``, tensors whose first dimension is B are repeated for the other half of the rows.
        logits_dtype: torch.float32 keeps the logits of float16 and bfloat16 operands in float32; None: the dtype of the
            operands.
        chunk_size: rows per chunk of logits; None: chosen from the sizes and the memory of the device.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`DiffusionGeneration`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not match, a value is out of range, options exclude each other, or a
            prompt is padded on the right or (with ``shift``) empty, which is checked on a CPU only. Also if the model
            has no LM head, the head does more than a linear layer, or the model changes the output of its head by an
            operation other than a cast, a copy or a view of the same shape.

    Source: LLaDA, Nie et al. 2025, arXiv:2502.09992, algorithm 4 (random remasking) and 5 (low-confidence remasking),
    semi-autoregressive over blocks as in section 2.4; tokens per step, guidance and delayed EOS as in its ``generate``.
    Margin, entropy and ``position_temperature``: Dream, Ye et al. 2025, arXiv:2508.15487. ``threshold``: Fast-dLLM, Wu
    et al. 2025, arXiv:2505.22618, algorithm 1.
    """
    lm_head = head_of(model, head)
    _lora.check_head(lm_head, _HeadTokens.advice)
    _checks.check_ids("prompt_ids", prompt_ids)
    _checks.check_whole_tensor("prompt_ids", prompt_ids)
    _checks.check_ndim("prompt_ids", prompt_ids, 2, "[B, P]")
    prompt, (B, P), device = prompt_ids.long(), prompt_ids.shape, prompt_ids.device
    _checks.check_flags(delay_eos=delay_eos, infill=infill, shift=shift)
    max_new_tokens = _checks.checked_int("max_new_tokens", max_new_tokens, 0 if infill else 1, _checks.MOST_SIZE)
    if steps is None and threshold is None:
        raise ValueError("steps must be given unless threshold is, got None for both")
    if steps is not None:
        steps = _checks.checked_int("steps", steps, 1, _checks.MOST_SIZE)
    block_size = _checks.checked_size("block_size", block_size)
    plan = schedule(max_new_tokens, block_size or max(max_new_tokens, 1), steps, infill=bool(infill))
    mask, parts = checked_mask_id(mask_token_id, prompt), _lora.split(lm_head)
    V = parts.out_features
    eos = checked_tokens("eos_token_id", eos_token_id, V, mask)
    pad = checked_tokens("pad_token_id", pad_token_id, V, mask, several=False) or eos[:1]
    choice = Choice.of(remasking, position_temperature, threshold, eos if delay_eos else None)
    _checks.check_not_negative("cfg_scale", cfg_scale)
    sampling = _Sampling(
        {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p},
        {"skip_id": mask, "logits_dtype": _checks.checked_wide_logits(logits_dtype), "chunk_size": chunk_size},
        backend, remasking, float(cfg_scale), checked_tokens("suppress_ids", suppress_ids, V),
    )  # fmt: skip
    sampling.check(V, device)
    inputs, real = _model_inputs(prompt, attention_mask, max_new_tokens, model_kwargs, shift)
    _seeds.check_sources(generator, seeds, (B,), device)
    step_seeds = None
    if choice.draws or temperature != 0:
        call = _seeds.resolve_seed(device, B, generator, seeds)
        row_seeds = _philox.child_seeds(call.view(1), B)[0] if seeds is None else call
        step_seeds = _philox.child_seeds(row_seeds, 1 + min(steps or P + max_new_tokens, P + max_new_tokens))
    holes = (prompt == mask) & real if infill else None
    # No row of a shifted model predicts the first token.
    if holes is not None and shift and (at := first_true((holes & (real.cumsum(1) == 1)).any(1))) is not None:
        raise ValueError(f"prompt_ids must not begin with MASK for shift=True and infill=True, got it in row {at[0]}")
    rows = torch.cat([prompt, prompt.new_full((B, max_new_tokens), mask)], 1)
    tokens = _Tokens(rows, real, holes, (sampling, choice), step_seeds, shift, accum_dtype(parts.weight.dtype))
    groups = calls.groups_of(model)
    if cfg_scale:
        inputs = {name: _doubled(value, B) for name, value in inputs.items()}
    in_prompt = F.pad(prompt != mask, (0, max_new_tokens))

    def call_model() -> Any:
        ids = tokens.ids.clone()  # because a model may modify its inputs, or keep them and compare later ones to them
        if cfg_scale:
            ids = torch.cat([ids, ids.masked_fill(in_prompt, mask)])
        copies = {} if attention_mask is None else {"attention_mask": inputs["attention_mask"].clone()}
        return model(ids, **{**inputs, **copies})

    with torch.no_grad(), running_in_head(lm_head, _HeadTokens) as run, _evaluating(model):
        for block in plan:
            tokens.decode(block, lambda rows: run(call_model, rows)[0], groups)
            if eos:
                tokens.end_rows(block, eos)
                if not calls.on_any_rank(tokens.unfinished > 0, groups, device):
                    break
    return tokens.result(eos, pad)


class _HeadTokens(HeadOutput):
    """Tokens, their log-probabilities and scores ``[B, W, 3]`` that the LM head returned in place of logits."""

    advice = "diffusion_generate needs such a head"


class _Sampling(NamedTuple):
    """Options of the samples.

    Attributes:
        samples: temperature and truncation.
        logits_fields: fields of the record of the logits.
        backend: as in :func:`diffusion_generate`.
        remasking: as in :func:`diffusion_generate`.
        cfg_scale: as in :func:`diffusion_generate`.
        suppressed: ids that are never sampled.
    """

    samples: dict[str, Any]
    logits_fields: dict[str, Any]
    backend: str
    remasking: str
    cfg_scale: float
    suppressed: list[int]

    def check(self, V: int, device: torch.device) -> None:
        """Validate the options for a head of V columns, by a sample of no rows."""
        mask = self.logits_fields["skip_id"]
        _checks.check_column("mask_token_id", mask, V)
        if len({mask, *self.suppressed}) == V:
            raise ValueError(f"suppress_ids must leave a token to choose beside MASK, got all {V - 1} others")
        hidden, head = (torch.empty(n, 1, dtype=torch.float32, device=device) for n in (0, V))
        seed = torch.zeros((), dtype=torch.int64, device=device)
        logits = LinearLogits(hidden, head, **self.logits_fields)
        ops.linear_sample(logits, seeds=seed, backend=self.backend, **self.samples)

    @property
    def same_distribution(self) -> bool:
        """True if the distribution of the samples is also that of the scores."""
        temperature, top_k, top_p, min_p = self.samples.values()
        return temperature in (0, 1) and not top_k and top_p in (None, 1) and not min_p

    def sampled(self, logits: LinearLogits, seeds: Tensor | None, active: Tensor) -> Tensor:
        """Sample tokens from the logits of hidden states ``[B, W, D]``; ``active [B, W]`` marks the masked ones.

        With guidance, hidden states and the rows of ``extra`` are ``[2B, W, ...]``. Returns ids, log-probabilities and
        scores ``[B, W, 3]``, float64, which represents every id exactly.
        """
        logits = cast_head(replaced(map_rows(logits, self._guided), **self.logits_fields))
        logits = replaced(logits, bias=self._without_suppressed(logits.weight, logits.bias))
        options: dict[str, Any] = {"active": active, "backend": self.backend}
        first_two = 2 if self.remasking == "margin" else None
        out = ops.linear_sample(logits, seeds=seeds, return_top=first_two, **self.samples, **options)
        score, distribution = out.log_probs, out
        if self.remasking == "confidence" and not self.same_distribution:
            score = ops.token_log_probs(logits, out.ids, **options).log_probs
        elif self.remasking in ("margin", "entropy"):
            if not self.same_distribution:
                distribution = ops.linear_sample(logits, temperature=0, return_top=first_two, **options)
            score = -distribution.entropy
            if distribution.top_log_probs is not None:
                score = -distribution.top_log_probs.double().exp().diff(dim=-1)[..., 0]
        return torch.stack([t.double() for t in (out.ids, out.log_probs, score)], -1)

    def _guided(self, rows: Tensor) -> Tensor:
        """Combine the rows ``[2B, W, C]`` with and without the prompt to those of the guided logits ``[B, W, C]``."""
        if not self.cfg_scale:
            return rows
        conditional, unconditional = rows.to(accum_dtype(rows.dtype)).tensor_split(2)
        return (unconditional + (1 + self.cfg_scale) * (conditional - unconditional)).to(rows.dtype)

    def _without_suppressed(self, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return the bias of the head with -inf for suppressed tokens."""
        if not self.suppressed:
            return bias
        never = torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)
        for token in self.suppressed:  # a tensor of the ids would be a host sync
            never[token] = -torch.inf
        if is_dtensor(weight):
            from dllm_kernels.distributed._layout import split_like

            never = split_like(never, weight)
        return never if bias is None else bias + never


class Choice(NamedTuple):
    """Rule by which a step chooses tokens to decode among the masked ones.

    Attributes:
        remasking: as in :func:`diffusion_generate`.
        temperature: ``position_temperature``.
        threshold: as in :func:`diffusion_generate`.
        late: tokens that are ranked after all others.
    """

    remasking: str
    temperature: float
    threshold: float | None
    late: list[int]

    @classmethod
    def of(cls, remasking: Any, position_temperature: Any, threshold: Any, late: list[int] | None) -> Choice:
        """Validate the options; ``late`` is None unless EOS tokens are delayed."""
        _checks.check_choice("remasking", remasking, REMASKING)
        _checks.check_number("position_temperature", position_temperature)
        if position_temperature != 0:
            _checks.check_factor("position_temperature", position_temperature, "0, or positive")
        if position_temperature != 0 and remasking == "random":
            raise ValueError(f"position_temperature must be 0 for remasking='random', got {position_temperature}")
        if threshold is not None:
            _checks.check_probability("threshold", threshold, "a number or None")
            if remasking not in PROBABILITY_SCORES:
                raise ValueError(f"threshold must be None for remasking={remasking!r}, got {threshold}")
        if threshold is not None and position_temperature != 0:
            raise ValueError("threshold and position_temperature exclude each other: expected one of them, got both")
        if late is not None and not late:
            raise ValueError("eos_token_id must be given for delay_eos=True, got none")
        return cls(remasking, float(position_temperature), threshold, late or [])

    @property
    def draws(self) -> bool:
        """True if random bits decide on positions."""
        return self.remasking == "random" or self.temperature != 0

    def chosen(self, masked: Tensor, count: Tensor, new: Tensor, score: Tensor, draws: Tensor | None) -> Tensor:
        """Return the tokens to decode, bool ``[B, W]``.

        Args:
            masked: the tokens to choose from, bool ``[B, W]``.
            count: number of tokens to decode in each row ``[B]``, at most that of masked ones.
            new: the predicted tokens ``[B, W]``.
            score: their scores ``[B, W]``, float64; for "confidence" the logarithm.
            draws: random bits ``[B, W]`` of the positions, or None.
        """
        value = score.exp() if self.remasking == "confidence" else score
        if draws is not None:
            score = _gumbel.score(value / self.temperature, _rules.fine_uniform(draws))
        late = _is_one_of(new, self.late)
        ranked = score.masked_fill(late, torch.finfo(score.dtype).min).masked_fill(~masked, -torch.inf)
        decoded = _topk.k_largest(ranked, count)
        if self.threshold is not None:
            decoded |= (value >= self.threshold) & ~late
        return decoded & masked


class _Tokens:
    """Tokens of a batch during their decoding.

    Args:
        ids: ``[B, L]``, the prompt with MASK tokens behind it.
        real: ``[B, P]``, False for padding of the prompt.
        holes: ``[B, P]``, the tokens of the prompt to decode, or None.
        options: of the samples and of the choice of positions.
        seeds: int64 ``[B, 1 + steps]``, the seeds of random remasking and of each step; None if nothing is drawn.
        shift: as in :func:`diffusion_generate`.
        dtype: that of the log-probabilities.
    """

    def __init__(
        self, ids: Tensor, real: Tensor, holes: Tensor | None, options: tuple[_Sampling, Choice],
        seeds: Tensor | None, shift: bool, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        (B, L), self.P, device = ids.shape, real.shape[1], ids.device
        self.ids, self.seeds, self.shift, self.infills = ids, seeds, shift, holes is not None
        self.sampling, self.choice = options
        self.masked = F.pad(torch.zeros_like(real) if holes is None else holes, (0, L - self.P), value=True)
        self.step_map, self.log_probs = torch.full_like(ids, -1), torch.zeros(B, L, dtype=dtype, device=device)
        self.step = torch.zeros(B, dtype=torch.int64, device=device)
        self.ended, self.unfinished = torch.zeros(B, 1, dtype=torch.bool, device=device), B
        # The number of each column, from the first one of the row that is not padding; with infill only.
        self.number = (torch.arange(L, device=device) - (real.cumsum(1) == 0).sum(1, keepdim=True)).clamp(min=0)
        self.order: Tensor | None = None
        if self.choice.remasking == "random" and seeds is not None:
            draws = _position_draws(seeds[:, 0], L)
            self.order = (draws.gather(1, self.number) if self.infills else F.pad(draws, (self.P, 0))).double()

    def decode(self, block: Block, predict: Predict, groups: calls.Groups) -> None:
        """Decode a block; stop early if no rank has a masked token left, which only these options make possible."""
        at = slice(0 if self.infills and block.start == 0 else self.P + block.start, self.P + block.stop)
        per_row, counted = block.stop - block.start, self.choice.threshold is not None or at.start < self.P
        endless = itertools.repeat(self.ids.shape[1])  # more steps than a row has tokens: one token per step
        for left in endless if block.steps is None else range(block.steps, 0, -1):
            masked = self.masked[:, at]
            total = int(masked.sum()) if counted else self.unfinished * per_row  # a host sync if counted
            if counted and not calls.on_any_rank(total > 0, groups, masked.device):
                break
            self._step(at, masked, total, -(-masked.sum(1) // left), predict)
            per_row -= -(-per_row // left)

    def _step(self, at: slice, masked: Tensor, total: int, count: Tensor, predict: Predict) -> None:
        """Sample the masked tokens of some columns, at most ``total``, and decode ``count [B]`` of them."""
        columns = (torch.arange(at.start, at.stop, device=masked.device) - int(self.shift)).clamp(min=0)
        seeds, token_seeds, draws = None, None, None
        if self.seeds is not None:
            index = (self.step + 1).clamp(max=self.seeds.shape[1] - 1)  # a row that has ended may wait for other ranks
            seeds = token_seeds = self.seeds.gather(1, index[:, None])[:, 0]
            draws = _position_draws(seeds, len(columns)) if self.choice.temperature else None
            if at.start < self.P:
                token_seeds = _philox.child_seeds(seeds, len(columns)).gather(1, self.number[:, at])
                draws = None if draws is None else draws.gather(1, self.number[:, at])

        def sample_block(logits: LinearLogits) -> Tensor:
            B, L = self.ids.shape
            expected, shape = (2 * B if self.sampling.cfg_scale else B, L), logits.hidden.shape
            if shape[:-1] != expected:
                raise ValueError(
                    f"the LM head must receive hidden states of shape {(*expected, 'D')}, one row per token, got "
                    f"{tuple(shape)}; {_HeadTokens.advice}"
                )
            logits = map_rows(logits, lambda t: t.index_select(1, columns))
            return self.sampling.sampled(replaced(logits, num_active=total), token_seeds, masked)

        new, log_probs, score = predict(sample_block).unbind(-1)
        decoded = self.choice.chosen(masked, count, new, score if self.order is None else self.order[:, at], draws)
        self.ids[:, at] = torch.where(decoded, new.long(), self.ids[:, at])
        self.log_probs[:, at] = torch.where(decoded, log_probs.to(self.log_probs.dtype), self.log_probs[:, at])
        self.step_map[:, at] = torch.where(decoded, self.step[:, None], self.step_map[:, at])
        self.step += masked.any(1)
        self.masked[:, at] = masked & ~decoded

    def end_rows(self, block: Block, eos: list[int]) -> None:
        """End the rows with an EOS in the block, and count the others. Causes a host sync."""
        ended = _is_one_of(self.ids[:, self.P + block.start : self.P + block.stop], eos).any(1, keepdim=True)
        self.ended |= ended
        self.masked &= ~ended
        self.unfinished = int((~self.ended).sum())

    def result(self, eos: list[int], pad: list[int]) -> DiffusionGeneration:
        """Drop the tokens behind the first new EOS of each row."""
        ids, generated, steps, log_probs = self.ids, self.step_map >= 0, self.step_map, self.log_probs
        if eos:
            ends = _is_one_of(ids, eos) & (torch.arange(ids.shape[1], device=ids.device) >= self.P)
            behind = ends.cumsum(1) - ends.long() > 0
            generated = generated & ~behind
            ids, steps = ids.masked_fill(behind, pad[0]), steps.masked_fill(behind, -1)
            log_probs = log_probs.masked_fill(behind, 0.0)
        return DiffusionGeneration(ids, generated, log_probs, steps)


def _position_draws(seeds: Tensor, positions: int) -> Tensor:
    """Return the random bits of positions under the seeds of rows, int64 ``[B, positions]``."""
    return _philox.random_bits(seeds.contiguous(), len(seeds), _philox.Layout(0, positions))[1]


def _is_one_of(ids: Tensor, tokens: list[int]) -> Tensor:
    result = torch.zeros_like(ids, dtype=torch.bool)
    for token in tokens:
        result |= ids == token
    return result


def checked_tokens(
    name: str, value: Any, V: int | None = None, mask: int | None = None, *, several: bool = True
) -> list[int]:
    """Return one id, or ``several``, as a list; raise unless they lie in the vocabulary and differ from ``mask``."""
    if value is None:
        return []
    if several and isinstance(value, Tensor | np.ndarray):
        if isinstance(value, Tensor):
            _checks.check_tensor(name, value)
            if not has_values(value):
                raise ValueError(f"{name} must hold its values, got a tensor on {value.device}")
        value = value.reshape(-1).tolist()
    tokens = list(value) if several and isinstance(value, Collection) and not isinstance(value, str) else [value]
    tokens = [_checks.checked_int(name, token, 0) for token in tokens]
    for token in tokens:
        if V is not None and token >= V:
            raise ValueError(f"{name} must lie in [0, {V}), got {token}")
        if token == mask:
            raise ValueError(f"{name} must not be the MASK token, got {token}")
    return tokens


def _doubled(value: Any, B: int) -> Any:
    return torch.cat([value, value]) if isinstance(value, Tensor) and value.shape[:1] == (B,) else value


def _model_inputs(
    prompt: Tensor, attention_mask: Any, length: int, model_kwargs: Mapping[str, Any] | None, shift: bool
) -> tuple[dict[str, Any], Tensor]:
    """Return the keyword arguments of the model, and True for the tokens of the prompt that are not padding.

    The keyword arguments are the attention mask over all tokens, if any, and ``model_kwargs``.
    """
    if not isinstance(model_kwargs, Mapping | None):
        raise TypeError(f"model_kwargs must be a mapping or None, got {_checks.type_name(model_kwargs)}")
    inputs = dict(model_kwargs or {})
    on = torch.ones_like(prompt, dtype=torch.bool)
    if attention_mask is not None:
        if "attention_mask" in inputs:
            raise ValueError("attention_mask must be given once, got it in model_kwargs, too")
        _checks.check_mask("attention_mask", attention_mask, prompt.shape, "that of prompt_ids")
        _checks.check_same_device("prompt_ids", prompt, attention_mask=attention_mask)
        on = attention_mask != 0
        inputs["attention_mask"] = F.pad(attention_mask, (0, length), value=1)
    if readable_without_sync(on):
        nonempty = on.any(1)
        last = on[:, -1] if on.shape[1] else nonempty
        if (at := first_true(nonempty & ~last)) is not None:
            raise ValueError(
                f"attention_mask must be 1 in the last column of a prompt, got 0 in row {at[0]}; pad on the left"
            )
        if shift and (at := first_true(~nonempty)) is not None:
            raise ValueError(f"prompt_ids must have a token in every row for shift=True, got none in row {at[0]}")
    return inputs, on


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode within the context, then restore the mode of every module."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
