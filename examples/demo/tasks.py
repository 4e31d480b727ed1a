"""Tasks of the demo: model, batches and loss of each mode, with the reference loss and with ours.

The loss of a task takes a few tensors from the model (``outputs``): logits for mdlm, block and hybrid; hidden states
and the head for scdd, idlm, dflash, distill and mtp, where our losses never materialise the full logits. The training
loop cuts the autograd graph at these tensors, so that it can time the loss, forward and backward, separately.
"""
# ruff: noqa: D102  (the methods of a task are documented once, on Task)

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import reference
from examples.demo import sampler
from examples.demo.data import Corpus
from examples.demo.model import Draft, LanguageModel, MultiTokenModel, Size

Outputs = Sequence[torch.Tensor]
FILLED = 0.3  # fraction of the tokens that are masked for `Task.fill`


class Loss(NamedTuple):
    """A loss to minimise, and the counts that it returns.

    Attributes:
        total: the loss.
        hits: number of argmax matches at each offset of a block.
        rows: number of rows at each offset.
        accepted: mean number of tokens gained per check by a target model, by sampling and greedily.
    """

    total: torch.Tensor
    hits: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    accepted: torch.Tensor | None = None


class Batch(NamedTuple):
    """Clean ids ``[B, L]`` with the noise and further tensors that the task drew for them."""

    ids: torch.Tensor
    noisy: torch.Tensor
    noise_mask: torch.Tensor
    p_mask: torch.Tensor
    starts: torch.Tensor

    @property
    def supervised(self) -> torch.Tensor:
        """Mask of all positions."""
        return torch.ones_like(self.ids, dtype=torch.bool)


class Sample(NamedTuple):
    """Text to show: the prompt, the intermediate and final outputs of the model, and the true continuation."""

    prompt: str
    steps: list[str]
    text: str
    truth: str
    note: str = ""


class Filled(NamedTuple):
    """Held-out text with masked tokens, and the model's predictions of these tokens in one pass.

    Attributes:
        given: one of the texts, with a light shade for each masked token.
        text: ``given`` with the model's tokens, and a dark shade for each wrong token.
        tokens: number of masked tokens in all texts.
        right: fraction of the masked tokens that the model predicts correctly.
        frequent: fraction of the masked tokens that are the most frequent token of the training text.
    """

    given: str
    text: str
    tokens: int
    right: float
    frequent: float


class Task(ABC):
    """One mode of the demo. ``options`` are the command-line options, ``corpus`` the tokens."""

    #: Name of the loss in the demo's table, and its source.
    title = ""
    source = ""
    #: Additional training runs of the same model on the same batches with our losses: name -> objective. A mode with
    #: additional runs also lists "ours".
    objectives: ClassVar[dict[str, str]] = {}

    def __init__(self, options: argparse.Namespace, corpus: Corpus) -> None:
        self.options = options
        self.corpus = corpus
        self.device = torch.device(options.device)
        self.size = Size(options.width, options.layers, options.heads, corpus.vocab_size)

    def prepare(self, target: nn.Module) -> None:
        """Store the trained target model, for modes that use one."""
        raise NotImplementedError(f"{type(self).__name__} has no target model")

    @abstractmethod
    def model(self) -> nn.Module:
        """Build a new model."""

    @abstractmethod
    def batch(self, ids: torch.Tensor, seed: int) -> Batch:
        """Build the batch of one step, a function of the ids and the seed."""

    @abstractmethod
    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """Compute the input tensors of the loss."""

    @abstractmethod
    def reference(self, outputs: Outputs, batch: Batch) -> Loss:
        """Compute the plain loss."""

    @abstractmethod
    def ours(self, outputs: Outputs, batch: Batch) -> Loss:
        """Compute the loss of this package."""

    @abstractmethod
    def guess(self, batch: Batch, log_unigram: torch.Tensor) -> float:
        """Compute the unigram baseline: visible tokens are copied, the others are predicted by frequency."""

    @abstractmethod
    def sample(self, model: nn.Module, text: torch.Tensor) -> Sample:
        """Continue ``text`` ``[L]`` from its first part."""

    def fill(self, model: nn.Module, windows: torch.Tensor) -> Filled | None:
        """Predict masked tokens of held-out ``windows [N, L]``; None if the model does not predict single tokens."""
        return None

    def implementation(self, name: str) -> Callable[[Outputs, Batch], Loss]:
        """Return the loss function by name: "reference" or "ours"."""
        return {"reference": self.reference, "ours": self.ours}[name]

    @property
    def beside(self) -> list[str]:
        """Names of the additional training runs."""
        return [name for name in self.objectives if name != "ours"]

    def _split(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split the text into prompt and continuation, in whole blocks, within the training length."""
        new = max(self.options.length // 2 // self.options.block_size, 1) * self.options.block_size
        return text[: self.options.length - new], text[self.options.length - new : self.options.length]

    def _plain(self, ids: torch.Tensor) -> Batch:
        none = torch.zeros_like(ids, dtype=torch.bool)
        return Batch(ids, ids, none, torch.ones_like(ids, dtype=torch.float32), ids[:, :0])


def _nll_by_frequency(targets: torch.Tensor, log_unigram: torch.Tensor) -> torch.Tensor:
    return -log_unigram.to(targets.device)[targets]


class Diffusion(Task):
    """Masked diffusion with the 1/p weight (LLaDA): ``--mode mdlm``."""

    title = "MDLMCrossEntropyLoss"
    source = "Sahoo et al. 2024, arXiv:2406.07524; LLaDA, arXiv:2502.09992"

    def model(self) -> nn.Module:
        return LanguageModel(self.size)

    def batch(self, ids: torch.Tensor, seed: int) -> Batch:
        found = self._corrupt("corrupt_uniform", ids, seed, level=self._levels(len(ids), seed))
        return Batch(ids, *found, starts=ids[:, :0])

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        return (model(batch.noisy),)

    def reference(self, outputs: Outputs, batch: Batch) -> Loss:
        return Loss(reference.mdlm_loss(outputs[0], *self._masks(batch)))

    def ours(self, outputs: Outputs, batch: Batch) -> Loss:
        from dllm_kernels.losses import MDLMCrossEntropyLoss

        targets, noise, p, supervised, count = self._masks(batch)
        loss = MDLMCrossEntropyLoss(backend=self.options.backend)
        return Loss(loss(outputs[0], targets, noise, p, supervised, num_diffusion_tokens=count).total_loss)

    def guess(self, batch: Batch, log_unigram: torch.Tensor) -> float:
        nll = _nll_by_frequency(batch.ids, log_unigram)
        return float((nll * batch.noise_mask / batch.p_mask).sum() / batch.ids.numel())

    def sample(self, model: Any, text: torch.Tensor) -> Sample:
        prompt, truth = self._split(text)
        trace = sampler.denoise(
            model,
            prompt,
            len(truth),
            self.corpus.mask_id,
            block_size=self.options.block_size,
            steps=self.options.block_size,
            temperature=self.options.temperature,
            generator=torch.Generator(self.device).manual_seed(self.options.seed),
        )
        middle = [trace[len(trace) * part // 4] for part in (1, 2, 3)]
        texts = [self.corpus.decode(ids[len(prompt) :]) for ids in (*middle, trace[-1])]
        return Sample(self.corpus.decode(prompt.tolist()), texts[:-1], texts[-1], self.corpus.decode(truth.tolist()))

    def fill(self, model: nn.Module, windows: torch.Tensor) -> Filled | None:
        mask_id, generator = self.corpus.mask_id, torch.Generator().manual_seed(self.options.seed)
        masked = (torch.rand(windows.shape, generator=generator) < FILLED).to(windows.device)
        found = []
        for ids in torch.split(windows.masked_fill(masked, mask_id), self.options.batch):
            logits = self._logits(model, ids)
            found.append(logits.index_fill(-1, torch.tensor(mask_id, device=ids.device), -torch.inf).argmax(-1))
        right = torch.cat(found) == windows
        frequent = windows[masked] == int(self.corpus.log_unigram().argmax())
        shown, at = windows[len(windows) // 2], len(windows) // 2
        return Filled(
            self.corpus.decode(shown.masked_fill(masked[at], mask_id).tolist()),
            self.corpus.decode(shown.masked_fill(masked[at] & ~right[at], mask_id).tolist(), "\N{DARK SHADE}"),
            int(masked.sum()), float(right[masked].float().mean()), float(frequent.float().mean()),
        )  # fmt: skip

    def _logits(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(ids)
        return logits

    def _masks(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
        return batch.ids, batch.noise_mask, batch.p_mask, batch.supervised, batch.ids.numel()

    def _levels(self, B: int, seed: int) -> torch.Tensor:
        """Draw stratified levels of at least 0.001, so that batches do not differ in difficulty by the draw."""
        generator = torch.Generator().manual_seed(seed)
        if self.options.corruption == "ours":
            from dllm_kernels import sample_level

            levels = sample_level(B, method="stratified", low=1e-3, generator=generator)
        else:
            levels = reference.sample_level(B, "stratified", 1e-3, generator=generator).float()
        return levels.to(self.device)

    def _seeds(self, ids: torch.Tensor, seed: int) -> torch.Tensor:
        """Return one seed per row."""
        return seed * 1_000_003 + torch.arange(len(ids), device=self.device)

    def _corrupt(
        self, routine: str, ids: torch.Tensor, seed: int, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Corrupt with the named routine; ours draws per row from seeds, the reference draws from a generator."""
        supervised = torch.ones_like(ids, dtype=torch.bool)
        if self.options.corruption == "ours":
            from dllm_kernels import corruption

            seeds = self._seeds(ids, seed)
            found = getattr(corruption, routine)(ids, supervised, self.corpus.mask_id, seeds=seeds, **more)
        else:
            generator = torch.Generator(self.device).manual_seed(seed)
            plain = getattr(reference, routine)
            found = plain(ids, supervised, self.corpus.mask_id, generator=generator, **more)
        return found[0], found[1], found[2]


class Block(Diffusion):
    """Flat cross-entropy over the whole canvas, corrupted block by block: ``--mode block``."""

    title = "BlockDiffusionCrossEntropyLoss"
    source = "Austin et al. 2021 (D3PM), arXiv:2107.03006"

    def batch(self, ids: torch.Tensor, seed: int) -> Batch:
        found = self._corrupt("corrupt_blockwise", ids, seed, block_size=self.options.block_size)
        return Batch(ids, *found, starts=ids[:, :0])

    def reference(self, outputs: Outputs, batch: Batch) -> Loss:
        return Loss(reference.block_diffusion_loss(outputs[0], batch.ids, batch.supervised))

    def ours(self, outputs: Outputs, batch: Batch) -> Loss:
        from dllm_kernels.losses import BlockDiffusionCrossEntropyLoss

        loss = BlockDiffusionCrossEntropyLoss(backend=self.options.backend)
        masks = batch.noise_mask, batch.p_mask, batch.supervised
        return Loss(loss(outputs[0], batch.ids, *masks).total_loss)

    def guess(self, batch: Batch, log_unigram: torch.Tensor) -> float:
        nll = _nll_by_frequency(batch.ids, log_unigram)
        return float((nll * batch.noise_mask).sum() / batch.ids.numel())


class Hybrid(Diffusion):
    """Masked diffusion and next-token prediction in one model: ``--mode hybrid``."""

    title = "HybridDiffusionLLMLoss"
    source = "MDLM's loss and the next token's, as in Nemotron-Labs-Diffusion"

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        return model(batch.noisy), model(batch.ids, causal=True)

    def reference(self, outputs: Outputs, batch: Batch) -> Loss:
        targets, noise, p, supervised, count = self._masks(batch)
        both = reference.hybrid_loss(
            outputs[0],
            targets,
            noise,
            p,
            supervised,
            supervised,
            count,
            count,
            outputs[1],
            self.options.alpha,
        )
        return Loss(both[0])

    def ours(self, outputs: Outputs, batch: Batch) -> Loss:
        from dllm_kernels.losses import HybridDiffusionLLMLoss

        targets, noise, p, supervised, count = self._masks(batch)
        loss = HybridDiffusionLLMLoss(self.options.alpha, backend=self.options.backend)
        out = loss(outputs[0], targets, noise, p, supervised, supervised, count, count, outputs[1])
        return Loss(out.total_loss)

    def guess(self, batch: Batch, log_unigram: torch.Tensor) -> float:
        causal = _nll_by_frequency(batch.ids[:, 1:], log_unigram).sum() / batch.ids.numel()
        return float(self.options.alpha * super().guess(batch, log_unigram) + causal)


class Correcting(Diffusion):
    """Masked diffusion whose noise also contains wrong tokens (SCDD): ``--mode scdd``."""

    title = "SCDDLoss.forward_fused"
    source = "Self-Correcting Discrete Diffusion, openreview.net/forum?id=zQKlzKB6I9"
    STEPS = 16  # noise timesteps, equal to the sampler's steps per block
    SCHEDULE: ClassVar[dict[str, Any]] = {"max_ratio": 0.1, "gamma_shape": 1.0, "t_peak": 0.5}

    def batch(self, ids: torch.Tensor, seed: int) -> Batch:
        levels = self._levels(len(ids), seed)  # on the grid of the timesteps; t < 1, because t = 1 masks everything
        t = (levels * (self.STEPS - 1)).ceil().clamp(min=1) / self.STEPS
        noisy, noise = self._mixed(ids, seed, t)
        return Batch(ids, noisy, noise, t[:, None].expand(ids.shape).contiguous(), starts=ids[:, :0])

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        assert isinstance(model, LanguageModel)
        return model.hidden(batch.noisy), model.lm_head.weight

    def reference(self, outputs: Outputs, batch: Batch) -> Loss:
        return Loss(self._plain_loss(F.linear(*outputs), batch))

    def ours(self, outputs: Outputs, batch: Batch) -> Loss:
        from dllm_kernels.losses import SCDDLoss

        hidden, head = outputs
        masks = batch.noise_mask, batch.p_mask, batch.supervised
        loss = SCDDLoss(self.corpus.mask_id, self.STEPS, **self.SCHEDULE, backend=self.options.backend)
        return Loss(loss.forward_fused(hidden, head, batch.ids, *masks, noisy_input_ids=batch.noisy).total_loss)

    def guess(self, batch: Batch, log_unigram: torch.Tensor) -> float:
        """Compute the unigram baseline; a visible token is trusted with the probability that it is correct."""
        p, visible = log_unigram.to(batch.ids.device).exp(), batch.noisy != self.corpus.mask_id
        rho = reference.scdd_schedule(batch.p_mask, **self.SCHEDULE).rho * visible
        p = (1 - rho[..., None]) * p
        p.scatter_add_(2, batch.noisy[..., None], rho[..., None])
        return float(self._plain_loss(p.log(), batch))

    def _plain_loss(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        tokens = batch.ids, batch.p_mask, batch.supervised, batch.noisy, self.corpus.mask_id
        return reference.scdd_loss(logits, *tokens, num_timesteps=self.STEPS, **self.SCHEDULE)

    def _mixed(self, ids: torch.Tensor, seed: int, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Corrupt with the masses of the schedule at t; one in K uniform draws returns the clean token."""
        masses, K = reference.scdd_schedule(t, **self.SCHEDULE), self.size.vocab - 1
        probabilities: dict[str, Any] = {
            "mask_prob": masses.absorbed_mass,
            "uniform_prob": masses.uniform_mass * (K - 1) / K,
        }
        given = ids, torch.ones_like(ids, dtype=torch.bool), self.corpus.mask_id, self.size.vocab
        if self.options.corruption == "ours":
            from dllm_kernels import corrupt_mix

            return corrupt_mix(*given, **probabilities, seeds=self._seeds(ids, seed))
        generator = torch.Generator(self.device).manual_seed(seed)
        return reference.corrupt_mix(*given, **probabilities, generator=generator)


class Introspective(Diffusion):
    """A causal model that also fills blocks of masks, in one pass over a masked and a clean copy: ``--mode idlm``."""

    title = "IDLMLoss.forward_fused"
    source = "Introspective Diffusion Language Models, arXiv:2604.11035"
    CLEAN = 0.2

    def fill(self, model: nn.Module, windows: torch.Tensor) -> None:
        """Return None: the model fills blocks, not single tokens."""

    def batch(self, ids: torch.Tensor, seed: int) -> Batch:
        """Mask the whole answer, which is the second half of the text."""
        answer = (torch.arange(ids.shape[1], device=ids.device) >= ids.shape[1] // 2).expand(ids.shape)
        if self.options.corruption == "ours":
            from dllm_kernels import corrupt_all_masked

            noisy, noise, p = corrupt_all_masked(ids, answer, self.corpus.mask_id)
        else:
            noisy, noise, p = reference.corrupt_all_masked(ids, answer, self.corpus.mask_id)
        return Batch(ids, noisy, noise, p, starts=ids[:, :0])

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        assert isinstance(model, LanguageModel)
        blocks = torch.arange(batch.ids.shape[1], device=batch.ids.device) // self.options.draft_block
        return model.copies(batch.noisy, batch.ids, blocks), model.lm_head.weight

    def reference(self, outputs: Outputs, batch: Batch) -> Loss:
        masks = batch.noise_mask, batch.supervised
        return Loss(reference.idlm_loss(F.linear(*outputs), batch.ids, *masks, clean_loss_weight=self.CLEAN).total_loss)

    def ours(self, outputs: Outputs, batch: Batch) -> Loss:
        from dllm_kernels.losses import IDLMLoss

        hidden, head = outputs
        loss = IDLMLoss(self.CLEAN, backend=self.options.backend)
        masks, L = (batch.noise_mask, batch.supervised), batch.ids.shape[1]
        return Loss(loss.forward_fused(hidden, head, batch.ids, *masks, seq_len=L).total_loss)

    def guess(self, batch: Batch, log_unigram: torch.Tensor) -> float:
        scored = batch.noise_mask[:, 1:]
        nll = _nll_by_frequency(batch.ids[:, 1:], log_unigram)[scored]
        return float((1 + self.CLEAN) * nll.sum() / max(int(scored.sum()), 1))

    def sample(self, model: nn.Module, text: torch.Tensor) -> Sample:
        assert isinstance(model, LanguageModel)
        prompt, truth = self._split(text)
        room = self.options.draft_block

        def draft(ids: torch.Tensor) -> torch.Tensor:
            """Predict the next token from the clean copy and the following tokens from the appended masks."""
            masks = ids.new_full((1, room), self.corpus.mask_id)
            both = torch.cat([ids, masks], 1)
            blocks = (torch.arange(both.shape[1], device=ids.device) >= ids.shape[1]).long()
            logits = model.lm_head(model.copies(both, both, blocks))[0]
            logits[:, self.corpus.mask_id] = -torch.inf
            rows = torch.cat([logits[both.shape[1] + ids.shape[1] - 1, None], logits[ids.shape[1] : both.shape[1] - 1]])
            return rows.argmax(dim=-1)

        ids, gained = sampler.speculate(lambda ids: model(ids, causal=True), draft, prompt, max(len(truth) - room, 1))
        made = self.corpus.decode(ids[len(prompt) :])
        note = f"{sum(gained) / len(gained):.2f} tokens for each check by the model itself (1.00 token by token)"
        return Sample(self.corpus.decode(prompt.tolist()), [], made, self.corpus.decode(truth.tolist()), note)


class DFlash(Task):
    """A draft model that fills blocks from the hidden states of a frozen target: ``--mode dflash``."""

    title = "DFlashDecayLoss.forward_fused"
    source = "the DFlash paper, eq. 4"
    GAMMA = 4.0  # the value of the paper for blocks of 8

    def prepare(self, target: nn.Module) -> None:
        assert isinstance(target, LanguageModel)
        self.target = target.requires_grad_(False).eval()

    def model(self) -> nn.Module:
        layers = max(self.size.layers // 2, 1)
        return Draft(Size(self.size.width, layers, self.size.heads, self.size.vocab), self.options.draft_block)

    def batch(self, ids: torch.Tensor, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        last = ids.shape[1] - self.options.draft_block
        starts = torch.randint(1, last + 1, (len(ids), self.options.blocks), generator=generator)
        return self._plain(ids)._replace(starts=starts.to(ids.device))

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        with torch.no_grad():
            layers = self.target.features(batch.ids, causal=True)
            anchors = self.target.embedded(batch.ids.gather(1, batch.starts))
            further = self._further(layers)
        return model(anchors, batch.starts, self._chosen(layers)), self.target.lm_head.weight, *further

    def reference(self, outputs: Outputs, batch: Batch) -> Loss:
        hidden, head = outputs
        targets, mask, count = self._targets(batch)
        logits = F.linear(hidden, head)
        block = self.options.draft_block
        correct = reference.argmax_match(logits, targets)
        counts = reference.draft_accuracy_per_position(correct, mask, block)
        return Loss(reference.dflash_loss(logits, targets, mask, count, block, self.GAMMA), *counts)

    def ours(self, outputs: Outputs, batch: Batch) -> Loss:
        from dllm_kernels.losses import DFlashDecayLoss

        hidden, head = outputs
        targets, mask, count = self._targets(batch)
        loss = DFlashDecayLoss(self.GAMMA, use_fused_linear_ce=True, backend=self.options.backend)
        out = loss.forward_fused(hidden, head, targets, mask, count, self.options.draft_block)
        return Loss(out.total_loss, out.draft_correct_per_pos, out.draft_count_per_pos)

    def guess(self, batch: Batch, log_unigram: torch.Tensor) -> float:
        targets, _, count = self._targets(batch)
        nll = _nll_by_frequency(targets, log_unigram)
        decay = reference.decay_weights(targets.shape[1], self.options.draft_block, self.GAMMA)
        return float((nll * decay.to(nll.device)).sum() / count)

    def sample(self, model: nn.Module, text: torch.Tensor) -> Sample:
        prompt, truth = self._split(text)
        room = self.options.draft_block

        def draft(ids: torch.Tensor) -> torch.Tensor:
            anchor = torch.tensor([[ids.shape[1] - 1]], device=ids.device)
            hidden = model(self.target.embedded(ids[:, -1:]), anchor, self._features(ids))
            found: torch.Tensor = self.target.lm_head(hidden)[0].argmax(dim=-1)
            return found

        ids, gained = sampler.speculate(
            lambda ids: self.target(ids, causal=True), draft, prompt, max(len(truth) - room, 1)
        )
        made = self.corpus.decode(ids[len(prompt) :])
        note = f"{sum(gained) / len(gained):.2f} tokens for each check by the target (1.00 without a draft)"
        return Sample(self.corpus.decode(prompt.tolist()), [], made, self.corpus.decode(truth.tolist()), note)

    def _features(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the target features of a text, the input of the draft model."""
        return self._chosen(self.target.features(ids, causal=True))

    def _chosen(self, layers: list[torch.Tensor]) -> torch.Tensor:
        """Concatenate the hidden states of the target's middle and last layer, ``[B, L, 2 D]``."""
        return torch.cat([layers[(len(layers) - 1) // 2], layers[-1]], dim=-1)

    def _further(self, layers: list[torch.Tensor]) -> Outputs:
        """Return further outputs of the target that the loss takes."""
        return ()

    def _targets(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, int]:
        offsets = torch.arange(1, self.options.draft_block, device=batch.ids.device)
        at = (batch.starts[..., None] + offsets).flatten(1)
        return batch.ids.gather(1, at), torch.ones_like(at, dtype=torch.float32), at.numel()


class Distillation(DFlash):
    """The draft model of ``--mode dflash``, trained on the target's distributions: ``--mode distill``.

    Both losses train with KL. Additional runs of ours train with L1 and with the cross-entropy of ``--mode dflash``.
    """

    title = "DraftDistillationLoss.forward_fused"
    source = "KL as in Hinton et al. 2015, arXiv:1503.02531; L1 as in arXiv:2602.23881"
    objectives: ClassVar[dict[str, str]] = {"ours": "kl", "l1": "l1", "ce": "ce"}

    def reference(self, outputs: Outputs, batch: Batch) -> Loss:
        hidden, head, teacher = outputs
        targets, mask, count = self._targets(batch)
        logits, its_logits = F.linear(hidden, head), F.linear(teacher, head).flatten(0, 1)[self._rows(batch)]
        block = self.options.draft_block
        loss = reference.draft_distillation_loss(
            logits, its_logits, targets, mask, count, block, kind=self.objectives["ours"], loss_gamma=self.GAMMA
        )
        correct = reference.argmax_match(logits, its_logits.argmax(-1))
        return Loss(loss, *reference.draft_accuracy_per_position(correct, mask, block))

    def ours(self, outputs: Outputs, batch: Batch) -> Loss:
        return self._taught("ours", outputs, batch)

    def implementation(self, name: str) -> Callable[[Outputs, Batch], Loss]:
        """Return the loss function by name, including the additional training runs."""
        if name in self.beside:
            return lambda outputs, batch: self._taught(name, outputs, batch)
        return super().implementation(name)

    def guess(self, batch: Batch, log_unigram: torch.Tensor) -> float:
        targets, mask, count = self._targets(batch)
        its_logits = self.target(batch.ids, causal=True).flatten(0, 1)[self._rows(batch)]
        logits = log_unigram.to(its_logits).expand(its_logits.shape)
        given, kind = (targets, mask, count, self.options.draft_block), self.objectives["ours"]
        return float(reference.draft_distillation_loss(logits, its_logits, *given, kind=kind, loss_gamma=self.GAMMA))

    def _taught(self, name: str, outputs: Outputs, batch: Batch) -> Loss:
        from dllm_kernels.losses import DraftDistillationLoss, acceptance_length

        hidden, head, teacher = outputs
        targets, mask, count = self._targets(batch)
        block = self.options.draft_block
        loss = DraftDistillationLoss(self.objectives[name], self.GAMMA, backend=self.options.backend)
        out = loss.forward_fused(hidden, head, teacher, targets, mask, count, block, teacher_rows=self._rows(batch))
        ways = [acceptance_length(out, mask, block, bonus=True, sampling=way) for way in (True, False)]
        return Loss(out.total_loss, out.draft_correct_per_pos, out.draft_count_per_pos, torch.stack(ways))

    def _rows(self, batch: Batch) -> torch.Tensor:
        """Return the batch position before each drafted token, whose target row predicts this token."""
        offsets = torch.arange(self.options.draft_block - 1, device=batch.ids.device)
        B, L = batch.ids.shape
        first = L * torch.arange(B, device=batch.ids.device)[:, None]
        return first + (batch.starts[..., None] + offsets).flatten(1)

    def _further(self, layers: list[torch.Tensor]) -> Outputs:
        return (self.target.norm(layers[-1]),)


class MultiToken(Task):
    """A causal model that predicts the next token and two further tokens: ``--mode mtp``."""

    title = "FusedLinearCrossEntropy + calculate_mtp_loss"
    source = "DeepSeek-V3, arXiv:2412.19437, section 2.2"
    DEPTHS, SCALE = 2, 0.3

    def model(self) -> nn.Module:
        return MultiTokenModel(self.size, self.DEPTHS)

    def batch(self, ids: torch.Tensor, seed: int) -> Batch:
        return self._plain(ids)

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        assert isinstance(model, MultiTokenModel)
        return (*model.all_hidden(batch.ids), model.lm_head.weight)

    def reference(self, outputs: Outputs, batch: Batch) -> Loss:
        *hidden, head = outputs
        labels, count = self._labels(batch)
        logits = [F.linear(h, head) for h in hidden]
        main = reference.masked_cross_entropy(logits[0], labels, num_label_tokens=count)
        return Loss(main + reference.mtp_loss(logits[1:], labels, self.SCALE, count).loss)

    def ours(self, outputs: Outputs, batch: Batch) -> Loss:
        from dllm_kernels.mtp import FusedLinearCrossEntropy, calculate_loss, calculate_mtp_loss

        hidden, further, head = outputs[0], list(outputs[1:-1]), outputs[-1]
        labels, count = self._labels(batch)
        loss = FusedLinearCrossEntropy(backend=self.options.backend)
        shared: dict[str, Any] = {"labels": labels, "model": nn.Module(), "lm_weight": head, "num_label_tokens": count}
        main = calculate_loss(loss, hidden_states=hidden, **shared)
        return Loss(main + calculate_mtp_loss(loss, mtp_per_depth_h=further, scaling_factor=self.SCALE, **shared))

    def guess(self, batch: Batch, log_unigram: torch.Tensor) -> float:
        labels, count = self._labels(batch)
        nll = [_nll_by_frequency(labels[:, depth:-1], log_unigram).sum() / count for depth in range(self.DEPTHS + 1)]
        return float(nll[0] + self.SCALE / self.DEPTHS * sum(nll[1:]))

    def sample(self, model: Any, text: torch.Tensor) -> Sample:
        prompt, truth = self._split(text)
        generator = torch.Generator(self.device).manual_seed(self.options.seed)
        ids = sampler.next_token(
            lambda ids: model.hidden(ids, causal=True),
            model.lm_head.weight,
            prompt,
            len(truth),
            temperature=self.options.temperature,
            generator=generator,
        )
        made = self.corpus.decode(ids[len(prompt) :])
        note = "a causal model: written token by token"
        return Sample(self.corpus.decode(prompt.tolist()), [], made, self.corpus.decode(truth.tolist()), note)

    def _labels(self, batch: Batch) -> tuple[torch.Tensor, int]:
        """Return the next token at each position (none at the last position), and the number of labels."""
        labels = F.pad(batch.ids[:, 1:], (0, 1), value=-100)
        return labels, batch.ids[:, 1:].numel()


TASKS: dict[str, type[Task]] = {
    "mdlm": Diffusion,
    "block": Block,
    "hybrid": Hybrid,
    "scdd": Correcting,
    "idlm": Introspective,
    "dflash": DFlash,
    "distill": Distillation,
    "mtp": MultiToken,
}
