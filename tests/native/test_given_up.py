"""A message that is given up half-way breaks its group; nobody takes its rest for something else."""

from __future__ import annotations

import subprocess
import sys

import pytest

START = """
import ctypes, os, sys
from farandole import native
from farandole.native import Status

core, U8, MIB = native.library(), 1 << 8 | 5, 1 << 20
segment = os.memfd_create("test")
os.ftruncate(segment, core.frd_segment_bytes(2))
heard, told = os.pipe()
child = os.fork()
rank = int(child == 0)
group = core.frd_join(segment, rank, 2, (ctypes.c_int * 2)(-1, -1))
core.frd_announce(group, os.getpid())
first, second = ctypes.create_string_buffer(MIB), ctypes.create_string_buffer(b"x" * MIB, MIB)

def send(data):
    return core.frd_post_send(group, data, MIB, U8, 1 - rank, 0, 0)

def receive(data):
    return core.frd_post_recv(group, data, MIB, U8, 1 - rank, 0, 0)

def end(right):
    if rank:
        os._exit(not right)
    sys.exit(not right or os.waitpid(child, 0)[1] != 0)
"""
SEND = """
if rank == 0:
    core.frd_message_release(group, send(first))   # a quarter of it is in the ring
    send(second)
    core.frd_barrier(group, 0)
    end(True)
status = core.frd_message_wait(group, receive(second), 5.0, 0)
end(status != Status.OK)
"""
RECEIVE = """
if rank == 0:
    message = send(first)                          # a quarter of it is in the ring
    os.write(told, b"!")
    end(core.frd_message_wait(group, message, 5.0, 0) != Status.OK)
os.read(heard, 1)
message = receive(second)                          # what is there has been taken, the rest is to come
core.frd_message_release(group, message)
end(core.frd_message_wait(group, receive(second), 5.0, 0) != Status.OK)
"""


@pytest.mark.parametrize("program", [SEND, RECEIVE], ids=["send", "receive"])
def test_given_up_half_way(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START + program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
