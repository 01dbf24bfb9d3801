"""Records on a disk: what is read is what was written, space is reserved, errors say what and where."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.memory.disk_file import PART_BYTES, RecordFile
from farandole.memory.errors import NoSpace, OffloadError
from farandole.memory.file_system import free_bytes
from farandole.memory.scratch import ALIGNMENT, aligned_buffer
from tests.memory.disks import ext4, in_memory, mounted

SIZES = [1, 0, ALIGNMENT, 3 * PART_BYTES + 17, ALIGNMENT + 1]


def check_round_trip(file: RecordFile) -> None:
    """Every record gets bytes of its own and keeps them."""
    buffers = [aligned_buffer(n).random_() for n in file.record_bytes]
    for transfer in [file.write(k, buffer) for k, buffer in enumerate(buffers)]:
        transfer.wait()
    for k, buffer in reversed(list(enumerate(buffers))):
        again = file.buffer()
        file.read(k, again).wait()
        assert torch.equal(again[: file.record_bytes[k]], buffer[: file.record_bytes[k]])


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, SIZES, "things")
    assert not list(tmp_path.iterdir())
    check_round_trip(file)
    file.close()
    file.close()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 2 * PART_BYTES + 3), max_size=5))
def test_records_of_any_sizes(sizes: list[int]) -> None:
    file = RecordFile("/tmp", sizes)
    check_round_trip(file)
    file.close()


def test_ext4_is_read_and_written_directly(tmp_path: Path) -> None:
    with ext4(tmp_path / "image", tmp_path / "disk", "64m") as disk:
        file = RecordFile(disk, SIZES)
        assert file.direct
        assert file.access.startswith("ext4 of /dev/loop") and file.access.endswith(f" at {disk}, direct")
        check_round_trip(file)
        file.close()


def test_a_file_system_without_direct_access_is_used_through_the_cache(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "ramfs", "farandole-test") as disk:
        file = RecordFile(disk, SIZES)
        assert not file.direct
        check_round_trip(file)
        file.close()


def test_a_system_without_nameless_files_leaves_no_name_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for word in ("O_TMPFILE", "O_DIRECT", "posix_fallocate", "posix_fadvise"):
        monkeypatch.delattr(os, word)  # as on macOS
    file = RecordFile(tmp_path, SIZES)
    assert not list(tmp_path.iterdir())
    assert not file.direct
    assert "without O_DIRECT" in file.access or "memory" in file.access
    check_round_trip(file)
    file.close()


def test_memory_that_poses_as_a_disk_is_called_so(tmp_path: Path) -> None:
    with in_memory(tmp_path / "disk", "32m") as disk:
        file = RecordFile(disk, SIZES)
        assert "lies in memory, so that nothing is gained" in file.access
        check_round_trip(file)
        file.close()


def test_space_is_reserved_at_once_and_given_back(tmp_path: Path) -> None:
    with in_memory(tmp_path / "disk", "4m") as disk:
        file = RecordFile(disk, [3 << 20])
        assert free_bytes(disk) == 1 << 20
        with pytest.raises(
            NoSpace, match=r"2\.0 MiB needed in .*, 1\.0 MiB free \(tmpfs .*; free 1\.0 MiB more"
        ):
            RecordFile(disk, [1 << 20, 1 << 20])
        assert free_bytes(disk) == 1 << 20
        file.close()
        assert free_bytes(disk) == 4 << 20
        file = RecordFile(disk, [3 << 20])
        del file
        gc.collect()
        assert free_bytes(disk) == 4 << 20


def test_a_disk_that_fills_after_the_check_gives_back_what_it_gave(
    tmp_path: Path, monkeypatch: object
) -> None:
    import farandole.memory.scratch as scratch

    with in_memory(tmp_path / "disk", "2m") as disk:
        monkeypatch.setattr(scratch, "require_space", lambda folder, needed: None)
        with pytest.raises(
            NoSpace, match=r"cannot reserve 3\.0 MiB for things: No space left .* free 1\.0 MiB more"
        ):
            RecordFile(disk, [3 << 20], "things")
        assert free_bytes(disk) == 2 << 20


def test_a_limit_of_the_user_is_said(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(
            NoSpace, match=r"cannot reserve 2\.0 MiB for things: File too large in .* limit is lower"
        ):
            RecordFile(tmp_path, [2 << 20], "things")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_read_only_disk_is_said(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "ro,size=8m", "farandole-test") as disk,
        pytest.raises(
            OffloadError, match=r"cannot make a file for things: Read-only file system in .* user \d"
        ),
    ):
        RecordFile(disk, [1], "things")


def test_a_folder_without_permission_is_said() -> None:
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
                    OffloadError, match=f"cannot keep state in {closed}/inside: Permission denied"
                ):
                    RecordFile(closed / "inside", [1], "things")
                os.seteuid(0)
                closed.chmod(0o555)
                os.seteuid(65534)
            with pytest.raises(
                OffloadError, match="cannot make a file for things: Permission denied in .* user "
            ):
                RecordFile(closed, [1], "things")
        finally:
            os.seteuid(user)


def test_an_error_of_the_disk_is_raised_where_the_record_is_waited_for(tmp_path: Path) -> None:
    with (
        in_memory(tmp_path / "below", "4m") as below,
        ext4(below / "image", tmp_path / "disk", "64m") as disk,
        # There is room on this disk, but none below it.
        contextlib.closing(RecordFile(disk, [4096, 16 << 20], "things")) as file,
    ):
        file.write(0, aligned_buffer(4096)).wait()
        large = file.write(1, file.buffer().random_())
        with pytest.raises(
            OffloadError, match=rf"^writing record 1 of things: .* in {disk} \(ext4 of /dev/loop"
        ):
            large.wait()
        assert large.done and large.error is not None


def test_a_file_cut_short_is_an_error(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, [PART_BYTES, PART_BYTES], "things")
    os.ftruncate(file._file._descriptor, PART_BYTES + ALIGNMENT)
    buffer = file.buffer()
    file.read(0, buffer).wait()
    with pytest.raises(
        OffloadError, match=r"^reading record 1 of things: the file ends [\d,]+ bytes too early in "
    ):
        file.read(1, buffer).wait()
    file.close()


def test_work_waits_for_what_comes_before(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, [8 * PART_BYTES] * 2, "things")
    buffer = file.buffer().random_()
    wanted = buffer.clone()
    first = file.write(0, buffer)
    second = file.read(1, buffer, after=[first])  # zeros, into the same buffer
    third = file.read(0, buffer, after=[second, first])
    third.wait()
    assert first.done and second.done
    assert torch.equal(buffer, wanted)
    file.close()


def test_closing_waits_for_what_is_in_motion(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, [8 * PART_BYTES], "things")
    buffer = file.buffer()
    moving = file.write(0, buffer)
    waiting = file.read(0, buffer, after=[moving])
    file.close()
    assert moving.done and waiting.done
    moving.wait()
    with pytest.raises(OffloadError, match="record 0 of things: the file has been closed"):
        file.read(0, buffer)
    assert not [thread for thread in file._threads._threads if thread.is_alive()]


def test_wrong_records_and_buffers_are_refused(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, [2 * ALIGNMENT], "things")
    with pytest.raises(IndexError, match="reading record 1 of things: there are 1 record, counted from 0"):
        file.read(1, file.buffer())
    whole = aligned_buffer(3 * ALIGNMENT)
    for buffer in (
        whole[:ALIGNMENT],
        whole[1 : 2 * ALIGNMENT + 1],
        whole[: 2 * ALIGNMENT].float(),
        aligned_buffer(4 * ALIGNMENT)[::2],
    ):
        with pytest.raises(ValueError, match="takes uint8 memory of at least 8,192 bytes at a multiple of"):
            file.write(0, buffer)
    with pytest.raises(ValueError, match="a record has 0 bytes or more"):
        RecordFile(tmp_path, [-1])
    file.close()


def test_a_forked_process_does_not_wait_for_threads_that_it_has_not(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, [5000], "things")
    buffer = file.buffer()
    file.write(0, buffer).wait()
    heard, said = os.pipe()
    if os.fork() == 0:
        try:
            file.read(0, buffer)
        except OffloadError as error:
            os.write(said, str(error).encode())
        file.close()
        os._exit(0)
    os.wait()
    assert b"from which this one forked" in os.read(heard, 1000)
    file.read(0, buffer).wait()
    file.close()


def test_another_error_of_reserving_is_said(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            os, "posix_fallocate", lambda *words: (_ for _ in ()).throw(OSError(errno.EIO, "broken"))
        )
        with pytest.raises(OffloadError, match="cannot reserve 4.0 KiB for things: broken in") as caught:
            RecordFile(tmp_path, [1], "things")
    assert isinstance(caught.value.__cause__, OSError)
