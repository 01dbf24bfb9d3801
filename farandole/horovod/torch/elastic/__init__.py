"""`hvd.elastic`: programs that go on when ranks die; see `farandole.horovod.common.elastic`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from farandole.horovod.common.basics import horovod
from farandole.horovod.common.elastic import ObjectState, State, run_with
from farandole.horovod.torch.elastic.sampler import ElasticSampler
from farandole.horovod.torch.elastic.state import TorchState


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of an elastic state: it is called again from the last commit when the world has changed."""
    return run_with(function, reset=horovod.reform, begin=horovod.prepare_to_reform)


__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
