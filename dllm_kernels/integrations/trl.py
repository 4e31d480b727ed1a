"""Fused log-probabilities in an installed TRL, and diffusion policies in its trainers.

Example::

    from dllm_kernels.integrations import trl as fused

    print(fused.patch())                # GRPO, RLOO, AsyncGRPO, DPO, KTO, SFT: autoregressive models
    ...
    fused.unpatch()

:func:`patch` replaces the function by which TRL's trainers compute log-probabilities and entropies from hidden states.
TRL looks it up at each call, so trainers that were built earlier use the replacement too.

:class:`DiffusionPolicyMixin` trains a masked diffusion LM in TRL's own loop::

    class DiffusionGRPO(DiffusionPolicyMixin, GRPOTrainer):
        pass

    trainer = DiffusionGRPO(
        model=model,                                          # bidirectional, e.g. BertForMaskedLM
        ...,
        mask_token_id=mask_token_id,
        scheme="coupled",
        rollout_func=diffusion_rollout(mask_token_id, steps=32),
    )

The mixin replaces only the log-probabilities; TRL computes rewards, advantages, clipping, KL penalty and logging.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from dllm_kernels import _checks, ops
from dllm_kernels._graph import _plain
from dllm_kernels._graph._call_state import CallState
from dllm_kernels._graph._named import replaced
from dllm_kernels._graph._own_graph import own_graph
from dllm_kernels.corruption import checked_mask_id
from dllm_kernels.generate import Choice, checked_tokens, diffusion_generate, schedule
from dllm_kernels.head._in_head import HeadOutput, running_in_head
from dllm_kernels.head._module import head_module
from dllm_kernels.integrations._hosts import Host, PatchReport, check_before_host, origin
from dllm_kernels.losses._common import next_tokens, shift_left
from dllm_kernels.policy import policy_views
from dllm_kernels.rows._call import times_upstream
from dllm_kernels.rows._interface import IGNORE
from dllm_kernels.rows._logits import LinearLogits, cast_head

HOST = "trl"
HOME, NAME = "kernels", "ChunkedLogProbFunction"  # trl.trainer.utils holds it as _ChunkedLogProbFunction
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
FROM_LOGITS = "the mixin needs such a head; compute the log-probabilities of this model from its logits"
Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
# The constants of splitmix64 (Steele, Lea, Flood 2014), as int64.
GAMMA, MIX_1, MIX_2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_host = Host(HOST, {})


@_host.exclusive
def patch(*, logits_dtype: torch.dtype | None = None, strict: bool = False) -> PatchReport:
    """Replace the chunked log-probability function of the installed ``trl`` wherever TRL holds it.

    The values and gradients stay the same. If the LM head is frozen and no gradient arrives at the entropy, a step
    takes two matrix products instead of three. With a trainable head it takes four, as before; without gradients one.
    Unsupported calls use the original: ``log_sum_sq_probs``, ``mean_logits`` of soft-capped logits, a ``logit_scale``
    that is not positive, and heads partitioned by DeepSpeed ZeRO-3. A second call does nothing and returns the first
    report with ``already=True``. If the signature in TRL differs from the replacement, the function stays as it is; a
    warning and the report list the differences.

    Args:
        logits_dtype: torch.float32 keeps the logits of float16 and bfloat16 operands in float32, except in what the
            original computes; None: the dtype of the operands, as in TRL.
        strict: True to raise an error for a signature that differs.

    Returns:
        :class:`PatchReport`; print it.

    Raises:
        ImportError: ``trl`` is not installed, or its kernels cannot be imported.
        RuntimeError: with ``strict``, the signature in TRL differs from the replacement; the message lists every
            difference. Or TRL is patched already with another ``logits_dtype``.
        TypeError: ``logits_dtype`` is not a dtype, or ``strict`` is not a bool.
        ValueError: ``logits_dtype`` is neither torch.float32 nor None.
    """
    fields = {"logits_dtype": _checks.checked_wide_logits(logits_dtype)}
    strict = _checks.checked_bool("strict", strict)
    if (earlier := _host.earlier(strict, **fields)) is not None:
        return earlier
    module = _host.module(HOME)
    original = vars(module).get(NAME)
    replacement = ChunkedLogProbs(original, fields)
    if original is not None and not _host.owns(original):
        differences = [f"{module.__name__}.{NAME} is {origin(original)}, not the framework's own"]
    elif callable(forward := getattr(original, "forward", None)):
        differences = _host.differences(f"{NAME}.forward", functools.partial(forward, None), replacement.outputs)
    else:
        differences = [f"{module.__name__} has no {NAME}.forward"]
    pairs, problems = ([], {NAME: differences}) if differences else ([(original, replacement)], {})
    return _host.patch(importlib.metadata.version(HOST), pairs, problems, strict, fields)


@_host.exclusive
def unpatch() -> tuple[tuple[str, str], ...]:
    """Restore the original function wherever it was replaced, also in modules imported since.

    Returns:
        ``(module, place)`` of each restored place; empty if TRL was not patched.
    """
    return _host.unpatch()


class ChunkedLogProbs:
    """Replacement of TRL's ``ChunkedLogProbFunction``, with its ``apply``.

    Args:
        original: TRL's function, used for unsupported calls.
        logits_fields: fields of the records of the logits.
    """

    def __init__(self, original: Any, logits_fields: Mapping[str, Any]) -> None:
        self.original, self.logits_fields = original, logits_fields

    def apply(self, *args: Any, **kwargs: Any) -> Outputs:
        """Compute :meth:`outputs`, or call TRL's function if they are not supported."""
        outputs = self.outputs(*args, **kwargs)
        return self.original.apply(*args, **kwargs) if outputs is None else outputs

    def outputs(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk_size: int,
        final_logit_softcapping: float | None = None, logit_scale: float = 1.0, outputs: tuple[str, ...] = OUTPUTS,
    ) -> Outputs | None:  # fmt: skip
        r"""Compute log-probabilities and the requested ``outputs`` of ``cap(s z) / T`` with ``z = W h + b``.

        ``cap(s z) / T`` is a soft cap ``c / s`` of z, times ``s / T``. Without a cap, the mean of the logits is the
        product of the hidden states and the mean row of the head.

        Args:
            hidden: ``[N, H]``.
            weight: ``[V, H]``, cast to the dtype of ``hidden`` (or of autocast), as TRL does.
            bias: ``[V]`` or None.
            targets: ``[N]``. A target outside ``[0, V)`` is treated as a logit of 0, as in TRL. On a CPU it is the most
                likely token if no logit exceeds 0, as in TRL. On a GPU ``is_top1`` is False for it, because looking for
                such targets would be a host sync; TRL removes them before the call.
            temperature: T.
            chunk_size: vocabulary columns per chunk in TRL's function; not used otherwise.
            final_logit_softcapping: the cap c, or None.
            logit_scale: s.
            outputs: names among "entropy", "log_sum_sq_probs", "mean_logits" and "is_top1"; others are ignored.

        Returns:
            ``(log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1)``, each ``[N]``, None if not requested.
            Float32 (float64 for float64 ``hidden``), ``is_top1`` bool. The first two are differentiable. None if the
            call is not supported: see :func:`patch`.
        """
        scale = logit_scale / temperature if temperature else math.nan
        cap = final_logit_softcapping
        unknown = "log_sum_sq_probs" in outputs or ("mean_logits" in outputs and cap is not None)
        valid = 0 < scale < math.inf and temperature > 0 and (cap is None or 0 < cap < math.inf)
        if unknown or not valid or hasattr(weight, "ds_id"):
            return None
        outside = (targets < 0) | (targets >= weight.shape[0])
        softcap = None if cap is None else cap / logit_scale
        logits = LinearLogits(hidden, weight, bias, softcap=softcap, scale=scale, **self.logits_fields)
        requested = {"entropy": "entropy" in outputs, "with_correct": "is_top1" in outputs}
        log_probs, entropy, is_top1 = _log_probs(logits, targets.masked_fill(outside, IGNORE), outside, **requested)
        if is_top1 is not None and _plain.readable_without_sync(outside) and bool(outside.any()):
            is_top1 = is_top1 | _outside_is_top1(LinearLogits(hidden, weight, bias), targets, outside)
        mean = _mean_logits(hidden, weight, bias, scale) if "mean_logits" in outputs else None
        return log_probs, entropy, None, mean, is_top1


@torch.no_grad()
def _mean_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        mean = hidden.to(dtype) @ weight.mean(0, dtype=dtype)
    return (mean if bias is None else mean + bias.mean(dtype=dtype)) * scale


@torch.no_grad()
def _outside_is_top1(logits: LinearLogits, targets: Tensor, outside: Tensor) -> Tensor:
    """Return True for targets outside the vocabulary whose logit of 0 is the first maximum of the row.

    A negative target is before all columns, any other behind them. Cap and scale, which the record does not have, would
    keep the sign of the largest logit.
    """
    hidden, weight, bias = logits[:3]
    best = ops.linear_sample(cast_head(logits), temperature=0, active=outside).ids.clamp(min=0)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    largest = (hidden.to(dtype) * weight[best].to(dtype)).sum(-1)
    largest = largest if bias is None else largest + bias[best].to(dtype)
    return outside & ((largest < 0) | ((largest == 0) & (targets < 0)))


# Log-probabilities of rows --------------------------------------------------------------------------------------------


def _log_probs(
    logits: LinearLogits, targets: Tensor, outside: Tensor | None = None, *, entropy: bool = False, **options: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute log p of each target, the entropy, and the argmax match.

    With a frozen head, the forward pass computes the gradient of log p (2 products). Backward computes the gradient of
    the entropy only if the entropy receives an upstream gradient (2 more products).

    Args:
        logits: of hidden states ``[..., D]``. The head is cast to their dtype unless autocast is on.
        targets: ``[...]``, in ``[0, V)`` or -100.
        outside: ``[...]``, bool, True for targets that are treated as a logit of 0; or None.
        entropy: True to compute the entropy.
        options: other options of the ops, such as ``with_correct`` for the argmax match.
    """
    logits = cast_head(logits)
    trained = any(t is not None and t.requires_grad for t in logits.head)
    if torch.is_grad_enabled() and logits.hidden.requires_grad and not trained and not torch.compiler.is_compiling():
        return _FrozenHead.apply(logits.hidden, logits, targets, outside, entropy, options)  # type: ignore[no-untyped-call,no-any-return]
    out = ops.row_stats(logits, targets, entropy=entropy, **options)
    return _or_outside(out, outside), out.entropy, out.correct


def _or_outside(stats: Any, outside: Tensor | None = None) -> Tensor:
    """Return the log-probability of the target, or of a logit of 0 for targets outside the vocabulary."""
    log_probs: Tensor = stats.log_probs
    return log_probs if outside is None else torch.where(outside, -stats.lse, log_probs)


class _FrozenHead(torch.autograd.Function):
    """:func:`_log_probs` if only the hidden states require grad, so that each gradient row depends on one row only."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, logits: LinearLogits, targets: Tensor, outside: Tensor | None, entropy: bool,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.options, ctx.call_state = options, CallState.now(hidden)
        known = () if outside is None else (outside,)
        with own_graph(), torch.enable_grad():
            h = hidden.detach().requires_grad_()
            logits = replaced(logits, hidden=h)
            out = ops.row_objective(logits, targets, _or_outside, *known, entropy=entropy, **options)
            (grad,) = torch.autograd.grad(out.loss, h)
        ctx.save_for_backward(hidden, logits.weight, targets, outside, grad)
        ctx.logits = replaced(logits, hidden=None, weight=None)  # the saved tensors
        if out.correct is not None:
            ctx.mark_non_differentiable(out.correct)
        return out.value, out.entropy, out.correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _: Any) -> tuple[Any, ...]:
        hidden, weight, targets, outside, grad = ctx.saved_tensors
        if grad_entropy is None:
            grad_h = None if grad_log_probs is None else times_upstream(grad, grad_log_probs[..., None].to(grad.dtype))
        else:
            known = () if outside is None else (outside,)
            upstream = torch.zeros_like(grad_entropy) if grad_log_probs is None else grad_log_probs

            def both(stats: Any, a: Tensor, b: Tensor, *outside: Tensor) -> Tensor:
                return torch.addcmul(a * _or_outside(stats, *outside), b, stats.entropy)

            options = {**ctx.options, "with_correct": False, "entropy": True}
            with ctx.call_state.restored(hidden), own_graph(), torch.enable_grad():
                h = hidden.detach().requires_grad_()
                aux = upstream.contiguous(), grad_entropy.contiguous(), *known
                logits = replaced(ctx.logits, hidden=h, weight=weight)
                out = ops.row_objective(logits, targets, both, *aux, **options)
                (grad_h,) = torch.autograd.grad(out.loss, h)
        return grad_h, *(None,) * 5


# Diffusion policies ---------------------------------------------------------------------------------------------------


class _Stacked(torch.autograd.Function):
    """Stack the outputs of the head, whose model returns one tensor; a part without a gradient gets None, not zeros."""

    @staticmethod
    def forward(ctx: Any, arrived: list[bool], *parts: Tensor) -> Tensor:
        ctx.arrived = arrived
        return torch.stack(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(g if here else None for g, here in zip(grad.unbind(-1), ctx.arrived, strict=True))


class _Unstacked(torch.autograd.Function):
    """Take the outputs of the head apart; note for which of them a gradient arrives, which :class:`_Stacked` reads."""

    @staticmethod
    def forward(ctx: Any, arrived: list[bool], stacked: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.arrived, ctx.like = arrived, (stacked.shape[:-1], stacked.dtype, stacked.device)
        return tuple(t.clone() for t in stacked.unbind(-1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, Tensor]:
        ctx.arrived[:] = [g is not None for g in grads]
        shape, dtype, device = ctx.like
        zeros = torch.zeros(shape, dtype=dtype, device=device)
        return None, torch.stack([zeros if g is None else g for g in grads], -1)


class _HeadRows(HeadOutput):
    """Values per position ``[B, L, n]`` that the LM head returned in place of logits."""

    advice = FROM_LOGITS


class DiffusionPolicyMixin:
    r"""Log-probabilities of masked diffusion policies; put it before ``GRPOTrainer`` or ``RLOOTrainer``.

    A diffusion LM has no exact log-probability. The score of token i of a completion is a weighted sum over noisy
    views, ``sum_k w_ki log p(y_i | view k)`` (:func:`dllm_kernels.policy_views`), and takes the place of its
    log-probability in TRL's loss. MASK is never predicted, and the logits are divided by the ``temperature`` of the
    trainer, as in TRL. The LM head projects scored tokens only, and the full logits are never materialized.

    **Masks.** The seed of a row is a hash of its tokens and their positions, without padding, and of ``iteration``. By
    default this is the number of the generation (``_step // (steps_per_generation * num_iterations)``). Old, reference
    and current log-probabilities of a completion therefore use equal masks in every iteration, independent of TRL's
    shuffling and of padding. If the same completion is generated again later, its masks differ. Equal rows of one
    generation have equal masks.

    **Entropy.** The entropy of token i is the mean over the views that score it, weighted by ``w_ki``; 0 if no view
    scores it. If the entropy is only logged, a frozen head takes two matrix products, otherwise four. A trainable head
    takes four in both cases.

    Padding is never scored, and no token attends to it. Images are not supported. ``RLOOTrainer`` has no
    ``rollout_func`` argument; the mixin accepts it instead and calls it with the tokens of the prompts. The mixin does
    not test whether the model is bidirectional: a causal model predicts each token from the tokens before it only.

    Args:
        *args: arguments of the trainer.
        mask_token_id: id of the MASK token.
        scheme: "full", "coupled", "elbo", "count" or "quadrature".
        num: number of views (or pairs, or triples) to draw.
        prompt_prob: for "full", the probability of also masking each token of the prompt.
        iteration: whole number that is hashed with the tokens of each row, or a function of the trainer that returns
            it. It must not change while a generation is trained on. None: the number of the generation. An integer of
            NumPy and a 0-d integer tensor are accepted, too.
        logits_dtype: torch.float32 keeps the logits of float16 and bfloat16 operands in float32. TRL's
            ``cast_lm_head_to_fp32`` gives the same scores from products of float32 operands. None: the dtype of the
            operands.
        shift: True for a model whose row i predicts token i + 1 (Dream, DiffuCoder). Targets and masks are shifted, not
            the logits. The first token of a row is not predicted.
        **kwargs: keyword arguments of the trainer.

    Raises:
        TypeError: an argument of the mixin has the wrong type, or a derived class has the mixin behind the trainer
            among its bases.
        ValueError: an argument of the mixin is out of range, images are given, or the LM head is neither a plain
            ``nn.Linear`` nor PEFT's LoRA, trained copy or trained rows of one. Also if the model changes the output of
            its head by an operation other than a cast, a copy or a view of the same shape.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise TypeError if the mixin is behind the trainer among the bases, because it would then do nothing."""
        super().__init_subclass__(**kwargs)
        check_before_host(DiffusionPolicyMixin, cls, "_get_per_token_logps_and_entropies")

    accelerator: Any
    args: Any
    temperature: float
    num_iterations: int
    _step: int

    def __init__(
        self, *args: Any, mask_token_id: int, scheme: str = "full", num: int = 1, prompt_prob: float = 0.0,
        iteration: SupportsIndex | Callable[[Any], SupportsIndex] | None = None,
        logits_dtype: torch.dtype | None = None, shift: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        one = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
        options: dict[str, Any] = {"scheme": scheme, "num": num, "prompt_prob": prompt_prob}
        policy_views(one, one, mask_token_id, seeds=one[0], **options)  # validates the arguments
        mask, dtype = checked_mask_id(mask_token_id, one), _checks.checked_wide_logits(logits_dtype)
        if not (iteration is None or callable(iteration)):
            iteration = _whole(iteration, "an int, a function of the trainer or None")
        self._views: Callable[..., Any] = functools.partial(policy_views, mask_token_id=mask, **options)
        self._iteration, self._shift = iteration, _checks.checked_bool("shift", shift)
        self._logits_fields: dict[str, Any] = {"skip_id": mask, "logits_dtype": dtype}
        start: Any = super().__init__
        taken = "rollout_func" in inspect.signature(start).parameters
        self._rollout = None if taken else kwargs.pop("rollout_func", None)
        start(*args, **kwargs)

    def _generate_single_turn(self, prompt_ids: list[list[int]], *others: Any, **options: Any) -> Any:
        """Return completions of tokenized prompts; call ``rollout_func`` if the trainer itself does not accept it."""
        if self._rollout is not None:
            return self._rollout(prompt_ids, self)["completion_ids"]
        return super()._generate_single_turn(prompt_ids, *others, **options)  # type: ignore[misc]

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, batch_size: int | None = None,
        compute_entropy: bool = False, compute_aux_loss: bool = False, **others: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """Return scores and entropies ``[B, logits_to_keep]``, and the auxiliary loss of the model, if any."""
        if unsupported := sorted(name for name, value in others.items() if value is not None):
            raise ValueError(f"DiffusionPolicyMixin takes text only, got {', '.join(unsupported)}")
        seeds = row_seeds(input_ids, attention_mask, logits_to_keep, self._number_of_masks())
        parts, size = (input_ids, attention_mask, seeds), batch_size or len(input_ids)
        chunks = zip(*(torch.split(t, size) for t in parts), strict=True)
        options = logits_to_keep, compute_entropy, compute_aux_loss
        results = [self._scores_of(model, ids, mask, chunk_seeds, *options) for ids, mask, chunk_seeds in chunks]
        scores, entropies, auxiliary = zip(*results, strict=True)
        aux_loss = None if auxiliary[0] is None else torch.stack(auxiliary).mean()
        return torch.cat(scores), torch.cat(entropies) if compute_entropy else None, aux_loss

    def _number_of_masks(self) -> int:
        """Return the number that rows hash with their tokens; it stays the same while a generation is trained on."""
        iteration = self._iteration
        if iteration is None:
            generation: int = self._step // (self.args.steps_per_generation * self.num_iterations)
            return generation
        return _whole(iteration(self) if callable(iteration) else iteration, "a function that returns an int")

    def _scores_of(
        self, model: Any, ids: Tensor, attention_mask: Tensor, seeds: Tensor, keep: int, entropy: bool, auxiliary: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        supervised = attention_mask != 0
        supervised = supervised & (torch.arange(ids.shape[1], device=ids.device) >= ids.shape[1] - keep)
        if self._shift:  # no row predicts the first token
            supervised = supervised & (attention_mask.cumsum(-1) > 1)
        start = (attention_mask.cumsum(-1) == 0).sum(-1)  # the masks of a row do not depend on its left padding
        views = self._views(ids, supervised, seeds=seeds, start=start)
        shape = views.scored.shape
        targets, active = ids.expand(shape).flatten(0, 1), views.scored.flatten(0, 1)
        if self._shift:
            targets, active = next_tokens(targets), shift_left(active)
        arrived = [True] * (1 + entropy)
        in_float32 = getattr(self.args, "cast_lm_head_to_fp32", False)

        def rows(logits: LinearLogits) -> Tensor:
            kind = logits.hidden.device.type
            logits = replaced(logits, scale=1 / self.temperature, **self._logits_fields)
            if in_float32:
                extra = logits.extra and tuple(t.float() for t in logits.extra)
                logits = replaced(logits, hidden=logits.hidden.float(), extra=extra)
            with torch.autocast(kind, enabled=torch.is_autocast_enabled(kind) and not in_float32):
                stats = _log_probs(logits, targets, active=active, entropy=entropy)
            parts = [t for t in stats if t is not None]
            if torch.compiler.is_compiling():
                return torch.stack(parts, -1)
            return _Stacked.apply(arrived, *parts)  # type: ignore[no-untyped-call,no-any-return]

        inputs: dict[str, Any] = {"output_router_logits": True} if auxiliary else {}
        inputs |= {"input_ids": views.noisy.flatten(0, 1), "attention_mask": attention_mask.repeat(shape[0], 1)}
        head = head_module(self.accelerator.unwrap_model(model))
        with self.accelerator.autocast(), running_in_head(head, _HeadRows) as run:
            stacked, outputs = run(lambda: model(**inputs), rows)
        unstacked = _Unstacked.apply(arrived, stacked)  # type: ignore[no-untyped-call]
        log_probs, *entropies = ((t.roll(1, -1) if self._shift else t).view(shape) for t in unstacked)
        first = ids.shape[1] - keep  # not [:, -keep:], which is the whole row if all completions are empty
        scores = views.token_scores(log_probs)[:, first:]
        mean = None
        if entropies:
            total = views.weights.sum(0)
            mean = (views.token_scores(entropies[0]) / torch.where(total > 0, total, 1.0))[:, first:]
        return scores, mean, getattr(outputs, "aux_loss", None) if auxiliary else None


def row_seeds(input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, iteration: SupportsIndex = 0) -> Tensor:
    """Hash each row to a seed, without a host sync and independent of padding.

    ``mix(sum_i mix(id_i + GAMMA (2 n_i + c_i)) + GAMMA iteration)``, modulo 2^64, over the tokens that are not padding;
    n counts them from 1, c is 1 in the completion and 0 otherwise, and mix is the finalizer of splitmix64.

    Args:
        input_ids: ``[B, L]``, integers.
        attention_mask: ``[B, L]``, 0 for padding.
        logits_to_keep: length of the completions, at the end of the rows.
        iteration: any whole number; the mixin passes that of the generation.

    Returns:
        int64 ``[B]``.

    Raises:
        TypeError: ``iteration`` is not a whole number, or another argument has the wrong type.
        ValueError: ``input_ids`` are not ``[B, L]``, or ``attention_mask`` is not a mask of their shape and device.
    """
    _checks.check_ids("input_ids", input_ids)
    _checks.check_ndim("input_ids", input_ids, 2, "[B, L]")
    _checks.check_mask("attention_mask", attention_mask, input_ids.shape, "that of input_ids")
    _checks.check_same_device("input_ids", input_ids, attention_mask=attention_mask)
    logits_to_keep = _checks.checked_int("logits_to_keep", logits_to_keep, 0, input_ids.shape[1])
    real = attention_mask != 0
    completion = torch.arange(input_ids.shape[1], device=input_ids.device) >= input_ids.shape[1] - logits_to_keep
    place = 2 * real.cumsum(-1) + completion
    hashes = torch.where(real, _mixed(input_ids.long() + GAMMA * place), 0)
    return _mixed(hashes.sum(-1) + _wrapped(GAMMA * _whole(iteration)))


def _mixed(x: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64 to int64."""
    x = (x ^ (x >> 30 & 2**34 - 1)) * MIX_1
    x = (x ^ (x >> 27 & 2**37 - 1)) * MIX_2
    return x ^ (x >> 31 & 2**33 - 1)


def _whole(value: Any, expected: str = "an int") -> int:
    """Return the iteration as an int; accept integers of NumPy and 0-d integer tensors."""
    try:
        if isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool or getattr(value, "ndim", 0):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"iteration must be {expected}, got {_checks.type_name(value)}") from None


def _wrapped(x: int) -> int:
    return (x + 2**63) % 2**64 - 2**63


def diffusion_rollout(
    mask_token_id: int, *, steps: int | None = None, length: int | None = None, block_size: int | None = None,
    temperature: float | None = None, remasking: str = "confidence", position_temperature: float = 0.0,
    threshold: float | None = None, cfg_scale: float = 0.0, suppress_ids: int | Collection[int] | Tensor | None = None,
    delay_eos: bool = False, infill: bool = False, with_logprobs: bool = False, logits_dtype: torch.dtype | None = None,
    shift: bool = False,
) -> Callable[[Sequence[Any], Any], dict[str, Any]]:  # fmt: skip
    """Build a ``rollout_func`` for TRL's ``GRPOTrainer`` that denoises completions of a masked diffusion LM.

    It calls :func:`dllm_kernels.diffusion_generate` with the ``top_k``, ``top_p`` and ``min_p`` of the trainer. The
    seed of a row is drawn from torch's default generator of the CPU, which the trainer seeds differently on each rank.
    A completion ends after its first EOS token.

    Args:
        mask_token_id: id of the MASK token; never sampled.
        steps: denoising steps of a completion, in proportion to the tokens of the blocks; None, with ``threshold``
            only: no bound.
        length: tokens of a completion; None: the trainer's ``max_completion_length``.
        block_size: tokens of a block, decoded from left to right; None: the whole completion.
        temperature: temperature of the samples, 0 for the most likely token; None: the trainer's temperature.
        remasking: as in :func:`dllm_kernels.diffusion_generate`.
        position_temperature: as in :func:`dllm_kernels.diffusion_generate`.
        threshold: as in :func:`dllm_kernels.diffusion_generate`.
        cfg_scale: as in :func:`dllm_kernels.diffusion_generate`.
        suppress_ids: as in :func:`dllm_kernels.diffusion_generate`.
        delay_eos: as in :func:`dllm_kernels.diffusion_generate`; the tokenizer must have an EOS token.
        infill: as in :func:`dllm_kernels.diffusion_generate`. Decoded tokens of a prompt are returned with the prompt.
        with_logprobs: True to return the log-probability of each token at the step that decoded it; otherwise None is
            returned. TRL uses them with vLLM only.
        logits_dtype: torch.float32 keeps the logits of float16 and bfloat16 operands in float32; None: the dtype of the
            operands.
        shift: True for a model whose row i predicts token i + 1 (Dream, DiffuCoder). Every prompt must then have a
            token.

    Returns:
        Function of prompts (text or tokens) and trainer, called by TRL. It returns ``prompt_ids``, ``completion_ids``
        and ``logprobs``. The model of the trainer must not be wrapped in FSDP1 or DeepSpeed ZeRO-3.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or ``steps`` is less than the number of blocks or greater than the
            number of tokens. The function raises it for an empty prompt with ``shift``, if neither ``length`` nor the
            trainer gives the length, and for options of the trainer that it cannot honour: a ``repetition_penalty``
            other than 1, and ``generation_kwargs``.
    """
    _checks.check_flags(delay_eos=delay_eos, infill=infill, with_logprobs=with_logprobs, shift=shift)
    Choice.of(remasking, position_temperature, threshold, None)
    _checks.check_not_negative("cfg_scale", cfg_scale)
    checked_tokens("suppress_ids", suppress_ids)
    if steps is not None or threshold is None:
        steps = _checks.checked_int("steps", steps, 1, _checks.MOST_SIZE)
    length = None if length is None else _checks.checked_int("length", length, 1, _checks.MOST_SIZE)
    block_size = _checks.checked_size("block_size", block_size)
    checked_mask_id(mask_token_id, torch.zeros(1, dtype=torch.int64, device="cpu"))
    if temperature is not None:
        _checks.check_number("temperature", temperature)
        if temperature != 0:
            _checks.checked_temperature(temperature, "0, or positive")
    if length is not None:
        schedule(length, block_size or length, steps, infill=bool(infill))

    options: dict[str, Any] = {
        "mask_token_id": mask_token_id, "steps": steps, "block_size": block_size, "remasking": remasking,
        "position_temperature": position_temperature, "threshold": threshold, "cfg_scale": cfg_scale,
        "suppress_ids": suppress_ids, "delay_eos": delay_eos, "infill": infill, "shift": shift,
        "logits_dtype": _checks.checked_wide_logits(logits_dtype),
    }  # fmt: skip

    def rollout(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        _check_honoured(trainer)
        prompt_ids: Any = [_tokens_of(p) for p in prompts]
        if any(p is None for p in prompt_ids):
            prompt_ids = trainer._tokenize_prompts(prompts)[0]
        if shift and not all(map(len, prompt_ids)):
            raise ValueError("every prompt must have a token for shift=True, got an empty prompt")
        new_tokens = trainer.args.max_completion_length if length is None else length
        if new_tokens is None:
            raise ValueError("length must be given for a trainer without a max_completion_length, got None")
        P, device = max(map(len, prompt_ids), default=0), trainer.accelerator.device
        pad = _token_id(trainer.processing_class, "pad_token_id") or 0
        ids = [[pad] * (P - len(p)) + list(p) for p in prompt_ids]
        real = [[0] * (P - len(p)) + [1] * len(p) for p in prompt_ids]
        tokens, attention = (torch.tensor(t, dtype=torch.int64, device=device).view(len(ids), P) for t in (ids, real))
        filters: dict[str, Any] = {name: getattr(trainer, name, None) for name in ("top_k", "top_p", "min_p")}
        with trainer.accelerator.autocast():
            out = diffusion_generate(
                trainer.model, tokens, max_new_tokens=new_tokens, attention_mask=attention,
                temperature=trainer.temperature if temperature is None else temperature,
                eos_token_id=_token_id(trainer.processing_class, "eos_token_id"),
                seeds=torch.empty(len(ids), dtype=torch.int64, device="cpu").random_().to(device), **filters, **options,
            )  # fmt: skip
        if infill:
            filled = out.ids[:, :P].tolist()
            prompt_ids = [row[P - len(p) :] for row, p in zip(filled, prompt_ids, strict=True)]
        ends = out.generated[:, P:].sum(-1).tolist()
        parts = (out.ids, out.log_probs)
        cut = [[row[P : P + n] for row, n in zip(part.tolist(), ends, strict=True)] for part in parts]
        return {"prompt_ids": prompt_ids, "completion_ids": cut[0], "logprobs": cut[1] if with_logprobs else None}

    return rollout


def _tokens_of(prompt: Any) -> list[int] | None:
    """Return the tokens of a prompt that is a sequence, an array or a tensor of integers, otherwise None."""
    if isinstance(prompt, Tensor | np.ndarray):
        prompt = prompt.tolist()
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence) or not all(map(_checks.is_int, prompt)):
        return None
    return [int(token) for token in prompt]


def _check_honoured(trainer: Any) -> None:
    """Raise for options of the trainer that change its samples, and that a rollout cannot honour."""
    penalty = getattr(trainer, "repetition_penalty", None)
    if penalty not in (None, 1):
        raise ValueError(f"repetition_penalty must be 1 with diffusion_rollout, got {penalty}")
    if more := getattr(trainer.args, "generation_kwargs", None):
        raise ValueError(f"generation_kwargs must be None with diffusion_rollout, got {more}")


def _token_id(processing_class: Any, name: str) -> Any:
    """Return the id, or the ids, of a special token of a tokenizer, or of the tokenizer of a processor, or None."""
    return getattr(getattr(processing_class, "tokenizer", processing_class), name, None)
