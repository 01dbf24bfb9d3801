"""Small disks of their own, for what a disk can do wrong."""

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
    """`mount WORDS folder` for a while; the test is skipped where that cannot be done."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root can mount a small disk, on Linux")
    folder.mkdir()
    run = subprocess.run(["mount", *words, str(folder)], capture_output=True, text=True)
    if run.returncode != 0:
        pytest.skip(f"cannot mount a small disk here: {run.stderr.strip()}")
    try:
        yield folder
    finally:
        _unmount(folder)


def _unmount(folder: Path) -> None:
    """Unmount; the kernel may still be releasing the file of a loop device that was unmounted just before."""
    deadline = time.monotonic() + 20
    while (run := subprocess.run(["umount", str(folder)], capture_output=True, text=True)).returncode:
        assert "busy" in run.stderr and time.monotonic() < deadline, run.stderr
        time.sleep(0.05)


def in_memory(folder: Path, size: str) -> contextlib.AbstractContextManager[Path]:
    """A tmpfs of that size."""
    return mounted(folder, "-t", "tmpfs", "-o", f"size={size}", "farandole-test")


@contextlib.contextmanager
def ext4(image: Path, folder: Path, size: str) -> Iterator[Path]:
    """An ext4 of that size in a file with holes: where its own disk is full, writing gives an I/O error."""
    with image.open("wb") as file:
        file.truncate(int(size.removesuffix("m")) << 20)
    try:
        made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mkfs.ext4 here")
    if made.returncode != 0:
        pytest.skip(f"cannot make an ext4 here: {made.stderr.strip()}")
    with mounted(folder, "-t", "ext4", "-o", "loop", str(image)):
        yield folder
