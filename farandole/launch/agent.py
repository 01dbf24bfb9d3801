"""torch's elastic agent, as this package wants it: quiet, and quick to stop.

The agent starts the ranks and gives them torchrun's variables.  What happens when one fails, or when a signal
comes, is left to a `Watch`.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SubprocessContext

from farandole.launch.rendezvous import FixedRendezvous
from farandole.launch.reports import Ending, read_report
from farandole.launch.signals import SIGNALS, signals_to_handle
from farandole.launch.watch import Watch

# What the agent logs when a rank fails is said better by `reports`.
logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)


class Agent(LocalElasticAgent):
    """Starts the ranks of this host and follows the rules of `Watch` until they have ended."""

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, rendezvous: FixedRendezvous, verbose: bool) -> None:
        super().__init__(spec, logs)
        self.verbose = verbose
        self.rendezvous = rendezvous
        self._watch: Watch | None = None
        self._to_handle = signals_to_handle()

    @property
    def watch(self) -> Watch:
        """The watch over the ranks, once they have been started."""
        if self._watch is None:
            raise RuntimeError("no rank has been started yet")
        return self._watch

    def endings(self, result: RunResult) -> list[Ending]:
        """How the ranks of this host ended that did not end well."""
        return [
            Ending(
                rank=rank,
                pid=failure.pid,
                status=failure.exitcode,
                time=report.time if report else self.watch.ended_at[failure.local_rank],
                report=report,
                stopped=failure.local_rank in self.watch.stopped,
            )
            for rank, failure in result.failures.items()
            for report in [read_report(failure.error_file_data)]
        ]

    def ranks(self, local_ranks: Iterable[int]) -> list[int]:
        """The numbers in the job of ranks of this host."""
        workers = self.get_worker_group().workers
        return [workers[local_rank].global_rank for local_rank in local_ranks]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        context = self._pcontext
        if not isinstance(context, SubprocessContext):
            raise TypeError(f"ranks are started as commands, not in a {type(context).__name__}")
        processes = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
        self._watch = Watch(processes, context.error_files, say=_say)
        for number in SIGNALS:
            signal.signal(number, self._on_signal if number in self._to_handle else signal.SIG_IGN)
        if self.verbose:
            for local_rank, process in processes.items():
                rank = self.ranks([local_rank])[0]
                _say(f"rank {rank}: process {process.pid} on {socket.gethostname()}, of {self._size()} ranks")
        return pids

    def _size(self) -> int:
        return int(self.get_worker_group().workers[0].world_size)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.watch.poll():
            result: RunResult = super()._monitor_workers(worker_group)
            return result
        if self.rendezvous.look_elsewhere():
            self.watch.fail()
        return RunResult(state=WorkerState.HEALTHY)

    def _exit_barrier(self) -> None:
        self.rendezvous.wait_for_others(give_up=lambda: self.watch.interrupted)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.watch.interrupt(number)


@contextlib.contextmanager
def restored_signals() -> Iterator[None]:
    """Put the handlers of `SIGNALS` back at the end: the agent and its `Watch` take them over."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
