"""Train a masked diffusion LM with a Hugging Face ``Trainer``, the logits never made.

Example::

    class DiffusionTrainer(MaskedDiffusionTrainerMixin, Trainer):
        pass

    trainer = DiffusionTrainer(
        model=model,                                                # bidirectional, e.g. BertForMaskedLM
        args=TrainingArguments(..., remove_unused_columns=False),   # the collator needs the samples' loss_mask
        train_dataset=samples,                                      # dicts: input_ids, loss_mask, attention_mask
        data_collator=MaskedDiffusionCollator(mask_token_id),
    )
    trainer.train()

The collator corrupts each batch, and what the loss needs to know of the corruption travels in ``labels``, packed: so a
batch holds the keys that every model, wrapper and device placement knows, and the ``Trainer`` counts the supervised tokens
of all accumulated micro-batches and ranks by itself.

The loss is computed inside the forward of the model's LM head, which returns it in place of logits. So FSDP and ZeRO gather
the head's weight and reduce its gradient as in any forward, and DDP sees a loss that depends on all it should.

Nothing here imports transformers; the mixin goes in front of the user's own ``Trainer`` class.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dllm_kernels.collate import DLLMCollator
from dllm_kernels.corruption import corrupt_uniform
from dllm_kernels.losses import MDLMCrossEntropyLoss
from dllm_kernels.mtp import _head_module
from dllm_kernels.ops._head import check_plain_head

IGNORED = -100
TOKEN_BITS = 31
FROM_LOGITS = "a plain Trainer with compute_loss_func=mdlm_loss_func computes the loss from logits"
Corruption = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def pack_labels(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, noise_mask: torch.Tensor, p_mask: torch.Tensor
) -> torch.Tensor:
    """Clean tokens, masks and probabilities in one tensor of labels.

    A position that is not supervised holds -100; a supervised one its token, in the low 31 bits, and, where it was masked,
    the bits of the float32 probability of that above them. Nothing is lost, and ``(labels != -100).sum()`` counts the
    supervised tokens.

    Args:
        input_ids: clean tokens ``[B, L]``, in [0, 2^31).
        loss_mask: ``[B, L]``, nonzero where the token is supervised.
        noise_mask: ``[B, L]``, nonzero where it was masked.
        p_mask: float32 ``[B, L]``, the probability with which it was.

    Returns:
        int64 ``[B, L]``.
    """
    bits = p_mask.contiguous().view(torch.int32).long()  # of a positive float, so 31 of them
    packed = input_ids.long() | torch.where(noise_mask.bool(), bits << TOKEN_BITS, 0)
    return torch.where(loss_mask != 0, packed, IGNORED)


def unpack_labels(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What :func:`pack_labels` packed: ``(target_ids, noise_mask, p_mask, loss_mask)``, as the losses take them.

    ``p_mask`` is 0 where no token was masked.
    """
    supervised = labels != IGNORED
    bits = torch.where(supervised, labels >> TOKEN_BITS, 0)
    targets = torch.where(supervised, labels & (2**TOKEN_BITS - 1), IGNORED)
    return targets, bits != 0, bits.to(torch.int32).view(torch.float32), supervised


class MaskedDiffusionCollator:
    """Samples to a batch of corrupted tokens and the labels of :func:`pack_labels`.

    Args:
        mask_token_id: the token that masks.
        collate: makes a batch of the samples; None: ``DLLMCollator()``, which pads with token 0.
        corrupt: the corruption routine, :func:`dllm_kernels.corrupt_uniform` or another that masks.
        seed_field: a field of the samples with an int64 seed: the noise of a sample is then a function of that seed and of
            the length of the batch alone, as an evaluation wants it. None: torch's default generator, of which every
            worker of a ``DataLoader`` has its own, seeded by the ``Trainer``.
        **options: passed on to ``corrupt`` (``eps``, ``block_size``, ...).
    """

    def __init__(
        self,
        mask_token_id: int,
        collate: Callable[[Sequence[Mapping[str, Any]]], dict[str, torch.Tensor]] | None = None,
        corrupt: Corruption = corrupt_uniform,
        *,
        seed_field: str | None = None,
        **options: Any,
    ) -> None:
        self.mask_token_id = mask_token_id
        self.collate = DLLMCollator() if collate is None else collate
        self.corrupt = corrupt
        self.seed_field = seed_field
        self.options = options

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Collate and corrupt.

        Args:
            samples: dicts with ``input_ids``, ``loss_mask`` and ``attention_mask``, as :class:`dllm_kernels.DLLMCollator`
                takes them.

        Returns:
            ``input_ids``, corrupted, ``attention_mask`` and ``labels``, each int64 ``[B, L]``.

        Raises:
            ValueError: a sample lacks a field.
        """
        for field in ("loss_mask", *filter(None, [self.seed_field])):
            if any(field not in sample for sample in samples):
                raise ValueError(
                    f"every sample must have a field {field!r}; a Trainer drops it from the data unless "
                    "TrainingArguments(remove_unused_columns=False)"
                )
        batch = self.collate(samples)
        seeds = None if self.seed_field is None else torch.tensor([sample[self.seed_field] for sample in samples])
        ids, loss_mask = batch["input_ids"], batch["loss_mask"]
        noisy, noise, p = self.corrupt(ids, loss_mask, self.mask_token_id, seeds=seeds, **self.options)
        labels = pack_labels(ids, loss_mask, noise, p)
        return {"input_ids": noisy, "attention_mask": batch["attention_mask"], "labels": labels}


def mdlm_loss_func(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: int | torch.Tensor | None = None
) -> torch.Tensor:
    """The ``compute_loss_func`` of a plain ``Trainer``: the masked-diffusion loss from logits.

    Args:
        outputs: of the model: with ``logits`` ``[B, L, V]``, or a tuple that begins with them.
        labels: of :class:`MaskedDiffusionCollator`.
        num_items_in_batch: the supervised tokens of all micro-batches and ranks, which divides the sum; None: those here.

    Returns:
        0-d loss.
    """
    masks = unpack_labels(labels)
    loss_fn = MDLMCrossEntropyLoss()
    return loss_fn(_logits(outputs), *masks, num_diffusion_tokens=_count(labels, num_items_in_batch)).total_loss  # type: ignore[no-any-return]


def _logits(outputs: Any) -> torch.Tensor:
    logits: torch.Tensor = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    return logits


def _count(labels: torch.Tensor, num_items_in_batch: int | torch.Tensor | None) -> int | torch.Tensor:
    return (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch


@contextlib.contextmanager
def loss_in_head(
    model: nn.Module, loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
) -> Iterator[None]:
    """Within it, the LM head of the model returns ``loss(hidden, weight, bias)`` in place of logits.

    The model must hand what its head returns through unchanged, as ``logits``: no soft cap, no scale.

    Args:
        model: has ``get_output_embeddings()`` or a module named ``lm_head``; may be wrapped by DDP, FSDP.
        loss: takes hidden states, the head's weight ``[V, D]`` and its bias ``[V]`` or None; returns the loss, 0-d.

    Raises:
        ValueError: the head is not an ``nn.Linear`` with a plain weight, or has a ``forward`` of its own (an adapter) or
            hooks other than those that shard it.
    """
    head: Any = _linear_head(model)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return loss(hidden, head.weight, head.bias)

    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def _linear_head(model: nn.Module) -> nn.Linear:
    head = _head_module(model)
    if not isinstance(head, nn.Linear) or tuple(head.weight.shape) != (head.out_features, head.in_features):
        raise ValueError(
            f"the LM head must be an nn.Linear for the loss to run inside it, got {type(head).__name__}; {FROM_LOGITS}"
        )
    check_plain_head(head, FROM_LOGITS)
    return head


class MaskedDiffusionTrainerMixin:
    r"""The masked-diffusion loss with a fused LM head, in front of a ``transformers.Trainer``.

    .. math:: \text{loss} = \frac{1}{N} \sum_{i\,\in\,\text{masked}} \frac{\text{nll}_i}{p_i}

    with N the supervised tokens of the whole batch: of all micro-batches, and of all ranks with
    ``average_tokens_across_devices``. For batches of :class:`MaskedDiffusionCollator`. Evaluation without metrics is fused
    too; where predictions are asked for, the logits are made.

    Not for ``nn.DataParallel`` (start one process per GPU instead), nor for sequences split over processes. What a model
    would add to its own loss (the balance of a router) is not added to this one.

    Raises:
        ValueError: a ``compute_loss_func`` or a ``label_smoothing_factor`` is given, several GPUs are visible to one
            process, sequences are split over processes, the model's head is not an ``nn.Linear`` or is more than that (an
            adapter, hooks), or the model changes what its head returns.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.args: Any
        self.accelerator: Any
        if getattr(self, "compute_loss_func", None) is not None:
            raise ValueError("compute_loss_func must be None: the loss is MaskedDiffusionTrainerMixin's own")
        if self.args.n_gpu > 1:
            raise ValueError(f"one process must see one GPU, got {self.args.n_gpu}: start it with torchrun")
        if self.args.label_smoothing_factor:
            smoothing = self.args.label_smoothing_factor
            raise ValueError(f"label_smoothing_factor must be 0, got {smoothing}: the masked-diffusion loss has none")
        # Context parallelism makes the attention causal, sequence parallelism takes the model's own loss: neither says so.
        split = getattr(self.accelerator, "parallelism_config", None)
        cp_size, sp_size = (getattr(split, name, 1) for name in ("cp_size", "sp_size"))
        if (cp_size, sp_size) != (1, 1):
            raise ValueError(
                f"parallelism_config must have cp_size and sp_size 1, got {cp_size} and {sp_size}: the Trainer would not "
                "compute the masked-diffusion loss of whole sequences"
            )
        self.compute_loss_func = self._loss_of_outputs
        self._loss_shifts_labels = False  # position 0 of a causal model's labels counts as well
        self._wants_logits = False
        self._in_head: list[torch.Tensor] | None = None
        self._handed_through = False

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> Any:
        """As ``Trainer.compute_loss``, which it calls with an LM head that computes the loss."""
        compute: Any = super().compute_loss  # type: ignore[misc]
        if self._wants_logits or "labels" not in inputs:
            return compute(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        labels, made = inputs["labels"], list[torch.Tensor]()
        masks, count = unpack_labels(labels), _count(labels, num_items_in_batch)

        def loss(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            loss_fn = MDLMCrossEntropyLoss()
            out = loss_fn.forward_fused(hidden, weight, *masks, num_diffusion_tokens=count, lm_head_bias=bias)
            made.append(out.total_loss)
            return out.total_loss

        unwrapped = self.accelerator.unwrap_model(model)
        self._in_head = made
        try:
            with loss_in_head(unwrapped, loss):
                return compute(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        finally:
            self._in_head = None

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """As ``Trainer.prediction_step``; with logits unless ``prediction_loss_only``."""
        self._wants_logits = not prediction_loss_only
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        finally:
            self._wants_logits = False

    def _loss_of_outputs(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: int | torch.Tensor | None = None
    ) -> torch.Tensor:
        if self._in_head is None:
            return mdlm_loss_func(outputs, labels, num_items_in_batch)
        loss = _logits(outputs)
        if not self._handed_through:  # looked at until seen, since it waits for the GPU
            self._check_handed_through(loss.detach())
        return loss

    def _check_handed_through(self, loss: torch.Tensor) -> None:
        made = self._in_head or []
        one = len(made) == 1 and loss.dim() == 0
        if not one or not torch.isclose(made[0].detach().to(loss), loss, rtol=0.0, atol=0.0, equal_nan=True):
            raise ValueError(
                "the model must call its LM head once and return what it gives unchanged (no soft cap, no scale on the "
                f"logits), got something else; {FROM_LOGITS}"
            )
        # A cap or a scale leaves 0, infinity and NaN as they are: such a loss does not show it, the next one is looked at.
        self._handed_through = bool(loss.isfinite() & (loss != 0))
