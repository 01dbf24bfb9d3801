"""Start the ranks of a job on this host, for `farandole launch` and every command with `--ranks`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from farandole import _job_key
from farandole._startup import uncollected
from farandole.launch import control_groups
from farandole.launch.child import RankSpec
from farandole.launch.cores import reserve_cores, usable_cores
from farandole.launch.environments import RUN_ID_PREFIX
from farandole.launch.hosts import RendezvousConfig, find_interfaces, use_interfaces
from farandole.launch.limits import check_rank_limits, oversubscription_warning
from farandole.launch.monitor import STOP_TIMEOUT_S, restored_handlers
from farandole.launch.placement import LaunchError
from farandole.launch.program import Program
from farandole.launch.reports import (
    RankFailure,
    describe_stop,
    exit_status,
    explain_failures,
    find_cause,
    notify,
)

if TYPE_CHECKING:
    from farandole.launch.agent import Agent

SCRATCH_PREFIX = "farandole-launch-"


def launch(
    target: str,
    arguments: Sequence[str] = (),
    *,
    ranks: int,
    module: bool = False,
    pin: bool = True,
    stop_timeout_s: float = STOP_TIMEOUT_S,
    quiet: bool = False,
) -> int:
    """Run a Python script or module in `ranks` processes on this host; return the exit status.

        status = launch("train.py", ["--lr", "0.1"], ranks=2)
        status = launch("farandole.train.run", ["run.toml"], ranks=2, module=True)

    Each process finds its rank with `farandole.init()`.  Call this function in the main thread.

    Args:
        pin: Whether to pin each rank to its own cores.
        stop_timeout_s: How long, in seconds, ranks may run after a signal to the launcher before they are killed.
        quiet: Whether to omit the line on stderr that describes each rank's cores.

    Returns:
        The exit status of the rank that failed first, or 0.  When a rank fails, the other ranks are stopped, and the
        cause is printed once on stderr.  Ctrl-C and SIGTERM are forwarded to the ranks; see `farandole.launch.monitor`.

    Raises:
        LaunchError: if the ranks cannot be started.
    """
    program = Program(
        target, arguments, "module" if module else "script", pin, quiet=quiet, stop_timeout_s=stop_timeout_s
    )
    return run_on_this_host(program, ranks, RendezvousConfig())


def run_on_this_host(
    program: Program, ranks: int, rendezvous: RendezvousConfig, *, name: str | None = None
) -> int:
    """Run the ranks of this host; return the exit status.

    Args:
        rendezvous: How this launcher finds the launchers of the other hosts.
        name: The name of this host, if another process has started this launcher.  That process then reports how the
            job ended.

    Raises:
        LaunchError: if the ranks cannot be started.
    """
    if ranks < 1:
        raise LaunchError(f"--ranks {ranks}: expected at least 1 rank on each host")
    if program.max_restarts and rendezvous.nodes > 1:
        raise LaunchError(
            "--max-restarts is supported on one host only; on several hosts, use torchrun --max-restarts, "
            "or restart the job from its last checkpoint"
        )
    program.check()
    check_rank_limits(ranks)
    if program.output is not None:
        try:
            os.makedirs(program.output, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"cannot create --output-filename {program.output}: {error.strerror}; choose another folder"
            ) from error
    if rendezvous.interfaces is not None:
        use_interfaces(find_interfaces(rendezvous.interfaces))
    prefix = "" if rendezvous.nodes == 1 else f"{name or socket.gethostname()}: "
    # The launchers of a multi-host job get the same key from the user, or from the command that started them.
    key = key_for_ranks() if rendezvous.nodes == 1 else contextlib.nullcontext()
    with key, reserve_cores(ranks, program.pin, program.threads or _threads_of_user()) as division:
        if not program.quiet:
            notify(prefix + division.summary)
        if warning := oversubscription_warning(ranks, usable_cores()):
            notify(prefix + warning)
        if program.output is not None:
            folder = os.path.join(program.output, "rank.N")
            notify(f"{prefix}the ranks write their output to {folder}/stdout and stderr")
        spec = RankSpec(os.getpid(), division.shares, program.kind, program.output, program.shim)
        command = ["-m", "farandole.launch.child", spec.dump(), program.target, *program.arguments]
        return _run_agent(command, ranks, rendezvous, program, print_end=name is None)


@contextlib.contextmanager
def key_for_ranks() -> Iterator[None]:
    """Set a new job key in the environment for the duration of the context, unless the user has set a key."""
    try:
        is_set = _job_key.job_key() is not None
    except ValueError as error:
        raise LaunchError(str(error)) from None
    if is_set:
        yield
        return
    os.environ[_job_key.VARIABLE] = secrets.token_hex(32)
    try:
        yield
    finally:
        del os.environ[_job_key.VARIABLE]


def _threads_of_user() -> int | None:
    """Return the number of threads per rank that the user has set in OMP_NUM_THREADS, or None."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _run_agent(
    command: Sequence[str], ranks: int, config: RendezvousConfig, program: Program, *, print_end: bool
) -> int:
    """Run the agent until the job ends; report any failures, and return the exit status."""
    with uncollected():  # torch takes a second to import, so it is imported after all checks
        from torch.distributed.elastic.agent.server.api import WorkerSpec
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

        from farandole.launch.agent import Agent
        from farandole.launch.rendezvous import LauncherRendezvous

    rendezvous = LauncherRendezvous(f"{RUN_ID_PREFIX}{uuid.uuid4().hex[:12]}", config)
    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks,
        entrypoint=sys.executable,
        args=tuple(argument.replace("$", "$$") for argument in command),  # because the agent expands "$"
        rdzv_handler=rendezvous,
        max_restarts=program.max_restarts,
        monitor_interval=0.05,
    )
    with _scratch_folder() as folder, restored_handlers():
        before = control_groups.oom_kills()
        agent = Agent(spec, DefaultLogsSpecs(log_dir=folder), rendezvous, program)
        try:
            result = agent.run()
        except SignalException as stop:  # a signal that arrived before the ranks were monitored
            if print_end:
                notify(describe_stop(stop.sigval, ()))
            return 128 + stop.sigval
        after = control_groups.oom_kills()
        oom_kills = None if before is None or after is None else after - before
        return _report(agent, agent.failures(result), oom_kills, print_end)


def _report(agent: Agent, failures: list[RankFailure], oom_kills: int | None, print_end: bool) -> int:
    """Print why the job failed or was stopped, publish failures to other hosts, and return the exit status."""
    interrupted, elsewhere = agent.rank_monitor.interrupted_by, agent.rendezvous.remote_failure
    if interrupted or elsewhere:
        # omit ranks that failed as a consequence
        failures = [f for f in failures if f.report and f.report.trace and not f.report.consequence]
    if failures:
        text = explain_failures(failures, oom_kills)
        notify(text)
        agent.rendezvous.publish_failure(text.splitlines()[0])
    elif elsewhere and print_end:
        notify(f"stopped because of another host: {elsewhere}")
    if interrupted:
        if print_end:
            notify(describe_stop(interrupted, agent.global_ranks(agent.rank_monitor.killed)))
        return 128 + interrupted
    if failures:
        return exit_status(find_cause(failures))
    return 1 if elsewhere else 0


@contextlib.contextmanager
def _scratch_folder() -> Iterator[str]:
    """Yield a temporary folder that is deleted when the context exits; first delete folders of killed launchers."""
    # The kernel releases a launcher's lock when the launcher ends, so an unlocked folder is not in use.
    _remove_unused_folders()
    with (
        tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX) as folder,
        open(Path(folder, "lock.new"), "w") as file,
    ):
        fcntl.flock(file, fcntl.LOCK_EX)
        os.rename(file.name, Path(folder, "lock"))  # under this name the lock file is always locked
        yield folder


def _remove_unused_folders() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}*/lock"):
        with (
            contextlib.suppress(OSError),
            open(lock, "r+") as file,
        ):  # the folder belongs to another user, or is in use
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_uid == os.getuid():
                shutil.rmtree(lock.parent)
