"""Read the limits of both versions of control groups from files like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.launch import control_groups


@pytest.fixture
def second_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of this process's group, /jobs/mine, under the mount of control groups of version 2."""
    return mounted(tmp_path, monkeypatch, "0::/jobs/mine", "jobs/mine")


@pytest.fixture
def first_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder with the controllers of version 1."""
    mounted(tmp_path, monkeypatch, "3:memory:/mine\n5:cpu,cpuacct:/mine", "memory/mine")
    (tmp_path / "cpu" / "mine").mkdir(parents=True)
    return tmp_path


def mounted(mount: Path, monkeypatch: pytest.MonkeyPatch, membership: str, folder: str) -> Path:
    (mount / "membership").write_text(membership + "\n")
    monkeypatch.setattr(control_groups, "MOUNT", mount)
    monkeypatch.setattr(control_groups, "MEMBERSHIP", mount / "membership")
    own = mount / folder
    own.mkdir(parents=True)
    return own


def test_without_limits(second_version: Path) -> None:
    assert control_groups.free_memory() is None
    assert control_groups.free_tasks() is None
    assert control_groups.processor_quota() is None
    assert control_groups.available_memory() > 0


def test_without_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_groups, "MEMBERSHIP", tmp_path / "missing")
    assert control_groups.free_memory() is None
    assert control_groups.processor_quota() is None


def test_cached_files_count_as_free(second_version: Path) -> None:
    (second_version / "memory.max").write_text("1000000\n")
    (second_version / "memory.current").write_text("300000\n")
    (second_version / "memory.stat").write_text("anon 100000\nactive_file 50000\ninactive_file 150000\n")
    assert control_groups.free_memory() == 900_000
    assert control_groups.available_memory() == 900_000
    (second_version / "memory.max").write_text("max\n")
    assert control_groups.free_memory() is None


def test_more_memory_in_use_than_granted(second_version: Path) -> None:
    (second_version / "memory.max").write_text("1000\n")
    (second_version / "memory.current").write_text("3000\n")
    assert control_groups.available_memory() == 0


@pytest.mark.parametrize(("text", "quota"), [("max 100000", None), ("150000 100000", 1.5), ("odd", None)])
def test_processor_quota(second_version: Path, text: str, quota: float | None) -> None:
    (second_version / "cpu.max").write_text(text + "\n")
    assert control_groups.processor_quota() == quota


def test_an_enclosing_group_sets_the_quota(second_version: Path) -> None:
    (second_version / "cpu.max").write_text("400000 100000\n")
    (second_version.parent / "cpu.max").write_text("50000 100000\n")
    assert control_groups.processor_quota() == 0.5


def test_version_1(first_version: Path) -> None:
    memory, cpu = first_version / "memory" / "mine", first_version / "cpu" / "mine"
    (memory / "memory.limit_in_bytes").write_text("1000\n")
    (memory / "memory.usage_in_bytes").write_text("400\n")
    (cpu / "cpu.cfs_period_us").write_text("100000\n")
    (cpu / "cpu.cfs_quota_us").write_text("-1\n")
    assert control_groups.free_memory() == 600
    assert control_groups.processor_quota() is None
    (cpu / "cpu.cfs_quota_us").write_text("250000\n")
    assert control_groups.processor_quota() == 2.5
