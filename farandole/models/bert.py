"""BERT: a transformer that sees in both directions, trained to restore masked tokens, as a plain `nn.Sequential`.

Blocks are those of Devlin et al., 2019, "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding", in the arrangement of its published weights: token, learned position and segment embeddings,
normalised; layers that normalise after each half has been added; a head of one more transform, whose output
weight is the token embedding, with a bias of its own.  There is no next-sentence head: it was found not to help
(Liu et al., 2019, "RoBERTa").  Published checkpoints load: see `bert_checkpoints`.

    model = build_bert(bert_config("bert-base"))
    logits = model(tokens)                       # (batch, positions) -> (batch, positions, vocabulary)
    total, count = masked_token_loss(model[-1], model[:-1](tokens), targets)      # see `loss`

A model too large to be held at once is made block by block, with the same weights:

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
"""Added to variances by the published weights' normalisation."""

Stream = Tensor | tuple[Tensor, Tensor]
"""What goes from block to block: hidden states (batch, positions, width), and if the configuration knows of
padding also (batch, positions) of bool, True for real tokens."""


@dataclass(frozen=True)
class BERTConfig:
    """The shape of a BERT: `width` values per position, `layers` blocks of `heads` heads.

    With vocabulary V, context C, segments S, layers L, width D and feed-forward width F the model has exactly

        (V + C + S) D + 2 D  +  L (4 D^2 + 2 D F + 9 D + F)  +  D^2 + 3 D + V

    parameters: embeddings and their normalisation; per layer 4 D^2 + 4 D for attention, 2 D F + D + F for the
    feed-forward half and 4 D for two normalisations; the head's transform, its normalisation and the bias of
    the logits, whose weight is the token embedding.

    `feed_forward` 0 stands for 4 D.  `padding` is the token that fills windows up; None says that all windows
    are full, which those cut from a stream of tokens are: then one tensor goes from block to block.
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
            raise ValueError(f"a BERT has at least one of everything: {self}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout {self.dropout} is no probability below 1")
        if self.padding is not None and not 0 <= self.padding < self.vocabulary:
            raise ValueError(f"padding {self.padding} is no token of a vocabulary of {self.vocabulary}")

    @property
    def parameters(self) -> int:
        """How many parameters the model has."""
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
"""The two networks of the paper, bert-large with eight times the layers, and one for trying things out."""


def bert_config(name: str, **changes: Any) -> BERTConfig:
    """A network by its name, with other values of some fields if asked.  ValueError names the nearest."""
    if name not in CONFIGS:
        nearest = difflib.get_close_matches(name.lower(), CONFIGS, 1, cutoff=0.4)
        hint = f"; nearest: {nearest[0]}" if nearest else ""
        raise ValueError(f"there is no model {name!r}{hint} (there are {', '.join(CONFIGS)})")
    config = CONFIGS[name]
    if "width" in changes:
        changes = {"feed_forward": 0} | changes
    return replace(config, **changes)


class EmbeddingBlock(nn.Module):
    """Tokens to the sum of their token, position and segment embeddings, normalised."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.segments = nn.Embedding(config.segments, config.width)
        self.norm = nn.LayerNorm(config.width, EPSILON)
        self.dropout = nn.Dropout(config.dropout)
        self.padding = config.padding

    def forward(self, tokens: Tensor | tuple[Tensor, Tensor]) -> Stream:
        """(batch, positions) of int64, or a pair of them, tokens and segments; all are of segment 0 otherwise."""
        tokens, segments = tokens if isinstance(tokens, tuple) else (tokens, None)
        count, most = tokens.shape[1], self.positions.num_embeddings
        if count > most:
            raise ValueError(f"{count} positions are more than the {most} of the model's context")
        segment = self.segments.weight[0] if segments is None else self.segments(segments)
        x = self.dropout(self.norm(self.tokens(tokens) + self.positions.weight[:count] + segment))
        return x if self.padding is None else (x, tokens != self.padding)


class SelfAttention(nn.Module):
    """Multi-head attention of (batch, positions, width) to itself, in both directions."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = config.dropout

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        batch, positions, width = x.shape
        split = self.qkv(x).view(batch, positions, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = full_attention(query, key, value, real, self.dropout if self.training else 0.0)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, positions, width))
        return projected


class FeedForward(nn.Module):
    """Width to the feed-forward width, GELU, and back."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.feed_forward)
        self.down = nn.Linear(config.feed_forward, config.width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


class TransformerBlock(nn.Module):
    """One layer: attention and feed-forward, each added to what came in and normalised after."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.norm_attention = nn.LayerNorm(config.width, EPSILON)
        self.feed_forward = FeedForward(config)
        self.norm_feed_forward = nn.LayerNorm(config.width, EPSILON)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, stream: Stream) -> Stream:
        x, real = stream if isinstance(stream, tuple) else (stream, None)
        x = self.norm_attention(x + self.dropout(self.attention(x, real)))
        x = self.norm_feed_forward(x + self.dropout(self.feed_forward(x)))
        return x if real is None else (x, real)


class HeadBlock(nn.Module):
    """One more transform, and logits from a weight (vocabulary, width) that it may share and a bias."""

    def __init__(self, config: BERTConfig, weight: Tensor) -> None:
        super().__init__()
        self.transform = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, EPSILON)
        self.weight = weight
        self.bias = nn.Parameter(torch.empty(config.vocabulary))

    def forward(self, stream: Stream) -> Tensor:
        """Hidden states (..., width) to logits (..., vocabulary)."""
        x = stream[0] if isinstance(stream, tuple) else stream
        return F.linear(self.norm(F.gelu(self.transform(x))), self.weight, self.bias)


def build_bert(config: BERTConfig, seed: int | None = None) -> nn.Sequential:
    """A BERT on torch's default device, with initial weights drawn from `seed`.

    Without a seed torch's global generator draws one.  On the meta device there are no weights to draw.
    """
    device = torch.get_default_device()
    with torch.device("meta"):  # otherwise torch's layers would draw weights of their own first
        embedding = EmbeddingBlock(config)
        layers = [TransformerBlock(config) for _ in range(config.layers)]
        model = nn.Sequential(embedding, *layers, HeadBlock(config, embedding.tokens.weight))
    if device.type == "meta":
        return model
    if seed is None:
        seed = int(torch.randint(2**63 - 1, (), device="cpu"))
    for index, block in enumerate(model):
        initialise(block.to_empty(device=device), block_generator(seed, index))
    model[-1].weight = embedding.tokens.weight  # torch moves the two to `device` apart
    return model


def block_generator(seed: int, index: int) -> torch.Generator:
    """Where block `index` (0 the embedding, the last the head) of a model of `seed` draws its weights from."""
    digest = hashlib.blake2b(str(seed).encode(), digest_size=4).digest()
    # torch looks at 32 bits of a seed; adding keeps the blocks of a model apart
    return torch.Generator().manual_seed((int.from_bytes(digest) + index) % 2**32)


@torch.no_grad()
def initialise(block: nn.Module, generator: torch.Generator) -> None:
    """Fill one block: normal weights of deviation 0.02, zero biases, normalisations that change nothing.

    Numbers are drawn in fp32 where `generator` is, so that they do not depend on the block's device or type.
    A head's `weight` is left alone: it is the embedding's.  ValueError for a block on the meta device.
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
        raise ValueError("a block on the meta device has no weights: call its to_empty(device=...) first")
    if weight.dtype == torch.float32 and weight.device == generator.device:
        weight.normal_(std=0.02, generator=generator)
    else:
        drawn = torch.empty(weight.shape, dtype=torch.float32, device=generator.device)
        weight.copy_(drawn.normal_(std=0.02, generator=generator))
