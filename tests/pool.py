"""A pool of processes in which tests run functions as ranks.

The processes are started once per session, and a test sends a function to them.  If a test needs a different world size
or backend than the previous test, all processes leave their process group, and the first n processes join a new group.
After a test that fails or hangs, the processes are killed, and the next test starts new processes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from farandole.comm import register
from farandole.launch.bootstrap import loopback_store
from farandole.launch.child import die_with_parent
from farandole.launch.hosts import LOOPBACK
from tests import torchvision_models  # noqa: F401 - before transformers is imported
from tests.forking import CONTEXT

LARGEST = 8
START_S = 120.0
AFTER_FAILURE_S = 3.0
SAVE_S = 5.0 if "COVERAGE_PROCESS_CONFIG" in os.environ else 0.0
"""The time for a process to save its coverage data, if coverage is measured."""


class RankFailed(AssertionError):
    """Raised if a rank raised an exception, ended, or did not answer in time."""


@dataclass(frozen=True)
class Task:
    """A function that ranks call, and the process group in which they call it."""

    world: tuple[int, str, int]  # size, backend, and a unique number
    path: list[str]
    function: bytes


@dataclass(frozen=True)
class Failure:
    """An exception raised on a rank, pickled if possible, with its traceback."""

    error: bytes
    trace: str


class Pool:
    """A pool of processes, which are started on first use."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="farandole-pool-")
        self._store: dist.TCPStore | None = None
        self._members: list[tuple[ForkServerProcess, Connection]] = []
        self._world = (0, "", 0)

    def run(
        self, size: int, function: Callable[..., Any], args: Sequence[Any], backend: str, timeout_s: float
    ) -> list[Any]:
        """Call `function(rank, size, *args)` on `size` ranks, and return the results."""
        if not 1 <= size <= LARGEST:
            raise ValueError(f"expected 1 to {LARGEST} ranks, got {size}")
        self._grow(size)
        if self._world[:2] != (size, backend):
            self._world = (size, backend, self._world[2] + 1)
        task = Task(self._world, sys.path, pickle.dumps((function, tuple(args))))
        for _, pipe in self._members:
            pipe.send(task)  # also to processes outside the new world, which leave the previous world
        answers = self._collect(size, timeout_s)
        failures = {rank: answer for rank, answer in answers.items() if not isinstance(answer, bytes)}
        if len(answers) < size or failures:
            stacks = self._stacks(set(range(size)) - set(answers))
            self.close()
            _raise_first(failures, stacks, timeout_s)
        return [pickle.loads(answers[rank]) for rank in range(size)]

    def close(self, patience_s: float = 0.0) -> None:
        """End the processes, and terminate them after `patience_s`; the next `run` starts new processes.

        A terminated process saves its coverage data, if coverage is measured.
        """
        for _, pipe in self._members:
            pipe.close()
        processes = [process for process, _ in self._members]
        _join(processes, patience_s)
        for process in processes:
            process.terminate()
        _join(processes, SAVE_S)
        for process in processes:
            process.kill()
            process.join()
        self._members = []
        self._store = None
        self._world = (0, "", self._world[2])

    def _grow(self, size: int) -> None:
        if any(not process.is_alive() for process, _ in self._members):
            self.close()
        self._store = self._store or loopback_store()
        new = []
        for rank in range(len(self._members), size):
            ours, theirs = CONTEXT.Pipe()
            arguments = (rank, theirs, self._store.port, self._stack_file(rank))
            process = CONTEXT.Process(target=_serve, args=arguments, name=f"pool-{rank}")
            process.start()
            theirs.close()
            self._members.append((process, ours))
            new.append(ours)
        for pipe in new:
            if not pipe.poll(START_S):
                self.close()
                raise RankFailed(f"a process in the pool did not start within {START_S:g} s")
            pipe.recv()

    def _collect(self, size: int, timeout_s: float) -> dict[int, bytes | Failure]:
        """Return the answers that arrive in time; after a failure, wait only `AFTER_FAILURE_S` longer."""
        ranks = {pipe: rank for rank, (_, pipe) in enumerate(self._members)}
        answers: dict[int, bytes | Failure] = {}
        waiting = set(ranks)
        deadline = time.monotonic() + timeout_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                waiting.discard(pipe)
                rank = ranks[pipe]
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    process = self._members[rank][0]
                    process.join(5)
                    answers[rank] = Failure(b"", f"the process ended with exit code {process.exitcode}\n")
                if isinstance(answers[rank], Failure):
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
        return {rank: answer for rank, answer in answers.items() if rank < size or answer != b""}

    def _stack_file(self, rank: int) -> str:
        return str(Path(self._folder.name, f"stacks-{rank}"))

    def _stacks(self, ranks: set[int]) -> dict[int, str]:
        """Return the Python stacks of ranks that did not answer; the ranks write these stacks on SIGUSR1."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._members[rank][0].pid or 0, signal.SIGUSR1)
        if ranks:
            time.sleep(0.5)
        return {rank: Path(self._stack_file(rank)).read_text() for rank in sorted(ranks)}


class Ranks:
    """A process group with `size` ranks in the pool.

    `ranks(2).run(function, *args)` calls `function(rank, size, *args)` on each rank, with torch's default process group
    initialized.  `function` must be defined at module level.  The call returns the list of results, or raises the
    first failure.
    """

    def __init__(self, pool: Pool, size: int, backend: str) -> None:
        self._pool = pool
        self.size = size
        self.backend = backend

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Call the function on every rank; raise `RankFailed` after `timeout_s` seconds."""
        return self._pool.run(self.size, function, args, self.backend, timeout_s)


def _join(processes: Sequence[ForkServerProcess], limit_s: float) -> None:
    """Wait until all processes have ended, at most `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _raise_first(failures: dict[int, Any], stacks: dict[int, str], timeout_s: float) -> None:
    late = "".join(f"\nrank {rank} did not answer; its stack:\n{text}" for rank, text in stacks.items())
    if not failures:
        raise RankFailed(f"no result within {timeout_s:g} s{late}")
    rank, failure = min(failures.items(), key=lambda item: (_is_secondary(item[1]), item[0]))
    others = "".join(
        f"\nrank {r} also failed: {f.trace.splitlines()[-1]}" for r, f in failures.items() if r != rank
    )
    message = f"rank {rank}:\n{failure.trace}{others}{late}"
    raise RankFailed(message) from (pickle.loads(failure.error) if failure.error else None)


def _is_secondary(failure: Failure) -> bool:
    """Return whether a failure is a consequence of another rank's failure."""
    return "farandole.comm.errors" in failure.trace or "gloo/transport" in failure.trace


def _serve(rank: int, pipe: Connection, port: int, stack_file: str) -> None:
    """Run tasks in a process of the pool until the pool closes the pipe."""
    die_with_parent(os.getppid())  # the parent is the fork server, which ends with the session
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test session handles Ctrl-C
    torch.set_num_threads(1)
    store = dist.TCPStore(LOOPBACK, port, is_master=False)
    current: tuple[int, str, int] | None = None
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        pipe.send("ready")
        while True:
            try:
                task = pipe.recv()
            except EOFError:
                return
            try:
                if task.world != current:
                    current = _enter(task.world, rank, store)
                answer: bytes | Failure = b""
                if rank < task.world[0]:
                    sys.path[:] = task.path
                    function, args = pickle.loads(task.function)
                    answer = pickle.dumps(function(rank, task.world[0], *args))
            except BaseException as error:  # includes SystemExit and pytest's outcomes
                answer = Failure(_pickled(error), traceback.format_exc())
            pipe.send(answer)


def _enter(world: tuple[int, str, int], rank: int, store: dist.TCPStore) -> tuple[int, str, int]:
    """Leave the previous process group, and join the new group if it includes this rank."""
    size, backend, number = world
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank < size:
        register()
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"world-{number}", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
    return world


def _pickled(error: BaseException) -> bytes:
    """Return the pickled exception, or empty bytes if the exception cannot be pickled and unpickled."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # custom pickling code may raise any exception
        return b""
    return data
