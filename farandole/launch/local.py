"""Starting the ranks of a job on this host: what `farandole launch` and every `--ranks` do."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from farandole._startup import uncollected
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
from farandole.launch.gathering import START_TIMEOUT_S, Gathering, gather_by_hand
from farandole.launch.limits import advice, check_ranks
from farandole.launch.placement import LaunchError
from farandole.launch.program import Program
from farandole.launch.reports import Ending, exit_status, explain, find_cause, stopped_by
from farandole.launch.scratch import scratch_folder
from farandole.launch.target import check_target

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
    output: str | None = None,
    verbose: bool = False,
    nodes: int = 1,
    node_rank: int = 0,
    rendezvous: str | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> int:
    """Run a Python script, or a module, in `ranks` processes on this host; return the exit status.

        status = launch("train.py", ["--lr", "0.1"], ranks=2)
        status = launch("farandole.train.worker", ["run.toml"], ranks=2, module=True)

    Each process finds its rank with `farandole.init()`.  Their output passes through as it is, or goes to files
    in the folder `output`.  Cores are divided among them, and one line on stderr says how; `pin=False` leaves
    the ranks free to move, and `threads` sets the threads of each (as OMP_NUM_THREADS in the environment does).

    With `nodes` > 1 the same is called on every host with its own `node_rank`; the launchers meet at
    `rendezvous`, "HOST:PORT" on the first host, within `start_timeout_s`.  `remote.launch_on` starts them all.

    If a rank fails the others are stopped, the cause is shown once on stderr, and the status is that of the
    rank that caused it.  Ctrl-C and SIGTERM are passed on; see `watch`.  To be called in the main thread.

    Raises `LaunchError` for what is wrong before a rank starts.
    """
    program = Program(target, tuple(arguments), module, pin, threads, output, verbose)
    return run_here(program, ranks, gather_by_hand(nodes, node_rank, rendezvous, start_timeout_s))


def run_here(program: Program, ranks: int, gathering: Gathering, *, name: str | None = None) -> int:
    """Run the ranks of this host; return the exit status.

    A host that somebody else started has a `name` there; it leaves the last word on the job to them.
    """
    if ranks < 1:
        raise LaunchError(f"--ranks {ranks}: a job has at least 1 rank on each host")
    check_target(program.target, program.module)
    check_ranks(ranks)
    _make_output_folder(program)
    host = "" if gathering.nodes == 1 else f"{name or socket.gethostname()}: "
    with contextlib.ExitStack() as held:
        division = _take_cores(ranks, program.pin, program.threads or _threads_of_user(), held)
        _say(host + division.line)
        if warning := advice(ranks, usable_cores()):
            _say(host + warning)
        if program.output is not None:
            _say(
                f"{host}what the ranks print is in {os.path.join(program.output, 'rank.N')}/stdout and stderr"
            )
        orders = Orders(os.getpid(), division.shares, program.module, program.output)
        command = ["-m", "farandole.launch.child", orders.dump(), program.target, *program.arguments]
        return _run_agent(command, ranks, gathering, program.verbose, last_word=name is None)


def _make_output_folder(program: Program) -> None:
    """Make the folder for what the ranks print, if they are to print there."""
    if program.output is not None:
        try:
            os.makedirs(program.output, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"--output-filename {program.output}: {error.strerror}") from error


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
    command: Sequence[str], ranks: int, gathering: Gathering, verbose: bool, *, last_word: bool
) -> int:
    """Run the agent to the end of the job, and say how it ended."""
    with uncollected():  # torch costs a second to import: only once nothing else can be wrong
        from torch.distributed.elastic.agent.server.api import WorkerSpec
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

        from farandole.launch.agent import Agent, restored_signals
        from farandole.launch.rendezvous import FixedRendezvous

    run_id = f"{OUR_RUNS}{uuid.uuid4().hex[:12]}"
    rendezvous = FixedRendezvous(run_id, gathering)
    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks,
        entrypoint=sys.executable,
        args=tuple(argument.replace("$", "$$") for argument in command),  # the agent expands "$"
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=0.05,
    )
    with scratch_folder("farandole-launch-") as folder, restored_signals():
        oom_kills_before = oom_kills()
        agent = Agent(spec, DefaultLogsSpecs(log_dir=folder), rendezvous, verbose)
        try:
            result = agent.run()
        except SignalException as stop:  # a signal before the ranks were watched
            if last_word:
                _say(stopped_by(stop.sigval, ()))
            return 128 + stop.sigval
        killed = _more(oom_kills_before, oom_kills())
        return _conclude(agent, agent.endings(result), killed, last_word)


def _more(before: int | None, after: int | None) -> int | None:
    """By how much a counter has grown; None where it cannot be read."""
    return None if before is None or after is None else after - before


def _conclude(agent: Agent, endings: list[Ending], oom_kills: int | None, last_word: bool) -> int:
    """Say why the job failed, if it did; return the exit status.

    `oom_kills` is how many processes the kernel killed meanwhile for lack of memory, if it tells.
    """
    interrupted, elsewhere = agent.watch.interrupted_by, agent.rendezvous.failed_elsewhere
    if interrupted or elsewhere:  # ranks that ended because of it are no news, whatever their exit status
        endings = [e for e in endings if e.report and e.report.trace and not e.report.consequence]
    if endings:
        text = explain(endings, oom_kills)
        _say(text)
        agent.rendezvous.tell_failure(text.splitlines()[0])
    elif elsewhere and last_word:
        _say(f"stopped, because of another host: {elsewhere}")
    if interrupted:
        if last_word:
            _say(stopped_by(interrupted, agent.ranks(agent.watch.killed)))
        return 128 + interrupted
    if endings:
        return exit_status(find_cause(endings))
    return 1 if elsewhere else 0


def _threads_of_user() -> int | None:
    """OMP_NUM_THREADS, where the user has set it for the launcher: it is what they want of each rank."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
