"""GPT: a decoder-only transformer as a plain `nn.Sequential` of blocks.

The blocks and initial weights follow GPT-2 (Radford et al., 2019, "Language Models are Unsupervised
Multitask Learners"): pre-layer normalization, and an output projection tied to the token embedding.  There
are two differences.  Position embeddings are rotary instead of learned (`rotary`), with which a small model
learns far faster from a few million tokens.  The GELU is exact, which on a CPU is several times faster than
the tanh approximation.

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
    """The shape of a GPT: `layers` blocks of `heads` heads and width `width`, for up to `context` positions.

    With vocabulary V, layers L and width D the model has exactly

        V D  +  L (12 D^2 + 13 D)  +  2 D

    parameters: token embeddings; per block 4 D^2 + 4 D for attention, 8 D^2 + 5 D for the feed-forward
    network and 4 D for two normalizations; the final normalization.  The head is tied to the token embedding,
    and rotary positions have no parameters.
    """

    vocabulary: int
    context: int
    layers: int
    heads: int
    width: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"width={self.width} is not a multiple of twice heads={self.heads}")

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        d = self.width
        return self.vocabulary * d + self.layers * (12 * d * d + 13 * d) + 2 * d

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations per token of a forward and backward pass.

        6 per parameter, plus 12 L D C for attention over a context of C positions (Kaplan et al., 2020, "Scaling
        Laws for Neural Language Models", table 1).
        """
        return 6 * self.parameters + 12 * self.layers * self.width * self.context


class EmbeddingBlock(nn.Module):
    """Token embeddings."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, positions) of int64 to (batch, positions, width)."""
        embedded: Tensor = self.dropout(self.tokens(tokens))
        return embedded


class SelfAttention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, positions, width) to the same shape."""
        batch, positions, width = x.shape
        split = self.qkv(x).view(batch, positions, 3, self.heads, width // self.heads)
        query_and_key, value = split.permute(2, 0, 3, 1, 4).tensor_split((2,))
        query, key = rotate(query_and_key)
        mixed = causal_attention(query, key, value[0])
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, positions, width))
        return projected


class FeedForward(nn.Module):
    """A feed-forward network with GELU and four times the width inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same shape."""
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


class TransformerBlock(nn.Module):
    """One layer: attention and feed-forward network, each with pre-normalization and a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = SelfAttention(config)
        self.norm_feed_forward = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, positions, width) to the same shape."""
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        return x + self.dropout(self.feed_forward(self.norm_feed_forward(x)))


class HeadBlock(nn.Module):
    """The final normalization, and the output projection with a weight (vocabulary, width) that may be shared."""

    def __init__(self, config: GPTConfig, weight: Tensor) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to logits (..., vocabulary)."""
        return F.linear(self.norm(x), self.weight)


def build_gpt(config: GPTConfig) -> nn.Sequential:
    """Return a GPT with GPT-2's initial weights, drawn from torch's global generator."""
    embedding = EmbeddingBlock(config)
    blocks = [TransformerBlock(config) for _ in range(config.layers)]
    model = nn.Sequential(embedding, *blocks, HeadBlock(config, embedding.tokens.weight))
    initialise(model)
    return model


def initialise(model: nn.Sequential) -> None:
    """Initialize weights from a normal distribution of deviation 0.02, and biases to zero.

    Each block adds to the residual stream twice.  Its output projections have deviation 0.02 / sqrt(2 L), so the
    variance of the stream does not grow with the number of layers L.
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
