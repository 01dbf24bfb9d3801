"""One rank of `farandole plan --serve --check`: serve random prompts with random weights, and measure the speed.

    python -m farandole.bench.serving.plan_check JOB_SPEC

JOB_SPEC is a `ServingCheckJobSpec` in JSON.  Rank 0 writes a list of `Measured` as JSON, with one item for each number
of running sequences.  The first rank of each replica drives the engine of that replica.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import farandole
from farandole._startup import keep_freed_memory
from farandole.comm.communicator import Communicator
from farandole.launch.runtime import Runtime
from farandole.models.sequence import Transformer
from farandole.parallel.precision import TYPES
from farandole.planner.serving import Mix
from farandole.serve.engine import GenerationEngine
from farandole.serve.ranks.driver import LocalDriver, Worker
from farandole.serve.ranks.shards import shard_model
from farandole.serve.request import Sampling
from farandole.serve.runner import Runner
from farandole.train.config import load_config
from farandole.train.folders import build_language_model
from farandole.train.start import read_request

ROUNDS = 2
"""The number of requests to measure, divided by the number of running sequences."""


@dataclass(frozen=True)
class ServingCheckJobSpec:
    """The job of the ranks: the model to serve, the serving options, and the file for the measurements.

    Args:
        words: the arguments that describe the model, as for a training run.
        tensor: the number of tensor-parallel ranks per replica.
        precision: the dtype of the weights.
        mix: the lengths of the prompts and outputs, as a dict with the fields of `planner.serving.Mix`.
        running: the numbers of running sequences to measure.
        answer: the file for the measurements.
    """

    words: Sequence[str]
    tensor: int
    precision: str
    mix: Mapping[str, int]
    running: Sequence[int]
    answer: str

    def dump(self) -> str:
        """Return the job specification as JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Measured:
    """The measurements for one number of running sequences.

    Args:
        ttft: the mean time to the first token, in seconds.
        tpot: the mean time per output token, in seconds.
        tokens_per_s: the number of output tokens per second.
    """

    ttft: float
    tpot: float
    tokens_per_s: float


def measure(job_spec: ServingCheckJobSpec, runtime: Runtime) -> list[Measured]:
    """Measure serving with each number of running sequences in `job_spec.running`.  This is a collective call.

    Returns:
        One `Measured` per item of `running`, combined over all replicas: the times are means, the rate is the sum.
    """
    keep_freed_memory()
    request = read_request(list(job_spec.words), resume=False)
    model = build_language_model(load_config(request.source, request.overrides))
    assert isinstance(model, Transformer)
    model = model.to(TYPES[job_spec.precision]).eval()
    comm = runtime.comm.split(runtime.rank // job_spec.tensor)
    assert comm is not None
    found: list[Measured] = []
    if job_spec.tensor > 1:
        shard_model(model, comm)
    if comm.rank:
        worker = Worker(model, comm)
        for _ in job_spec.running:
            runtime.comm.barrier()
            worker.follow()
            found.append(Measured(0.0, 0.0, 0.0))
    else:
        runner = Runner(model) if job_spec.tensor == 1 else LocalDriver(model, comm)
        mix = Mix(**job_spec.mix)
        engine = GenerationEngine(
            runner,
            context=mix.prompt + mix.output,
            max_running=max(job_spec.running),
            token_budget=max(256, 2 * max(job_spec.running)),
        )
        for running in job_spec.running:
            runtime.comm.barrier()
            found.append(_serve(engine, mix, running))
            if isinstance(runner, LocalDriver):
                runner.pause()
    return _together(runtime.comm, found, job_spec.tensor)


def _serve(engine: GenerationEngine, mix: Mix, running: int) -> Measured:
    """Serve requests with `running` sequences in every batch, and return the measurements."""
    choose = random.Random(running)
    started: dict[int, float] = {}
    first: dict[int, float] = {}
    ttft, tpot, steps = [], [], []

    def add(output: int) -> None:
        prompt = [choose.randrange(engine.vocabulary) for _ in range(mix.prompt)]
        number = engine.add(prompt, Sampling(max_tokens=output, ignore_eos=True))
        started[number] = time.perf_counter()

    for number in range(running):  # the first requests end at different times
        add(1 + (mix.output - 1) * (number + 1) // running)
    ended = tokens = 0
    begin = time.perf_counter()
    while ended < (1 + ROUNDS) * running:
        before = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        tokens += len(outputs)
        steps.append(now - before)
        for output in outputs:
            first.setdefault(output.request, now)
            if output.finish_reason is None:
                continue
            ended += 1
            if ended > running:
                ttft.append(first[output.request] - started[output.request])
                tpot.append((now - first[output.request]) / max(1, mix.output - 1))
            elif ended == running:  # the measurement begins
                begin, tokens = now, 0
                steps.clear()
            add(mix.output)
    seconds = time.perf_counter() - begin
    engine.cancel_all()
    # a request that arrives during a step waits for half a step on average
    waiting = statistics.fmean(steps) / 2 if running > 1 else 0.0
    return Measured(statistics.fmean(ttft) + waiting, statistics.fmean(tpot), tokens / seconds)


def _together(comm: Communicator, own: Sequence[Measured], width: int) -> list[Measured]:
    every = comm.all_gather_object(list(own))[::width]
    return [
        Measured(
            statistics.fmean(each.ttft for each in replicas),
            statistics.fmean(each.tpot for each in replicas),
            sum(each.tokens_per_s for each in replicas),
        )
        for replicas in zip(*every, strict=True)
    ]


def main(text: str) -> None:
    """Run the job specified by the JSON `text` as one of the launched ranks."""
    job_spec = ServingCheckJobSpec(**json.loads(text))
    with farandole.init() as runtime:
        found = measure(job_spec, runtime)
        if runtime.rank == 0:
            Path(job_spec.answer).write_text(json.dumps([asdict(each) for each in found]))


if __name__ == "__main__":
    main(sys.argv[1])
