"""All-to-all, gather and scatter between hosts.

Ranks on one host exchange tensors through shared memory.  There are two inter-node algorithms:

    direct      One message per pair of ranks.  Faster for large messages, because aggregation requires extra copies.
    aggregated  One message per pair of hosts.  One rank of the sending host collects the tensors in shared memory, and
                one rank of the receiving host distributes them.  With m and n ranks on the two hosts, the number of
                messages decreases by a factor of m n.

Each rank of a host sends and receives the aggregated messages for some of the other hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farandole.comm.algorithms.choice import Choice
from farandole.comm.algorithms.steps import Steps
from farandole.comm.hierarchical.hosts import Hosts
from farandole.comm.native_core import NativeCore
from farandole.comm.transport import Pending

_COUNTS = 1  # the tag for messages that contain counts


@dataclass(frozen=True)
class HostPair:
    """Describes the exchange between this host and another host in an all-to-all."""

    members: list[int]  # the ranks on the other host
    leader: int  # the local rank on this host that handles aggregated messages
    peer: int  # the rank on the other host that handles aggregated messages
    sent: Tensor  # element counts, indexed by [rank on this host, rank on the other host]
    received: Tensor  # element counts, indexed in the same way
    aggregates_sent: bool
    aggregates_received: bool

    @property
    def alone(self) -> bool:
        """Whether each of the two hosts has only one rank."""
        return self.sent.numel() == 1


class HostExchange:
    """Runs all-to-all, gather and scatter for one group.

    Args:
        hosts: The hosts of the group.
        local: The implementation of operations among the ranks of this host.
        choice: The object that chooses between direct and aggregated messages.
        run: A function that runs an inter-node algorithm after the ranks have agreed on the call.
    """

    def __init__(self, hosts: Hosts, local: NativeCore, choice: Choice, run: Callable[[Steps], None]) -> None:
        self._hosts, self._host, self._local = hosts, hosts.host, local
        self._choice, self._run = choice, run

    # ---- all-to-all ----

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], flags: int) -> None:
        """Send `inputs[r]` to rank r and receive `outputs[r]` from rank r."""
        pairs = self._pairs(outputs, inputs, flags)
        own = [pair for pair in pairs if pair.leader == self._host.rank and not pair.alone]
        links = self._hosts.all
        counts = {pair.peer: torch.empty_like(pair.received.t().reshape(-1)) for pair in own}
        checks = [links.recv(counts[pair.peer], pair.peer, _COUNTS) for pair in own]
        sends = [links.send(pair.sent.reshape(-1), pair.peer, _COUNTS) for pair in own]
        arrivals = []
        for pair in pairs:
            if not pair.aggregates_received:
                arrivals += [links.recv(outputs[r], r) for r in pair.members if outputs[r].numel()]
            if not pair.aggregates_sent:
                sends += [links.send(inputs[r], r) for r in pair.members if inputs[r].numel()]

        collected = self._collect(pairs, outputs, inputs, flags)
        for pair in own:
            if pair.aggregates_sent:
                sends.append(links.send(collected[pair.peer], pair.peer))

        received: dict[int, Tensor] = {}

        def steps() -> Steps:
            for pair, check in zip(own, checks, strict=True):
                yield check
                self._compare(pair, counts[pair.peer])
                if pair.aggregates_received:
                    data = received[pair.peer] = inputs[0].new_empty(int(pair.received.sum()))
                    arrivals.append(links.recv(data, pair.peer))
            yield from arrivals
            yield from sends

        self._run(steps())
        self._distribute(pairs, received, outputs, flags)

    def _pairs(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], flags: int) -> list[HostPair]:
        """All-gather the element counts on this host; return one `HostPair` per remote host."""
        hosts, host = self._hosts, self._host
        own = torch.tensor([[part.numel() for part in parts] for parts in (inputs, outputs)], device="cpu")
        counts = torch.empty(host.size, 2, hosts.ranks, dtype=torch.int64, device="cpu")
        self._local.all_gather([counts], own, flags)
        pairs = []
        for turn in range(1, hosts.count):  # each host starts with a different peer
            index = (hosts.index + turn) % hosts.count
            members = hosts.members[index]
            sent, received = counts[:, 0, members], counts[:, 1, members]
            pairs.append(
                HostPair(
                    members,
                    index % host.size,
                    members[hosts.index % len(members)],
                    sent,
                    received,
                    self._aggregates(sent, inputs[0].element_size()),
                    self._aggregates(received, inputs[0].element_size()),
                )
            )
        return pairs

    def _aggregates(self, counts: Tensor, element_size: int) -> bool:
        """Return whether to aggregate messages between two hosts; both hosts must pass the same `counts`."""
        size = int(counts.sum()) * element_size // counts.numel()
        return counts.numel() > 1 and self._aggregated("all_to_all", size, max(counts.shape))

    def _aggregated(self, operation: str, size: int, ranks: int) -> bool:
        return self._choice.exchange(operation, size, ranks) == "aggregated"

    def _compare(self, pair: HostPair, sent: Tensor) -> None:
        """Fail the group unless the counts that the other host sent (`sent`) equal the counts that this host expects."""
        sent = sent.view(len(pair.members), self._host.size).t()
        if torch.equal(sent, pair.received):
            return
        receiver, sender = (sent != pair.received).nonzero()[0].tolist()
        self._hosts.fail_uneven(
            pair.members[sender],
            self._host.members[receiver],
            int(sent[receiver, sender]),
            int(pair.received[receiver, sender]),
        )

    def _collect(
        self, pairs: list[HostPair], outputs: Sequence[Tensor], inputs: Sequence[Tensor], flags: int
    ) -> dict[int, Tensor]:
        """Exchange tensors within this host; return a dict that maps remote ranks to messages to send."""
        host, me = self._host, self._host.rank
        pairs = [pair for pair in pairs if pair.aggregates_sent]
        own = [pair for pair in pairs if pair.leader == me]
        parcels = []  # for each rank on this host: its tensor, and the tensors that it forwards to other hosts
        for rank, member in enumerate(host.members):
            rest = [inputs[r] for pair in pairs if pair.leader == rank for r in pair.members]
            parcels.append(torch.cat([inputs[member], *rest]) if rest else inputs[member])
        if not own:
            self._local.all_to_all([outputs[member] for member in host.members], parcels, flags)
            return {}
        sizes = [
            [outputs[member].numel(), *(int(pair.sent[rank].sum()) for pair in own)]
            for rank, member in enumerate(host.members)
        ]
        arrived = [inputs[0].new_empty(sum(each)) for each in sizes]
        self._local.all_to_all(arrived, parcels, flags)
        pieces = [parcel.split(each) for parcel, each in zip(arrived, sizes, strict=True)]
        for member, piece in zip(host.members, pieces, strict=True):
            outputs[member].copy_(piece[0])
        return {
            pair.peer: torch.cat([piece[number] for piece in pieces]) for number, pair in enumerate(own, 1)
        }

    def _distribute(
        self, pairs: list[HostPair], received: dict[int, Tensor], outputs: Sequence[Tensor], flags: int
    ) -> None:
        """Copy the tensors in the received messages to the `outputs` of the ranks on this host."""
        host, me = self._host, self._host.rank
        pairs = [pair for pair in pairs if pair.aggregates_received]
        if not pairs:
            return
        parcels: list[list[Tensor]] = [[] for _ in range(host.size)]
        for pair in pairs:
            if pair.leader == me:
                # the tensors in a message are ordered by sender, then by receiver
                pieces = received[pair.peer].split(pair.received.t().reshape(-1).tolist())
                for rank in range(host.size):
                    parcels[rank] += pieces[rank :: host.size]
        nothing = outputs[0].new_empty(0)
        from_leaders = [
            [r for pair in pairs if pair.leader == rank for r in pair.members] for rank in range(host.size)
        ]
        arrived = [nothing.new_empty(sum(outputs[r].numel() for r in senders)) for senders in from_leaders]
        packed = [torch.cat(parts) if parts else nothing for parts in parcels]
        self._local.all_to_all(arrived, packed, flags)
        for parcel, senders in zip(arrived, from_leaders, strict=True):
            pieces = parcel.split([outputs[r].numel() for r in senders])
            for r, piece in zip(senders, pieces, strict=True):
                outputs[r].copy_(piece)

    # ---- gather and scatter ----

    def gather(
        self, outputs: Sequence[Tensor], input: Tensor, root: int, counts: Sequence[int], flags: int
    ) -> None:
        """Gather every rank's `input` into `outputs` on rank `root`, with `counts[r]` elements from rank r."""
        hosts, host = self._hosts, self._host
        aggregated = self._aggregated("gather", max(counts) * input.element_size(), hosts.largest)
        if hosts.index == hosts.index_of(root):
            blocks: dict[tuple[int, ...], Tensor] = {}
            arrivals: list[Pending] = []
            if host.group_rank == root:
                blocks, arrivals = self._post_blocks(outputs, root, counts, aggregated, sends=False)
            own = [outputs[r] for r in host.members] if outputs else []
            self._gather_here(own, input, host.members.index(root), counts, flags)
            self._run(iter(arrivals))
            for members, block in blocks.items():
                for r, part in zip(members, block.split([counts[r] for r in members]), strict=True):
                    outputs[r].copy_(part.view(outputs[r].shape))
        elif not aggregated:
            self._run(iter([hosts.all.send(input, root)]))
        else:
            leader, block, parts = self._host_block(input, root, counts)
            self._gather_here(parts, input, leader, counts, flags)
            self._run(iter([hosts.all.send(block, root)] if parts else []))

    def scatter(
        self, output: Tensor, inputs: Sequence[Tensor], root: int, counts: Sequence[int], flags: int
    ) -> None:
        """Send `inputs[r]`, with `counts[r]` elements, from rank `root` to `output` on rank r."""
        hosts, host = self._hosts, self._host
        aggregated = self._aggregated("scatter", max(counts) * output.element_size(), hosts.largest)
        if hosts.index == hosts.index_of(root):
            departures: list[Pending] = []
            if host.group_rank == root:
                departures = self._post_blocks(inputs, root, counts, aggregated, sends=True)[1]
            own = [inputs[r] for r in host.members] if inputs else []
            self._scatter_here(output, own, host.members.index(root), counts, flags)
            self._run(iter(departures))
        elif not aggregated:
            self._run(iter([hosts.all.recv(output, root)]))
        else:
            leader, block, parts = self._host_block(output, root, counts)
            self._run(iter([hosts.all.recv(block, root)] if parts else []))
            self._scatter_here(output, parts, leader, counts, flags)

    def _post_blocks(
        self, tensors: Sequence[Tensor], root: int, counts: Sequence[int], aggregated: bool, *, sends: bool
    ) -> tuple[dict[tuple[int, ...], Tensor], list[Pending]]:
        """Post the root's sends or receives; return the buffers of aggregated receives, and the posted messages."""
        hosts = self._hosts
        post = hosts.all.send if sends else hosts.all.recv
        blocks: dict[tuple[int, ...], Tensor] = {}
        messages: list[Pending] = []
        for index, members in enumerate(hosts.members):
            if index == hosts.index:
                continue
            if not aggregated:
                messages += [post(tensors[r], r) for r in members]
                continue
            if sends:
                block = torch.cat([tensors[r].reshape(-1) for r in members])
            else:
                block = blocks[tuple(members)] = tensors[0].new_empty(sum(counts[r] for r in members))
            messages.append(post(block, members[root % len(members)]))
        return blocks, messages

    def _host_block(self, like: Tensor, root: int, counts: Sequence[int]) -> tuple[int, Tensor, list[Tensor]]:
        """Return the local rank that communicates with `root`, the message buffer, and one view of the buffer per rank."""
        host = self._host
        leader = root % host.size
        if host.rank != leader:
            return leader, like.new_empty(0), []
        own = [counts[r] for r in host.members]
        block = like.new_empty(sum(own))
        return leader, block, list(block.split(own))

    def _gather_here(
        self, parts: Sequence[Tensor], input: Tensor, root: int, counts: Sequence[int], flags: int
    ) -> None:
        own = _unless_even([counts[r] for r in self._host.members])
        self._local.gather(parts, input, root, own, flags)

    def _scatter_here(
        self, output: Tensor, parts: Sequence[Tensor], root: int, counts: Sequence[int], flags: int
    ) -> None:
        own = _unless_even([counts[r] for r in self._host.members])
        self._local.scatter(output, parts, root, own, flags)


def _unless_even(counts: list[int]) -> list[int] | None:
    return None if len(set(counts)) == 1 else counts
