"""Process sets, and ranks that join early."""

from __future__ import annotations

import time

import pytest
import torch

import farandole.horovod.torch as hvd
from tests.horovod.jobs import all_given, close, given, session


def sets(rank, size):
    odd, even = list(range(1, size, 2)), list(range(0, size, 2))
    chosen = [hvd.ProcessSet(odd)]
    with session(process_sets=chosen):
        first = chosen[0]
        second = hvd.add_process_set(range(0, size, 2))
        mine, ranks = (second, even) if rank % 2 == 0 else (first, odd)
        other = first if mine is second else second
        assert mine.included() and not other.included()
        assert (mine.rank(), mine.size(), mine.ranks) == (ranks.index(rank), len(ranks), ranks)
        assert other.size() == size - len(ranks)
        with pytest.raises(ValueError, match=f"rank {rank} is not in process set"):
            other.rank()
        with pytest.raises(ValueError, match="cannot run its operations"):
            hvd.allreduce(torch.ones(1), process_set=other)

        # both sets and the global set run operations with the same name concurrently, in different orders
        everyone = all_given(size, (4, 3))
        whole = hvd.allreduce_async(everyone[rank], name="a", op=hvd.Sum) if rank % 2 else None
        part = hvd.allreduce_async(everyone[rank], name="a", op=hvd.Sum, process_set=mine)
        whole = whole or hvd.allreduce_async(everyone[rank], name="a", op=hvd.Sum)
        close(hvd.synchronize(part), everyone[ranks].sum(0))
        close(hvd.synchronize(whole), everyone.sum(0))

        close(hvd.allgather(everyone[rank], process_set=mine), everyone[ranks].flatten(0, 1))
        close(hvd.broadcast(everyone[rank], ranks[-1], process_set=mine), everyone[ranks[-1]])
        outsider = (rank + 1) % size
        if outsider not in ranks:
            with pytest.raises(ValueError, match="invalid root rank"):
                hvd.broadcast(everyone[rank], outsider, process_set=mine)
        rows = hvd.alltoall(torch.full((len(ranks),), rank), process_set=mine)
        assert rows.tolist() == ranks
        close(
            hvd.reducescatter(everyone[rank], op=hvd.Sum, process_set=mine),
            everyone[ranks].sum(0).tensor_split(len(ranks))[mine.rank()],
        )
        hvd.barrier(process_set=mine)
        assert hvd.allgather_object(rank, process_set=mine) == ranks
        assert hvd.broadcast_object(rank, ranks[0], process_set=mine) == ranks[0]
        leaf = given(rank, (2,)).requires_grad_()
        hvd.allgather(leaf, process_set=mine).sum().backward()
        close(leaf.grad, torch.ones(2))

        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), process_set=first)
        (parameter * (rank + 1)).sum().backward()
        optimizer.step()
        step = sum(r + 1 for r in odd) / len(odd) if rank in odd else rank + 1
        close(parameter.detach(), torch.full((2,), -float(step)))

        for same in (hvd.ProcessSet(even), range(size)):
            with pytest.raises(ValueError, match=r"already has the ranks \[0"):
                hvd.add_process_set(same)
        with pytest.raises(ValueError, match="already registered"):
            hvd.add_process_set(second)
        assert hvd.remove_process_set(second) and second.process_set_id is None
        second = hvd.add_process_set(even)
        assert hvd.remove_process_set(second)
        with pytest.raises(ValueError, match="not registered"):
            hvd.remove_process_set(second)
        assert not hvd.remove_process_set(hvd.global_process_set)
        with pytest.raises(ValueError, match="not registered"):
            hvd.allreduce(torch.ones(1), process_set=second)
        with pytest.raises(ValueError, match="ranks from 0 to"):
            hvd.add_process_set([0, size])
        with pytest.raises(ValueError, match=f"rank {rank} adds .* and rank . adds"):
            hvd.add_process_set([rank])
        close(hvd.allreduce(everyone[rank]), everyone.mean(0))
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.allreduce(torch.ones(1))


@pytest.mark.parametrize("size", [2, 4])
def test_process_sets(ranks, size):
    ranks(size).run(sets)


def test_process_sets_through_gloo(ranks):
    ranks(3, "gloo").run(sets)


def test_invalid_ranks_of_a_process_set():
    for ranks, words in ((3, "list of ranks"), ([0, 0], "distinct"), (["a"], "integer ranks")):
        with pytest.raises(ValueError, match=words):
            hvd.ProcessSet(ranks)


def overlapping_sets(rank, size):
    """Register each pair of ranks as a set.  Each rank begins with a different set, so no set may wait for another."""
    with session():
        pairs = [hvd.add_process_set([a, b]) for a in range(size) for b in range(a)]
        own = [each for each in pairs if each.included()]
        own = own[rank % len(own) :] + own[: rank % len(own)]
        handles = [hvd.allreduce_async(torch.ones(3) * rank, op=hvd.Sum, process_set=each) for each in own]
        for each, handle in zip(own, handles, strict=True):
            close(hvd.synchronize(handle), torch.full((3,), float(sum(each.ranks))))


def test_sets_do_not_wait_for_each_other(ranks):
    ranks(4).run(overlapping_sets)


def subset(rank, size):
    """Initialize worlds that are parts of the job, with hvd.init(comm=[...])."""
    world = [0] if rank == 0 else list(range(1, size))
    with session(comm=world):
        assert (hvd.rank(), hvd.size()) == (world.index(rank), len(world))
        assert hvd.local_size() == len(world)
        close(hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum), torch.tensor([float(sum(world))]))
    for wrong in ([size], [1, 0], "all"):
        with pytest.raises(ValueError, match="comm"):
            hvd.init(comm=wrong)
    assert not hvd.is_initialized()


def test_a_part_of_the_job(ranks):
    ranks(3).run(subset)


def uneven_data(rank, size):
    with session():
        for turn in range(2):  # the names are in the cache in the second round
            steps = 3 + 2 * ((rank + turn) % size)
            for step in range(steps):
                present = [r for r in range(size) if step < 3 + 2 * ((r + turn) % size)]
                result = hvd.allreduce(torch.full((4,), rank + 1.0), name="x", op=hvd.Sum)
                close(result, torch.full((4,), float(sum(r + 1 for r in present))))
                mean = hvd.allreduce(torch.full((4,), rank + 1.0), name="mean")
                close(mean, torch.full((4,), sum(r + 1 for r in present) / size))
                group = hvd.grouped_allreduce([torch.ones(2), torch.ones(3, dtype=torch.int64)], op=hvd.Sum)
                assert group[1].tolist() == [len(present)] * 3
            last = hvd.join()
            assert last == max(range(size), key=lambda r: 3 + 2 * ((r + turn) % size))
        close(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(size)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_join(ranks, size):
    ranks(size).run(uneven_data)


def only_sums(rank, size):
    with session():
        hvd.allgather(torch.ones(2), name="cached")
        if rank == 0:
            hvd.join()
            return
        time.sleep(0.05)
        for call in (
            lambda: hvd.allgather(torch.ones(2), name="cached"),
            lambda: hvd.allgather(torch.ones(2)),
            lambda: hvd.broadcast(torch.ones(2), 1),
            lambda: hvd.allreduce(torch.ones(2), op=hvd.Max),
        ):
            with pytest.raises(
                hvd.HorovodInternalError, match=r"not supported once a rank has joined \(rank 0\)"
            ):
                call()
        hvd.barrier()
        close(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), size - 1.0))
        hvd.join()


def test_only_sums_are_allowed_after_a_join(ranks):
    ranks(3).run(only_sums)
