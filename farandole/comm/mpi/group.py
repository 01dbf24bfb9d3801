"""MPI groups: membership, deadlines, messages, and errors that name ranks.

`MpiGroup` has the `HostGroup` methods that `GroupCore` and `comm/messages.py` use, so the point-to-point code is shared
with the shared-memory backend.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from socket import gethostname
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from farandole._troubleshooting import see
from farandole.comm.describe import Membership, describe_call, describe_stall, failure_to_error
from farandole.comm.errors import CommunicationError, RankDied, RankLate
from farandole.comm.host import Rendezvous
from farandole.comm.mpi.engine import SPINS, Engine, engine
from farandole.comm.mpi.library import NO_FORK, MpiUnavailable, describe_library
from farandole.comm.mpi.messages import Messages
from farandole.comm.mpi.waiting import SLOW_S, Waiting
from farandole.comm.notices import StallWarning, warn
from farandole.native import Call, Failure, Status

PIECE_BYTES = 1 << 30
GRACE_S = 0.5
"""Seconds for which a rank waits, after its timeout has expired, for other ranks to record their arrival."""


class MpiGroup:
    """The ranks of one group and their MPI communicator; all ranks call `connect` to create the group."""

    def __init__(
        self, comm: Any, mpi_engine: Engine, membership: Membership, store: dist.Store, timeout: timedelta
    ) -> None:
        self.comm = comm
        self.engine = mpi_engine
        self.rank: int = comm.Get_rank()
        self.group_rank = self.rank
        self.size: int = comm.Get_size()
        self.largest_tag: int = comm.Get_attr(mpi_engine.mpi.TAG_UB) - 1  # TAG_UB is reserved for collectives
        self.membership = membership
        self.handle: int | None = 1  # replaces the C core's handle; None after `close`
        messages = Messages(self)
        self.send, self.recv = messages.send, messages.recv
        self.post_send, self.post_recv = messages.post_send, messages.post_recv
        self.test_message, self.wait_message = messages.test_message, messages.wait_message
        self.cancel_message, self.source_of = messages.cancel_message, messages.source_of
        self.compares = dist.get_debug_level() == dist.DebugLevel.DETAIL
        self._owner = os.getpid()
        self._store = store
        self.waiting = Waiting(store, self.rank, self.size)
        self._index = 0
        self._call: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
        self._call_timeout_s: float | None = None
        self._given_up = False
        # the number of subgroups created for each list of ranks; equal on all ranks in the list
        self._subgroups: Counter[tuple[int, ...]] = Counter()
        self._broken: CommunicationError | None = None
        self.set_timeout(timeout)

    @classmethod
    def connect(
        cls, rendezvous: Rendezvous, size: int, timeout: timedelta, name: str, ranks: Sequence[int]
    ) -> MpiGroup:
        """Create the group; every rank of the group must call this method.

        Args:
            rendezvous: The rendezvous through which the processes exchange their ranks in MPI_COMM_WORLD.
            size: The number of ranks.
            timeout: The group's timeout, which also limits the creation of the group.
            name: The name of the group in error messages.
            ranks: The rank numbers for error messages, which may differ from the ranks in MPI_COMM_WORLD.

        Raises:
            RankLate: if a rank did not arrive before the timeout.
            MpiUnavailable: if the ranks use different MPI libraries, or a rank is not in MPI_COMM_WORLD.
        """
        mpi_engine = engine()
        world, mpi = mpi_engine.mpi.COMM_WORLD, mpi_engine.mpi
        with mpi_engine.making_group():
            told = rendezvous.exchange(
                "mpi", f"{world.Get_rank()} {os.getpid()} {gethostname()} {describe_library(mpi)}"
            )
            numbers = [int(text.split()[0]) for text in told]
            libraries = sorted({text.split(maxsplit=3)[3] for text in told})
            if len(libraries) > 1:
                raise MpiUnavailable(
                    f"expected one MPI library for all ranks of {name}, got {', '.join(libraries)}; load the same "
                    "library on all hosts"
                )
            if (distinct := len(set(numbers))) < size:
                raise MpiUnavailable(
                    f"expected {size} distinct MPI ranks for {name}, got {distinct} ({libraries[0]}); start all "
                    "ranks with one mpiexec command"
                )
            tag = sum((i + 1) * number for i, number in enumerate(numbers)) % 32768
            with mpi_engine.lock:
                members = world.Get_group()
                comm = world.Create_group(members.Incl(numbers), tag)
                comm.Set_errhandler(mpi.ERRORS_RETURN)
        pids, hosts = [int(text.split()[1]) for text in told], [text.split()[2] for text in told]
        membership = Membership(name, ranks, pids, hosts, shares_calls=False)
        return cls(comm, mpi_engine, membership, rendezvous.store, timeout)

    def subgroup(self, members: Sequence[int]) -> MpiGroup:
        """Return a group in which rank r is `members[r]` of this group; only `members` call this method."""
        mpi_engine, name = (
            self.engine,
            f"ranks {', '.join(str(self.membership.ranks[rank]) for rank in members)}",
        )
        number = self._subgroups[tuple(members)]
        self._subgroups[tuple(members)] += 1
        with mpi_engine.making_group(), mpi_engine.lock:
            comm = self.comm.Create_group(self.comm.Get_group().Incl(list(members)), number % 32768)
            comm.Set_errhandler(mpi_engine.mpi.ERRORS_RETURN)
        old = self.membership
        membership = Membership(
            f"{old.group}, {name}",
            [old.ranks[rank] for rank in members],
            [old.pids[rank] for rank in members],
            [old.hosts[rank] for rank in members],
            shares_calls=False,
            roles=old.roles,
        )
        store = dist.PrefixStore(f"{'-'.join(map(str, members))}/{number}/", self._store)
        return MpiGroup(comm, mpi_engine, membership, store, timedelta(seconds=self.timeout_s))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call may wait for other ranks."""
        self.timeout_s = timeout.total_seconds()

    def within(self, timeout_s: float, call: Callable[[int], None]) -> Callable[[int], None]:
        """Return a function that runs `call` with a timeout of `timeout_s` seconds instead of the group's timeout."""

        def timed(flags: int) -> None:
            self._call_timeout_s = timeout_s
            try:
                call(flags)
            finally:
                self._call_timeout_s = None

        return timed

    def check(self, status: Any) -> None:
        """Raise `status` if it is an exception."""
        if isinstance(status, BaseException):
            raise status

    def whereabouts(self) -> str:
        """Describe the current call and the ranks that have not recorded their arrival."""
        what = f"{self._in_words()}, call number {self._index} of {self.membership.group}"
        behind = [
            f"{self.membership.rank(rank)} has not recorded its arrival"
            for rank in self.waiting.missing(self._index)
        ]
        return "; ".join([what, *behind])

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> torch.Tensor:
        """Return a tensor in private memory."""
        return torch.empty(*shape, dtype=dtype, device="cpu")

    def leave(self, note: str) -> None:
        """Do nothing; MPI cannot notify the other ranks."""

    def give_up(self) -> None:
        """Fail the pending calls of this process."""
        self._given_up = True

    def close(self) -> None:
        """Free the communicator; no call may be pending."""
        if not self.handle or self._owner != os.getpid():
            return
        self.handle, mpi, status = None, self.engine.mpi, self.engine.mpi.Status()
        if self._broken is not None or mpi.Is_finalized():
            return
        unreceived = False
        # MPICH fails to free a communicator with messages that were never received
        with self.engine.lock, contextlib.suppress(mpi.Exception):
            unreceived = self.comm.Iprobe(mpi.ANY_SOURCE, mpi.ANY_TAG, status)
            self.comm.Free()
        if unreceived:
            warn(
                f"messages to {self.membership.rank(self.rank)} of {self.membership.group} were never received; the "
                f"first is from {self.membership.rank(status.Get_source())} with tag {status.Get_tag()}"
            )

    # ---- called by `MpiCore` and `Messages` ----

    def check_usable(self) -> None:
        """Raise an exception if the group has failed or this process was forked."""
        if self._owner != os.getpid():
            raise MpiUnavailable(NO_FORK)
        if self._broken is not None:
            raise self._broken

    def fail(self, error: CommunicationError) -> None:
        """Make all later calls of this process raise `error`."""
        self._broken = error

    def begin(self, operation: int, kind: int, op: int, count: int, root: int = 0) -> None:
        """Record the start of a collective; raise an exception if the group has failed."""
        self.check_usable()
        self._index += 1
        self._call = (operation, kind, op, count, root)

    def start(self, begin: Callable[..., Any], *arguments: Any) -> Any:
        """Call the MPI function `begin` and return its result; convert MPI errors to `CommunicationError`."""
        try:
            with self.engine.lock:
                return begin(*arguments)
        except self.engine.mpi.Exception as error:
            raise self._failed(error) from error

    def block(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Make a call that blocks inside MPI; if the call exceeds the timeout, this process exits."""
        seconds = self._call_timeout_s or self.timeout_s
        with self.engine.limited(seconds, lambda: str(self._late(seconds))):
            self.start(call, *arguments)

    def finish(self, request: Any, transfer: int, *, background: bool) -> None:
        """Wait for a request of the current call; if the timeout expires, fail the group with `RankLate`."""
        seconds = self._call_timeout_s or self.timeout_s
        try:
            if self.engine.complete_soon(request, 3 if background else SPINS):
                return
            warning = StallWarning(functools.partial(self._stalled, seconds))
            each_turn = functools.partial(self._each_turn, warning)
            done = self.engine.complete(
                request, seconds, transfer=transfer, background=background, each_turn=each_turn
            )
        except self.engine.mpi.Exception as error:
            raise self._failed(error) from error
        except BaseException:
            self._broken = CommunicationError(
                f"{self.membership.group} was interrupted in {self._in_words()} and cannot be used again; destroy "
                "the group and create a new one"
            )
            self.engine.abandon(request)
            raise
        if not done:
            self.engine.abandon(request)
            self._broken = self._late(seconds)
            raise self._broken

    def _each_turn(self, warning: StallWarning, waited_s: float) -> None:
        """Warn of a stall; raise an exception if `give_up` was called.  Runs between two tests of a request."""
        if self._given_up:
            raise CommunicationError(
                f"the group was destroyed during {self._in_words()}{see('the-group-was-destroyed')}"
            )
        seconds = self._call_timeout_s or self.timeout_s
        if waited_s > min(SLOW_S, seconds / 2) and self.waiting.recorded < self._index:
            self.waiting.record(self._index)
        warning.after(waited_s)

    def _stalled(self, timeout_s: float, waited_s: float) -> str:
        """Return the stall warning on the lowest waiting rank and "" on the other ranks."""
        if set(range(self.rank)) - set(self.waiting.missing(self._index)):
            return ""
        return describe_stall(
            self.membership.rank(self.rank), waited_s, timeout_s, f"in {self.whereabouts()}"
        )

    def compare(self, background: bool) -> None:
        """Raise `CallMismatch` unless all ranks make the same call; used only if TORCH_DISTRIBUTED_DEBUG=DETAIL."""
        calls = self._gather([self._index, *self._call], background)
        # the culprit is the first rank whose call differs from the most frequent call
        common = max(range(self.size), key=lambda r: calls.count(calls[r]))
        for culprit, call in enumerate(calls):
            if call != calls[common]:
                self._break(
                    Failure(
                        status=Status.MISMATCH,
                        culprit=culprit,
                        reporter=common,
                        culprit_call=_call(*call),
                        reporter_call=_call(*calls[common]),
                    )
                )

    def compare_counts(self, sends: Sequence[int], receives: Sequence[int], background: bool) -> None:
        """Raise `CallMismatch` on all ranks unless every rank receives as many elements as the others send to it."""
        counts = self._gather([*sends, *receives], background)
        for sender, receiver in itertools.product(range(self.size), repeat=2):
            sent, expected = counts[sender][receiver], counts[receiver][self.size + sender]
            if sent != expected:
                self._break(
                    Failure(
                        status=Status.COUNT_MISMATCH,
                        culprit=sender,
                        reporter=sender,
                        culprit_call=_call(self._index, *self._call),
                        reporter_call=Call(count=sent, root=receiver, layout=expected),
                    )
                )

    def _gather(self, numbers: Sequence[int], background: bool) -> list[list[int]]:
        """Gather the same number of integers from every rank."""
        own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        gathered = torch.empty(self.size, len(numbers), dtype=torch.int64, device="cpu")
        request = self.start(self.comm.Iallgather, own.numpy(), gathered.numpy())
        self.finish(request, 0, background=background)
        rows: list[list[int]] = gathered.tolist()
        return rows

    def _break(self, failure: Failure) -> NoReturn:
        """Mark the group as failed, and raise the exception for `failure`."""
        self._broken = failure_to_error(failure, self.rank, self.membership)
        raise self._broken

    def message_buffer(self, address: int, nbytes: int) -> Any:
        """Return an mpi4py buffer for a message of `nbytes` bytes at `address`.

        If `nbytes` exceeds MPI's largest count, the buffer is a single element of a derived datatype.
        """
        mpi = self.engine.mpi
        memory = mpi.memory.fromaddress(address, nbytes)
        if nbytes <= self.engine.largest_count:
            return [memory, nbytes, mpi.BYTE]
        pieces, rest = divmod(nbytes, PIECE_BYTES)
        piece = mpi.BYTE.Create_contiguous(PIECE_BYTES)
        whole = mpi.Datatype.Create_struct([pieces, rest], [0, nbytes - rest], [piece, mpi.BYTE])
        return [memory, 1, whole.Commit()]

    # ---- errors ----

    def _in_words(self) -> str:
        return describe_call(_call(self._index, *self._call), self.membership)

    def _failed(self, error: Any) -> CommunicationError:
        mpi = self.engine.mpi
        kind = (
            RankDied
            if error.Get_error_class() == getattr(mpi, "ERR_PROC_FAILED", None)
            else CommunicationError
        )
        self._broken = kind(
            f"MPI failed on {self.membership.rank(self.rank)} in {self._in_words()}, call number {self._index} of "
            f"{self.membership.group}: {error.Get_error_string()}"
        )
        return self._broken

    def _late(self, seconds: float) -> RankLate:
        self.waiting.record(self._index)
        deadline = time.monotonic() + GRACE_S
        while (missing := self.waiting.missing(self._index)) and time.monotonic() < deadline:
            time.sleep(0.02)
        waiting = f"in {self._in_words()}, call number {self._index} of {self.membership.group}"
        if not missing:
            return RankLate(
                f"the transfer {waiting} did not complete within the timeout of {seconds:g} s, although all ranks have "
                f"arrived; check whether a rank or the network has stopped"
            )
        names = ", ".join(self.membership.rank(rank) for rank in missing)
        return RankLate(
            f"{names} did not arrive within the timeout of {seconds:g} s; {self.membership.rank(self.rank)} was "
            f"waiting {waiting}"
        )


def _call(index: int, operation: int, kind: int, op: int, count: int, root: int) -> Call:
    return Call(index=index, operation=operation, type=kind, op=op, root=root, count=count)
