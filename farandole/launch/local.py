"""Starting the ranks of a job on this host: what `farandole launch` and every `--ranks` do."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import os
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from farandole.launch.cgroup import oom_kills
from farandole.launch.child import Orders
from farandole.launch.claims import claim
from farandole.launch.cores import (
    Division,
    affinity,
    divide_cores,
    physical_cores,
    processor_quota,
    usable_cores,
)
from farandole.launch.environments.torchrun import OUR_RUNS
from farandole.launch.limits import advice, check_ranks
from farandole.launch.placement import LaunchError
from farandole.launch.reports import Ending, exit_status, explain, find_cause, stopped_by

if TYPE_CHECKING:
    from farandole.launch.agent import Agent


def launch(
    target: str,
    arguments: Sequence[str] = (),
    *,
    ranks: int,
    module: bool = False,
    pin: bool = True,
    threads: int | None = None,
    nodes: int = 1,
    node_rank: int = 0,
    rendezvous: str | None = None,
) -> int:
    """Run a Python script, or a module, in `ranks` processes on this host; return the exit status.

        status = launch("train.py", ["--lr", "0.1"], ranks=2)
        status = launch("farandole.train.worker", ["run.toml"], ranks=2, module=True)

    Each process finds its rank with `farandole.init()`.  Their output passes through as it is.  Cores are
    divided among them, and one line on stderr says how; `pin=False` leaves the ranks free to move, and
    `threads` sets the threads of each (as OMP_NUM_THREADS in the environment does).

    With `nodes` > 1 the same is called on every host with its own `node_rank`; the launchers meet at
    `rendezvous`, "HOST:PORT" on the first host.

    If a rank fails the others are stopped, the cause is shown once on stderr, and the status is that of the
    rank that caused it.  Ctrl-C and SIGTERM are passed on; see `watch`.  To be called in the main thread.

    Raises `LaunchError` for what is wrong before a rank starts.
    """
    if ranks < 1:
        raise LaunchError(f"--ranks {ranks}: a job has at least 1 rank on each host")
    endpoint = _endpoint(nodes, node_rank, rendezvous)
    _check_target(target, module)
    check_ranks(ranks)
    with contextlib.ExitStack() as held:
        division = _take_cores(ranks, pin, threads or _threads_of_user(), held)
        print(division.line, file=sys.stderr, flush=True)
        if warning := advice(ranks, usable_cores()):
            print(warning, file=sys.stderr, flush=True)
        orders = Orders(os.getpid(), division.shares, module)
        command = ["-m", "farandole.launch.child", orders.dump(), target, *arguments]
        return _run_agent(command, ranks, nodes, node_rank, endpoint)


def _take_cores(ranks: int, pin: bool, threads: int | None, held: contextlib.ExitStack) -> Division:
    """Divide the cores that no other job has claimed; this job's claims last as long as `held`."""
    processors = affinity()
    with claim(processors if pin else ()) as claims:
        held.callback(claims.close)
        division = divide_cores(
            ranks,
            physical_cores(processors),
            quota=processor_quota(),
            pin=pin,
            threads=threads,
            taken=claims.taken,
        )
        claims.keep(division.processors)
    if claims.blind is None:
        return division
    return Division(
        division.shares, f"{division.line}; the cores of other jobs are not known: {claims.blind}"
    )


def _run_agent(
    command: Sequence[str], ranks: int, nodes: int, node_rank: int, endpoint: tuple[str, int] | None
) -> int:
    """Run the agent to the end of the job, and say how it ended."""
    # torch costs seconds to import: only once nothing else can be wrong
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

    from farandole.launch.agent import Agent, restored_signals
    from farandole.launch.rendezvous import FixedRendezvous

    run_id = f"{OUR_RUNS}{uuid.uuid4().hex[:12]}"
    rendezvous = FixedRendezvous(run_id, nodes, node_rank, endpoint)
    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks,
        entrypoint=sys.executable,
        args=tuple(argument.replace("$", "$$") for argument in command),  # the agent expands "$"
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=0.05,
    )
    with tempfile.TemporaryDirectory(prefix=run_id) as folder, restored_signals():
        oom_kills_before = oom_kills()
        agent = Agent(spec, DefaultLogsSpecs(log_dir=folder), rendezvous)
        try:
            result = agent.run()
        except SignalException as stop:  # a signal before the ranks were watched
            print(stopped_by(stop.sigval, ()), file=sys.stderr, flush=True)
            return 128 + stop.sigval
        return _conclude(agent, agent.endings(result), _more(oom_kills_before, oom_kills()))


def _more(before: int | None, after: int | None) -> int | None:
    """By how much a counter has grown; None where it cannot be read."""
    return None if before is None or after is None else after - before


def _conclude(agent: Agent, endings: list[Ending], oom_kills: int | None) -> int:
    """Say why the job failed, if it did; return the exit status.

    `oom_kills` is how many processes the kernel killed meanwhile for lack of memory, if it tells.
    """
    interrupted, elsewhere = agent.watch.interrupted_by, agent.rendezvous.failed_elsewhere
    if interrupted or elsewhere:  # ranks that ended because of it are no news, whatever their exit status
        endings = [e for e in endings if e.report and e.report.trace and not e.report.consequence]
    if endings:
        text = explain(endings, oom_kills)
        print(text, file=sys.stderr, flush=True)
        agent.rendezvous.tell_failure(text.splitlines()[0])
    elif elsewhere:
        print(f"stopped, because of another host: {elsewhere}", file=sys.stderr, flush=True)
    if interrupted:
        print(stopped_by(interrupted, agent.ranks(agent.watch.killed)), file=sys.stderr, flush=True)
        return 128 + interrupted
    if endings:
        return exit_status(find_cause(endings))
    return 1 if elsewhere else 0


def _endpoint(nodes: int, node_rank: int, rendezvous: str | None) -> tuple[str, int] | None:
    """Where the launchers of several hosts meet; None for a job on this host."""
    if nodes < 1 or not 0 <= node_rank < nodes:
        raise LaunchError(
            f"--node-rank {node_rank} of --nodes {nodes}: the hosts of a job of {max(nodes, 1)} are numbered "
            f"from 0 to {max(nodes, 1) - 1}"
        )
    if rendezvous is None:
        if nodes > 1:
            raise LaunchError(f"--nodes {nodes} needs --rendezvous HOST:PORT, a free port on the first host")
        return None
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise LaunchError(f"--rendezvous {rendezvous!r} is not HOST:PORT, as in node0:29500")
    return host.strip("[]"), int(port)


def _check_target(target: str, module: bool) -> None:
    if module:
        try:
            found = importlib.util.find_spec(target) is not None
        except ModuleNotFoundError:  # a parent package is missing
            found = False
        if not found:
            raise LaunchError(f"there is no module {target!r} for this Python ({sys.executable})")
    elif not Path(target).is_file():
        nearest = difflib.get_close_matches(target, [str(path) for path in Path(".").glob("*.py")], 1)
        hint = f"; nearest: {nearest[0]}" if nearest else ""
        raise LaunchError(f"there is no script {target!r} here{hint} (a module is launched with -m)")


def _threads_of_user() -> int | None:
    """OMP_NUM_THREADS, where the user has set it for the launcher: it is what they want of each rank."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None
