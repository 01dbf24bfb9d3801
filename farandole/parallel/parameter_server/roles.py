"""Divide ranks into parameter servers and workers."""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType
from typing import Literal

import torch.distributed as dist
from torch import nn

from farandole.comm.communicator import Communicator
from farandole.data.wording import counted
from farandole.parallel.parameter_server.channel import Channel
from farandole.parallel.parameter_server.session import Session
from farandole.parallel.parameter_server.shard import MakeOptimizer

Mode = Literal["sync", "async"]


class ParameterServer:
    """Parameter servers on the first `servers` ranks of `comm`; the other ranks are workers.

    All ranks must create this object, and open the same sessions in the same order, one at a time.

    Args:
        timeout_s: the maximum time in seconds between two calls to `pull` or `push` on a worker, and between two
            messages from a server.

    Raises:
        ValueError: if there is no server or no worker, `timeout_s` is not positive, or `comm` has no process group.
    """

    def __init__(self, comm: Communicator, servers: int = 1, *, timeout_s: float = 600.0) -> None:
        if not 1 <= servers < comm.size:
            most = comm.size - 1
            hint = "start more ranks" if most < 1 else f"servers={min(max(servers, 1), most)} is possible"
            raise ValueError(
                f"expected at least one server and at least one worker, got servers={servers} with "
                f"{counted(comm.size, 'rank')}; {hint}"
            )
        if timeout_s <= 0:
            raise ValueError(f"expected timeout_s above 0, got {timeout_s:g}")
        if getattr(comm, "group", None) is None:
            raise ValueError(
                "expected a communicator of a torch process group, got one from split or create_group; use "
                "Communicator(torch.distributed.new_group(ranks))"
            )
        self.rank = comm.rank
        self.servers = list(range(servers))
        """The ranks that store parameters."""
        self.workers = list(range(servers, comm.size))
        """The ranks that train."""
        self.timeout_s = timeout_s
        self.sessions = 0
        self.channels: dict[int, Channel] = {}
        """This rank's channels, by the rank at the other end."""
        self._connect(comm)

    @property
    def is_server(self) -> bool:
        """Whether this rank is a server."""
        return self.rank in self.servers

    def session(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        *,
        mode: Mode = "sync",
        staleness: int | None = None,
        split: bool = True,
    ) -> Session:
        """Return a session that trains `model`.

        All ranks must pass the same model and options.

        Args:
            optimizer: a function that returns the optimizer for a list of parameters; each server calls it.
            mode: "sync" applies the mean gradient of all workers; "async" applies each gradient on arrival.
            staleness: with "async", the maximum number of gradients by which a worker may be ahead of the slowest
                worker; None for no bound.
            split: whether large tensors may be divided among servers.

        Raises:
            ValueError: if options are invalid or conflict.
            TypeError: if `optimizer` is an optimizer instead of a function.
        """
        if not callable(optimizer):
            raise TypeError(
                f"expected a function that creates a server's optimizer, got {type(optimizer).__name__}; "
                "try optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
            )
        if mode not in ("sync", "async"):
            raise ValueError(f"expected mode='sync' or 'async', got {mode!r}")
        if staleness is not None and mode == "sync":
            raise ValueError(
                "staleness applies to mode='async' only, because workers never run ahead with mode='sync': "
                "omit staleness"
            )
        if staleness is not None and staleness < 0:
            raise ValueError(f"expected staleness of at least 0, or None for no bound, got {staleness}")
        self.sessions += 1
        return Session(self, model, optimizer, mode, staleness, split)

    def abandon(self, error: BaseException) -> None:
        """Notify the connected ranks that this rank has failed with `error`."""
        for channel in self.channels.values():
            channel.abandon(f"it failed with {type(error).__name__}: {error}")

    def forget(self, worker: int) -> None:
        """On a server, exclude a lost worker from this session and later sessions."""
        self.channels.pop(worker).abandon("the server excluded this worker")

    def close(self) -> None:
        """Close all channels."""
        for channel in self.channels.values():
            channel.close()
        self.channels = {}

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abandon(error)
        self.close()

    def _connect(self, comm: Communicator) -> None:
        backend = dist.get_backend(comm.group)
        world = [dist.get_global_rank(comm.group, rank) for rank in range(comm.size)]
        # all ranks create the groups in the same order, because `new_group` is a collective call
        for server in self.servers:
            for worker in self.workers:
                group = dist.new_group(
                    [world[server], world[worker]],
                    timeout=timedelta(seconds=self.timeout_s),
                    backend=backend,
                    use_local_synchronization=comm.size < dist.get_world_size(),
                )
                if self.rank in (server, worker):
                    peer = worker if self.rank == server else server
                    self.channels[peer] = Channel(group, peer)
