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
from farandole.data.errors import DataError
from farandole.data.sampler import permute
from farandole.data.sources import find_source
from farandole.data.tokenizer import load_tokenizer
from farandole.train.config import ConfigError, TrainConfig
from farandole.train.folders import describe_folder, folder_of, model_files, open_folder_model
from farandole.train.images import ImagesTask
from farandole.train.tasks import Mean, Task

_BATCH = 1024


def ClassifyTask(  # noqa: N802 - returns one of two classes
    config: TrainConfig, progress: Progress = lambda what, share: None
) -> Task:
    """Create the classification task for the model's family."""
    if not config.model.folder:
        raise ConfigError(
            "task='classify' fine-tunes an existing model; set the folder of a BERT or ViT model with model=FOLDER"
        )
    origin = describe_folder(config, ("bert", "vit"))
    return (
        TextClassification(config, progress)
        if origin.architecture.name == "bert"
        else ImageClassification(config)
    )


class _Texts:
    """Tokenized texts and their classes."""

    def __init__(self, tokens: list[NDArray[np.int64]], labels: NDArray[np.int64], padding: int) -> None:
        self._tokens, self.labels, self._padding = tokens, labels, padding
        self.lengths = np.array([len(row) for row in tokens], np.int64)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> tuple[NDArray[np.int64], int]:
        return self._tokens[index], int(self.labels[index])

    def read(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return padded tokens (n, positions) and classes (n)."""
        rows = [self._tokens[int(number)] for number in numbers]
        tokens = np.full((len(rows), max(map(len, rows))), self._padding, np.int64)
        for row, values in zip(tokens, rows, strict=True):
            row[: len(values)] = values
        return tokens, self.labels[numbers]


class TextClassification(Task):
    """Text classification with a BERT model.  The metric "accuracy" is the fraction of correctly classified texts."""

    unit = "texts"
    train: _Texts
    validation: _Texts

    def __init__(self, config: TrainConfig, progress: Progress = lambda what, share: None) -> None:
        self._config, folder = config, folder_of(config)
        origin = describe_folder(config, ("bert",))
        field, label = config.data.field, config.data.label
        texts, names = [], []
        for where, record in find_source(config.data.path, field).records((field, label)):
            if not isinstance(record.get(field), str) or not isinstance(record.get(label), str | int):
                raise DataError(
                    f'{where}: expected text in "{field}" and a class in "{label}"; the record has these fields: '
                    f"{', '.join(record)}; select fields with data.field= and data.label="
                )
            texts.append(record[field])
            names.append(record[label])
        self.classes = sorted(set(names), key=lambda name: (isinstance(name, str), name))
        if len(self.classes) < 2:
            raise DataError(
                f"data.path={config.data.path}: expected two or more classes, found {len(self.classes)}; select the "
                "field of the class with data.label="
            )
        try:
            tokenizer = load_tokenizer(folder / "tokenizer.json")
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{folder / 'tokenizer.json'} is damaged: {error}; restore the file") from None
        context = min(config.model.context, origin.config.context)
        tokenizer.enable_truncation(context)
        tokenizer.no_padding()
        tokens: list[NDArray[np.int64]] = []
        for start in range(0, len(texts), _BATCH):
            encodings = tokenizer.encode_batch(texts[start : start + _BATCH])
            tokens += [np.array(encoding.ids, np.int64) for encoding in encodings]
            progress("encoding texts", len(tokens) / len(texts))
        largest = max(int(row.max(initial=0)) for row in tokens)
        if largest >= origin.config.vocabulary:
            raise DataError(
                f"{folder / 'tokenizer.json'} contains token {largest}, but the model's vocabulary has "
                f"only {origin.config.vocabulary} tokens; use the model's tokenizer"
            )
        numbers = {name: number for number, name in enumerate(self.classes)}
        labels = np.array([numbers[name] for name in names], np.int64)
        order = permute(np.arange(len(texts)), len(texts), 0, 0)
        held_out = max(1, round(config.data.validation_share * len(texts)))
        padding = origin.config.padding or 0
        self.validation, self.train = (
            _Texts([tokens[int(i)] for i in part], labels[part], padding)
            for part in (order[:held_out], order[held_out:])
        )
        self.build(config)  # rejects a damaged folder

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the numbers of tokens in the texts."""
        return self.train.lengths

    def build(self, config: TrainConfig) -> nn.Module:
        """Return the model of the folder with a classifier."""
        return open_folder_model(config, classes=len(self.classes))

    def batch(
        self, samples: Any, numbers: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        """Return padded tokens and classes."""
        tokens, labels = samples.read(numbers)
        return torch.from_numpy(tokens), torch.from_numpy(labels)

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Mean:
        """Return the summed cross-entropy in nats, and the number of texts."""
        return torch.nn.functional.cross_entropy(output.float(), batch[1], reduction="sum"), len(output)

    def metrics(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Mapping[str, Mean]:
        """Return the accuracy."""
        return {"accuracy": ((output.argmax(-1) == batch[1]).sum(), len(output))}

    def report(self, model: nn.Module) -> str:
        """Return the names of the classes, in the order of the classifier."""
        return "classes: " + ", ".join(map(str, self.classes))

    def files(self) -> Mapping[str, Path]:
        """Return the model's configuration and tokenizer files."""
        return model_files(folder_of(self._config))


class ImageClassification(ImagesTask):
    """Image classification with a ViT model.  `preprocessor_config.json` specifies the image normalization."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        sizes = describe_folder(config, ("vit",)).config
        if sizes.height != sizes.image_width or sizes.channels != 3:
            raise ConfigError(
                f"model={config.model.folder} needs images with {sizes.height} x {sizes.image_width} pixels and "
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
        """Return the number of positions of all images."""
        return np.array([self._positions])

    def build(self, config: TrainConfig) -> nn.Module:
        """Return the model of the folder with a classifier."""
        return open_folder_model(config, classes=len(self.classes))

    def report(self, model: nn.Module) -> str:
        """Return the names of the classes, in the order of the classifier."""
        return "classes: " + ", ".join(self.classes)

    def files(self) -> Mapping[str, Path]:
        """Return the model's configuration file."""
        return model_files(folder_of(self._config))
