"""T5: an encoder-decoder transformer with relative position biases.

Following Raffel et al., 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
blocks use RMS pre-normalization, linear layers without biases, and unscaled attention scores.  Learned biases, which
depend on the distance between positions, are added to the scores.

The model is one sequence of blocks.  The hidden states are a tuple (source, target, source bias, target bias).  Encoder
blocks update the source, and decoder blocks update the target.

    model = build_t5(config)
    logits = model((source, target))                                 # tokens -> (batch, target positions, vocabulary)
    total, count = model((source, shift_right(labels, 0)), None, labels)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from farandole.models.attention import attention, masked_attention
from farandole.models.dropout import ShardedDropout
from farandole.models.layers import FeedForward, GatedFeedForward, RMSNorm
from farandole.models.sequence import SequenceInfo, Transformer
from farandole.models.vocabulary import WHOLE, Vocabulary

Hidden = tuple[Tensor, Tensor, Tensor, Tensor]
"""The hidden states of source and target, and the score biases of source and target.

The hidden states have the shape (batch, positions, width), and the biases (1, heads, positions, positions).
"""


@dataclass(frozen=True)
class T5Config:
    """The configuration of a T5 model.

    Args:
        head_width: the width per head.  The heads together may be wider than `width`.
        buckets: the number of biases per head.  All distances of at least `max_distance` share one bias.
        padding: the token that is masked in the source, or None.
    """

    vocabulary: int
    encoder_layers: int
    decoder_layers: int
    heads: int
    width: int
    head_width: int
    inner: int
    buckets: int = 32
    max_distance: int = 128
    activation: str = "relu"
    gated: bool = False
    dropout: float = 0.1
    epsilon: float = 1e-6
    padding: int | None = 0
    tied: bool = True
    scaled: bool = True


def shift_right(labels: Tensor, start: int, padding: int = 0) -> Tensor:
    """Return the decoder input: `start`, followed by all labels except the last.

    Negative labels, which the loss ignores, are replaced with `padding`.
    """
    shifted = labels.roll(1, 1)
    shifted[:, 0] = start
    return shifted.masked_fill(shifted < 0, padding)


class RelativeBias(nn.Module):
    """Attention score biases that depend on the distance between positions.

    Each small distance has its own bias.  Larger distances share one bias per logarithmic bucket.
    """

    def __init__(self, config: T5Config, causal: bool) -> None:
        super().__init__()
        self.biases = nn.Embedding(config.buckets, config.heads)
        self.causal, self.max_distance = causal, config.max_distance

    def forward(self, positions: int) -> Tensor:
        """Return the biases, of shape (1, heads, positions, positions)."""
        at = torch.arange(positions, device=self.biases.weight.device)
        distance = at - at[:, None]  # key position - query position
        bias: Tensor = self.biases(self._bucket(distance))
        return bias.permute(2, 0, 1)[None]

    def _bucket(self, distance: Tensor) -> Tensor:
        buckets, offset = self.biases.num_embeddings, torch.zeros_like(distance)
        if self.causal:
            distance = (-distance).clamp(min=0)
        else:
            buckets //= 2
            offset = (distance > 0) * buckets
            distance = distance.abs()
        exact = buckets // 2
        log = torch.log(distance.float() / exact) / math.log(self.max_distance / exact) * (buckets - exact)
        large = (exact + log.nan_to_num(0, 0, 0).long()).clamp(max=buckets - 1)
        return offset + torch.where(distance < exact, distance, large)


class T5Embedding(nn.Module):
    """The embedding shared by source and target tokens, and the relative position biases."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.encoder_bias = RelativeBias(config, causal=False)
        self.decoder_bias = RelativeBias(config, causal=True)
        self.dropout = nn.Dropout(config.dropout)
        self.padding = config.padding

    def forward(self, inputs: tuple[Tensor, Tensor], info: SequenceInfo | None = None) -> Hidden:
        """Embed int64 source and target tokens, both (batch, positions), and compute the score biases."""
        source, target = (self.dropout(self.tokens(tokens)) for tokens in inputs)
        return source, target, self.encoder_bias(source.shape[1]), self.decoder_bias(target.shape[1])


class T5Attention(nn.Module):
    """Self-attention with unscaled scores."""

    sharded_dropout: ShardedDropout | None = None

    def __init__(self, config: T5Config, causal: bool) -> None:
        super().__init__()
        inner = config.heads * config.head_width
        self.head_width, self.causal = config.head_width, causal
        self.qkv = nn.Linear(config.width, 3 * inner, bias=False)
        self.out = nn.Linear(inner, config.width, bias=False)
        self.dropout = config.dropout

    def forward(self, x: Tensor, bias: Tensor, info: SequenceInfo) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, -1, self.head_width)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = attention(
            query,
            key,
            value,
            info,
            causal=self.causal,
            scale=1.0,
            bias=bias,
            dropout=dropout,
            heads=self.sharded_dropout,
        )
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class CrossAttention(nn.Module):
    """Attention from the target to the source."""

    sharded_dropout: ShardedDropout | None = None

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        inner = config.heads * config.head_width
        self.head_width = config.head_width
        self.query = nn.Linear(config.width, inner, bias=False)
        self.kv = nn.Linear(config.width, 2 * inner, bias=False)
        self.out = nn.Linear(inner, config.width, bias=False)
        self.dropout = config.dropout

    def forward(self, x: Tensor, source: Tensor, info: SequenceInfo) -> Tensor:
        query = self.query(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        key, value = self.kv(source).unflatten(-1, (2, -1, self.head_width)).permute(2, 0, 3, 1, 4)
        mask = info.shared("cross", lambda: _cross_mask(info, x, source))
        dropout = self.dropout if self.training else 0.0
        mixed = masked_attention(
            query, key, value, mask, False, 1.0, dropout=dropout, heads=self.sharded_dropout
        )
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


def _cross_mask(info: SequenceInfo, target: Tensor, source: Tensor) -> Tensor | None:
    """Return a mask (batch, 1, target positions, source positions) of pairs in the same document, or None."""
    there = info.source.documents if info.source is not None else None
    if there is None and info.documents is None:
        return None
    here = info.documents
    here = target.new_zeros(target.shape[:2], dtype=torch.int) if here is None else here
    there = source.new_zeros(source.shape[:2], dtype=torch.int) if there is None else there
    return here[:, None, :, None] == there[:, None, None, :]


def _feed_forward(config: T5Config) -> nn.Module:
    kind = GatedFeedForward if config.gated else FeedForward
    return kind(config.width, config.inner, config.activation, bias=False)


class EncoderBlock(nn.Module):
    """An encoder layer."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.norm_attention = RMSNorm(config.width, config.epsilon)
        self.attention = T5Attention(config, causal=False)
        self.norm_feed_forward = RMSNorm(config.width, config.epsilon)
        self.feed_forward = _feed_forward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Hidden, info: SequenceInfo | None = None) -> Hidden:
        x, target, bias, target_bias = hidden
        inside = info.source if info is not None and info.source is not None else SequenceInfo()
        x = x + self.dropout(self.attention(self.norm_attention(x), bias, inside))
        x = x + self.dropout(self.feed_forward(self.norm_feed_forward(x)))
        return x, target, bias, target_bias


class EncoderNorm(nn.Module):
    """The normalization for the encoder output."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.norm = RMSNorm(config.width, config.epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Hidden, info: SequenceInfo | None = None) -> Hidden:
        source, *others = hidden
        return self.dropout(self.norm(source)), *others


class DecoderBlock(nn.Module):
    """A decoder layer."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.norm_attention = RMSNorm(config.width, config.epsilon)
        self.attention = T5Attention(config, causal=True)
        self.norm_cross = RMSNorm(config.width, config.epsilon)
        self.cross = CrossAttention(config)
        self.norm_feed_forward = RMSNorm(config.width, config.epsilon)
        self.feed_forward = _feed_forward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Hidden, info: SequenceInfo | None = None) -> Hidden:
        source, x, source_bias, bias = hidden
        info = info or SequenceInfo()
        x = x + self.dropout(self.attention(self.norm_attention(x), bias, info))
        x = x + self.dropout(self.cross(self.norm_cross(x), source, info))
        x = x + self.dropout(self.feed_forward(self.norm_feed_forward(x)))
        return source, x, source_bias, bias


class T5Head(nn.Module):
    """The final normalization of the target, and the output projection.

    The projection's input is scaled if `T5Config.scaled` is true.
    """

    vocabulary: Vocabulary = WHOLE

    def __init__(self, config: T5Config, weight: Tensor | None) -> None:
        super().__init__()
        self.norm = RMSNorm(config.width, config.epsilon)
        self.weight = (
            weight if weight is not None else nn.Parameter(torch.empty(config.vocabulary, config.width))
        )
        self.dropout = nn.Dropout(config.dropout)
        self.scale = config.width**-0.5 if config.scaled else 1.0

    def forward(self, hidden: Hidden, info: SequenceInfo | None = None, targets: Tensor | None = None) -> Any:
        """Return the target's logits, or the summed loss and the number of targets if `targets` is given."""
        if targets is not None:
            return self.vocabulary.loss(hidden[1], targets, self.weight, before=self._before)
        return self.vocabulary.logits(self._before(hidden[1]), self.weight)

    def _before(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.dropout(self.norm(x)) * self.scale
        return scaled


class T5(Transformer):
    """An encoder-decoder transformer that masks padding tokens in the source."""

    def __init__(self, *blocks: Any) -> None:
        super().__init__(*blocks)
        first = next(iter(self), None)
        # read here, because a pipeline stage replaces the blocks of other stages; a slice may have no embedding
        self._padding = first.padding if isinstance(first, T5Embedding) else None

    def prepare(self, inputs: Any, info: SequenceInfo) -> SequenceInfo:
        """Return a copy of `info` in which the source's padding is a separate document."""
        if info.cache is not None:
            raise ValueError("T5 does not support a key-value cache; omit the cache")
        info = super().prepare(inputs, info)
        if self._padding is None or info.source is not None:
            return info
        return replace(info, source=SequenceInfo(documents=(inputs[0] == self._padding).int()))


def t5(config: T5Config) -> T5:
    """Return a T5 model without the weight initialization of `build_t5`."""
    embedding = T5Embedding(config)
    encoder = [EncoderBlock(config) for _ in range(config.encoder_layers)]
    decoder = [DecoderBlock(config) for _ in range(config.decoder_layers)]
    head = T5Head(config, embedding.tokens.weight if config.tied else None)
    model = T5(embedding, *encoder, EncoderNorm(config), *decoder, head)
    model.config = config
    return model


@torch.no_grad()
def build_t5(config: T5Config) -> T5:
    """Return a T5 model with the paper's weight initialization, drawn from torch's global generator."""
    model = t5(config)
    inner, width = config.heads * config.head_width, config.width
    deviations = {"query": (width * config.head_width) ** -0.5, "kv": width**-0.5, "up": width**-0.5}
    deviations |= {"gate_up": width**-0.5, "down": config.inner**-0.5, "biases": width**-0.5, "tokens": 1.0}
    deviations["out"] = inner**-0.5
    for name, weight in model.named_parameters():
        last = name.split(".")[-2]
        if last == "qkv":
            nn.init.normal_(weight[:inner], std=deviations["query"])
            nn.init.normal_(weight[inner:], std=deviations["kv"])
        elif last in deviations:
            nn.init.normal_(weight, std=deviations[last])
        elif name == f"{len(model) - 1}.weight":
            nn.init.normal_(weight)
    return model
