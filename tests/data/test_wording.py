"""Formatting of numbers, sizes and disk errors."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from farandole.data.wording import counted, disk_failure, short, size


@pytest.mark.parametrize(("number", "text"), [(0, "0 tokens"), (1, "1 token"), (12345, "12,345 tokens")])
def test_counted(number: int, text: str) -> None:
    assert counted(number, "token") == text


@pytest.mark.parametrize(
    ("number", "text"), [(850, "850"), (42_300, "42 k"), (2_600_000, "2.6 M"), (48 * 10**12, "48.0 T")]
)
def test_short(number: int, text: str) -> None:
    assert short(number) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (1536, "1.5 KiB"), (20 << 30, "20.0 GiB"), (10**22, "8,673.6 EiB")]
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text


def test_disk_failure_in_a_missing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, full = tmp_path / "runs" / "moved", OSError(errno.ENOSPC, "No space left on device")
    advice = "; see 'farandole explain no-space-left-on-the-disk'"
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 7, path == tmp_path and 2)
    )
    assert disk_failure(full, folder) == f"no space left on the disk (2 bytes free){advice}"
    assert disk_failure("failed", folder, 2) == "failed"
    needed = "(about 3 bytes needed, 2 bytes free)"
    assert disk_failure("failed", folder, 3) == f"no space left on the disk {needed}{advice}"

    def fail(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(shutil, "disk_usage", fail)
    assert disk_failure(full, folder) == f"no space left on the disk{advice}"
    assert disk_failure("failed", folder, 3) == "failed"
