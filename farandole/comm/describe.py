"""Turning what the core recorded about a failure into the sentence that a person reads."""

from __future__ import annotations

from collections.abc import Sequence

from farandole.comm.dtypes import REDUCTION_NAMES, TYPE_NAMES
from farandole.comm.errors import CallMismatch, CommunicationError, RankDied, RankLate, RankLeft
from farandole.native import Call, Failure, Operation, Status

_REDUCING = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)
_ROOTED = {
    Operation.REDUCE: "to",
    Operation.BROADCAST: "from",
    Operation.GATHER: "to",
    Operation.SCATTER: "from",
    Operation.SEND: "to",
    Operation.RECV: "from",
}


class Roster:
    """The ranks of a group by the names that people know them by: global ranks and process ids."""

    def __init__(self, group: str, ranks: Sequence[int], pids: Sequence[int]) -> None:
        self.group = group
        self.ranks = list(ranks)
        self.pids = list(pids)

    def rank(self, rank: int) -> str:
        """`rank 3 (process 4711)`."""
        return f"rank {self.ranks[rank]} (process {self.pids[rank]})"


def describe_call(call: Call, roster: Roster) -> str:
    """`all_reduce(sum, 1024 x float32)`."""
    operation = Operation(call.operation)
    if operation is Operation.NOTHING:
        return "nothing yet"
    details = []
    if operation in _REDUCING:
        details.append(REDUCTION_NAMES[call.op])
    if operation not in (Operation.BARRIER, Operation.ALL_TO_ALL):
        details.append(f"{call.count} x {TYPE_NAMES.get(call.type, 'unknown type')}")
    elif operation is Operation.ALL_TO_ALL:
        details.append(TYPE_NAMES.get(call.type, "unknown type"))
    if operation in _ROOTED:
        known = 0 <= call.root < len(roster.ranks)
        details.append(f"{_ROOTED[operation]} {f'rank {roster.ranks[call.root]}' if known else 'any rank'}")
    if operation in (Operation.SEND, Operation.RECV) and call.layout:
        details.append(f"tag {call.layout}")
    return f"{operation.name.lower()}({', '.join(details)})"


def failure_to_error(failure: Failure, own: Call, roster: Roster) -> CommunicationError:
    """The exception for a broken group, from the record that all its ranks share and this rank's own call."""
    status = Status(failure.status or Status.DIED)
    culprit = roster.rank(failure.culprit)
    theirs, reported = failure.culprit_call, failure.reporter_call
    their_call = describe_call(theirs, roster)
    if theirs.operation == Operation.NOTHING:
        where = "before its first call in this group"
    elif theirs.index >= reported.index or theirs.operation >= Operation.SEND:
        where = f"in {their_call}"
    else:
        where = f"after its call number {theirs.index}, {their_call}"
    waiting = (
        f"{roster.rank(failure.reporter)} was in {describe_call(reported, roster)}, call number {reported.index} "
        f"of {roster.group}"
    )
    note = bytes(failure.note).split(b"\0")[0].decode(errors="replace")

    if status is Status.DIED:
        return RankDied(f"{culprit} died {where}, without leaving the group (killed, or crashed); {waiting}")
    if status is Status.LEFT:
        ending = f" ({note})" if note else ""
        return RankLeft(f"{culprit} ended{ending} {where}, while others still wait for it; {waiting}")
    if status is Status.LATE:
        others = f" and {failure.missing - 1} more" if failure.missing > 1 else ""
        doing = "its last call in this group was " + their_call if theirs.operation else "it has not called anything"
        return RankLate(f"{culprit}{others} did not arrive before the deadline: {doing}; {waiting}")
    if status is Status.MISMATCH:
        return CallMismatch(
            f"{culprit} called {their_call} where {_witness(failure, roster)} {describe_call(reported, roster)} "
            f"(call number {reported.index} of {roster.group}); {_difference(theirs, reported)}"
        )
    if status is Status.UNEVEN:
        return CallMismatch(
            f"in all_to_all, call number {reported.index} of {roster.group}, {culprit} sends {reported.count} elements "
            f"to {roster.rank(reported.root)}, which expects {reported.layout} from it"
        )
    if status is Status.INTERRUPTED:
        return CommunicationError(f"{culprit} gave up {where} (an exception or Ctrl-C stopped it); {waiting}")
    return CommunicationError(f"{culprit}: {status.name.lower()} in {describe_call(own, roster)}")


def _witness(failure: Failure, roster: Roster) -> str:
    if failure.reporter == failure.culprit:
        return "the others called"
    return f"{roster.rank(failure.reporter)} called"


def _difference(a: Call, b: Call) -> str:
    parts = {
        "operation": (a.operation, b.operation),
        "element type": (a.type, b.type),
        "reduction": (a.op, b.op),
        "root": (a.root, b.root),
        "number of elements": (a.count, b.count),
        "split of the elements among the ranks": (a.layout, b.layout),
    }
    if a.operation != b.operation:
        return "the operations differ"
    different = [name for name, (one, other) in parts.items() if one != other]
    return f"they differ in {' and '.join(different)}" if different else "their calls are out of step"
