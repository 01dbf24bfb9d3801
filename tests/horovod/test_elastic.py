"""Elastic programs: saving and restoring the state, and jobs in which processes are killed."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
from torch import nn

import farandole.horovod.torch as hvd
from farandole.horovod.torch.elastic import ElasticSampler, ObjectState, TorchState
from tests.horovod.jobs import session
from tests.launch.jobs import finish, start, write
from tests.ports import free_port

TRAIN = """
import os, signal, sys, time
import torch
import farandole.horovod.torch as hvd

victims, dies_at = [int(v) for v in sys.argv[1].split(",") if v], 3
first_rank = int(os.environ["RANK"])
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, history=[])
resets = []
state.register_reset_callbacks([lambda: resets.append(hvd.size())])

@hvd.elastic.run
def train(state):
    while state.step < 6:
        if first_rank in victims and state.step == dies_at:
            time.sleep(0.1 * victims.index(first_rank))
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        (model(torch.ones(1, 2)).sum() * (first_rank + 1)).backward()
        optimizer.step()
        state.history.append(hvd.size())
        state.step += 1
        state.commit()
    return "done"

result = train(state)
weights = [round(w, 5) for p in model.parameters() for w in p.flatten().tolist()]
print(hvd.rank(), hvd.size(), result, state.history, resets, weights)
"""


def job(script: str, size: int, *arguments: str):
    common = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    return [start([sys.executable, script, *arguments], RANK=str(rank), **common) for rank in range(size)]


def test_survivors_continue_from_the_last_commit(tmp_path):
    ends = [finish(each) for each in job(write(tmp_path, TRAIN), 4, "1,3")]
    assert [status for status, _, _ in ends] == [0, -signal.SIGKILL, 0, -signal.SIGKILL], ends
    rows = [ends[rank][1].splitlines()[-1].split(" ", 2) for rank in (0, 2)]
    assert [row[:2] for row in rows] == [["0", "2"], ["1", "2"]]
    assert rows[0][2] == rows[1][2]  # the same history and weights
    result, history = rows[0][2].split(" ", 1)
    assert result == "done" and history.startswith(("[4, 4, 4, 2, 2, 2] [2]", "[4, 4, 4, 2, 2, 2] [3, 2]")), (
        history
    )


def test_the_error_after_the_store_has_died_names_a_remedy(tmp_path):
    ends = [finish(each) for each in job(write(tmp_path, TRAIN), 3, "0")]
    assert ends[0][0] == -signal.SIGKILL
    for status, _, err in ends[1:]:
        assert status == 1 and "HorovodInternalError" in err
        assert "restart the job and load a checkpoint" in err, err


def saved_and_restored(rank, size):
    with session():
        torch.manual_seed(rank)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        sampler = ElasticSampler(range(10), shuffle=False)
        state = TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=rank, log=[rank])
        state.sync()
        assert (state.epoch, state.log, optimizer.param_groups[0]["lr"]) == (0, [0], 0.1)
        kept = model.weight.detach().clone()
        assert torch.equal(hvd.broadcast(kept, 0), kept)
        sampler.record_batch(0, 2)
        assert sampler.state_dict() == {"epoch": 0, "processed_num": 2 * size}
        state.commit()
        state.epoch, state.log[0] = 7, 8
        with torch.no_grad():
            model.weight.zero_()
        scheduler.last_epoch = 99
        sampler.record_batch(1, 1)
        state.restore()
        assert (state.epoch, state.log, scheduler.last_epoch) == (0, [0], 0)
        assert torch.equal(model.weight, kept)
        assert sampler.processed_num == 2 * size
        left = sorted(index for part in hvd.allgather_object(list(sampler)) for index in part)
        assert set(left) == set(range(2 * size, 10)) and len(left) == size * len(sampler)
        sampler.set_epoch(1)
        assert sampler.processed_num == 0 and len(sampler) == -(-10 // size)

        state.on_hosts_updated(time.time(), 1)
        with pytest.raises(hvd.HostsUpdatedInterrupt) as interrupt:
            state.commit()
        assert interrupt.value.skip_sync
        state.commit()  # a reported change interrupts only once

        plain = ObjectState(hvd.broadcast_object, hvd.rank, numbers=[rank])
        plain.sync()
        assert plain.numbers == [0]
        with pytest.raises(hvd.HorovodInternalError, match="let hvd.init"):
            hvd.elastic.run(lambda state: None)(plain)


def test_state_is_saved_and_restored(ranks):
    ranks(2).run(saved_and_restored)


def same_name_twice():
    """A duplicate name is an error of the program, which `hvd.elastic.run` must raise without running it again."""
    state = ObjectState(hvd.broadcast_object, hvd.rank, runs=0)

    @hvd.elastic.run
    def train(state):
        state.runs += 1
        state.commit()
        engine = hvd.global_process_set.engine
        with engine._wake:  # the first request stays in flight
            hvd.allreduce_async(torch.ones(2), name="same")
            hvd.allreduce_async(torch.ones(2), name="same")

    with pytest.raises(ValueError, match="with the same name"):
        train(state)
    assert state.runs == 1


def alone():
    calls = []
    state = ObjectState(hvd.broadcast_object, hvd.rank, step=0)

    @hvd.elastic.run
    def train(state):
        calls.append(state.step)
        state.step += 1
        if len(calls) == 1:
            state.commit()
            state.step = 50
            raise hvd.HorovodInternalError("made up")
        if len(calls) == 2:
            state.step = 5
            raise hvd.HostsUpdatedInterrupt
        return state.step

    assert train(state) == 6
    assert calls == [0, 1, 5]


def test_errors_restore_the_state_and_interrupts_keep_it():
    hvd.init()
    try:
        alone()
        same_name_twice()
    finally:
        hvd.shutdown()
    assert os.environ.get("RANK") is None
