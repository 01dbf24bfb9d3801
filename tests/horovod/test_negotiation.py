"""Requests in different orders and at different times on different ranks; mismatches, the cache and fusion."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
import torch

import farandole.horovod.torch as hvd
from farandole.horovod.negotiation import ResponseCache
from farandole.horovod.requests import Signature
from tests.horovod.jobs import close, message, session


def _engine():
    engine = hvd.global_process_set.engine
    assert engine is not None
    return engine


def orders(rank, size, seed):
    """Run random operations in random order.  Some names change shape between rounds, which invalidates cache slots."""
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


@pytest.mark.parametrize("capacity", ["1024", "7", "0"])
@pytest.mark.parametrize("size", [2, 4])
def test_any_order_gives_the_same_results(ranks, size, capacity, monkeypatch):
    cached = ranks(size).run(with_variables, {"HOROVOD_CACHE_CAPACITY": capacity}, orders, int(capacity) % 13)
    assert len(set(cached)) == 1 and cached[0] <= int(capacity)


def test_any_order_through_gloo(ranks):
    ranks(3, "gloo").run(orders, 5)


def with_variables(rank, size, variables, function, *arguments):
    """Call `function(rank, size, *arguments)` with environment variables set."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        return function(rank, size, *arguments)


def mismatches(rank, size):
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
            f"requested an allgather, but rank {size - 1} requested an allreduce": lambda: (
                hvd.allreduce(ones, name="x") if last else hvd.allgather(ones, "x")
            ),
            "numbers of tensors in a group": lambda: hvd.grouped_allreduce([ones] * (1 + last), name="x"),
        }.items():
            with pytest.raises(hvd.HorovodInternalError, match=f"Mismatched .*{kind}"):
                call()
            close(hvd.allreduce(ones, name="x"), ones)  # the name can be used again


@pytest.mark.parametrize("size", [2, 3])
def test_mismatches_are_errors_on_all_ranks(ranks, size):
    ranks(size).run(mismatches)


def submitted_first(rank, size):
    """Rank 0 submits a name twice, before the other rank submits the name."""
    with session():
        if rank == 0:
            first = hvd.allreduce_async(torch.ones(2), name="same")
            again = message(lambda: hvd.allreduce_async(torch.ones(2), name="same"), ValueError)
            assert "Requested to allreduce a tensor with the same name" in again
            assert not hvd.poll(first)
            hvd.barrier()
        else:
            hvd.barrier()
            first = hvd.allreduce_async(torch.ones(2), name="same")
        close(hvd.synchronize(first), torch.ones(2))
        assert _engine()._in_flight == {}


def test_a_name_in_flight_is_refused(ranks):
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
        assert min(cycles for cycles, _ in counts) < 100  # fewer than 200, because the 200 tensors are fused


def test_the_cache_discards_the_least_recently_used_name():
    cache = ResponseCache(2)
    signatures = [Signature("allreduce")]
    assert cache.add("a", signatures) is None
    assert cache.add("b", signatures) is None
    cache.use(cache.find("a"))
    assert cache.add("c", signatures) == 1  # the slot of b
    assert cache.find("b") is None and cache.find("c").slot == 1 and cache.all_bits() == 0b11
    cache.remove(0)
    cache.remove(0)
    assert cache.find("a") is None and cache.all_bits() == 0b10 and len(cache) == 1
    assert ResponseCache(0).add("a", signatures) is None


def long_names(rank, size):
    """Announce 24 kB of names, in different orders on different ranks."""
    with session():
        names = [f"{'a long name ' * 20}{i}" for i in range(100)]
        order = names if rank == 0 else names[::-1]
        handles = {
            name: hvd.allreduce_async(torch.tensor([rank + 1.0, len(name)]), name=name, op=hvd.Sum)
            for name in order
        }
        for name in names:
            close(hvd.synchronize(handles[name]), torch.tensor([size * (size + 1) / 2, size * len(name)]))


def test_long_names_are_announced_in_full(ranks):
    ranks(2).run(long_names)


def fused_together(rank, size, path):
    """Return the number of tensors of each all-reduce from the timeline."""
    lengths = {"five": 5, "thousand": 1000, "three": 3, "two": 2}
    with session():
        hvd.start_timeline(path)
        group = hvd.grouped_allreduce(
            [torch.full((n,), rank + 1.0) for n in lengths.values()], name="g", op=hvd.Sum
        )
        for result, length in zip(group, lengths.values(), strict=True):
            close(result, torch.full((length,), size * (size + 1) / 2))
        hvd.stop_timeline()
    if rank:
        return []
    events = json.loads(Path(path).read_text())
    return [e["args"]["tensors"] for e in events if e["name"] == "ALLREDUCE"]


@pytest.mark.parametrize(("threshold", "tensors"), [(0, [1, 1, 1, 1]), (64, [1, 1, 2]), (4096, [4])])
def test_the_fusion_threshold_limits_the_size_of_an_allreduce(ranks, tmp_path, threshold, tensors):
    """Reduce tensors of 20, 4000, 12 and 8 bytes.  An all-reduce has at most `threshold` bytes, or one tensor."""
    variables = {"HOROVOD_FUSION_THRESHOLD": str(threshold)}
    found = ranks(2).run(with_variables, variables, fused_together, str(tmp_path / "timeline.json"))
    assert sorted(found[0]) == tensors


def interleaved_collectives(rank, size):
    """Run a torch.distributed collective on the world group while Horovod operations are in flight."""
    with session():
        for _step in range(20):
            handles = [hvd.allreduce_async(torch.full((50,), float(rank)), name=f"{i}") for i in range(10)]
            own = torch.full((100,), float(rank))
            torch.distributed.all_reduce(own)
            close(own, torch.full((100,), float(sum(range(size)))))
            for handle in reversed(handles):
                close(hvd.synchronize(handle), torch.full((50,), sum(range(size)) / size))


def test_torch_distributed_collectives_run_concurrently(ranks):
    ranks(2).run(interleaved_collectives)
    ranks(2, "gloo").run(interleaved_collectives)


def wrong_variable(rank, size):
    with pytest.raises(ValueError, match="expected HOROVOD_CYCLE_TIME to be a number, got 'soon'"):
        hvd.init()
    assert not hvd.is_initialized()


def test_variables_are_checked(ranks):
    ranks(1).run(with_variables, {"HOROVOD_CYCLE_TIME": "soon"}, wrong_variable)
