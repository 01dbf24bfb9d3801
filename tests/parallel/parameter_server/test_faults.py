"""Ranks that are killed or stop responding: a lost worker is dropped, a lost server ends the job, and both are
named."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.comm.communicator import Communicator
from farandole.parallel.parameter_server import ParameterServer
from farandole.parallel.parameter_server.channel import Header, Kind, _pack
from tests.comm.jobs import SOON_S, Job

ELEMENTS = 3_000_000


def warm_up() -> None:
    """Create the first optimizer of the process, which loads modules for seconds, before a server must respond."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0).step()


class Flat(nn.Module):
    """A model whose loss is the sum of its parameters, so that every gradient is 1 and all parameters stay equal."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(ELEMENTS))


def push_half(session: Any, model: Flat) -> None:
    """Begin to send a gradient, and die before a hundredth of it can have been sent."""
    session._worker()
    for server, channel in enumerate(session._roles.channels.values()):
        group, pieces = channel._comm.group, session._packings[server].pieces
        for tensor in (_pack(Header(Kind.PUSH)), torch.ones(len(pieces), dtype=torch.bool)):
            dist.send(tensor, group=group, group_dst=0)
    work = dist.isend(torch.full((ELEMENTS,), 1e9), group=group, group_dst=0)
    os.kill(os.getpid(), signal.SIGKILL)
    work.wait()


def train(
    rank: int,
    size: int,
    tell: Callable,
    servers: int,
    mode: Any,
    staleness: int | None,
    turns: int,
    victim: int,
    how: str,
    timeout_s: float = 30,
) -> Any:
    warm_up()
    assert dist.group.WORLD is not None
    model = Flat()
    with ParameterServer(Communicator(dist.group.WORLD), servers, timeout_s=timeout_s) as roles:
        with roles.session(
            model, lambda p: torch.optim.SGD(p, lr=1.0), mode=mode, staleness=staleness
        ) as session:
            if not session.is_worker and rank == victim:
                tell("going")
            if rank == victim and how == "at any time":
                turns = 10_000  # even a late signal arrives before the last turn
            for turn in range(turns if session.is_worker else 0):
                session.pull()
                if rank == victim and turn == 3:
                    tell("going")
                    if how == "computing":
                        time.sleep(60)
                    if how == "half a push":
                        push_half(session, model)
                model.values.sum().backward()
                session.push()
        if session.is_worker:
            assert len(model.values.unique()) == 1, model.values.unique()
            return model.values[0].item()
        assert session.report is not None
        return session.report.updates, session.report.pushes, session.report.lost


@pytest.mark.parametrize(
    ("mode", "staleness", "how"),
    [
        ("sync", None, "computing"),
        ("sync", None, "half a push"),
        ("sync", None, "at any time"),
        ("async", None, "half a push"),
        ("async", 2, "at any time"),
    ],
)
def test_training_continues_without_a_killed_worker(mode, staleness, how):
    turns = 12 if how != "at any time" else 60
    with Job(4, train, 1, mode, staleness, turns, 2, how) as job:
        job.hear(2)
        if how == "at any time":
            time.sleep(0.05)
        if how != "half a push":
            job.kill(2)
        ends = {rank: job.end(rank, 60) for rank in (0, 1, 3)}
        assert [end.kind for end in ends.values()] == ["returned"] * 3, ends
        updates, pushes, lost = eval(ends[0].text)
        assert list(lost) == [2] and re.match(rf"rank 2 \(process {job.pid(2)}\) died", lost[2])
        assert pushes[1] == pushes[3] == turns and pushes[2] >= 3
        # in sync mode an update is -1 with any set of workers, otherwise one per complete gradient
        assert updates == (max(pushes.values()) if mode == "sync" else sum(pushes.values()))
        assert ends[1].text == ends[3].text == str(float(-updates))


@pytest.mark.parametrize(("servers", "mode", "staleness"), [(1, "async", 2), (2, "sync", None)])
def test_a_killed_server_is_named_and_ends_the_job(servers, mode, staleness):
    victim = servers - 1
    with Job(servers + 2, train, servers, mode, staleness, 10_000, victim, "") as job:
        job.hear(victim)
        time.sleep(0.5)
        since = job.kill(victim)
        for rank in range(servers + 2):
            if rank == victim:
                continue
            end = job.end(rank)
            assert end.kind == "ServerLost" and end.at - since < SOON_S, end
            words = rf"server {victim} \(rank {victim}\) is lost: rank {victim} \(process {job.pid(victim)}\) died"
            assert re.search(words, end.text), end.text


def test_a_server_without_workers_raises_an_error():
    with Job(3, train, 1, "async", None, 10_000, 1, "") as job:
        job.hear(1)
        job.kill(1)
        job.kill(2)
        end = job.end(0)
        assert end.kind == "AllWorkersLost"
        assert re.search(
            r"the server \(rank 0\) has lost all its workers: rank \d: rank \d .* died .*rank \d: ", end.text
        )


def test_a_silent_worker_is_dropped_and_notified():
    with Job(4, train, 2, "sync", None, 12, 3, "computing", 2.0) as job:
        job.hear(3)
        since = job.kill(3, signal.SIGSTOP)
        ends = [job.end(rank) for rank in (0, 1, 2)]
        assert [end.kind for end in ends] == ["returned"] * 3, ends
        assert 1.5 < ends[0].at - since < 10
        assert re.search(
            r"rank 3 .* did not send the message that rank 0 .* expected .* within the timeout of 2 s",
            eval(ends[0].text)[2][3],
        )


def test_a_silent_server_is_lost():
    with Job(3, train, 1, "sync", None, 10_000, 0, "", 2.0) as job:
        job.hear(0)
        time.sleep(0.3)
        since = job.kill(0, signal.SIGSTOP)
        for rank in (1, 2):
            end = job.end(rank)
            assert end.kind == "ServerLost" and "server 0 (rank 0) is lost: rank 0" in end.text, end
            assert 1.5 < end.at - since < 10
        job.kill(0)


def wait_long(rank: int, size: int, tell: Callable) -> Any:
    """One worker finishes early, and waits for another for much longer than the timeout."""
    warm_up()
    assert dist.group.WORLD is not None
    model = nn.Linear(2, 2)
    with ParameterServer(Communicator(dist.group.WORLD), 2, timeout_s=1.0) as roles:
        with roles.session(model, lambda p: torch.optim.SGD(p, lr=0.1), mode="async") as session:
            if session.is_worker:
                for _ in range(1 if rank == 2 else 5):
                    session.pull()
                    model(torch.ones(2)).sum().backward()
                    time.sleep(0 if rank == 2 else 0.6)
                    session.push()
        return session.report.lost if session.report else None


def test_a_waiting_worker_is_not_treated_as_silent():
    with Job(4, wait_long) as job:
        assert [job.end(rank).text for rank in range(4)] == ["{}", "{}", "None", "None"]


def lose_one_then_again(rank: int, size: int, tell: Callable) -> Any:
    warm_up()
    assert dist.group.WORLD is not None
    with ParameterServer(Communicator(dist.group.WORLD), timeout_s=20) as roles:
        seen = []
        for number in range(2):
            model = nn.Linear(1, 1, bias=False)
            with roles.session(model, lambda p: torch.optim.SGD(p, lr=1.0)) as session:
                for _ in range(3 if session.is_worker else 0):
                    session.pull()
                    if number == 0 and rank == 1:  # the first worker, which provides the initial parameters
                        os.kill(os.getpid(), signal.SIGKILL)
                    model(torch.ones(1)).backward()
                    session.push()
            seen.append(session.report.pushes if session.report else model.weight.item())
        return seen


def test_a_lost_worker_is_excluded_from_the_next_session():
    with Job(4, lose_one_then_again) as job:
        assert job.end(0, 60).text == "[{1: 0, 2: 3, 3: 3}, {2: 3, 3: 3}]"
        two, three = job.end(2), job.end(3)
        assert two.kind == three.kind == "returned" and two.text == three.text
