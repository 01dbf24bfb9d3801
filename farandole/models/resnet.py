"""ResNet: a convolutional network that classifies images.

The networks follow He et al., 2016, "Deep Residual Learning for Image Recognition", table 1, in the common variant
v1.5: a bottleneck block halves the image size in its 3 x 3 convolution instead of the preceding 1 x 1 convolution.
Layers and parameters match published checkpoints one to one (`from_torchvision_names`).

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
"""The number of image pixels per value of the last feature map, in each direction.

Images with fewer pixels in a direction are not useful.
"""

EXPANSION = {"basic": 1, "bottleneck": 4}


@dataclass(frozen=True)
class ResNetConfig:
    """The configuration of a ResNet.

    Stage s, from 0 to 3, has `layers[s]` blocks with `width` * 2^s channels.

    A "basic" block has two 3 x 3 convolutions.  A "bottleneck" block has 1 x 1, 3 x 3 and 1 x 1 convolutions, and
    outputs four times as many channels.

    Raises:
        ValueError: if an argument is out of range.
    """

    block: Literal["basic", "bottleneck"]
    layers: tuple[int, int, int, int]
    width: int = 64
    classes: int = 1000

    def __post_init__(self) -> None:
        if self.block not in EXPANSION:
            raise ValueError(f"expected block {' or '.join(EXPANSION)}, got {self.block!r}")
        if len(self.layers) != 4 or min(*self.layers, self.width, self.classes) < 1:
            raise ValueError(f"expected four stages and sizes of at least 1, got {self}")

    @property
    def stages(self) -> list[list[tuple[int, int, int]]]:
        """Return the input channels, inner channels and stride of every block, grouped by stage."""
        channels, stages = self.width, []
        for stage, count in enumerate(self.layers):
            inner = self.width << stage
            blocks = []
            for number in range(count):
                blocks.append((channels, inner, 2 if stage and not number else 1))
                channels = inner * EXPANSION[self.block]
            stages.append(blocks)
        return stages

    @property
    def features(self) -> int:
        """Return the number of channels in the last feature map."""
        return (self.width << 3) * EXPANSION[self.block]

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""

        def convolution(inputs: int, outputs: int, size: int) -> int:
            return inputs * outputs * size * size + 2 * outputs

        count = convolution(3, self.width, 7) + (self.features + 1) * self.classes
        for inputs, inner, stride in (block for stage in self.stages for block in stage):
            outputs = inner * EXPANSION[self.block]
            if self.block == "basic":
                count += convolution(inputs, inner, 3) + convolution(inner, inner, 3)
            else:
                count += convolution(inputs, inner, 1) + convolution(inner, inner, 3)
                count += convolution(inner, outputs, 1)
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
"""The paper's networks, and two networks for tests."""


def resnet_config(name: str, classes: int | None = None) -> ResNetConfig:
    """Return the configuration named `name`, with `classes` classes if given.

    Raises:
        ValueError: if the name is unknown.  The message suggests the closest name.
    """
    if name not in CONFIGS:
        nearest = difflib.get_close_matches(name.lower(), CONFIGS, 1, cutoff=0.4)
        hint = f"; nearest: {nearest[0]}" if nearest else ""
        raise ValueError(f"unknown model {name!r}{hint} (known: {', '.join(CONFIGS)})")
    config = CONFIGS[name]
    return config if classes is None else replace(config, classes=classes)


class Stem(nn.Module):
    """A convolution and max pooling, which reduce the image height and width by a factor of 4."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, config.width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(config.width)

    def forward(self, images: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 3, stride=2, padding=1)


class Shortcut(nn.Sequential):
    """The projection shortcut for a block whose output shape differs from its input shape."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    return Shortcut(inputs, outputs, stride) if stride != 1 or inputs != outputs else nn.Identity()


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with a residual connection."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, inner, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.downsample = _shortcut(inputs, inner, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """Return the batch norm whose output is added to the shortcut."""
        return self.bn2

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x), inplace=True)


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions with a residual connection.

    The last convolution outputs four times as many channels as the others.
    """

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = inner * EXPANSION["bottleneck"]
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)  # stride as in v1.5
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """Return the batch norm whose output is added to the shortcut."""
        return self.bn3

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x), inplace=True)


class Classifier(nn.Module):
    """Global average pooling and a linear layer."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.features, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def build_resnet(config: ResNetConfig, *, zero_last_norm: bool = False) -> nn.Sequential:
    """Return a ResNet: a stem, the blocks of all stages, and a classifier.

    Weights are drawn from torch's global generator, with variance 2 / fan-in for convolutions (He et al., 2015,
    "Delving Deep into Rectifiers", eq. 10) and standard deviation 0.01 for the classifier.

    Args:
        zero_last_norm: whether to initialize the weight of the last batch norm in every block to 0.  Each residual
            branch then starts at 0, which helps with large batches (Goyal et al., 2017, "Accurate, Large Minibatch
            SGD", section 5.1).
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
    """Rename the entries of a torchvision ResNet state dict for a model from `build_resnet`.

    Timm and most checkpoints use torchvision's names: conv1, bn1, layer1.0.conv1, ..., fc.  DistributedDataParallel's
    prefix "module." is removed.

        model.load_state_dict(from_torchvision_names(torch.load("resnet50.pth", weights_only=True)))

    Raises:
        ValueError: if a name is unknown.
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
                f"unexpected name {name!r}; expected torchvision's ResNet names (conv1, bn1, layer1.0.conv1, ..., fc)"
            )
    return renamed
