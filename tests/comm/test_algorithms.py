"""Every algorithm on every transport, compared with one process that has the inputs of all ranks."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm.algorithms import doubling, halving, rabenseifner, ring, tree
from farandole.comm.algorithms.choice import ALL_REDUCE
from farandole.comm.algorithms.steps import COMBINE, Steps, finish, split
from farandole.comm.algorithms.table import COSTS
from farandole.comm.transport import TorchTransport, Transport
from tests.comm.hosts import hierarchical_group

TIMEOUT_S = 20.0
REFERENCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stack: stack.sum(0),
    "product": lambda stack: stack.prod(0),
    "min": lambda stack: stack.amin(0),
    "max": lambda stack: stack.amax(0),
    "and": lambda stack: _fold(torch.bitwise_and, stack),
    "or": lambda stack: _fold(torch.bitwise_or, stack),
    "xor": lambda stack: _fold(torch.bitwise_xor, stack),
}
ALL_COUNTS = range(1, 10)


def _fold(combine: Callable[[Tensor, Tensor], Tensor], stack: Tensor) -> Tensor:
    result = stack[0]
    for each in stack[1:]:
        result = combine(result, each)
    return result


class Letter:
    """A message between threads: sent at once, received when it is waited for."""

    def __init__(self, box: queue.Queue[Tensor], into: Tensor | None) -> None:
        self._box, self._into = box, into

    def test(self) -> bool:
        return self._into is None or not self._box.empty()

    def wait(self, timeout_s: float) -> None:
        if self._into is not None:
            arrived = self._box.get(timeout=timeout_s)
            assert arrived.shape == self._into.shape, "sent and received lengths differ"
            self._into.copy_(arrived)


class ThreadTransport:
    """A transport whose ranks are threads of this process; each pair of ranks has a queue for each direction."""

    def __init__(self, rank: int, boxes: list[list[queue.Queue[Tensor]]]) -> None:
        self.rank, self.size = rank, len(boxes)
        self._boxes = boxes

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> Letter:
        box = self._boxes[self.rank][peer]
        box.put(tensor.clone())
        return Letter(box, None)

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> Letter:
        return Letter(self._boxes[peer][self.rank], tensor)


def in_threads(size: int, steps_of: Callable[[Transport], Steps]) -> None:
    """Run an algorithm on ranks that are threads; no message may be left over."""
    boxes: list[list[queue.Queue[Tensor]]] = [[queue.Queue() for _ in range(size)] for _ in range(size)]

    def run(rank: int) -> None:
        finish(steps_of(ThreadTransport(rank, boxes)), TIMEOUT_S)

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(run, range(size)))
    assert all(box.empty() for row in boxes for box in row)


def inputs(size: int, length: int, reduction: str, seed: int) -> Tensor:
    """Return the tensors of all ranks: integers for bitwise reductions, small integers for exact products."""
    generator = torch.Generator().manual_seed(seed)
    if reduction in ("and", "or", "xor"):
        return torch.randint(-(2**31), 2**31 - 1, (size, length), generator=generator, dtype=torch.int32)
    if reduction == "product":
        return torch.randint(-2, 3, (size, length), generator=generator).double()
    return torch.randn(size, length, generator=generator)


def right(found: Tensor, wanted: Tensor) -> bool:
    if not found.dtype.is_floating_point:
        return torch.equal(found, wanted)
    return torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)


def lengths(size: int) -> list[int]:
    return sorted({0, 1, size - 1, size, size + 1, random.Random(size).randrange(20, 3000)})


@pytest.mark.parametrize("size", ALL_COUNTS)
@pytest.mark.parametrize("name", ALL_REDUCE)
def test_all_reduce_among_threads(name, size):
    for reduction, reference in REFERENCE.items():
        for length in lengths(size):
            given = inputs(size, length, reduction, length)
            found = given.clone()
            in_threads(size, lambda t: ALL_REDUCE[name](t, found[t.rank], COMBINE[reduction]))  # noqa: B023
            assert right(found[0], reference(given)), (reduction, length)
            assert all(torch.equal(each, found[0]) for each in found), "ranks differ in their bits"


@pytest.mark.parametrize("size", ALL_COUNTS)
@pytest.mark.parametrize("name", ALL_REDUCE)
def test_all_reduce_into_a_narrower_type(name, size):
    def store(result: Tensor, total: Tensor) -> None:
        result.copy_(total.div_(size))

    for length in lengths(size):
        given = inputs(size, length, "sum", length)
        results = torch.full((size, length), 7.0, dtype=torch.bfloat16)
        totals = given.clone()

        def steps(transport: Transport, totals: Tensor = totals, results: Tensor = results) -> Steps:
            own = transport.rank
            return ALL_REDUCE[name](transport, totals[own], COMBINE["sum"], results[own], store)

        in_threads(size, steps)
        wanted = given.double().mean(0)
        assert ((results[0].double() - wanted).abs() <= 2.0**-8 * wanted.abs() + 1e-6).all()
        assert all(torch.equal(each, results[0]) for each in results), "ranks differ in their bits"


@pytest.mark.parametrize("size", ALL_COUNTS)
@pytest.mark.parametrize("reduce", [tree.reduce, tree.reduce_binomial, tree.reduce_chain])
def test_reduce_among_threads(reduce, size):
    for length in lengths(size):
        for root in {0, size // 2, size - 1}:
            given = inputs(size, length, "sum", length)
            found = given.clone()
            in_threads(size, lambda t: reduce(t, found[t.rank], root, COMBINE["sum"]))  # noqa: B023
            assert right(found[root], given.sum(0)), (root, length)


@pytest.mark.parametrize("size", ALL_COUNTS)
def test_reduce_scatter_and_all_gather_among_threads(size):
    for length in lengths(size):
        given = inputs(size, length, "sum", length)
        bounds = [length * part // size for part in range(size + 1)]
        for reduce_scatter in (ring.reduce_scatter, halving.reduce_scatter):
            if reduce_scatter is halving.reduce_scatter and size & (size - 1):
                continue
            found = given.clone()
            in_threads(size, lambda t: reduce_scatter(t, split(found[t.rank], size), COMBINE["sum"]))  # noqa: B023
            for rank in range(size):
                own = slice(bounds[rank], bounds[rank + 1])
                assert right(found[rank][own], given.sum(0)[own])
        for all_gather in (ring.all_gather, doubling.all_gather):
            if all_gather is doubling.all_gather and size & (size - 1):
                continue
            found = given.clone()
            in_threads(size, lambda t: all_gather(t, split(found[t.rank], size)))  # noqa: B023
            wanted = torch.cat([given[r][bounds[r] : bounds[r + 1]] for r in range(size)])
            assert all(torch.equal(each, wanted) for each in found)


@pytest.mark.parametrize("size", [3, 6])
def test_halving_and_doubling_require_a_power_of_two(size):
    with pytest.raises(
        ValueError, match=f"expected a power of 2 as the number of ranks, got {size}; use the ring algorithm"
    ):
        in_threads(size, lambda t: halving.reduce_scatter(t, split(torch.zeros(9), size), COMBINE["sum"]))
    with pytest.raises(
        ValueError, match=f"expected a power of 2 as the number of ranks, got {size}; use the ring algorithm"
    ):
        in_threads(size, lambda t: doubling.all_gather(t, split(torch.zeros(9), size)))


@pytest.mark.parametrize("size", ALL_COUNTS)
@pytest.mark.parametrize("broadcast", [tree.broadcast, tree.binomial, tree.chain])
def test_broadcast_among_threads(broadcast, size):
    for root in range(size):
        for length in (0, 1, 20_000):
            found = torch.stack([torch.full((length,), 1.0 + rank) for rank in range(size)])
            in_threads(size, lambda t: broadcast(t, found[t.rank], root))  # noqa: B023
            assert (found == 1 + root).all()


def over_messages(rank: int, size: int, way: str) -> None:
    """Run all algorithms between processes, over TCP, shared memory or Gloo."""
    if way == "wire":
        group = hierarchical_group(list(range(size)), rank)
        transport: Transport = group.between(range(size), 16)
    elif way == "memory":
        group = dist.group.WORLD
        transport = group.between(range(size), 16)
    else:
        group = dist.new_group(list(range(size)), backend="gloo")
        transport = TorchTransport(group)
    for name, all_reduce in ALL_REDUCE.items():
        for reduction, reference in REFERENCE.items():
            for length in [*lengths(size), 200_000]:
                given = inputs(size, length, reduction, length)
                found = given[rank].clone()
                finish(all_reduce(transport, found, COMBINE[reduction]), TIMEOUT_S)
                assert right(found, reference(given)), (name, reduction, length)
                if length == 200_000:
                    everyones = [torch.empty_like(found) for _ in range(size)]
                    dist.all_gather(everyones, found, group=group)
                    assert all(torch.equal(each, found) for each in everyones)
    if way != "memory":
        dist.destroy_process_group(group)


@pytest.mark.parametrize("way", ["wire", "memory", "gloo"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_among_processes(ranks, way, size):
    ranks(size).run(over_messages, way)


def counted_messages(size: int, steps_of: Callable[[Transport], Steps]) -> tuple[int, int]:
    """Return the largest number of messages, and of elements, that a rank sends."""
    sent: dict[int, list[int]] = {rank: [] for rank in range(size)}

    class Counting(ThreadTransport):
        def send(self, tensor: Tensor, peer: int, tag: int = 0) -> Letter:
            sent[self.rank].append(tensor.numel())
            return super().send(tensor, peer, tag)

    boxes: list[list[queue.Queue[Tensor]]] = [[queue.Queue() for _ in range(size)] for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda rank: finish(steps_of(Counting(rank, boxes)), TIMEOUT_S), range(size)))
    return max(map(len, sent.values())), max(map(sum, sent.values()))


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", ALL_REDUCE)
def test_costs_match_the_sent_messages_and_bytes(name, size):
    length = 8 * 9 * 5
    messages, elements = counted_messages(
        size, lambda t: ALL_REDUCE[name](t, torch.ones(length), COMBINE["sum"])
    )
    assert COSTS[name](size, length, 1.0, 0.0) == messages
    assert COSTS[name](size, length, 0.0, 1.0) == pytest.approx(elements)


@pytest.mark.parametrize("name", COSTS)
def test_costs_grow_with_the_size_and_with_the_ranks(name):
    latency, per_byte = 20e-6, 1e-9
    for hosts in range(2, 65):
        costs = [COSTS[name](hosts, 1 << power, latency, per_byte) for power in range(30)]
        assert costs == sorted(costs) and costs[0] > 0
    powers = [COSTS[name](1 << power, 1 << 20, latency, per_byte) for power in range(1, 10)]
    assert powers == sorted(powers)


@pytest.mark.parametrize("hosts", [4, 8, 16])
def test_latency_decides_for_small_and_bandwidth_for_large_tensors(hosts):
    def fastest(size: int) -> str:
        return min(COSTS, key=lambda name: COSTS[name](hosts, size, 20e-6, 1e-9))

    assert fastest(8) == "doubling" and fastest(64 << 20) == "rabenseifner"
    assert hosts == 4 or fastest(64 << 20) != "doubling"


def test_ring_is_faster_than_rabenseifner_for_large_tensors_if_hosts_are_not_a_power_of_two():
    for hosts in (3, 5, 6, 7):
        assert ring.all_reduce_cost(hosts, 1 << 24, 20e-6, 1e-9) < rabenseifner.all_reduce_cost(
            hosts, 1 << 24, 20e-6, 1e-9
        )
