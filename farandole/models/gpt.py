"""GPT: a decoder-only transformer.

The blocks and initial weights follow GPT-2 (Radford et al., 2019, "Language Models are Unsupervised Multitask
Learners").  Two defaults differ from GPT-2.  Position embeddings are rotary instead of learned, because small
models then learn much faster from a few million tokens.  The GELU is exact, which is several times faster on a CPU
than the tanh approximation.  `GPTConfig(positions="learned", activation="gelu_new")` selects GPT-2.

    model = build_gpt(GPTConfig(vocabulary=4096, context=256, layers=4, heads=4, width=256))
    logits = model(tokens)                       # (batch, positions) -> (batch, positions, vocabulary)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import nn

from farandole.models.layers import (
    Embedding,
    FeedForward,
    Head,
    SelfAttention,
    TransformerBlock,
    initialize,
)
from farandole.models.rotary import Rotary
from farandole.models.sequence import Transformer


@dataclass(frozen=True)
class GPTConfig:
    """The configuration of a GPT model.

    With vocabulary V, layers L, width D and the default options, the model has exactly

        V D  +  L (12 D^2 + 13 D)  +  2 D

    parameters.  The first term counts the token embeddings.  Each block has 4 D^2 + 4 D parameters for attention, 8 D^2
    + 5 D for the feed-forward network and 4 D for two normalizations.  The last term counts the final normalization.
    The head is tied to the token embedding, and rotary positions have no parameters.  Learned positions would add
    `context` * D parameters.

    Args:
        inner: the feed-forward width; 0 selects 4 D.
        tied: whether the head shares the token embedding.

    Raises:
        ValueError: if `width` is not a multiple of `heads` (of 2 * `heads` with rotary positions).
    """

    vocabulary: int
    context: int
    layers: int
    heads: int
    width: int
    dropout: float = 0.0
    positions: Literal["rotary", "learned"] = "rotary"
    activation: str = "gelu"
    inner: int = 0
    epsilon: float = 1e-5
    tied: bool = True
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        multiple = self.heads * (2 if self.positions == "rotary" else 1)
        if self.width % multiple:
            divisor = "2 * heads" if self.positions == "rotary" else "heads"
            raise ValueError(
                f"width={self.width} is not a multiple of {divisor} = {multiple}; change width or heads"
            )

    @property
    def inner_width(self) -> int:
        """Return the feed-forward width."""
        return self.inner or 4 * self.width

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""
        d, f = self.width, self.inner_width
        embeddings = self.vocabulary * (1 if self.tied else 2) + (
            self.context if self.positions == "learned" else 0
        )
        return embeddings * d + self.layers * (4 * d * d + 2 * d * f + 9 * d + f) + 2 * d

    @property
    def flops_per_token(self) -> int:
        """Return the number of floating-point operations per token in a forward and backward pass.

        Each parameter counts as 6 operations.  Attention over a context of C positions adds 12 L D C (Chowdhery et al.,
        2022, "PaLM: Scaling Language Modeling with Pathways", appendix B).
        """
        return 6 * self.parameters + 12 * self.layers * self.width * self.context


def gpt(config: GPTConfig) -> Transformer:
    """Return a GPT model without the weight initialization of `build_gpt`."""
    norm = partial(nn.LayerNorm, eps=config.epsilon)
    learned = config.positions == "learned"
    rotary = None if learned else Rotary(config.width // config.heads)
    embedding = Embedding(
        config.vocabulary, config.width, config.context if learned else None, config.dropout
    )
    blocks = [
        TransformerBlock(
            config.width,
            norm,
            SelfAttention(config.width, config.heads, rotary=rotary, dropout=config.attention_dropout),
            FeedForward(config.width, config.inner_width, config.activation),
            config.dropout,
        )
        for _ in range(config.layers)
    ]
    weight = embedding.tokens.weight if config.tied else None
    model = Transformer(embedding, *blocks, Head(config.width, config.vocabulary, norm, weight))
    model.config = config
    return model


def build_gpt(config: GPTConfig) -> Transformer:
    """Return a GPT model with GPT-2's weight initialization, drawn from torch's global generator."""
    model = gpt(config)
    initialize(model)
    return model
