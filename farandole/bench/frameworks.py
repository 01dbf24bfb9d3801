"""The interface between the training benchmark and a framework."""

from __future__ import annotations

from typing import Protocol

from farandole.bench.options import BenchError
from farandole.bench.setup import TrainingSetup
from farandole.launch.runtime import Runtime


class Training(Protocol):
    """A training run on one rank, ready to start."""

    def step(self) -> None:
        """Run one step: forward pass, backward pass, gradient reduction and optimizer update."""

    def finish(self) -> None:
        """Synchronize the device."""

    def close(self) -> None:
        """Release the resources of this training run; called before the job ends."""


class Framework(Protocol):
    """A deep-learning framework, such as PyTorch, whose training speed the benchmark measures."""

    def check(self, setup: TrainingSetup) -> None:
        """Raise BenchError for options that this framework does not support; called before any rank starts."""

    def build(self, setup: TrainingSetup, runtime: Runtime, implementation: str) -> Training:
        """Return this rank's training run.  This is a collective call.

        Args:
            implementation: the name of one of the framework's implementations of data parallelism, or "alone".  With
                "alone", each rank trains without communication, as the baseline for parallel efficiency.
        """


def find_framework(name: str) -> Framework:
    """Return the framework `name`; raise BenchError if it is not supported."""
    if name == "pytorch":
        from farandole.bench.torch_training import PyTorch

        return PyTorch()
    if name == "tensorflow":
        from farandole.bench.tensorflow import TensorFlow

        return TensorFlow()
    raise BenchError(f"--framework {name} is not supported; use pytorch or tensorflow")
