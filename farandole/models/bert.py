"""BERT: a bidirectional transformer that predicts masked tokens.

The model follows Devlin et al., 2019, "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding".  The next-sentence head is omitted, because it does not help (Liu et al., 2019, "RoBERTa").
`farandole.models.hf` reads published weights.

    model = build_bert(bert_config("bert-base"))
    logits = model(tokens)                       # (batch, positions) -> (batch, positions, vocabulary)
    total, count = model(tokens, None, targets)  # summed loss and number of nonnegative targets

A model that is too large for memory can be initialized block by block, with the same weights:

    with torch.device("meta"):
        model = build_bert(config)
    for index, block in enumerate(model):
        initialize(block.to_empty(device="cpu"), block_generator(seed, index))    # as build_bert(config, seed)
    model[-1].weight = model[0].tokens.weight
"""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from farandole.models.layers import (
    ACTIVATIONS,
    FeedForward,
    SelfAttention,
    check_context,
    check_padding,
    position_embeddings,
)
from farandole.models.loss import class_loss
from farandole.models.meta import meta_device
from farandole.models.sequence import SequenceInfo, Transformer
from farandole.models.vocabulary import WHOLE, Vocabulary

EPSILON = 1e-12
"""The layer-normalization epsilon of the published weights."""


@dataclass(frozen=True)
class BERTConfig:
    """The configuration of a BERT model.

    With vocabulary V, context C, segments S, layers L, width D, feed-forward width F and a head for masked tokens, the
    model has exactly

        (V + C + S) D + 2 D  +  L (4 D^2 + 2 D F + 9 D + F)  +  D^2 + 3 D + V

    parameters.  The first term counts the embeddings and their normalization.  Each layer has 4 D^2 + 4 D parameters
    for attention, 2 D F + D + F for the feed-forward network and 4 D for two normalizations.  The last term counts the
    head's transform, its normalization and the logit bias.  The logit weight is the token embedding.

    Args:
        feed_forward: the width of the feed-forward network; 0 selects 4 D.
        padding: the padding token; None if no sequence is padded.
        classes: the number of classes for a classifier head; 0 for a head that predicts masked tokens.

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
    activation: str = "gelu"
    epsilon: float = EPSILON
    classes: int = 0

    def __post_init__(self) -> None:
        if self.feed_forward == 0:
            object.__setattr__(self, "feed_forward", 4 * self.width)
        numbers = (self.vocabulary, self.context, self.layers, self.heads, self.width, self.segments)
        if min(*numbers, self.feed_forward) < 1:
            raise ValueError(f"expected sizes of at least 1, got {self}")
        if self.width % self.heads:
            raise ValueError(
                f"width={self.width} is not a multiple of heads={self.heads}; change one of them"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"expected dropout of at least 0 and below 1, got {self.dropout}")
        check_padding(self.padding, self.vocabulary)

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""
        d, f = self.width, self.feed_forward
        embedding = (self.vocabulary + self.context + self.segments) * d + 2 * d
        layer = 4 * d * d + 2 * d * f + 9 * d + f
        head = d * d + d + self.classes * (d + 1) if self.classes else d * d + 3 * d + self.vocabulary
        return embedding + self.layers * layer + head


CONFIGS = {
    "bert-base": BERTConfig(30522, 512, layers=12, heads=12, width=768, dropout=0.1),
    "bert-large": BERTConfig(30522, 512, layers=24, heads=16, width=1024, dropout=0.1),
    "bert-2.5b": BERTConfig(30522, 512, layers=192, heads=16, width=1024),
    "tiny": BERTConfig(300, 32, layers=2, heads=2, width=16),
}
"""The paper's two networks, a bert-large with eight times as many layers, and a network for tests."""


def bert_config(name: str, **changes: Any) -> BERTConfig:
    """Return the configuration `name`, with the fields in `changes` replaced.

    If `changes` contains `width` but not `feed_forward`, the width of the feed-forward network is 4 times `width`.

    Raises:
        ValueError: if the name is unknown.  The message suggests the closest name.
    """
    if name not in CONFIGS:
        nearest = difflib.get_close_matches(name.lower(), CONFIGS, 1, cutoff=0.4)
        hint = f"; nearest: {nearest[0]}" if nearest else ""
        raise ValueError(f"unknown model {name!r}{hint} (known: {', '.join(CONFIGS)})")
    config = CONFIGS[name]
    if "width" in changes:
        changes = {"feed_forward": 0} | changes
    return replace(config, **changes)


class BERTEmbedding(nn.Module):
    """Embeds tokens as the normalized sum of token, position and segment embeddings."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width, config.padding)
        self.positions = nn.Embedding(config.context, config.width)
        self.segments = nn.Embedding(config.segments, config.width)
        self.norm = nn.LayerNorm(config.width, config.epsilon)
        self.dropout = nn.Dropout(config.dropout)
        self.padding, self.context = config.padding, config.context

    def forward(self, tokens: Tensor | tuple[Tensor, Tensor], info: SequenceInfo | None = None) -> Tensor:
        """Embed int64 tokens (batch, positions), or a pair of tokens and segments.  The default segment is 0."""
        tokens, segments = tokens if isinstance(tokens, tuple) else (tokens, None)
        positions = position_embeddings(self.positions, tokens, info)
        segment = self.segments.weight[0] if segments is None else self.segments(segments)
        embedded: Tensor = self.dropout(self.norm(self.tokens(tokens) + positions + segment))
        return embedded


class BERTBlock(nn.Module):
    """One layer: attention and a feed-forward network, each with a residual connection and post-normalization."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config.width, config.heads, causal=False, dropout=config.dropout)
        self.norm_attention = nn.LayerNorm(config.width, config.epsilon)
        self.feed_forward = FeedForward(config.width, config.feed_forward, config.activation)
        self.norm_feed_forward = nn.LayerNorm(config.width, config.epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, info: SequenceInfo | None = None) -> Tensor:
        x = self.norm_attention(x + self.dropout(self.attention(x, info)))
        result: Tensor = self.norm_feed_forward(x + self.dropout(self.feed_forward(x)))
        return result


class MaskedTokenHead(nn.Module):
    """The head for masked tokens: a transform, followed by an output projection that uses `weight`."""

    vocabulary: Vocabulary = WHOLE

    def __init__(self, config: BERTConfig, weight: Tensor) -> None:
        super().__init__()
        self.transform = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, config.epsilon)
        self.weight = weight
        self.bias = nn.Parameter(torch.empty(config.vocabulary))
        self._activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor, info: SequenceInfo | None = None, targets: Tensor | None = None) -> Any:
        """Return the logits (..., vocabulary), or the summed loss and the number of targets if `targets` is given."""
        if targets is not None:
            return self.vocabulary.loss(x, targets, self.weight, self.bias, self._before)
        return self.vocabulary.logits(self._before(x), self.weight, self.bias)

    def _before(self, x: Tensor) -> Tensor:
        normal: Tensor = self.norm(self._activation(self.transform(x)))
        return normal


class ClassifierHead(nn.Module):
    """Classifies a sequence from the output at its first position, with tanh pooling, dropout and a linear layer."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.pooler = nn.Linear(config.width, config.width)
        self.classifier = nn.Linear(config.width, config.classes)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, info: SequenceInfo | None = None, targets: Tensor | None = None) -> Any:
        """Return the logits (batch, classes), or the summed loss and the number of targets if `targets` is given."""
        logits = self.classifier(self.dropout(torch.tanh(self.pooler(x[:, 0]))))
        return logits if targets is None else class_loss(logits, targets)


class BERT(Transformer):
    """A bidirectional transformer that masks padding tokens."""

    def __init__(self, *blocks: Any) -> None:
        super().__init__(*blocks)
        first = next(iter(self), None)
        # read here, because a pipeline stage replaces the blocks of other stages; a slice may have no embedding
        self._padding = first.padding if isinstance(first, BERTEmbedding) else None
        self._context = first.context if isinstance(first, BERTEmbedding) else 0

    def prepare(self, inputs: Any, info: SequenceInfo) -> SequenceInfo:
        """Return `info`, with the padding tokens (if configured) in a separate document.

        The other tokens keep their positions.
        """
        info = super().prepare(inputs, info)
        if self._padding is None or info.documents is not None:
            return info
        tokens = inputs[0] if isinstance(inputs, tuple) else inputs
        positions = info.positions
        if positions is None:
            check_context(tokens.shape[1], self._context)
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        return replace(info, documents=(tokens == self._padding).int(), positions=positions)


def bert(config: BERTConfig) -> BERT:
    """Return a BERT model without the weight initialization of `build_bert`.

    The model ends with a classifier if `config.classes` is not 0, and otherwise with a head for masked tokens.
    """
    embedding = BERTEmbedding(config)
    layers = [BERTBlock(config) for _ in range(config.layers)]
    head = ClassifierHead(config) if config.classes else MaskedTokenHead(config, embedding.tokens.weight)
    model = BERT(embedding, *layers, head)
    model.config = config
    return model


def build_bert(config: BERTConfig, seed: int | None = None) -> BERT:
    """Return a BERT model with initial weights, on torch's default device.

    Args:
        seed: the seed for the initial weights, by default a seed drawn from torch's global generator.  Unused on the
            meta device.
    """
    device = torch.get_default_device()
    with meta_device():  # skips torch's default initialization
        model = bert(config)
    if device.type == "meta":
        return model
    if seed is None:
        seed = int(torch.randint(2**63 - 1, (), device="cpu"))
    for index, block in enumerate(model):
        initialize(block.to_empty(device=device), block_generator(seed, index))
    embedding, head = model[0], model[-1]
    if isinstance(head, MaskedTokenHead) and isinstance(embedding, BERTEmbedding):
        head.weight = embedding.tokens.weight  # tie the weights again after `to_empty`
    return model


def block_generator(seed: int, index: int) -> torch.Generator:
    """Return the random generator for block `index` of a model with seed `seed`."""
    digest = hashlib.blake2b(str(seed).encode(), digest_size=4).digest()
    # torch uses 32 bits of a seed; adding the index keeps the block seeds distinct
    return torch.Generator().manual_seed((int.from_bytes(digest) + index) % 2**32)


@torch.no_grad()
def initialize(block: nn.Module, generator: torch.Generator) -> None:
    """Initialize one block: weights drawn from N(0, 0.02^2), zero biases, and identity normalizations.

    Random numbers are drawn in fp32 on the generator's device, so the weights do not depend on the block's device or
    dtype.  The `weight` of a `MaskedTokenHead` is not changed, because it is the token embedding's weight.

    Raises:
        ValueError: if the block is on the meta device.
    """
    for module in block.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            _draw(module.weight, generator)
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, nn.Linear | nn.LayerNorm | MaskedTokenHead):
            nn.init.zeros_(module.bias)


def _draw(weight: Tensor, generator: torch.Generator) -> None:
    if weight.is_meta:
        raise ValueError(
            "cannot initialize a block on the meta device; call block.to_empty(device=...) first"
        )
    if weight.dtype == torch.float32 and weight.device == generator.device:
        weight.normal_(std=0.02, generator=generator)
    else:
        drawn = torch.empty(weight.shape, dtype=torch.float32, device=generator.device)
        weight.copy_(drawn.normal_(std=0.02, generator=generator))
