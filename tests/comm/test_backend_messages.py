"""Point-to-point messages through `torch.distributed` on the backend."""

from __future__ import annotations

import itertools
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from farandole.comm import Communicator, RankLate

BEYOND_THE_RING = 300_000  # floats: more than a ring of 256 KiB holds


def check_both_directions(rank: int, size: int) -> None:
    """Every rank sends small and large messages to every other rank before any rank receives."""
    for count in (1, 1000, BEYOND_THE_RING):
        peers = [r for r in range(size) if r != rank]
        sends = [dist.isend(torch.full((count,), float(rank * 10 + peer)), peer) for peer in peers]
        buffers = {peer: torch.zeros(count) for peer in peers}
        receives = [dist.irecv(buffers[peer], peer) for peer in reversed(peers)]
        for work in [*receives, *sends]:
            work.wait()
        for peer, buffer in buffers.items():
            assert (buffer == peer * 10 + rank).all()


def check_receives_first(rank: int, size: int) -> None:
    for count in (1, BEYOND_THE_RING):
        peer = (rank + 1) % size
        source = (rank - 1) % size
        buffer = torch.zeros(count)
        receive = dist.irecv(buffer, source)
        assert not receive.is_completed() or buffer[0] == source
        dist.send(torch.full((count,), float(rank)), peer)  # blocks; all ranks have called irecv
        receive.wait()
        assert (buffer == source).all() and receive.is_completed()


def check_batch(rank: int, size: int) -> None:
    """Send many tags in both directions in one batch, and receive them in a different order."""
    peer, source = (rank + 1) % size, (rank - 1) % size
    tags = list(range(20))
    buffers = [torch.zeros(50 * tag) for tag in tags]
    operations = [
        dist.P2POp(dist.isend, torch.full((50 * tag,), float(rank * 100 + tag)), peer, tag=tag)
        for tag in tags
    ]
    operations += [dist.P2POp(dist.irecv, buffers[tag], source, tag=tag) for tag in reversed(tags)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for tag in tags:
        assert (buffers[tag] == source * 100 + tag).all()


def check_tags_out_of_order(rank: int, size: int) -> None:
    if rank == 0:
        for tag in (5, 3, 5, 4):
            dist.send(torch.full((3,), float(tag)), 1, tag=tag)
        dist.send(torch.full((BEYOND_THE_RING,), 9.0), 1, tag=9)
        dist.send(torch.tensor([10.0]), 1, tag=10)
    if rank == 1:
        last = torch.zeros(1)
        dist.recv(last, 0, tag=10)  # all other messages are buffered, even those that exceed the ring
        assert last == 10
        large = torch.zeros(BEYOND_THE_RING)
        dist.recv(large, 0, tag=9)
        assert (large == 9).all()
        for tag in (3, 4, 5, 5):
            buffer = torch.zeros(3)
            dist.recv(buffer, 0, tag=tag)
            assert (buffer == tag).all()


def check_any_source(rank: int, size: int) -> None:
    if rank == 0:
        seen = {}
        for _ in range(size - 1):
            buffer = torch.zeros(4)
            source = dist.recv(buffer)
            seen[source] = buffer[0].item()
        assert seen == {r: float(r) for r in range(1, size)}
    else:
        dist.send(torch.full((4,), float(rank)), 0)
    group = dist.new_group([size - 1, 0])  # sources are global ranks, even in a group
    if rank == 0:
        assert dist.recv(torch.zeros(2), group=group) == size - 1
    if rank == size - 1:
        dist.send(torch.ones(2), 0, group=group)
    dist.barrier()
    if rank in (0, size - 1):
        dist.destroy_process_group(group)


def check_invalid_tags(rank: int, size: int) -> None:
    """Invalid tags are refused by all calls; the largest valid tag arrives."""
    comm, peer = Communicator(dist.group.WORLD), 1 - rank

    def in_batch(tensor: torch.Tensor, sends: bool, tag: int) -> None:
        with comm.batch() as batch:
            (batch.send if sends else batch.recv)(tensor, peer, tag)

    sends = [
        lambda t, tag: dist.send(t, peer, tag=tag),
        lambda t, tag: dist.isend(t, peer, tag=tag),
        lambda t, tag: dist.batch_isend_irecv([dist.P2POp(dist.isend, t, peer, tag=tag)]),
        lambda t, tag: comm.send(t, peer, tag),
        lambda t, tag: comm.isend(t, peer, tag),
        lambda t, tag: in_batch(t, True, tag),
    ]
    receives = [
        lambda t, tag: dist.recv(t, peer, tag=tag),
        lambda t, tag: dist.recv(t, tag=tag),
        lambda t, tag: dist.irecv(t, peer, tag=tag),
        lambda t, tag: dist.batch_isend_irecv([dist.P2POp(dist.irecv, t, peer, tag=tag)]),
        lambda t, tag: comm.recv(t, peer, tag),
        lambda t, tag: comm.recv(t, None, tag),
        lambda t, tag: comm.irecv(t, peer, tag),
        lambda t, tag: in_batch(t, False, tag),
    ]
    tensors, tags = (torch.ones(3), torch.ones(3, 2)[:, 0]), (-1, -257, 2**31, 2**32 + 7)
    for name, calls in (("send", sends), ("recv", receives)):
        for call, tensor, tag in itertools.product(calls, tensors, tags):
            expected = rf"^{name}: expected a tag between 0 and 2147483647, got {tag}$"
            with pytest.raises(ValueError, match=expected):
                call(tensor, tag)
    received = torch.zeros(1)
    work = comm.irecv(received, peer, 2**31 - 1)
    comm.send(torch.full((1,), 7.0), peer, 2**31 - 1)
    work.wait()
    assert received == 7


def check_progress_while_nobody_waits(rank: int, size: int) -> None:
    """A message larger than the ring is transferred while both ranks do something else."""
    tensor = torch.full((4 * BEYOND_THE_RING,), float(rank))
    work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    deadline = time.monotonic() + 10
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert (tensor == 0).all()


def check_futures_and_results(rank: int, size: int) -> None:
    tensor = torch.full((10,), float(rank))
    work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    total = work.get_future().then(lambda future: future.value()[0].sum().item())
    assert total.wait() == 0
    assert work.result()[0] is tensor
    work.wait()
    if rank == 1:
        assert work.source_rank() == 0


def check_works_from_threads(rank: int, size: int) -> None:
    """Several threads communicate at the same time, each with its own tag."""
    errors = []

    def talk(thread: int) -> None:
        try:
            for turn in range(20):
                buffer = torch.zeros(1000 * thread)
                receive = dist.irecv(buffer, 1 - rank, tag=thread)
                dist.send(torch.full((1000 * thread,), float(100 * thread + turn)), 1 - rank, tag=thread)
                receive.wait()
                assert (buffer == 100 * thread + turn).all()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=talk, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def check_unwaited(rank: int, size: int) -> None:
    """Messages for which no rank waits arrive, and are not kept."""
    count = 500
    if rank == 0:
        for i in range(count):
            dist.isend(torch.tensor([float(i)]), 1)
    else:
        for i in range(count):
            buffer = torch.zeros(1)
            dist.recv(buffer, 0)
            assert buffer == i
    dist.barrier()  # all messages have arrived, and each further message frees two of them
    for _ in range(count // 2 + 10):
        if rank == 0:
            dist.send(torch.zeros(1), 1)
        else:
            dist.recv(torch.zeros(1), 0)
    assert len(dist.group.WORLD.communicator.dispatcher.core.messages._open) < 10


def check_wait_with_timeout(rank: int, size: int) -> None:
    """A wait that times out does not break the group: the message still arrives."""
    if rank == 0:
        buffer = torch.zeros(2)
        work = dist.irecv(buffer, 1)
        start = time.monotonic()
        with pytest.raises(RankLate, match="did not complete within the timeout of 0.2 s"):
            work.wait(timedelta(seconds=0.2))
        assert time.monotonic() - start < 2
        dist.send(torch.ones(1), 1)
        work.wait()
        assert (buffer == 5).all()
    else:
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.full((2,), 5.0), 0)
    dist.barrier()


def check_timeout_of_collective(rank: int, size: int) -> None:
    """The timeout of a single collective does not apply to messages that are received during the collective."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    comm, buffer = Communicator(group), torch.zeros(2)
    if rank == 0:
        group._host.within(0.1, lambda flags: comm.recv(buffer, 1))(0)
        assert (buffer == 5).all()
        group.set_timeout(timedelta(seconds=0.2))
    else:
        time.sleep(0.5)
        comm.send(torch.full((2,), 5.0), 0)
    with pytest.raises(RankLate, match=r"recv\(2 x float32, .* within the timeout of 0.2 s"):
        group._host.within(20, lambda flags: comm.recv(buffer, 1 - rank))(0)
    dist.barrier()
    dist.destroy_process_group(group)


def check_pipeline_ring(rank: int, size: int) -> None:
    """A token circulates many times while collectives run on the same group."""
    token = torch.zeros(1)
    for turn in range(30):
        if rank == 0:
            dist.send(token + 1, 1)
            dist.recv(token, size - 1)
            assert token == (turn + 1) * size
        else:
            dist.recv(token, rank - 1)
            dist.send(token + 1, (rank + 1) % size)
        if turn % 10 == 0:
            dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize(
    "check", [check_both_directions, check_receives_first, check_batch, check_any_source, check_pipeline_ring]
)
@pytest.mark.parametrize("size", [2, 4])
def test_on_all_ranks(ranks, size, check):
    ranks(size).run(check)


@pytest.mark.parametrize(
    "check",
    [
        check_tags_out_of_order,
        check_invalid_tags,
        check_progress_while_nobody_waits,
        check_futures_and_results,
        check_works_from_threads,
        check_unwaited,
        check_wait_with_timeout,
        check_timeout_of_collective,
    ],
)
def test_on_two_ranks(ranks, check):
    ranks(2).run(check)
