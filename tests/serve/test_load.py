"""Load at twice the capacity: each request has an answer, and no slot, connection or memory is lost.

FARANDOLE_LOAD_SECONDS sets the duration, for a longer run by hand:

    FARANDOLE_LOAD_SECONDS=600 pytest -s --timeout 1500 tests/serve/test_load.py -k each_request
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farandole.serve.engine import QueueFullError
from farandole.serve.http.service import Service
from farandole.serve.request import Sampling
from tests.serve.models import engine_of
from tests.serve.server import NAME, eventually, serving, write_folder

SECONDS = float(os.environ.get("FARANDOLE_LOAD_SECONDS", "5"))
RUNNING, WAITING = 4, 4
CLIENTS = 2 * (RUNNING + WAITING)
GROWTH = 16 << 20
"""The bytes by which memory may grow during the test, according to a line fitted to the samples after the first
quarter."""


def resident() -> int:
    """Return the bytes of memory that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    """Return the number of open files and sockets of this process."""
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("store", ["pages", "slots"])
def test_each_request_has_an_answer(tmp_path: Path, store: str) -> None:
    sent, found = [0] * CLIENTS, [Counter[str]() for _ in range(CLIENTS)]  # of each client
    options = {"max_running": RUNNING, "max_waiting": WAITING, "store": store}
    with serving(write_folder(tmp_path), **options) as (address, service):

        def send(seed: int) -> None:
            choose, counts = random.Random(seed), found[seed]
            while time.monotonic() < end:
                prompt = [choose.randrange(2, 300) for _ in range(choose.randint(1, 60))]
                stream, leave = choose.random() < 0.5, choose.random() < 0.2
                body = {
                    "model": NAME,
                    "prompt": prompt,
                    "max_tokens": choose.randint(1, 40),
                    "stream": stream,
                }
                connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
                sent[seed] += 1
                try:
                    headers = {"content-type": "application/json"}
                    connection.request("POST", "/v1/completions", json.dumps(body), headers)
                    if leave:
                        time.sleep(choose.random() * 0.05)
                        counts["left"] += 1
                        continue
                    response = connection.getresponse()
                    content = response.read()
                    if response.status == 429:
                        assert int(response.headers["retry-after"]) > 0
                        counts["refused"] += 1
                        time.sleep(0.02)
                    elif response.status == 200 and stream:
                        complete = content.endswith(b"data: [DONE]\n\n") and b'"error"' not in content
                        counts["complete" if complete else "incomplete"] += 1
                    elif response.status == 200:
                        reason = json.loads(content)["choices"][0]["finish_reason"]
                        counts["complete" if reason in ("stop", "length") else "incomplete"] += 1
                    else:
                        counts[f"status {response.status}"] += 1
                except Exception as error:
                    counts[f"no answer: {error!r}"] += 1
                finally:
                    connection.close()

        before = open_files()
        start = time.monotonic()
        end = start + SECONDS
        threads = [threading.Thread(target=send, args=(seed,)) for seed in range(CLIENTS)]
        for thread in threads:
            thread.start()
        times, sizes = [], []
        while time.monotonic() < end:
            time.sleep(SECONDS / 50)
            if time.monotonic() > start + SECONDS / 4:
                times.append(time.monotonic() - start)
                sizes.append(resident())
        for thread in threads:
            thread.join()
        eventually(lambda: not service.engine.has_work)
        eventually(lambda: open_files() <= before)
        service.engine.check_idle()
        assert not service._tickets
        assert not service._queued
        assert len(service.engine._sampler._free) == RUNNING
    counts = sum(found, Counter())
    growth = np.polyfit(times, sizes, 1)[0] * SECONDS
    print(
        f"{store}: {sum(sent)} requests: {dict(counts)}; the memory grows by {growth / 2**20:.2f} MiB in {SECONDS:g} s"
    )
    assert counts.total() == sum(sent)
    assert set(counts) <= {"left", "refused", "complete"}, counts
    assert min(counts["left"], counts["refused"], counts["complete"]) > 0, counts
    ended = service.engine.metrics.requests
    assert sum(ended.values()) >= counts["complete"]
    assert set(ended) <= {"stop", "length", "cancelled"}, ended
    assert growth < GROWTH


def test_a_request_that_arrives_while_another_joins_the_queue_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise, the engine has more waiting sequences than it accepts."""
    engine = engine_of("llama", max_running=1, max_waiting=1)
    service = Service(engine)
    add, late = engine.add, []

    def submit() -> None:
        with pytest.raises(QueueFullError):
            service.submit([([3], Sampling(max_tokens=2))])
        late.append(True)

    def slow_add(*arguments: Any) -> int:
        thread = threading.Thread(target=submit)
        threads.append(thread)
        thread.start()
        thread.join(0.2)
        return add(*arguments)

    threads: list[threading.Thread] = []

    async def run() -> None:
        long = service.submit([([1], Sampling(max_tokens=60, ignore_eos=True))])
        service.start()
        await asyncio.wait_for(long[0].outputs.get(), 60)
        monkeypatch.setattr(engine, "add", slow_add)
        waiting = service.submit([([2], Sampling(max_tokens=2))])
        output = await asyncio.wait_for(waiting[0].outputs.get(), 60)
        assert output.finish_reason is None
        assert service.is_alive
        service.close()

    asyncio.run(run())
    for thread in threads:
        thread.join()
    assert late == [True]
