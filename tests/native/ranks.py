"""Groups of forked processes that use the C core without torch: each process calls `join(rank, ranks, folder)`."""

from __future__ import annotations

import ctypes
import json
import os
import time
from pathlib import Path

from farandole import native

ARENA_BYTES = 1 << 28


def join(rank: int, ranks: int, folder: Path) -> int:
    """Open an arena, an endpoint and a group of all ranks; ranks rendezvous through files in `folder`."""
    core = native.library()
    arena = os.memfd_create("test")
    os.ftruncate(arena, ARENA_BYTES)
    assert core.frd_arena_open(arena, ARENA_BYTES) == 0
    endpoint = core.frd_endpoint_open(rank, ranks)
    block = core.frd_group_reserve()
    told = json.dumps([os.getpid(), arena, core.frd_endpoint_block(endpoint), block])
    (folder / f"{rank}.new").write_text(told)
    (folder / f"{rank}.new").rename(folder / f"{rank}.json")
    others = [json.loads(_read(folder / f"{other}.json")) for other in range(ranks)]
    for other, (pid, descriptor, place, _) in enumerate(others):
        theirs = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
        assert core.frd_endpoint_add(endpoint, other, theirs, ARENA_BYTES, place, pid) == 0
        os.close(theirs)
    (folder / f"{rank}.mapped").touch()
    for other in range(ranks):
        _read(folder / f"{other}.mapped")
    members = (ctypes.c_int * ranks)(*range(ranks))
    blocks = (ctypes.c_uint64 * ranks)(*(each[3] for each in others))
    group = core.frd_group_open(endpoint, 1, rank, ranks, members, blocks)
    core.frd_set_timeout(group, 30.0)
    return group


def _read(path: Path) -> str:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} was not created within 30 s"
        time.sleep(0.001)
    return path.read_text()
