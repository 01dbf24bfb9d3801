"""Runs checks in processes of their own, so that a check that hangs or crashes does not end the others.

Checks of one area and number of ranks share processes, which saves the start of torch and CUDA for each of them.
After a failure the remaining checks of the group start in new processes.
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
"""Seconds that the processes of a group may take before their first check begins."""
_POLL_S = 0.05
_TAIL_LINES = 40


@dataclass
class Result:
    """The outcome of one check: `status` is passed, failed or skipped; `error` holds the end of the output."""

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
        timeout_s: Seconds for all checks together; checks that have not begun by then fail.
        deadline_factor: Multiplies the deadline of each check.
        report: Called with each result as soon as it exists.
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
                    why = f"the total time of {timeout_s:g} s was over before the check began"
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
    """Run checks in new processes until one fails; return how many have a result."""
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
    """Turn the messages of the processes into results, until they end or a deadline expires."""
    told, done = 0, 0
    limit_s, since = START_S, time.monotonic()
    while True:
        exited = process.poll() is not None  # before the messages: those written before the exit are read
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
            why = f"the processes ended with status {process.returncode}"
        elif now > end:
            why = "the total time was over"
        elif now - since > limit_s:
            why = f"no end within {limit_s:g} s"
        else:
            time.sleep(_POLL_S)
            continue
        each = group[done]
        error = _tail(folder)
        add(Result(each.name, each.what, each.ranks, "failed", now - since, why, error=error))
        if told:
            return done + 1
        for other in group[1:]:  # the processes cannot start: no other try
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
    """Kill the launcher of a group; the kernel kills its ranks with it."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
