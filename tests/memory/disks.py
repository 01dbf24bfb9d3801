"""Mount small disks, for tests of disk failures."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(folder: Path, *words: str) -> Iterator[Path]:
    """Mount a disk on `folder` with `mount WORDS FOLDER`; skip the test if mounting is not possible."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small disk requires Linux and root")
    folder.mkdir()
    run = subprocess.run(["mount", *words, str(folder)], capture_output=True, text=True)
    if run.returncode != 0:
        pytest.skip(f"cannot mount a small disk: {run.stderr.strip()}")
    try:
        yield folder
    finally:
        _unmount(folder)


def _unmount(folder: Path) -> None:
    """Unmount `folder`; retry, because the kernel may still be releasing a loop device."""
    deadline = time.monotonic() + 20
    while (run := subprocess.run(["umount", str(folder)], capture_output=True, text=True)).returncode:
        assert "busy" in run.stderr and time.monotonic() < deadline, run.stderr
        time.sleep(0.05)


def in_memory(folder: Path, size: str) -> contextlib.AbstractContextManager[Path]:
    """Mount a tmpfs of `size` on `folder`."""
    return mounted(folder, "-t", "tmpfs", "-o", f"size={size}", "farandole-test")


@contextlib.contextmanager
def ext4(image: Path, folder: Path, size: str) -> Iterator[Path]:
    """Mount an ext4 of `size` in a sparse file; if the disk below is full, writing fails with an I/O error."""
    with image.open("wb") as file:
        file.truncate(int(size.removesuffix("m")) << 20)
    try:
        made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("mkfs.ext4 is not installed")
    if made.returncode != 0:
        pytest.skip(f"cannot create an ext4 file system: {made.stderr.strip()}")
    with mounted(folder, "-t", "ext4", "-o", "loop", str(image)):
        yield folder
