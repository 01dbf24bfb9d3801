"""Ranks of one host open a store without an address.  Here ranks are threads; `test_launchers` uses processes."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from farandole.launch.bootstrap import open_store, rendezvous_name
from farandole.launch.placement import ALONE, LaunchError, NoRendezvous, Placement, SameHost


def place(rank, size, job):
    return Placement("mpirun (Hydra)", rank, size, rank, size, SameHost(job))


def open_stores(size, job, delay_s=0.0):
    """Open the store in `size` ranks, rank 0 after `delay_s`; return the value of rank 0 that each rank reads."""

    def open_as(rank):
        if rank == 0:
            time.sleep(delay_s)
        store = open_store(place(rank, size, job), 20)
        if rank == 0:
            store.set("greeting", job)
        return store.get("greeting").decode(), store

    with ThreadPoolExecutor(size) as threads:
        opened = list(threads.map(open_as, range(size)))  # keeps rank 0's store until all ranks have read
    return [word for word, _ in opened]


def test_ranks_open_one_store_in_any_order():
    job = uuid4().hex
    assert open_stores(4, job, delay_s=0.3) == [job] * 4
    assert open_stores(4, job) == [job] * 4  # again, because the first time leaves nothing behind


def test_concurrent_jobs_have_their_own_stores():
    jobs = [uuid4().hex for _ in range(3)]
    with ThreadPoolExecutor(len(jobs)) as threads:
        assert list(threads.map(lambda job: open_stores(2, job), jobs)) == [[job] * 2 for job in jobs]


def test_a_missing_rank_0_is_reported():
    with pytest.raises(
        LaunchError, match=r"rank 1 of 2 could not reach rank 0 .* within 0.3 s.*calls farandole.init"
    ):
        open_store(place(1, 2, uuid4().hex), 0.3)


def test_a_second_rank_0_is_refused():
    job = uuid4().hex
    keep = open_store(place(0, 2, job), 5)
    with pytest.raises(LaunchError, match="another process already serves"):
        open_store(place(0, 2, job), 5)
    del keep
    for thread in threading.enumerate():
        if thread.name == "farandole-bootstrap":
            thread.join(10)


def test_several_hosts_need_an_address():
    lost = Placement("mpirun (Hydra)", 0, 4, 0, 2, NoRendezvous("set MASTER_ADDR"))
    with pytest.raises(LaunchError, match="4 ranks on several hosts.*set MASTER_ADDR"):
        open_store(lost, 5)


def test_a_world_of_one_needs_no_rendezvous():
    store = open_store(ALONE, 1)
    store.set("a", "b")
    assert store.get("a") == b"b"


@pytest.mark.skipif(not Path("/proc/net/unix").exists(), reason="looks at Linux's list of sockets")
def test_the_socket_is_removed():
    job = uuid4().hex
    open_stores(2, job)
    time.sleep(0.2)
    assert rendezvous_name(job) not in Path("/proc/net/unix").read_text()
