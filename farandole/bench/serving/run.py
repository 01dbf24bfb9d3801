"""Benchmark a server with an OpenAI-compatible API: a server that the benchmark starts, or a running server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import accumulate, count
from pathlib import Path
from typing import IO

from farandole.bench.options import BenchError
from farandole.bench.serving.client import Client, Sample
from farandole.bench.serving.limit import Limit, measure_limit
from farandole.bench.serving.load import Request, poisson_arrivals, ragged_requests, with_fresh_prompts
from farandole.bench.serving.results import Summary, report, report_speed_up, summarize
from farandole.bench.serving.setup import ServingSetup
from farandole.bench.training import machine
from farandole.data.errors import DataError
from farandole.data.wording import short, size
from farandole.models.hf.fields import FolderError
from farandole.serve.folder import read_model
from farandole.train.config import ConfigError
from farandole.train.run_folder import CheckpointError

WARMUP = 2
"""The number of unmeasured requests that are sent before the first scenario."""


def run(setup: ServingSetup) -> int:
    """Measure all scenarios, print a report, and return the exit status: 1 if a request failed, otherwise 0.

    Raises:
        BenchError: if an option is invalid, the model cannot be read or the server does not answer.
    """
    setup.check()
    if setup.folder is None:
        assert setup.url is not None
        key = "" if setup.api_key_file is None else _read_key(setup.api_key_file)
        return _measure(setup, Client(setup.url, setup.model, api_key=key), None)
    limit, vocabulary = _inspect(setup, setup.folder)
    with _serving(setup, setup.folder) as url:
        return _measure(setup, Client(url, vocabulary=vocabulary), limit)


def _read_key(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise BenchError(f"--api-key-file {path} cannot be read: {error.strerror}; check the path") from None


def _inspect(setup: ServingSetup, folder: Path) -> tuple[Limit, int]:
    """Return the lower bounds for the model in `folder`, and the size of its vocabulary."""
    try:
        found = read_model(folder, precision=setup.precision)
    except (CheckpointError, ConfigError, DataError, FolderError) as error:
        raise BenchError(str(error)) from None
    longest = setup.prompt_tokens[1] + setup.output_tokens[1]
    if longest > found.context:
        raise BenchError(
            f"--prompt-tokens and --output-tokens: expected at most {found.context} tokens in total (the model's "
            f"context), got {longest}"
        )
    return measure_limit(found.model), found.tokenizer.get_vocab_size()


@contextmanager
def _serving(setup: ServingSetup, folder: Path) -> Iterator[str]:
    """Return a context manager that runs `farandole serve` and yields the server's address."""
    options = ["--port", "0", "--precision", setup.precision, "--max-running", str(setup.max_running)]
    command = [sys.executable, "-m", "farandole", "serve", str(folder), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        forward = threading.Thread(target=_forward, args=(process.stderr,))
        try:
            address = _find_address(process.stderr)
            if address is None:
                raise BenchError(
                    f"the server did not start: exit status {process.wait()}; see its output above"
                )
            forward.start()
            yield address
        finally:
            process.terminate()
            if forward.is_alive():
                forward.join()


def _find_address(output: IO[str]) -> str | None:
    """Return the first address in the server's output, or None; earlier lines are copied to stderr."""
    for line in output:
        if match := re.search(r" on (http://\S+)", line):
            return match[1]
        sys.stderr.write(line)
    return None


def _forward(output: IO[str]) -> None:
    for line in output:
        sys.stderr.write(line)


def _measure(setup: ServingSetup, client: Client, limit: Limit | None) -> int:
    requests = ragged_requests(
        setup.requests, setup.prompt_tokens, setup.output_tokens, client.vocabulary, setup.seed
    )
    runs = count(setup.seed + 1)  # a different seed for the prompts of each run

    def fresh(number: int = setup.requests) -> list[Request]:
        return with_fresh_prompts(requests[:number], client.vocabulary, next(runs))

    for line in _head(setup, client, limit):
        print(line)
    warmup = fresh(WARMUP)
    client.at_times(warmup, [0.0] * len(warmup))
    summaries = []
    for scenario in setup.scenarios:
        if scenario == "singlestream":
            samples = client.one_after_another(fresh())
        elif scenario == "offline":
            samples = client.at_times(fresh(), [0.0] * setup.requests)
        else:
            assert setup.rate is not None
            arrivals = poisson_arrivals(setup.requests, setup.rate, setup.burst, setup.seed)
            samples = client.at_times(fresh(), arrivals)
        summaries.append(summarize(scenario, samples, setup, limit))
        print(f"\n{report(summaries[-1])}", flush=True)
    speed_up = []
    if setup.sequential:
        sequential = _all_complete(client.one_after_another(fresh()))
        totals = list(accumulate(sample.latency for sample in sequential))
        for number in _powers_up_to(setup.requests):
            samples = _all_complete(client.at_times(fresh(number), [0.0] * number))
            speed_up.append(_speed_up(totals[number - 1], samples, setup, limit))
        print(f"\n{report_speed_up(speed_up)}", flush=True)
    if setup.json is not None:
        _write(setup, client, limit, summaries, speed_up)
    if setup.picture is not None:
        from farandole.bench.serving.picture import draw  # requires matplotlib

        title = f"{client.model}: {setup.requests} requests, {_lengths(setup)}"
        draw(summaries, speed_up, title, setup.picture)
    return int(any(summary["errors"] for summary in summaries))


def _all_complete(samples: list[Sample]) -> list[Sample]:
    for sample in samples:
        if not sample.is_complete:
            reason = (
                sample.error or "the server rejected a request with HTTP status 429; use fewer --requests"
            )
            raise BenchError(f"--sequential: {reason}")
    return samples


def _powers_up_to(most: int) -> list[int]:
    """Return the powers of two below `most`, followed by `most`."""
    return [1 << power for power in range((most - 1).bit_length())] + [most]


def _speed_up(
    sequential_s: float, samples: Sequence[Sample], setup: ServingSetup, limit: Limit | None
) -> Summary:
    concurrent_s = max(sample.end for sample in samples) - min(sample.arrival for sample in samples)
    row: Summary = {
        "requests": len(samples),
        "sequential_s": sequential_s,
        "concurrent_s": concurrent_s,
        "speed_up": sequential_s / concurrent_s,
    }
    if limit is not None:
        lengths = [(sample.prompt_tokens, sample.output_tokens) for sample in samples]
        row["limit_s"] = limit.total_s(lengths, setup.max_running)
    return row


def _head(setup: ServingSetup, client: Client, limit: Limit | None) -> list[str]:
    lines = [f"# {client.model}: {setup.requests} requests, {_lengths(setup)}, seed {setup.seed}"]
    if limit is not None:
        lines.append(
            f"# {setup.precision}, up to {setup.max_running} sequences; a step reads {size(limit.weight_bytes)} of weights at "
            f"{limit.bandwidth / 1e9:.1f} GB/s and computes 2 x {short(limit.body + limit.head)} operations per token at "
            f"{limit.flops / 1e9:.0f} GFLOP/s"
        )
    return lines


def _lengths(setup: ServingSetup) -> str:
    (a, b), (c, d) = setup.prompt_tokens, setup.output_tokens
    return f"prompts of {a} to {b} tokens, outputs of {c} to {d} tokens"


def _write(
    setup: ServingSetup,
    client: Client,
    limit: Limit | None,
    summaries: list[Summary],
    speed_up: list[Summary],
) -> None:
    result = {
        "model": client.model,
        "machine": machine(),
        "setup": {name: value for name, value in asdict(setup).items() if name not in ("json", "picture")},
        "limit": None if limit is None else asdict(limit),
        "scenarios": summaries,
        "speed_up": speed_up,
    }
    assert setup.json is not None
    Path(setup.json).write_text(json.dumps(result, indent=1, default=str) + "\n")
