"""Authentication of connections between hosts.  docs/security.md states the threat model."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from farandole import _job_key, native
from farandole.comm.dtypes import TYPES
from farandole.comm.endpoint import _arena
from farandole.comm.interfaces import socket_address
from farandole.launch.bootstrap import loopback_store
from farandole.native import TRY, Status
from tests.comm.handshake import (
    CHALLENGE,
    CONFIRMATION_BYTES,
    MAGIC,
    RESPONSE,
    Address,
    prove,
    receive,
    respond,
)
from tests.comm.hosts import on_hosts
from tests.forking import CONTEXT
from tests.launch.jobs import run

LOOPBACK = "127.0.0.1"
KEY = bytes(range(32))


class Process:
    """A simulated process of a job of 2 ranks on 2 hosts; this process can contain several."""

    def __init__(self, rank: int, peer_port: int, key: bytes = KEY) -> None:
        _arena(os.getpid())
        self.core, self.rank = native.library(), rank
        self.endpoint = self.core.frd_endpoint_open(rank, 2)
        block, base = self.core.frd_group_reserve(), self.core.frd_endpoint_block(self.endpoint)
        assert self.core.frd_endpoint_add(self.endpoint, rank, -1, 1 << 38, base, os.getpid()) == 0
        server = socket.create_server((LOOPBACK, 0))
        server.setblocking(False)
        self.address: Address = server.getsockname()
        own, peer = socket_address(LOOPBACK, 0), socket_address(LOOPBACK, peer_port)
        failed = self.core.frd_tcp_open(self.endpoint, server.detach(), own, len(own), key, 30.0)
        failed |= self.core.frd_tcp_add(self.endpoint, 1 - rank, peer, len(peer))
        assert not failed | self.core.frd_tcp_start(self.endpoint)
        blocks = (ctypes.c_uint64 * 2)(*(block if r == rank else 0 for r in range(2)))
        members = (ctypes.c_int * 2)(0, 1)
        self.group = self.core.frd_group_open(self.endpoint, 7, rank, 2, members, blocks)
        self.core.frd_set_timeout(self.group, 5.0)

    def move(self, value: float, *, sends: bool, timeout_s: float = 1.0) -> tuple[int, float]:
        """Send a float to the other process, or receive one; return the status and the value."""
        data = torch.full((1,), value)
        post = self.core.frd_post_send if sends else self.core.frd_post_recv
        message = post(self.group, data.data_ptr(), 4, TYPES[torch.float32], 1 - self.rank, 0)
        if message is None:
            return Status.OK, data.item()
        outcome = self.core.frd_message_wait(self.group, message, timeout_s, TRY) & 0xFF
        if outcome == Status.PENDING:
            self.core.frd_message_cancel(self.group, message)
        return outcome, data.item()

    def close(self) -> None:
        self.core.frd_close(self.group)
        self.core.frd_endpoint_close(self.endpoint)


@pytest.fixture
def acceptor() -> Iterator[Process]:
    process = Process(0, peer_port=9)
    yield process
    process.close()


def refused(peer: socket.socket) -> bool:
    """Return whether the other end closes the connection."""
    peer.settimeout(3)
    with contextlib.suppress(ConnectionResetError):
        return peer.recv(1) == b""
    return True


# ---- incoming connections ----


def test_a_process_with_the_key_is_confirmed(acceptor):
    with socket.create_connection(acceptor.address, timeout=3) as peer:
        assert len(respond(peer, KEY, 1, 0, 2, acceptor.address)) == CONFIRMATION_BYTES


OTHER = "127.0.0.2"
WRONG: dict[str, Callable[[Address], tuple]] = {
    "another key": lambda at: (bytes(32), 1, 0, 2, at),
    "the rank of the acceptor": lambda at: (KEY, 0, 0, 2, at),
    "a rank that the job does not have": lambda at: (KEY, 2, 0, 2, at),
    "a negative rank": lambda at: (KEY, -1, 0, 2, at),
    "a job of another size": lambda at: (KEY, 1, 0, 3, at),
    "a proof for another acceptor": lambda at: (KEY, 1, 1, 2, at),
    "a proof for another port": lambda at: (KEY, 1, 0, 2, (at[0], at[1] ^ 1)),
    "a proof for another address": lambda at: (KEY, 1, 0, 2, (OTHER, at[1])),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_an_invalid_response_closes_the_connection(acceptor, wrong):
    with socket.create_connection(acceptor.address, timeout=3) as peer:
        assert respond(peer, *wrong(acceptor.address)) == b""


def test_a_response_is_invalid_on_a_second_connection(acceptor):
    nonce = secrets.token_bytes(32)
    with socket.create_connection(acceptor.address, timeout=3) as first:
        challenge = CHALLENGE.unpack(receive(first, CHALLENGE.size))[1]
    proof = prove(KEY, "connects", 1, 0, 2, acceptor.address, challenge, nonce)
    with socket.create_connection(acceptor.address, timeout=3) as second:
        assert CHALLENGE.unpack(receive(second, CHALLENGE.size))[1] != challenge
        second.sendall(RESPONSE.pack(MAGIC, 1, 2, nonce, proof))
        assert refused(second)


def test_a_second_connection_of_a_rank_is_refused(acceptor):
    with (
        socket.create_connection(acceptor.address, timeout=3) as first,
        socket.create_connection(acceptor.address, timeout=3) as second,
    ):
        assert respond(first, KEY, 1, 0, 2, acceptor.address)
        assert respond(second, KEY, 1, 0, 2, acceptor.address) == b""


def test_a_response_in_single_bytes(acceptor):
    with socket.create_connection(acceptor.address, timeout=3) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge, nonce = CHALLENGE.unpack(receive(peer, CHALLENGE.size))[1], secrets.token_bytes(32)
        proof = prove(KEY, "connects", 1, 0, 2, acceptor.address, challenge, nonce)
        for byte in RESPONSE.pack(MAGIC, 1, 2, nonce, proof):
            peer.sendall(bytes([byte]))
        assert len(receive(peer, CONFIRMATION_BYTES)) == CONFIRMATION_BYTES


# ---- outgoing connections ----


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server((LOOPBACK, 0)) as server:
        server.settimeout(3)
        yield server


@contextlib.contextmanager
def connecting_to(server: socket.socket) -> Iterator[tuple[Process, list]]:
    """Yield a process that sends to `server` in the background, and the list that receives its result."""
    process, outcomes = Process(1, server.getsockname()[1]), []
    sender = threading.Thread(target=lambda: outcomes.append(process.move(3.0, sends=True)))
    sender.start()
    try:
        yield process, outcomes
    finally:
        sender.join()
        process.close()


def test_data_are_sent_only_after_a_valid_confirmation(server):
    with connecting_to(server) as (_, outcomes):
        peer, _ = server.accept()
        with peer:
            peer.settimeout(3)
            challenge = secrets.token_bytes(32)
            for byte in CHALLENGE.pack(MAGIC, challenge):
                peer.sendall(bytes([byte]))
            magic, rank, ranks, nonce, proof = RESPONSE.unpack(receive(peer, RESPONSE.size))
            address = server.getsockname()
            assert (magic, rank, ranks) == (MAGIC, 1, 2)
            assert proof == prove(KEY, "connects", 1, 0, 2, address, challenge, nonce)
            peer.setblocking(False)
            time.sleep(0.2)
            with pytest.raises(BlockingIOError):
                peer.recv(1)
            peer.setblocking(True)
            peer.settimeout(3)
            peer.sendall(prove(KEY, "accepts", 1, 0, 2, address, challenge, nonce))
            assert receive(peer, 68)[64:] == torch.full((1,), 3.0).numpy().tobytes()
    assert outcomes[0][0] == Status.OK


@pytest.mark.parametrize("answer", ["noise", "own proof", "end", "other magic"])
def test_a_process_without_the_key_gets_no_data(server, answer):
    with connecting_to(server) as (_, outcomes):
        peer, _ = server.accept()
        with peer:
            peer.settimeout(3)
            peer.sendall(CHALLENGE.pack(MAGIC if answer != "other magic" else 1, bytes(32)))
            if answer != "other magic":
                proof = RESPONSE.unpack(receive(peer, RESPONSE.size))[4]
                words = {"noise": secrets.token_bytes(32), "own proof": proof, "end": b""}[answer]
                peer.sendall(words)
            if answer == "end":
                peer.shutdown(socket.SHUT_WR)
            peer.settimeout(3)
            with contextlib.suppress(TimeoutError, ConnectionResetError):
                assert peer.recv(1) == b""
    assert outcomes[0][0] == Status.CLOSED


def test_a_relay_at_another_address_is_refused(acceptor, server):
    """A program that can change the addresses in the store relays the messages of both processes."""
    with connecting_to(server) as (_, outcomes):
        victim, _ = server.accept()
        with victim, socket.create_connection(acceptor.address, timeout=3) as real:
            victim.settimeout(3)
            victim.sendall(receive(real, CHALLENGE.size))
            real.sendall(receive(victim, RESPONSE.size))
            assert refused(real)
    assert outcomes[0][0] == Status.CLOSED
    assert acceptor.move(0.0, sends=False, timeout_s=0.1)[0] != Status.OK


# ---- where the key comes from ----


def join(rank: int, port: int, key: str | None, pipe: Connection) -> None:
    """Run one of two ranks on two hosts."""
    if key is not None:
        os.environ[_job_key.VARIABLE] = key
    store = dist.TCPStore(LOOPBACK, port, is_master=False)
    try:
        with on_hosts([0, 1], rank):
            dist.init_process_group("farandole", store=store, rank=rank, world_size=2)
        total = torch.ones(1)
        dist.all_reduce(total)
        pipe.send(total.item())
        dist.destroy_process_group()
    except ValueError as error:
        pipe.send(str(error))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([None, None], None),
        (["a" * 32, "a" * 32], None),
        (["a" * 32, "b" * 32], "expected the same FARANDOLE_JOB_KEY on ranks 0 and 1 (on host0 and host1), but the keys differ"),
        (["a" * 32, None], "but rank 1 has none; set the same key on all hosts"),
        (["a" * 31, "b" * 32], "rank 0: FARANDOLE_JOB_KEY: expected at least 32 characters, got 31"),
    ],
    ids=["none", "equal", "different", "one", "short"],
)  # fmt: skip
def test_keys_from_the_environment(keys, message):
    store, pipes, processes = loopback_store(), [], []
    for rank, key in enumerate(keys):
        ours, theirs = CONTEXT.Pipe()
        pipes.append(ours)
        processes.append(CONTEXT.Process(target=join, args=(rank, store.port, key, theirs), daemon=True))
        processes[-1].start()
    for pipe in pipes:
        assert pipe.poll(30)
        outcome = pipe.recv()
        assert outcome == 2.0 if message is None else message in outcome
    for process in processes:
        process.join(10)


SHOW = """
import os, sys, farandole
with farandole.init() as runtime:
    key = os.environ["FARANDOLE_JOB_KEY"]
    assert runtime.comm.all_gather_object(key) == [key] * runtime.size
    words = open(f"/proc/{os.getppid()}/cmdline").read() + open("/proc/self/cmdline").read()
    if runtime.rank == 0:
        print(len(key), key in words, flush=True)
"""


def test_the_launcher_passes_a_new_key_to_all_ranks(tmp_path):
    Path(tmp_path, "show.py").write_text(SHOW)
    for ranks in (["-n", "2"], ["--hosts", "localhost:1,127.0.0.1:1"]):
        command = [sys.executable, "-m", "farandole", "launch", *ranks, "show.py"]
        _, out, err = run(command, tmp_path, fork_ranks=True)
        assert out.split() == ["64", "False"], err
    status, _, err = run(command, tmp_path, **{_job_key.VARIABLE: "secret"})
    assert status == 2
    assert "FARANDOLE_JOB_KEY: expected at least 32 characters, got 6" in err
