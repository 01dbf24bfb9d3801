"""A message that is abandoned halfway breaks its group; no rank reads the rest as another message."""

from __future__ import annotations

import subprocess
import sys

import pytest

START = """
import ctypes, os, signal, sys
from pathlib import Path
from farandole import native
from farandole.native import Status
from tests.native.ranks import join

core, U8, MIB = native.library(), 1 << 8 | 5, 1 << 20
heard, told = os.pipe()
child = os.fork()
rank = int(child == 0)
group = join(rank, 2, Path(sys.argv[1]))
first, second = ctypes.create_string_buffer(MIB), ctypes.create_string_buffer(b"x" * MIB, MIB)

def send(data):
    return core.frd_post_send(group, data, MIB, U8, 1 - rank, 0)

def receive(data):
    return core.frd_post_recv(group, data, MIB, U8, 1 - rank, 0)

def end(right):
    if rank:
        os._exit(not right)
    sys.exit(not right or os.waitpid(child, 0)[1] != 0)
"""
SEND = """
if rank == 0:
    core.frd_message_cancel(group, send(first))    # the other rank has been told where it is
    send(second)
    os.write(told, b"!")                           # not before, or the first message might be complete when it is given up
    core.frd_barrier(group, 0)
    end(True)
os.read(heard, 1)
status = core.frd_message_wait(group, receive(second), 5.0, 0)
end(status & 0xff != Status.OK)
"""
RECEIVE = """
if rank == 0:
    message = send(first)
    os.write(told, b"!")
    os.kill(os.getpid(), signal.SIGSTOP)           # or the payload might be complete before it is given up
    end(core.frd_message_wait(group, message, 5.0, 0) & 0xff != Status.OK)
os.read(heard, 1)
stat = Path(f"/proc/{os.getppid()}/stat")
while stat.read_text().rpartition(")")[2].split()[0] != "T":
    pass
message = receive(second)                          # it has been matched, and its payload asked for
core.frd_message_cancel(group, message)
os.kill(os.getppid(), signal.SIGCONT)
end(core.frd_message_wait(group, receive(second), 5.0, 0) & 0xff != Status.OK)
"""


@pytest.mark.parametrize("program", [SEND, RECEIVE], ids=["send", "receive"])
def test_a_message_cancelled_during_its_transfer_breaks_the_group(program: str, tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START + program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
