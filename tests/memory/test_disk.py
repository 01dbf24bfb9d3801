"""The file system of a folder, errors without space, and the cost of a step on the disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.memory.disk import (
    Bandwidth,
    Budget,
    NoSpace,
    OffloadError,
    file_system,
    free_bytes,
    require_folder,
    require_space,
)
from tests.memory.disks import in_memory


def test_type_and_device_match_df(tmp_path: Path) -> None:
    df = subprocess.run(["df", "--output=fstype,source,target", tmp_path], capture_output=True, text=True)
    if df.returncode != 0 or sys.platform != "linux":
        pytest.skip("no df --output here")
    kind, device, target = df.stdout.splitlines()[1].split()
    found = file_system(tmp_path)
    assert (found.kind, found.mounted) == (kind, target)
    assert found.device == device or kind == "overlay"


def test_folders_below_a_mount_point_whose_name_may_have_spaces(tmp_path: Path) -> None:
    with in_memory(tmp_path / "a disk", "1m") as disk:
        (disk / "below").mkdir()
        found = file_system(disk / "below")
        assert (found.kind, found.mounted, found.in_memory) == ("tmpfs", str(disk), True)
        assert free_bytes(disk) <= 1 << 20
        beside = tmp_path / "a disk too"
        beside.mkdir()
        assert file_system(beside).mounted != str(disk)


def test_too_little_space_is_reported_with_the_needed_and_free_bytes(tmp_path: Path) -> None:
    with in_memory(tmp_path / "disk", "1m") as disk:
        require_space(disk, 512 << 10, ranks=2)
        with pytest.raises(NoSpace) as caught:
            require_space(disk, 1 << 20, ranks=2)
    text = str(caught.value)
    assert text.startswith(
        f"not enough disk space: 2.0 MiB needed in {disk} (1.0 MiB for each of 2 ranks), 1.0 MiB free (tmpfs of "
    )
    assert "; free 1.0 MiB more in this file system" in text
    if file_system(tmp_path).device.startswith("/") and os.access(file_system(tmp_path).mounted, os.W_OK):
        assert f", or use {file_system(tmp_path).mounted}, which has " in text


def test_the_nearest_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=f"the nearest existing folder, {tmp_path}; see "):
        require_folder(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    with pytest.raises(
        OffloadError, match=f"{tmp_path}/file: this path is not a folder; use {tmp_path}; see "
    ):
        require_folder(tmp_path / "file")


def test_seconds_are_bytes_over_bandwidth() -> None:
    bandwidth = Bandwidth(read=2 << 30, write=1 << 30, access="ext4, direct")
    budget = Budget(2 << 30, 2 << 30, bandwidth)
    assert budget.seconds == 3.0
    assert str(budget) == (
        "each step reads 2.0 GiB and writes 2.0 GiB: about 3 s at 2.0 GiB/s read, 1.0 GiB/s write (ext4, direct)"
    )
    assert str(Budget(512, 0)) == "each step reads 512 bytes and writes 0 bytes"
    assert Budget(512, 0).seconds is None
