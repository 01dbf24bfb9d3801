"""The timeline, stalled tensors, shutdown and dead ranks."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pytest
import torch

import farandole.horovod.torch as hvd
from tests.comm.jobs import Job
from tests.horovod.jobs import close, session
from tests.horovod.test_negotiation import with_variables


def recorded(rank, size, path):
    with session():
        for _ in range(2):
            handles = [hvd.allreduce_async(torch.ones(5), name=f"gradient.{i}") for i in range(3)]
            for handle in handles:
                hvd.synchronize(handle)
        hvd.allgather(torch.ones(1), name='a "quoted" name')
        if rank == 0:
            with pytest.raises(ValueError, match="timeline is already being written"):
                hvd.start_timeline(path)
        hvd.stop_timeline()
        hvd.allreduce(torch.ones(5), name="not recorded")


def test_the_timeline_of_a_run(ranks, tmp_path):
    path = tmp_path / "timeline.json"
    variables = {"HOROVOD_TIMELINE": str(path), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    ranks(2).run(with_variables, variables, recorded, str(path))
    events = json.loads(path.read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {'a "quoted" name', "gradient.0", "gradient.1", "gradient.2"} <= set(names.values())
    spans: dict[str, list] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0
            spans.setdefault(names[event["pid"]], []).append(event)
    for index in range(3):
        kinds = [event["name"] for event in spans[f"gradient.{index}"]]
        assert kinds.count("NEGOTIATE_ALLREDUCE") == kinds.count("ALLREDUCE") == 2
        assert "FARANDOLE_ALLREDUCE" in kinds
        outer = next(event for event in spans[f"gradient.{index}"] if event["name"] == "ALLREDUCE")
        inner = next(event for event in spans[f"gradient.{index}"] if event["name"] == "FARANDOLE_ALLREDUCE")
        assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.01
    kinds = {event["name"] for events in spans.values() for event in events}
    assert {
        "MEMCPY_IN_FUSION_BUFFER",
        "MEMCPY_OUT_FUSION_BUFFER",
        "NEGOTIATE_ALLGATHER",
        "ALLGATHER",
    } <= kinds
    assert any(event["name"] == "CYCLE_START" for event in events)
    assert "not recorded" not in names.values()


def started(rank, size, path):
    with session():
        hvd.start_timeline(path)
        for name, call in (("one", hvd.allreduce), ("two", hvd.allgather)):
            call(torch.ones(2), name=name)
            if rank == 0:  # the events of an operation are written before the operation returns
                events = json.loads(f"{Path(path).read_text()}]")
                assert {"name": name} in [event.get("args") for event in events]
                assert call.__name__.upper() in [event["name"] for event in events]
    assert rank or json.loads(Path(path).read_text())  # hvd.shutdown() completes the file


def test_a_timeline_started_by_the_program(ranks, tmp_path):
    ranks(2).run(started, str(tmp_path / "timeline.json"))


def stalled(rank, size, warned, patience_s):
    """Return the stall warnings of this rank, for a new name and a cached name.

    The last rank submits the names after rank 0 has warned of both names, or after `patience_s`.
    """
    texts = []

    def note(record):
        texts.append(record.getMessage())
        if all(name in "".join(texts) for name in names):
            Path(warned).touch()

    handler = logging.Handler()
    handler.emit = note
    names = ["new", "in the cache"]
    logging.getLogger("horovod").addHandler(handler)
    with session():
        hvd.allreduce(torch.ones(2), name="in the cache")
        deadline = time.monotonic() + patience_s
        while rank == size - 1 and time.monotonic() < deadline and not Path(warned).exists():
            time.sleep(0.01)
        handles = [hvd.allreduce_async(torch.ones(2), name=name) for name in names]
        for handle in handles:
            hvd.synchronize(handle)
    logging.getLogger("horovod").removeHandler(handler)
    return texts


def test_a_stall_names_tensors_and_ranks(ranks, tmp_path):
    variables = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.3"}
    texts = ranks(3).run(with_variables, variables, stalled, str(tmp_path / "warned"), 30)
    assert texts[1] == texts[2] == []
    text = "\n".join(texts[0])
    assert "more than 0.3 seconds" in text and "Missing ranks:\n2: [" in text
    assert "new" in text and "in the cache" in text
    disabled = variables | {"HOROVOD_STALL_CHECK_DISABLE": "1"}
    assert ranks(2).run(with_variables, disabled, stalled, str(tmp_path / "never"), 1) == [[], []]


def test_a_stall_ends_the_run_after_the_shutdown_time(ranks):
    variables = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0.6"}
    ranks(2).run(with_variables, variables, waits_for_the_end)


def waits_for_the_end(rank, size):
    hvd.init()
    if rank == 0:
        with pytest.raises(
            hvd.HorovodInternalError, match=r"Missing ranks:\n1: \[lonely\](.|\n)*shutting down"
        ):
            hvd.allreduce(torch.ones(2), name="lonely")
    else:
        hvd.global_process_set.engine._thread.join(10)
        with pytest.raises(hvd.HorovodInternalError, match="lonely"):
            hvd.allreduce(torch.ones(2))
    hvd.shutdown()


def shut_down_by_another(rank, size):
    hvd.init()
    hvd.barrier()
    if rank == 0:
        hvd.shutdown()
        hvd.shutdown()
    else:
        with pytest.raises(hvd.HorovodInternalError, match="Horovod has been shut down"):
            hvd.allreduce(torch.ones(2))
        hvd.shutdown()
    for call in (
        hvd.rank,
        hvd.size,
        hvd.local_rank,
        hvd.cross_size,
        hvd.is_homogeneous,
        hvd.join,
        hvd.barrier,
    ):
        with pytest.raises(ValueError, match="Horovod has not been initialized; use hvd.init()"):
            call()
    hvd.init()
    hvd.init()
    close(hvd.allreduce(torch.ones(2)), torch.ones(2))
    hvd.shutdown()


def test_shutdown_ends_all_ranks_and_init_restarts(ranks):
    ranks(2).run(shut_down_by_another)
    ranks(2, "gloo").run(shut_down_by_another)


def queries(rank, size):
    assert not hvd.gloo_enabled()
    with session():
        assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (rank, size, rank, size)
        assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
        assert not any(
            (hvd.mpi_built(), hvd.mpi_enabled(), hvd.ddl_built(), hvd.ccl_built(), hvd.rocm_built())
        )
        assert hvd.gloo_built() and hvd.cuda_built() == (torch.version.cuda is not None)
        assert isinstance(hvd.nccl_built(), int)
        with pytest.raises(ValueError, match="MPI is not enabled"):
            hvd.mpi_threads_supported()
        return hvd.gloo_enabled()


def test_ranks_and_built_functions(ranks):
    assert ranks(2).run(queries) == [False, False]
    assert ranks(2, "gloo").run(queries) == [True, True]


def killed(rank, size, tell):
    hvd.init()
    hvd.barrier()
    tell("ready")
    if rank == 1:
        time.sleep(60)
    hvd.allreduce(torch.ones(4), name="gradient")


def test_a_killed_rank_is_an_error_on_the_others():
    with Job(3, killed) as job:
        for rank in range(3):
            assert job.hear(rank) == "ready"
        job.kill(1)
        begin = time.monotonic()
        for rank in (0, 2):
            end = job.end(rank)
            assert end.kind == "HorovodInternalError" and "rank 1" in end.text
        assert time.monotonic() - begin < 5
