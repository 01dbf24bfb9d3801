"""GPT: a decoder-only transformer as a plain `nn.Sequential` of blocks.

Blocks and initial weights are those of GPT-2 (Radford et al., 2019, "Language Models are Unsupervised
Multitask Learners"): layer normalisation before each half of a block, the output projection tied to the
token embedding.  Two things differ.  Positions are rotary and not learned (see `rotary`): a small model
that sees a few million tokens learns far faster so.  The GELU is the exact one, which is several times
faster than the tanh approximation on a CPU.

    model = build_gpt(GPTConfig(vocabulary=4096, context=256, layers=4, heads=4, width=256))
    logits = model(tokens)                       # (batch, positions) -> (batch, positions, vocabulary)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from farandole.models.attention import causal_attention
from farandole.models.rotary import rotate


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT: `width` values per position, `layers` blocks of `heads` heads.

    With vocabulary V, layers L and width D the model has exactly

        V D  +  L (12 D^2 + 13 D)  +  2 D

    parameters: token embeddings; per block 4 D^2 + 4 D for attention, 8 D^2 + 5 D for the feed-forward
    half and 4 D for two normalisations; the last normalisation.  The head is tied to the token embedding
    and adds none, and neither do the positions, of which there are `context`.
    """

    vocabulary: int
    context: int
    layers: int
    heads: int
    width: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} is not a multiple of twice heads {self.heads}")

    @property
    def parameters(self) -> int:
        """How many parameters the model has."""
        d = self.width
        return self.vocabulary * d + self.layers * (12 * d * d + 13 * d) + 2 * d

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of a forward and backward pass for one token.

        6 per weight that takes part in a product, 12 L D C for attention scores and sums over a whole
        context (Kaplan et al., 2020, "Scaling Laws for Neural Language Models", table 1).
        """
        return 6 * self.parameters + 12 * self.layers * self.width * self.context


class EmbeddingBlock(nn.Module):
    """Tokens (batch, positions) of int64 to their embeddings."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, positions) of int64 to (batch, positions, width)."""
        embedded: Tensor = self.dropout(self.tokens(tokens))
        return embedded


class SelfAttention(nn.Module):
    """Causal multi-head attention of (batch, positions, width) to itself."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, positions, width) to the same."""
        batch, positions, width = x.shape
        split = self.qkv(x).view(batch, positions, 3, self.heads, width // self.heads)
        query_and_key, value = split.permute(2, 0, 3, 1, 4).tensor_split((2,))
        query, key = rotate(query_and_key)
        mixed = causal_attention(query, key, value[0])
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, positions, width))
        return projected


class FeedForward(nn.Module):
    """Width to four times the width, GELU, and back."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same."""
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


class TransformerBlock(nn.Module):
    """One layer: attention and feed-forward, each normalised before and added to what came in."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = SelfAttention(config)
        self.norm_feed_forward = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, positions, width) to the same."""
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        return x + self.dropout(self.feed_forward(self.norm_feed_forward(x)))


class HeadBlock(nn.Module):
    """The last normalisation, and logits from a weight (vocabulary, width) that it may share."""

    def __init__(self, config: GPTConfig, weight: Tensor) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to logits (..., vocabulary)."""
        return F.linear(self.norm(x), self.weight)


def build_gpt(config: GPTConfig) -> nn.Sequential:
    """A GPT with GPT-2's initial weights, drawn from torch's global generator."""
    embedding = EmbeddingBlock(config)
    blocks = [TransformerBlock(config) for _ in range(config.layers)]
    model = nn.Sequential(embedding, *blocks, HeadBlock(config, embedding.tokens.weight))
    initialise(model)
    return model


def initialise(model: nn.Sequential) -> None:
    """Normal weights of deviation 0.02, zero biases; what adds to the residual stream is scaled down.

    There are two additions per block, so their output weights start at 0.02 / sqrt(2 L): the variance of
    the stream then does not grow with depth.
    """
    blocks = [block for block in model if isinstance(block, TransformerBlock)]
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    for block in blocks:
        for linear in (block.attention.out, block.feed_forward.down):
            nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * len(blocks)))
