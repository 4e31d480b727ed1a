r"""Generation with a masked diffusion language model: MASK tokens, decoded over a number of steps, without logits.

The new tokens of a row begin as MASK. They form blocks, decoded from left to right. In each step the model predicts all
masked tokens of the current block from both sides, and the step keeps some of the predictions. The others stay masked
(remasking).

    predict   y_i ~ p(y_i | prompt, decoded tokens, MASK)             for every masked token i of the block
    keep      the n_s tokens with the largest score: the confidence c_i = log p(y_i | ...), or a random number

A block of n tokens with s steps keeps floor(n / s) tokens per step, and one more in the first n mod s steps. The step
runs inside the LM head (:func:`dllm_kernels.linear_sample`): the head projects only the masked tokens of the block, one
chunk at a time, and ``[B, L, V]`` logits never exist.

**Random bits.** Each row has a seed. Child s + 1 of it (``dllm_kernels._random._philox``) is the seed of the tokens of
step s, whose rows are numbered from the first token of the block. The position draws of child 0, one per new token, are
the scores of random remasking. ``seeds`` are the seeds of the rows. With a generator, one seed per call is drawn from
it, and its child seed b is the seed of row b.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dllm_kernels import ops
from dllm_kernels._random import _philox, _seeds
from dllm_kernels._utils import _checks
from dllm_kernels._utils._dtypes import accum_dtype, dtype_of_logits, in_dtype_of
from dllm_kernels._utils._plain import readable_without_sync
from dllm_kernels._utils._target_range import first_true
from dllm_kernels.corruption import checked_mask_id
from dllm_kernels.distributed import calls
from dllm_kernels.fused import _lora
from dllm_kernels.fused._in_head import HeadOutput, head_of, running_in_head

__all__ = ["DiffusionGeneration", "diffusion_generate"]

REMASKING = "confidence", "random"


class DiffusionGeneration(NamedTuple):
    """Return type of :func:`diffusion_generate`: P tokens of the prompt, then N new tokens in each row.

    ``policy_views(out.ids, out.generated, mask_token_id, "trace", step_map=out.step_map)`` are the views of the
    decoding.

    Attributes:
        ids: int64 ``[B, P + N]``, the prompt and the new tokens; the padding token after the first EOS.
        generated: bool ``[B, P + N]``, True for the new tokens up to and including the first EOS.
        log_probs: float32 ``[B, P + N]`` (float64 for a float64 model), in nats: the log-probability of each generated
            token at the step that decoded it, in the distribution from which it was drawn; 0 elsewhere.
        step_map: int64 ``[B, P + N]``, the step that decoded each generated token, from 0; -1 elsewhere.
    """

    ids: Tensor
    generated: Tensor
    log_probs: Tensor
    step_map: Tensor


class Step(NamedTuple):
    """Denoising step: decodes ``decoded`` of the ``masked`` tokens in columns [start, stop) of the new tokens."""

    start: int
    stop: int
    masked: int
    decoded: int


def schedule(length: int, block_size: int, steps: int) -> list[Step]:
    """Split the steps evenly over the blocks, and the tokens of a block over its steps, more tokens in earlier steps.

    Raises:
        ValueError: there are fewer steps than blocks, or more than tokens.
    """
    starts = range(0, length, block_size)
    if not len(starts) <= steps <= length:
        raise ValueError(
            f"steps must lie between the number of blocks and that of tokens, {len(starts)} and {length}, got {steps}"
        )
    plan = []
    for i, start in enumerate(starts):
        masked = min(block_size, length - start)
        n = min(steps * (i + 1) // len(starts) - steps * i // len(starts), masked)
        for left in range(n, 0, -1):
            plan.append(Step(start, min(start + block_size, length), masked, -(-masked // left)))
            masked -= plan[-1].decoded
    return plan


def diffusion_generate(
    model: nn.Module,
    prompt_ids: Tensor,
    *,
    mask_token_id: int,
    max_new_tokens: int,
    steps: int,
    block_size: int | None = None,
    remasking: str = "confidence",
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    attention_mask: Tensor | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    shift: bool = False,
    seeds: Tensor | None = None,
    generator: torch.Generator | None = None,
    head: nn.Module | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    logits_dtype: torch.dtype | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> DiffusionGeneration:
    """Continue prompts with a masked diffusion language model, without a tensor of logits.

    The model is called as ``model(ids)``, or ``model(ids, attention_mask=...)`` if a mask is given, in evaluation mode
    and without gradients, on a copy of ids and mask. Afterwards every submodule is in its earlier mode. While it runs,
    the model cannot be used otherwise, also not in another thread. The model must return the output of its LM
    head unchanged: a tensor, an object or a mapping with ``logits``, or a tuple that begins with it.
    A cast of it changes no result.

    The number of steps of a block is ``steps // number of blocks`` if it divides; otherwise the steps are split evenly.
    Except that MASK is never sampled, the most likely tokens (``temperature=0``) are those of LLaDA's sampler.

    **Confidence.** The score of a token is its log-probability at temperature 1, without truncation, as in LLaDA's
    sampler. At another temperature, and with a truncation, it takes a second matrix product of the masked tokens; the
    returned ``log_probs`` are those of the distribution of the samples. The lowest position wins a tie.

    **Seeds.** With ``seeds``, row b depends only on ``seeds[b]``, its prompt and the options, in any batch, with any
    left padding, to the extent that the hidden states of the model do not depend on batch and padding. Equal hidden
    states give equal tokens on CPU and GPU.

    **EOS.** A row ends after its first EOS token. It is no longer projected after the block that holds it, and the
    generation stops after the block in which the last row ends.

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
        prompt_ids: ``[B, P]``, integers; P may be 0. MASK tokens in it are not decoded.
        mask_token_id: id of the MASK token; never sampled.
        max_new_tokens: N, the number of new tokens per row.
        steps: denoising steps, from the number of blocks to N.
        block_size: tokens per block; the last block may be shorter. None: one block.
        remasking: "confidence" keeps the most likely predictions of a step, "random" a random subset.
        temperature: T >= 0 of the samples; 0 selects the most likely token.
        top_k: as in :func:`linear_sample`.
        top_p: as in :func:`linear_sample`.
        min_p: as in :func:`linear_sample`.
        attention_mask: ``[B, P]``, bool or numeric, 0 for left padding. The model receives it with N ones behind it, in
            the same dtype. None: the model receives no mask.
        eos_token_id: id, or several ids, of the tokens that end a row; None: every row has N tokens.
        pad_token_id: id behind the first EOS; None: the (first) EOS token.
        shift: True for a model whose row i predicts token i + 1 (Dream, DiffuCoder). Every prompt must have a token.
        seeds: int64 ``[B]``, one seed per row. Not read if nothing is drawn.
        generator: source of one seed per call, if ``seeds`` is None; None: the default generator of the device.
        head: the LM head; None: ``model.get_output_embeddings()``, otherwise a module named ``lm_head``. An
            ``nn.Linear``, or LoRA or a trained copy of one (PEFT, NeMo AutoModel).
        model_kwargs: further keyword arguments of each call of the model, such as ``position_ids [B, P + N]``.
        logits_dtype: torch.float32 keeps the logits of float16 and bfloat16 operands in float32; None: the dtype of the
            operands.
        chunk_size: {chunk_size}
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`DiffusionGeneration`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not match, a value is out of range, both ``seeds`` and ``generator``
            are given, or a prompt is padded on the right or (with ``shift``) empty, which is checked on a CPU only.
            Also if the model has no LM head, the head does more than a linear layer, or the model changes the output of
            its head by an operation other than a cast, a copy or a view of the same shape.

    Source: LLaDA, Nie et al. 2025, arXiv:2502.09992, algorithm 4 (random remasking) and 5 (low-confidence remasking),
    semi-autoregressive over blocks as in section 2.4; the tokens per step as in its ``get_num_transfer_tokens``.
    """
    found = head_of(model, head)
    _lora.check_head(found, _HeadTokens.advice)
    _checks.check_ids("prompt_ids", prompt_ids)
    _checks.check_whole_tensor("prompt_ids", prompt_ids)
    _checks.check_ndim("prompt_ids", prompt_ids, 2, "[B, P]")
    prompt, device = prompt_ids.long(), prompt_ids.device
    _checks.check_positive_int("max_new_tokens", max_new_tokens)
    _checks.check_positive_int("steps", steps)
    if block_size is not None:
        _checks.check_positive_int("block_size", block_size)
    plan = schedule(max_new_tokens, block_size or max_new_tokens, steps)
    _checks.check_choice("remasking", remasking, REMASKING)
    _checks.check_flags(shift=shift)
    sampling = _Sampling(
        {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p},
        {"skip_id": checked_mask_id(mask_token_id, prompt), "chunk_size": chunk_size, "backend": backend},
        logits_dtype,
        random=remasking == "random",
    )
    base = _lora.split(found).base
    sampling.check(base.out_features, device)
    inputs = _model_inputs(prompt, attention_mask, max_new_tokens, model_kwargs, shift)
    eos = _checked_eos(eos_token_id)
    if pad_token_id is not None:
        _checks.check_int("pad_token_id", pad_token_id, 0)
    _seeds.check_sources(generator, seeds, (len(prompt),), device)
    of_steps = None
    if sampling.draws:
        call = _seeds.resolve_seed(device, len(prompt), generator, seeds)
        of_rows = _philox.child_seeds(call.view(1), len(prompt))[0] if seeds is None else call
        of_steps = _philox.child_seeds(of_rows, len(plan) + 1)
    tokens = _Tokens(prompt, max_new_tokens, sampling, of_steps, shift, accum_dtype(base.weight.dtype))
    groups = calls.groups_of(model)

    def call_model() -> (
        Any
    ):  # copies, because a model may modify its inputs, or keep them and compare later ones to them
        own = {} if attention_mask is None else {"attention_mask": inputs["attention_mask"].clone()}
        return model(tokens.ids.clone(), **{**inputs, **own})

    with torch.no_grad(), running_in_head(found, _HeadTokens) as run, _evaluating(model):
        for i, step in enumerate(plan):
            tokens.decode(i, step, lambda rows: run(call_model, rows)[0])
            if eos and step.decoded == step.masked:
                tokens.end_rows(step, eos)
                if not calls.on_any_rank(tokens.any_left, groups, device):
                    break
    return tokens.result(eos, eos[0] if eos and pad_token_id is None else pad_token_id)


class _HeadTokens(HeadOutput):
    """Tokens, their log-probabilities and confidences ``[B, W, 3]`` that the LM head returned in place of logits."""

    advice = "diffusion_generate needs such a head"


class _Sampling(NamedTuple):
    """Options of the samples.

    Attributes:
        samples: temperature and truncation.
        of_head: options of every op on the masked tokens.
        logits_dtype: as in :func:`diffusion_generate`.
        random: True for random remasking, which needs no confidences.
    """

    samples: dict[str, Any]
    of_head: dict[str, Any]
    logits_dtype: torch.dtype | None
    random: bool

    @property
    def draws(self) -> bool:
        """True if random bits are drawn."""
        return self.random or self.samples["temperature"] != 0

    def check(self, V: int, device: torch.device) -> None:
        """Validate the options for a head of V columns, by a sample of no rows."""
        if self.of_head["skip_id"] >= V:
            raise ValueError(f"mask_token_id must lie in [0, {V}), got {self.of_head['skip_id']}")
        _checks.check_wide_logits(self.logits_dtype)
        hidden, head = (torch.empty(n, 1, dtype=torch.float32, device=device) for n in (0, V))
        seed = torch.zeros((), dtype=torch.int64, device=device)
        ops.linear_sample(hidden, head, seeds=seed, **self.samples, **self.of_head)

    def sampled(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, extra: _checks.Extra | None, *,
        seeds: Tensor | None, **rows: Any,
    ) -> Tensor:  # fmt: skip
        """Sample tokens from hidden states ``[B, W, D]``; ``rows`` are options of the ops that name the masked ones.

        Returns ids, log-probabilities and confidences ``[B, W, 3]``, float64, which represents every id exactly.
        """
        weight = in_dtype_of(hidden, weight)
        options: dict[str, Any] = {
            **self.of_head, **rows, "bias": in_dtype_of(hidden, bias), "extra": extra,
            "logits_dtype": dtype_of_logits(hidden, self.logits_dtype),
        }  # fmt: skip
        out = ops.linear_sample(hidden, weight, seeds=seeds, **self.samples, **options)
        confidence, (temperature, *truncation) = out.log_probs, self.samples.values()
        if not self.random and (temperature not in (0, 1) or any(t is not None for t in truncation)):
            confidence = ops.token_log_probs(hidden, out.ids, weight=weight, **options).log_probs
        return torch.stack([t.double() for t in (out.ids, out.log_probs, confidence)], -1)


class _Tokens:
    """Tokens of a batch during their decoding.

    ``seeds``: int64 ``[B, 1 + steps]``, the seeds of random remasking and of each step; None if nothing is drawn.
    ``dtype``: that of the log-probabilities.
    """

    def __init__(
        self, prompt: Tensor, length: int, sampling: _Sampling, seeds: Tensor | None, shift: bool, dtype: torch.dtype
    ) -> None:
        new = prompt.new_full((len(prompt), length), sampling.of_head["skip_id"])
        self.ids, self.prompt, self.shift = torch.cat([prompt, new], 1), prompt, shift
        self.sampling, self.seeds = sampling, seeds
        self.steps = torch.full_like(new, -1)
        self.log_probs = torch.zeros(new.shape, dtype=dtype, device=new.device)
        self.unfinished = torch.ones(len(new), 1, dtype=torch.bool, device=new.device)
        self.any_left, self.order = True, None
        if sampling.random and seeds is not None:
            draws = _philox.random_bits(seeds[:, 0].contiguous(), len(new), _philox.Layout(0, length))[1]
            self.order = draws.double()

    def decode(self, i: int, step: Step, predict: Callable[[Callable[..., Tensor]], Tensor]) -> None:
        """Run step i: sample the masked tokens of the block, and keep those with the largest scores."""
        block, P = slice(step.start, step.stop), self.prompt.shape[1]
        masked = (self.steps[:, block] < 0) & self.unfinished
        columns = torch.arange(step.start, step.stop, device=masked.device) + (P - self.shift)
        seeds = None if self.seeds is None else self.seeds[:, i + 1]
        rows: dict[str, Any] = {"seeds": seeds, "active": masked, "num_active": len(masked) * step.masked}

        def of_block(hidden: Tensor, weight: Tensor, bias: Tensor | None, extra: _checks.Extra | None = None) -> Tensor:
            if hidden.shape[:-1] != self.ids.shape:
                raise ValueError(
                    f"the LM head must receive hidden states of shape {(*self.ids.shape, 'D')}, one row per token, got "
                    f"{tuple(hidden.shape)}; {_HeadTokens.advice}"
                )
            if extra is not None:
                extra = extra[0].index_select(1, columns), extra[1]
            return self.sampling.sampled(hidden.index_select(1, columns), weight, bias, extra, **rows)

        new, log_probs, confidence = predict(of_block).unbind(-1)
        scores = confidence if self.order is None else self.order[:, block]
        ranked = scores.masked_fill(~masked, -torch.inf).sort(dim=-1, descending=True, stable=True)
        kept = torch.zeros_like(masked).scatter_(1, ranked.indices[:, : step.decoded], True) & masked
        of_ids = slice(P + step.start, P + step.stop)
        self.ids[:, of_ids] = torch.where(kept, new.long(), self.ids[:, of_ids])
        self.log_probs[:, block] = torch.where(kept, log_probs.to(self.log_probs.dtype), self.log_probs[:, block])
        self.steps[:, block] = self.steps[:, block].masked_fill(kept, i)

    def end_rows(self, step: Step, eos: list[int]) -> None:
        """End the rows with an EOS in the block of the step. Causes a host sync."""
        P = self.prompt.shape[1]
        in_block = _is_one_of(self.ids[:, P + step.start : P + step.stop], eos)
        self.unfinished &= ~in_block.any(1, keepdim=True)
        self.any_left = bool(self.unfinished.any())

    def result(self, eos: list[int], pad: int | None) -> DiffusionGeneration:
        """Drop the tokens behind the first EOS of each row."""
        P, new, steps, log_probs = self.prompt.shape[1], self.ids[:, self.prompt.shape[1] :], self.steps, self.log_probs
        generated = steps >= 0
        if eos and pad is not None:
            ends = _is_one_of(new, eos) & generated
            generated = generated & (ends.cumsum(1) - ends.long() == 0)
            new, steps = torch.where(generated, new, pad), torch.where(generated, steps, -1)
            log_probs = torch.where(generated, log_probs, 0.0)
        return DiffusionGeneration(
            torch.cat([self.prompt, new], 1), F.pad(generated, (P, 0), value=False), F.pad(log_probs, (P, 0)),
            F.pad(steps, (P, 0), value=-1),
        )  # fmt: skip


def _is_one_of(ids: Tensor, tokens: list[int]) -> Tensor:
    return torch.stack([ids == token for token in tokens]).any(0)


def _checked_eos(eos_token_id: Any) -> list[int]:
    """Return the ids of the EOS tokens as a list."""
    several = isinstance(eos_token_id, Sequence) and not isinstance(eos_token_id, str)
    tokens = list(eos_token_id) if several else [] if eos_token_id is None else [eos_token_id]
    for token in tokens:
        _checks.check_int("eos_token_id", token, 0)
    return [int(token) for token in tokens]


def _model_inputs(
    prompt: Tensor, attention_mask: Any, length: int, model_kwargs: Mapping[str, Any] | None, shift: bool
) -> dict[str, Any]:
    """Return the keyword arguments of the model: the attention mask over all tokens, if any, and ``model_kwargs``."""
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
        ones = attention_mask.new_ones(len(prompt), length)
        inputs["attention_mask"] = torch.cat([attention_mask, ones], 1)
    if readable_without_sync(on):
        there = on.any(1)
        last = on[:, -1] if on.shape[1] else there
        if (at := first_true(there & ~last)) is not None:
            raise ValueError(
                f"attention_mask must be 1 in the last column of a prompt, got 0 in row {at[0]}; pad on the left"
            )
        if shift and (at := first_true(~there)) is not None:
            raise ValueError(f"prompt_ids must have a token in every row for shift=True, got none in row {at[0]}")
    return inputs


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
