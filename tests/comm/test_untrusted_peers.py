"""Connections and bytes from broken or foreign programs: no crash, no busy loop, and the job continues."""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import resource
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist

from farandole import native
from farandole.comm.dtypes import TYPES
from farandole.comm.endpoint import _arena
from farandole.comm.interfaces import own_address, socket_address
from farandole.native import TRY, Status
from tests.comm.handshake import respond
from tests.comm.jobs import Job
from tests.comm.test_faults_hosts import ports_of_this_process

HEADER = struct.Struct("=QQQQIiIi16x")  # bytes, number, place, context, kind, tag, type, source
EAGER, OFFER, CLEAR, PAYLOAD, DONE, GROUP_LEFT, GROUP_BROKEN = range(7)
FLOAT = TYPES[torch.float32]
CONTEXT = 7


class Listener:
    """Rank 0 of a job on two hosts, in this process; its peer is a raw socket."""

    def __init__(self) -> None:
        _arena(os.getpid())
        self.core = native.library()
        self.endpoint = self.core.frd_endpoint_open(0, 2)
        block = self.core.frd_group_reserve()
        base, pid = self.core.frd_endpoint_block(self.endpoint), os.getpid()
        assert self.core.frd_endpoint_add(self.endpoint, 0, -1, 1 << 38, base, pid) == 0
        server = socket.create_server(("127.0.0.1", 0))
        server.setblocking(False)
        self.address, own = server.getsockname(), socket_address("127.0.0.1", 0)
        key = secrets.token_bytes(native.KEY_BYTES)
        failed = self.core.frd_tcp_open(self.endpoint, server.detach(), own, len(own), key, 30.0)
        peer = socket_address("127.0.0.1", 9)
        failed |= self.core.frd_tcp_add(self.endpoint, 1, peer, len(peer))
        assert not failed | self.core.frd_tcp_start(self.endpoint)
        members, blocks = (ctypes.c_int * 2)(0, 1), (ctypes.c_uint64 * 2)(block, 0)
        self.group = self.core.frd_group_open(self.endpoint, CONTEXT, 0, 2, members, blocks)
        self.core.frd_set_timeout(self.group, 5.0)
        self.peer = socket.create_connection(self.address)
        assert respond(self.peer, key, 1, 0, 2, self.address)

    def say(self, kind: int, nbytes: int = 0, *, tag: int = 0, payload: bytes = b"", **fields: int) -> None:
        """Send a frame to this process."""
        values = {"number": 0, "place": 0, "context": CONTEXT, "type": FLOAT, "source": 1} | fields
        header = HEADER.pack(
            nbytes,
            values["number"],
            values["place"],
            values["context"],
            kind,
            tag,
            values["type"],
            values["source"],
        )
        self.peer.sendall(header + payload)

    def receive(self, count: int, tag: int = 0, timeout_s: float = 3.0) -> tuple[int, list[float]]:
        """Receive floats from the peer, and return the status and the values."""
        data = torch.zeros(count)
        message = self.core.frd_post_recv(self.group, data.data_ptr(), 4 * count, FLOAT, 1, tag)
        outcome = self.core.frd_message_wait(self.group, message, timeout_s, TRY)
        if outcome == Status.PENDING:
            self.core.frd_message_cancel(self.group, message)
        return outcome & 0xFF, data.tolist()

    def close(self) -> None:
        self.peer.close()
        self.core.frd_close(self.group)
        self.core.frd_endpoint_close(self.endpoint)


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def test_a_valid_frame_arrives(listener: Listener) -> None:
    listener.say(EAGER, 8, payload=floats(1, 2))
    assert listener.receive(2) == (Status.OK, [1.0, 2.0])


BAD = {
    "an allocation that wraps": lambda peer: peer.say(EAGER, 2**64 - 32),
    "more bytes than memory": lambda peer: peer.say(EAGER, 2**62),
    "an unknown kind": lambda peer: peer.say(99),
    "an unknown type": lambda peer: peer.say(EAGER, 8, type=0, payload=floats(1, 2)),
    "a type of no bytes": lambda peer: peer.say(EAGER, 8, type=3, payload=floats(1, 2)),
    "an offer in another host's memory": lambda peer: peer.say(OFFER, 1 << 20, place=1 << 20, number=1),
    "an offer": lambda peer: peer.say(OFFER, 1 << 20, number=1),
    "a payload that was not asked for": lambda peer: peer.say(PAYLOAD, 8, number=1, payload=floats(1, 2)),
    "a clearance": lambda peer: peer.say(CLEAR, number=1),
    "a clearance with bytes": lambda peer: peer.say(CLEAR, 8, number=1, payload=floats(1, 2)),
    "an end of a copy": lambda peer: peer.say(DONE, number=1),
    "a goodbye with bytes": lambda peer: peer.say(GROUP_LEFT, 8, payload=floats(1, 2)),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_an_invalid_frame_closes_the_connection(listener: Listener, bad: Callable[[Listener], None]) -> None:
    """No frame can follow an invalid frame, so a waiting receive fails at once."""
    listener.say(EAGER, 8, tag=1, payload=floats(3, 4))
    bad(listener)
    assert listener.receive(2, tag=1) == (Status.OK, [3.0, 4.0])  # it arrived before the invalid frame
    start = time.monotonic()
    assert listener.receive(2, timeout_s=2.0)[0] == Status.CLOSED
    assert time.monotonic() - start < 1.5
    listener.peer.settimeout(2)
    assert listener.peer.recv(1) == b""


IGNORED = {
    "a source that the group does not have": lambda peer: peer.say(EAGER, 8, source=7, payload=floats(1, 2)),
    "a negative source": lambda peer: peer.say(EAGER, 8, source=-5, payload=floats(1, 2)),
    "a source on another connection": lambda peer: peer.say(EAGER, 8, source=0, payload=floats(1, 2)),
    "a goodbye of another rank": lambda peer: peer.say(GROUP_LEFT, source=0),
    "a goodbye of no rank": lambda peer: peer.say(GROUP_LEFT, source=1 << 20),
    "an unknown group": lambda peer: peer.say(EAGER, 8, context=12345, payload=floats(1, 2)),
}


@pytest.mark.parametrize("odd", IGNORED.values(), ids=IGNORED.keys())
def test_a_frame_for_another_recipient_is_ignored(
    listener: Listener, odd: Callable[[Listener], None]
) -> None:
    odd(listener)
    listener.say(EAGER, 8, payload=floats(5, 6))
    assert listener.receive(2) == (Status.OK, [5.0, 6.0])


def random_frames(seed: int) -> bytes:
    """Frames with likely fields, some of which are then changed."""
    choose = random.Random(seed)
    frames = b""
    for _ in range(200):
        kind, nbytes = choose.choice([EAGER, EAGER, GROUP_LEFT, choose.randrange(9)]), 4 * choose.randrange(4)
        type_, source = (
            choose.choice([FLOAT, FLOAT, choose.getrandbits(12)]),
            choose.choice([1, 1, 1, 0, -1, 7]),
        )
        context = choose.choice([CONTEXT] * 9 + [choose.getrandbits(64)])
        header = bytearray(HEADER.pack(nbytes, 0, 0, context, kind, choose.randrange(3), type_, source))
        if choose.random() < 0.02:
            header[choose.randrange(48)] ^= 1 << choose.randrange(8)
        frames += bytes(header) + choose.randbytes(nbytes)
    return frames


@pytest.mark.parametrize("seed", range(12))
def test_random_frames(seed: int) -> None:
    listener = Listener()
    try:
        listener.peer.sendall(random_frames(seed))
        for tag in range(3):
            listener.receive(random.Random(seed).randrange(1, 4), tag, timeout_s=0.05)
    finally:
        listener.close()


# ---- connections that say nothing ----

IDLE = 1_100


def keep_working(rank: int, size: int, tell: Callable[[object], None]) -> str:
    if rank == 1:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))  # far fewer than the incoming connections
    tell((own_address(None, None), ports_of_this_process()))
    total, used = torch.ones(1), []
    dist.barrier()
    for _ in range(8):
        before, start = time.process_time(), time.monotonic()
        time.sleep(0.25)
        used.append((time.process_time() - before) / (time.monotonic() - start))
        total.fill_(1)
        dist.all_reduce(total)
        assert total.item() == size
    assert sorted(used)[len(used) // 2] < 0.5, (
        used
    )  # a listener that is ready all the time would use a whole core
    return "worked"


def test_idle_connections_neither_stop_nor_spin_the_job():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < IDLE + 200:
        pytest.skip(f"this user may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, IDLE + 500), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        job = stack.enter_context(Job(2, keep_working, hosts=[0, 1]))
        address, ports = job.hear(1)
        for _ in range(IDLE):
            idle = stack.enter_context(socket.socket())
            idle.setblocking(False)
            idle.connect_ex((address, ports[0]))
        for rank in (0, 1):
            assert job.end(rank).text == "'worked'", job.end(rank).trace


# ---- what the store holds ----


def make_groups_without_pickle(rank: int, size: int, tell: Callable[[object], None]) -> str:
    total = torch.ones(3)
    group = dist.new_group([0, 1])
    dist.all_reduce(total, group=group)
    dist.destroy_process_group()
    return str(total.unique().item())


def refuse_pickles() -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("unpickled")

    pickle.load = pickle.loads = pickle.Unpickler = refuse


@pytest.mark.parametrize("hosts", [None, [0, 1]])
def test_no_data_from_a_store_are_unpickled(hosts):
    with Job(2, make_groups_without_pickle, hosts=hosts, before=refuse_pickles) as job:
        for rank in (0, 1):
            assert job.end(rank).text == "'2.0'", job.end(rank).trace
