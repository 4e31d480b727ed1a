"""Small transformers in plain torch: a language model, a multi-token model, a block draft model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Size:
    """Shape of a model: width D, layers, attention heads of D / heads, vocabulary V."""

    width: int
    layers: int
    heads: int
    vocab: int


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding (Su et al. 2021) to ``x`` ``[B, H, L, E]`` at ``positions`` ``[B or 1, L]``."""
    half = x.shape[-1] // 2
    rates = 10_000 ** (-torch.arange(half, device=x.device) / half)
    angles = (positions[:, None, :, None] * rates).to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Attention(nn.Module):
    """Multi-head attention with normalised and rotated queries and keys, optionally over an additional context.

    Each head is initialised to attend to one neighbour: a learned vector is added to its queries, initialised to the
    vector of the keys rotated by -1, +1, -2, +2, ... positions. Otherwise, a short training would spend most of its
    steps learning these offsets.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        same = 1.5 * torch.ones(1, size.heads, 1, size.width // size.heads)
        neighbours = torch.tensor([(head // 2 + 1) * (-1) ** (head + 1) for head in range(size.heads)])
        self.look_from = nn.Parameter(rotated(same.transpose(1, 2), neighbours[None]).transpose(1, 2)[0])
        self.look_at = nn.Parameter(same[0])
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key_value = nn.Linear(size.width, 2 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        causal: bool = False,
        context: torch.Tensor | None = None,
        context_positions: torch.Tensor | None = None,
        allowed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from ``x`` ``[B, L, D]`` to the context (if any) and to ``x``, restricted by the mask ``allowed``."""
        source, source_positions = x, positions
        if context is not None and context_positions is not None:
            source = torch.cat([context, x], dim=1)
            source_positions = torch.cat([context_positions.expand(len(positions), -1), positions], dim=1)
        q = self._split(self.query(x))
        k, v = (self._split(part) for part in self.key_value(source).chunk(2, dim=-1))
        q, k = rotated(_unit(q) + self.look_from, positions), rotated(_unit(k) + self.look_at, source_positions)
        mixed = F.scaled_dot_product_attention(q, k, v.to(q.dtype), attn_mask=allowed, is_causal=causal)
        merged: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return merged

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class Layer(nn.Module):
    """Pre-norm transformer layer: attention, then a two-layer perceptron of four times the width."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(size.width)
        self.attention = Attention(size)
        self.norm_mlp = nn.RMSNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width, bias=False),
        )

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, causal: bool = False, **context: torch.Tensor
    ) -> torch.Tensor:
        """Map ``[B, L, D]`` to ``[B, L, D]``."""
        x = x + self.attention(self.norm_attention(x), positions, causal, **context)
        changed: torch.Tensor = x + self.mlp(self.norm_mlp(x))
        return changed


def _initialise(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2:
            std = parameter.shape[1] ** -0.5
            is_residual = name.endswith(("out.weight", "mlp.2.weight"))
            nn.init.normal_(parameter, std=std / 4 if is_residual else std)


def positions_of(ids: torch.Tensor) -> torch.Tensor:
    """Return the positions 0, 1, 2, ... as ``[1, L]``."""
    return torch.arange(ids.shape[1], device=ids.device)[None]


class LanguageModel(nn.Module):
    """Transformer over tokens, bidirectional or causal per call, with the head tied to the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.lm_head = nn.Linear(size.width, size.vocab, bias=False)
        _initialise(self)
        nn.init.normal_(self.embed.weight, std=0.02)  # logits near 0, so that training starts at a loss of log V
        self.lm_head.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Linear:
        """Return the LM head."""
        return self.lm_head

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings scaled to about 1 for the layers; the unscaled embeddings are the head."""
        scaled: torch.Tensor = self.embed(ids) * self.embed.embedding_dim**0.5
        return scaled

    def features(self, ids: torch.Tensor, causal: bool = False) -> list[torch.Tensor]:
        """Return the output of each layer, ``[B, L, D]``, before the final norm."""
        x, found = self.embedded(ids), []
        for layer in self.layers:
            x = layer(x, positions_of(ids), causal)
            found.append(x)
        return found

    def hidden(self, ids: torch.Tensor, causal: bool = False) -> torch.Tensor:
        """Return the input of the head, ``[B, L, D]``."""
        normed: torch.Tensor = self.norm(self.features(ids, causal)[-1])
        return normed

    def copies(self, noisy: torch.Tensor, clean: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Return the input of the head for a masked copy followed by a clean copy of the same text.

        The clean copy is causal. A token of the masked copy attends to the clean tokens of earlier blocks, and to the
        masked tokens of its own block up to and including itself.

        Args:
            noisy: ids ``[B, L]``.
            clean: ids ``[B, L]``.
            blocks: block index of each position ``[L]``, non-decreasing.

        Returns:
            ``[B, 2 L, D]``.

        Source: Introspective Diffusion Language Models, arXiv:2604.11035, appendix E.
        """
        order = torch.arange(len(blocks), device=blocks.device)
        up_to, same = order[:, None] >= order, blocks[:, None] == blocks
        upper = torch.cat([same & up_to, blocks[:, None] > blocks], 1)
        allowed = torch.cat([upper, torch.cat([torch.zeros_like(up_to), up_to], 1)])
        x, positions = self.embedded(torch.cat([noisy, clean], 1)), positions_of(noisy).repeat(1, 2)
        for layer in self.layers:
            x = layer(x, positions, allowed=allowed)
        normed: torch.Tensor = self.norm(x)
        return normed

    def forward(self, ids: torch.Tensor, causal: bool = False) -> torch.Tensor:
        """Return the logits ``[B, L, V]``."""
        logits: torch.Tensor = self.lm_head(self.hidden(ids, causal))
        return logits


class MultiTokenModel(LanguageModel):
    """Causal model that also predicts further tokens, each depth from the previous depth and the next embedding.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.2.
    """

    def __init__(self, size: Size, depths: int) -> None:
        super().__init__(size)
        self.mergers = nn.ModuleList(nn.Linear(2 * size.width, size.width, bias=False) for _ in range(depths))
        self.depth_layers = nn.ModuleList(Layer(size) for _ in range(depths))
        _initialise(self.mergers)
        _initialise(self.depth_layers)

    def all_hidden(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """Return the inputs of the head for the next and each further token: ``1 + depths`` tensors ``[B, L, D]``."""
        x = self.features(ids, causal=True)[-1]
        found = [self.norm(x)]
        for depth, (merge, layer) in enumerate(zip(self.mergers, self.depth_layers, strict=True), start=1):
            ahead = self.embedded(ids.roll(-depth, dims=1))  # wrapped positions are last and have no label
            x = layer(merge(torch.cat([_unit(x), _unit(ahead)], dim=-1)), positions_of(ids), True)
            found.append(self.norm(x))
        return found


class Draft(nn.Module):
    """Draft model that fills a block after a known token, from the hidden states of a frozen target model.

    Every layer attends to the hidden states of the target before the block and, bidirectionally, within the block.
    Embedding and head are shared with the target.

    Source: the DFlash paper, section 4.
    """

    def __init__(self, size: Size, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size
        self.unknown = nn.Parameter(torch.zeros(size.width))
        self.context = nn.Linear(2 * size.width, size.width, bias=False)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        _initialise(self)

    def forward(self, anchors: torch.Tensor, starts: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of the predicted positions.

        Args:
            anchors: embeddings of the known first tokens ``[B, N, D]``.
            starts: their positions ``[B, N]``.
            features: hidden states of the target ``[B, L, 2 D]``.

        Returns:
            ``[B, N * (block_size - 1), D]``.
        """
        B, N, D = anchors.shape
        blocks = torch.cat(
            [anchors[:, :, None], self.unknown.expand(B, N, self.block_size - 1, D).to(anchors.dtype)], dim=2
        )
        offsets = torch.arange(self.block_size, device=starts.device)
        x, positions = blocks.flatten(1, 2), (starts[..., None] + offsets).flatten(1)
        context = _unit(self.context(features))
        before = positions_of(features[..., 0])
        allowed = self._allowed(starts, features.shape[1])
        for layer in self.layers:
            x = layer(x, positions, context=context, context_positions=before, allowed=allowed)
        predicted: torch.Tensor = self.norm(x).unflatten(1, (N, self.block_size))[:, :, 1:].flatten(1, 2)
        return predicted

    def _allowed(self, starts: torch.Tensor, L: int) -> torch.Tensor:
        """Return the attention mask ``[B, 1, Q, L + Q]``: positions before the anchor of a query, and its block."""
        B, N = starts.shape
        before = torch.arange(L, device=starts.device) < starts[..., None]
        own = torch.eye(N, dtype=torch.bool, device=starts.device).repeat_interleave(self.block_size, dim=1)
        rows = torch.cat([before, own.expand(B, N, -1)], dim=2)
        return rows.repeat_interleave(self.block_size, dim=1)[:, None]
