"""Checks of collectives among ranks that share a device: results against formulas, and times against torch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.reference import expect, expect_close, milliseconds
from benchmarks.gpu.registry import Context, Figures, check

_COUNT = 12 * 1024
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)


def _inputs(context: Context, dtype: torch.dtype) -> list[Tensor]:
    """Return the inputs of all ranks, on the CPU."""
    size = context.comm.size
    return [
        torch.randint(1, 8, (_COUNT,), generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(size)
    ]


def _all(context: Context) -> Figures:
    comm, device = context.comm, context.device
    rank, size = comm.rank, comm.size
    if context.on_cuda:
        expect(
            device.index < torch.cuda.device_count(),
            f"expected one of the {torch.cuda.device_count()} devices, got {device}",
        )
    worst, count = 0.0, 0

    def same(what: str, found: Tensor, expected: Tensor, tolerance: float = 0.0) -> None:
        nonlocal worst, count
        expect(found.device.type == device.type, f"{what}: expected a tensor on {device}, got {found.device}")
        worst = max(worst, expect_close(found, expected.to(found.dtype), tolerance, what))
        count += 1

    for dtype in _TYPES:
        inputs = _inputs(context, dtype)
        own = inputs[rank].to(device)
        total = torch.stack(inputs).double().sum(0)
        tolerance = 2 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        for asynchronous in (False, True):
            tensor = own.clone()
            work = comm.all_reduce(tensor, async_op=asynchronous)
            if work is not None:
                work.wait()
            same(f"all_reduce of {dtype}", tensor, total, tolerance)
        if dtype.is_floating_point:
            tensor = own.clone()
            comm.all_reduce(tensor, "avg")
            same(f"average of {dtype}", tensor, total / size, tolerance)
        tensor = own.clone()
        comm.all_reduce(tensor, "max")
        same(f"maximum of {dtype}", tensor, torch.stack(inputs).amax(0))
        output = torch.empty(_COUNT * size, dtype=dtype, device=device)
        comm.all_gather(output, own)
        same(f"all_gather of {dtype}", output, torch.cat(inputs))
        output = torch.empty(_COUNT // size, dtype=dtype, device=device)
        comm.reduce_scatter(output, own)
        same(f"reduce_scatter of {dtype}", output, total.chunk(size)[rank], tolerance)
        output = torch.empty_like(own)
        comm.all_to_all(output, own)
        same(f"all_to_all of {dtype}", output, torch.cat([each.chunk(size)[rank] for each in inputs]))
        tensor = own.clone()
        comm.broadcast(tensor, size - 1)
        same(f"broadcast of {dtype}", tensor, inputs[-1])
        tensor = own.clone()
        comm.reduce(tensor, 0)
        same(f"reduce of {dtype}", tensor, total if rank == 0 else inputs[rank], tolerance)
        rows = [torch.empty_like(own) for _ in range(size)] if rank == 0 else None
        comm.gather(own, rows)
        if rows is not None:
            same(f"gather of {dtype}", torch.cat(rows), torch.cat(inputs))
        tensor = torch.empty(_COUNT // size, dtype=dtype, device=device)
        comm.scatter(tensor, list(own.chunk(size)) if rank == 0 else None)
        same(f"scatter of {dtype}", tensor, inputs[0].chunk(size)[rank])
        tensor = own.clone()
        comm.scan(tensor)
        same(f"scan of {dtype}", tensor, torch.stack(inputs[: rank + 1]).double().sum(0), tolerance)
        right, left = (rank + 1) % size, (rank - 1) % size
        received = torch.empty_like(own)
        works = [comm.isend(own, right), comm.irecv(received, left)]
        for work in works:
            work.wait()
        same(f"messages of {dtype}", received, inputs[left])
    columns = _inputs(context, torch.float32)[rank].view(-1, 4).to(device)[:, 1]  # not contiguous
    comm.all_reduce(columns)
    expected = torch.stack([each.view(-1, 4)[:, 1] for each in _inputs(context, torch.float32)]).sum(0)
    same("all_reduce of a column", columns, expected)
    repeated = torch.ones(256, device=device)
    operation = comm.all_reduce_init(repeated)
    for _ in range(3):
        operation()
    same("a persistent all_reduce", repeated, torch.full((256,), float(size**3)))
    part = comm.split(color=rank % 2)
    tensor = torch.ones(16, device=device)
    part.all_reduce(tensor)
    same("all_reduce of a part of the ranks", tensor, torch.full((16,), float(part.size)))
    part.close()
    return {"calls compared": (float(count), ""), "largest difference": (worst, "")}


@check(ranks=2, deadline_s=90.0)
def two_ranks(context: Context) -> Figures:
    """Compare every collective and type on two ranks that share a device."""
    return _all(context)


@check(ranks=4, deadline_s=90.0)
def four_ranks(context: Context) -> Figures:
    """Compare every collective and type on four ranks that share a device."""
    return _all(context)


@check()
def next_to_torch(context: Context) -> Figures:
    """Measure the duration of calls on one rank, and compare it with torch's own backend."""
    plain = dist.new_group(backend="nccl" if context.on_cuda else "gloo")
    figures: Figures = {}
    sizes = {"4 KiB": 1 << 10, "1 MiB": 1 << 18, "64 MiB": 1 << 24} if context.on_cuda else {"4 KiB": 1 << 10}
    for name, count in sizes.items():
        tensor = torch.zeros(count, device=context.device)
        output = torch.empty_like(tensor)
        for call, function in {
            "all_reduce": lambda group, tensor=tensor: dist.all_reduce(tensor, group=group),
            "all_gather": lambda group, tensor=tensor, output=output: dist.all_gather_into_tensor(
                output, tensor, group=group
            ),
            "reduce_scatter": lambda group, tensor=tensor, output=output: dist.reduce_scatter_tensor(
                output, tensor, group=group
            ),
        }.items():
            own = milliseconds(context, lambda function=function: function(None))
            torchs = milliseconds(context, lambda function=function: function(plain))
            figures[f"{call} {name}"] = (1e3 * own, "us")
            figures[f"{call} {name}, torch"] = (1e3 * torchs, "us")
    return figures


@check(ranks=2)
def speed_on_a_shared_device(context: Context) -> Figures:
    """Measure the bandwidth of collectives through the host, on two ranks."""
    comm = context.comm
    count = (64 if context.on_cuda else 1) << 18
    tensor = torch.zeros(count, device=context.device)
    gathered = torch.empty(comm.size * count, device=context.device)
    calls = {
        "all_reduce": lambda: comm.all_reduce(tensor),
        "all_gather": lambda: comm.all_gather(gathered, tensor),
        "reduce_scatter": lambda: comm.reduce_scatter(tensor, gathered),
    }
    seconds = {name: milliseconds(context, call, repeats=5) / 1e3 for name, call in calls.items()}
    return {name: (tensor.nbytes / value / 1e9, "GB/s") for name, value in seconds.items()}
