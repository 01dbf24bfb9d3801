"""Load at twice the capacity: each request has an answer, and no slot or memory is lost.

FARANDOLE_LOAD_SECONDS sets the duration, for a longer run by hand.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.serve.server import NAME, eventually, serving, write_folder

SECONDS = float(os.environ.get("FARANDOLE_LOAD_SECONDS", "5"))
RUNNING, WAITING = 4, 4
CLIENTS = 2 * (RUNNING + WAITING)


def resident() -> int:
    """Return the bytes of memory that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("store", ["pages", "slots"])
def test_each_request_has_an_answer(tmp_path: Path, store: str) -> None:
    counts: Counter[str] = Counter()
    options = {"max_running": RUNNING, "max_waiting": WAITING, "store": store}
    with serving(write_folder(tmp_path), **options) as (address, service):

        def send(seed: int) -> None:
            choose = random.Random(seed)
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

        start = time.monotonic()
        end = start + SECONDS
        threads = [threading.Thread(target=send, args=(seed,)) for seed in range(CLIENTS)]
        for thread in threads:
            thread.start()
        time.sleep(SECONDS / 2)
        before = resident()
        for thread in threads:
            thread.join()
        eventually(lambda: not service.engine.has_work)
        time.sleep(0.1)
        growth = resident() - before
        service.engine.check_idle()
        assert not service._tickets
        assert not service._queued
        assert len(service.engine._sampler._free) == RUNNING
    assert set(counts) <= {"left", "refused", "complete"}, counts
    assert min(counts["left"], counts["refused"], counts["complete"]) > 0, counts
    assert growth < 32 << 20
