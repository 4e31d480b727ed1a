"""Train a masked diffusion LM with a Hugging Face ``Trainer`` without materializing the logits.

Example::

    class DiffusionTrainer(MaskedDiffusionTrainerMixin, Trainer):
        pass

    trainer = DiffusionTrainer(
        model=model,  # bidirectional, e.g. BertForMaskedLM
        # the collator needs the samples' loss_mask
        args=TrainingArguments(..., remove_unused_columns=False),
        train_dataset=samples,  # dicts: input_ids, loss_mask, attention_mask
        data_collator=MaskedDiffusionCollator(mask_token_id),
    )
    trainer.train()

The collator corrupts each batch and packs the masks and probabilities that the loss needs into ``labels``. The batch
therefore has only the keys that every model, wrapper and device placement supports, and the ``Trainer`` itself counts
the supervised tokens of all accumulated micro-batches and ranks.

The loss is computed inside the forward of the model's LM head, which returns the loss in place of logits. FSDP and ZeRO
therefore gather the head's weight and reduce its gradient as in any forward, and for DDP the loss depends on all
parameters.

The loss is :class:`dllm_kernels.MDLMCrossEntropyLoss` unless ``loss=`` is given: another loss of this package, or a
function that returns row weights. A schedule that is not linear in time needs a weight other than 1 / p. With
alpha(t) = cos(pi t / 2) the mask probability is p = 1 - alpha(t), and the weight -alpha'(t) / p::

    def cosine_level(B, **seeds):
        return 1 - torch.cos(torch.pi / 2 * sample_level(B, low=1e-3, **seeds))

    def cosine_weights(target_ids, noise_mask, p_mask, loss_mask):
        angle = torch.acos(1 - p_mask)
        return noise_mask * torch.pi / 2 * angle.sin() / p_mask.clamp(min=1e-8)

    collator = MaskedDiffusionCollator(mask_token_id, level=cosine_level)
    trainer = DiffusionTrainer(..., data_collator=collator, loss=cosine_weights)

Put the mixin before the ``Trainer`` class among the bases. Only the mixin requires transformers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import multiprocessing.context
import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from dllm_kernels import _checks
from dllm_kernels._checks._target_range import first_true
from dllm_kernels._graph import _plain
from dllm_kernels._graph._named import replaced
from dllm_kernels.collate import FROM_LABELS, DLLMCollator, checked_samples
from dllm_kernels.corruption import checked_mask_id, corrupt_uniform
from dllm_kernels.corruption._philox import child_seeds
from dllm_kernels.head._in_head import HeadOutput, computed_in_head, result_of_head, returned_logits
from dllm_kernels.head._module import head_module
from dllm_kernels.integrations import _attention
from dllm_kernels.integrations._hosts import check_before_host
from dllm_kernels.losses import BlockDiffusionCrossEntropyLoss, MDLMCrossEntropyLoss, SCDDLoss
from dllm_kernels.losses._base import DiffusionLoss, TransformedLoss
from dllm_kernels.losses._common import Count, divide, next_token_mask, shift_left
from dllm_kernels.ops import weighted_nll
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._interface import IGNORE
from dllm_kernels.rows._logits import LinearLogits, Logits

BIDIRECTIONAL_SINCE = "5.2"  # first version of transformers in which config.is_causal = False has an effect
TOKEN_BITS, P_BITS = 31, 30
PACKED, MASKED = 2**61, 2**62  # the bit of every supervised label, and the bit of a masked token
PROBES = 3  # steps that look for a dependence between positions; a model may have none before its first update
RETURNED_WEIGHTS = "the weights that loss returns"
NO_TARGET = 2**TOKEN_BITS - 1 | 0x3F800000 << TOKEN_BITS | PACKED | MASKED  # token 2^31 - 1, masked with p = 1
SEED_STRIDE = 0x9E3779B97F4A7C15 - 2**64  # small multiples of it are far apart modulo 2^64
# What models take beside tokens and attention mask, whatever the noise.
PASSED_ON = ("position_ids", "segment_ids", "token_type_ids")
FROM_LOGITS = "a plain Trainer with compute_loss_func=mdlm_loss_func computes the loss from logits"
Corruption = Callable[..., tuple[Tensor, Tensor, Tensor]]
RowWeights = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Loss = DiffusionLoss | RowWeights


def pack_labels(input_ids: Tensor, loss_mask: Tensor, noise_mask: Tensor, p_mask: Tensor) -> Tensor:
    """Pack clean tokens, masks and probabilities into one tensor of labels.

    An unsupervised position holds -100. A supervised position holds its token in the low 31 bits, then the low 30 bits
    of the float32 mask probability, whose other bits are 0, then one bit that is set, then one bit that is set if the
    token was masked. The packing is lossless, ``(labels != -100).sum()`` counts the supervised tokens, and token ids
    are never mistaken for packed labels.

    Args:
        input_ids: clean tokens ``[B, L]``, in [0, 2^31) at supervised positions.
        loss_mask: ``[B, L]``, nonzero if the token is supervised.
        noise_mask: ``[B, L]``, nonzero if the token was masked.
        p_mask: float32 ``[B, L]``, the probability with which the token was masked, in [0, 1] at supervised positions.

    Returns:
        int64 ``[B, L]``.

    Raises:
        TypeError: an argument is not a tensor, or is a DTensor.
        ValueError: shapes, dtypes or devices do not match; on a CPU, a supervised token or its probability is out of
            range. On a GPU the check would be a host sync, and a value out of range becomes another value.
    """
    tensors = {"input_ids": input_ids, "loss_mask": loss_mask, "noise_mask": noise_mask, "p_mask": p_mask}
    for name, t in tensors.items():
        _checks.check_whole_tensor(name, t)
    _checks.check_ids("input_ids", input_ids)
    for name, mask in (("loss_mask", loss_mask), ("noise_mask", noise_mask)):
        _checks.check_mask(name, mask, input_ids.shape, "that of input_ids", no_ids=True)
    _checks.check_float("p_mask", p_mask)
    _checks.check_dtype("p_mask", p_mask, [torch.float32])
    _checks.check_shape("p_mask", p_mask, input_ids.shape, "that of input_ids")
    _checks.check_same_device("input_ids", input_ids, loss_mask=loss_mask, noise_mask=noise_mask, p_mask=p_mask)
    supervised = loss_mask != 0
    fits = (input_ids >= 0) & (input_ids.long() < 2**TOKEN_BITS)
    _check_values("input_ids", input_ids, fits, supervised, "[0, 2^31)")
    _check_values("p_mask", p_mask, (p_mask >= 0) & (p_mask <= 1), supervised, "[0, 1]")
    bits = p_mask.abs().view(torch.int32).long() & 2**P_BITS - 1  # abs: -0.0 is a probability, too
    packed = input_ids.long() | bits << TOKEN_BITS | PACKED | noise_mask.bool() * MASKED
    return torch.where(supervised, packed, IGNORE)


def _check_values(name: str, values: Tensor, valid: Tensor, supervised: Tensor, range_: str) -> None:
    """Raise ValueError for the first supervised value that is not valid, if it can be read without a host sync."""
    bad = supervised & ~valid
    if not _plain.readable_without_sync(bad):
        return
    where = first_true(bad)
    if where is not None:
        got = values[where].item()
        raise ValueError(f"{name} must lie in {range_} at supervised positions, got {got} at position {where}")


def unpack_labels(labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unpack :func:`pack_labels` into ``(target_ids, noise_mask, p_mask, loss_mask)``, the arguments of the losses.

    ``noise_mask`` is False and ``p_mask`` 0 at unsupervised positions.

    Raises:
        TypeError: ``labels`` is not a tensor.
        ValueError: ``labels`` has another dtype than int64; on a CPU, a supervised label was not packed. On a GPU the
            check would be a host sync: such a position is masked, with a probability of 1 and a target that no
            vocabulary has, so the loss is NaN.
    """
    _checks.check_tensor("labels", labels)
    unpacked = _not_packed(labels)
    if _plain.readable_without_sync(unpacked) and bool(unpacked.any()):
        _refuse_labels(labels[unpacked][0].item())
    supervised = labels != IGNORE
    packed = torch.where(supervised, labels, 0).masked_fill(unpacked, NO_TARGET)
    targets = torch.where(supervised, packed & (2**TOKEN_BITS - 1), IGNORE)
    p_mask = (packed >> TOKEN_BITS & (2**P_BITS - 1)).to(torch.int32).view(torch.float32)
    return targets, packed >= MASKED, p_mask, supervised


def _not_packed(labels: Tensor) -> Tensor:
    """Return True at the supervised labels that :func:`pack_labels` did not write, such as token ids."""
    if labels.dtype != torch.int64:
        _refuse_labels(str(labels.dtype).removeprefix("torch."))
    return (labels < PACKED) & (labels != IGNORE)


def _refuse_labels(got: object) -> NoReturn:
    raise ValueError(
        f"labels must be packed by pack_labels, got {got}; pass data_collator=MaskedDiffusionCollator(mask_token_id), "
        "which corrupts the tokens and packs the labels"
    )


class _Counts(NamedTuple):
    """Numbers of masked and of supervised labels: upper bounds on the number of rows of nonzero weight.

    With them, a loss need not read the number of rows back from a GPU. They hold for the tensor that they belong to,
    until it is modified in place.
    """

    masked: int
    supervised: int
    labels: Tensor
    version: int

    @classmethod
    def of(cls, labels: Tensor) -> _Counts | None:
        """Count labels on a CPU; None if a change of them cannot be noticed, or if reading them is a host sync."""
        if labels.is_inference() or not _plain.readable_without_sync(labels):
            return None
        return cls(int((labels >= MASKED).sum()), int((labels != IGNORE).sum()), labels, labels._version)

    def moved(self, labels: Any) -> _Counts | None:
        """Return the counts of a copy of the labels on any device; None if a change of the copy cannot be noticed."""
        if not isinstance(labels, Tensor) or labels.is_inference():
            return None
        return self._replace(labels=labels, version=labels._version)

    def hold_for(self, labels: object) -> bool:
        """Return True if ``labels`` is the counted tensor, unmodified since."""
        return labels is self.labels and self.labels._version == self.version


class _CountedBatch(dict[str, Any]):
    """Batch whose labels are counted on the CPU when it moves to another device, so that no loss has to count them.

    The counts are not an entry of the batch, because models, wrappers and dispatchers accept tensors only.
    """

    _counts: _Counts | None = None

    @property
    def counts(self) -> tuple[int, int] | None:
        """Numbers of masked and of supervised labels; None if counting them takes a host sync."""
        counts = _counts_of(self)
        return None if counts is None else counts[:2]

    def to(self, *args: Any, **kwargs: Any) -> _CountedBatch:
        """Call ``to`` of every tensor; used by ``accelerate`` to move a batch."""
        moved = self._mapped(lambda t: t.to(*args, **kwargs))
        counts = _counts_of(self)
        moved._counts = None if counts is None else counts.moved(moved["labels"])
        return moved

    def pin_memory(self) -> _CountedBatch:
        """Pin every tensor; used by ``DataLoader`` to pin a batch."""
        return self._mapped(Tensor.pin_memory)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> _CountedBatch:
        return type(self)({k: function(v) if isinstance(v, Tensor) else v for k, v in self.items()})


def _counts_of(batch: Mapping[str, Any]) -> _Counts | None:
    """Return the counts of the labels as they are now; None if that takes a host sync."""
    labels, counts = batch.get("labels"), getattr(batch, "_counts", None)
    if not isinstance(labels, Tensor):
        return None
    now = _Counts.of(labels)  # first, because torch does not notice an edit through NumPy or .data
    return counts if now is None and counts is not None and counts.hold_for(labels) else now


class MaskedDiffusionCollator:
    """Collate samples into a batch of corrupted tokens, with the labels of :func:`pack_labels`.

    **Packed documents.** If the batch of ``collate`` has ``segment_ids``, each document of a row has a noise level of
    its own, provided that ``corrupt`` takes ``segment_ids``, as ``corrupt_uniform`` does, and no ``block_size`` is
    given. Other routines draw one level per row.

    **Noise.** Each row is corrupted under a separate seed. Without ``seed_field`` the seeds are drawn and mixed with
    ``rank``. A process that loads the data itself draws seeds from torch's default generator. A worker of a
    ``DataLoader`` draws seeds from a generator that is seeded like the worker. No two rows, collators, ranks, workers
    or epochs share their noise. An equal ``manual_seed`` reproduces the noise, and so does a restored generator state.
    A ``Trainer`` that resumes within an epoch draws a batch before it restores the state, so its noise differs from an
    uninterrupted run. Workers of torchdata's ``StatefulDataLoader`` that resume within an epoch draw the noise of its
    start again, for the samples that are left.

    With ``seed_field`` the noise of a sample depends only on its seed, the epoch (:meth:`set_epoch`) and the length of
    the batch, on any rank and worker. A resumed run is then bit-identical to an uninterrupted one.

    The evaluation of :class:`MaskedDiffusionTrainerMixin` seeds each sample by its seed in epoch 0, or by its tokens.

    Args:
        mask_token_id: id of the MASK token.
        collate: function that collates the samples, one row per sample, and returns a dict with ``input_ids``,
            ``loss_mask`` and ``attention_mask``; None: ``DLLMCollator()``, which pads with token 0.
        corrupt: corruption routine that masks, such as :func:`dllm_kernels.corrupt_uniform`.
        seed_field: field of the samples with an int64 seed, different in each sample. None: seeds are drawn.
        rank: separates the noise of processes with equal seeds. Processes that load the same samples (tensor
            parallelism) must have equal ranks, which the mixin ensures. None: the rank in the process group, otherwise
            the environment variable ``RANK``, otherwise 0.
        level: sampler of noise levels, such as ``functools.partial(sample_level, method="stratified", low=1e-3)``. It
            is called with the number of rows and ``seeds=`` or ``generator=``, and its result is passed to ``corrupt``.
            None: ``corrupt`` draws the levels. If the sampler couples the rows, the noise of a sample depends on its
            batch. For packed documents it is called with the number of rows times the largest number of documents in a
            row.
        attend_supervised: True to set the attention mask ``[B, L]`` to 1 at supervised positions. A model cannot learn
            to predict padding, such as the end of a response, from positions that no position attends to. False:
            the attention mask of ``collate`` is returned unchanged.
        shift: True if row i of the model predicts token i + 1: the labels omit the first token of each packed document,
            which no row of the same document predicts. The mixin sets it.
        **options: passed on to ``corrupt`` (``eps``, ``block_size``, ...). A ``generator`` among them is used directly:
            seed it differently on each rank, and use no workers, because each would hold a copy of it. ``seeds`` among
            them gives every batch the same noise.

    Raises:
        TypeError: ``mask_token_id`` or ``rank`` is not an int, ``seed_field`` is not a str, ``collate``, ``corrupt`` or
            ``level`` is not a function, ``attend_supervised`` or ``shift`` is not a bool, or ``corrupt`` does not take
            one of the options.
        ValueError: ``mask_token_id`` is negative, it or ``rank`` has more than 64 bits, ``corrupt`` takes no MASK
            token, or ``seeds`` and ``seed_field`` are both given.
    """

    def __init__(
        self, mask_token_id: int, collate: Callable[[Sequence[Mapping[str, Any]]], dict[str, Tensor]] | None = None,
        corrupt: Corruption = corrupt_uniform, *, seed_field: str | None = None, rank: int | None = None,
        level: Callable[..., Tensor] | None = None, attend_supervised: bool = True, shift: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        _check_corrupt(corrupt, options)
        checked_mask_id(mask_token_id, torch.empty(0, dtype=torch.int64, device="cpu"))
        for name, function in (("collate", collate), ("level", level)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function or None, got {_checks.type_name(function)}")
        if not isinstance(seed_field, str | None):
            raise TypeError(f"seed_field must be a str or None, got {_checks.type_name(seed_field)}")
        if options.get("seeds") is None:
            options.pop("seeds", None)
        elif seed_field is not None:
            raise ValueError("seeds must be None with a seed_field, because it would replace the seeds of the samples")
        self.mask_token_id, self.collate = mask_token_id, DLLMCollator() if collate is None else collate
        self.corrupt, self.seed_field, self.level, self.options = corrupt, seed_field, level, options
        self.rank = None if rank is None else _checks.checked_int64("rank", rank)
        self.attend_supervised = _checks.checked_bool("attend_supervised", attend_supervised)
        self.shift, self._seeded_by_tokens = _checks.checked_bool("shift", shift), False
        self._epoch = _shared(0)
        self._parent: tuple[int, int] | None = None  # in a spawned process: id and rank of the process that started it

    def set_epoch(self, epoch: int) -> None:
        """Change the noise of samples with a ``seed_field``: call it before each epoch, like a sampler's ``set_epoch``.

        The mixin calls it for training batches. In epoch 0, the first training epoch and the epoch of evaluation, the
        seed of a sample is used unchanged. Running workers of a ``DataLoader`` see the new epoch. Copies of the
        collator (``copy``, ``pickle``) do not: a copy starts in the epoch of its original and counts epochs separately.

        Raises:
            TypeError: ``epoch`` is not an int.
            ValueError: ``epoch`` has more than 64 bits.
        """
        self._epoch.fill_(_checks.checked_int64("epoch", epoch))

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate and corrupt samples.

        Args:
            samples: dicts with ``input_ids``, ``loss_mask`` and ``attention_mask``, and of packed documents
                ``position_ids`` and ``segment_ids``, as :class:`dllm_kernels.DLLMCollator` expects.

        Returns:
            ``input_ids``, corrupted, ``attention_mask`` and ``labels``, each int64 ``[B, L]``, and ``position_ids``,
            ``segment_ids`` and ``token_type_ids`` if ``collate`` returns them. The dict counts its labels when ``to``
            moves it to a GPU, which spares the mixin a host sync per step.

        Raises:
            TypeError: the samples are not a list of dicts, a seed is not an int, or ``collate`` returned no dict.
            ValueError: a sample lacks a field, a seed has more than 64 bits, ``collate`` returned no batch with a row
                per sample, or an additive attention mask, or ``corrupt`` did not return three values.
        """
        samples = checked_samples("samples", samples)
        for field in ("loss_mask", *filter(None, [self.seed_field])):
            if (lacking := next((sample for sample in samples if field not in sample), None)) is not None:
                how = f"; {FROM_LABELS}" if field == "loss_mask" else ""
                raise ValueError(
                    f"every sample must have a field {field!r}, got {', '.join(map(str, lacking)) or 'none'}{how}; if "
                    "the data has it, a Trainer drops it unless TrainingArguments(remove_unused_columns=False)"
                )
        batch = self.collate(samples)
        _check_collated(batch, len(samples))
        ids, loss_mask = batch["input_ids"], batch["loss_mask"]
        drawn = {"seeds": self._seeds(samples, batch), **self.options}
        if self._seeded_by_tokens:
            drawn.pop("generator", None)
        segments, level = batch.get("segment_ids"), self.level
        if segments is not None and drawn.get("block_size") is None and "segment_ids" in _parameters_of(self.corrupt):
            drawn["segment_ids"] = segments
            level = level and functools.partial(_by_document, level, segments)
        if level is not None:
            drawn["level"] = level(len(ids), seeds=drawn["seeds"], generator=drawn.get("generator"))
        corrupted: Any = self.corrupt(ids, loss_mask, self.mask_token_id, **drawn)
        if not isinstance(corrupted, Sequence) or len(corrupted) != 3:
            several = isinstance(corrupted, Sequence)
            got = f"{len(corrupted)} values" if several else _checks.type_name(corrupted)
            raise ValueError(f"corrupt must return (noisy_input_ids, noise_mask, p_mask), got {got}")
        noisy, noise, p = corrupted
        predicted = loss_mask * next_token_mask(segments) if self.shift and segments is not None else loss_mask
        labels, attention = pack_labels(ids, predicted, noise, p), batch["attention_mask"]
        if self.attend_supervised and attention.shape == loss_mask.shape:
            _checks.check_mask_values("the attention_mask that collate returns", attention)
            attention = attention.masked_fill((attention == 0) & (loss_mask != 0), 1)
        others = {name: batch[name] for name in PASSED_ON if name in batch}
        return _CountedBatch(input_ids=noisy, attention_mask=attention, labels=labels, **others)

    def _seeds(self, samples: Sequence[Mapping[str, Any]], batch: Mapping[str, Tensor]) -> Tensor | None:
        if self.seed_field is not None:
            values = [_seed(i, self.seed_field, sample[self.seed_field]) for i, sample in enumerate(samples)]
            seeds = torch.tensor(values, dtype=torch.int64, device="cpu")
            return seeds + self._epoch * SEED_STRIDE
        if self._seeded_by_tokens:
            return _seeds_of_tokens(batch)
        if self.options.get("generator") is not None:
            return None
        drawn = torch.empty(len(samples), dtype=torch.int64, device="cpu").random_(generator=_seed_generator())
        return drawn + torch.tensor(self._rank(), device="cpu") * SEED_STRIDE

    def _rank(self) -> int:
        """Return the rank of this process, or of the process that spawned this worker, which has no process group."""
        if self.rank is not None:
            return self.rank
        parent = multiprocessing.parent_process()
        if self._parent is not None and torch.utils.data.get_worker_info() is not None and parent is not None:
            started_by, rank = self._parent
            if parent.pid == started_by:  # otherwise the collator was sent to the process that forked this worker
                return rank
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", "0"))

    def __copy__(self) -> MaskedDiffusionCollator:
        """Copy the collator; the copy stores its epoch in separate shared memory."""
        other = type(self).__new__(type(self))
        vars(other).update(vars(self), _epoch=_shared(int(self._epoch)))
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes; if a process is being spawned, also the rank of this one."""
        spawning = multiprocessing.context.get_spawning_popen() is not None
        return vars(self) | ({"_parent": (os.getpid(), self._rank())} if spawning else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a deep copy or a pickle, with the epoch in shared memory (already shared in a spawned worker)."""
        vars(self).update(state)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]

    def _changed_copy(self, **changes: Any) -> MaskedDiffusionCollator:
        """Return a changed copy in epoch 0."""
        other = copy.copy(self)
        vars(other).update(changes)
        other.set_epoch(0)
        return other


# In a worker: its seed and a generator with this seed, shared by all collators, whose noise would otherwise be equal.
_of_worker: tuple[int, torch.Generator] | None = None


def _seed_generator() -> torch.Generator | None:
    """Return None (the default generator), or in a worker of a ``DataLoader`` a generator with the worker's seed.

    Processes that load the same samples have workers with equal seeds.
    """
    global _of_worker
    worker = torch.utils.data.get_worker_info()
    if worker is None:
        return None
    if _of_worker is None or _of_worker[0] != worker.seed:
        _of_worker = worker.seed, torch.Generator("cpu").manual_seed(worker.seed)
    return _of_worker[1]


def _check_collated(batch: Any, rows: int) -> None:
    """Raise unless ``collate`` returned a batch with one row per sample, because noise is drawn by row."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"collate must return a dict, got {_checks.type_name(batch)}")
    missing = [name for name in ("input_ids", "loss_mask", "attention_mask") if name not in batch]
    if missing:
        raise ValueError(f"collate must return {', '.join(missing)}, got {', '.join(batch) or 'nothing'}")
    if len(batch["input_ids"]) != rows:
        raise ValueError(f"collate must return one row per sample, {rows}, got {len(batch['input_ids'])}")


def _check_corrupt(corrupt: Corruption, options: Mapping[str, Any]) -> None:
    """Raise if ``corrupt`` does not take MASK, but a vocabulary size, as its third parameter, or not the options."""
    if not callable(corrupt):
        raise TypeError(f"corrupt must be a function, got {_checks.type_name(corrupt)}")
    if _parameters_of(corrupt)[2:3] == ["vocab_size"]:
        name = getattr(corrupt, "__name__", _checks.type_name(corrupt))
        raise ValueError(
            f"corrupt must take the token that masks as its third argument, got {name}, which takes vocab_size"
        )
    try:
        inspect.signature(corrupt).bind_partial(**options)
    except TypeError as error:
        raise TypeError(f"corrupt must take the options of the collator, but it {error}") from None
    except ValueError:  # a builtin has no signature
        pass


def _parameters_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters of a function, in order; none for builtins without a signature."""
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:
        return []


def _by_document(
    level: Callable[..., Tensor], segment_ids: Tensor, B: int, *, seeds: Tensor | None, **sources: Any
) -> Tensor:
    """Draw a level for each document of each row, ``[B, L]``: column j belongs to the j-th document of a row."""
    columns = max([1, *(len(row[row >= 0].unique()) for row in segment_ids)])
    if seeds is not None:
        seeds = child_seeds(seeds, columns).flatten()
    levels = level(B * columns, seeds=seeds, **sources)
    if levels.shape[0] != B * columns:
        raise ValueError(f"level must return as many levels as asked for, {B * columns}, got {levels.shape[0]}")
    return F.pad(levels.reshape(B, columns), (0, segment_ids.shape[1] - columns))


def _seed(i: int, field: str, value: Any) -> int:
    """Return the seed of sample i, an integer of Python, NumPy or torch, as an int."""
    name = f"sample {i}, field {field!r}"
    try:
        seed = value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {_checks.type_name(value)}") from None
    return _checks.checked_int64(name, seed)


def _seeds_of_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """Hash tokens and masks of each row, without the padding behind; equal rows of a batch get different seeds."""
    seen: dict[int, int] = {}
    seeds, repeats = list[int](), list[int]()
    ids, supervised, attention = batch["input_ids"].long(), batch["loss_mask"] != 0, batch["attention_mask"]
    used = supervised | (attention != 0) if attention.shape == ids.shape else torch.ones_like(supervised)
    for row in zip(ids.cpu(), supervised.long().cpu(), used.cpu(), strict=True):
        positions = row[2].nonzero()
        end = int(positions[-1]) + 1 if len(positions) else 0
        content = torch.stack(row[:2])[:, :end].contiguous().numpy().tobytes()
        seed = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
        seeds.append(seed)
        repeats.append(seen.get(seed, 0))
        seen[seed] = repeats[-1] + 1
    first, copies = (torch.tensor(x, dtype=torch.int64, device="cpu") for x in (seeds, repeats))
    return first + copies * SEED_STRIDE


def _shared(epoch: int) -> Tensor:
    """Store the epoch in shared memory, so that persistent workers of a ``DataLoader`` see it change."""
    shared = torch.tensor(epoch, dtype=torch.int64, device="cpu")
    shared.share_memory_()  # type: ignore[no-untyped-call]
    return shared


def mdlm_loss_func(
    outputs: Any, labels: Tensor, num_items_in_batch: Count = None, *, loss: Loss | None = None, shift: bool = False
) -> Tensor:
    """Compute the masked-diffusion loss from logits, as ``compute_loss_func`` of a plain ``Trainer``, for any head.

    For another loss use ``compute_loss_func=functools.partial(mdlm_loss_func, loss=...)``.

    Unlike the mixin, it does not set the epoch: if the samples have seeds, a callback must pass each epoch to the
    collator's ``set_epoch``. Evaluation without a ``seed_field`` draws new noise at each call. A causal model is not
    detected. For the class of a causal model, the ``Trainer`` counts labels from position 1 on, so it misses a
    supervised first token, and without ``shift`` the loss is too large by this share.

    Args:
        outputs: output of the model, with ``logits`` ``[B, L, V]``, or a tuple whose first element is the logits.
        labels: labels of :class:`MaskedDiffusionCollator`.
        num_items_in_batch: divides the sum: the supervised tokens of all micro-batches and ranks; None: of this call.
        loss: as in :class:`MaskedDiffusionTrainerMixin`, except ``SCDDLoss``. It needs the noisy tokens, which a
            ``Trainer`` does not pass on.
        shift: as in :class:`MaskedDiffusionTrainerMixin`.

    Returns:
        0-d loss.

    Raises:
        TypeError: ``loss`` is neither a loss nor a function, or returns no tensor.
        ValueError: ``loss`` needs arguments that labels do not hold, or returns weights of another shape or with a
            gradient; on a CPU, a label is not packed (on a GPU, the loss is then NaN).
    """
    shift = _checks.checked_bool("shift", shift)
    return _LossCall.of(_checked_loss(loss), labels, num_items_in_batch, shift=shift).compute(returned_logits(outputs))


class _LossCall(NamedTuple):
    """A loss with its arguments except the model output."""

    loss: Loss
    masks: tuple[Tensor, Tensor, Tensor, Tensor]
    num_tokens: int | Tensor
    noisy_input_ids: Tensor | None = None
    counts: _Counts | None = None

    @classmethod
    def of(
        cls, loss: Loss, labels: Tensor, num_items_in_batch: Count, *,
        noisy_input_ids: Tensor | None = None, shift: bool = False, counts: _Counts | None = None,
    ) -> _LossCall:  # fmt: skip
        """Unpack the labels and shift them if row i predicts token i + 1."""
        if _shifts(loss):  # the loss shifts what it is given, and token 0 is not counted
            labels = F.pad(labels[:, 1:], (min(1, labels.shape[1]), 0), value=IGNORE)
        elif shift:
            labels = shift_left(labels, IGNORE)
            noisy_input_ids = None if noisy_input_ids is None else noisy_input_ids.roll(-1, 1)
        _checks.check_total("num_items_in_batch", num_items_in_batch)
        targets, noise, p, supervised = unpack_labels(labels)
        if isinstance(loss, SCDDLoss) and p.numel():  # SCDDLoss reads the time of a sequence in the first column
            p = torch.where(supervised, p, p.amax(1, keepdim=True))
        count = supervised.sum() if num_items_in_batch is None else num_items_in_batch
        return cls(loss, (targets, noise, p, supervised), count, noisy_input_ids, counts)

    def compute(self, logits: Logits) -> Tensor:
        """Compute the loss of logits ``[B, L, V]``, stored or made by a head."""
        if isinstance(logits, LinearLogits):
            logits = replaced(logits, num_active=self._num_active())
        if not isinstance(self.loss, DiffusionLoss):
            return weighted_nll(logits, self.masks[0], self._weights()).loss
        options: dict[str, Any] = {"num_diffusion_tokens": self.num_tokens, "noisy_input_ids": self.noisy_input_ids}
        loss: Tensor = self.loss(logits, *self.masks, **options).total_loss
        return loss

    def _num_active(self) -> int | None:
        """Return an upper bound on the number of rows of nonzero weight, or None.

        MDLM weights masked tokens only, other losses supervised tokens only. None in a compiled step, because a value
        that changes with every batch would recompile it. None for derived classes, because they may weight other rows.
        """
        if torch.compiler.is_compiling() or self.counts is None:  # in this order: a count must not become a guard
            return None
        if type(self.loss) is MDLMCrossEntropyLoss:
            return self.counts.masked
        weights_supervised = type(self.loss) in (BlockDiffusionCrossEntropyLoss, SCDDLoss)
        return self.counts.supervised if weights_supervised or not isinstance(self.loss, DiffusionLoss) else None

    def _weights(self) -> Tensor:
        """Return the weights of the function divided by the count, 0 at unsupervised positions."""
        targets, *_, supervised = self.masks
        weights: Any = self.loss(*self.masks)
        _checks.check_weights(RETURNED_WEIGHTS, weights, targets.shape, "that of the labels")
        _checks.check_constant(RETURNED_WEIGHTS, weights)
        weights = weights.to(accum_dtype(weights.dtype))
        return divide(weights.masked_fill(~supervised, 0.0), self.num_tokens)


def _checked_loss(loss: Any) -> Loss:
    """Return the loss, :class:`MDLMCrossEntropyLoss` for None; raise if it is not a loss or takes other arguments."""
    if loss is None:
        return MDLMCrossEntropyLoss()
    if isinstance(loss, type) or not callable(loss):
        got = f"the class {loss.__name__}" if isinstance(loss, type) else _checks.type_name(loss)
        raise TypeError(f"loss must be a loss or a function that returns row weights, got {got}")
    inner = getattr(loss, "_orig_mod", getattr(loss, "func", None))  # of torch.compile, of functools.partial
    if isinstance(inner, TransformedLoss):
        got = f"{_checks.type_name(loss)} of {_checks.type_name(inner)}"
        raise TypeError(f"loss must be a loss itself, got {got}; compile the model, which compiles the loss with it")
    if isinstance(loss, TransformedLoss) and not isinstance(loss, DiffusionLoss):
        name = _checks.type_name(loss)
        raise ValueError(f"loss must take target_ids, noise_mask, p_mask and loss_mask, got {name}, which takes others")
    return loss  # type: ignore[no-any-return]


def _shifts(loss: Loss) -> bool:
    """Return True if the loss itself shifts the targets, because it was constructed with ``shift=True``."""
    return isinstance(loss, DiffusionLoss) and _checks.checked_bool("shift", loss.shift)


@contextlib.contextmanager
def loss_in_head(model: nn.Module, loss: Callable[..., Tensor], advice: str = FROM_LOGITS) -> Iterator[None]:
    """Make the LM head of the model return ``loss(hidden, weight, bias)`` in place of logits within the context.

    The model must return the output of its head unchanged, as ``logits``: no scale, bias or soft cap. The caller checks
    that.

    Args:
        model: model with ``get_output_embeddings()`` or a module named ``lm_head``; may be wrapped by DDP, FSDP.
        loss: takes hidden states, the head's weight ``[V, D]`` and its bias ``[V]`` or None; returns the loss, 0-d. It
            also takes ``extra=(u, U)``, the low-rank part of the head, which is given if LoRA adapters of PEFT are
            active on it.
        advice: end of the error message: the alternative to suggest.

    Raises:
        ValueError: the head is not an ``nn.Linear`` with a plain weight, or PEFT's LoRA, trained copy or trained rows
            of one; has another ``forward``, such as the forward of another adapter; or has hooks other than sharding
            hooks.
    """

    def compute(logits: LinearLogits) -> Tensor:
        extra = {} if logits.extra is None else {"extra": logits.extra}
        return loss(logits.hidden, logits.weight, logits.bias, **extra)

    with computed_in_head(head_module(model), compute, advice):
        yield


class _LossOutput(HeadOutput):
    """Loss that the LM head returned in place of logits."""

    advice = FROM_LOGITS


class MaskedDiffusionTrainerMixin:
    r"""Masked-diffusion loss with a fused LM head; put it before ``transformers.Trainer`` among the base classes.

    .. math:: \text{loss} = \frac{1}{N} \sum_{i\,\in\,\text{masked}} \frac{\text{nll}_i}{p_i}

    N is the number of supervised tokens of all micro-batches, and of all ranks with ``average_tokens_across_devices``.
    The batches come from :class:`MaskedDiffusionCollator`. Evaluation without metrics is fused too. If predictions are
    requested, the logits are materialized, and ``compute_metrics`` receives the packed labels:
    ``unpack_labels(torch.as_tensor(prediction.label_ids))[0]`` are the tokens.

    ``nn.DataParallel`` (start one process per GPU instead) and sequences split over processes are not supported.
    Auxiliary terms of the model's own loss (such as router balance) are not added. A model that casts its logits
    has the loss and the gradients of the uncast ones.

    Args:
        *args: arguments of the ``Trainer``.
        loss: the loss; None: :class:`dllm_kernels.MDLMCrossEntropyLoss`, the equation above. An instance of any loss
            with the same signature: :class:`dllm_kernels.BlockDiffusionCrossEntropyLoss` for random-token corruption,
            :class:`dllm_kernels.SCDDLoss` for MASK and random-token noise (drawn by ``corrupt`` of the collator), or a
            derived class. Or a function of ``target_ids``, ``noise_mask``, ``p_mask`` and ``loss_mask``, each
            ``[B, L]``, that returns the weight of each row's NLL before the division by N, ``[B, L]``. ``p_mask`` is
            valid at every supervised position, masked or not. The weight of an unsupervised row is always replaced by
            0. The labels hold no AR mask, so a ``HybridDiffusionLLMLoss`` has its diffusion part only.
        logits_dtype: torch.float32 keeps the logits of float16 and bfloat16 operands in float32; None: the dtype of the
            operands. Not used if the model itself computes the logits.
        shift: True if row i of the logits predicts token i + 1 (Dream, DiffuCoder, Fast-dLLM v2). Targets and masks are
            shifted, never logits. Token 0 is not predicted, and N does not count it. A ``loss`` that was constructed
            with ``shift=True`` has the same effect, and both together shift once.
        allow_causal: True to train a model whose attention is causal. False: such a model is an error in the first
            step, because a masked diffusion model predicts each token from both sides. The test takes four forward
            passes without a gradient, without the LM head, and a host sync.
        seed_evaluation: True: evaluation and prediction draw the same noise at each call, a function of the samples
            (of their ``seed_field``, or else of their tokens and masks) and of the length of their batch. They neither
            use nor change the state of the default generator. False: without a ``seed_field``, they draw new noise.
        **kwargs: keyword arguments of the ``Trainer``.

    Raises:
        TypeError: ``loss`` is neither a loss nor a function, ``logits_dtype`` is not a dtype, or an option is not a
            bool. Also if a derived class has the mixin after the ``Trainer`` among its bases.
        ValueError: ``loss`` needs arguments that labels do not hold, a ``compute_loss_func`` or a
            ``label_smoothing_factor`` is given, several GPUs are visible to one process, or sequences are split over
            processes. Also if the LM head is neither a plain ``nn.Linear`` nor PEFT's LoRA, trained copy
            (``modules_to_save``) or trained rows (``trainable_token_indices``) of one. Also if, in any step, the model
            changes the output of its head by an operation other than a cast, a copy or a view of the same shape. In the
            first step, if the model is causal, or if the labels are missing or not packed.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise TypeError if the mixin is after the ``Trainer`` among the bases, because it would then do nothing."""
        super().__init_subclass__(**kwargs)
        check_before_host(MaskedDiffusionTrainerMixin, cls, "compute_loss")

    def __init__(
        self, *args: Any, loss: Loss | None = None, logits_dtype: torch.dtype | None = None, shift: bool = False,
        allow_causal: bool = False, seed_evaluation: bool = True, **kwargs: Any,
    ) -> None:  # fmt: skip
        self._loss = _checked_loss(loss)
        self._logits_fields = {"logits_dtype": _checks.checked_logits_dtype(logits_dtype)}
        self._shift = _checks.checked_bool("shift", shift) or _shifts(self._loss)
        self._probes = 0 if _checks.checked_bool("allow_causal", allow_causal) else PROBES
        self._seed_evaluation = _checks.checked_bool("seed_evaluation", seed_evaluation)
        super().__init__(*args, **kwargs)
        self.args: Any
        self.accelerator: Any
        if self.args.n_gpu > 1:
            raise ValueError(f"one process must see one GPU, got {self.args.n_gpu}: start it with torchrun")
        if self.args.label_smoothing_factor:
            smoothing = self.args.label_smoothing_factor
            raise ValueError(
                f"label_smoothing_factor must be 0, got {smoothing}: the masked-diffusion loss has no label smoothing"
            )
        # Context parallelism makes the attention causal and sequence parallelism uses the model's loss, both without an
        # error.
        split = getattr(self.accelerator, "parallelism_config", None)
        cp_size, sp_size = (getattr(split, name, 1) for name in ("cp_size", "sp_size"))
        if (cp_size, sp_size) != (1, 1):
            raise ValueError(
                f"parallelism_config must have cp_size and sp_size 1, got {cp_size} and {sp_size}: the Trainer would "
                "not compute the masked-diffusion loss of whole sequences"
            )
        self._loss_shifts_labels = self._shift  # the Trainer counts label 0 unless it is True, for any model
        self._wants_logits = False
        self._in_head: list[Tensor] | None = None
        self._noisy_input_ids: Tensor | None = None
        self._counts: _Counts | None = None
        self._seen_labels = False
        self._follow_epochs()

    # As an attribute of the instance, the method would make the trainer refer to itself. Deleted, it would keep its
    # model in memory until Python collects garbage, and then wait 5 seconds for each persistent data worker.
    @property
    def compute_loss_func(self) -> Callable[..., Tensor]:
        """The loss of the model's outputs, which the ``Trainer`` calls; no other one can be set."""
        return self._loss_of_outputs

    @compute_loss_func.setter
    def compute_loss_func(self, function: Callable[..., Tensor] | None) -> None:
        if function is not None:
            raise ValueError(
                "compute_loss_func must be None, because MaskedDiffusionTrainerMixin sets it; pass loss= instead"
            )

    def _follow_epochs(self) -> None:
        """Pass each epoch to the collator, and make ranks that load the same samples draw the same noise."""
        collator, tensor_parallel = getattr(self, "data_collator", None), getattr(self, "get_tp_size", lambda: 1)()
        if isinstance(collator, MaskedDiffusionCollator):
            if collator.rank is None and tensor_parallel > 1:
                self.data_collator: Any = collator._changed_copy(rank=self.args.process_index // tensor_parallel)
            if self._shift and not collator.shift:
                self.data_collator = self.data_collator._changed_copy(shift=True)
            self.add_callback(_epoch_callback(self))  # type: ignore[attr-defined]

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``Trainer.get_eval_dataloader`` with noise that is equal in every evaluation."""
        with self._noise_of_epoch_0():
            return super().get_eval_dataloader(*args, **kwargs)  # type: ignore[misc]

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``Trainer.get_test_dataloader`` with noise that is equal each time."""
        with self._noise_of_epoch_0():
            return super().get_test_dataloader(*args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``Trainer.evaluation_loop``, and leave the default generator of the CPU as it was."""
        with torch.random.fork_rng(devices=[], enabled=self._seed_evaluation):  # a DataLoader draws from it
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _noise_of_epoch_0(self) -> Iterator[None]:
        training = self.data_collator
        if isinstance(training, MaskedDiffusionCollator):
            self.data_collator = training._changed_copy(_seeded_by_tokens=self._seed_evaluation)
        try:
            yield
        finally:
            self.data_collator = training

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Count = None
    ) -> Any:
        """Call ``Trainer.compute_loss`` with an LM head that computes the loss."""
        compute: Any = super().compute_loss  # type: ignore[misc]
        self._noisy_input_ids = inputs.get("input_ids")
        self._check_first_steps(model, inputs)
        if self._wants_logits or "labels" not in inputs:
            return compute(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        loss_call = self._loss_call(inputs["labels"], num_items_in_batch)
        losses = list[Tensor]()

        def loss(logits: LinearLogits) -> Tensor:
            losses.append(loss_call.compute(replaced(logits, **self._logits_fields)))
            return losses[-1].as_subclass(_LossOutput)

        self._in_head = losses
        try:
            with computed_in_head(head_module(self.accelerator.unwrap_model(model)), loss, FROM_LOGITS):
                return compute(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        finally:
            self._in_head = None

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Call ``Trainer._prepare_inputs`` and keep the counts of the batch, which it drops."""
        if "loss_mask" in inputs and "labels" not in inputs:
            raise ValueError(
                "the batch must have labels, got loss_mask; pass data_collator=MaskedDiffusionCollator(mask_token_id, "
                "collate), where collate is the present collator, to corrupt the tokens"
            )
        prepared: dict[str, Any] = super()._prepare_inputs(inputs)  # type: ignore[misc]
        counts = _counts_of(inputs)
        self._counts = None if counts is None else counts.moved(prepared.get("labels"))
        return prepared

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """Call ``Trainer.prediction_step``, with logits unless ``prediction_loss_only``."""
        self._wants_logits = not prediction_loss_only
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        finally:
            self._wants_logits = False

    def _loss_of_outputs(self, outputs: Any, labels: Tensor, num_items_in_batch: Count = None) -> Tensor:
        if self._in_head is None:
            return self._loss_call(labels, num_items_in_batch).compute(returned_logits(outputs))
        return result_of_head(self._in_head, outputs, _LossOutput)

    def _loss_call(self, labels: Tensor, num_items_in_batch: Count) -> _LossCall:
        counts = self._counts if self._counts is not None and self._counts.hold_for(labels) else None
        noisy, shift = self._noisy_input_ids, self._shift
        return _LossCall.of(self._loss, labels, num_items_in_batch, noisy_input_ids=noisy, shift=shift, counts=counts)

    def _check_first_steps(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Raise on all ranks if the labels of any rank are not packed, or if the model is causal."""
        if "labels" not in inputs:
            return
        labels, probes = inputs["labels"], self._probes > 0 and torch.is_grad_enabled()
        if (self._seen_labels and not probes) or not _plain.has_values(labels):
            return
        dependence: tuple[bool | Tensor, bool | Tensor] = True, True
        if probes and isinstance(ids := inputs.get("input_ids"), Tensor) and ids.dim() == 2:
            dependence = _attention.dependence(model, inputs, self._hidden_of)
        unpacked, later, earlier = _attention.on_any_rank(labels.device, _not_packed(labels).any(), *dependence)
        if unpacked:
            _refuse_labels("token ids, or other labels that are not packed")
        if earlier and not later:
            config = getattr(self.accelerator.unwrap_model(model), "config", None)
            version = getattr(sys.modules.get("transformers"), "__version__", "not imported")
            raise ValueError(
                "the model must attend to later tokens, got a causal model, in which no position depends on the tokens "
                f"behind it; config.is_causal is {getattr(config, 'is_causal', 'not set')}, and False makes a decoder "
                f"attend to all tokens from transformers {BIDIRECTIONAL_SINCE} on (here {version}); otherwise let "
                "collate return an attention_mask [B, 1, L, L] of zeros, or pass allow_causal=True to train the model "
                "as it is"
            )
        self._seen_labels = True
        if probes:
            self._probes = 0 if later else self._probes - 1

    def _hidden_of(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor | None:
        """Return the input of the LM head in a call of the model; None if it does not call the head once."""
        hidden = list[Tensor]()

        def keep(logits: LinearLogits) -> Tensor:
            hidden.append(logits.hidden)
            return logits.hidden.new_zeros(()).as_subclass(_LossOutput)

        with computed_in_head(head_module(self.accelerator.unwrap_model(model)), keep, FROM_LOGITS):
            model(**inputs)
        return hidden[0] if len(hidden) == 1 else None


def _epoch_callback(trainer: Any) -> Any:
    """Build a callback that passes each epoch to the collator before its batches load, also after a resumption."""
    from transformers import TrainerCallback

    trainer_of = weakref.ref(trainer)  # the trainer holds the callback, and Python collects a class only as garbage

    class EpochCallback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.epoch = int(state.epoch or 0)

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.tell(self.epoch)
            self.epoch += 1

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.tell(0)

        def tell(self, epoch: int) -> None:
            collator = getattr(trainer_of(), "data_collator", None)
            if isinstance(collator, MaskedDiffusionCollator):  # the user may have replaced it
                collator.set_epoch(epoch)

    return EpochCallback()
