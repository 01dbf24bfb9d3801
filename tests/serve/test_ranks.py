"""Tensor parallel generation: two ranks generate the tokens of one, and a failed rank ends the service."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.comm.communicator import Communicator
from farandole.models.hf import from_pretrained
from farandole.serve.engine import GenerationEngine
from farandole.serve.ranks import Driver, Worker
from farandole.serve.request import RequestError, Sampling
from farandole.serve.shards import check_width, shard_model
from tests.serve.models import CONTEXT, LAYERS, models, run, vocabulary
from tests.serve.server import write_folder
from tests.serve.test_server import post

BOUND = 1e-4
"""The largest difference of log-probabilities between one rank and several."""


def traffic(engine: GenerationEngine, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Add requests at different steps, and return the tokens and log-probabilities of each."""
    found: dict[int, tuple[list[int], list[float]]] = {}
    left = list(prompts)
    while left or engine.has_work:
        if left:
            engine.add(left.pop(0), Sampling(max_tokens=12, temperature=0, logprobs=0))
        for output in engine.step():
            tokens, logprobs = found.setdefault(output.request, ([], []))
            tokens += output.tokens
            logprobs += [each.logprob for each in output.logprobs]
    run(engine)
    return [found[number] for number in sorted(found)]


def on_ranks(rank: int, size: int, folder: str, store: str, prompts: list[list[int]]) -> Any:
    comm = Communicator(torch.distributed.group.WORLD)
    model = from_pretrained(folder, lazy=True).eval()
    shard_model(model, comm)
    if rank:
        Worker(model, comm).follow()
        return None
    driver = Driver(model, comm)
    engine = GenerationEngine(driver, context=CONTEXT, store=store, token_budget=16, max_running=3)
    found = traffic(engine, prompts)
    driver.beat()
    driver.close()
    return found


@pytest.mark.parametrize("store", ["slots", "pages"])
@pytest.mark.parametrize("family", LAYERS)
def test_two_ranks_generate_the_tokens_of_one(ranks: Any, family: str, store: str) -> None:
    choose = random.Random(family)
    size = vocabulary(family)
    prompts = [[choose.randrange(size) for _ in range(length)] for length in (1, 30, 5, 17, 9)]
    _, model = models(family)
    engine = GenerationEngine(model, context=CONTEXT, store=store, token_budget=16, max_running=3)
    expected = traffic(engine, prompts)
    folder = str(model.pretrained.folder)  # type: ignore[union-attr]
    found, _ = ranks(2).run(on_ranks, folder, store, prompts)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, own), (_, other) in zip(found, expected, strict=True):
        assert own == pytest.approx(other, abs=BOUND)


def test_widths_that_do_not_divide_the_heads_are_refused() -> None:
    _, model = models("gpt2")
    folder: Path = model.pretrained.folder  # type: ignore[union-attr, assignment]
    check_width(from_pretrained(folder, lazy=True), 2)
    with pytest.raises(
        RequestError, match="2 query heads .* which 3 ranks cannot divide; nearest plans: .*tensor=2"
    ):
        check_width(from_pretrained(folder, lazy=True), 3)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_rank_or_a_signal_ends_the_command(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "farandole", "serve", str(write_folder(tmp_path / "model"))]
        + ["--port", "0", "--tensor", "2"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        address = ""
        for line in process.stderr:
            if match := re.search(r"http://\S+", line):
                address = match[0]
                break
        body = {"model": "model", "prompt": "say", "max_tokens": 20, "temperature": 0}
        assert post(address, "/v1/completions", body)[0] == 200
        if number == signal.SIGKILL:
            os.kill(_process_of_rank(process.pid, 1), number)
        else:
            process.send_signal(number)
        errors = process.stderr.read()
        assert process.wait(60) == 128 + number
        assert ("rank 1" if number == signal.SIGKILL else "stopped by SIGTERM") in errors
    finally:
        process.kill()
        process.wait()


def _process_of_rank(launcher: int, rank: int) -> int:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    environ = {int(pid): Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in children}
    return next(pid for pid, variables in environ.items() if f"RANK={rank}" in variables)
