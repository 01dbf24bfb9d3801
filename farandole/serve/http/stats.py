"""Collect the state that the page at `/` shows: totals, and the sequences and KV cache of each replica."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from farandole.serve.metrics import Histogram
from farandole.serve.store import CHUNK, SlotStore

if TYPE_CHECKING:
    from farandole.serve.engine import GenerationEngine

COUNTERS = ("refused", "steps", "prompt_tokens", "shared_tokens", "generated_tokens")
LATENCIES = {
    "queue": "queue_time",
    "first_token": "first_token",
    "inter_token": "between_tokens",
    "per_output_token": "per_output_token",
}


def stats_of(engines: Sequence[GenerationEngine], queued: int) -> dict[str, Any]:
    """Return the current state of the replicas.  Times are in seconds.

    Args:
        queued: the number of sequences that the engines have not received yet.
    """
    metrics = [engine.metrics for engine in engines]
    finished: Counter[str] = Counter()
    for each in metrics:
        finished.update(dict(each.requests))
    return {
        "time": time.monotonic(),
        "running": sum(engine.running for engine in engines),
        "running_limit": sum(engine.admission.max_running for engine in engines),
        "waiting": sum(engine.waiting for engine in engines) + queued,
        "max_waiting": sum(engine.max_waiting for engine in engines),
        "finished": finished,
        **{name: sum(getattr(each, name) for each in metrics) for name in COUNTERS},
        "latencies": {
            name: _sum([getattr(each, attribute) for each in metrics])
            for name, attribute in LATENCIES.items()
        },
        "store": "slots" if isinstance(engines[0].store, SlotStore) else "pages",
        "replicas": [_memory_of(engine) for engine in engines],
    }


def _sum(histograms: Sequence[Histogram]) -> dict[str, Any]:
    """Return the sum of histograms with the same buckets."""
    counts = [sum(each) for each in zip(*(histogram.counts for histogram in histograms), strict=True)]
    return {"bounds": histograms[0].bounds, "counts": counts, "sum": sum(each.sum for each in histograms)}


def _memory_of(engine: GenerationEngine) -> dict[str, Any]:
    """Return the state of a replica: its KV cache, and its running sequences in order of arrival."""
    store = engine.store
    kv = {
        "used": store.used,
        "capacity": store.capacity,
        "moves": store.moves,
        "blocks": store.blocks,
        "block_length": store.block_length,
        "chunk": CHUNK,
        "cached": store.cached,
    }
    return {"kv": kv, "sequences": [asdict(each) for each in engine.progress()]}
