"""How a rank ended, and what the user is told about it: one cause, shown once.

When one rank fails, the others fail after it: their collectives lose a partner, or the launcher stops
them.  The cause is the first failure that is not such a consequence.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

MAYBE_OUT_OF_MEMORY = (
    "Nobody catches SIGKILL: somebody sent it (kill -9), or the kernel did because memory ran out; "
    "in that case `dmesg` says so, and fewer ranks or smaller batches need less."
)
OUT_OF_MEMORY = "The kernel killed it because memory ran out; fewer ranks or smaller batches need less."
NOT_OUT_OF_MEMORY = (
    "Somebody sent it (kill -9): the kernel counts no process killed for lack of memory meanwhile."
)


@dataclass(frozen=True)
class ErrorReport:
    """An exception that ended a rank, as the rank wrote it down."""

    kind: str
    message: str
    trace: str
    """What to show: a traceback, the text of sys.exit("text"), or nothing for sys.exit(7)."""
    consequence: bool
    """Whether it tells of another rank's failure: a communication error."""
    time: float
    """When, in seconds since the epoch."""
    status: int = 1
    """The exit status with which the rank ends."""

    @staticmethod
    def now(
        kind: str, message: str, trace: str, *, consequence: bool = False, status: int = 1
    ) -> ErrorReport:
        """A report of this moment."""
        return ErrorReport(kind, message, trace, consequence, time.time(), status)


@dataclass(frozen=True)
class Ending:
    """A rank that did not end well: its exit status (negative: a signal's number) and its report, if any."""

    rank: int
    pid: int
    status: int
    time: float
    """When it ended, or failed if it said so itself; in seconds since the epoch."""
    report: ErrorReport | None = None
    stopped: bool = False
    """Whether the launcher had asked it to stop."""


def write_report(path: str, report: ErrorReport) -> None:
    """Write a report in the form in which torch's elastic agent expects one, and atomically."""
    torchs = {"py_callstack": report.trace, "timestamp": str(int(report.time))}
    data = {
        "message": {"message": f"{report.kind}: {report.message}", "extraInfo": torchs},
        "farandole": asdict(report),
    }
    partial = f"{path}.partial"
    with open(partial, "w") as file:
        json.dump(data, file)
    os.replace(partial, path)


def read_report(data: dict[str, object]) -> ErrorReport | None:
    """The report in what torch's elastic agent read from a rank's error file, if there is one."""
    match data:
        case {"farandole": dict(fields)}:
            return ErrorReport(**fields)
    return None


def explain(endings: Sequence[Ending], oom_kills: int | None = None) -> str:
    """Tell the user why a job failed: the cause in full, the rest in a line.

    oom_kills: how many processes the kernel has killed meanwhile for lack of memory, where that is known.
    """
    cause = find_cause(endings)
    same = [e.rank for e in endings if e is not cause and _same_report(e, cause)]
    others = [e for e in endings if e is not cause and e.rank not in same]
    parts = [_headline(cause)]
    if cause.report is not None and cause.report.trace:
        parts.append("\n" + cause.report.trace.rstrip() + "\n")
    elif cause.status == -signal.SIGKILL:
        parts.append(_why_killed(oom_kills))
    if same:
        parts.append(f"The same happened on {_ranks(same)}.")
    if rest := _aftermath(others):
        parts.append(rest)
    return "\n".join(parts)


def find_cause(endings: Sequence[Ending]) -> Ending:
    """The first failure that is not the consequence of another rank's."""

    def order(ending: Ending) -> tuple[bool, bool, float]:
        consequence = ending.report is not None and ending.report.consequence
        return _was_stopped(ending), consequence, ending.time

    return min(endings, key=order)


def exit_status(ending: Ending) -> int:
    """The launcher's exit status for this cause, as a shell would give it."""
    if ending.report is not None:  # it may have been stopped while it was ending
        return ending.report.status
    return 128 - ending.status if ending.status < 0 else ending.status


def _headline(cause: Ending) -> str:
    who = f"rank {cause.rank} (pid {cause.pid})"
    if cause.report is not None and cause.report.trace:
        return f"{who} failed:"
    if cause.report is not None:
        return f"{who} ended with {cause.report.message}"
    if cause.status < 0:
        return f"{who} was killed by {signal_name(-cause.status)}"
    return f"{who} ended with exit status {cause.status}"


def _why_killed(oom_kills: int | None) -> str:
    if oom_kills is None:
        return MAYBE_OUT_OF_MEMORY
    return OUT_OF_MEMORY if oom_kills > 0 else NOT_OUT_OF_MEMORY


def _aftermath(others: Sequence[Ending]) -> str:
    """One line for the ranks that went down with the cause."""
    stopped = [e.rank for e in others if _was_stopped(e)]
    failed = [e for e in others if not _was_stopped(e)]
    clauses = []
    for ending in failed[:2]:
        if ending.report is not None and ending.report.trace:
            clauses.append(f"rank {ending.rank} then failed with {ending.report.kind}")
        else:
            clauses.append(_headline(ending).replace(f" (pid {ending.pid})", ""))
    if len(failed) > 2:
        clauses.append(f"so did {_ranks([e.rank for e in failed[2:]])}")
    if stopped:
        clauses.append(f"{_ranks(stopped)} {'was' if len(stopped) == 1 else 'were'} stopped")
    text = "; ".join(clauses)
    return text[:1].upper() + text[1:] + "." if text else ""


def _was_stopped(ending: Ending) -> bool:
    return ending.stopped and ending.report is None


def _same_report(one: Ending, other: Ending) -> bool:
    if one.report is None or other.report is None:
        return False
    return (one.report.kind, one.report.message) == (other.report.kind, other.report.message)


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0 and 2`, `ranks 1 to 7`."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def stopped_by(number: int, killed: Collection[int]) -> str:
    """The line that ends a job which was told to stop by a signal; `killed` are the ranks that had to be."""
    line = f"stopped by {signal_name(number)}"
    return f"{line}; {_ranks(sorted(killed))} had to be killed" if killed else line


def signal_name(number: int) -> str:
    """`SIGTERM`; and what people know as Ctrl-C with both its names."""
    if number == signal.SIGINT:
        return "Ctrl-C (SIGINT)"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
