"""Failures between hosts are reported on all hosts, with the same message."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.namespaces import two_hosts, why_not
from farandole.comm.interfaces import own_address
from tests.comm.handshake import CHALLENGE, MAGIC, RESPONSE, receive
from tests.comm.hosts import on_hosts
from tests.comm.jobs import Job, survivors_of

LARGE = 6_000_000
LAYOUTS = [[0, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 2]]


def die(rank: int, size: int, tell: Callable, when: str) -> None:
    dist.all_reduce(torch.ones(10))
    if rank == size - 1:
        tell("here")
        if when == "before":
            time.sleep(60)
    for _ in range(1000):
        dist.all_reduce(torch.ones(LARGE if when == "amid" else 5))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("when", ["before", "amid"])
def test_a_killed_rank_is_named_on_all_hosts(layout, when):
    with Job(len(layout), die, when, hosts=layout) as job:
        victim = len(layout) - 1
        job.hear(victim)
        time.sleep(0.3)
        since = job.kill(victim)
        survivors_of(job, victim, since, "RankDied", "was waiting for it in all_reduce")


def leave(rank: int, size: int, tell: Callable) -> None:
    dist.all_reduce(torch.ones(10))
    if rank == size - 1:
        tell(time.monotonic())
        dist.destroy_process_group()
        return
    dist.all_reduce(torch.ones(10))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_rank_that_leaves_is_named(layout):
    with Job(len(layout), leave, hosts=layout) as job:
        victim = len(layout) - 1
        since = job.hear(victim)
        survivors_of(job, victim, since, "RankLeft", r"left the (default )?group \(it destroyed the group\)")


CALLS = {
    "number of elements": (lambda: dist.all_reduce(torch.ones(5)), lambda: dist.all_reduce(torch.ones(6))),
    "reduction": (
        lambda: dist.all_reduce(torch.ones(5)),
        lambda: dist.all_reduce(torch.ones(5), dist.ReduceOp.MAX),
    ),
    "root": (lambda: dist.broadcast(torch.ones(5), 0), lambda: dist.broadcast(torch.ones(5), 1)),
    "dtype": (
        lambda: dist.broadcast(torch.ones(5), 0),
        lambda: dist.broadcast(torch.ones(5).int(), 0),
    ),
    "operations": (lambda: dist.barrier(), lambda: dist.all_reduce(torch.ones(500_000))),
}


def differ(rank: int, size: int, tell: Callable, name: str, layout: list[int]) -> None:
    dist.barrier()
    CALLS[name][layout[rank] == 1]()
    dist.barrier()


@pytest.mark.parametrize("layout", [[0, 1], [0, 0, 1, 1]], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_different_calls_of_two_hosts_are_named(name, layout):
    with Job(len(layout), differ, name, layout, hosts=layout) as job:
        ends = [job.end(rank) for rank in range(len(layout))]
    assert {end.kind for end in ends} == {"CallMismatch"}, [end.trace for end in ends]
    assert len({end.text for end in ends}) == 1  # the same message on all ranks
    assert re.search(
        rf"rank \d \(process \d+ on host\d\) called .*, but rank \d .* called .*{name}", ends[0].text
    )


def uneven(rank: int, size: int, tell: Callable) -> None:
    sent = [3] * size
    if rank == 0:
        sent[size - 1] = 4
    dist.all_to_all_single(torch.empty(3 * size), torch.ones(sum(sent)), [3] * size, sent)
    dist.barrier()


@pytest.mark.parametrize("layout", [[0, 1], [0, 0, 1, 1], [0, 1, 1, 1]], ids=str)
def test_uneven_exchanges_are_named(layout):
    size = len(layout)
    with Job(size, uneven, hosts=layout) as job:
        ends = [job.end(rank) for rank in range(size)]
    assert {end.kind for end in ends} == {"CallMismatch"}, [end.trace for end in ends]
    for end in ends:
        assert re.search(rf"^rank 0 .* sent 4 elements to rank {size - 1} .* expected 3", end.text), end.text


def late(rank: int, size: int, tell: Callable) -> None:
    dist.barrier()
    if rank == size - 1:
        tell("here")
        time.sleep(6)
    dist.all_reduce(torch.ones(5))


@pytest.mark.parametrize("layout", [[0, 1], [0, 0, 1, 1]], ids=str)
def test_a_late_rank_is_named_at_the_deadline(layout):
    with Job(len(layout), late, hosts=layout, timeout_s=2) as job:
        victim = len(layout) - 1
        job.hear(victim)
        survivors_of(job, victim, time.monotonic(), "RankLate", r"within the timeout of 2 s", within_s=4.5)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
class TestNamespaces:
    """Hosts with separate networks."""

    def test_collectives(self):
        with two_hosts() as hosts, Job(4, agree, hosts=[0, 0, 1, 1], namespaces=hosts) as job:
            assert [job.end(rank).text for rank in range(4)] == ["'10.0'"] * 4, [
                job.end(r).trace for r in range(4)
            ]

    def test_a_lost_link_is_named(self):
        with two_hosts() as hosts, Job(2, die, "amid", hosts=[0, 1], namespaces=hosts, timeout_s=10) as job:
            job.hear(1)
            time.sleep(0.5)
            hosts[1].link("down")
            ends = [job.end(rank, timeout_s=30) for rank in (0, 1)]
        for rank, end in enumerate(ends):
            assert end.kind == "RankLate", end.trace
            other = hosts[1 - rank].name
            assert re.search(rf"^rank {1 - rank} \(process \d+ on {other}\) did not", end.text), end.text
            assert re.search(
                rf"{other} has not responded for \d+ s, so the host or its network link is down", end.text
            )

    def test_the_last_message_arrives_over_a_slow_link(self):
        with (
            two_hosts(rate="200mbit") as hosts,
            Job(2, send_and_leave, hosts=[0, 1], namespaces=hosts) as job,
        ):
            assert job.end(1).kind == "returned"
            assert (end := job.end(0)).text == "1.0", end.trace


def send_and_leave(rank: int, size: int, tell: Callable) -> float | None:
    """Rank 1 ends while its last message is still on the link."""
    tensor = torch.full((1 << 20,), float(rank))
    if rank == 1:
        dist.recv(torch.empty(1), 0)  # establishes a connection in each direction
        dist.send(tensor, 0)
        dist.destroy_process_group()
        return None
    dist.send(torch.ones(1), 1)
    dist.recv(tensor, 1)
    return tensor.unique().item()


def agree(rank: int, size: int, tell: Callable) -> str:
    tensor = torch.full((2_000_000,), rank + 1.0)
    dist.all_reduce(tensor)
    dist.barrier()
    return str(tensor.unique().item())


def ports_of_this_process() -> list[int]:
    sockets = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    ports = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        listens = fields[3] == "0A"
        if listens and f"socket:[{fields[9]}]" in sockets:
            ports.append(int(fields[1].split(":")[1], 16))
    return ports


def connect_without_a_key(rank: int, size: int, tell: Callable) -> float:
    address = own_address(None, None)
    response = RESPONSE.pack(MAGIC, 1 - rank, size, bytes(32), bytes(32))
    for port in ports_of_this_process():
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n" * 5, bytes(RESPONSE.size), response, response[:20]):
            with socket.create_connection((address, port), timeout=5) as intruder:
                assert len(receive(intruder, CHALLENGE.size)) == CHALLENGE.size
                intruder.sendall(words)
                if len(words) >= RESPONSE.size:
                    with contextlib.suppress(ConnectionResetError):
                        assert intruder.recv(1) == b""  # closed
    tensor = torch.full((100_000,), rank + 1.0)
    dist.all_reduce(tensor)
    return tensor.unique().item()


def test_unauthenticated_connections_are_closed():
    with Job(2, connect_without_a_key, hosts=[0, 1]) as job:
        ends = [job.end(rank) for rank in (0, 1)]
    assert [end.text for end in ends] == ["3.0", "3.0"], [end.trace for end in ends]


def wait_for_anybody(rank: int, size: int, tell: Callable) -> None:
    received, victim = torch.zeros(2), size - 1
    if rank == victim:  # connects to all other ranks
        for other in range(victim):
            dist.send(torch.ones(2), other)
        tell("here")
        time.sleep(60)
    dist.recv(received)
    dist.recv(received)  # no rank sends, and only the victim has ended


@pytest.mark.parametrize("layout", [[0, 0, 0], [0, 0, 1], [0, 1, 1]])
def test_a_receive_from_any_rank_detects_a_killed_rank(layout):
    with Job(3, wait_for_anybody, hosts=layout) as job:
        job.hear(2)
        time.sleep(0.3)
        since = job.kill(2)
        survivors_of(job, 2, since, "RankDied", r"recv\(2 x float32, from any")


def leave_no_keys(rank: int, size: int, tell: Callable) -> list[str]:
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    for _ in range(3):
        with on_hosts([0, 1], rank):
            group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(2), group=group)
        dist.destroy_process_group(group)
    dist.barrier()
    deadline, left = time.monotonic() + 10, [""]
    while left and time.monotonic() < deadline:  # the last rank deletes them
        time.sleep(0.05)
        left = [key for key in store.list_keys() if "group-" in key and "/left" in key or "/leaving" in key]
    dist.barrier()
    return left


def test_the_keys_of_a_destroyed_group_are_deleted():
    with Job(2, leave_no_keys, hosts=[0, 1]) as job:
        for rank in (0, 1):
            assert job.end(rank).text == "[]", job.end(rank).trace
