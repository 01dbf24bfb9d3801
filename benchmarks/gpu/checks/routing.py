"""Checks of routing: CUDA tensors use NCCL, or the host if ranks share a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu.reference import (
    SAMPLES,
    batches,
    expect,
    expect_close,
    largest_difference,
    loss_of,
    make,
    sgd,
    train_alone,
)
from benchmarks.gpu.registry import Context, Figures, Skip, check
from farandole.comm.communicator import Communicator

_ELEMENTS = 1 << 16


def _plain_group(context: Context) -> Any:
    """Return a group with torch's own backend for the device."""
    return dist.new_group(backend="nccl" if context.on_cuda else "gloo")


def _calls(context: Context, group: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Call every collective of `torch.distributed` in `group`, and return the results by name."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(0, 9, (size, 1024), generator=generator).to(context.device, dtype)

    def filled(count: int = 1) -> Tensor:
        return torch.zeros(count, values.numel(), device=context.device, dtype=dtype).squeeze(0)

    found: dict[str, Tensor] = {}
    found["all_reduce"] = values.clone()
    dist.all_reduce(found["all_reduce"], group=group)
    found["all_reduce max"] = values.clone()
    dist.all_reduce(found["all_reduce max"], dist.ReduceOp.MAX, group=group)
    found["asynchronous"] = values.clone()
    work = dist.all_reduce(found["asynchronous"], group=group, async_op=True)
    assert work is not None
    work.wait()
    found["broadcast"] = values.clone()
    dist.broadcast(found["broadcast"], size - 1, group=group)
    found["reduce"] = values.clone()
    dist.reduce(found["reduce"], 0, group=group)
    if rank:  # the result is undefined on other ranks
        found["reduce"].zero_()
    found["all_gather_into_tensor"] = filled(size)
    dist.all_gather_into_tensor(found["all_gather_into_tensor"].view(-1), values.view(-1), group=group)
    parts = [torch.zeros_like(values) for _ in range(size)]
    dist.all_gather(parts, values, group=group)
    found["all_gather"] = torch.stack(parts)
    found["reduce_scatter_tensor"] = torch.zeros_like(values[0])
    dist.reduce_scatter_tensor(found["reduce_scatter_tensor"], values.view(-1), group=group)
    found["all_to_all_single"] = torch.zeros_like(values)
    dist.all_to_all_single(found["all_to_all_single"], values, group=group)
    gathered = [torch.zeros_like(values) for _ in range(size)] if rank == 0 else None
    dist.gather(values, gathered, 0, group=group)
    found["gather"] = torch.stack(gathered) if gathered else torch.zeros(0)
    found["scatter"] = torch.zeros_like(values[0])
    dist.scatter(found["scatter"], list(values) if rank == 0 else None, 0, group=group)
    dist.barrier(group=group)
    return found


_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)


@check(deadline_s=90.0)
def one_rank(context: Context) -> Figures:
    """Compare every collective of torch.distributed with torch's backend, on one rank."""
    world, plain = dist.group.WORLD, _plain_group(context)
    count = 0
    for dtype in _TYPES:
        if not context.on_cuda and dtype in (torch.bfloat16, torch.uint8):
            continue  # the sums that torch's Gloo computes depend on the torch version
        own, expected = _calls(context, world, dtype), _calls(context, plain, dtype)
        for name, value in expected.items():
            expect(
                torch.equal(own[name], value), f"{name} of {dtype}: expected the result of torch's backend"
            )
            count += 1
    if context.on_cuda:
        group: Any = world
        expect(
            group._device_fallback._group is not None,
            "expected that the first CUDA tensor creates an NCCL group, got none",
        )
        expect(group._fallback._group is None, "expected no Gloo group for CUDA tensors, got one")
    average = torch.full((8,), 3.0, device=context.device)
    context.comm.all_reduce(average, "avg")
    expect(bool((average == 3).all()), f"avg: expected 3, got {average}")
    return {"calls compared": (float(count), "")}


@check()
def mixed_groups(context: Context) -> Figures:
    """Reduce CPU and CUDA tensors alternately in groups with one backend per device."""
    names = (
        ["cpu:gloo,cuda:nccl", "cpu:farandole,cuda:nccl", "farandole"]
        if context.on_cuda
        else ["gloo", "cpu:farandole,cuda:gloo", "farandole"]
    )
    for name in names:
        comm = Communicator(dist.new_group(backend=name))
        for device in ("cpu", context.device, "cpu"):
            tensor = torch.arange(1000.0, device=device)
            comm.all_reduce(tensor)
            expect(
                torch.equal(tensor.cpu(), torch.arange(1000.0)),
                f"{name}: expected an unchanged sum on {device}, got {tensor[:3]}",
            )
            work = comm.all_reduce(tensor, async_op=True)
            assert work is not None
            work.wait()
        gathered = comm.all_gather_object("x")
        expect(gathered == ["x"], f"{name}: expected the object ['x'], got {gathered}")
    return {"groups": (float(len(names)), "")}


@check(on_cpu=False)
def batch_to_self(context: Context) -> Figures:
    """Send a batch of messages from one rank to itself in one NCCL group."""
    sent = [torch.full((1 << 20,), float(n), device=context.device) for n in range(4)]
    received = [torch.zeros_like(tensor) for tensor in sent]
    with context.comm.batch() as batch:
        for tensor in sent:
            batch.send(tensor, 0)
        for tensor in received:
            batch.recv(tensor, 0)
    for number, tensor in enumerate(received):
        expect(bool((tensor == number).all()), f"message {number}: expected {number}, got {tensor[:3]}")
    return {"messages": (float(len(sent)), "")}


@check(ranks=2)
def batch_of_two(context: Context) -> Figures:
    """Call `batch_isend_irecv` with 8 MiB messages on two ranks that both send first."""
    comm, peer = context.comm, 1 - context.comm.rank
    count = 1 << (21 if context.on_cuda else 18)
    sent = [torch.full((count,), 10.0 * comm.rank + n, device=context.device) for n in range(3)]
    received = [torch.zeros_like(tensor) for tensor in sent]
    messages = [dist.P2POp(dist.isend, tensor, peer) for tensor in sent]
    messages += [dist.P2POp(dist.irecv, tensor, peer) for tensor in received]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    for number, tensor in enumerate(received):
        expected = 10.0 * peer + number
        expect(bool((tensor == expected).all()), f"message {number}: expected {expected}, got {tensor[:3]}")
    return {"messages": (float(len(sent)), "")}


@check(ranks=3)
def message_between_two_of_three(context: Context) -> Figures:
    """Send a first message between two ranks, which must not wait for the third rank."""
    comm = context.comm
    tensor = torch.full((1000,), float(comm.rank), device=context.device)
    if comm.rank == 0:
        comm.send(tensor, 1)
    elif comm.rank == 1:
        comm.recv(tensor, 0)
        expect(bool((tensor == 0).all()), f"expected 0, got {tensor[:3]}")
    return {}


@check()
def functional(context: Context) -> Figures:
    """Call the functional collectives that torch's compiler and DTensor use."""
    from torch.distributed import _functional_collectives as functional_collectives

    group: Any = dist.group.WORLD
    tensor = torch.arange(64.0, device=context.device)
    expect(
        torch.equal(functional_collectives.all_reduce(tensor, "sum", group) + 0, tensor),
        "all_reduce: expected the input of the only rank",
    )
    expect(
        torch.equal(functional_collectives.all_gather_tensor(tensor, 0, group) + 0, tensor),
        "all_gather_tensor: expected the input of the only rank",
    )
    expect(
        torch.equal(functional_collectives.reduce_scatter_tensor(tensor, "sum", 0, group) + 0, tensor),
        "reduce_scatter_tensor: expected the input of the only rank",
    )
    return {}


def _train(
    context: Context, wrap: Callable[[nn.Module], nn.Module], whole: Callable[[Tensor], Tensor]
) -> Figures:
    """Train a model that torch parallelizes, and compare its parameters with the parameters from a single process."""
    expected, _ = train_alone(context, sgd)
    comm = context.comm
    model = make(context)
    wrapped = wrap(model)
    optimizer = sgd(wrapped.parameters())
    for tokens in batches(context):
        own = tokens.split(SAMPLES // comm.size)[comm.rank]
        loss_of(wrapped, own).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {
        name.removeprefix("module."): whole(p.detach()).clone() for name, p in wrapped.named_parameters()
    }
    difference = largest_difference(found, expected)
    expect(difference < 2e-3, f"expected a difference below 2e-3, got {difference}")
    return {"difference": (difference, "")}


def _ddp(context: Context) -> Figures:
    ids = [context.device.index] if context.on_cuda else None
    return _train(
        context,
        lambda model: nn.parallel.DistributedDataParallel(model, device_ids=ids),
        lambda tensor: tensor,
    )


def _fsdp2(context: Context) -> Figures:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(context.device.type, (context.comm.size,))

    def wrap(model: nn.Module) -> nn.Module:
        for block in list(model.children())[1:-1]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    return _train(context, wrap, lambda tensor: tensor.full_tensor())  # type: ignore[operator]


@check()
def ddp_one_rank(context: Context) -> Figures:
    """Train with torch's DDP on one rank, over NCCL on a GPU."""
    return _ddp(context)


@check(ranks=2)
def ddp(context: Context) -> Figures:
    """Train with torch's DDP on ranks that share a device."""
    return _ddp(context)


@check()
def fsdp2_one_rank(context: Context) -> Figures:
    """Train with torch's FSDP2 on one rank, over NCCL on a GPU."""
    return _fsdp2(context)


@check(ranks=2)
def fsdp2(context: Context) -> Figures:
    """Train with torch's FSDP2 on ranks that share a device."""
    return _fsdp2(context)


@check(ranks=2, on_cpu=False)
def side_streams(context: Context) -> Figures:
    """Reduce tensors that kernels on another stream still write when the collective is called."""
    comm, side = context.comm, torch.cuda.Stream(context.device)
    large = torch.randn(4096, 4096, device=context.device)
    wrong = 0
    for turn in range(10):
        side.wait_stream(torch.cuda.current_stream(context.device))
        with torch.cuda.stream(side):
            product = large
            for _ in range(10):  # delays the tensor below by a few milliseconds
                product = product @ large * 1e-3
            late = torch.full((_ELEMENTS,), float(turn + comm.rank), device=context.device)
            work = comm.all_reduce(late, async_op=True)
            assert work is not None
            work.wait()
            wrong += int(not bool((late == 2 * turn + 1).all()))
            del product
        torch.cuda.current_stream(context.device).wait_stream(side)
    expect(wrong == 0, f"expected 10 correct sums, got {10 - wrong}")
    return {"sums": (10.0, "")}


@check(needs=("mpi4py",))
def mpi(context: Context) -> Figures:
    """Call collectives over MPI.COMM_SELF, with pinned memory or, for a CUDA-aware MPI, device addresses."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise Skip(f"mpi4py cannot load an MPI library: {error}") from None
    from farandole.comm.mpi.cuda import is_aware

    comm = Communicator.from_mpi(MPI.COMM_SELF)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = torch.arange(1000, device=context.device).to(dtype)
        output = torch.empty_like(tensor)
        comm.all_gather(output, tensor)
        expect(torch.equal(output, tensor), f"all_gather of {dtype}: expected the input of the only rank")
        comm.all_reduce(tensor)
        expect_close(tensor, output, 0.0, f"all_reduce of {dtype}")
    comm.close()
    return {"CUDA-aware": (float(is_aware()), "")}
