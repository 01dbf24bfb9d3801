"""Checks of memory limits and memory tracking, against torch's allocator."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.reference import batches, expect, loss_of, make, sgd, small
from benchmarks.gpu.registry import Context, Figures, check
from farandole.memory.dry_run import saved_bytes
from farandole.memory.tracker import DeviceMemory, OutOfDeviceMemory

_MIB = 1 << 20


def _allocate_to_the_limit(context: Context, limit: int) -> int:
    """Allocate until the limit is exceeded, and return the number of allocated bytes."""
    kept: list[Tensor] = []
    with DeviceMemory(limit, torch.device(context.device.type)) as memory:
        try:
            while len(kept) < 100:
                kept.append(torch.ones(limit // 40, device=context.device))
        except OutOfDeviceMemory as error:
            expect(error.limit == limit, f"expected the limit {limit}, got {error.limit}")
            expect("activations" in str(error), f"expected the message to name activations, got {error}")
        else:
            raise AssertionError(f"expected OutOfDeviceMemory at {limit} bytes, got {memory.total} bytes")
        return memory.total


@check()
def limit(context: Context) -> Figures:
    """Check that exceeding a limit raises `OutOfDeviceMemory`, and that the limit ends with its context."""
    limit = (512 if context.on_cuda else 16) * _MIB
    reached = _allocate_to_the_limit(context, limit)
    expect(limit * 0.7 <= reached <= limit, f"expected 70 % to 100 % of {limit} bytes, got {reached}")
    torch.ones(limit // 2, device=context.device)  # exceeds the limit, which has ended
    return {"limit": (limit / _MIB, "MiB"), "reached": (reached / _MIB, "MiB")}


@check(ranks=2)
def limits_of_ranks(context: Context) -> Figures:
    """Set a different limit on each of the ranks that share a device."""
    limit = (256 if context.on_cuda else 8) * _MIB * (1 + context.comm.rank)
    reached = _allocate_to_the_limit(context, limit)
    expect(limit * 0.6 <= reached <= limit, f"expected 60 % to 100 % of {limit} bytes, got {reached}")
    context.comm.barrier()
    return {"reached": (reached / _MIB, "MiB")}


@check()
def counts(context: Context) -> Figures:
    """Compare the tracked memory of a training step with torch's allocator."""
    config = small(context)
    with DeviceMemory(None, context.device) as memory:
        before = torch.cuda.memory_allocated(context.device) if context.on_cuda else 0
        model = make(context, config)
        memory.watch(model)
        optimizer = sgd(model.parameters())
        for tokens in batches(context, config):
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        counted = memory.total
        expect(memory.peak >= 3 * parameters, f"expected a peak above {3 * parameters}, got {memory.peak}")
        figures: Figures = {"counted": (counted / _MIB, "MiB"), "peak": (memory.peak / _MIB, "MiB")}
        if context.on_cuda:
            allocated = torch.cuda.memory_allocated(context.device) - before
            figures["allocated"] = (allocated / _MIB, "MiB")
            # torch's allocator rounds to 512 bytes, and keeps cuBLAS workspaces
            expect(abs(counted - allocated) <= 64 * _MIB, f"expected about {allocated} bytes, got {counted}")
    return figures


@check()
def saved_for_backward(context: Context) -> Figures:
    """Compare the predicted and measured memory of the tensors saved for a backward pass."""
    config = small(context)
    model, tokens = make(context, config), batches(context, config)[0][:, :-1].contiguous()
    predicted = saved_bytes(model, tokens).total
    real = saved_bytes(model, tokens, real=True).total
    expect(predicted == real, f"expected {real} bytes as with real tensors, got {predicted}")
    figures: Figures = {"predicted": (predicted / _MIB, "MiB")}
    if context.on_cuda:
        model(tokens).sum().backward()  # allocates the workspaces
        model.zero_grad()
        before = torch.cuda.memory_allocated(context.device)
        output = model(tokens)
        kept = torch.cuda.memory_allocated(context.device) - before
        del output
        figures["allocated"] = (kept / _MIB, "MiB")
        expect(abs(kept - predicted) <= 0.1 * kept, f"expected about {kept} bytes, got {predicted}")
    return figures
