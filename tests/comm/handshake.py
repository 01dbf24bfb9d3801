"""An independent implementation of the handshake between hosts, with Python's hmac."""

from __future__ import annotations

import hmac
import secrets
import socket
import struct

MAGIC = 0x656C6F646E617261
CHALLENGE = struct.Struct("<Q32s")
RESPONSE = struct.Struct("<Qii32s32s")
CONFIRMATION_BYTES = 32

Address = tuple[str, int]


def prove(
    key: bytes,
    label: str,
    connector: int,
    acceptor: int,
    ranks: int,
    address: Address,
    challenge: bytes,
    response: bytes,
) -> bytes:
    """Return the proof of a process that connects to or accepts at `address`; `label` is "connects" or "accepts"."""
    host, port = address
    packed = socket.inet_pton(socket.AF_INET, host).ljust(16, b"\0")
    statement = struct.pack("<16siiiI16s", label.encode(), connector, acceptor, ranks, port, packed)
    return hmac.digest(key, statement + challenge + response, "sha256")


def receive(peer: socket.socket, count: int) -> bytes:
    """Return `count` bytes, or fewer if the connection ends."""
    received = b""
    while len(received) < count and (more := peer.recv(count - len(received))):
        received += more
    return received


def respond(peer: socket.socket, key: bytes, rank: int, acceptor: int, ranks: int, address: Address) -> bytes:
    """Answer the challenge of an accepting process, and return its confirmation."""
    magic, challenge = CHALLENGE.unpack(receive(peer, CHALLENGE.size))
    assert magic == MAGIC
    nonce = secrets.token_bytes(32)
    proof = prove(key, "connects", rank, acceptor, ranks, address, challenge, nonce)
    peer.sendall(RESPONSE.pack(MAGIC, rank, ranks, nonce, proof))
    confirmation = receive(peer, CONFIRMATION_BYTES)
    if confirmation:
        assert confirmation == prove(key, "accepts", rank, acceptor, ranks, address, challenge, nonce)
    return confirmation
