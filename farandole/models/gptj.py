"""GPT-J: a decoder-only transformer whose blocks compute attention and the feed-forward network in parallel.

Following Wang and Komatsuzaki, 2021, "GPT-J-6B", each block has one normalization, interleaved rotary positions for the
first values in each head, and no attention biases.  The head has a bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from farandole.models.layers import Embedding, FeedForward, Head, SelfAttention, initialize
from farandole.models.rotary import Rotary
from farandole.models.sequence import SequenceInfo, Transformer


@dataclass(frozen=True)
class GPTJConfig:
    """The configuration of a GPT-J model.

    `rotary` is the number of rotated values per head.  `inner` is the feed-forward width; 0 selects 4 times `width`.

    Raises:
        ValueError: if `width` is not a multiple of `heads`.
    """

    vocabulary: int
    layers: int
    heads: int
    width: int
    rotary: int
    inner: int = 0
    activation: str = "gelu_new"
    epsilon: float = 1e-5
    dropout: float = 0.0
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0
    tied: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"width={self.width} is not a multiple of heads={self.heads}; change one of them"
            )

    @property
    def inner_width(self) -> int:
        """Return the feed-forward width."""
        return self.inner or 4 * self.width


class ParallelBlock(nn.Module):
    """One layer, which computes attention and a feed-forward network in parallel.

    Both are applied to the normalized input, and both outputs are added to the input.
    """

    def __init__(self, config: GPTJConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width, config.epsilon)
        self.attention = SelfAttention(
            config.width,
            config.heads,
            bias=False,
            rotary=Rotary(config.rotary, interleaved=True),
            dropout=config.attention_dropout,
        )
        self.feed_forward = FeedForward(config.width, config.inner_width, config.activation)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, info: SequenceInfo | None = None) -> Tensor:
        """Map (batch, positions, width) to the same shape."""
        normal = self.norm(x)
        return x + self.dropout(self.attention(normal, info)) + self.dropout(self.feed_forward(normal))


def gptj(config: GPTJConfig) -> Transformer:
    """Return a GPT-J model without the weight initialization of `build_gptj`."""
    norm = partial(nn.LayerNorm, eps=config.epsilon)
    embedding = Embedding(config.vocabulary, config.width, dropout=config.embedding_dropout)
    weight = embedding.tokens.weight if config.tied else None
    head = Head(config.width, config.vocabulary, norm, weight, bias=True)
    model = Transformer(embedding, *(ParallelBlock(config) for _ in range(config.layers)), head)
    model.config = config
    return model


def build_gptj(config: GPTJConfig) -> Transformer:
    """Return a GPT-J model with initial weights drawn from torch's global generator."""
    model = gptj(config)
    initialize(model)
    return model
