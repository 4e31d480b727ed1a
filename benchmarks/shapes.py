"""Sizes of real training recipes, and small sizes for a CPU and for CI.

``LOGITS``, ``LINEAR``, ``HEAD_OPTIONS``, ``SAMPLES``, ``UPDATES`` and ``MASKS`` map ``--size`` to shapes. N = batch *
length rows, V vocabulary, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

ACTIVE_SHARES = {"toy": (0.5,), "small": (1.0, 0.5, 0.15), "full": (1.0, 0.5, 0.15)}
MDLM_SHARES = (0.15, 0.5, 0.85)  # t ~ U(0, 1): a batch may mask any fraction
VOCABULARIES = {"toy": (257, 1024), "small": (8192, 32000), "full": (32000, 128256, 151936, 262144)}
ROWS = {"toy": (64, 128), "small": (256, 1024), "full": (4096, 16384, 65536)}


@dataclass(frozen=True)
class Shape:
    """One case: ``batch * length`` rows, vocabulary and hidden size.

    Attributes:
        name: short and stable, for tables.
        batch: sequences.
        length: positions in each.
        vocab: V.
        hidden: D, the width of the hidden states under the LM head.
        frozen: whether the recipe freezes the LM head.
        block_size: block size of DFlash or block diffusion.
        depths: number of MTP depths.
        chunk: chunk of rows that the recipe's own fused loss uses.
    """

    name: str
    batch: int
    length: int
    vocab: int
    hidden: int
    frozen: bool = False
    block_size: int | None = None
    depths: int = 0
    chunk: int | None = None

    @property
    def rows(self) -> int:
        """N = batch * length."""
        return self.batch * self.length


LLADA_SHORT = Shape("LLaDA SFT 4x1024", 4, 1024, 126_464, 4096)
LLADA_LONG = Shape("LLaDA SFT 4x4096", 4, 4096, 126_464, 4096)
HYBRID = Shape("Nemotron-Labs hybrid 1x8192", 1, 8192, 131_072, 4096)
GEMMA_CANVAS = Shape("block diffusion 1x256", 1, 256, 262_144, 2816, block_size=256)
GEMMA_BATCH = Shape("block diffusion 4x1024", 4, 1024, 262_144, 2816, block_size=256)
DFLASH_4B = Shape("DFlash Qwen3-4B", 1, 7680, 151_936, 2560, frozen=True, block_size=16, chunk=1024)
DFLASH_8B = Shape("DFlash Qwen3-8B batch 4", 4, 8192, 151_936, 4096, frozen=True, block_size=17, chunk=1024)
DFLASH_8B_SHORT = Shape("DFlash Qwen3-8B 7680", 1, 7680, 151_936, 4096, frozen=True, block_size=16, chunk=1024)
TRAINED = Shape("trained head 1x8192", 1, 8192, 128_256, 4096)
POLICY = Shape("policy 1x8192", 1, 8192, 151_936, 4096)  # a rollout of which log-probabilities and entropies are asked
UPDATE = Shape("coupled-GRPO 4x1024", 4, 1024, 126_464, 4096, frozen=True)  # three views of each sequence
MTP = Shape("MTP 2 depths", 2, 8192, 131_072, 4096, depths=2)

CPU_LOGITS = Shape("CPU 2x960", 2, 960, 32_000, 512)
CPU_LOOPS = Shape("CPU 2x960 narrow", 2, 960, 32_000, 256)
CPU_FROZEN = Shape("CPU 2x960 frozen", 2, 960, 32_000, 512, frozen=True, block_size=16, chunk=256)
CPU_TRAINABLE = Shape("CPU 2x960 trainable", 2, 960, 32_000, 512, block_size=16, chunk=256)
CPU_HEAD_OPTIONS = Shape("CPU 2x512", 2, 512, 32_000, 512)
CPU_SAMPLES = Shape("CPU 8x512", 8, 512, 32_000, 512)
CPU_UPDATE = Shape("CPU 8x256", 8, 256, 32_000, 512, frozen=True)
CPU_MTP = Shape("CPU MTP 2x480", 2, 480, 32_000, 256, depths=2, chunk=256)

TOY_LOGITS = Shape("toy 2x30", 2, 30, 257, 32)
TOY_ROWS = Shape("toy 1x1", 1, 1, 257, 32)  # of kernels that are launched many times
TOY_FROZEN = Shape("toy 2x30 frozen", 2, 30, 257, 32, frozen=True, block_size=16, chunk=16)
TOY_TRAINABLE = Shape("toy 2x30 trainable", 2, 30, 257, 32, block_size=16, chunk=16)
TOY_UPDATE = Shape("toy 2x30 update", 2, 30, 257, 32, frozen=True)
TOY_MTP = Shape("toy MTP", 2, 30, 257, 32, depths=2, chunk=16)

LOGITS = {
    "toy": (TOY_LOGITS,),
    "small": (CPU_LOGITS,),
    "full": (LLADA_SHORT, LLADA_LONG, HYBRID, GEMMA_CANVAS, GEMMA_BATCH),
}
LINEAR = {
    "toy": (TOY_FROZEN, TOY_TRAINABLE),
    "small": (CPU_FROZEN, CPU_TRAINABLE),
    "full": (DFLASH_4B, DFLASH_8B_SHORT, DFLASH_8B, TRAINED, LLADA_SHORT, MTP),
}

HEAD_OPTIONS = {"toy": LINEAR["toy"], "small": (CPU_HEAD_OPTIONS,), "full": (POLICY,)}
LOOPS = {"toy": LINEAR["toy"][1:], "small": (CPU_LOOPS,), "full": (LLADA_SHORT,)}
SAMPLES = {"toy": LINEAR["toy"], "small": (CPU_SAMPLES,), "full": (POLICY,)}
UPDATES = {"toy": (TOY_UPDATE,), "small": (CPU_UPDATE,), "full": (UPDATE,)}


@dataclass(frozen=True)
class MaskShape:
    """One corruption case: batch, length and block size (None: the sequence is one block)."""

    batch: int
    length: int
    block_size: int | None


MASKS = {
    "toy": (MaskShape(2, 64, None), MaskShape(2, 64, 16)),
    "small": (
        MaskShape(1, 1024, None),
        MaskShape(1, 1024, 32),
        MaskShape(8, 4096, 32),
        MaskShape(8, 4096, None),
    ),
    "full": (
        MaskShape(4, 1024, None),
        MaskShape(4, 4096, 32),
        MaskShape(64, 4096, 32),
        MaskShape(64, 4096, None),
        MaskShape(512, 4096, 32),
    ),
}


class Headline(NamedTuple):
    """The shapes of the verdicts of a GPU run.

    Attributes:
        logits: NLL from logits.
        policy: log-probabilities and entropy from logits.
        frozen: NLL from hidden states through a frozen head.
        trained: NLL from hidden states through a trained head.
        masks: corruption.
    """

    logits: Shape
    policy: Shape
    frozen: tuple[Shape, ...]
    trained: Shape
    masks: MaskShape


HEADLINE = {
    "toy": Headline(TOY_LOGITS, TOY_LOGITS, (TOY_FROZEN,), TOY_TRAINABLE, MaskShape(2, 64, 16)),
    "small": Headline(CPU_LOGITS, CPU_LOGITS, (CPU_FROZEN,), CPU_TRAINABLE, MaskShape(8, 4096, 32)),
    "full": Headline(LLADA_SHORT, POLICY, (DFLASH_4B, DFLASH_8B_SHORT), TRAINED, MaskShape(64, 4096, 32)),
}
