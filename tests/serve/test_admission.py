"""The fit of step times, and the limits that follow from it."""

from __future__ import annotations

import random
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
import typer

from farandole.cli.durations import parse_duration
from farandole.serve.admission import FIRST_RUNNING, MARGIN, MIN_PROMPT_TOKENS, Admission, StepTimes, Target
from farandole.serve.request import RequestError
from tests.serve.models import engine_of
from tests.serve.server import NAME, command, write_folder

COEFFICIENTS = (0.010, 0.001, 0.0002)
TERMS = ("base", "decode", "prompt_token")


def seconds_of(decodes: int, prompt_tokens: int, factor: float = 1.0) -> float:
    base, per_decode, per_prompt_token = COEFFICIENTS
    return factor * (base + per_decode * decodes + per_prompt_token * prompt_tokens)


def feed(target: StepTimes | Admission, steps: int, *, factor: float = 1.0, noise: float = 0.0) -> None:
    """Add the steps of a mixed load."""
    choose = random.Random(steps)
    for _ in range(steps):
        decodes, prompt_tokens = choose.randint(0, 16), choose.choice([0, 0, choose.randint(1, 256)])
        seconds = seconds_of(decodes, prompt_tokens, factor) * (1 + noise * choose.uniform(-1, 1))
        if isinstance(target, StepTimes):
            target.add(decodes, prompt_tokens, seconds)
        else:
            target.observe(decodes, prompt_tokens, seconds, selected=max(decodes, 1))


def test_exact_times_are_fitted_exactly() -> None:
    times = StepTimes()
    assert times.coefficients == (0, 0, 0)
    feed(times, 20)
    assert times.coefficients == pytest.approx(COEFFICIENTS, rel=0.01)


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_the_fit_follows_a_machine_that_changes(factor: float) -> None:
    times = StepTimes()
    feed(times, 500, noise=0.3)
    assert times.predict(8, 100) == pytest.approx(seconds_of(8, 100), rel=0.15)
    feed(times, 20, factor=factor, noise=0.3)
    assert times.predict(8, 100) == pytest.approx(seconds_of(8, 100, factor), rel=0.3)
    feed(times, 300, factor=factor, noise=0.3)
    assert times.predict(8, 100) == pytest.approx(seconds_of(8, 100, factor), rel=0.15)


def test_steps_without_prompts_do_not_change_the_time_of_prompts() -> None:
    times = StepTimes()
    feed(times, 100)
    for _ in range(20_000):
        times.add(4, 0, seconds_of(4, 0))
    assert times.coefficients == pytest.approx(COEFFICIENTS, rel=0.01)


def test_one_pause_does_not_decide() -> None:
    times = StepTimes()
    feed(times, 200)
    times.add(8, 0, 100.0)
    assert times.predict(8, 0) < 2 * seconds_of(8, 0)
    feed(times, 200)
    assert times.predict(8, 0) == pytest.approx(seconds_of(8, 0), rel=0.05)


def test_coefficients_are_finite_and_never_negative() -> None:
    times, choose = StepTimes(), random.Random(0)
    for _ in range(2000):
        times.add(
            choose.choice([0, 1, 1000]), choose.choice([0, 1, 8192]), choose.choice([0.0, 1e-6, 0.01, 30])
        )
        assert all(0 <= each < 1e6 for each in times.coefficients)


def test_the_fit_remains_in_range_for_a_long_time() -> None:
    """Noise whose mean logarithm is not zero must not accumulate, or the numbers underflow after 100,000 steps."""
    times, choose = StepTimes(), random.Random(0)
    scales = []
    for step in range(20_000):
        decodes, prompt_tokens = choose.randrange(5), choose.randrange(60) * (choose.random() < 0.4)
        times.add(decodes, prompt_tokens, seconds_of(decodes, prompt_tokens) * choose.lognormvariate(0, 0.4))
        if not step % 1000:
            scales.append(float(abs(times._information).max()))
    assert max(scales[1:]) < 1000 * min(scales[1:])
    assert seconds_of(2, 0) / 4 < times.predict(2, 0) < 4 * seconds_of(2, 0)


def test_without_a_target_the_limits_are_those_of_the_engine() -> None:
    admission = Admission(Target(), 16, 256)
    feed(admission, 100)
    assert (admission.max_running, admission.prompt_budget(10)) == (16, 246)


def test_limits_grow_with_what_was_measured() -> None:
    admission = Admission(Target(ttft=2, tpot=0.1), 64, 1024)
    assert (admission.max_running, admission.prompt_budget(0)) == (FIRST_RUNNING, MIN_PROMPT_TOKENS)
    admission.observe(4, 16, seconds_of(4, 16), selected=4)
    assert admission.max_running <= 8
    assert admission.prompt_budget(4) == 32
    for _ in range(50):
        decodes = admission.max_running
        prompt_tokens = admission.prompt_budget(decodes)
        seconds = seconds_of(decodes, prompt_tokens)
        assert seconds <= 0.1
        admission.observe(decodes, prompt_tokens, seconds, selected=decodes)
    assert admission.max_running > 16


def test_limits_meet_the_target() -> None:
    admission = Admission(Target(tpot=0.1), 1000, 4096)
    for _ in range(200):
        admission.observe(16, 64, seconds_of(16, 64), selected=16)
        admission.observe(60, 0, seconds_of(60, 0), selected=60)
        admission.observe(4, 0, seconds_of(4, 0), selected=4)
    limit = admission.max_running
    ratio = 64 / 80
    assert seconds_of(limit, int(limit * ratio)) == pytest.approx(MARGIN * 0.1, rel=0.05)
    assert seconds_of(60, admission.prompt_budget(60)) == pytest.approx(MARGIN * 0.1, rel=0.02)
    assert admission.prompt_budget(500) == MIN_PROMPT_TOKENS
    assert admission.prompt_budget(0) == 4096  # no sequence decodes


def test_a_target_below_the_base_runs_one_sequence() -> None:
    admission = Admission(Target(tpot=0.001), 16, 256)
    for decodes in (1, 2, 3, 4) * 5:
        admission.observe(decodes, 0, 0.01, selected=decodes)
    assert admission.max_running == 1
    assert admission.prompt_budget(4) == MIN_PROMPT_TOKENS


def test_waits_follow_the_measured_throughput() -> None:
    admission = Admission(Target(ttft=2, tpot=0.1), 4, 64)
    for step in range(5000):
        admission.observe(4, 8, 0.05, selected=4, ended=step % 10 == 0)
    assert admission.until_ended(6) == pytest.approx(3, rel=0.05)  # one sequence ends each 0.5 s
    assert admission.until_ended(0) == 0
    assert admission.until_computed(0, 4) == 0
    assert admission.until_computed(160, 4) == pytest.approx(160 / admission.prompt_budget(4) * 0.06, rel=0.5)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_targets_are_positive(value: float) -> None:
    with pytest.raises(RequestError, match="tpot: expected a positive, finite time"):
        engine_of("llama", tpot=value)


def test_a_target_that_cannot_be_met_runs_one_sequence_at_a_time() -> None:
    engine = engine_of("llama", tpot=1e-6, ttft=1e-6)
    for _ in range(6):
        engine.add([1, 2, 3] * 8)
    most = ended = 0
    while engine.has_work:
        ended += sum(output.finish_reason == "length" for output in engine.step())
        most = max(most, engine.running)
    assert ended == 6
    assert engine.admission.max_running == 1
    assert most <= FIRST_RUNNING


def load(address: str, clients: int, seconds: float) -> tuple[list[float], list[int]]:
    """Send requests from several clients, and return the times per output token, and the values of Retry-After."""
    end = time.monotonic() + seconds
    times: list[float] = []
    retries: list[int] = []

    def send(seed: int) -> None:
        choose = random.Random(seed)
        options: dict[str, Any] = {"model": NAME, "stream": True, "extra_body": {"ignore_eos": True}}
        with openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0) as client:
            while time.monotonic() < end:
                prompt = [choose.randrange(2, 300) for _ in range(choose.randint(1, 60))]
                try:
                    stream = client.completions.create(
                        prompt=prompt, max_tokens=40, stream_options={"include_usage": True}, **options
                    )
                except openai.RateLimitError as error:
                    retries.append(int(error.response.headers["retry-after"]))
                    time.sleep(0.05)
                    continue
                arrivals = [time.monotonic() for _ in stream]
                times.append((arrivals[-1] - arrivals[0]) / 39)

    threads = [threading.Thread(target=send, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times, retries


def test_the_command_limits_the_batch_under_load(tmp_path: Path) -> None:
    """A target below the time of a full batch limits the running sequences on any machine, however busy."""
    options = ("--name", NAME, "--max-running", "32", "--max-waiting", "8", "--tpot", "1ms", "--ttft", "1s")
    with command(write_folder(tmp_path), *options) as (address, _):
        times, retries = load(address, 32, 2)
        metrics = urllib.request.urlopen(address + "/metrics").read().decode()
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert times
    assert retries and min(retries) >= 1
    assert float(values["farandole_requests_running_limit"]) < 32
    assert float(values["farandole_requests_refused_total"]) == len(retries)
    assert sum(float(values[f'farandole_step_model_seconds{{term="{term}"}}']) for term in TERMS) > 0


def test_targets_need_a_unit() -> None:
    for text in ("2", "-1s", "0ms", "1h", "nans"):
        with pytest.raises(typer.BadParameter, match="expected a positive time"):
            parse_duration(text)
    assert [parse_duration(text) for text in ("250us", "1.5s", "2 min")] == pytest.approx([0.00025, 1.5, 120])
