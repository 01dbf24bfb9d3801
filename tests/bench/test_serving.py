"""The serving benchmark: its figures add up, failures are counted, and invalid options are refused."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farandole.bench.options import BenchError
from farandole.bench.serving.client import WORDS, Client, Sample
from farandole.bench.serving.limit import Limit, measure_limit
from farandole.bench.serving.load import Request, poisson_arrivals, ragged_requests, with_fresh_prompts
from farandole.bench.serving.results import percentile, report, summarize
from farandole.bench.serving.run import run
from farandole.bench.serving.setup import ServingSetup, parse_range
from farandole.cli.main import app
from tests.launch import jobs
from tests.serve.models import models
from tests.serve.server import NAME, serving, write_folder

SHORT = {"prompt_tokens": (2, 20), "output_tokens": (1, 8)}


def test_requests_are_reproducible_and_arrive_at_the_rate() -> None:
    requests = ragged_requests(50, (2, 9), (1, 4), 300, seed=1)
    assert requests == ragged_requests(50, (2, 9), (1, 4), 300, seed=1)
    assert {len(request.prompt) for request in requests} == set(range(2, 10))
    assert {request.output_tokens for request in requests} == {1, 2, 3, 4}
    fresh = with_fresh_prompts(requests, 300, seed=2)
    assert [len(request.prompt) for request in fresh] == [len(request.prompt) for request in requests]
    assert all(a.prompt != b.prompt for a, b in zip(fresh, requests, strict=True) if len(a.prompt) > 3)
    arrivals = poisson_arrivals(4000, rate=20, burst=4, seed=0)
    assert arrivals == sorted(arrivals) and len(set(arrivals)) == 1000
    assert arrivals[-1] == pytest.approx(4000 / 20, rel=0.1)


def test_every_scenario_against_a_running_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "a.json", tmp_path / "a.png"
    with serving(write_folder(tmp_path / "model")) as (url, service):
        setup = ServingSetup(
            url=url,
            scenarios=("singlestream", "offline", "server"),
            requests=5,
            rate=200.0,
            burst=2,
            ttft=600,
            tpot=600,
            sequential=True,
            json=str(path),
            picture=str(picture),
            **SHORT,
        )
        assert run(setup) == 0
        service.engine.check_idle()
    result = json.loads(path.read_text())
    assert result["model"] == NAME and picture.stat().st_size > 0
    requests = ragged_requests(5, *SHORT.values(), len(WORDS) + 1, seed=0)
    expected = [request.output_tokens for request in requests]
    for summary in result["scenarios"]:
        assert summary["complete"] == 5 and not summary["errors"]
        assert summary["output_tokens_per_s"] * summary["seconds"] == pytest.approx(summary["output_tokens"])
        assert summary["ttft_s"]["p50"] <= summary["latency_s"]["p50"] <= summary["latency_s"]["p99"]
        assert [sample["output_tokens"] for sample in summary["samples"]] == expected
    assert [row["requests"] for row in result["speed_up"]] == [1, 2, 4, 5]
    printed = capsys.readouterr().out
    assert "MLPerf SingleStream: " in printed and "MLPerf Offline: " in printed
    assert "requests/s, valid: 99th percentiles" in printed


def test_refused_and_failed_requests_are_counted(tmp_path: Path) -> None:
    with serving(write_folder(tmp_path), max_running=1, max_waiting=1) as (url, _):
        samples = Client(url, vocabulary=300).at_times([Request([5, 6, 7], 200)] * 8, [0.0] * 8)
        (failed,) = Client(url, vocabulary=300).one_after_another([Request([5] * 3000, 1)])
    summary = summarize("offline", [*samples, failed], ServingSetup(), None)
    assert summary["refused"] >= 1 and summary["complete"] >= 1
    assert summary["refused"] + summary["complete"] == 8
    ((error, count),) = summary["errors"].items()
    assert error.startswith("status 400: ") and count == 1
    assert "1 failed" in report(summary) and "invalid, because not all requests" in report(summary)


STREAMS = {
    "the stream ended before [DONE]": ['{"choices": [{"text": "a"}]}'],
    "the stream has no usage": ['{"choices": [{"text": "a"}]}', "[DONE]"],
    "error in the stream": ['{"error": {"message": "failed"}}', "[DONE]"],
    "JSONDecodeError": ["{"],
}


@pytest.mark.parametrize("message", STREAMS)
def test_incomplete_answers_are_failures(message: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write("".join(f"data: {event}\n\n" for event in STREAMS[message]).encode())

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        sample = Client(f"http://127.0.0.1:{server.server_port}/v1", "m").send(Request([1], 2), 0.0)
        server.shutdown()
    assert sample.error is not None and sample.error.startswith(message)


def test_times_of_a_sample() -> None:
    sample = Sample(10.0, [11.0, 11.5, 13.0], 13.0, prompt_tokens=4, output_tokens=5)
    assert (sample.ttft, sample.latency, sample.tpot, sample.gaps) == (1.0, 3.0, 0.5, [0.5, 1.5])
    assert Sample(0.0, [1.0], 1.0, output_tokens=1).tpot is None
    values = list(range(1, 201))
    assert [percentile(values, percent) for percent in (50, 90, 99, 100)] == [100, 180, 198, 200]


def test_the_limit_counts_the_weights_of_a_token() -> None:
    limit = Limit(body=100, head=10, weight_bytes=440, bandwidth=44.0, flops=2.0)
    assert limit.step_s == 10
    assert limit.products_s([(3, 2)]) == 100 * 4 + 10 * 2
    assert limit.total_s([(3, 2)], batch=1) == 420
    assert Limit(1, 0, 4, 0.5, 1e9).total_s([(1, 3), (1, 5), (1, 4)], batch=2) == 6 * 8.0
    config = models("mixtral")[0].config
    _, ours = models("mixtral")
    found = measure_limit(ours)
    unused = config.num_local_experts - config.num_experts_per_tok
    expert = 3 * config.hidden_size * config.intermediate_size
    weights = sum(parameter.numel() for parameter in ours[1:].parameters())
    assert found.body + found.head == weights - config.num_hidden_layers * unused * expert
    assert found.weight_bytes == 4 * (found.body + found.head) and found.bandwidth > 0 < found.flops


def test_the_command_serves_a_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    words = f"-n 3 --prompt-tokens 4 --output-tokens 2:5 --max-running 2 --json {tmp_path / 'a.json'}"
    command = [sys.executable, "-m", "farandole", "bench", "serving", str(folder), *words.split()]
    status, out, err = jobs.run(command, tmp_path)
    assert status == 0, err
    result = json.loads((tmp_path / "a.json").read_text())
    (summary,) = result["scenarios"]
    assert summary["complete"] == 3 and summary["prompt_tokens"] == 12
    assert summary["limit"]["tpot_s"] == result["limit"]["weight_bytes"] / result["limit"]["bandwidth"]
    assert "a step reads" in out and "of limit" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "expected either a FOLDER to serve or --url"),
        ("--url 127.0.0.1:8000", "expected an address that starts with http:// or https://"),
        ("x --model m", "--model and --api-key-file need --url"),
        ("x --scenario ofline", "nearest: offline"),
        ("x --scenario server", "--scenario server and --rate require each other"),
        ("x --rate 2", "--scenario server and --rate require each other"),
        ("x --burst 2", "--burst 2 needs --scenario server"),
        ("x --requests 0", "--requests: expected at least 1, got 0"),
        ("x --picture a.txt", "expected a file name that ends in .png, .pdf, .svg"),
        ("x --prompt-tokens 9:8", "expected token counts such as 64 or 8:128, got '9:8'"),
        ("/no/such/folder", "/no/such/folder"),
        ("--url http://127.0.0.1:9", "check --url"),
    ],
)
def test_invalid_options_are_refused(words: str, message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serving", *words.split()], prog_name="farandole")
    assert result.exit_code == 2
    assert "farandole bench serving: " in result.output and message in result.output


def test_requests_must_fit_in_the_context(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="expected at most 2048 tokens in total"):
        run(ServingSetup(folder=write_folder(tmp_path), output_tokens=(1, 2000)))


def test_one_number_is_a_range() -> None:
    assert parse_range("--prompt-tokens", "64") == (64, 64)
