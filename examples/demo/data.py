"""Corpus of the demo: Python's standard library, tokenised with a vocabulary trained on it."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__"}
MASK, END = "<mask>", "<end>"
FORMAT = 1  # version of the cache file format


@dataclass(frozen=True)
class Corpus:
    """Token ids and their tokenizer.

    Attributes:
        train: concatenated ids of the training files, each followed by the end token; int64 ``[T]``.
        heldout: concatenated ids of files that are not used in training, in the format of ``train``.
        tokenizer: ``tokenizers.Tokenizer``, trained on the training files only.
        mask_id: the mask token; it does not occur in any text.
    """

    train: torch.Tensor
    heldout: torch.Tensor
    tokenizer: Any
    mask_id: int

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including special tokens."""
        return int(self.tokenizer.get_vocab_size())

    def log_unigram(self) -> torch.Tensor:
        """Return the log frequency of each training token, with add-one smoothing; float32 ``[V]``."""
        counts = torch.bincount(self.train, minlength=self.vocab_size).double() + 1
        return (counts / counts.sum()).log().float()

    def decode(self, ids: list[int], mask: str = "\N{LIGHT SHADE}") -> str:
        """Decode the ids to text, with ``mask`` in place of each mask token."""
        text = ""
        run: list[int] = []
        for token in [*ids, self.mask_id]:
            if token == self.mask_id:
                text += self.tokenizer.decode(run, skip_special_tokens=False) + mask
                run = []
            else:
                run.append(token)
        return text.removesuffix(mask)


def source_files() -> list[Path]:
    """List the .py files of the standard library, without tests, in an order that mixes the packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts)]
    return sorted(files, key=lambda path: zlib.crc32(path.relative_to(root).as_posix().encode()))


def split(files: list[Path], max_bytes: int) -> tuple[list[Path], list[Path]]:
    """Split off every tenth file as held-out; stop when ``max_bytes`` are reached."""
    train: list[Path] = []
    heldout: list[Path] = []
    taken = 0
    for number, path in enumerate(files):
        if taken >= max_bytes:
            break
        taken += path.stat().st_size
        (heldout if number % 10 == 3 else train).append(path)
    return train, heldout


def train_tokenizer(texts: list[str], vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer with ``vocab_size`` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[MASK, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _encode(tokenizer: Any, texts: list[str]) -> torch.Tensor:
    end = tokenizer.token_to_id(END)
    return torch.tensor([token for found in tokenizer.encode_batch(texts) for token in (*found.ids, end)])


def _build(train: list[Path], heldout: list[Path], vocab_size: int) -> dict[str, Any]:
    train_texts, heldout_texts = (
        [path.read_text(encoding="utf-8", errors="replace") for path in paths] for paths in (train, heldout)
    )
    tokenizer = train_tokenizer(train_texts, vocab_size)
    return {
        "tokenizer": tokenizer.to_str(),
        "train": _encode(tokenizer, train_texts),
        "heldout": _encode(tokenizer, heldout_texts),
    }


def default_cache() -> Path:
    """Return the cache folder of the tokens, under ``XDG_CACHE_HOME`` or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dllm-kernels-demo"


def _cached(path: Path, train: list[Path], heldout: list[Path], vocab_size: int) -> dict[str, Any]:
    if path.exists():
        loaded: dict[str, Any] = torch.load(path, weights_only=True)
        return loaded
    built = _build(train, heldout, vocab_size)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        torch.save(built, scratch)
        scratch.replace(path)  # atomic, even if two runs build the file at the same time
    except OSError as error:
        print(f"tokens are not cached for the next run: {error}", file=sys.stderr)
    return built


def load(vocab_size: int, max_bytes: int, cache: Path | None = None) -> Corpus:
    """Read, split and tokenise the sources, or load the tokens from ``cache``.

    Args:
        vocab_size: number of tokens in the vocabulary, including special tokens.
        max_bytes: amount of source text to use.
        cache: cache folder; None: ``default_cache()``.
    """
    from tokenizers import Tokenizer

    train, heldout = split(source_files(), max_bytes)
    listing = [(path.name, path.stat().st_size) for path in (*train, *heldout)]
    key = hashlib.sha256(repr((FORMAT, sys.version, vocab_size, listing)).encode()).hexdigest()[:16]
    data = _cached((cache or default_cache()) / f"tokens-{key}.pt", train, heldout, vocab_size)
    tokenizer = Tokenizer.from_str(data["tokenizer"])
    return Corpus(data["train"], data["heldout"], tokenizer, tokenizer.encode(MASK).ids[0])


def random_windows(tokens: torch.Tensor, batch: int, length: int, seed: int) -> torch.Tensor:
    """Return ``[batch, length]`` windows at random positions; the positions are a function of ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - length, (batch, 1), generator=generator)
    return tokens[starts + torch.arange(length)]


def even_windows(tokens: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """Return ``[count, length]`` windows spread evenly over the text."""
    starts = torch.linspace(0, len(tokens) - length, count).long()[:, None]
    return tokens[starts + torch.arange(length)]
