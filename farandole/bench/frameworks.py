"""The seam between the training benchmark and the framework that trains."""

from __future__ import annotations

from typing import Protocol

from farandole.bench.setup import BenchError, TrainingSetup
from farandole.launch.runtime import Runtime


class Training(Protocol):
    """One rank's side of a training that is ready to run."""

    def step(self) -> None:
        """Forward, backward, reduction of the gradients, optimizer: one batch."""

    def finish(self) -> None:
        """Wait until the device has done what `step` asked of it."""

    def close(self) -> None:
        """Let go of what the engine holds, before the ranks leave their job."""


class Framework(Protocol):
    """What can build trainings of a setup."""

    def check(self, setup: TrainingSetup) -> None:
        """Raise `BenchError`, before a rank starts, for what this framework cannot do."""

    def build(self, setup: TrainingSetup, runtime: Runtime, engine: str) -> Training:
        """A training of this rank, by one of the framework's engines; called by all ranks in the same order.

        The engine "alone" trains without communication: what efficiency is compared with.
        """


def find_framework(name: str) -> Framework:
    """The framework of a setup.  `BenchError` if it is not here."""
    if name == "pytorch":
        from farandole.bench.torch_training import PyTorch

        return PyTorch()
    if name == "tensorflow":
        from farandole.bench.tensorflow import TensorFlow

        return TensorFlow()
    raise BenchError(f"--framework {name} is not supported; there are pytorch and tensorflow")
