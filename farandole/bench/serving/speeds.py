"""Measure and cache the speeds that `planner.serving` needs.

    python -m farandole.bench.serving.speeds FILE      # one rank of the measurement; rank 0 writes FILE

All ranks on this machine measure at the same time, and each result is the mean over the ranks.  The measurement runs
the engine on small models with random weights, and takes about 20 seconds.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from farandole._startup import keep_freed_memory
from farandole.bench.machine import measured
from farandole.bench.resident import data_bytes
from farandole.bench.timing import measuring_rank, median_seconds
from farandole.launch.runtime import Runtime
from farandole.models.layers import initialize
from farandole.models.llama import LlamaConfig, build_llama
from farandole.models.sequence import Transformer
from farandole.parallel.precision import TYPES
from farandole.planner.serving import ServedPart, ServingMachine
from farandole.serve.engine import GenerationEngine
from farandole.serve.request import Sampling
from farandole.serve.runner import Runner, Span
from farandole.serve.store import TILE

PRECISIONS = ("fp32", "bf16")
ROWS = (1, 4, 16, 64, 256)
_LENGTH = 1024
_SEQUENCES = 16
_TURNS = 5
_LIMIT_S = 1.5
"""The time limit for the calls of each of about 20 measurements."""

_FORMAT = "serving-1"
_SMALL: dict[str, Any] = {"vocabulary": 256, "width": 64, "heads": 2, "inner": 128}
_LARGE: dict[str, Any] = {
    "vocabulary": 256,
    "width": 1024,
    "heads": 8,
    "kv_heads": 2,
    "inner": 2816,
    "layers": 4,
}


@dataclass(frozen=True)
class Speeds:
    """The measured fields of `ServingMachine`, in the same units."""

    products: dict[str, list[tuple[int, float]]]
    read: float
    flops: dict[str, float]
    bandwidth: float
    latency: float
    step: float
    layer: float
    sequence: float
    process: int

    def machine(self, memory: int) -> ServingMachine:
        """Return a `ServingMachine` with these speeds and `memory` bytes per rank.

        fp32 weights need twice the memory, because the engine also keeps a packed copy of them.
        """
        return ServingMachine(memory=memory, copies={"fp32": 2}, **vars(self))


def speeds(ranks: int, *, remeasure: bool = False) -> Speeds:
    """Return the mean speeds of a rank while `ranks` ranks are busy on this machine.

    If there are fewer cores than ranks, the speeds are measured with one rank per core.  Unless `remeasure` is True,
    a cached result is used.

    Raises:
        BenchError, LaunchError, SystemExit: as in `measured`.
    """
    return Speeds(
        **measured(
            "farandole.bench.serving.speeds", ranks, _FORMAT, instead="--accelerators", remeasure=remeasure
        )
    )


def measure(runtime: Runtime, fields: Mapping[str, Any] = _LARGE, turns: int = _TURNS) -> Speeds:
    """Measure the speeds of this rank.  This is a collective call.

    Args:
        fields: the fields of `LlamaConfig` for the model whose matrix products and attention are timed.
        turns: the number of calls per measurement.  For overheads the number is multiplied by 4, for all-reduces by 8.
    """
    keep_freed_memory()
    process = data_bytes()
    step, layer, sequence = _overheads(runtime, 4 * turns)
    products, flops, read = {}, {}, 0.0
    for name in PRECISIONS:
        model = _model(**fields).to(TYPES[name])
        part = ServedPart.of(model, 1, name)
        decode = _Decode(model, runtime, turns)

        def without_overhead(seconds: float, sequences: int, part: ServedPart = part) -> float:
            return seconds - step - part.layers * layer - sequences * sequence

        weights = part.body + part.head
        products[name] = [
            (rows, max(0.0, without_overhead(decode.seconds(rows, 1, 0), rows)) / weights)
            if rows <= _SEQUENCES
            else (rows, max(0.0, without_overhead(decode.seconds(1, rows, 0), 1)) / part.body)
            for rows in ROWS
        ]
        long = decode.seconds(_SEQUENCES, 1, _LENGTH - TILE) - decode.seconds(_SEQUENCES, 1, 0)
        if name == "fp32":
            read = _SEQUENCES * (_LENGTH - TILE) * part.kv_bytes / max(long, 1e-9)
        start = _LENGTH - ROWS[-1]
        later = decode.seconds(1, ROWS[-1], start) - decode.seconds(1, ROWS[-1], 0)
        flops[name] = ROWS[-1] * start * part.attention / max(later, 1e-9)
    latency, bandwidth = _all_reduce(runtime, 8 * turns)
    return Speeds(products, read, flops, bandwidth, latency, step, layer, sequence, process)


def _model(**fields: Any) -> Transformer:
    model = build_llama(LlamaConfig(**fields))
    initialize(model)
    return model.eval()


class _Decode:
    """Measures the time of a model's inference steps."""

    def __init__(self, model: Transformer, runtime: Runtime, turns: int) -> None:
        self._runner, self._runtime, self._turns = Runner(model), runtime, turns
        self._memory = self._runner.memory()
        self._pages = _LENGTH // TILE
        self._memory.resize(_SEQUENCES * self._pages, TILE, 0, 0)

    def seconds(self, sequences: int, tokens: int, start: int) -> float:
        """Return the seconds per step with `tokens` new tokens per sequence, starting at position `start`."""
        spans = [
            Span([1] * tokens, start, range(number * self._pages, (number + 1) * self._pages), 1)
            for number in range(sequences)
        ]
        with torch.inference_mode():
            return _seconds(lambda: self._runner.run(self._memory, spans), self._runtime, self._turns)


def _overheads(runtime: Runtime, turns: int) -> tuple[float, float, float]:
    """Return the overhead in seconds per step, per layer and per sequence."""
    # the computation of these tiny models takes almost no time
    rows, times = [], []
    for layers in (2, 10):
        model = _model(layers=layers, **_SMALL)
        for sequences in (1, _SEQUENCES):
            engine = GenerationEngine(model, context=_LENGTH, max_running=_SEQUENCES)
            for _ in range(sequences):
                engine.add([1], Sampling(max_tokens=_LENGTH - 1))
            rows.append((1.0, layers, sequences))
            times.append(_seconds(engine.step, runtime, turns))
    found = np.linalg.lstsq(np.array(rows), np.array(times), rcond=None)[0]
    step, layer, sequence = np.maximum(found, 0.0).tolist()
    return step, layer, sequence


def _all_reduce(runtime: Runtime, turns: int) -> tuple[float, float]:
    """Return the latency of an all-reduce in seconds, and its bus bandwidth in bytes per second."""
    if runtime.size == 1:
        return 0.0, 1e12  # nothing is sent
    small, large = runtime.comm.empty(256), runtime.comm.empty(1 << 18)
    small.zero_(), large.zero_()
    latency = _seconds(lambda: runtime.comm.all_reduce(small), runtime, turns)
    seconds = _seconds(lambda: runtime.comm.all_reduce(large), runtime, turns)
    return latency, 2 * (runtime.size - 1) / runtime.size * large.nbytes / max(seconds - latency, 1e-9)


def _seconds(call: Callable[[], object], runtime: Runtime, turns: int) -> float:
    return median_seconds(call, runtime, turns, _LIMIT_S)


def _mean(values: Sequence[Any]) -> Any:
    """Return the element-wise mean of nested dicts and lists that have the same structure."""
    first = values[0]
    if isinstance(first, dict):
        return {name: _mean([each[name] for each in values]) for name in first}
    if isinstance(first, list | tuple):
        return [_mean(each) for each in zip(*values, strict=True)]
    return type(first)(statistics.fmean(values))


def main(answer: str) -> None:
    """Measure the speeds as one rank; rank 0 writes the means over the ranks as JSON to the file `answer`."""
    with measuring_rank() as runtime:
        every = runtime.comm.all_gather_object(asdict(measure(runtime)))
        if runtime.rank == 0:
            Path(answer).write_text(json.dumps(_mean(every)))


if __name__ == "__main__":
    main(sys.argv[1])
