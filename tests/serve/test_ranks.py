"""Tensor parallel generation: two ranks generate the tokens of one, and a failed rank ends the service.

On two ranks, a request's logits do not depend on the other requests, bit by bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.comm.communicator import Communicator
from farandole.models.hf import from_pretrained
from farandole.serve.engine import GenerationEngine
from farandole.serve.ranks.driver import LocalDriver, Worker
from farandole.serve.ranks.shards import check_width, shard_model
from farandole.serve.request import Logprob, RequestError, Sampling
from farandole.serve.runner import Runner
from farandole.serve.speculation.draft import DraftModel
from tests.serve.models import CONTEXT, LAYERS, models, vocabulary
from tests.serve.server import NAME, command, write_folder

BOUND = 1e-4
"""The largest difference of log-probabilities between one rank and several."""


Case = tuple[str, dict[str, int]]
CASES: list[Case] = [(family, {}) for family in LAYERS]
"""Models that two ranks divide: a family, and changes of its configuration."""
CASES += [("llama", {"num_attention_heads": 3, "num_key_value_heads": 3})]  # uneven
CASES += [("llama", {"num_attention_heads": 4, "num_key_value_heads": 1})]  # both ranks store the same head


def traffic(engine: GenerationEngine, prompts: list[list[int]], **options: Any) -> list[list[Logprob]]:
    """Add requests at random steps, and return the tokens of each request with their log-probabilities."""
    choose = random.Random(len(prompts))
    left = list(prompts)
    found: dict[int, list[Logprob]] = {}
    while left or engine.has_work:
        if left and choose.random() < 0.4:
            engine.add(left.pop(0), Sampling(max_tokens=12, temperature=0, logprobs=20, **options))
        for output in engine.step():
            found.setdefault(output.request, []).extend(output.logprobs)
    engine.check_idle()
    return [found[number] for number in sorted(found)]


def on_ranks(rank: int, size: int, folder: str, store: str, prompts: list[list[int]], draft: str = "") -> Any:
    """Return the results of the requests together, and of each request alone."""
    comm = Communicator(torch.distributed.group.WORLD)
    model = from_pretrained(folder, lazy=True).eval()
    shard_model(model, comm)
    if rank:
        Worker(model, comm).follow()
        return None
    driver = LocalDriver(model, comm)
    options: dict[str, Any] = {"context": CONTEXT, "store": store, "token_budget": 16, "max_running": 3}
    if draft:
        options |= {"speculate": "draft", "draft": DraftModel(Runner(from_pretrained(draft).eval()), CONTEXT)}
    engine = GenerationEngine(driver, **options)
    together = traffic(engine, prompts)
    assert not draft or engine.metrics.accepted_tokens
    # log-probabilities of the prompt disable the reuse of keys and values
    alone = [traffic(engine, [prompt], prompt_logprobs=True)[0] for prompt in prompts]
    driver.beat()
    driver.close()
    return together, alone


@pytest.mark.parametrize("store", ["slots", "pages"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_generate_the_tokens_of_one(ranks: Any, case: Case, store: str) -> None:
    family, changes = case
    choose = random.Random(family)
    _, model = models(family, **changes)
    prompts = [[choose.randrange(vocabulary(family)) for _ in range(length)] for length in (1, 30, 5, 17, 9)]
    engine = GenerationEngine(model, context=CONTEXT, store=store, token_budget=16, max_running=3)
    expected = traffic(engine, prompts)
    (together, alone), _ = ranks(2).run(on_ranks, str(model.pretrained.folder), store, prompts)  # type: ignore[union-attr]
    assert together == alone
    for own, other in zip(together, expected, strict=True):
        assert [each.token for each in own] == [each.token for each in other]
        assert [each.logprob for each in own] == pytest.approx([each.logprob for each in other], abs=BOUND)


def test_two_ranks_verify_the_tokens_of_a_draft_model(ranks: Any) -> None:
    folder = str(models("llama")[1].pretrained.folder)  # type: ignore[union-attr]
    (together, alone), _ = ranks(2).run(on_ranks, folder, "pages", [[3, 4, 5, 6], [7] * 20], folder)
    assert together == alone


def test_widths_that_do_not_divide_the_heads_are_refused() -> None:
    _, model = models("gpt2")
    folder: Path = model.pretrained.folder  # type: ignore[union-attr, assignment]
    check_width(from_pretrained(folder, lazy=True), 2)
    with pytest.raises(
        RequestError, match="2 query heads .* which cannot be split over 3 ranks; nearest plans: .*tensor=2"
    ):
        check_width(from_pretrained(folder, lazy=True), 3)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_rank_ends_a_stream_with_an_error_and_a_signal_does_not(
    tmp_path: Path, number: signal.Signals
) -> None:
    tokens = 1500 if number == signal.SIGKILL else 200
    body = {"model": NAME, "prompt": "say", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    folder = write_folder(tmp_path / "model")
    with command(folder, "--name", NAME, "--tensor", "2") as (address, process):
        request = urllib.request.Request(
            address + "/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as stream:
            assert b"choices" in stream.readline()
            if number == signal.SIGKILL:
                os.kill(process_of_rank(process.pid, 1), number)
            else:
                process.send_signal(number)
            *_, last, end = [line for line in stream.read().decode().splitlines() if line]
        assert end == "data: [DONE]"
        content = json.loads(last.removeprefix("data: "))
        assert process.wait(60) == 128 + number
        if number == signal.SIGKILL:
            assert content["error"]["code"] == "service_ended"
            assert "rank 1" in content["error"]["message"]
            assert "rank 1" in process.read_stderr()
        else:
            assert content["choices"][0]["finish_reason"] == "length"
            assert process.read_stderr().count("stopped by SIGTERM") == 1


def process_of_rank(launcher: int, rank: int) -> int:
    """Return the process of a rank: the launcher starts only its ranks, in order."""
    return int(Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()[rank])
