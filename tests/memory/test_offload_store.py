"""Stores: reads return the written values, space is reserved and reused, and errors name the problem and the place."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import offload
from farandole.memory.disk import NoSpace, OffloadError, free_bytes
from farandole.memory.disk_file import ALIGNMENT, aligned_buffer
from farandole.memory.offload_store import (
    PART_BYTES,
    DiskStore,
    HostStore,
    OffloadStore,
    measure_bandwidth,
)
from tests.memory.disks import ext4, in_memory, mounted

CPU = torch.device("cpu")
SIZES = [1, 0, ALIGNMENT, 3 * PART_BYTES + 17, ALIGNMENT + 1]


def check_round_trip(store: OffloadStore, sizes: Sequence[int] = SIZES) -> None:
    """Write different bytes to all records, from aligned and unaligned memory, and read the same bytes."""
    records = store.allocate(sizes)
    for offset in (0, 1):
        data = [aligned_buffer(n + offset)[offset:].random_() for n in sizes]
        for transfer in [store.write(*pair) for pair in zip(records, data, strict=True)]:
            transfer.synchronize()
        for record, wanted in reversed(list(zip(records, data, strict=True))):
            again = store.empty(record.nbytes + offset, CPU)[offset:]
            store.read(record, again).wait()
            assert torch.equal(again[: record.nbytes], wanted[: record.nbytes])


def test_records_are_read_as_written(tmp_path: Path) -> None:
    for store in (DiskStore(tmp_path, "things"), HostStore("things")):
        check_round_trip(store)
        assert not list(tmp_path.iterdir())
        store.close()
        store.close()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 2 * PART_BYTES + 3), max_size=5))
def test_records_of_any_sizes(sizes: list[int]) -> None:
    file = DiskStore("/tmp")
    check_round_trip(file, sizes)
    file.close()


def test_ext4_is_read_and_written_directly(tmp_path: Path) -> None:
    with ext4(tmp_path / "image", tmp_path / "disk", "64m") as disk:
        file = DiskStore(disk)
        check_round_trip(file)
        assert file.direct
        assert file.access.startswith("ext4 of /dev/loop") and file.access.endswith(f" at {disk}, direct")
        file.close()


def test_a_file_system_without_direct_access_uses_the_page_cache(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "ramfs", "farandole-test") as disk:
        file = DiskStore(disk)
        check_round_trip(file)
        assert not file.direct
        file.close()


def test_no_file_name_remains_on_systems_without_unnamed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for word in ("O_TMPFILE", "O_DIRECT", "posix_fallocate", "posix_fadvise"):
        monkeypatch.delattr(os, word)  # as on macOS
    file = DiskStore(tmp_path)
    check_round_trip(file)
    assert not list(tmp_path.iterdir())
    assert not file.direct
    assert "without O_DIRECT" in file.access or "memory" in file.access
    file.close()


def test_a_file_system_in_memory_is_described_as_memory(tmp_path: Path) -> None:
    with in_memory(tmp_path / "disk", "32m") as disk:
        file = DiskStore(disk)
        assert "is in memory, so offloading to it saves no memory" in file.access
        check_round_trip(file)
        file.close()


def test_space_is_reserved_immediately_and_freed(tmp_path: Path) -> None:
    with in_memory(tmp_path / "disk", "4m") as disk:
        file = DiskStore(disk)
        kept = file.allocate([3 << 20])
        assert free_bytes(disk) == 1 << 20
        with pytest.raises(
            NoSpace, match=r"2\.0 MiB needed in .*, 1\.0 MiB free \(tmpfs .*; free 1\.0 MiB more"
        ):
            DiskStore(disk).allocate([1 << 20, 1 << 20])
        assert free_bytes(disk) == 1 << 20
        with pytest.raises(NoSpace, match=r"2\.0 MiB needed in .*, 1\.0 MiB free"):
            file.allocate([1 << 20, 1 << 20])
        assert free_bytes(disk) == 1 << 20
        file.close()
        assert free_bytes(disk) == 4 << 20
        file = DiskStore(disk)
        kept = file.allocate([3 << 20])
        del file, kept
        gc.collect()
        assert free_bytes(disk) == 4 << 20


def test_space_is_freed_if_the_disk_fills_after_the_check(tmp_path: Path, monkeypatch: object) -> None:
    import farandole.memory.disk_file as disk_file

    with in_memory(tmp_path / "disk", "2m") as disk:
        monkeypatch.setattr(disk_file, "require_space", lambda folder, needed: None)
        with pytest.raises(
            NoSpace, match=r"cannot reserve 3\.0 MiB for things: No space left .* free 1\.0 MiB more"
        ):
            DiskStore(disk, "things").allocate([3 << 20])
        assert free_bytes(disk) == 2 << 20


def test_a_file_size_limit_is_reported(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(
            NoSpace, match=r"cannot reserve 2\.0 MiB for things: File too large in .* check quotas"
        ):
            DiskStore(tmp_path, "things").allocate([2 << 20])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_read_only_disk_is_reported(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "ro,size=8m", "farandole-test") as disk,
        pytest.raises(
            OffloadError, match=r"cannot create a file for things: Read-only file system in .* user \d"
        ),
    ):
        DiskStore(disk, "things").allocate([1])


def test_a_folder_without_permission_is_reported() -> None:
    with tempfile.TemporaryDirectory() as folder:
        closed = Path(folder, "closed")
        (closed / "inside").mkdir(parents=True)
        Path(folder).chmod(0o755)
        closed.chmod(0o500)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            if user == 0:
                with pytest.raises(
                    OffloadError, match=f"cannot offload to {closed}/inside: Permission denied"
                ):
                    DiskStore(closed / "inside", "things").allocate([1])
                os.seteuid(0)
                closed.chmod(0o555)
                os.seteuid(65534)
            with pytest.raises(
                OffloadError, match="cannot create a file for things: Permission denied in .* user "
            ):
                DiskStore(closed, "things").allocate([1])
        finally:
            os.seteuid(user)


def test_a_disk_error_is_raised_by_the_wait_for_the_record(tmp_path: Path) -> None:
    with (
        in_memory(tmp_path / "below", "4m") as below,
        ext4(below / "image", tmp_path / "disk", "64m") as disk,
        # This disk has free space, but the disk below it has none.
        contextlib.closing(DiskStore(disk, "things")) as file,
    ):
        first, second = file.allocate([4096, 16 << 20])
        file.write(first, aligned_buffer(4096)).wait()
        large = file.write(second, aligned_buffer(16 << 20).random_())
        with pytest.raises(
            OffloadError, match=rf"^cannot write record 1 of things: .* in {disk} \(ext4 of /dev/loop"
        ):
            large.wait()
        assert large.done and large.error is not None


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    file = DiskStore(tmp_path, "things")
    first, second = file.allocate([PART_BYTES, PART_BYTES])
    os.ftruncate(file._file._descriptor, PART_BYTES + ALIGNMENT)
    buffer = aligned_buffer(PART_BYTES)
    file.read(first, buffer).wait()
    with pytest.raises(
        OffloadError, match=r"^cannot read record 1 of things: the file is [\d,]+ bytes too short in "
    ):
        file.read(second, buffer).wait()
    file.close()


def test_transfers_wait_for_earlier_transfers(tmp_path: Path) -> None:
    file = DiskStore(tmp_path, "things")
    one, other = file.allocate([8 * PART_BYTES] * 2)
    buffer = aligned_buffer(8 * PART_BYTES).random_()
    wanted = buffer.clone()
    first = file.write(one, buffer)
    second = file.read(other, buffer, after=[first])  # zeros, into the same buffer
    third = file.read(one, buffer, after=[second, first])
    third.wait()
    assert first.done and second.done
    assert torch.equal(buffer, wanted)
    file.close()


def test_closing_waits_for_running_transfers(tmp_path: Path) -> None:
    file = DiskStore(tmp_path, "things")
    (record,) = file.allocate([8 * PART_BYTES])
    buffer = aligned_buffer(8 * PART_BYTES)
    moving = file.write(record, buffer)
    waiting = file.read(record, buffer, after=[moving])
    file.close()
    assert moving.done and waiting.done
    moving.wait()
    with pytest.raises(OffloadError, match="record 0 of things: the file is closed"):
        file.read(record, buffer)
    assert not [thread for thread in file._threads._threads if thread.is_alive()]


def test_invalid_sizes_and_memory_are_refused(tmp_path: Path) -> None:
    file = DiskStore(tmp_path, "things")
    (record,) = file.allocate([2 * ALIGNMENT])
    whole = aligned_buffer(4 * ALIGNMENT)
    for memory in (whole[:ALIGNMENT], whole.float(), whole[::2], whole.view(2, -1)):
        with pytest.raises(
            ValueError, match="expected contiguous 1-D uint8 memory of at least 8,192 bytes on the CPU"
        ):
            file.write(record, memory)
    with pytest.raises(ValueError, match="expected at least 0 bytes per record"):
        file.allocate([-1])
    with pytest.raises(ValueError, match="expected a CPU device, got cuda"):
        file.empty(1, torch.device("cuda"))
    file.close()


def test_the_space_of_dropped_records_is_reused(tmp_path: Path) -> None:
    file = DiskStore(tmp_path, "things")
    records = file.allocate([5000, 9000])
    length = file.nbytes
    for _ in range(3):
        del records
        records = [*file.allocate([9000]), *file.allocate([5000])]
        assert file.nbytes == length
    del records
    records = file.allocate([14_000, 100])  # other sizes, after all records are freed
    assert file.nbytes == 5 * ALIGNMENT
    data = torch.arange(14_000).to(torch.uint8)
    moving = file.write(records[0], data)
    del records  # a record stays until it is written
    assert file.allocate([14_000])[0].offset > 0 or moving.done  # type: ignore[attr-defined]
    file.close()


def test_a_forked_process_does_not_wait_for_missing_threads(tmp_path: Path) -> None:
    file = DiskStore(tmp_path, "things")
    (record,) = file.allocate([5000])
    buffer = aligned_buffer(5000)
    file.write(record, buffer).wait()
    heard, said = os.pipe()
    if os.fork() == 0:
        try:
            file.read(record, buffer)
        except OffloadError as error:
            os.write(said, str(error).encode())
        file.close()
        os._exit(0)
    os.wait()
    assert b"create another store in this forked process" in os.read(heard, 1000)
    file.read(record, buffer).wait()
    file.close()


def test_other_errors_of_reservation_are_reported(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            os, "posix_fallocate", lambda *words: (_ for _ in ()).throw(OSError(errno.EIO, "broken"))
        )
        with pytest.raises(OffloadError, match="cannot reserve 4.0 KiB for things: broken in") as caught:
            DiskStore(tmp_path, "things").allocate([1])
    assert isinstance(caught.value.__cause__, OSError)


def test_memory_is_pinned_only_with_a_device() -> None:
    if torch.cuda.is_available():
        store = HostStore(pinned=True)
        (record,) = store.allocate([10])
        assert record.memory is not None and record.memory.is_pinned()
        assert store.access == "pinned memory, 10 bytes"
        data = torch.arange(10, dtype=torch.uint8, device="cuda")
        store.write(record, data).synchronize()
        again = store.empty(10, data.device)
        store.read(record, again).wait()
        assert torch.equal(again, data)
    else:
        with pytest.raises(ValueError, match="this machine has none; use pinned=False"):
            HostStore(pinned=True)


def test_the_bandwidth_measurement_is_short_and_leaves_no_file(tmp_path: Path) -> None:
    with ext4(tmp_path / "image", tmp_path / "disk", "64m") as disk:
        before, start = free_bytes(disk), time.monotonic()
        found = measure_bandwidth(disk, limit_bytes=24 << 20)
        assert time.monotonic() - start < 5
        assert 1 << 20 < found.read < 1 << 40 and 1 << 20 < found.write < 1 << 40
        assert found.access.endswith("direct")
        assert free_bytes(disk) == before


def test_too_little_space_for_the_bandwidth_measurement_is_reported(tmp_path: Path) -> None:
    with (
        in_memory(tmp_path / "disk", "2m") as disk,
        pytest.raises(
            NoSpace, match=r"4\.0 MiB required, but the free space or limit_bytes allows only 2\.0 MiB"
        ),
    ):
        measure_bandwidth(disk)


def test_measuring_does_not_change_random_states(tmp_path):
    before = torch.get_rng_state()
    measure_bandwidth(tmp_path, 16 << 20)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_offload_benchmark_reports_its_bandwidth(tmp_path: Path) -> None:
    result = offload.compare(str(tmp_path), 48 << 20, 8 << 20, turns=1)
    assert result["records"] == 6
    assert result["moved_bytes"] == pytest.approx(2 * 48 << 20, rel=1e-4)
    assert result["share_of_plain"] > 0.1  # far below the usual value, as others may use the machine
    assert "AdamW, state on disk" in offload.table(result)
    assert "of the bandwidth of the plain test" in offload.notes(result)
