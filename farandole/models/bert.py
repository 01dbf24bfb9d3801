"""BERT: a bidirectional transformer, trained to restore masked tokens, as a plain `nn.Sequential`.

The blocks follow Devlin et al., 2019, "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding", as in the published weights: normalized token, position and segment embeddings; post-normalized
layers; a head with one more transform, an output weight tied to the token embedding, and a bias.  There is no
next-sentence head, which does not help (Liu et al., 2019, "RoBERTa").  `bert_checkpoints` converts published
weights.

    model = build_bert(bert_config("bert-base"))
    logits = model(tokens)                       # (batch, positions) -> (batch, positions, vocabulary)
    total, count = masked_token_loss(model[-1], model[:-1](tokens), targets)      # see `loss`

A model that exceeds the memory is initialized block by block, with the same weights:

    with torch.device("meta"):
        model = build_bert(config)
    for index, block in enumerate(model):
        initialise(block.to_empty(device="cpu"), block_generator(seed, index))    # as build_bert(config, seed)
    model[-1].weight = model[0].tokens.weight
"""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farandole.models.attention import full_attention

EPSILON = 1e-12
"""The epsilon of layer normalization for the published weights."""

HiddenStates = Tensor | tuple[Tensor, Tensor]
"""The input and output of blocks: hidden states (batch, positions, width).  If the configuration has padding, also an
attention mask (batch, positions) of bool, False for padding."""


@dataclass(frozen=True)
class BERTConfig:
    """The shape of a BERT: `layers` blocks of `heads` heads and width `width`.

    With vocabulary V, context C, segments S, layers L, width D and feed-forward width F the model has exactly

        (V + C + S) D + 2 D  +  L (4 D^2 + 2 D F + 9 D + F)  +  D^2 + 3 D + V

    parameters: embeddings and their normalization; per layer 4 D^2 + 4 D for attention, 2 D F + D + F for the
    feed-forward network and 4 D for two normalizations; the head's transform, its normalization and the bias of
    the logits, whose weight is the token embedding.

    Args:
        feed_forward: the width of the feed-forward network; 0 stands for 4 D.
        padding: the padding token; None if all windows are full, so that blocks pass a single tensor.

    Raises:
        ValueError: if an argument is out of range.
    """

    vocabulary: int
    context: int
    layers: int
    heads: int
    width: int
    feed_forward: int = 0
    segments: int = 2
    dropout: float = 0.0
    padding: int | None = None

    def __post_init__(self) -> None:
        if self.feed_forward == 0:
            object.__setattr__(self, "feed_forward", 4 * self.width)
        numbers = (self.vocabulary, self.context, self.layers, self.heads, self.width, self.segments)
        if min(*numbers, self.feed_forward) < 1:
            raise ValueError(f"expected sizes of at least 1, got {self}")
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not a multiple of heads={self.heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"expected dropout at least 0 and below 1, got {self.dropout}")
        if self.padding is not None and not 0 <= self.padding < self.vocabulary:
            raise ValueError(f"padding={self.padding} is not a token of a vocabulary of {self.vocabulary}")

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        d, f = self.width, self.feed_forward
        embedding = (self.vocabulary + self.context + self.segments) * d + 2 * d
        layer = 4 * d * d + 2 * d * f + 9 * d + f
        return embedding + self.layers * layer + d * d + 3 * d + self.vocabulary


CONFIGS = {
    "bert-base": BERTConfig(30522, 512, layers=12, heads=12, width=768, dropout=0.1),
    "bert-large": BERTConfig(30522, 512, layers=24, heads=16, width=1024, dropout=0.1),
    "bert-2.5b": BERTConfig(30522, 512, layers=192, heads=16, width=1024),
    "tiny": BERTConfig(300, 32, layers=2, heads=2, width=16),
}
"""The paper's two networks, bert-large with eight times the layers, and a network for tests."""


def bert_config(name: str, **changes: Any) -> BERTConfig:
    """Return the configuration `name`, with `changes` to its fields.

    Raises:
        ValueError: if the name is unknown; the message suggests the closest name.
    """
    if name not in CONFIGS:
        nearest = difflib.get_close_matches(name.lower(), CONFIGS, 1, cutoff=0.4)
        hint = f"; nearest: {nearest[0]}" if nearest else ""
        raise ValueError(f"unknown model {name!r}{hint} (known: {', '.join(CONFIGS)})")
    config = CONFIGS[name]
    if "width" in changes:
        changes = {"feed_forward": 0} | changes
    return replace(config, **changes)


class EmbeddingBlock(nn.Module):
    """The normalized sum of token, position and segment embeddings."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.segments = nn.Embedding(config.segments, config.width)
        self.norm = nn.LayerNorm(config.width, EPSILON)
        self.dropout = nn.Dropout(config.dropout)
        self.padding = config.padding

    def forward(self, tokens: Tensor | tuple[Tensor, Tensor]) -> HiddenStates:
        """Embed tokens (batch, positions) of int64, or a pair of tokens and segments; the default segment is 0."""
        tokens, segments = tokens if isinstance(tokens, tuple) else (tokens, None)
        count, most = tokens.shape[1], self.positions.num_embeddings
        if count > most:
            raise ValueError(f"expected at most {most} positions, the model's context, got {count}")
        segment = self.segments.weight[0] if segments is None else self.segments(segments)
        x = self.dropout(self.norm(self.tokens(tokens) + self.positions.weight[:count] + segment))
        return x if self.padding is None else (x, tokens != self.padding)


class SelfAttention(nn.Module):
    """Bidirectional multi-head self-attention."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = config.dropout

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        batch, positions, width = x.shape
        split = self.qkv(x).view(batch, positions, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = full_attention(query, key, value, attention_mask, self.dropout if self.training else 0.0)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, positions, width))
        return projected


class FeedForward(nn.Module):
    """A feed-forward network with GELU."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.feed_forward)
        self.down = nn.Linear(config.feed_forward, config.width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


class TransformerBlock(nn.Module):
    """One layer: attention and feed-forward network, each with a residual connection and post-normalization."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.norm_attention = nn.LayerNorm(config.width, EPSILON)
        self.feed_forward = FeedForward(config)
        self.norm_feed_forward = nn.LayerNorm(config.width, EPSILON)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: HiddenStates) -> HiddenStates:
        x, attention_mask = hidden if isinstance(hidden, tuple) else (hidden, None)
        x = self.norm_attention(x + self.dropout(self.attention(x, attention_mask)))
        x = self.norm_feed_forward(x + self.dropout(self.feed_forward(x)))
        return x if attention_mask is None else (x, attention_mask)


class HeadBlock(nn.Module):
    """A transform, and the output projection with a weight (vocabulary, width) that may be shared, and a bias."""

    def __init__(self, config: BERTConfig, weight: Tensor) -> None:
        super().__init__()
        self.transform = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, EPSILON)
        self.weight = weight
        self.bias = nn.Parameter(torch.empty(config.vocabulary))

    def forward(self, hidden: HiddenStates) -> Tensor:
        """Map hidden states (..., width) to logits (..., vocabulary)."""
        x = hidden[0] if isinstance(hidden, tuple) else hidden
        return F.linear(self.norm(F.gelu(self.transform(x))), self.weight, self.bias)


def build_bert(config: BERTConfig, seed: int | None = None) -> nn.Sequential:
    """Return a BERT on torch's default device.

    Args:
        seed: the seed of the initial weights, by default drawn from torch's global generator.  Unused on the meta
            device.
    """
    device = torch.get_default_device()
    with torch.device("meta"):  # skips the default initialization of torch's layers
        embedding = EmbeddingBlock(config)
        layers = [TransformerBlock(config) for _ in range(config.layers)]
        model = nn.Sequential(embedding, *layers, HeadBlock(config, embedding.tokens.weight))
    if device.type == "meta":
        return model
    if seed is None:
        seed = int(torch.randint(2**63 - 1, (), device="cpu"))
    for index, block in enumerate(model):
        initialise(block.to_empty(device=device), block_generator(seed, index))
    model[-1].weight = embedding.tokens.weight  # `to_empty` has untied the weights
    return model


def block_generator(seed: int, index: int) -> torch.Generator:
    """Return the generator for block `index` (0 is the embedding, the last one the head) of a model with `seed`."""
    digest = hashlib.blake2b(str(seed).encode(), digest_size=4).digest()
    # torch uses 32 bits of a seed; addition keeps the seeds of a model's blocks distinct
    return torch.Generator().manual_seed((int.from_bytes(digest) + index) % 2**32)


@torch.no_grad()
def initialise(block: nn.Module, generator: torch.Generator) -> None:
    """Initialize one block: normal weights of deviation 0.02, zero biases, and identity normalization.

    Numbers are drawn in fp32 on the generator's device, so they do not depend on the block's device or type.
    A head's `weight` is not changed, because it belongs to the embedding.

    Raises:
        ValueError: if the block is on the meta device.
    """
    for module in block.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            _draw(module.weight, generator)
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, nn.Linear | nn.LayerNorm | HeadBlock):
            nn.init.zeros_(module.bias)


def _draw(weight: Tensor, generator: torch.Generator) -> None:
    if weight.is_meta:
        raise ValueError("cannot initialize a block on the meta device: call its to_empty(device=...) first")
    if weight.dtype == torch.float32 and weight.device == generator.device:
        weight.normal_(std=0.02, generator=generator)
    else:
        drawn = torch.empty(weight.shape, dtype=torch.float32, device=generator.device)
        weight.copy_(drawn.normal_(std=0.02, generator=generator))
