"""The interface between the training benchmark and a framework."""

from __future__ import annotations

from typing import Protocol

from farandole.bench.setup import BenchError, TrainingSetup
from farandole.launch.runtime import Runtime


class Training(Protocol):
    """A training run on one rank, ready to start."""

    def step(self) -> None:
        """Run one step: forward pass, backward pass, gradient reduction, optimizer."""

    def finish(self) -> None:
        """Synchronize the device."""

    def close(self) -> None:
        """Release the resources of the implementation before the job ends."""


class Framework(Protocol):
    """Creates training runs for a setup."""

    def check(self, setup: TrainingSetup) -> None:
        """Raise BenchError for options that this framework does not support; called before any rank starts."""

    def build(self, setup: TrainingSetup, runtime: Runtime, implementation: str) -> Training:
        """Return this rank's training run with one of the framework's implementations.  This is a collective call.

        The implementation "alone" trains without communication, as the reference for the efficiency.
        """


def find_framework(name: str) -> Framework:
    """Return the framework for a setup; raise BenchError if it is unavailable."""
    if name == "pytorch":
        from farandole.bench.torch_training import PyTorch

        return PyTorch()
    if name == "tensorflow":
        from farandole.bench.tensorflow import TensorFlow

        return TensorFlow()
    raise BenchError(f"--framework {name} is not supported; use pytorch or tensorflow")
