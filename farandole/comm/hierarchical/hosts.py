"""The hosts of a group: their ranks, their leaders, and the transports between them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from farandole.comm.algorithms.steps import Steps
from farandole.comm.describe import failure_to_error, same_call
from farandole.comm.host_group import HostGroup
from farandole.comm.transport import Transport, WireTransport
from farandole.native import Call, Failure, Status

_LEADERS, _ALL = 1, 2  # channel numbers


class Hosts:
    """The ranks of a group, listed by host: `members[h]` contains the ranks on host h.

    `transport` connects the leaders that have the same local rank on different hosts; its ranks are host numbers.
    Only leaders, where `leads` is True, have this transport.  `all` is a transport between any two ranks of the group.
    """

    def __init__(
        self,
        host: HostGroup,
        members: Sequence[Sequence[int]],
        leaders: int | None,
        transport: Transport | None,
    ) -> None:
        self.host = host
        self.members = [list(ranks) for ranks in members]
        self.count = len(members)
        self.index = self.index_of(host.group_rank)
        self.ranks = len(host.membership.ranks)
        self.largest = max(len(ranks) for ranks in members)
        fewest = min(len(ranks) for ranks in members)
        self.leaders = fewest if leaders is None else leaders
        if not 1 <= self.leaders <= fewest:
            raise ValueError(
                f"expected a number of leaders between 1 and {fewest} (the number of ranks on the smallest host), got "
                f"{leaders}"
            )
        self.leads = host.rank < self.leaders
        self.all = WireTransport(host, range(self.ranks), _ALL)
        self._agreement: WireTransport | None = None
        if self.leads:
            self._agreement = WireTransport(host, [ranks[host.rank] for ranks in members], _LEADERS)
            self._agreement.connect()
        self._transport = transport or self._agreement

    @property
    def transport(self) -> Transport:
        """The transport between this leader and the leaders with the same local rank on other hosts."""
        assert self._transport is not None, "only leaders have a transport"
        return self._transport

    def index_of(self, rank: int) -> int:
        """Return the number of the host on which `rank` runs."""
        return next(index for index, ranks in enumerate(self.members) if rank in ranks)

    def blocks(self, flat: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Split `flat`, in which rank r's part has `counts[r]` elements, into one block per host.

        A block is a view if the ranks of the host are consecutive, else a copy.
        """
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        blocks = []
        for ranks in self.members:
            if ranks == list(range(ranks[0], ranks[-1] + 1)):
                blocks.append(flat[starts[ranks[0]] : starts[ranks[-1] + 1]])
            else:
                blocks.append(torch.cat([flat[starts[r] : starts[r + 1]] for r in ranks]))
        return blocks

    def agree(self) -> Steps:
        """Compare this host's declared call with the previous host's call.

        Every host does this, so a mismatch between any two hosts is found.  Messages may be sent before the
        comparison is complete, so the comparison adds no latency.
        """
        if self._agreement is None:
            return
        own = self._own_call()
        theirs = bytearray(ctypes.sizeof(Call))
        after, before = (self.index + 1) % self.count, (self.index - 1) % self.count
        sent = self._agreement.send(torch.frombuffer(bytearray(own), dtype=torch.uint8), after)
        yield self._agreement.recv(torch.frombuffer(theirs, dtype=torch.uint8), before)
        yield sent
        other = Call.from_buffer(theirs)
        if not same_call(own, other):
            self._fail(Status.MISMATCH, self._agreement.group_rank(before), other, own)

    def fail_uneven(self, sender: int, receiver: int, sent: int, expected: int) -> NoReturn:
        """Fail the group: `sender` sent `sent` elements, but `receiver` expected `expected` elements."""
        call, counts = self._own_call(), Call(count=sent, layout=expected, root=receiver)
        self._fail(Status.COUNT_MISMATCH, sender, call, counts)

    def _own_call(self) -> Call:
        call = Call()
        self.host.core.frd_get_call(self.host.handle, self.host.rank, ctypes.byref(call))
        return call

    def _fail(self, status: Status, culprit: int, theirs: Call, own: Call) -> NoReturn:
        host = self.host
        failure = Failure(
            status=status,
            culprit=culprit,
            reporter=host.group_rank,
            culprit_call=theirs,
            reporter_call=own,
        )
        host.fail(failure_to_error(failure, host.group_rank, host.membership), culprit)

    def release(self) -> None:
        """Cancel all pending messages; called after each collective.

        Messages are still pending only if the collective failed.
        """
        self.all.release()
        if self._agreement is not None:
            self._agreement.release()
