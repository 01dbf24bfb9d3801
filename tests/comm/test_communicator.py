"""The communicator's own operations: persistent, out of place, uneven, scans, arrays, objects, batches, invalid calls.

Each operation runs on one host, on simulated hosts and on Gloo, and is compared with torch in one process.
"""

from __future__ import annotations

import gc
import random
import time
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm import CommunicationError, Communicator
from tests.comm.hosts import hierarchical_group
from tests.comm.next_to_gloo import gloo_group
from tests.comm.test_collectives import FLOATS, INTEGERS, ON_FLOATS, ON_INTEGERS, reduced, same_bits, values

COUNTS = [0, 1, 3, 100, 5000, 70_001]


def communicators(rank: int, size: int) -> list[tuple[str, Communicator]]:
    """Return communicators on this host, on simulated hosts and on Gloo."""
    made = [("native", Communicator(dist.group.WORLD)), ("gloo", Communicator(gloo_group()))]
    if size > 1:
        made.append(("hierarchical", Communicator(hierarchical_group([r % 2 for r in range(size)], rank))))
    return made


def everyones(seed: int, size: int, counts: list[int], dtype: torch.dtype) -> list[Tensor]:
    return [values(seed, r, count, dtype) for r, count in enumerate(counts)]


def check_persistent(rank: int, size: int, seed: int) -> None:
    """Prepare every operation once, and run it on changing values, with the same results on all implementations."""
    draw = random.Random(seed)
    for name, comm in communicators(rank, size):
        for turn in range(8):
            exact = name == "native"
            dtype = draw.choice(FLOATS + INTEGERS if exact else [torch.int32, torch.int64])
            op = draw.choice((ON_FLOATS if dtype in FLOATS else ON_INTEGERS) if exact else ["sum", "max"])
            count, root = draw.choice(COUNTS), draw.randrange(size)
            even, tensor = torch.zeros(count * size, dtype=dtype), torch.zeros(count, dtype=dtype)
            output, whole = torch.zeros_like(tensor), torch.zeros_like(even)
            parts = [torch.zeros_like(tensor) for _ in range(size)]
            is_root = rank == root
            calls = {
                "all_reduce": comm.all_reduce_init(tensor, op),
                "out of place": comm.all_reduce_init(tensor, op, output=output),
                "reduce": comm.reduce_init(tensor, root, op),
                "reduce_scatter": comm.reduce_scatter_init(output, even, op),
                "all_gather": comm.all_gather_init(whole, tensor),
                "all_gather list": comm.all_gather_init(parts, tensor),
                "broadcast": comm.broadcast_init(tensor, root),
                "gather": comm.gather_init(tensor, parts if is_root else None, root),
                "scatter": comm.scatter_init(output, parts if is_root else None, root),
                "all_to_all": comm.all_to_all_init(whole, even),
            }
            barrier = comm.barrier_init()
            for run in range(3):
                for what, call in calls.items():
                    own = everyones(seed + 100 * turn + run, size, [count] * size, dtype)
                    big = everyones(seed + 100 * turn + run + 50, size, [count * size] * size, dtype)
                    tensor.copy_(own[rank])
                    even.copy_(big[rank])
                    output.zero_(), whole.zero_()
                    for each, value in zip(parts, own, strict=True):
                        each.copy_(value) if what == "scatter" else each.zero_()
                    if run == 1:
                        call.start().wait()
                    else:
                        call()
                    part = slice(rank * count, (rank + 1) * count)
                    found = {"all_gather": whole, "all_to_all": whole}.get(what, output)
                    match what:
                        case "all_reduce" | "out of place":
                            found, expected = tensor if what == "all_reduce" else output, reduced(own, op)
                        case "reduce":
                            found, expected = tensor, reduced(own, op) if is_root else own[rank]
                        case "reduce_scatter":
                            expected = reduced(big, op)[part]
                        case "all_gather":
                            expected = torch.cat(own)
                        case "all_gather list":
                            found, expected = torch.cat(parts), torch.cat(own)
                        case "broadcast":
                            found, expected = tensor, own[root]
                        case "gather":
                            found, expected = (
                                torch.cat(parts),
                                torch.cat(own) if is_root else torch.zeros_like(torch.cat(own)),
                            )
                        case "scatter":
                            expected = own[rank]
                        case "all_to_all":
                            expected = torch.cat([each[part] for each in big])
                    try:
                        same_bits(found, expected)
                    except AssertionError as error:
                        error.add_note(f"{name} {what} {dtype} {op} {count} elements, root {root}, run {run}")
                        raise
                barrier()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_persistent_operations(ranks, size, seed):
    ranks(size).run(check_persistent, seed)


def check_persistent_order(rank: int, size: int) -> None:
    """A persistent operation runs after the asynchronous work that precedes it, even in a callback."""
    comm = Communicator(dist.group.WORLD)
    tensor = torch.ones(50_000)
    op = comm.all_reduce_init(tensor)
    works = [comm.all_reduce(tensor, async_op=True) for _ in range(3)]
    op()
    assert all(work.is_completed() for work in works)
    assert (tensor == size**4).all()
    future = comm.all_reduce(tensor, async_op=True).get_future()
    assert future.then(lambda _: op()).wait() is None
    assert tensor[0] == size**6
    transposed = torch.full((4, 6), 1.0 + rank).t()  # not dense: copied at every run
    total = comm.all_reduce_init(transposed)
    total()
    assert (transposed == sum(range(1, size + 1))).all()


def check_persistent_memory(rank: int, size: int) -> None:
    """A persistent operation keeps its tensors alive, and nothing else does."""
    comm = Communicator(dist.group.WORLD)
    tensor = torch.ones(50_000)
    op = comm.all_reduce_init(tensor)
    reference = weakref.ref(tensor)
    del tensor
    gc.collect()
    op()
    assert reference() is not None
    del op
    gc.collect()
    assert reference() is None


def check_persistent_after_the_end(rank: int, size: int) -> None:
    group = dist.new_group()
    op = Communicator(group).all_reduce_init(torch.ones(3))
    op()
    dist.barrier()
    dist.destroy_process_group(group)
    for call in (op, op.start):
        with pytest.raises((CommunicationError, RuntimeError), match="destroyed"):
            call()


@pytest.mark.parametrize(
    "check", [check_persistent_order, check_persistent_memory, check_persistent_after_the_end]
)
def test_persistent_order_and_end(ranks, check):
    ranks(2).run(check)


def check_uneven(rank: int, size: int) -> None:
    for name, comm in communicators(rank, size):
        for counts in ([3 * r for r in range(size)], [40_000 * (r % 2) + 1 for r in range(size)]):
            for dtype in (torch.float32, torch.int64):
                own = everyones(5, size, counts, dtype)
                outputs = [torch.zeros_like(part) for part in own]
                comm.all_gather(outputs, own[rank])
                assert all(map(torch.equal, outputs, own)), name

                for root in (0, size - 1):
                    outputs = [torch.zeros_like(part) for part in own]
                    comm.gather(own[rank], outputs if rank == root else None, root, counts=counts)
                    assert rank != root or all(map(torch.equal, outputs, own)), name
                    output = torch.zeros_like(own[rank])
                    comm.scatter(output, own if rank == root else None, root, counts=counts)
                    assert torch.equal(output, own[rank]), name

                big = [everyones(7 + r, size, counts, torch.int64) for r in range(size)]
                output = torch.zeros(counts[rank], dtype=torch.int64)
                comm.reduce_scatter(output, big[rank], "max")
                assert torch.equal(output, reduced([parts[rank] for parts in big], "max")), name

                sent = [big[rank][(rank + r) % size] for r in range(size)]
                outputs = [torch.zeros_like(big[r][(rank + r) % size]) for r in range(size)]
                comm.all_to_all(outputs, sent)
                assert all(torch.equal(found, big[r][(rank + r) % size]) for r, found in enumerate(outputs))

                lengths = [[len(part) for part in parts] for parts in (outputs, sent)]
                outputs = [torch.zeros_like(part) for part in outputs]
                comm.all_to_all(outputs, torch.cat(sent), None, lengths[1])
                assert all(torch.equal(found, big[r][(rank + r) % size]) for r, found in enumerate(outputs))
                output = torch.zeros(sum(lengths[0]), dtype=torch.int64)
                comm.all_to_all(output, sent, lengths[0])
                assert torch.equal(output, torch.cat(outputs)), name

        even = torch.arange(4.0 * size).view(2 * size, 2) + 100 * rank
        expected = torch.cat([even[2 * rank : 2 * rank + 2] + 100 * (r - rank) for r in range(size)])
        parts = [torch.zeros(2, 2) for _ in range(size)]
        comm.all_to_all(parts, even)
        assert torch.equal(torch.cat(parts), expected), name
        output = torch.zeros_like(even)
        comm.all_to_all_init(output, even.chunk(size))()
        assert torch.equal(output, expected), name


def check_scan(rank: int, size: int) -> None:
    for name, comm in communicators(rank, size):
        for dtype in [*FLOATS, torch.int32, torch.bool]:
            for op in ("sum", "max", "product"):
                for count in (0, 5, 300_001):
                    own = everyones(11, size, [count] * size, dtype)
                    tensor = own[rank].clone()
                    comm.scan(tensor, op)
                    same_bits(tensor, reduced(own[: rank + 1], op))
                    output = torch.zeros_like(tensor)
                    comm.scan(own[rank], op, exclusive=True, output=output)
                    same_bits(output, reduced(own[:rank], op) if rank else torch.zeros_like(tensor))
        total = torch.full((3,), rank + 1)
        comm.scan(total)
        assert (total == torch.arange(1, size + 1).cumsum(0)[rank]).all(), name


def check_out_of_place(rank: int, size: int) -> None:
    for name, comm in communicators(rank, size):
        own = everyones(3, size, [1000] * size, torch.int32)
        before, output = own[rank].clone(), torch.zeros(1000, dtype=torch.int32)
        comm.all_reduce(own[rank], "max", output=output)
        assert torch.equal(own[rank], before) and torch.equal(output, reduced(own, "max")), name
        transposed = torch.zeros(50, 20, dtype=torch.int32).t()
        comm.all_reduce(own[rank].view(20, 50), "max", output=transposed)
        assert torch.equal(transposed, reduced(own, "max").view(20, 50)), name
        work = comm.all_reduce(own[rank], output=output, async_op=True)
        work.wait()
        assert torch.equal(output, reduced(own, "sum")), name


def check_complex(rank: int, size: int) -> None:
    for name, comm in communicators(rank, size):
        tensor = torch.full((5,), complex(rank + 1, -rank))
        outputs = [torch.zeros(5, dtype=tensor.dtype) for _ in range(size)]
        comm.all_gather(outputs, tensor)
        assert [part[0] for part in outputs] == [complex(r + 1, -r) for r in range(size)], name
        total = comm.all_reduce_init(tensor)
        total()
        assert tensor[0] == complex(sum(range(1, size + 1)), -sum(range(size))), name


def check_arrays(rank: int, size: int) -> None:
    for name, comm in communicators(rank, size):
        array = np.full((4, 3), rank + 1.0)
        comm.all_reduce(array)
        assert (array == sum(range(1, size + 1))).all(), name
        columns = np.zeros((3, size)).T  # not contiguous
        comm.all_gather(columns, np.full((1, 3), float(rank)))
        assert columns[:, 0].tolist() == list(range(size)), name
        parts = [np.zeros(r + 1) for r in range(size)]
        comm.all_gather(parts, np.full(rank + 1, float(rank)))
        assert [part.sum() for part in parts] == [r * (r + 1) for r in range(size)], name
        constant = np.full(3, float(rank))
        constant.flags.writeable = False
        whole = np.zeros(3 * size)
        comm.all_gather(whole, constant)  # only read
        op = comm.broadcast_init(array, size - 1)
        array[:] = rank
        op()
        assert (array == size - 1).all(), name
        with pytest.raises(ValueError, match="expected a writable output array"):
            comm.all_reduce(constant)
        with pytest.raises(TypeError, match="expected a tensor or a NumPy array, got float"):
            comm.all_reduce(1.0)


def check_objects(rank: int, size: int) -> None:
    for name, comm in communicators(rank, size):
        for length in (0, 10, 900, 5000, 200_000):
            value = {"rank": rank, "text": "x" * (length * (rank % 2))}
            expected = [{"rank": r, "text": "x" * (length * (r % 2))} for r in range(size)]
            assert comm.all_gather_object(value) == expected, name
            for root in range(size):
                assert comm.broadcast_object(value if rank == root else None, root) == expected[root], name


def check_messages(rank: int, size: int) -> None:
    right, left = (rank + 1) % size, (rank - 1) % size
    for name, comm in communicators(rank, size):
        for count in (1, 200_000):
            received = torch.zeros(count)
            sent = comm.isend(torch.full((count,), float(rank)), right, 5)
            comm.irecv(received, left, 5).wait()
            sent.wait()
            assert (received == left).all(), name
            arrays = np.zeros(count), np.zeros(count)
            with comm.batch() as batch:
                for tag, array in enumerate(arrays):
                    batch.recv(array, left, tag)
                    batch.send(np.full(count, float(10 * rank + tag)), right, tag)
            assert [array[0] for array in arrays] == [10 * left, 10 * left + 1], name
        if rank == 0:
            assert sorted(comm.recv(torch.zeros(1)) for _ in range(size - 1)) == list(range(1, size)), name
        else:
            comm.send(torch.zeros(1), 0)
        comm.barrier()


def check_split(rank: int, size: int) -> None:
    comm = Communicator(dist.group.WORLD)
    half = comm.split(rank % 2)
    tensor = torch.tensor([float(rank)])
    half.all_reduce(tensor)
    assert tensor == sum(r for r in range(size) if r % 2 == rank % 2)
    alone = comm.split(None if rank else 7)
    assert (alone is None) == (rank > 0)
    assert rank or (alone.rank, alone.size) == (0, 1)
    comm.barrier()


def check_splits_with_different_histories(rank: int, size: int) -> None:
    """Groups that only some ranks are in do not affect the groups that are created next."""
    draw = random.Random(size)
    for comm in (Communicator(dist.group.WORLD), Communicator(dist.new_group())):
        for _ in range(12):
            colors = [draw.choice([None, 0, 1]) for _ in range(size)]
            part = comm.split(colors[rank])
            if part is None:
                continue
            members = [r for r in range(size) if colors[r] == colors[rank]]
            assert (part.rank, part.size) == (members.index(rank), len(members))
            tensor = torch.tensor([float(rank)])
            part.all_reduce(tensor)
            assert tensor == sum(members)
            deeper = part.split(None if part.rank == 0 else 5)
            assert deeper is None or deeper.size == part.size - 1


def check_invalid(rank: int, size: int) -> None:
    """All ranks detect the same mistake; nothing is sent, and the group stays usable."""
    three, four = torch.zeros(3), torch.zeros(4)
    for name, comm in communicators(rank, size):
        cases = [
            (lambda comm: comm.all_reduce(three, "mean"), "expected the reduction to be one of sum.*, got mean"),
            (lambda comm: comm.all_reduce(three, "and"), "reduction and does not support torch.float32"),
            (lambda comm: comm.all_reduce(three, output=four), "got 3 for the input and 4 for the output"),
            (lambda comm: comm.all_reduce(three, output=three.long()), "expected tensors of one dtype, got"),
            (lambda comm: comm.reduce(three, size), rf"expected the root to be between 0 and .*, got {size}"),
            (lambda comm: comm.broadcast(three, -1), "expected the root to be between 0 and .*, got -1"),
            (lambda comm: comm.all_gather(four, three), f"got 4 for the output and {3 * size} for all inputs together"),
            (lambda comm: comm.all_gather([three] * (size + 1), three), "for the output list"),
            (lambda comm: comm.all_gather([four] * size, three), "got 3 for this rank's input and 4 for this rank's output|got 4 for the output"),
            (lambda comm: comm.all_gather([], three), f"all_gather: .* got 0 for the output list and {size} for the group"),
            (lambda comm: comm.all_gather([], three, async_op=True), "got 0 for the output list"),
            (lambda comm: comm.all_gather_init([], three), "got 0 for the output list"),
            (lambda comm: comm.reduce_scatter(three, []), f"got 0 for the input list and {size} for the group"),
            (lambda comm: comm.reduce_scatter_init(three, []), "got 0 for the input list"),
            (lambda comm: comm.all_to_all([], []), f"got 0 for the output list and {size} for the group"),
            (lambda comm: comm.all_to_all([three] * size, []), "got 0 for the input list"),
            (lambda comm: comm.all_to_all([three] * size, [three]), f"got 1 for the input list and {size} for the group"),
            (lambda comm: comm.all_to_all([three] * size, [three] * size, None, [3] * size), "expected a tensor with input splits, got a list; omit the splits"),
            (lambda comm: comm.all_to_all([three] * size, torch.zeros(3 * size), [3] * size), "expected a tensor with output splits, got a list"),
            (lambda comm: comm.all_to_all([three], [three] * size), f"got 1 for the output list and {size} for the group"),
            (lambda comm: comm.reduce_scatter(three, four), f"got 4 for the input and {3 * size} for all outputs together"),
            (lambda comm: comm.reduce_scatter(three, [four] * size), "got 4 for this rank's input|got 4 for the input"),
            (lambda comm: comm.gather(three, [three] * size, 0, counts=[3]), "got 1 for the list of counts"),
            (lambda comm: comm.gather(three, [four] * size, 0, counts=[4] * size), "got 3 for this rank's tensor"),
            (lambda comm: comm.all_to_all(torch.zeros(2 * size + 1), torch.zeros(2 * size + 1)), "expected a multiple of"),
            (lambda comm: comm.all_to_all([three] * size, [four] * size), "got 4 for this rank's part of the input"),
            (lambda comm: comm.scan(three, "avg"), "scan: expected one of the reductions 'sum'"),
            (lambda comm: comm.all_reduce_init(three, "xor"), "xor does not support"),
            (lambda comm: comm.broadcast_init(three, size), "expected the root to be between 0 and"),
            (lambda comm: comm.send(three, size), "send: expected the destination to be between"),
            (lambda comm: comm.recv(three, -1), "recv: expected the source to be between .*, got -1"),
            (lambda comm: comm.create_group([]), r"expected distinct members between 0 and .*, got \[\]"),
            (lambda comm: comm.create_group([rank, rank]), rf"expected distinct members .*, got \[{rank}, {rank}\]"),
            (lambda comm: comm.create_group([rank, size]), rf"expected distinct members .*, got \[{rank}, {size}\]"),
            (lambda comm: comm.create_group([-1, rank]), rf"expected distinct members .*, got \[-1, {rank}\]"),
            (lambda comm: comm.create_group([(rank + 1) % size]), rf"including this rank \({rank}\), got"),
            (lambda comm: comm.set_roles(["worker"] * (size + 1)), f"expected a role for each of the {size} ranks, got {size + 1}"),
        ]  # fmt: skip
        for call, saying in cases:
            with pytest.raises(ValueError, match=saying):
                call(comm)
        if rank == 0 and size > 1:
            with pytest.raises(ValueError, match="expected 3 elements for rank 0, got 4; .* pass `counts`"):
                comm.gather(three, [four] * size)
        tensor = torch.ones(2)
        comm.all_reduce(tensor)
        assert (tensor == size).all(), name


def check_direct_path(rank: int, size: int) -> None:
    """The direct path is used exactly where it applies; elsewhere, the general path gives the same results."""
    comm = Communicator(dist.group.WORLD)
    direct = comm.dispatcher.direct
    assert direct.all_reduce(torch.ones(3), "sum") and direct.broadcast(torch.ones(3), 0) and direct.barrier()
    assert direct.all_gather(torch.ones(3 * size), torch.ones(3))
    assert direct.reduce_scatter(torch.ones(3), torch.ones(3 * size), "max")
    assert direct.all_to_all(torch.ones(size, 2), torch.ones(size, 2))
    conjugated = torch.complex(torch.ones(3), torch.ones(3)).conj().imag
    for odd in (torch.ones(4, 2).t(), conjugated, torch.ones(3, dtype=torch.complex64), torch.empty(0)):
        assert not direct.all_reduce(odd, "sum")
        assert (
            not direct.all_gather(torch.ones(odd.numel() * size, dtype=odd.dtype), odd)
            or odd.dtype.is_complex
        )
    assert not direct.all_reduce(torch.ones(3), "and") and not direct.all_reduce(torch.ones(3), "mean")
    assert not direct.broadcast(torch.ones(3), size) and not direct.broadcast(torch.ones(3), -1)
    assert not direct.all_gather(torch.ones(3 * size), torch.ones(4))
    assert not direct.all_gather(torch.ones(3 * size), torch.ones(3).long())
    assert not direct.all_to_all(torch.ones(2 * size + 1), torch.ones(2 * size + 1))
    work = dist.all_reduce(torch.ones(500_000), async_op=True) if rank else None
    if rank:
        assert not direct.all_reduce(torch.ones(3), "sum") or work.is_completed()
        work.wait()
    else:
        time.sleep(0.1)
        dist.all_reduce(torch.ones(500_000))


@pytest.mark.parametrize(
    "check",
    [
        check_uneven,
        check_scan,
        check_out_of_place,
        check_complex,
        check_arrays,
        check_objects,
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_on_every_implementation(ranks, size, check):
    ranks(size).run(check)


@pytest.mark.parametrize("check", [check_messages, check_split, check_invalid])
@pytest.mark.parametrize("size", [2, 4])
def test_on_several_ranks(ranks, size, check):
    ranks(size).run(check)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_splits_with_different_histories(ranks, size, backend):
    ranks(size, backend).run(check_splits_with_different_histories)


def test_the_direct_path(ranks):
    ranks(2).run(check_direct_path)


def check_receive_buffers(rank: int, size: int) -> None:
    core = Communicator(dist.group.WORLD).dispatcher.core
    used = core.host.core.frd_arena_used
    before = used()
    address = core.receive_buffer((1 << 20,), torch.float32).data_ptr()
    assert core.receive_buffer((1 << 20,), torch.float32).data_ptr() == address
    buffers = [core.receive_buffer((4 << 20,), torch.float32) for _ in range(10)]
    assert used() - before >= 96 << 20  # up to 64 MiB may have been kept before
    buffers.clear()
    assert used() - before <= 64 << 20


def test_freed_receive_buffers_are_reused(ranks):
    ranks(2).run(check_receive_buffers)
