"""Replicas of a model behind one port: the tokens of one process, and a failed rank ends the service."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from farandole.comm.communicator import Communicator
from farandole.mesh import Mesh
from farandole.plan import LoRA
from farandole.serve.engine import GenerationEngine, QueueFullError
from farandole.serve.folder import read_model
from farandole.serve.http.service import ReplicatedService
from farandole.serve.metrics import Family, of_replicas, prometheus_text
from farandole.serve.ranks.driver import Worker
from farandole.serve.ranks.errors import RanksFailed
from farandole.serve.ranks.replicas import read_replica
from farandole.serve.request import RequestError, Sampling
from farandole.serve.runner import Runner
from tests.serve.models import CONTEXT, engine_of
from tests.serve.server import NAME, command, write_folder
from tests.serve.test_lora import write_adapter
from tests.serve.test_ranks import process_of_rank, traffic

FAMILY = "llama"
PROMPTS = [[(7 * i + length) % 300 for i in range(length)] for length in (1, 30, 5, 17)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapter")
    write_adapter(read_model(folder).model, path, 1, LoRA(rank=4, alpha=64.0))
    return path


def drive(rank: int, size: int, folder: str, adapter: Path, store: str) -> Any:
    """Return the results of each replica of two, which generate at the same time."""
    comm = Communicator(torch.distributed.group.WORLD)
    mesh = Mesh.box(size, data=2, tensor=size // 2)
    _, own = read_replica(Path(folder), {"lora": {"mine": adapter}}, comm, mesh)
    if isinstance(own, Worker):
        own.follow()
        return None
    engines = [
        GenerationEngine(each, context=CONTEXT, store=store, token_budget=16, max_running=3) for each in own
    ]
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        found[number] = traffic(engines[number], PROMPTS, lora="mine")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for runner in own:
        runner.beat()
        runner.close()
    return [found[0], found[1]]


@pytest.mark.parametrize(("size", "store"), [(2, "pages"), (4, "slots")])
def test_replicas_generate_the_tokens_of_one_process(
    ranks: Any, folder: Path, adapter: Path, size: int, store: str
) -> None:
    found = read_model(folder, lora={"mine": adapter})
    runner = Runner(found.model, adapters=found.adapters)
    engine = GenerationEngine(runner, context=CONTEXT, store=store, token_budget=16, max_running=3)
    expected = traffic(engine, PROMPTS, lora="mine")
    assert expected != traffic(engine, PROMPTS)
    first, *others = ranks(size).run(drive, str(folder), adapter, store)
    assert others == [None] * (size - 1)
    for replica in first:
        for own, other in zip(replica, expected, strict=True):
            assert [each.token for each in own] == [each.token for each in other]
            assert [each.logprob for each in own] == pytest.approx([each.logprob for each in other], abs=1e-4)


def test_requests_go_to_the_replica_with_the_fewest_sequences() -> None:
    async def run() -> None:
        engines = [engine_of(FAMILY, max_waiting=4) for _ in range(2)]
        service = ReplicatedService(engines, lambda: None)
        long = Sampling(max_tokens=30, ignore_eos=True)
        tickets = [*service.submit([([1], long)] * 3), *service.submit([([2], long)])]
        assert [service.services.index(ticket.service) for ticket in tickets] == [0, 1, 0, 1]  # type: ignore[arg-type]
        with pytest.raises(QueueFullError):
            service.submit([([3], long)] * 5)
        with pytest.raises(RequestError, match="prompt: expected at most 8 sequences in a request, got 9"):
            service.submit([([3], long)] * 9)
        service.start()
        for ticket in tickets:
            outputs = [await ticket.outputs.get() for _ in range(30)]
            assert outputs[-1].finish_reason == "length"
        text = prometheus_text(service.metrics())
        assert 'farandole_replica_generated_tokens_total{replica="1"} 60' in text
        assert "farandole_generated_tokens_total 120" in text
        assert service.is_alive
        for engine in engines:
            assert not engine.has_work
        service.close()
        assert not service.is_alive

    asyncio.run(run())


def test_a_failed_replica_ends_the_requests_of_all() -> None:
    async def run() -> None:
        engines = [engine_of(FAMILY) for _ in range(2)]
        ended = threading.Event()
        service = ReplicatedService(engines, ended.set)
        tickets = service.submit([([1], Sampling(max_tokens=50, ignore_eos=True))] * 2)

        def fail(*_: Any) -> Any:
            raise RanksFailed("rank 1 died")

        engines[1].runner.run = fail  # type: ignore[method-assign]
        service.start()
        for ticket in tickets:
            output = await ticket.outputs.get()
            while output.finish_reason is None:
                output = await ticket.outputs.get()
            assert output.finish_reason == "error"
        await asyncio.to_thread(ended.wait, 60)
        assert str(service.failure) == "rank 1 died"
        service.close()

    asyncio.run(run())


def test_metrics_are_added() -> None:
    replicas = [
        [
            Family("a", "histogram", "A.", [('_bucket{le="1"}', 1 + number), ("_sum", 0.5)]),
            Family("b", "counter", "B.", [(f'{{reason="{number}"}}', 2)]),
            Family("c", "gauge", "C.", [("", number)], adds=False),
        ]
        for number in range(2)
    ]
    found = {family.name: family.values for family in of_replicas(replicas)}
    assert found["a"] == [('_bucket{le="1"}', 3), ("_sum", 1.0)]
    assert found["b"] == [('{reason="0"}', 2), ('{reason="1"}', 2)]
    assert "c" not in found
    assert found["replica_a"][2] == ('_bucket{le="1",replica="1"}', 2)
    assert found["replica_c"] == [('{replica="0"}', 0), ('{replica="1"}', 1)]


def test_a_killed_replica_ends_streams_with_an_error(folder: Path) -> None:
    with (
        command(folder, "--name", NAME, "--replicas", "2") as (address, process),
        openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0) as client,
    ):
        words: dict[str, Any] = {"model": NAME, "prompt": "say", "temperature": 0}
        answer = client.completions.create(**words | {"prompt": ["say"] * 4}, max_tokens=12)
        assert len({choice.text for choice in answer.choices}) == 1
        with urllib.request.urlopen(address + "/metrics") as response:
            metrics = response.read().decode()
        assert 'farandole_replica_generated_tokens_total{replica="0"} 24' in metrics
        assert "farandole_generated_tokens_total 48" in metrics
        endless = words | {"max_tokens": 1900, "stream": True, "extra_body": {"ignore_eos": True}}
        streams = [client.completions.create(**endless) for _ in range(2)]
        for stream in streams:
            assert next(iter(stream)).choices
        os.kill(process_of_rank(process.pid, 1), signal.SIGKILL)
        for stream in streams:
            with pytest.raises(openai.APIError, match=r"rank 1 \(process \d+, replica 1\) died"):
                for _ in stream:
                    pass
        assert process.wait(60) == 128 + signal.SIGKILL
        assert "rank 1" in process.read_stderr()
