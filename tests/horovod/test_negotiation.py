"""Requests in different orders and at different times on different ranks; disagreements; the cache; what is fused."""

from __future__ import annotations

import random
import time

import pytest
import torch

import farandole.horovod.torch as hvd
from farandole.horovod.engine.cache import ResponseCache
from farandole.horovod.engine.requests import Signature
from tests.horovod.jobs import close, message, session


def _engine():
    engine = hvd.global_process_set.engine
    assert engine is not None
    return engine


def orders(rank, size, seed):
    """Random kinds, shapes and orders; some names change their shapes between rounds, which voids the cache."""
    shared, own = random.Random(seed), random.Random(seed * 100 + rank)
    with session():
        for _ in range(6):
            plan = []
            for number in range(shared.randrange(1, 60)):
                kind = shared.choice(["sum", "sum", "sum", "average", "gather", "broadcast"])
                dtype = shared.choice([torch.float32, torch.float64, torch.int64])
                plan.append((f"{kind}.{number}", kind, shared.randrange(0, 300), dtype))
            own.shuffle(plan)
            handles = []
            for name, kind, length, dtype in plan:
                tensor = torch.full((length,), rank + length, dtype=dtype)
                if kind == "gather":
                    handle = hvd.allgather_async(tensor[: length // (rank + 1)], name)
                elif kind == "broadcast":
                    handle = hvd.broadcast_async_(tensor, length % size, name)
                else:
                    op = hvd.Sum if kind == "sum" else hvd.Average
                    handle = hvd.allreduce_async_(tensor, name=name, op=op)
                handles.append(handle)
                if own.random() < 0.1:
                    time.sleep(own.random() * 0.003)
            own.shuffle(order := list(range(len(plan))))
            for index in order:
                _, kind, length, dtype = plan[index]
                whole = [torch.full((length,), r + length, dtype=dtype) for r in range(size)]
                result = hvd.synchronize(handles[index])
                if kind == "gather":
                    expected = torch.cat([whole[r][: length // (r + 1)] for r in range(size)])
                elif kind == "broadcast":
                    expected = whole[length % size]
                else:
                    expected = torch.stack(whole).sum(0)
                    if kind == "average":
                        expected = (expected.double() / size).to(dtype)
                close(result, expected)
        return len(_engine()._negotiator.cache)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("capacity", ["1024", "7", "0"])
def test_any_order_gives_the_same_results(ranks, size, capacity, monkeypatch):
    cached = ranks(size).run(with_variables, {"HOROVOD_CACHE_CAPACITY": capacity}, orders, int(capacity) % 13)
    assert len(set(cached)) == 1 and cached[0] <= int(capacity)


def test_any_order_through_gloo(ranks):
    ranks(3, "gloo").run(orders, 5)


def with_variables(rank, size, variables, function, *arguments):
    """Call a function of ranks with environment variables, which hvd.init() reads."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        return function(rank, size, *arguments)


def disagreements(rank, size):
    with session():
        ones = torch.ones(2, 3)
        last = rank == size - 1
        for kind, call in {
            rf"allreduce tensor shapes.*rank 0 sent \[2, 3\], but rank {size - 1} sent \[6\]": lambda: (
                hvd.allreduce(ones.view(-1) if last else ones, name="x")
            ),
            rf"data types.*rank 0 sent torch.float32, but rank {size - 1} sent torch.int64": lambda: (
                hvd.allreduce(ones.long() if last else ones, name="x")
            ),
            rf"reduction operations.*rank 0 sent Sum, but rank {size - 1} sent Average": lambda: (
                hvd.allreduce(ones, name="x", op=hvd.Average if last else hvd.Sum)
            ),
            "prescale factors": lambda: hvd.allreduce(ones, name="x", op=hvd.Sum, prescale_factor=1 + last),
            "postscale factors": lambda: hvd.allreduce(ones, name="x", op=hvd.Sum, postscale_factor=1 + last),
            f"root ranks.*rank 0 sent 0, but rank {size - 1} sent 1": lambda: hvd.broadcast(
                ones, int(last), "x"
            ),
            "beyond the first dimension": lambda: hvd.allgather(ones.t() if last else ones, "x"),
            "allgather.*dimension": lambda: hvd.allgather(ones.view(-1) if last else ones, "x"),
            "reducescatter tensor shapes": lambda: hvd.reducescatter(ones[:1] if last else ones, "x"),
            f"did an allgather, but rank {size - 1} did an allreduce": lambda: (
                hvd.allreduce(ones, name="x") if last else hvd.allgather(ones, "x")
            ),
            "numbers of tensors in a group": lambda: hvd.grouped_allreduce([ones] * (1 + last), name="x"),
        }.items():
            with pytest.raises(hvd.HorovodInternalError, match=f"Mismatched .*{kind}"):
                call()
            close(hvd.allreduce(ones, name="x"), ones)  # the name can be used again


@pytest.mark.parametrize("size", [2, 3])
def test_disagreements_are_errors_on_all_ranks(ranks, size):
    ranks(size).run(disagreements)


def submitted_first(rank, size):
    """Rank 0 has a name in flight that the other rank asks for only later."""
    with session():
        if rank == 0:
            first = hvd.allreduce_async(torch.ones(2), name="same")
            again = message(lambda: hvd.allreduce_async(torch.ones(2), name="same"), hvd.HorovodInternalError)
            assert "Requested to allreduce a tensor with the same name" in again
            assert not hvd.poll(first)
            hvd.barrier()
        else:
            hvd.barrier()
            first = hvd.allreduce_async(torch.ones(2), name="same")
        hvd.synchronize(first)
        assert _engine()._in_flight == {}


def test_a_name_is_in_flight_once(ranks):
    ranks(2).run(submitted_first)


def steady_state(rank, size):
    with session():
        engine = _engine()
        tensors = [torch.ones(10 + i) for i in range(200)]
        counts = []
        exchanges = 0
        exchange = engine._negotiator._exchange

        def counted(mine):
            nonlocal exchanges
            exchanges += 1
            return exchange(mine)

        engine._negotiator._exchange = counted
        for step in range(5):
            before, exchanges = engine.cycles, 0
            handles = [hvd.allreduce_async_(tensor, name=f"t.{i}") for i, tensor in enumerate(tensors)]
            for handle in handles:
                hvd.synchronize(handle)
            if step:
                counts.append((engine.cycles - before, exchanges))
        return counts


def test_the_steady_state_exchanges_bits_only(ranks):
    for counts in ranks(2).run(steady_state):
        assert all(exchanges == 0 for _, exchanges in counts)
        assert min(cycles for cycles, _ in counts) < 100  # for 200 tensors: they are fused


def test_the_cache_forgets_what_was_used_longest_ago():
    cache = ResponseCache(2)
    signatures = [Signature("allreduce")]
    assert cache.add("a", signatures) is None
    assert cache.add("b", signatures) is None
    cache.use(cache.find("a"))
    assert cache.add("c", signatures) == 1  # b's slot
    assert cache.find("b") is None and cache.find("c").slot == 1 and cache.all_bits() == 0b11
    cache.remove(0)
    cache.remove(0)
    assert cache.find("a") is None and cache.all_bits() == 0b10 and len(cache) == 1
    assert ResponseCache(0).add("a", signatures) is None


def long_announcements(rank, size):
    with session():
        names = [f"{'a long name ' * 20}{i}" for i in range(100 * (rank == 0) + 100)]
        handles = [hvd.allreduce_async(torch.ones(1), name=name) for name in names[:100]]
        for handle in handles:
            hvd.synchronize(handle)


def test_long_announcements(ranks):
    ranks(2).run(long_announcements)


def small_threshold(rank, size):
    with session():
        shapes = [(5,), (1000,), (3,), (0,), (2, 2)]
        handles = [hvd.allreduce_async(torch.full(s, rank + 1.0), name=f"{s}", op=hvd.Sum) for s in shapes]
        for shape, handle in zip(shapes, handles, strict=True):
            close(hvd.synchronize(handle), torch.full(shape, size * (size + 1) / 2))


@pytest.mark.parametrize("threshold", ["0", "64", "4096"])
def test_fusion_thresholds(ranks, threshold):
    ranks(2).run(with_variables, {"HOROVOD_FUSION_THRESHOLD": threshold}, small_threshold)


def beside_the_users_own(rank, size):
    """The program's own collectives on the world group, between Horovod's in flight."""
    with session():
        for _step in range(20):
            handles = [hvd.allreduce_async(torch.full((50,), float(rank)), name=f"{i}") for i in range(10)]
            own = torch.full((100,), float(rank))
            torch.distributed.all_reduce(own)
            close(own, torch.full((100,), float(sum(range(size)))))
            for handle in reversed(handles):
                close(hvd.synchronize(handle), torch.full((50,), sum(range(size)) / size))


def test_the_programs_own_collectives_go_on_beside(ranks):
    ranks(2).run(beside_the_users_own)
    ranks(2, "gloo").run(beside_the_users_own)


def wrong_variable(rank, size):
    with pytest.raises(ValueError, match="HOROVOD_CYCLE_TIME='soon' is not a number"):
        hvd.init()
    assert not hvd.is_initialized()


def test_variables_are_checked(ranks):
    ranks(1).run(with_variables, {"HOROVOD_CYCLE_TIME": "soon"}, wrong_variable)
