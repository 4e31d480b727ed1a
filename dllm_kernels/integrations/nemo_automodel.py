"""Patch an installed NeMo AutoModel to use this package, and undo the patch.

Example::

    from dllm_kernels.integrations import nemo_automodel

    print(nemo_automodel.patch())     # before the recipe builds its losses and its collator
    ...
    nemo_automodel.unpatch()

Names are replaced in their home modules, from which modules imported later take them, and in every loaded module of the
host that already holds them. Objects that were built earlier keep the host's code.

A base loss of the host that is not replaced (``ChunkedCrossEntropy``, ``TEParallelCrossEntropy``, ...) still runs
through the host's ``calculate_loss``, ``calculate_mtp_loss`` and ``PipelineCausalLMLoss``. The random bits of the
corruption routines differ from the host's, so a run resumed after the patch draws different noise.
``patch(exclude=["corrupt_uniform"])`` keeps the named originals. The report lists the host's losses and routines that
still run the host's code.

The recipe of diffusion LMs seeds a generator for each row of a batch and corrupts the rows one by one. After
:func:`patch` it corrupts the batch in one call, with the same seed for each row, also if the recipe is imported later.
The rows of a strategy that overrides ``apply_corruption`` are still corrupted one by one, and so are those of every
strategy if a corruption routine is excluded.

``patch(fuse_head=True)`` also makes the training steps of the MDLM, SCDD, hybrid, I-DLM and block-diffusion recipes
compute their losses from hidden states. The LM head passes its input to the loss, which computes the logits one chunk
at a time.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import dllm_kernels
from dllm_kernels import mtp
from dllm_kernels._checks import checked_bool, checked_wide_logits
from dllm_kernels.deferred._head import deferred_logits
from dllm_kernels.head._lora import check_head, is_adapted, low_rank_rows, split, weights
from dllm_kernels.head._module import head_module, token_layer, unwrapped
from dllm_kernels.head._parameters import FROM_LOGITS
from dllm_kernels.integrations import _recipe
from dllm_kernels.integrations._hosts import Host, PatchReport, checked_excluded, is_defined_in, loaded
from dllm_kernels.losses._common import Count
from dllm_kernels.mtp.cross_entropy import required
from dllm_kernels.rows._dtypes import in_dtype_of
from dllm_kernels.rows._logits import Logits, rows_of

HOST = "nemo_automodel"
HOMES = {
    "components.loss.dllm_loss": (
        "DLLMLossOutput", "MDLMCrossEntropyLoss", "BlockDiffusionCrossEntropyLoss", "HybridDiffusionLLMLoss",
        "DFlashDecayLoss", "IDLMLoss", "SCDDLoss", "SCDDSchedule", "scdd_schedule", "encoder_ar_loss",
        "_compute_per_token_nll",
    ),
    "components.loss.masked_ce": ("MaskedCrossEntropy",),
    "components.loss.linear_ce": ("FusedLinearCrossEntropy",),
    "components.loss.utils": ("calculate_loss",),
    "components.loss.mtp": ("MTPLossOutput", "calculate_mtp_loss", "PipelineCausalLMLoss"),
    "components.datasets.dllm.corruption": (
        "gumbel_topk", "_batched_gumbel_topk", "corrupt_uniform", "corrupt_blockwise", "corrupt_uniform_random",
        "corrupt_all_masked", "corrupt_mix",
    ),
    "components.datasets.dllm.collate": ("DLLMCollator",),
}  # fmt: skip
# Routines in the code of a strategy.
NOISE = ("corrupt_uniform", "corrupt_blockwise", "corrupt_uniform_random", "corrupt_all_masked", "corrupt_mix")
KEPT = {"MTPLossConfig": "its build() already returns the replaced PipelineCausalLMLoss"}
# Packages of the host with other losses and routines; the report lists the ones in loaded modules.
REPORTED_PACKAGES = ("components.loss", "components.datasets.dllm")
RECIPES = "recipes.dllm.train_ft", "recipes.dllm.strategy"
# Methods that call a model and then its loss: class -> (module, method, index of the argument that holds the recipe).
STEPS = {
    "DiffusionLMSFTRecipe": (RECIPES[0], "_forward_backward_step", 0),
    "DiffusionGemmaSFTRecipe": (RECIPES[0], "_forward_backward_step", 0),
    "IDLMStrategy": (RECIPES[1], "forward_backward", 1),
}
LOOP_OWNER = "DiffusionLMSFTRecipe"  # its loop over the rows of a batch seeds and corrupts each of them
# -100 marks ignored labels for every loss, so both defaults mean the ignore index of the loss. The number of rows of a
# chunk does not change a loss; None chooses it. Without a loss_type the weights are those of "dflash".
SAME_DEFAULTS = {"ignore_index": (None, -100), "chunk_size": (1024, None), "loss_type": ("dflash", None)}
HEAD_PARAMETERS = ("weight", "bias", "parametrizations")
HEAD_ARGUMENTS = ("model", "grad_reduce_group", "lm_weight")
DeferLogits = Callable[[torch.nn.Module], AbstractContextManager[bool]]
REPLACEMENTS = (mtp.MaskedCrossEntropy, mtp.FusedLinearCrossEntropy)
_host = Host(HOST, SAME_DEFAULTS)


@_host.exclusive
def patch(
    *, exclude: Iterable[str] = (), fuse_head: bool = False, logits_dtype: torch.dtype | None = None,
    strict: bool = False,
) -> PatchReport:  # fmt: skip
    """Replace the losses, corruption routines, collator and MTP functions of the installed ``nemo_automodel``.

    A second call does nothing and returns the first report with ``already=True``. A name whose signature in the
    framework differs from the replacement keeps the framework's code; a warning and the report list the differences.

    Args:
        exclude: names to keep. "_apply_corruption" keeps the recipe's loop over the rows of a batch.
        fuse_head: True to pass hidden states and LM head instead of logits to the loss, in the recipes of diffusion
            LMs. The head must be a plain ``nn.Linear``, or LoRA of one (of the framework or of PEFT). The model may
            apply a cast and a soft cap to the output of the head. Otherwise the logits are materialized as before.
            Imports the recipes.
        logits_dtype: torch.float32 keeps the logits of float16 and bfloat16 operands in float32, in the framework's
            ``FusedLinearCrossEntropy`` and in the losses of ``fuse_head``. None: the dtype of the operands, unless the
            framework passes another to a call.
        strict: True to raise an error for signatures that differ.

    Returns:
        :class:`PatchReport`; print it.

    Raises:
        ImportError: ``nemo_automodel`` is not installed, or one of its modules cannot be imported.
        RuntimeError: with ``strict``, a signature of the framework differs from the replacement; the message lists
            every difference, and nothing is replaced. Or the framework is patched already with other arguments.
        TypeError: ``fuse_head`` or ``strict`` is not a bool, or ``logits_dtype`` is not a dtype.
        ValueError: ``exclude`` holds a name that is never replaced, or ``logits_dtype`` is neither torch.float32 nor
            None.
    """
    excluded = checked_excluded(exclude, [_recipe.LOOP, *(name for names in HOMES.values() for name in names)])
    fields: dict[str, Any] = {"logits_dtype": checked_wide_logits(logits_dtype)}
    arguments = {"exclude": excluded, "fuse_head": checked_bool("fuse_head", fuse_head), **fields}
    if (earlier := _host.earlier(checked_bool("strict", strict), **arguments)) is not None:
        return earlier
    version = str(getattr(importlib.import_module(HOST), "__version__", "of unknown version"))

    def replacement_for(home: str, name: str, original: Any) -> Any:
        replacement = ADAPTERS[name](original) if name in ADAPTERS else getattr(dllm_kernels, name)
        if name == "FusedLinearCrossEntropy":
            replacement.patch_options = {name: value for name, value in fields.items() if value is not None}
        return replacement

    pairs, problems = _host.pairs(HOMES, excluded, replacement_for)
    deferred = functools.partial(deferred_logits, **fields)
    steps, missing = _steps(deferred) if fuse_head else ([], {})
    unchanged = (*KEPT.items(), *((name, "excluded") for name in excluded))
    fused = tuple(f"{owner.__name__}.{name}" for owner, name, _ in steps)
    original = _originals([original for original, _ in pairs])
    problems |= missing
    one_call = not {_recipe.LOOP, *NOISE} & {*excluded, *problems} and _has_loop(_host.loaded_module(RECIPES[0]))
    batched = (f"{LOOP_OWNER}.{_recipe.LOOP}",) if one_call else ()
    reported = {"kept": unchanged, "fused": fused, "original": original, "batched": batched}
    report = _host.patch(version, pairs, problems, strict, arguments, **reported)
    if one_call:
        _host.when_imported(RECIPES[0], _replace_loop)
    for step in steps:
        _host.replace_method(*step)
    return report


@_host.exclusive
def unpatch() -> tuple[tuple[str, str], ...]:
    """Restore the framework's names wherever they were replaced, also in modules imported since.

    Returns:
        ``(module, name)`` of every attribute that was restored; empty if the framework was not patched.
    """
    return _host.unpatch()


def _steps(deferred: DeferLogits) -> tuple[list[tuple[type, str, Any]], dict[str, list[str]]]:
    """Return (class, method, replacement) of every training step, and messages about missing ones."""
    steps, missing = [], {}
    for name, (home, method, recipe_at) in STEPS.items():
        owner = getattr(_host.module(home), name, None)
        if inspect.isclass(owner) and method in vars(owner):
            steps.append((owner, method, _in_context(deferred, vars(owner)[method], recipe_at)))
        else:
            missing[f"{name}.{method}"] = [f"{HOST}.{home} has no {name}.{method}"]
    return steps, missing


def _has_loop(recipe: ModuleType | None) -> bool:
    """Return True if the recipe corrupts the rows of a batch in a loop of its own, or is still to be imported."""
    owner = getattr(recipe, LOOP_OWNER, object)
    return recipe is None or is_defined_in(recipe.__name__, vars(owner).get(_recipe.LOOP))


def _replace_loop(recipe: ModuleType) -> None:
    if _has_loop(recipe):
        owner = getattr(recipe, LOOP_OWNER)
        routines = {name: getattr(dllm_kernels, name) for name in NOISE}
        loop = _recipe.batched(vars(owner)[_recipe.LOOP], f"{HOST}.{RECIPES[1]}", routines)
        _host.replace_method(owner, _recipe.LOOP, loop)


def _in_context(deferred: DeferLogits, original: Any, recipe_at: int) -> Any:
    """Wrap a training step so that its model passes deferred logits to the loss."""

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        recipe = args[recipe_at] if len(args) > recipe_at else kwargs["recipe"]
        with deferred(recipe.model_parts[0]):
            return original(*args, **kwargs)

    return step


def _originals(replaced: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """List the losses of the host that are not replaced, and public functions next to them, in the loaded modules."""
    around = tuple(f"{HOST}.{package}" for package in REPORTED_PACKAGES)
    return tuple(
        sorted(
            (module.__name__, name)
            for module in loaded(HOST)
            if module.__name__.startswith(around)
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__ and name not in KEPT
            if inspect.isfunction(value) or (inspect.isclass(value) and issubclass(value, torch.nn.Module))
            if not any(value is one for one in replaced)
        )
    )


def _derived(base: type, *, from_host: bool) -> Callable[[type], type]:
    """Return a function that derives from ``base`` a class with the name of the host's class.

    ``from_host``: also derive from the host's class. The name matters, because the host's configuration and pickle look
    classes up by name.
    """

    def derived(original: type) -> type:
        like = {name: getattr(original, name) for name in ("__module__", "__qualname__")}
        bases = (base, original) if from_host and inspect.isclass(original) else (base,)
        return type(original.__name__, bases, {**like, "__doc__": base.__bases__[0].__doc__, "original": original})

    return derived


class _MaskedCrossEntropy(mtp.MaskedCrossEntropy):
    """Cross-entropy that accepts every label layout of the host."""

    def forward(
        self, logits: Logits, labels: Tensor, mask: Tensor | None = None, num_label_tokens: Count = None,
        loss_weights: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        labels, mask, loss_weights = (_per_row(rows_of(logits), t) for t in (labels, mask, loss_weights))
        return super().forward(logits, labels, mask, num_label_tokens, loss_weights)


def _per_row(x: Tensor, entries: Any) -> Any:
    """Reshape entries to one per row, on the device of the rows: packed labels are flat, offloaded labels on CPU."""
    if entries is None:
        return None
    entries = entries.to(x.device)
    rows = x.shape[:-1]
    return entries.reshape(rows) if entries.numel() == rows.numel() else entries


class _FusedLinearCrossEntropy(mtp.FusedLinearCrossEntropy):
    """Fused cross-entropy whose LM head is gathered by the host's class."""

    patch_options: Mapping[str, Any] = {}  # options of :func:`patch`

    def forward(
        self, hidden_states: Tensor, labels: Tensor, lm_weight: Tensor,
        num_label_tokens: Count = None, grad_reduce_group: Any = None, loss_weights: Tensor | None = None, *,
        lm_bias: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        weight = self._gathered(hidden_states, lm_weight, grad_reduce_group)
        options["lm_bias"] = None if lm_bias is None else self._gathered(hidden_states, lm_bias, grad_reduce_group)
        options |= self.patch_options
        return super().forward(hidden_states, labels, weight, num_label_tokens, None, loss_weights, **options)

    def _gathered(self, hidden: Tensor, weight: Tensor, group: Any) -> Tensor:
        host: Any = self
        gathered: Tensor = host.materialize_lm_weight(weight, grad_reduce_group=group)
        return in_dtype_of(hidden, gathered)


def _calculate_loss(original: Any) -> Any:
    @functools.wraps(mtp.calculate_loss)
    def calculate_loss(loss_fn: Any, **kwargs: Any) -> Any:
        if not isinstance(loss_fn, REPLACEMENTS):
            return original(loss_fn, **kwargs)
        if isinstance(loss_fn, mtp.FusedLinearCrossEntropy):
            kwargs |= _head_of_host(loss_fn, required(kwargs, "hidden_states", loss_fn), **_given_head(kwargs))
        return mtp.calculate_loss(_capped_like(kwargs.get("model"), loss_fn), **kwargs)

    return calculate_loss


def _calculate_mtp_loss(original: Any) -> Any:
    @functools.wraps(mtp.calculate_mtp_loss)
    def calculate_mtp_loss(loss_fn: Any, **kwargs: Any) -> Any:
        if not isinstance(loss_fn, REPLACEMENTS):
            return original(loss_fn, **kwargs)
        hidden = kwargs.get("mtp_per_depth_h")
        if isinstance(loss_fn, mtp.FusedLinearCrossEntropy) and hidden:
            kwargs |= _head_of_host(loss_fn, hidden, **_given_head(kwargs))
        return mtp.calculate_mtp_loss(loss_fn, **kwargs)

    return calculate_mtp_loss


def _capped_like(model: torch.nn.Module | None, loss_fn: Any) -> Any:
    """Return a loss from hidden states with the soft cap of the model, if the loss has no soft cap.

    The host's loss from hidden states omits the cap and therefore differs from its loss from logits.
    """
    config = getattr(unwrapped(model), "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    text_config = get_text_config() if callable(get_text_config) else config
    cap = getattr(text_config, "final_logit_softcapping", None)
    if cap is not None and isinstance(loss_fn, mtp.FusedLinearCrossEntropy) and loss_fn.softcap is None:
        loss_fn = copy.copy(loss_fn)
        loss_fn.softcap = cap
    return loss_fn


def _given_head(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: kwargs.get(name) for name in HEAD_ARGUMENTS}


def _head_of_host(
    loss_fn: Any, hidden: Tensor | list[Tensor], model: Any, grad_reduce_group: Any, lm_weight: Tensor | None = None
) -> dict[str, Any]:
    """Return the head as arguments of the loss, in the dtype of the hidden states.

    ``lm_weight`` is the weight if the recipe has gathered it. If None, it is gathered by the host's function, which
    subclasses may override. LoRA of the host or of PEFT is returned as bias and low-rank part; the host ignores it.
    Like the host, accept a head of any other class, such as a linear layer of another library. Raise ValueError if such
    a head trains parameters besides weight and bias, because they would receive no gradient.
    """
    head = head_module(model)
    adapted = head is not None and is_adapted(head)
    if adapted:
        check_head(head, FROM_LOGITS)
    named = () if head is None or adapted else head.named_parameters()
    trained = [name for name, p in named if p.requires_grad and name.split(".")[0] not in HEAD_PARAMETERS]
    if trained:
        raise ValueError(
            "the LM head must train no parameter besides its weight and bias in a loss from hidden states, got "
            f"{', '.join(trained)}; freeze them, exclude the head from the adapters, or use MaskedCrossEntropy"
        )
    if lm_weight is None:
        utils = _host.module("components.loss.utils")
        lm_weight = utils.prepare_lm_weight(loss_fn, model, grad_reduce_group=grad_reduce_group)
    first, more = hidden if isinstance(hidden, Tensor) else hidden[0], dict[str, Any]()
    if head is not None and adapted:
        parts = split(head)
        taken = weights(parts, first, low_rank_rows(parts, hidden))
        more = {"lm_bias": taken.bias, "extra": taken.extra}
        if token_layer(head) is not None:
            lm_weight = taken.weight
    return {"lm_weight": in_dtype_of(first, lm_weight), **more}


class _PipelineCausalLMLoss(mtp.PipelineCausalLMLoss):
    """Pipeline loss that delegates base losses of the host to the host's class."""

    original: Any

    def forward(self, output: Any, labels: Tensor) -> Tensor:
        if isinstance(self.loss_fn, REPLACEMENTS):
            return super().forward(output, labels)
        loss: Tensor = self.original.forward(self, output, labels)  # reads attributes of this class too
        return loss

    def _main_loss_fn(self) -> Any:
        return _capped_like(self.model, self.loss_fn)

    def _head(self, hidden: Tensor | list[Tensor], lm_weight: Tensor | None = None) -> dict[str, Any]:
        return _head_of_host(self.loss_fn, hidden, self.model, self.grad_reduce_group, lm_weight)


ADAPTERS: dict[str, Callable[[Any], Any]] = {
    # Also derived from the host's class, because the host checks isinstance and recipes then request hidden states.
    "MaskedCrossEntropy": _derived(_MaskedCrossEntropy, from_host=True),
    "FusedLinearCrossEntropy": _derived(_FusedLinearCrossEntropy, from_host=True),
    "calculate_loss": _calculate_loss,
    "calculate_mtp_loss": _calculate_mtp_loss,
    "PipelineCausalLMLoss": _derived(_PipelineCausalLMLoss, from_host=False),
}
