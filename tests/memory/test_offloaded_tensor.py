"""A tensor in a record of a store has the values that were written last, or raises an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from farandole.memory.disk import OffloadError
from farandole.memory.offload_store import DiskStore, HostStore
from farandole.memory.offloaded_tensor import OffloadedTensor, OffloadedTensors

CPU = torch.device("cpu")


@pytest.fixture(params=["disk", "host"])
def tensors(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OffloadedTensors]:
    made = OffloadedTensors(DiskStore(tmp_path) if request.param == "disk" else HostStore())
    yield made
    made.close()


def _write(tensor: OffloadedTensor, value: float) -> None:
    memory = tensor.empty()
    memory.fill_(value)
    tensor.write(memory)


@pytest.mark.parametrize("numel", [0, 1, 1000, 3_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_written_values_are_read(tensors: OffloadedTensors, numel: int, dtype: torch.dtype) -> None:
    tensor = tensors.make(numel, dtype, CPU)
    for value in (1.0, 2.0):
        _write(tensor, value)
        assert torch.equal(tensor.read(), torch.full((numel,), value, dtype=dtype))
        tensor.prefetch()  # useless, because other values are written
    _write(tensor, 3.0)
    tensor.prefetch()
    assert torch.equal(tensor.read(), torch.full((numel,), 3.0, dtype=dtype))
    tensor.prefetch()
    tensor.drop()
    changed = tensor.read()
    changed.mul_(2)
    tensor.write(changed)
    assert torch.equal(tensor.read(), torch.full((numel,), 6.0, dtype=dtype))


def test_many_at_a_time(tensors: OffloadedTensors) -> None:
    many = [tensors.make(100_000 + n, torch.float32, CPU) for n in range(20)]
    for _ in range(2):
        for number, tensor in enumerate(many):
            _write(tensor, number)
    for ahead, tensor in zip([*many[1:], many[0]], many, strict=True):
        ahead.prefetch()
        assert (tensor.read() == many.index(tensor)).all()


def test_reading_an_unwritten_tensor_is_an_error(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, "gradients")
    tensors = OffloadedTensors(store)
    one, *others = [tensors.make(1000, torch.float32, CPU) for _ in range(3)]
    with mock.patch.object(store._file, "write", side_effect=OSError(28, "No space left on device")):
        _write(one, 1.0)
        store.wait_until_done()
    with pytest.raises(OffloadError, match="cannot write record 0 of gradients: No space left on device"):
        one.read()
    _write(others[0], 1.0)
    with pytest.raises(OffloadError, match="cannot write record 0"):  # the next write raises the error, too
        _write(others[1], 1.0)
    _write(one, 2.0)
    assert (one.read() == 2).all()
    tensors.close()
