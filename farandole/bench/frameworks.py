"""The interface between the training benchmark and a framework."""

from __future__ import annotations

from typing import Protocol

from farandole.bench.setup import BenchError, TrainingSetup
from farandole.launch.runtime import Runtime


class Training(Protocol):
    """A training run on one rank, ready to start."""

    def step(self) -> None:
        """Run one step: forward, backward, reduction of gradients, optimizer."""

    def finish(self) -> None:
        """Synchronize the device."""

    def close(self) -> None:
        """Release the resources of the implementation before the job ends."""


class Framework(Protocol):
    """Builds training runs of a setup."""

    def check(self, setup: TrainingSetup) -> None:
        """Raise BenchError, before a rank starts, for options that this framework does not support."""

    def build(self, setup: TrainingSetup, runtime: Runtime, implementation: str) -> Training:
        """Return a training run of this rank with one of the framework's implementations; a collective call.

        The implementation "alone" trains without communication and is the reference of the efficiency.
        """


def find_framework(name: str) -> Framework:
    """Return the framework of a setup; raise BenchError if it is unavailable."""
    if name == "pytorch":
        from farandole.bench.torch_training import PyTorch

        return PyTorch()
    if name == "tensorflow":
        from farandole.bench.tensorflow import TensorFlow

        return TensorFlow()
    raise BenchError(f"--framework {name} is not supported; use pytorch or tensorflow")
