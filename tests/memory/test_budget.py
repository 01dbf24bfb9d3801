"""What a step costs on the disk, and how fast the disk is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from benchmarks import offload
from farandole.memory.budget import Bandwidth, Budget, measure_bandwidth
from farandole.memory.errors import NoSpace
from farandole.memory.file_system import free_bytes
from tests.memory.disks import ext4, in_memory


def test_seconds_are_bytes_over_bandwidth() -> None:
    bandwidth = Bandwidth(read=2 << 30, write=1 << 30, access="ext4, direct")
    budget = Budget.of_records([1 << 30, 1 << 30], bandwidth)
    assert budget.seconds == 3.0
    assert str(budget) == (
        "each step reads 2.0 GiB and writes 2.0 GiB: about 3 s at 2.0 GiB/s read, 1.0 GiB/s write (ext4, direct)"
    )
    assert str(Budget(512, 0)) == "each step reads 512 bytes and writes 0 bytes"
    assert Budget(512, 0).seconds is None


def test_the_probe_is_short_and_leaves_nothing(tmp_path: Path) -> None:
    with ext4(tmp_path / "image", tmp_path / "disk", "64m") as disk:
        before, start = free_bytes(disk), time.monotonic()
        found = measure_bandwidth(disk, limit_bytes=24 << 20)
        assert time.monotonic() - start < 5
        assert 1 << 20 < found.read < 1 << 40 and 1 << 20 < found.write < 1 << 40
        assert found.access.endswith("direct")
        assert free_bytes(disk) == before


def test_a_disk_without_room_for_the_probe_says_so(tmp_path: Path) -> None:
    with (
        in_memory(tmp_path / "disk", "2m") as disk,
        pytest.raises(NoSpace, match=r"takes 4\.0 MiB; 2\.0 MiB can be used"),
    ):
        measure_bandwidth(disk)


def test_the_benchmark_measures_itself(tmp_path: Path) -> None:
    result = offload.compare(str(tmp_path), 48 << 20, 8 << 20, turns=1)
    assert result["records"] == 6
    assert result["moved_bytes"] == pytest.approx(2 * 48 << 20, rel=1e-4)
    assert result["share_of_plain"] > 0.1  # far below what is seen: others may use the machine
    assert "AdamW, state on the disk" in offload.table(result)
    assert "of the plain bandwidth" in offload.remarks(result)


def test_measuring_draws_none_of_the_random_numbers_of_others(tmp_path):
    before = torch.get_rng_state()
    measure_bandwidth(tmp_path, 16 << 20)
    assert torch.equal(torch.get_rng_state(), before)
