"""Conversion of failure records to error messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from farandole._troubleshooting import see
from farandole.comm.dtypes import REDUCTION_NAMES, TYPE_NAMES
from farandole.comm.errors import CallMismatch, CommunicationError, RankDied, RankLate, RankLeft
from farandole.native import SILENCE_S, Call, Failure, Operation, Status

_REDUCING = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)
_ROOTED = {
    Operation.REDUCE: "to",
    Operation.BROADCAST: "from",
    Operation.GATHER: "to",
    Operation.SCATTER: "from",
    Operation.SEND: "to",
    Operation.RECV: "from",
}
_MESSAGES = (Operation.SEND, Operation.RECV)
SPARSE_LAYOUT = 1 << 63
"""The `layout` in the call record of a call with sparse tensors.

The ranks first agree on the call; then torch communicates the sparse tensors.
"""


class Membership:
    """Identifies the ranks of a group in error messages by global rank, process ID, host and role."""

    def __init__(
        self,
        group: str,
        ranks: Sequence[int],
        pids: Sequence[int],
        hosts: Sequence[str],
        shares_calls: bool = True,
        roles: dict[int, str] | None = None,
    ) -> None:
        self.group = group
        self.ranks = list(ranks)
        self.pids = list(pids)
        self.hosts = list(hosts)
        self._several = len(set(hosts)) > 1
        self._shares_calls = shares_calls  # whether ranks on one host see each other's calls
        self.roles = {} if roles is None else roles  # by global rank; shared by the groups of a job

    def set_roles(self, roles: Sequence[str]) -> None:
        """Set the role of each rank in the group, such as `stage 3`; "" removes a role."""
        self.roles.update(zip(self.ranks, roles, strict=True))

    def rank(self, rank: int) -> str:
        """Return text such as `rank 3 (process 4711, stage 3)`, with the host name if the group spans several hosts."""
        number = self.ranks[rank]
        where = f" on {self.hosts[rank]}" if self._several else ""
        role = f", {self.roles[number]}" if self.roles.get(number) else ""
        return f"rank {number} (process {self.pids[rank]}{where}{role})"

    def knows_calls(self, reader: int, rank: int) -> bool:
        """Return whether rank `reader` knows the last call of rank `rank`."""
        return self._shares_calls and self.hosts[reader] == self.hosts[rank]


def describe_call(call: Call, membership: Membership) -> str:
    """Return a call as text, such as `all_reduce(sum, 1024 x float32)`."""
    operation = Operation(call.operation)
    if operation is Operation.NOTHING:
        return "nothing yet"
    kind = TYPE_NAMES.get(call.type, "elements of an unknown type")
    details = []
    if operation in _REDUCING:
        details.append(REDUCTION_NAMES[call.op])
    if operation is Operation.ALL_TO_ALL:
        details.append(kind)
    elif operation is not Operation.BARRIER:
        details.append(f"{call.count} x {kind}")
    if operation in _ROOTED:
        known = 0 <= call.root < len(membership.ranks)
        details.append(
            f"{_ROOTED[operation]} {f'rank {membership.ranks[call.root]}' if known else 'any rank'}"
        )
    if operation in _MESSAGES and call.layout:
        details.append(f"tag {call.layout}")
    return f"{operation.name.lower()}({', '.join(details)})"


def failure_to_error(failure: Failure, reader: int, membership: Membership) -> CommunicationError:
    """Return the exception to raise on rank `reader` for the failure record of a broken group."""
    status = Status(failure.status or Status.DIED)
    culprit = membership.rank(failure.culprit)
    if failure.culprit == reader and status is Status.LEFT:
        culprit = "this rank, " + culprit + ","
    theirs, reported = failure.culprit_call, failure.reporter_call
    note = bytes(failure.note).split(b"\0")[0].decode(errors="replace")
    for_whom = "waiting" if failure.reporter == failure.culprit else "waiting for it"
    waiting = f"{membership.rank(failure.reporter)} was {for_whom} in {_numbered(reported, membership)}"

    if status is Status.DIED:
        return RankDied(
            f"{culprit} died (killed or crashed) {_place(theirs, reported, membership)}; {waiting}"
        )
    if status is Status.LEFT:
        why = f" ({note})" if note else ""
        return RankLeft(f"{culprit} left the group{why} {_place(theirs, reported, membership)}; {waiting}")
    if status is Status.LATE:
        return _late(failure, membership)
    if status is Status.MISMATCH:
        return CallMismatch(
            f"{culprit} called {describe_call(theirs, membership)}, but {_witness(failure, membership)} "
            f"{_numbered(reported, membership)}: {_difference(theirs, reported)}"
        )
    if status in (Status.COUNT_MISMATCH, Status.PART_COUNT_MISMATCH):
        return CallMismatch(
            f"{culprit} sent {reported.count} elements to {membership.rank(reported.root)}, which expected "
            f"{reported.layout}, in {_numbered(theirs, membership)}"
        )
    if status is Status.CLOSED:
        return RankDied(
            f"{culprit} died or lost its network connection: the connection to {membership.rank(failure.reporter)} "
            f"was closed; {waiting}"
        )
    if status is Status.SILENT:
        host = membership.hosts[failure.culprit]
        return RankDied(
            f"{culprit} cannot be reached: {host} has not responded for {SILENCE_S:g} s, so the host or its network "
            f"link is down; {waiting}"
        )
    if status is Status.INTERRUPTED:
        return CommunicationError(
            f"{culprit} was interrupted (Ctrl-C or another signal) in {_numbered(reported, membership)}"
        )
    return CommunicationError(f"{culprit}: {status.name.lower()}; {waiting}")


def with_own_call(
    error: CommunicationError, failure: Failure, own: Call, membership: Membership
) -> CommunicationError:
    """Return `error` with this rank's call `own` appended, or unchanged if `failure` already contains that call."""
    known = failure.culprit_call, failure.reporter_call
    if not own.operation or any(same_call(own, call) for call in known):
        return error
    return type(error)(f"{error}; this rank called {describe_call(own, membership)}")


def same_call(a: Call, b: Call) -> bool:
    """Return whether two call records are equal."""
    names = ("index", "operation", "type", "op", "root", "count", "layout")
    return all(getattr(a, name) == getattr(b, name) for name in names)


def describe_whereabouts(calls: Mapping[int, Call], reader: int, membership: Membership) -> str:
    """Describe the current call of rank `reader`, and list the ranks on its host that have not started the call."""
    own = calls[reader]
    behind = [
        f"{membership.rank(rank)} has not arrived (its last call was {describe_call(call, membership)})"
        for rank, call in calls.items()
        if call.index < own.index
    ]
    if not behind:
        behind = ["all ranks of this host have started this call"]
    return "; ".join([_numbered(own, membership), *behind] if own.operation else behind)


def describe_stall(reader: str, waited_s: float, timeout_s: float, wait: str) -> str:
    """Return the stall warning for the rank `reader`.

    Args:
        reader: The rank, as returned by `Membership.rank`.
        waited_s: The time in seconds that the rank has waited.
        timeout_s: The time in seconds after which the wait fails.
        wait: The call in which the rank waits and the cause of the delay, as a phrase such as "in barrier(); ...".
    """
    limit = f"the wait fails after {round(timeout_s, 1):g} s"
    return f"{reader} has waited {waited_s:.0f} s {wait}; {limit}{see('has-waited')}"


def describe_stalled_message(
    own: Call, reader: int, waited_message: Callable[[int], Call | None], membership: Membership
) -> str:
    """Describe the message `own`, for which rank `reader` is waiting, and the chain of ranks that causes the delay.

    Each rank in the chain is waiting for a message to or from the next rank, so the last rank delays all others.  If
    the chain is a cycle, only the lowest rank describes the cycle, and the other ranks return "".
    `waited_message(rank)` returns the message for which `rank` is waiting, or None.
    """
    text, ranks, call = describe_call(own, membership), [reader], own
    while (peer := call.root) >= 0 and peer not in ranks:
        theirs = waited_message(peer)
        if theirs is None:
            late = membership.rank(peer)
            received = call.operation == Operation.RECV
            return f"{text}; {f'the message from {late} has not arrived' if received else f'{late} has not received it'}"
        text += f"; {membership.rank(peer)} is waiting in {describe_call(theirs, membership)}"
        ranks.append(peer)
        call = theirs
    if call.root != reader:
        return text
    advice = "these ranks are waiting for each other; post one of the receives first, or use isend and irecv"
    return f"{text}: {advice}" if reader == min(ranks) else ""


def _numbered(call: Call, membership: Membership) -> str:
    if call.operation in _MESSAGES:
        return f"{describe_call(call, membership)} of {membership.group}"
    return f"{describe_call(call, membership)}, call number {call.index} of {membership.group}"


def _place(theirs: Call, reported: Call, membership: Membership) -> str:
    """Return when a rank with the last call `theirs` died or left, as text such as "in all_reduce(...)"."""
    if theirs.operation == Operation.NOTHING:
        return f"before its first call in {membership.group}"
    call = describe_call(theirs, membership)
    if theirs.operation in _MESSAGES:
        return f"after it called {call}"
    if theirs.index >= reported.index and reported.operation not in _MESSAGES:
        return f"in {call}"
    return f"after {call}, its call number {theirs.index}"


def _late(failure: Failure, membership: Membership) -> RankLate:
    theirs, reported = failure.culprit_call, failure.reporter_call
    who, waiter = membership.rank(failure.culprit), membership.rank(failure.reporter)
    doing = (
        f"its last call was {describe_call(theirs, membership)}"
        if theirs.operation
        else "it has made no call"
    )
    if not membership.knows_calls(failure.reporter, failure.culprit):
        doing = "its current call is unknown to this host"
    if reported.operation in _MESSAGES:
        if reported.root < 0:
            return RankLate(
                f"no rank sent a message within the timeout of {failure.timeout:g} s to {waiter}, which was waiting in "
                f"{_numbered(reported, membership)}"
            )
        sent = reported.operation == Operation.SEND
        failed = (
            f"receive the message that {waiter} sent" if sent else f"send the message that {waiter} expected"
        )
        return RankLate(
            f"{who} did not {failed} in {_numbered(reported, membership)} within the timeout of {failure.timeout:g} s; "
            f"{doing}"
        )
    others = f" and {failure.missing - 1} more" if failure.missing > 1 else ""
    return RankLate(
        f"{who}{others} did not arrive within the timeout of {failure.timeout:g} s ({doing}); {waiter} was waiting in "
        f"{_numbered(reported, membership)}"
    )


def _witness(failure: Failure, membership: Membership) -> str:
    if failure.reporter == failure.culprit:
        return "the other ranks called"
    return f"{membership.rank(failure.reporter)} called"


def _difference(a: Call, b: Call) -> str:
    if a.operation != b.operation and not (a.operation in _MESSAGES and b.operation in _MESSAGES):
        return "the operations differ"
    if a.layout != b.layout and SPARSE_LAYOUT in (a.layout, b.layout):
        return "one tensor is sparse and the other is dense"
    reduces_all = a.operation == Operation.ALL_REDUCE
    layout = "compression" if reduces_all else "split of the elements among the ranks"
    parts = {
        "dtype": (a.type, b.type),
        "reduction": (a.op, b.op),
        "root": (a.root, b.root),
        "number of elements": (a.count, b.count),
        layout: (a.layout, b.layout),
    }
    if a.operation in _MESSAGES:
        del parts["root"]
    different = [name for name, (one, other) in parts.items() if one != other]
    return (
        f"they differ in {' and '.join(different)}"
        if different
        else "the ranks have made different numbers of calls"
    )
