"""Run implementations that cannot share a process in separate processes, which sleep while others compute."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from farandole.launch.cores import affinity, divide_cores, physical_cores

ROOT = Path(__file__).parent.parent
PATIENCE_S = 120.0


class ProcessSet:
    """The ranks of one implementation; each rank is a process with one thread and its own core.

    with ProcessSet("benchmarks.zero_rank", order, ranks=2) as process_set:
        process_set.ready()
        answers = process_set.ask("steps 3")     # one answer per rank

    Each rank runs `python -m MODULE ORDER` with torchrun's environment variables.  It reads commands from standard
    input and writes one line of JSON per answer to the file descriptor `order["answers"]`: the first line when it is
    ready, and then one line for each command.
    """

    def __init__(
        self, module: str, order: dict[str, Any], ranks: int, python: str = sys.executable, pin: bool = True
    ) -> None:
        shares = divide_cores(ranks, physical_cores(affinity()), pin=pin, threads=1).shares
        port = _free_port()
        self._folder = tempfile.TemporaryDirectory()
        self._said = [Path(self._folder.name) / f"rank-{rank}" for rank in range(ranks)]
        self._answers: list[int] = []
        self._pending = [b""] * ranks
        self._processes: list[subprocess.Popen[str]] = []
        for rank, share in enumerate(shares):
            reading, writing = os.pipe()
            environ = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks),
                "LOCAL_SIZE": str(ranks),  # for DeepSpeed
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                # build tools such as ninja are in the implementation's environment
                "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
            }
            with self._said[rank].open("w") as said:
                process = subprocess.Popen(
                    [python, "-m", module, json.dumps(order | {"answers": writing})],
                    stdin=subprocess.PIPE,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    env=environ,
                    pass_fds=[writing],
                    text=True,
                )
            if share.processors and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(process.pid, share.processors)
            os.close(writing)
            self._processes.append(process)
            self._answers.append(reading)

    @property
    def pids(self) -> list[int]:
        """The process ids, in rank order."""
        return [process.pid for process in self._processes]

    def ready(self) -> list[Any]:
        """Wait for the first answer of each rank, and return these answers."""
        return self._hear()

    def ask(self, command: str) -> list[Any]:
        """Send a command to all ranks and return their answers."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(command + "\n")
            process.stdin.flush()
        return self._hear()

    def _hear(self) -> list[Any]:
        return [json.loads(self._line(rank)) for rank in range(len(self._processes))]

    def _line(self, rank: int) -> bytes:
        while b"\n" not in self._pending[rank]:
            heard = select.select([self._answers[rank]], [], [], PATIENCE_S)[0]
            more = os.read(self._answers[rank], 1 << 16) if heard else b""
            if not more:
                raise RuntimeError(
                    self._complaint(rank, "ended" if heard else f"did not answer within {PATIENCE_S:g} s")
                )
            self._pending[rank] += more
        line, self._pending[rank] = self._pending[rank].split(b"\n", 1)
        return line

    def _complaint(self, rank: int, what: str) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(5)  # so that the process can print the reason
            what += f" with exit code {self._processes[rank].returncode}"
        return f"rank {rank} {what}; the end of its output:\n{self._said[rank].read_text()[-4000:]}"

    def __enter__(self) -> ProcessSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if error is not None:
                process.kill()
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for reading in self._answers:
            os.close(reading)
        self._folder.cleanup()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
