"""Compare one rank, tensor parallelism and replicas: tokens per second while all requests decode.

    python -m benchmarks.serving_ranks [--rounds 3] [--save]

The models are Llamas with random weights in fp32.  The configurations alternate in each round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import farandole
from benchmarks.measure import records_table, save
from farandole.launch.local import launch
from farandole.models.layers import initialize
from farandole.models.llama import LlamaConfig, build_llama
from farandole.models.sequence import Transformer
from farandole.serve.engine import GenerationEngine
from farandole.serve.ranks.driver import LocalDriver, Worker
from farandole.serve.ranks.shards import shard_model
from farandole.serve.request import Sampling

MODELS = {
    "101 M": LlamaConfig(vocabulary=16384, layers=12, width=768, heads=12, kv_heads=4, inner=2048),
    "304 M": LlamaConfig(vocabulary=16384, layers=24, width=1024, heads=16, kv_heads=4, inner=2816),
}
REQUESTS = (16, 1)
PROMPT, STEPS = 16, 32


def build(config: LlamaConfig) -> Transformer:
    """Return a model with random weights."""
    torch.manual_seed(0)
    model = build_llama(config)
    initialize(model)
    return model.eval()


def tokens_per_s(engine: GenerationEngine, requests: int) -> float:
    """Return the speed of steps in which all requests decode."""
    for number in range(requests):
        engine.add([number + 1] * PROMPT, Sampling(max_tokens=STEPS + 2, temperature=0, ignore_eos=True))
    while len(engine.step()) < requests:
        pass
    start = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    seconds = time.perf_counter() - start
    engine.cancel_all()
    return requests * STEPS / seconds


def in_job(rounds: int, *, saved: bool) -> None:
    """Measure as one of two ranks; rank 0 prints the table."""
    with farandole.init() as runtime:
        rows = [row for name in MODELS for row in _measure(name, rounds, runtime.comm)]
        if runtime.rank == 0:
            print(records_table(rows))
            if saved:
                save("serving-ranks", {"rows": rows})


def _measure(name: str, rounds: int, comm: Any) -> list[dict[str, Any]]:
    alone = GenerationEngine(build(MODELS[name]), context=256)
    divided = build(MODELS[name])
    shard_model(divided, comm)
    worker = Worker(divided, comm) if comm.rank else None
    driver = None if comm.rank else LocalDriver(divided, comm)
    together = None if driver is None else GenerationEngine(driver, context=256)

    def one(threads: int, requests: int) -> float:
        if comm.rank:
            return 0.0
        torch.set_num_threads(threads)
        try:
            return tokens_per_s(alone, requests)
        finally:
            torch.set_num_threads(1)

    def tensor(requests: int) -> float:
        if together is None or driver is None:
            assert worker is not None
            worker.follow()
            return 0.0
        found = tokens_per_s(together, requests)
        driver.pause()
        return found

    def replicas(requests: int) -> float:
        return tokens_per_s(alone, max(1, requests // 2)) if requests > 1 or not comm.rank else 0.0

    configurations: dict[str, Callable[[int], float]] = {
        "1 rank, 1 thread": lambda requests: one(1, requests),
        "1 rank, 2 threads": lambda requests: one(2, requests),
        "tensor=2, 1 thread each": tensor,
        "2 replicas, 1 thread each": replicas,
    }
    samples: dict[tuple[int, str], list[float]] = {}
    for turn in range(rounds + 1):
        for requests in REQUESTS:
            for label, run in configurations.items():
                comm.barrier()
                speed = sum(comm.all_gather_object(run(requests)))
                if turn:
                    samples.setdefault((requests, label), []).append(speed)
    return [
        {
            "parameters": name,
            "requests": requests,
            **{
                label: f"{statistics.median(found):.0f} ({min(found):.0f} to {max(found):.0f})"
                for label in configurations
                for found in [samples[requests, label]]
            },
        }
        for requests in REQUESTS
    ]


def main() -> None:
    """Start two ranks, or run as one of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write docs/benchmarks/serving-ranks.json")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        in_job(options.rounds, saved=options.save)
        return
    torch.set_num_threads(1)
    words = [*sys.argv[1:], "--rank"]
    # without pinning, so that one rank can compute with two threads
    raise SystemExit(launch("benchmarks.serving_ranks", words, ranks=2, module=True, pin=False))


if __name__ == "__main__":
    main()
