"""The MPI transport for the inter-node messages of hierarchical collectives."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from farandole.comm.host import Rendezvous
from farandole.comm.messages import valid_tag
from farandole.comm.mpi.group import MpiGroup
from farandole.comm.mpi.messages import MpiMessage


class MpiTransport:
    """Non-blocking sends and receives within a group.

        transport = MpiTransport.connect(store, rank, size, timeout)       # all ranks
        received = transport.recv(buffer, source, tag)
        transport.send(tensor, peer, tag).wait(60.0)
        received.wait(60.0)

    Messages with the same tag between two ranks arrive in order.  Do not modify a tensor before its message is
    complete.
    """

    def __init__(self, group: MpiGroup) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group

    @classmethod
    def connect(
        cls,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str = "a transport",
        ranks: Sequence[int] | None = None,
    ) -> MpiTransport:
        """Create the transport; all ranks connect through `store`.

        `name` and `ranks` identify the group and its ranks in error messages.

        Raises:
            RankLate: if a rank did not arrive before the timeout.
            MpiUnavailable: if MPI cannot be used.
        """
        rendezvous = Rendezvous(store, rank, size, timeout, name)
        return cls(MpiGroup.connect(rendezvous, size, timeout, name, ranks or range(size)))

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> MpiPending:
        """Start sending a contiguous CPU tensor to rank `peer`."""
        return self._begin(tensor, peer, tag, sends=True)

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> MpiPending:
        """Start receiving into `tensor` from rank `peer`; the message must have the size of `tensor`."""
        return self._begin(tensor, peer, tag, sends=False)

    def close(self) -> None:
        """Free the communicator; all messages must be complete."""
        self._group.close()

    def _begin(self, tensor: Tensor, peer: int, tag: int, *, sends: bool) -> MpiPending:
        if not tensor.is_cpu or not tensor.is_contiguous():
            raise ValueError(
                f"expected a contiguous CPU tensor, got a {tensor.device} tensor with strides {tensor.stride()}; "
                "pass tensor.cpu().contiguous()"
            )
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(
                f"expected a peer between 0 and {self.size - 1} other than this rank ({self.rank}), got {peer}"
            )
        valid_tag("send" if sends else "recv", tag, self._group.largest_tag)
        post = self._group.post_send if sends else self._group.post_recv
        nbytes, kind = tensor.numel() * tensor.element_size(), 1 << 8
        return MpiPending(post(tensor.data_ptr(), nbytes, kind, peer, tag), tensor)


class MpiPending:
    """A pending message.  The tensor of the message stays alive until the message is complete."""

    def __init__(self, message: MpiMessage, tensor: Tensor) -> None:
        self._message = message
        message.owner = tensor

    def wait(self, timeout_s: float) -> None:
        """Block until the message is complete.

        If `timeout_s` seconds pass first, raise `RankLate`; the message remains pending, and `wait` may be called
        again.
        """
        if not self._message.wait(timeout_s, background=False):
            raise self._message.late(timeout_s)
        self._raise()

    def test(self) -> bool:
        """Return whether the message is complete; raise an exception if it failed."""
        if not self._message.test():
            return False
        self._raise()
        return True

    def _raise(self) -> None:
        if self._message.outcome is not None:
            raise self._message.outcome
