"""Llama, Mistral, Qwen 2 and Qwen 3: decoder-only transformers with rotary positions.

Following Touvron et al., 2023, "LLaMA: Open and Efficient Foundation Language Models", blocks use RMS
pre-normalization, rotary positions, and a gated feed-forward network with SiLU.  The other families differ from Llama
only in their options:

    Mistral    a sliding window
    Qwen 2     biases in the projections of queries, keys and values; a window in some layers
    Qwen 3     normalization of queries and keys

    model = build_llama(LlamaConfig(vocabulary=32000, layers=16, heads=12, kv_heads=4, width=768, inner=2048))
    logits = model(tokens)                       # (batch, positions) -> (batch, positions, vocabulary)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from farandole.models.layers import (
    Embedding,
    GatedFeedForward,
    Head,
    RMSNorm,
    SelfAttention,
    TransformerBlock,
    check_padding,
    initialize,
)
from farandole.models.rotary import Rotary
from farandole.models.sequence import Transformer


@dataclass(frozen=True)
class LlamaConfig:
    """The configuration of a Llama, Mistral or Qwen model.

    Args:
        inner: the feed-forward width.
        kv_heads: the number of key-value heads; 0 selects `heads`.
        head_width: the width per head; 0 selects width / heads.
        rotary: the rotary positions.  None selects base 10,000 and rotates all values of a head.
        windows: for each layer, the length of the sliding window, or None for full attention.  If empty, no layer has a
            window.
        attention_bias: whether the query, key and value projections have biases.
        out_bias: whether the attention's output projection has a bias.
        feed_forward_bias: whether the feed-forward network has biases.
        qk_norm: whether queries and keys are normalized.
        tied: whether the head shares the token embedding.
        padding: the token whose embedding receives no gradient, as in `nn.Embedding`.

    Raises:
        ValueError: if `width` is not a multiple of `heads` (with `head_width` = 0), `heads` is not a multiple of
            `kv_heads`, or a non-empty `windows` does not have one entry per layer.
    """

    vocabulary: int
    layers: int
    heads: int
    width: int
    inner: int
    kv_heads: int = 0
    head_width: int = 0
    rotary: Rotary | None = None
    windows: tuple[int | None, ...] = ()
    attention_bias: bool = False
    out_bias: bool = False
    feed_forward_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"
    epsilon: float = 1e-6
    tied: bool = False
    attention_dropout: float = 0.0
    padding: int | None = None

    def __post_init__(self) -> None:
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.head_width == 0:
            if self.width % self.heads:
                raise ValueError(
                    f"width={self.width} is not a multiple of heads={self.heads}; change one of them, or set head_width"
                )
            object.__setattr__(self, "head_width", self.width // self.heads)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; change one of them"
            )
        check_padding(self.padding, self.vocabulary)
        if self.rotary is None:
            object.__setattr__(self, "rotary", Rotary(self.head_width))
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(f"expected a window for each of {self.layers} layers, got {len(self.windows)}")


def llama_attention(config: LlamaConfig, layer: int) -> SelfAttention:
    """Return the attention module for layer `layer`, counted from 0."""
    return SelfAttention(
        config.width,
        config.heads,
        kv_heads=config.kv_heads,
        head_width=config.head_width,
        bias=config.attention_bias,
        out_bias=config.out_bias,
        rotary=config.rotary,
        window=config.windows[layer] if config.windows else None,
        norm=partial(RMSNorm, epsilon=config.epsilon) if config.qk_norm else None,
        dropout=config.attention_dropout,
    )


def llama(config: LlamaConfig, feed_forward: Callable[[], nn.Module] | None = None) -> Transformer:
    """Return a Llama model without the weight initialization of `build_llama`.

    Args:
        feed_forward: a function that returns a new feed-forward network for a layer, by default a `GatedFeedForward`.
    """
    norm = partial(RMSNorm, epsilon=config.epsilon)
    embedding = Embedding(config.vocabulary, config.width, padding=config.padding)
    blocks = [
        TransformerBlock(
            config.width,
            norm,
            llama_attention(config, layer),
            feed_forward()
            if feed_forward
            else GatedFeedForward(config.width, config.inner, config.activation, config.feed_forward_bias),
        )
        for layer in range(config.layers)
    ]
    weight = embedding.tokens.weight if config.tied else None
    model = Transformer(embedding, *blocks, Head(config.width, config.vocabulary, norm, weight))
    model.config = config
    return model


def build_llama(config: LlamaConfig) -> Transformer:
    """Return a Llama model with initial weights drawn from torch's global generator."""
    model = llama(config)
    initialize(model)
    return model
