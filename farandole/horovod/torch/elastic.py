"""Continue training after ranks have died (`hvd.elastic`, experimental); see `farandole.horovod.elastic`."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from farandole.horovod.basics import rank, size
from farandole.horovod.elastic import ObjectState, State, run_with
from farandole.horovod.state import horovod
from farandole.horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)


class ElasticSampler(Sampler[int]):
    """Splits a dataset among the ranks.  After the world changes, the sampler splits the unprocessed samples again.

    Pass the sampler to `TorchState`, call `record_batch` after each batch, and call `set_epoch` at the *end* of each
    epoch.  Each rank gets the same number of samples, and some samples are repeated if necessary.

    Args:
        dataset: A dataset that supports `len`.
        shuffle: Whether to shuffle the samples.  The order depends on `seed` and the epoch, and is the same on all
            ranks.
        seed: The random seed for shuffling.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, and mark all samples as unprocessed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Mark the next `batch_size` samples of every rank as processed.  `batch_idx` is ignored."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and the number of samples that all ranks have processed in total."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, and split the unprocessed samples among the ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Split the unprocessed samples among the ranks in the current world."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        # rank r takes every num_replicas-th sample, so that all ranks' batches form a prefix of remaining_indices
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        padded = list(self.remaining_indices)
        while padded and len(padded) < self.total_size:
            padded += padded[: self.total_size - len(padded)]
        self.indices = padded[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


class _Handler:
    """Saves, restores and broadcasts an object with a state_dict."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._saved = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        """Save a copy."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Replace the state with rank 0's state, and save a copy."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()


class _ModelHandler(_Handler):
    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class _OptimizerHandler(_Handler):
    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


_HANDLERS: tuple[tuple[type, type[_Handler]], ...] = (
    (torch.nn.Module, _ModelHandler),
    (torch.optim.Optimizer, _OptimizerHandler),
    (torch.optim.lr_scheduler.LRScheduler, _Handler),
    (ElasticSampler, _Handler),
)


class TorchState(ObjectState):
    """A training program's state.  Each argument becomes an attribute.

    Modules, optimizers, learning rate schedulers and `ElasticSampler` objects are saved and restored through their
    state_dict methods.  Other objects are saved as deep copies.

    Args:
        model: The model.
        optimizer: The optimizer.
        kwargs: Additional objects.
    """

    def __init__(self, model: torch.nn.Module | None = None, optimizer: Any = None, **kwargs: Any) -> None:
        given = {"model": model, "optimizer": optimizer} | kwargs
        self._handlers: dict[str, _Handler] = {}
        plain = {}
        for name, value in given.items():
            handler = next((make(value) for kind, make in _HANDLERS if isinstance(value, kind)), None)
            if handler is None:
                plain[name] = value
            else:
                self._handlers[name] = handler
                object.__setattr__(self, name, value)
        super().__init__(broadcast_object, rank, **plain)

    def save(self) -> None:
        """Save a copy of the state in memory."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Restore the state from the saved copies."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Replace the state on all ranks with rank 0's state, and save a copy."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Split each `ElasticSampler`'s unprocessed samples among the ranks in the new world."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers:
            handlers[name] = type(handlers[name])(value)
        super().__setattr__(name, value)


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function whose first argument is an elastic state.

    When a rank dies, the decorated function restores the last commit, forms a new world from the surviving ranks, and
    calls the training function again.
    """
    return run_with(function, reset=horovod.reform, begin=horovod.prepare_to_reform)


__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
