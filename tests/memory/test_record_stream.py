"""Records that pass through buffers: in order, without loss, and without pending transfers after any failure."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farandole.memory.disk import OffloadError, free_bytes
from farandole.memory.offload_store import PART_BYTES, DiskStore
from farandole.memory.record_stream import RecordStream, disk_records, host_records
from tests.memory.disks import ext4, in_memory

SIZES = [1000, PART_BYTES + 4096, 0, 7777, 4096, 1]


def set_to_number(record: int, content: Tensor) -> None:
    content.fill_(record)


def add_one(record: int, content: Tensor) -> None:
    content.add_(1)


def failing(at: int, error: BaseException) -> object:
    """Return work that changes each record, and then raises `error` for record `at`."""

    def work(record: int, content: Tensor) -> None:
        content.add_(1)
        if record == at:
            raise error

    return work


@pytest.fixture(params=["disk", "memory"])
def records(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RecordStream]:
    """Yield records on the disk and in memory."""
    made: RecordStream = disk_records(tmp_path, SIZES) if request.param == "disk" else host_records(SIZES)
    yield made
    made.close()
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DiskStore]:
    """Yield a store on the disk."""
    made = DiskStore(tmp_path, "things")
    yield made
    made.close()


def contents(records: RecordStream) -> list[set[int]]:
    """Return the different bytes in each record."""
    return [set(bytes(content.numpy())) for _, content in records.visit(range(len(records.record_bytes)))]


def test_passes_follow_each_other(records: RecordStream) -> None:
    records.fill(range(6), set_to_number)
    for _ in range(4):
        records.update(range(6), add_one)
    records.update([5, 3, 3, 0], add_one)
    records.prefetch(2)
    records.flush()
    assert contents(records) == [{5}, {5}, set(), {9}, {8}, {10}]


@settings(max_examples=15, deadline=None)
@given(
    st.integers(2, 5),
    st.lists(
        st.tuples(
            st.sampled_from(["prefetch", "change", "release", "blank", "drop", "pass", "flush"]),
            st.integers(0, 4),
        ),
        max_size=15,
    ),
)
def test_any_order_of_calls_matches_memory(buffers: int, calls: list[tuple[str, int]]) -> None:
    file = DiskStore("/tmp")
    stream = RecordStream(file, [9000] * 5, buffers)
    stream.fill(range(5), set_to_number)
    wanted = [torch.full((9000,), k, dtype=torch.uint8) for k in range(5)]
    for call, record in calls:
        if call == "prefetch":
            stream.prefetch(record)
        elif call == "flush":
            stream.flush()
        elif call == "drop":
            stream.blank(record).fill_(255)
            stream.release(record)
        elif call == "pass":
            stream.update(reversed(range(record)), add_one)
            for k in range(record):
                wanted[k] += 1
        else:
            content = stream.blank(record) if call == "blank" else stream.read(record)
            if call == "blank":
                content.copy_(wanted[record])
            assert torch.equal(content, wanted[record])
            if call == "release":
                stream.release(record)
            else:
                content.add_(1)
                wanted[record] += 1
                stream.write(record)
    for k, content in stream.visit(range(5)):
        assert torch.equal(content, wanted[k])
    stream.flush()
    again = torch.empty(9000, dtype=torch.uint8)
    for k in range(5):  # from the disk, not from buffers
        file.read(stream.records[k], again).wait()
        assert torch.equal(again, wanted[k])
    stream.close()


def held_by(stream: RecordStream) -> set[int | None]:
    """Return the records in the buffers that are not being read or written."""
    return {slot.record for slot in stream._slots if slot.moving is None or slot.moving.done}


def test_the_next_record_is_read_during_the_update(file: DiskStore) -> None:
    stream = RecordStream(file, SIZES)
    stream.fill(range(6), set_to_number)
    stream.flush()

    def work(record: int, content: Tensor) -> None:
        wanted = {record, *range(record + 1, min(6, record + 2))}
        deadline = time.monotonic() + 5
        while not (held := held_by(stream)) >= wanted and time.monotonic() < deadline:
            time.sleep(0.001)
        assert held >= wanted

    stream.update(range(6), work)
    stream.close()


def test_a_record_in_a_buffer_is_not_read_again(file: DiskStore) -> None:
    stream = RecordStream(file, SIZES)
    stream.fill([0], set_to_number)
    stream.flush()
    os.ftruncate(file._file._descriptor, 0)
    assert stream.read(0).tolist() == [0] * 1000
    stream.release(0)
    with pytest.raises(OffloadError, match="cannot read record 1 of things: the file is"):
        stream.read(1)
    stream.close()


def test_misuse_is_refused(file: DiskStore) -> None:
    stream = RecordStream(file, SIZES, buffers=2)
    stream.fill(range(6), set_to_number)
    stream.read(0)
    for call in (stream.read, stream.blank):
        with pytest.raises(OffloadError, match="record 0 of things is in use: write or release it first"):
            call(0)
    assert stream.prefetch(0)
    stream.read(3)
    assert not stream.prefetch(4)
    with pytest.raises(OffloadError, match=r"all 2 buffers of things are in use \(records \[0, 3\]\)"):
        stream.read(4)
    stream.release(3)
    with pytest.raises(OffloadError, match="record 3 of things is not in use: call read first"):
        stream.write(3)
    with pytest.raises(
        IndexError, match="record 6 of things does not exist: there are 6 records, numbered from 0"
    ):
        stream.update([0, 6], add_one)
    with pytest.raises(ValueError, match="expected at least 2, so that"):
        RecordStream(file, SIZES, buffers=1)
    stream.close()
    stream.close()
    with pytest.raises(OffloadError, match="the stream is closed"):
        stream.read(0)


def test_an_exception_leaves_the_current_record_unchanged(file: DiskStore) -> None:
    stream = RecordStream(file, SIZES)
    stream.fill(range(6), set_to_number)
    with pytest.raises(ZeroDivisionError):
        stream.update(range(6), failing(3, ZeroDivisionError()))  # type: ignore[arg-type]
    assert not file._moving
    assert contents(stream) == [{1}, {2}, set(), {3}, {4}, {5}]
    stream.update(range(6), add_one)
    assert contents(stream) == [{2}, {3}, set(), {4}, {5}, {6}]
    stream.close()


def test_visiting_may_end_early(file: DiskStore) -> None:
    stream = RecordStream(file, SIZES)
    stream.fill(range(6), set_to_number)
    for record, _ in stream.visit(range(6)):
        if record == 1:
            break
    stream.update(range(6), add_one)
    assert contents(stream)[5] == {6}
    stream.close()


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Hypothesis measures garbage collections with a callback, in which an interrupt would be lost."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("delay_s", [0.001, 0.004, 0.01, 0.03])
def test_ctrl_c_at_any_time_leaves_no_running_transfer(tmp_path: Path, delay_s: float) -> None:
    file = DiskStore(tmp_path, "things")
    stream = RecordStream(file, [2 * PART_BYTES] * 8)
    stream.fill(range(8), set_to_number)
    interrupt = threading.Timer(delay_s, signal.raise_signal, [signal.SIGINT])

    def work(record: int, content: Tensor) -> None:
        if interrupt.ident is None:
            interrupt.start()
        content.add_(1)

    with without_collector(), pytest.raises(KeyboardInterrupt):
        stream.update(list(range(8)) * 200, work)
    assert all(transfer.done for transfer in file._moving)
    assert all(not slot.held and slot.record is None for slot in stream._slots)
    for _, content in stream.visit(range(8)):
        assert content.eq(content[0]).all()  # completely old or completely new
    stream.close()


def test_a_write_that_fails_is_raised_by_the_next_calls(tmp_path: Path) -> None:
    with (
        in_memory(tmp_path / "below", "4m") as below,
        ext4(below / "image", tmp_path / "disk", "64m") as disk,
        contextlib.closing(RecordStream(DiskStore(disk, "things"), [4 << 20] * 6)) as stream,
    ):
        random_bytes = torch.empty(4 << 20, dtype=torch.uint8).random_()

        def write_and_wait(record: int) -> None:
            stream.blank(record).copy_(random_bytes)
            stream.write(record)
            stream.flush()

        with pytest.raises(OffloadError, match=r"^cannot write record \d of things: .* in ") as first:
            list(map(write_and_wait, range(6)))
        for _ in range(2):
            with pytest.raises(OffloadError, match=re.escape(str(first.value))):
                stream.flush()
            with pytest.raises(OffloadError, match=re.escape(str(first.value))):
                stream.update(range(6), add_one)


def endless(folder: Path, ready: int) -> None:
    """Update the records until the process is killed."""
    records = disk_records(folder, [1 << 20] * 8)

    def work(record: int, content: Tensor) -> None:
        os.write(ready, b".")

    while True:
        records.update(range(8), work)


def test_kill_9_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    with ext4(tmp_path / "image", tmp_path / "disk", "64m") as disk:
        before, names = free_bytes(disk), os.listdir(disk)
        heard, ready = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                endless(disk, ready)
            os._exit(1)
        for _ in range(50):
            assert os.read(heard, 1) == b"."
        assert free_bytes(disk) <= before - (8 << 20)
        time.sleep(random.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert os.listdir(disk) == names
        deadline = time.monotonic() + 5  # the kernel frees blocks in its own time
        while free_bytes(disk) < before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert free_bytes(disk) >= before - 4096
