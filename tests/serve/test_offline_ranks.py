"""`farandole.LLM` and `farandole generate` on several ranks: the tokens of one process, and no process left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import farandole
from farandole.serve.ranks.errors import RanksFailed
from farandole.serve.request import RequestError
from tests.launch.jobs import all_ended, finish, ours, run, start
from tests.serve.server import CONTEXT, eventually, write_folder

PROMPTS: list[Any] = ["say red", [5, 6, 7], "two dog " * 9]
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
BOUND = 1e-4
"""The largest difference of log-probabilities between one rank and several."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_started_ranks_generate_the_tokens_of_one_process_until_one_dies(folder: Path) -> None:
    alone = farandole.LLM(folder).generate(PROMPTS, logprobs=2, **GREEDY)
    before = children(os.getpid())
    with farandole.LLM(folder, tensor=2, max_running=3) as llm:
        (worker,) = set(children(os.getpid())) - set(before)
        together = llm.generate(PROMPTS, logprobs=2, **GREEDY)
        for own, other in zip(together, alone, strict=True):
            assert own.completions[0].tokens == other.completions[0].tokens
            assert [each.logprob for each in own.completions[0].logprobs] == pytest.approx(
                [each.logprob for each in other.completions[0].logprobs], abs=BOUND
            )
        for result in llm.stream(PROMPTS * 3, **GREEDY):  # abandoned
            assert result.text == alone[0].text
            break
        with pytest.raises(RequestError, match=r"prompts\[1\], max_tokens: a prompt of 2 tokens"):
            llm.generate([[1], [1, 1]], max_tokens=CONTEXT - 1)
        assert llm.generate(PROMPTS, **GREEDY)[2].text == alone[2].text

        def kill(outputs: Any) -> None:
            os.kill(worker, signal.SIGKILL)

        with pytest.raises(RanksFailed, match=rf"rank 1 \(process {worker}\) died"):
            list(llm.stream(PROMPTS, progress=kill, **GREEDY))
        with pytest.raises(RanksFailed, match="create the LLM again"):
            llm.generate(PROMPTS)
    assert children(os.getpid()) == before


def test_widths_that_do_not_divide_the_model_are_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match="tensor: .* query heads .* nearest plans"):
        farandole.LLM(folder, tensor=7)
    with pytest.raises(RequestError, match="tensor: expected at least 1 rank, got 0"):
        farandole.LLM(folder, tensor=0)


def in_job(rank: int, size: int, folder: str) -> Any:
    """Run the same program on all ranks of a job."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    try:
        with farandole.LLM(folder, tensor=size) as llm:
            found = [[each.text for each in llm.generate(PROMPTS, **GREEDY)] for _ in range(2)]
            found.append([next(llm.stream(PROMPTS, **GREEDY)).text])
            with pytest.raises(RequestError, match=r"prompts\[0\], prompt: expected at least one token"):
                llm.generate([[]])
            with pytest.raises(RequestError, match=r"prompts: expected a list of prompts"):
                llm.generate("say")
            with pytest.raises(RequestError, match=r"expected 1 or 2 \(the number of ranks that"):
                farandole.LLM(folder, tensor=3)
            return found
    finally:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]


def test_all_ranks_of_a_job_get_the_results(ranks: Any, folder: Path) -> None:
    alone = [each.text for each in farandole.LLM(folder).generate(PROMPTS, **GREEDY)]
    assert ranks(2).run(in_job, str(folder)) == [[alone, alone, alone[:1]]] * 2


def test_generate_under_a_launcher(folder: Path) -> None:
    (alone,) = farandole.LLM(folder).generate(["say red"], **GREEDY)
    command = ["-m", "farandole", "generate", str(folder), "--temperature", "0", "--tokens", "12"]
    status, out, err = run(ours("-n", "2", *command, "--prompt", "say red"), fork_ranks=True)
    assert status == 0, err
    assert out == f"say red{alone.text}\n"
    status, out, err = run(ours("-n", "2", *command, "--prompt", "say", "--tensor", "3"), fork_ranks=True)
    assert status == 2
    assert (
        err.count("tensor: expected 1 or 2 (the number of ranks that farandole launch started), got 3") == 1
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_behind(folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "a", "ignore_eos": true}\n' * 5000)
    words = ["generate", str(folder), "--input", str(prompts), "--output", str(out), "--tensor", "2"]
    job = start([sys.executable, "-m", "farandole", *words])
    eventually(lambda: job.poll() is not None or (out.exists() and out.stat().st_size), 90)
    assert job.poll() is None, job.communicate()
    started = children(job.pid)
    assert len(started) == 1
    job.send_signal(number)
    if number == signal.SIGINT:  # the second signal arrives during the cleanup after the first
        time.sleep(0.01)
        job.send_signal(number)
    status, _, err = finish(job)
    assert all_ended(started)
    # the second interruption can arrive while Python ends the process
    assert status in ((130, -number) if number == signal.SIGINT else (-number,)), err
    assert json.loads(out.read_text().splitlines()[0])["index"] == 0
