"""Task "classify": fine-tune a BERT model to classify texts, or a ViT model to classify images.

Texts are read from JSON lines, Parquet or Arrow files with the fields `data.field` (the text) and `data.label` (a class
name or number).  Images are read as for task "images".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from farandole.data.cache import Progress
from farandole.data.labeled import LabeledTexts, prepare_labeled
from farandole.train.config import ConfigError, TrainConfig
from farandole.train.folders import describe_folder, folder_of, model_files, open_folder_model
from farandole.train.images import ImagesTask
from farandole.train.run_folder import TOKENIZER
from farandole.train.tasks import Mean, Task


def ClassifyTask(  # noqa: N802 - returns one of two classes
    config: TrainConfig, progress: Progress = lambda what, share: None
) -> Task:
    """Create the task for the configured model: text classification for a BERT, or image classification for a ViT."""
    if not config.model.folder:
        raise ConfigError(
            "task='classify' requires a model to fine-tune; set the folder of a BERT or ViT model with model=FOLDER"
        )
    origin = describe_folder(config, ("bert", "vit"))
    return (
        TextClassification(config, progress)
        if origin.architecture.name == "bert"
        else ImageClassification(config)
    )


class TextClassification(Task):
    """Text classification with a BERT model.  The metric "accuracy" is the fraction of correctly classified texts."""

    unit = "texts"
    train: LabeledTexts
    validation: LabeledTexts
    also_train = ("*.pooler", "*.classifier")

    def __init__(self, config: TrainConfig, progress: Progress = lambda what, share: None) -> None:
        self._config = config
        sizes = describe_folder(config, ("bert",)).config
        found = prepare_labeled(
            config.data.path,
            folder_of(config) / TOKENIZER,
            context=min(config.model.context, sizes.context),
            vocabulary=sizes.vocabulary,
            field=config.data.field,
            label=config.data.label,
            padding=sizes.padding or 0,
            validation_share=config.data.validation_share,
            cache=Path(config.data.cache).expanduser() if config.data.cache else None,
            progress=progress,
        )
        self.classes, self.train, self.validation = found.classes, found.train, found.validation
        self.build(config)  # rejects a damaged folder

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens in each text."""
        return self.train.lengths

    def build(self, config: TrainConfig) -> nn.Module:
        """Return the model from the model folder, with a classifier for the task's classes."""
        return open_folder_model(self._config, classes=len(self.classes))

    def batch(
        self, samples: Any, numbers: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        """Return the padded tokens and the classes of the samples at the indices `numbers`."""
        tokens, labels = samples.read(numbers)
        return torch.from_numpy(tokens), torch.from_numpy(labels)

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Mean:
        """Return the summed cross-entropy in nats, and the number of texts."""
        return torch.nn.functional.cross_entropy(output.float(), batch[1], reduction="sum"), len(output)

    def metrics(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Mapping[str, Mean]:
        """Return the accuracy."""
        return {"accuracy": ((output.argmax(-1) == batch[1]).sum(), len(output))}

    def report(self, model: nn.Module) -> str:
        """Return a line with the class names, in the order of the classifier's outputs."""
        return "classes: " + ", ".join(map(str, self.classes))

    def files(self) -> Mapping[str, Path]:
        """Return the model's configuration and tokenizer files."""
        return model_files(folder_of(self._config))


class ImageClassification(ImagesTask):
    """Image classification with a ViT model.  `preprocessor_config.json` specifies the image normalization."""

    also_train = ("*.classifier",)

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        sizes = describe_folder(config, ("vit",)).config
        if sizes.height != sizes.image_width or sizes.channels != 3:
            raise ConfigError(
                f"model={config.model.folder} requires images with {sizes.height} x {sizes.image_width} pixels and "
                f"{sizes.channels} channels, but task='classify' supports only square images with 3 channels; use "
                "another model"
            )
        super().__init__(
            config.model_copy(update={"images": config.images.model_copy(update={"size": sizes.height})})
        )
        self._positions: int = sizes.positions
        file = folder_of(config) / "preprocessor_config.json"
        if file.is_file():
            found = json.loads(file.read_text())
            self.mean = tuple(found.get("image_mean") or self.mean)
            self.deviation = tuple(found.get("image_std") or self.deviation)
        self.build(config)  # rejects a damaged folder

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return an array with one element: the number of positions in every image."""
        return np.array([self._positions])

    def build(self, config: TrainConfig) -> nn.Module:
        """Return the model from the model folder, with a classifier for the task's classes."""
        return open_folder_model(self._config, classes=len(self.classes))

    def report(self, model: nn.Module) -> str:
        """Return a line with the class names, in the order of the classifier's outputs."""
        return "classes: " + ", ".join(self.classes)

    def files(self) -> Mapping[str, Path]:
        """Return the model's configuration and preprocessor files."""
        return model_files(folder_of(self._config))
