"""Run checks in separate processes, so that a check that hangs or crashes does not affect other checks.

Checks with the same area and number of ranks form a group, which shares processes, so that torch and CUDA start only
once.  After a failure, the remaining checks in the group run in new processes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.registry import AREAS, Check

START_S = 90.0
"""The time limit in seconds for starting the processes of a group."""
_POLL_S = 0.05
_TAIL_LINES = 40


@dataclass
class Result:
    """The result of one check: `status` is passed, failed or skipped; `error` contains the end of the output."""

    name: str
    what: str
    ranks: int
    status: str
    seconds: float = 0.0
    reason: str = ""
    figures: dict[str, tuple[float, str]] = field(default_factory=dict)
    error: str = ""


def run_checks(
    selected: Sequence[Check],
    device: str,
    timeout_s: float,
    *,
    deadline_factor: float = 1.0,
    report: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run checks on `device` ("cuda" or "cpu") and return their results.

    Args:
        timeout_s: The time limit for all checks together, in seconds; checks that have not started by then fail.
        deadline_factor: The factor by which the deadline of each check is multiplied.
        report: A function that is called with each result as soon as it is available.
    """
    end = time.monotonic() + timeout_s
    results: list[Result] = []

    def add(result: Result) -> None:
        results.append(result)
        report(result)

    able: list[Check] = []
    for each in selected:
        if reason := _inability(each, device):
            add(Result(each.name, each.what, each.ranks, "skipped", reason=reason))
        else:
            able.append(each)
    able.sort(key=lambda each: (AREAS.index(each.area), each.ranks))
    for _, group in itertools.groupby(able, key=lambda each: (each.area, each.ranks)):
        left = list(group)
        while left:
            if time.monotonic() >= end:
                for each in left:
                    why = (
                        f"the time limit of {timeout_s:g} s for all checks expired before this check started"
                    )
                    add(Result(each.name, each.what, each.ranks, "failed", reason=why))
                break
            done = _run_group(left, device, end, deadline_factor, add)
            left = left[done:]
    return results


def _inability(each: Check, device: str) -> str:
    if device == "cpu" and not each.on_cpu:
        return "needs a GPU"
    if missing := each.missing():
        return f"needs {', '.join(missing)}"
    return ""


def _run_group(
    group: Sequence[Check], device: str, end: float, factor: float, add: Callable[[Result], None]
) -> int:
    """Run checks in new processes until one fails, and return the number of checks with a result."""
    with tempfile.TemporaryDirectory(prefix="farandole-gpu-") as folder, _output(folder) as output:
        names = [each.name for each in group]
        command = [sys.executable, "-m", "benchmarks.gpu.job", str(group[0].ranks)]
        environ = dict(os.environ)
        if device == "cpu":
            environ["CUDA_VISIBLE_DEVICES"] = ""
        process = subprocess.Popen(
            [*command, device, str(factor), folder, *names],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environ,
        )
        try:
            return _follow(process, group, Path(folder), end, factor, add)
        finally:
            _kill(process)


def _follow(
    process: subprocess.Popen[bytes],
    group: Sequence[Check],
    folder: Path,
    end: float,
    factor: float,
    add: Callable[[Result], None],
) -> int:
    """Convert messages from the processes into results, until the processes end or a deadline expires."""
    told, done = 0, 0
    limit_s, since = START_S, time.monotonic()
    while True:
        exited = process.poll() is not None  # polled first, so that messages written before the exit are read
        messages = _messages(folder)
        for message in messages[told:]:
            each, since = group[done], time.monotonic()
            if message["event"] == "begin":
                limit_s = each.deadline_s * factor
                continue
            limit_s = START_S
            done += 1
            figures = {name: (value, unit) for name, (value, unit) in message["figures"].items()}
            add(
                Result(
                    each.name,
                    each.what,
                    each.ranks,
                    message["status"],
                    message["seconds"],
                    message.get("reason", ""),
                    figures,
                )
            )
        told = len(messages)
        if done == len(group):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            return done
        now = time.monotonic()
        if exited:
            why = f"the processes ended with exit status {process.returncode}"
        elif now > end:
            why = "the time limit for all checks expired"
        elif now - since > limit_s:
            why = f"the check did not finish within {limit_s:g} s"
        else:
            time.sleep(_POLL_S)
            continue
        each = group[done]
        error = _tail(folder)
        add(Result(each.name, each.what, each.ranks, "failed", now - since, why, error=error))
        if told:
            return done + 1
        for other in group[1:]:  # the processes cannot start, so do not try again
            why = f"the processes of {each.name} did not start"
            add(Result(other.name, other.what, other.ranks, "failed", reason=why))
        return len(group)


def _messages(folder: Path) -> list[dict[str, Any]]:
    path = folder / "results"
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def _tail(folder: Path) -> str:
    lines = (folder / "output").read_text(errors="replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:])


@contextlib.contextmanager
def _output(folder: str) -> Iterator[IO[bytes]]:
    with open(Path(folder, "output"), "wb") as file:
        yield file


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the launcher of a group; the kernel then kills its ranks too."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
