"""The options of the training benchmark, checked before any rank starts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from farandole.bench.options import BenchError, check_output
from farandole.models.resnet import STRIDE, resnet_config


@dataclass(frozen=True)
class TrainingSetup:
    """Options of the training benchmark.

    In each step, each rank trains on `micro_batch` images of `image_size` x `image_size` pixels.  `autocast` enables
    bf16 autocast.  The benchmark runs `num_warmup_batches` steps that are not measured.  It then takes `num_iters`
    measurements of `num_batches_per_iter` steps each.  Rank 0 writes the result to the file `json`.
    """

    framework: str = "pytorch"
    model: str = "resnet50"
    micro_batch: int = 32
    image_size: int = 224
    num_warmup_batches: int = 10
    num_batches_per_iter: int = 10
    num_iters: int = 10
    autocast: bool = False
    implementation: str = "farandole"
    fp16_allreduce: bool = False
    efficiency: bool = False
    json: str | None = None

    @property
    def title(self) -> str:
        """Return the model's name for the report, such as "ResNet50"."""
        return self.model.replace("resnet", "ResNet")

    def check(self) -> None:
        """Raise BenchError for options that no framework supports."""
        try:
            resnet_config(self.model)
        except ValueError as error:
            raise BenchError(f"--model {self.model}: {error}") from None
        for option, number, least in (
            ("--micro-batch", self.micro_batch, 1),
            ("--num-warmup-batches", self.num_warmup_batches, 0),
            ("--num-batches-per-iter", self.num_batches_per_iter, 1),
            ("--num-iters", self.num_iters, 1),
        ):
            if number < least:
                raise BenchError(f"{option}: expected at least {least}, got {number}")
        if self.image_size < STRIDE:
            raise BenchError(
                f"--image-size {self.image_size} is too small: a ResNet reduces each side by a factor of "
                f"{STRIDE}, so images need at least {STRIDE} x {STRIDE} pixels"
            )
        if self.micro_batch == 1 and self.image_size == STRIDE:
            raise BenchError(
                f"--micro-batch 1 with --image-size {STRIDE} leaves one value per channel, which batch normalization "
                f"cannot normalize; use 2 images or larger images"
            )
        check_output("--json", self.json)

    def dump(self) -> str:
        """Return the setup as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> TrainingSetup:
        """Convert the result of `dump` back to a setup."""
        return TrainingSetup(**json.loads(text))
