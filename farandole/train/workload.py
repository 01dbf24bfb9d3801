"""Describe one rank's work in a training step, as input for the planner.  No training data is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farandole.models.bert import BERTConfig, build_bert
from farandole.models.hf.pretrained import Pretrained
from farandole.models.hf.registry import decoder_names
from farandole.models.meta import meta_device
from farandole.models.resnet import build_resnet, resnet_config
from farandole.planner import Workload
from farandole.train.config import ConfigError, TrainConfig
from farandole.train.folders import (
    build_language_model,
    check_context,
    describe_folder,
    open_folder_model,
)

PLANNED = ("text", "sft", "masked-text", "images", "classify")
"""The tasks that the planner supports."""

_CLASSES = {"bert": 2, "vit": 1000, "images": 1000}
"""The assumed number of classes of each model, used if only the data specifies this number.

The number of classes hardly affects memory and time.
"""

_FULL: dict[str, Any] = {"padding": None}
"""Changes to a model's configuration so that its sequences contain no padding."""


def workload_of(config: TrainConfig, ranks: int, model: nn.Module | None = None) -> Workload:
    """Return the workload of one rank in a training step.

    Args:
        model: the configured model on the meta device, if the caller has already created this model.

    Raises:
        ConfigError: if the planner does not support the task, or if the batch cannot be divided.
    """
    _check_task(config)
    count, samples = config.micro_batches(ranks)
    with meta_device():
        build, example, loss = _parts(config, samples)
        model = model or build()
    return Workload(model=model, example=example, loss=loss, micro_batches=count, checkpoints=True)


def model_of(config: TrainConfig) -> nn.Module:
    """Return the configured model on the meta device.

    Raises:
        ConfigError: if the planner does not support the task.
    """
    _check_task(config)
    with meta_device():
        build, _, _ = _parts(config, 1)
        return build()


def _check_task(config: TrainConfig) -> None:
    if config.task not in PLANNED:
        raise ConfigError(
            f"task={config.task!r}: the planner supports only task={', '.join(PLANNED)}; choose one of them"
        )


def _parts(config: TrainConfig, samples: int) -> tuple[Callable[[], nn.Module], Any, Callable[[Any], Tensor]]:
    """Return the model's factory function, the inputs for `samples` samples, and the loss function."""

    def tokens(positions: int = config.model.context) -> Tensor:
        return torch.empty(samples, positions, dtype=torch.int64)

    if config.task == "images":
        network, size = config.images.network, config.images.size
        try:
            sizes = resnet_config(network, _CLASSES["images"])
        except ValueError as error:
            raise ConfigError(f"images.network: {error}") from None
        return lambda: build_resnet(sizes), torch.empty(samples, 3, size, size), _of_classes
    if config.task == "masked-text":
        bert = BERTConfig(**config.model.sizes())
        return lambda: build_bert(bert), (tokens(), None, tokens()), _mean
    if config.task == "classify":
        if not config.model.folder:
            raise ConfigError(
                "task='classify' requires a model to fine-tune; set the folder of a BERT or ViT model with model=FOLDER"
            )
        origin = describe_folder(config, ("bert", "vit"))
        classes = origin.config.classes or _CLASSES[origin.architecture.name]
        changes = _FULL if origin.architecture.name == "bert" else {}
        return (
            lambda: open_folder_model(config, classes=classes, **changes),
            _classified(origin, tokens, samples, config.model.context),
            _of_classes,
        )
    if config.model.folder:
        # with random weights, as in `farandole plan hf:FOLDER`, the model may also be a T5, which no task trains
        origin = describe_folder(
            config, decoder_names() if config.model.pretrained else (*decoder_names(), "t5")
        )
        check_context(config, origin)
        if origin.architecture.name == "t5":
            return lambda: open_folder_model(config, **_FULL), ((tokens(), tokens()), None, tokens()), _mean
    return lambda: build_language_model(config), (tokens(), None, tokens()), _mean


def _classified(origin: Pretrained, tokens: Callable[[int], Tensor], samples: int, context: int) -> Tensor:
    """Return inputs for a classifier: tokens for a BERT, or images for a ViT."""
    sizes = origin.config
    if origin.architecture.name == "bert":
        return tokens(min(context, sizes.context))
    return torch.empty(samples, sizes.channels, sizes.height, sizes.image_width)


def _mean(output: tuple[Tensor, int]) -> Tensor:
    total, number = output
    return total / number


def _of_classes(logits: Tensor) -> Tensor:
    classes = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return F.cross_entropy(logits.float(), classes)
