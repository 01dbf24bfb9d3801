"""ResNet: a convolutional network for images as a plain `nn.Sequential` of blocks.

The networks of He et al., 2016, "Deep Residual Learning for Image Recognition", table 1, in the variant called
v1.5, which everybody trains: a bottleneck block halves the image in its 3 x 3 convolution, not in the 1 x 1
before it.  Layers and parameters correspond one to one with those of published checkpoints
(`from_torchvision_names`).

    model = build_resnet(resnet_config("resnet50"))
    logits = model(images)                       # (batch, 3, height, width) -> (batch, classes)
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

STRIDE = 32
"""Pixels of the image per value of the last feature map, in both directions: no smaller image makes sense."""

EXPANSION = {"basic": 1, "bottleneck": 4}


@dataclass(frozen=True)
class ResNetConfig:
    """The shape of a ResNet: four stages of `layers[s]` blocks, of `width` * 2^s channels.

    A "basic" block is two 3 x 3 convolutions; a "bottleneck" is 1 x 1, 3 x 3, 1 x 1 with four times the
    channels between blocks.
    """

    block: Literal["basic", "bottleneck"]
    layers: tuple[int, int, int, int]
    width: int = 64
    classes: int = 1000

    def __post_init__(self) -> None:
        if self.block not in EXPANSION:
            raise ValueError(f"block {self.block!r} is neither of {', '.join(EXPANSION)}")
        if len(self.layers) != 4 or min(*self.layers, self.width, self.classes) < 1:
            raise ValueError(f"a ResNet has four stages, and at least one of everything: {self}")

    @property
    def stages(self) -> list[list[tuple[int, int, int]]]:
        """For every block: channels in, channels inside, stride."""
        channels, stages = self.width, []
        for stage, count in enumerate(self.layers):
            inside = self.width << stage
            blocks = []
            for number in range(count):
                blocks.append((channels, inside, 2 if stage and not number else 1))
                channels = inside * EXPANSION[self.block]
            stages.append(blocks)
        return stages

    @property
    def features(self) -> int:
        """Channels of the last feature map."""
        return (self.width << 3) * EXPANSION[self.block]

    @property
    def parameters(self) -> int:
        """How many parameters the model has; each convolution is followed by 2 per channel of normalisation."""

        def convolution(inputs: int, outputs: int, size: int) -> int:
            return inputs * outputs * size * size + 2 * outputs

        count = convolution(3, self.width, 7) + (self.features + 1) * self.classes
        for inputs, inside, stride in (block for stage in self.stages for block in stage):
            outputs = inside * EXPANSION[self.block]
            if self.block == "basic":
                count += convolution(inputs, inside, 3) + convolution(inside, inside, 3)
            else:
                count += convolution(inputs, inside, 1) + convolution(inside, inside, 3)
                count += convolution(inside, outputs, 1)
            if stride != 1 or inputs != outputs:
                count += convolution(inputs, outputs, 1)
        return count


CONFIGS = {
    "resnet18": ResNetConfig("basic", (2, 2, 2, 2)),
    "resnet34": ResNetConfig("basic", (3, 4, 6, 3)),
    "resnet50": ResNetConfig("bottleneck", (3, 4, 6, 3)),
    "resnet101": ResNetConfig("bottleneck", (3, 4, 23, 3)),
    "resnet152": ResNetConfig("bottleneck", (3, 8, 36, 3)),
    "tiny": ResNetConfig("basic", (1, 1, 1, 1), width=8, classes=10),
    "tiny-bottleneck": ResNetConfig("bottleneck", (1, 1, 1, 1), width=8, classes=10),
}
"""The networks of the paper by name, and two for trying things out."""


def resnet_config(name: str, classes: int | None = None) -> ResNetConfig:
    """A network by its name, with another number of classes if asked.  ValueError names the nearest."""
    if name not in CONFIGS:
        nearest = difflib.get_close_matches(name.lower(), CONFIGS, 1, cutoff=0.4)
        hint = f"; nearest: {nearest[0]}" if nearest else ""
        raise ValueError(f"there is no model {name!r}{hint} (there are {', '.join(CONFIGS)})")
    config = CONFIGS[name]
    return config if classes is None else replace(config, classes=classes)


class Stem(nn.Module):
    """Images (batch, 3, height, width) to a quarter of the height and width."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, config.width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(config.width)

    def forward(self, images: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 3, stride=2, padding=1)


class Shortcut(nn.Sequential):
    """What is added to a block's result where its shape differs from the input's."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    return Shortcut(inputs, outputs, stride) if stride != 1 or inputs != outputs else nn.Identity()


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions, added to what came in."""

    def __init__(self, inputs: int, inside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, inside, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(inside)
        self.conv2 = nn.Conv2d(inside, inside, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inside)
        self.downsample = _shortcut(inputs, inside, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The normalisation before the addition."""
        return self.bn2

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x), inplace=True)


class Bottleneck(nn.Module):
    """1 x 1 to fewer channels, 3 x 3, and 1 x 1 to four times as many, added to what came in."""

    def __init__(self, inputs: int, inside: int, stride: int) -> None:
        super().__init__()
        outputs = inside * EXPANSION["bottleneck"]
        self.conv1 = nn.Conv2d(inputs, inside, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inside)
        self.conv2 = nn.Conv2d(inside, inside, 3, stride, padding=1, bias=False)  # v1.5: the stride is here
        self.bn2 = nn.BatchNorm2d(inside)
        self.conv3 = nn.Conv2d(inside, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The normalisation before the addition."""
        return self.bn3

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x), inplace=True)


class Classifier(nn.Module):
    """The mean over the image, and logits."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.features, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def build_resnet(config: ResNetConfig, *, zero_last_norm: bool = False) -> nn.Sequential:
    """A ResNet: the stem, the blocks of all stages in a row, the classifier.

    Convolutions start normal with variance 2 / fan-in (He et al., 2015, "Delving Deep into Rectifiers", eq. 10),
    the classifier with deviation 0.01.  With `zero_last_norm` the last normalisation of every block
    starts at 0, so that each block is the identity at first, which helps large batches (Goyal et al., 2017,
    "Accurate, Large Minibatch SGD", section 5.1).  Weights are drawn from torch's global generator.
    """
    kind = BasicBlock if config.block == "basic" else Bottleneck
    blocks = [kind(*shape) for stage in config.stages for shape in stage]
    model = nn.Sequential(Stem(config), *blocks, Classifier(config))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_in = module.in_channels * math.prod(module.kernel_size)
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_in))
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
        if zero_last_norm and isinstance(module, BasicBlock | Bottleneck):
            nn.init.zeros_(module.last_norm.weight)
    return model


def from_torchvision_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A published state dict of a ResNet with the names of `build_resnet`'s.

    Torchvision's names, which timm and most checkpoints share: conv1, bn1, layer1.0.conv1, ..., fc.  The prefix
    "module." that DistributedDataParallel leaves is removed.  ValueError for a name that is none of these.

        model.load_state_dict(from_torchvision_names(torch.load("resnet50.pth", weights_only=True)))
    """
    names = {name: name.removeprefix("module.") for name in state}
    places = {name: re.fullmatch(r"layer([1-4])\.(\d+)\.(.+)", plain) for name, plain in names.items()}
    lengths = [0] * 5
    for found in filter(None, places.values()):
        lengths[int(found[1])] = max(lengths[int(found[1])], int(found[2]) + 1)
    renamed = {}
    for name, tensor in state.items():
        place, plain = places[name], names[name]
        if place is not None:
            stage, number = int(place[1]), int(place[2])
            renamed[f"{1 + sum(lengths[:stage]) + number}.{place[3]}"] = tensor
        elif plain.startswith(("conv1.", "bn1.")):
            renamed[f"0.{plain}"] = tensor
        elif plain.startswith("fc."):
            renamed[f"{1 + sum(lengths)}.{plain}"] = tensor
        else:
            raise ValueError(
                f"{name!r} is not a name in a ResNet's state (conv1, bn1, layer1.0.conv1, ..., fc)"
            )
    return renamed
