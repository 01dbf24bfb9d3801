"""Task "images": train a ResNet to classify images.

`data.path` is a folder with one subfolder of image files per class, or an `.npz` file written by `numpy.savez`.  An
`.npz` file contains the arrays `images` (uint8, of shape (n, height, width) or (n, height, width, 3)) and `labels`
(non-negative integers, of shape (n)).
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from farandole.data.cache import Progress
from farandole.data.errors import DataError
from farandole.data.sampler import mix, permute
from farandole.data.wording import counted
from farandole.models.resnet import build_resnet, resnet_config
from farandole.train.config import ConfigError, TrainConfig
from farandole.train.tasks import Mean, Task

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}


_DAMAGED_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError)
"""The errors that `zipfile` raises for a damaged file."""


class _Source(Protocol):
    """Images and their classes.  An image is a uint8 array of shape (height, width, 3)."""

    labels: NDArray[np.int64]
    classes: list[str]

    def image(self, number: int, size: int) -> NDArray[np.uint8]:
        """Return the image at index `number` with a height and width of `size` pixels."""


class _Folder:
    """A folder with one subfolder of image files per class."""

    def __init__(self, path: Path) -> None:
        self.classes = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        found = [
            (file, number)
            for number, name in enumerate(self.classes)
            for file in sorted((path / name).rglob("*"))
            if file.suffix.lower() in SUFFIXES
        ]
        used = {self.classes[number] for _, number in found}
        if len(used) < 2:
            raise DataError(
                f"data.path={path}: expected images ({', '.join(sorted(SUFFIXES))}) in at least two subfolders, one per "
                f"class; found images in {len(used)} of {counted(len(self.classes), 'subfolder')}"
                + "".join(f": {name}" for name in used)
                + "; put the images of each class into a separate subfolder"
            )
        self._files = [file for file, _ in found]
        self.labels = np.array([number for _, number in found])

    def image(self, number: int, size: int) -> NDArray[np.uint8]:
        try:
            with Image.open(self._files[number]) as image:
                return _square(_rgb(image), size)
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(
                f"cannot read image {self._files[number]}: {error}; convert, restore or remove the file"
            ) from error


class _Arrays:
    """An `.npz` file."""

    def __init__(self, path: Path) -> None:
        try:
            loaded = np.load(path)
            if isinstance(loaded, np.ndarray):
                raise ValueError("found a single array; write the file with numpy.savez")
            with loaded as arrays:
                images, labels = arrays["images"], arrays["labels"]
        except (OSError, ValueError, KeyError, *_DAMAGED_ZIP) as error:
            raise DataError(
                f"data.path={path}: expected an .npz file with the arrays 'images' and 'labels'; reading it failed: "
                f"{str(error) or type(error).__name__}"
            ) from error
        grey = images.ndim == 3
        if images.dtype != np.uint8 or not (grey or (images.ndim == 4 and images.shape[-1] == 3)):
            raise DataError(
                f"data.path={path}: expected uint8 images of shape (n, height, width) or (n, height, width, 3), got "
                f"{images.dtype} images of shape {images.shape}"
            )
        if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
            raise DataError(
                f"data.path={path}: expected integer labels of shape ({len(images)},), got {labels.dtype} "
                f"labels of shape {labels.shape}"
            )
        if labels.min(initial=0) < 0:
            raise DataError(f"data.path={path}: expected labels of at least 0, got {labels.min()}")
        self._images = np.repeat(images[..., None], 3, axis=-1) if grey else images
        self.labels = labels.astype(np.int64)
        self.classes = [str(number) for number in range(int(self.labels.max(initial=0)) + 1)]

    def image(self, number: int, size: int) -> NDArray[np.uint8]:
        """Return image `number`."""
        return _square(Image.fromarray(self._images[number]), size)


def _rgb(image: Image.Image) -> Image.Image:
    """Convert `image` to mode RGB, and scale 16-bit pixels to 8 bits."""
    is_16_bit = image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PPM")
    if image.mode in ("I", "F") and not is_16_bit:
        raise ValueError(
            f"expected pixels of 8 bits per channel, or grayscale pixels of 16 bits; got pixels of mode {image.mode}"
        )
    if is_16_bit:
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def _square(image: Image.Image, size: int) -> NDArray[np.uint8]:
    if image.size != (size, size):
        scale = size / min(image.size)
        image = image.resize((max(size, round(image.width * scale)), max(size, round(image.height * scale))))
        left, top = (image.width - size) // 2, (image.height - size) // 2
        image = image.crop((left, top, left + size, top + size))
    return np.asarray(image)


class _Subset:
    """The images at the indices `numbers` of `source`, with their classes."""

    def __init__(self, source: _Source, numbers: NDArray[np.int64], size: int) -> None:
        self._source, self.numbers, self._size = source, numbers, size

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        number = int(self.numbers[index])
        return self._source.image(number, self._size), int(self._source.labels[number])


class ImagesTask(Task):
    """Image classification with a ResNet.  The metric "accuracy" is the fraction of correctly classified images."""

    unit = "images"
    train: _Subset
    validation: _Subset

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    deviation: tuple[float, ...] = (0.229, 0.224, 0.225)
    """The mean and standard deviation of ImageNet colors, which published weights require."""

    def __init__(self, config: TrainConfig, progress: Progress = lambda what, share: None) -> None:
        path, size = Path(config.data.path).expanduser(), config.images.size
        if not os.path.exists(path):  # unlike Path.exists, returns False for a name that is too long
            raise DataError(
                f"data.path={config.data.path} does not exist: task=images needs a folder with one subfolder of images "
                f"per class, or an .npz file"
            )
        source: _Source = _Folder(path) if path.is_dir() else _Arrays(path)
        if len(source.labels) < 2:
            raise DataError(f"data.path={path}: expected 2 or more images, found {len(source.labels)}")
        shuffled = permute(np.arange(len(source.labels)), len(source.labels), 0, 0)
        held_out = max(1, round(config.data.validation_share * len(shuffled)))
        self.validation = _Subset(source, shuffled[:held_out], size)
        self.train = _Subset(source, shuffled[held_out:], size)
        self.classes = source.classes
        self._flip = config.images.flip
        self._seed = np.random.SeedSequence(config.seed).generate_state(1, np.uint64).astype(np.uint64)
        try:
            self._network = resnet_config(config.images.network, len(source.classes))
        except ValueError as error:
            raise ConfigError(f"images.network: {error}") from None

    def build(self, config: TrainConfig) -> nn.Module:
        """Return the ResNet that `images.network` names, with one output per class."""
        return build_resnet(self._network)

    def batch(
        self, samples: Any, numbers: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        """Return the normalized images at the indices `numbers` of `samples`, and their classes.

        The images have the shape (n, 3, size, size), and the classes have the shape (n).  With `images.flip`, each
        training image is flipped horizontally with probability 1/2.
        """
        pairs = [samples[int(number)] for number in numbers]
        images = np.stack([image for image, _ in pairs])
        if self._flip and samples is self.train:
            drawn = mix(mix(self._seed + epochs.astype(np.uint64)) + numbers.astype(np.uint64))
            mirrored = drawn >> np.uint64(63) == 1
            images[mirrored] = images[mirrored, :, ::-1]
        values = torch.from_numpy(images).permute(0, 3, 1, 2).float().div_(255)
        mean, deviation = torch.tensor(self.mean).view(3, 1, 1), torch.tensor(self.deviation).view(3, 1, 1)
        return values.sub_(mean).div_(deviation), torch.tensor([label for _, label in pairs])

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Mean:
        """Return the summed cross-entropy in nats, and the number of images."""
        return F.cross_entropy(output.float(), batch[1], reduction="sum"), len(output)

    def metrics(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Mapping[str, Mean]:
        """Return the accuracy."""
        return {"accuracy": ((output.argmax(-1) == batch[1]).sum(), len(output))}
