"""Run the ranks of one host with torch's elastic agent.

The agent starts the ranks and sets torchrun's variables for them.  A `RankMonitor` handles failures and signals.
"""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SubprocessContext

from farandole.launch.monitor import SIGNALS, RankMonitor, signals_to_handle
from farandole.launch.program import Program
from farandole.launch.rendezvous import LauncherRendezvous
from farandole.launch.reports import RankFailure, explain_failures, notify, read_report

# `reports` explains failed ranks better than the agent's log.
logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)


class Agent(LocalElasticAgent):
    """Starts the ranks of this host, and monitors them with a `RankMonitor` until all ranks have ended."""

    def __init__(
        self, spec: WorkerSpec, logs: LogsSpecs, rendezvous: LauncherRendezvous, program: Program
    ) -> None:
        super().__init__(spec, logs)
        self.program = program
        self.rendezvous = rendezvous
        self.rank_monitor = RankMonitor({}, {}, {})
        """The monitor of the ranks; empty until the ranks have started."""
        self._to_handle = signals_to_handle()

    def failures(self, result: RunResult) -> list[RankFailure]:
        """Return the failures of this host's ranks."""
        return [
            RankFailure(
                rank=rank,
                pid=failure.pid,
                status=failure.exitcode,
                time=report.time if report else self.rank_monitor.ended_at[failure.local_rank],
                report=report,
                stopped=failure.local_rank in self.rank_monitor.stopped,
            )
            for rank, failure in result.failures.items()
            for report in [read_report(failure.error_file_data)]
        ]

    def global_ranks(self, local_ranks: Iterable[int]) -> list[int]:
        """Convert local ranks to global ranks."""
        workers = self.get_worker_group().workers
        return [workers[local_rank].global_rank for local_rank in local_ranks]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        context = self._pcontext
        if not isinstance(context, SubprocessContext):
            raise TypeError(
                f"expected a SubprocessContext from torch's elastic agent, got {type(context).__name__}"
            )
        processes = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
        global_ranks = dict(zip(processes, self.global_ranks(processes), strict=True))
        self.rank_monitor = RankMonitor(
            processes, context.error_files, global_ranks, self.program.stop_timeout_s
        )
        for number in SIGNALS:
            signal.signal(number, self._on_signal if number in self._to_handle else signal.SIG_IGN)
        if self.program.verbose:
            size = int(worker_group.workers[0].world_size)
            for local_rank, process in processes.items():
                notify(
                    f"rank {global_ranks[local_rank]} of {size}: process {process.pid} on {socket.gethostname()}"
                )
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.rank_monitor.poll():
            result: RunResult = super()._monitor_workers(worker_group)
            if result.state is WorkerState.FAILED and self._remaining_restarts:
                self._announce_restart(result)
            return result
        if self.rendezvous.check_remote_failure():
            self.rank_monitor.fail()
        return RunResult(state=WorkerState.HEALTHY)

    def _announce_restart(self, result: RunResult) -> None:
        """Print the cause of a restart, or prevent the restart if a signal has interrupted the job."""
        if self.rank_monitor.interrupted_by:
            self._remaining_restarts = 0
            return
        total = self.get_worker_group().spec.max_restarts
        notify(explain_failures(self.failures(result)))
        notify(f"restart {total - self._remaining_restarts + 1} of {total}: restarting all ranks")

    def _exit_barrier(self) -> None:
        self.rendezvous.wait_for_others(give_up=lambda: bool(self.rank_monitor.interrupted_by))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.rank_monitor.interrupt(number)
