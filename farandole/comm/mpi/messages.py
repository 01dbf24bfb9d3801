"""Point-to-point messages through MPI, an implementation of `messages.MessagePassing`."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from farandole.comm.describe import describe_call, describe_stall, describe_stalled_message, failure_to_error
from farandole.comm.errors import CallMismatch, CommunicationError
from farandole.comm.mpi.waiting import SLOW_S
from farandole.comm.notices import StallWarning
from farandole.native import BACKGROUND, TRY, Call, Failure, Operation, Status

if TYPE_CHECKING:
    from farandole.comm.mpi.group import MpiGroup


class MpiMessage:
    """A pending send or receive."""

    def __init__(self, group: MpiGroup, request: Any, call: Call, nbytes: int) -> None:
        self.call = call
        self.source: int = call.root
        self._group, self._way = group, group.engine
        self._request = request
        self._status = group.engine.mpi.Status()
        self._nbytes = nbytes
        self.outcome: Exception | None = None
        self.complete = False
        self.owner: Any = None  # the owner of the memory, for callers that may drop a pending message

    @property
    def sends(self) -> bool:
        """Whether the message is a send."""
        return bool(self.call.operation == Operation.SEND)

    def advance(self) -> bool:
        """Test the message; return whether it has completed or failed.  The caller must hold the engine's lock."""
        if self.complete:
            return True
        mpi = self._way.mpi
        try:
            if not self._request.Test(self._status):
                return False
            if not self.sends:
                self._check_received(mpi)
        except mpi.Exception as error:
            self.outcome = self._failure(error)
        self.complete = True
        return True

    def _check_received(self, mpi: Any) -> None:
        self.source = self._status.Get_source()
        received = (
            self._status.Get_elements(mpi.BYTE) if self._nbytes <= self._way.largest_count else self._nbytes
        )
        if not self._status.Is_cancelled() and received != self._nbytes:
            sender = self._group.membership.rank(self.source)
            self.outcome = CallMismatch(
                f"{sender} sent {received} bytes, but {self._who()} called {self._in_words()}, which receives "
                f"{self._nbytes} bytes"
            )

    def _failure(self, error: Any) -> CommunicationError:
        if error.Get_error_class() == self._way.mpi.ERR_TRUNCATE:
            return CallMismatch(
                f"a longer message arrived, but {self._who()} called {self._in_words()}, which receives "
                f"{self._nbytes} bytes"
            )
        return CommunicationError(
            f"MPI failed on {self._who()} in {self._in_words()}: {error.Get_error_string()}"
        )

    def test(self) -> bool:
        """Acquire the engine's lock and return the result of `advance`."""
        with self._way.lock:
            return self.advance()

    def cancel(self) -> None:
        """Cancel a pending receive; do nothing for a send, which MPI cannot cancel."""
        with self._way.lock:
            if not self.sends and not self.advance():
                self._request.Cancel()

    def wait(self, seconds: float, *, background: bool) -> bool:
        """Test the message until it has completed or failed; return False if `seconds` pass first."""
        tested, started = _Tested(self), time.monotonic()
        if self._way.complete_soon(tested):
            return True
        warning = StallWarning(functools.partial(self._stalled, seconds))
        waiting, recorded = self._group.waiting, False

        def each_turn(waited_s: float) -> None:
            nonlocal recorded
            if waited_s > SLOW_S and not recorded:
                recorded = True
                waiting.record_message(self.call)
            warning.after(waited_s)

        left_s = seconds - (time.monotonic() - started)
        try:
            return self._way.complete(
                tested, left_s, transfer=self._nbytes, background=background, each_turn=each_turn
            )
        finally:
            if recorded:
                waiting.record_message(None)

    def late(self, timeout_s: float) -> CommunicationError:
        """Return the exception for a message that did not complete within the timeout."""
        group = self._group
        failure = Failure(
            status=Status.LATE,
            culprit=max(0, self.call.root),
            reporter=group.rank,
            timeout=timeout_s,
            reporter_call=self.call,
        )
        return failure_to_error(failure, group.rank, group.membership)

    def _stalled(self, timeout_s: float, waited_s: float) -> str:
        group = self._group
        text = describe_stalled_message(self.call, group.rank, group.waiting.message, group.membership)
        return describe_stall(self._who(), waited_s, timeout_s, f"in {text}") if text else ""

    def _who(self) -> str:
        return self._group.membership.rank(self._group.rank)

    def _in_words(self) -> str:
        return f"{describe_call(self.call, self._group.membership)} of {self._group.membership.group}"


class _Tested:
    """Wraps a message in an object with the `Test` method of an MPI request, for use by the engine."""

    def __init__(self, message: MpiMessage) -> None:
        self.Test = message.advance


class Messages:
    """Sends and receives within one group; see `messages.MessagePassing`."""

    def __init__(self, group: MpiGroup) -> None:
        self.group = group

    def post_send(self, address: int, nbytes: int, kind: int, peer: int, tag: int) -> MpiMessage:
        """Post a send of `nbytes` bytes to rank `peer`."""
        return self._post(self.group.comm.Isend, Operation.SEND, address, nbytes, kind, peer, tag)

    def post_recv(self, address: int, nbytes: int, kind: int, peer: int, tag: int) -> MpiMessage:
        """Post a receive of `nbytes` bytes from rank `peer`, or from any rank if `peer` is -1."""
        return self._post(self.group.comm.Irecv, Operation.RECV, address, nbytes, kind, peer, tag)

    def send(self, address: int, nbytes: int, kind: int, peer: int, tag: int, flags: int) -> int:
        """Send `nbytes` bytes and block until the buffer may be modified; return 0 or raise an exception."""
        return self._finish(self.post_send(address, nbytes, kind, peer, tag), flags)

    def recv(self, address: int, nbytes: int, kind: int, peer: int, tag: int, flags: int) -> int:
        """Receive `nbytes` bytes and block until they have arrived; return 0 or raise an exception."""
        return self._finish(self.post_recv(address, nbytes, kind, peer, tag), flags)

    def _finish(self, message: MpiMessage, flags: int) -> int:
        self.source_of(self.wait_message(message, self.group.timeout_s, flags))
        return 0

    def _post(
        self, begin: Any, operation: Operation, address: int, nbytes: int, kind: int, peer: int, tag: int
    ) -> MpiMessage:
        group, engine = self.group, self.group.engine
        group.check_usable()
        call = Call(operation=operation, type=kind, count=nbytes // (kind >> 8), root=peer, layout=tag)
        source = engine.mpi.ANY_SOURCE if peer < 0 else peer
        request = group.start(begin, group.message_buffer(address, nbytes), source, tag)
        message = MpiMessage(group, request, call, nbytes)
        if not message.test():
            engine.watch(message)
        return message

    def test_message(self, message: MpiMessage) -> Any:
        """Return `message` if it has completed or failed, else `Status.PENDING`."""
        return message if message.test() else Status.PENDING

    def wait_message(self, message: MpiMessage, seconds: float, flags: int) -> Any:
        """Wait up to `seconds` seconds until `message` has completed or failed; return `message`.

        If the message is then still pending, return `Status.PENDING` if `flags` contains `TRY`; otherwise, fail the
        group and return a `RankLate`.
        """
        if message.wait(seconds, background=bool(flags & BACKGROUND)):
            return message
        if flags & TRY:
            return Status.PENDING
        error = message.late(seconds)
        self.group.fail(error)
        self.cancel_message(message)
        return error

    def cancel_message(self, message: MpiMessage) -> None:
        """Cancel a receive whose message has not arrived; keep the message's memory alive until it is complete."""
        message.cancel()
        self.group.engine.abandon(_Tested(message))

    def source_of(self, outcome: Any) -> int:
        """Return the source rank of a completed message; raise an exception if the message failed."""
        error = outcome.outcome if isinstance(outcome, MpiMessage) else outcome
        if error is not None:
            raise error
        return int(outcome.source)
