"""Explain to the user why a job failed, and print the cause once.

When a rank fails, other ranks fail as a consequence: their collectives raise an error, or the launcher stops them.  The
cause is the first failure that is not a consequence.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field

from farandole._troubleshooting import see

MAYBE_OUT_OF_MEMORY = (
    "Either a user sent the signal (kill -9), or the kernel killed the rank because memory ran out. `dmesg` lists "
    f"processes that the kernel killed. Fewer ranks or smaller batches need less memory{see('was-killed-by')}."
)
OUT_OF_MEMORY = (
    "The kernel killed the rank because memory ran out; use fewer ranks or smaller batches"
    f"{see('was-killed-by')}."
)
NOT_OUT_OF_MEMORY = (
    "A user or a program sent the signal (kill -9); the kernel's out-of-memory killer did not."
)


@dataclass(frozen=True)
class ErrorReport:
    """An exception that ended a rank, as written by the rank to its error file."""

    kind: str
    message: str
    trace: str
    """The text to print: a traceback, the argument of sys.exit("text"), or an empty string for sys.exit(7)."""
    consequence: bool = False
    """Whether another rank's failure caused the exception, which is then a communication error."""
    time: float = field(default_factory=time.time)
    """The time at which the exception was raised, in seconds since the epoch."""
    status: int = 1
    """The exit status of the rank."""


@dataclass(frozen=True)
class RankFailure:
    """A failed rank: its exit status and its report, if any.

    A negative `status` means that signal `-status` killed the rank.
    """

    rank: int
    pid: int
    status: int
    time: float
    """The time of the failure in the report, or else the time at which the rank ended, in seconds since the epoch."""
    report: ErrorReport | None = None
    stopped: bool = False
    """Whether the launcher had sent the rank a signal to stop."""


def write_report(path: str, report: ErrorReport) -> None:
    """Write a report atomically, in the format that torch's elastic agent expects."""
    extra = {"py_callstack": report.trace, "timestamp": str(int(report.time))}
    data = {
        "message": {"message": f"{report.kind}: {report.message}", "extraInfo": extra},
        "farandole": asdict(report),
    }
    partial = f"{path}.partial"
    with open(partial, "w") as file:
        json.dump(data, file)
    os.replace(partial, path)


def read_report(data: dict[str, object]) -> ErrorReport | None:
    """Return the report in a rank's error file, or None if `write_report` did not write the file.

    Args:
        data: The content of the file, as read by torch's elastic agent.
    """
    fields = data.get("farandole")
    return ErrorReport(**fields) if isinstance(fields, dict) else None


def explain_failures(failures: Sequence[RankFailure], oom_kills: int | None = None) -> str:
    """Explain why a job failed: the cause in full, and the other failures in one line.

    Args:
        oom_kills: The number of processes that the kernel killed for lack of memory during the job; None if unknown.
    """
    cause = find_cause(failures)
    same = [f.rank for f in failures if f is not cause and _same_report(f, cause)]
    others = [f for f in failures if f is not cause and f.rank not in same]
    parts = [_summary(cause)]
    if cause.report is not None and cause.report.trace:
        parts.append("\n" + cause.report.trace.rstrip() + "\n")
    elif cause.status == -signal.SIGKILL:
        if oom_kills is None:
            parts.append(MAYBE_OUT_OF_MEMORY)
        else:
            parts.append(OUT_OF_MEMORY if oom_kills > 0 else NOT_OUT_OF_MEMORY)
    if same:
        parts.append(f"The same happened on {_format_ranks(same)}.")
    if consequences := _consequences(others):
        parts.append(consequences)
    return "\n".join(parts)


def find_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """Return the first failure that is not the consequence of another failure."""

    def order(failure: RankFailure) -> tuple[bool, bool, float]:
        consequence = failure.report is not None and failure.report.consequence
        return _was_stopped(failure), consequence, failure.time

    return min(failures, key=order)


def exit_status(failure: RankFailure) -> int:
    """Return the launcher's exit status for the rank failure that ended the job.

    As in a shell, the exit status for a rank killed by signal number N is 128 + N.
    """
    if failure.report is not None:  # the launcher may also have signalled this rank
        return failure.report.status
    return 128 - failure.status if failure.status < 0 else failure.status


def _summary(failure: RankFailure) -> str:
    who = f"rank {failure.rank} (pid {failure.pid})"
    if failure.report is not None and failure.report.trace:
        return f"{who} failed:"
    if failure.report is not None:
        return f"{who} ended with {failure.report.message}"
    return f"{who} {describe_status(failure.status)}"


def _consequences(others: Sequence[RankFailure]) -> str:
    """Return one line about the other ranks that failed or were stopped."""
    stopped = [f.rank for f in others if _was_stopped(f)]
    failed = [f for f in others if not _was_stopped(f)]
    clauses = []
    for failure in failed[:2]:
        if failure.report is not None and failure.report.trace:
            clauses.append(f"rank {failure.rank} then failed with {failure.report.kind}")
        else:
            clauses.append(_summary(failure).replace(f" (pid {failure.pid})", ""))
    if len(failed) > 2:
        clauses.append(f"{_format_ranks([f.rank for f in failed[2:]])} also failed")
    if stopped:
        clauses.append(f"{_format_ranks(stopped)} {'was' if len(stopped) == 1 else 'were'} stopped")
    text = "; ".join(clauses)
    return text[:1].upper() + text[1:] + "." if text else ""


def _was_stopped(failure: RankFailure) -> bool:
    return failure.stopped and failure.report is None


def _same_report(one: RankFailure, other: RankFailure) -> bool:
    if one.report is None or other.report is None:
        return False
    return (one.report.kind, one.report.message) == (other.report.kind, other.report.message)


# ---- formatting of messages ----


def notify(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr, flush=True)


def count(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural if necessary: `1 rank` or `2 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def describe_slow_stop(ranks: Sequence[int], stop_timeout_s: float) -> str:
    """Return a message saying that `ranks` are still running after a signal to stop the job.

    `stop_timeout_s` is the time in seconds after which the launcher kills these ranks.
    """
    them = "it" if len(ranks) == 1 else "them"
    return (
        f"waiting for {_format_ranks(ranks)} to stop (killed after {stop_timeout_s:g} s; a second signal kills "
        f"{them} immediately)"
    )


def describe_stop(number: int, killed: Collection[int]) -> str:
    """Return the last message of a job that was stopped by signal `number`.

    `killed` lists the ranks that had to be killed.
    """
    line = f"stopped by {signal_name(number)}"
    return f"{line}; {_format_ranks(sorted(killed))} had to be killed" if killed else line


def describe_status(status: int) -> str:
    """Describe how a process ended: its exit status, or the signal that killed it if `status` is negative."""
    return f"was killed by {signal_name(-status)}" if status < 0 else f"ended with exit status {status}"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGTERM` or `Ctrl-C (SIGINT)`."""
    if number == signal.SIGINT:
        return "Ctrl-C (SIGINT)"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _format_ranks(ranks: Sequence[int]) -> str:
    """Return text such as `rank 1`, `ranks 0 and 2` or `ranks 1 to 7`."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
