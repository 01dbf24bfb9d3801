"""ViT: an image classifier that applies a transformer to a sequence of image patches.

Following Dosovitskiy et al., 2021, "An Image is Worth 16x16 Words", a convolution embeds the patches, a learned class
token precedes the patches, position embeddings are learned, and a linear layer classifies the normalized class
token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from farandole.models.layers import FeedForward, SelfAttention, TransformerBlock, initialize
from farandole.models.loss import class_loss
from farandole.models.sequence import SequenceInfo, Transformer


@dataclass(frozen=True)
class ViTConfig:
    """The configuration of a ViT model.  Image and patch sizes are in pixels."""

    height: int
    image_width: int
    patch_height: int
    patch_width: int
    layers: int
    heads: int
    width: int
    inner: int
    classes: int
    channels: int = 3
    activation: str = "gelu"
    epsilon: float = 1e-12
    bias: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0

    @property
    def positions(self) -> int:
        """Return the number of positions, including the class token."""
        return 1 + (self.height // self.patch_height) * (self.image_width // self.patch_width)


class PatchEmbedding(nn.Module):
    """Embeds the patches, prepends the class token, and adds learned position embeddings."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        patch = (config.patch_height, config.patch_width)
        self.patches = nn.Conv2d(config.channels, config.width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.positions = nn.Parameter(torch.zeros(1, config.positions, config.width))
        self.dropout = nn.Dropout(config.dropout)
        self._size = (config.height, config.image_width)

    def forward(self, images: Tensor, info: SequenceInfo | None = None) -> Tensor:
        """Map images (batch, channels, height, width) to (batch, 1 + patches, width).

        Raises:
            ValueError: if the image size differs from the configuration.
        """
        if tuple(images.shape[-2:]) != self._size:
            raise ValueError(
                f"expected images of {self._size[0]} x {self._size[1]} pixels, got {images.shape[-2]} x {images.shape[-1]}"
            )
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(images), -1, -1), patches), 1) + self.positions
        dropped: Tensor = self.dropout(x)
        return dropped


class ImageHead(nn.Module):
    """The final normalization, and a linear layer that classifies the class token."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width, config.epsilon)
        self.classifier = nn.Linear(config.width, config.classes)

    def forward(self, x: Tensor, info: SequenceInfo | None = None, targets: Tensor | None = None) -> Any:
        """Return the logits (batch, classes), or the summed loss and the number of targets if `targets` is given."""
        logits = self.classifier(self.norm(x[:, 0]))
        return logits if targets is None else class_loss(logits, targets)


def vit(config: ViTConfig) -> Transformer:
    """Return a ViT model without the weight initialization of `build_vit`."""
    norm = partial(nn.LayerNorm, eps=config.epsilon)
    blocks = [
        TransformerBlock(
            config.width,
            norm,
            SelfAttention(
                config.width,
                config.heads,
                bias=config.bias,
                out_bias=True,
                causal=False,
                dropout=config.attention_dropout,
            ),
            FeedForward(config.width, config.inner, config.activation),
            config.dropout,
        )
        for _ in range(config.layers)
    ]
    model = Transformer(PatchEmbedding(config), *blocks, ImageHead(config))
    model.config = config
    return model


def build_vit(config: ViTConfig) -> Transformer:
    """Return a ViT model with initial weights drawn from torch's global generator."""
    model = vit(config)
    initialize(model)
    embedding = model[0]
    assert isinstance(embedding, PatchEmbedding)
    with torch.no_grad():
        for tensor in (embedding.patches.weight, embedding.class_token, embedding.positions):
            nn.init.trunc_normal_(tensor, std=0.02)
        if embedding.patches.bias is not None:
            nn.init.zeros_(embedding.patches.bias)
    return model
