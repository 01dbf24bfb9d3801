"""The state of a training program in torch: models, optimizers, schedulers, samplers and plain objects."""

from __future__ import annotations

import copy
from typing import Any

import torch

from farandole.horovod.common.basics import rank
from farandole.horovod.common.elastic import ObjectState
from farandole.horovod.torch.elastic.sampler import ElasticSampler
from farandole.horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)


class _Handler:
    """Saves, restores and broadcasts one thing that has a state_dict."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._saved = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        """Keep a copy."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Go back to the copy."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Take over rank 0's."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()


class _ModelHandler(_Handler):
    def sync(self) -> None:
        """Take over rank 0's tensors."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class _OptimizerHandler(_Handler):
    def sync(self) -> None:
        """Take over rank 0's state and options."""
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


_HANDLERS: tuple[tuple[type, type[_Handler]], ...] = (
    (torch.nn.Module, _ModelHandler),
    (torch.optim.Optimizer, _OptimizerHandler),
    (torch.optim.lr_scheduler.LRScheduler, _Handler),
    (ElasticSampler, _Handler),
)


class TorchState(ObjectState):
    """The state of a training program: each argument is an attribute.

    model, optimizer, and keyword arguments that are modules, optimizers, schedulers or `ElasticSampler`s are saved
    and restored in place; other objects as `ObjectState` does.
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
        """Keep a copy of everything in memory."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to the copies."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Make everything as it is on rank 0."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Divide the samples among the new world."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers:
            handlers[name] = type(handlers[name])(value)
        super().__setattr__(name, value)
