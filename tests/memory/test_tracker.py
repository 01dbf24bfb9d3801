"""Device memory is counted by kind, and its limit is enforced."""

from __future__ import annotations

import gc
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from farandole.memory.recompute import apply_recompute
from farandole.memory.tracker import DeviceMemory, OutOfDeviceMemory, memory_tag

CPU = torch.device("cpu")


def test_every_storage_is_counted_once_until_it_is_freed() -> None:
    with DeviceMemory(None, CPU) as memory:
        first = torch.zeros(1000)
        view = first[:10].view(5, 2).t()
        second = torch.ones(500, dtype=torch.bfloat16)
        assert memory.total == 4000 + 1000
        del first
        assert memory.total == 5000  # the view keeps the memory
        del view, second
        assert memory.total == 0
        assert memory.peak == 5000


def test_existing_memory_is_counted_at_its_first_use() -> None:
    data = torch.frombuffer(bytearray(400), dtype=torch.float32)
    with DeviceMemory(None, CPU) as memory:
        assert memory.total == 0
        data[:3].mul_(2)
        assert memory.total == 400
        other = torch.zeros(100)
        other.untyped_storage().resize_(0)
        other.view(-1)
        assert memory.total == 400


def test_kinds_and_memory_shared_by_ranks() -> None:
    with DeviceMemory(None, CPU) as memory:
        with memory_tag("weights", ranks=4):
            common = torch.empty(1000)
        with memory_tag("gradients"):
            own = torch.empty(100)
        model = nn.Linear(10, 10, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        model(torch.ones(1, 10)).sum().backward()
        before = memory.in_use["masters and states"]
        optimizer.step()
        assert memory.in_use["weights"] == common.nbytes // 4
        assert memory.in_use["gradients"] == own.nbytes
        assert before == 0
        assert memory.in_use["masters and states"] == 2 * 400 + 4  # two moments and the step count


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_activations_match_the_tensors_saved_by_autograd(recompute: str) -> None:
    """In a chain of tanh layers, every output is saved, or with recomputation only the inputs of the blocks."""
    model = nn.Sequential(*(nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh()) for _ in range(4)))
    apply_recompute(model, recompute)  # type: ignore[arg-type]
    x = torch.ones(1000, requires_grad=True)
    with DeviceMemory(None, CPU) as memory:
        output = model(x)
        assert memory.in_use["activations"] == 4000 * (1 + (12 if recompute == "none" else 4))
        output.sum().backward()
        del output
        gc.collect()
        assert memory.total == 4000 * 2  # x and its gradient


def test_the_limit_names_the_block_and_the_step() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 1000), nn.Linear(1000, 10))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    with DeviceMemory(weights + 4_500, CPU) as memory:
        memory.watch(model)
        memory.step = 3
        with pytest.raises(
            OutOfDeviceMemory, match="in step 3, in the forward pass of block 2: 3.9 KiB requested"
        ):
            model(torch.ones(1, 100))
        assert memory.peak <= weights + 4_500

    with DeviceMemory(weights + 30_000, CPU) as memory:
        memory.watch(model)
        loss = model(torch.ones(1, 100)).sum()
        with pytest.raises(OutOfDeviceMemory, match="in the backward pass of block 3") as caught:
            loss.backward()
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == str(caught.value)
    assert error.requested == 40_000  # the gradient of the last weight
    assert error.in_use["weights"] == weights


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_enforces_the_limit_itself() -> None:
    device = torch.device("cuda", 0)
    with DeviceMemory(64 << 20, device) as memory:
        kept = torch.empty(32 << 20, dtype=torch.uint8, device=device)
        assert memory.total == kept.nbytes
        with (
            pytest.raises(OutOfDeviceMemory, match="more memory requested for gradients"),
            memory_tag("gradients"),
        ):
            torch.empty(64 << 20, dtype=torch.uint8, device=device)
    torch.empty(64 << 20, dtype=torch.uint8, device=device)


def test_tensors_freed_by_other_threads_are_subtracted() -> None:
    with DeviceMemory(None, CPU) as memory, ThreadPoolExecutor(4) as threads:
        for _ in range(50):
            held = [[torch.empty(10)] for _ in range(20)]
            list(threads.map(list.clear, held))
        assert memory.total == 0


def test_the_limit_names_the_parameter() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    with DeviceMemory(1000, CPU) as memory:
        memory.watch(model)
        with (
            pytest.raises(
                OutOfDeviceMemory, match="before the first step: 400 bytes requested for weights of 1.weight"
            ),
            memory_tag("weights", [model[1].weight]),
        ):
            torch.empty(10, 10)
        with (
            pytest.raises(OutOfDeviceMemory, match="gradients of 0.weight to 1.bias"),
            memory_tag("gradients", list(model.parameters())),
        ):
            torch.empty(10, 10)
    torch.empty(10, 10)  # the limit no longer applies
    with pytest.raises(ValueError, match="expected at least 1"):
        DeviceMemory(0, CPU)
