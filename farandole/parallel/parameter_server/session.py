"""One training run with parameter servers."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn

from farandole.parallel.parameter_server.channel import Kind, Plan
from farandole.parallel.parameter_server.layout import Packing, divide
from farandole.parallel.parameter_server.schedule import Asynchronous, Schedule, Synchronous
from farandole.parallel.parameter_server.server import Report, Server
from farandole.parallel.parameter_server.shard import MakeOptimizer, Shard
from farandole.parallel.parameter_server.worker import Worker

if TYPE_CHECKING:
    from farandole.parallel.parameter_server.roles import ParameterServer


class Session:
    """A context manager for one training run, created by `ParameterServer.session`.

    All ranks must enter the context.  A worker repeatedly calls `pull`, computes gradients with `backward`, and calls
    `push`.  The initial parameters come from the first worker's model.  After the `with` statement, all workers'
    models have the same final parameters.  Frozen parameters and buffers (running statistics) remain local to each
    worker.

    On a server, the body of the `with` statement should be empty, because the server starts serving when the body
    ends.  The `with` statement ends when all workers have left; `report` then contains the statistics.  If workers
    are lost, the server continues without them.
    """

    def __init__(
        self,
        roles: ParameterServer,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        mode: str,
        staleness: int | None,
        split: bool,
    ) -> None:
        self.is_worker = not roles.is_server
        self.worker = roles.workers.index(roles.rank) if self.is_worker else None
        """This worker's index among the workers; None on a server."""
        self.workers = len(roles.workers)
        """The number of workers at the start."""
        self.report: Report | None = None
        """The statistics on a server, available after the `with` statement."""
        self._roles = roles
        self._make_optimizer = make_optimizer
        self._mode, self._staleness = mode, staleness
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError(
                "the model has no parameter that requires a gradient: set requires_grad=True for parameters to train"
            )
        self._parameters = [parameter for _, parameter in named]
        shares = divide(self._parameters, len(roles.servers), split=split)
        self._packings = [Packing(pieces, self._parameters) for pieces in shares]
        count = sum(parameter.numel() for parameter in self._parameters)
        summary = (
            f"session {roles.sessions}, mode {mode}, staleness {staleness}, split {split}, {count} parameters"
        )
        shapes = [(name, tuple(p.shape), p.dtype) for name, p in named]
        self._plan = Plan(f"{summary} in {len(shapes)} tensors", _fingerprint(f"{summary} {shapes} {shares}"))
        self._remote: Worker | None = None
        self._pulled = False

    @property
    def version(self) -> int:
        """The number of optimizer steps applied to the last pulled parameters; if servers differ, the minimum."""
        return min(self._worker().version)

    def pull(self) -> None:
        """Wait for the latest parameters, copy them to the model, and clear the model's gradients.

        Raises:
            ServerLost: if a server died or does not respond.
        """
        self._worker().pull()
        for parameter in self._parameters:
            parameter.grad = None
        self._pulled = True

    def push(self, *, weight: float = 1.0) -> None:
        """Send the model's gradients to the servers.

        Call this method once after each `pull`.

        Args:
            weight: with mode="sync", the weight of this gradient in the mean, such as its number of samples.

        Raises:
            ServerLost: if a server died or does not respond.
            RuntimeError: if `pull` has not been called since the last `push`.
            ValueError: if a gradient is sparse, or `weight` is invalid.
        """
        worker = self._worker()
        if not self._pulled:
            raise RuntimeError(
                "push() must follow a pull(): call pull() before each push(), because gradients belong to the parameters that were pulled"
            )
        if self._mode == "async" and weight != 1.0:
            raise ValueError("weight applies to mode='sync' only; with mode='async', scale the loss instead")
        if not 0 < weight < float("inf"):
            raise ValueError(f"expected a finite weight above 0, got {weight}")
        if any(p.grad is not None and p.grad.layout is not torch.strided for p in self._parameters):
            raise ValueError(
                "parameter servers do not support sparse gradients: create embeddings with sparse=False"
            )
        self._pulled = False
        worker.push(weight)

    def __enter__(self) -> Session:
        if self.is_worker:
            channels = [self._roles.channels[rank] for rank in self._roles.servers]
            self._remote = Worker(self._parameters, self._packings, channels)
            self._guarded(lambda: self._worker().begin(self._plan))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._roles.abandon(error)
        elif self.is_worker:
            self._guarded(self._worker().finish)
        else:
            self._guarded(self._serve)
        self._remote = None

    def _worker(self) -> Worker:
        if not self.is_worker:
            raise RuntimeError(
                f"rank {self._roles.rank} is a server (servers: ranks {self._roles.servers}), which cannot "
                "pull or push: train only if session.is_worker"
            )
        if self._remote is None:
            raise RuntimeError("the session is not open: call pull() and push() within its `with` block")
        return self._remote

    def _serve(self) -> None:
        roles = self._roles
        try:
            shard = Shard(self._packings[roles.rank], self._make_optimizer)
        except Exception as error:
            self._refuse(f"the server (rank {roles.rank}) cannot create its optimizer: {error}")
            raise
        schedule: Schedule
        if self._mode == "sync":
            schedule = Synchronous(roles.channels, shard.apply)
        else:
            schedule = Asynchronous(roles.channels, shard.apply, self._staleness)
        server = Server(self._plan, roles.rank, shard, schedule, roles.channels, roles.timeout_s)
        self.report = server.report
        server.serve()
        for worker in self.report.lost:
            roles.forget(worker)

    def _refuse(self, reason: str) -> None:
        """Answer every worker's HELLO message with REFUSED and `reason`."""
        for channel in self._roles.channels.values():
            with contextlib.suppress(RuntimeError):  # a lost worker needs no answer
                channel.receive()
                channel.send_text(Kind.REFUSED, reason)

    def _guarded(self, part: Callable[[], object]) -> None:
        """Call `part`; if it fails, notify the connected ranks and raise the exception again."""
        try:
            part()
        except BaseException as error:
            self._roles.abandon(error)
            raise


def _fingerprint(text: str) -> int:
    """Return a 48-bit hash of `text`; a float64 header field represents 48-bit integers exactly."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
