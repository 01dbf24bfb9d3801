"""What a run says, before its first step, of what it recomputes and what it keeps elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from farandole.data.wording import counted, size
from farandole.memory.disk import Budget, OffloadError
from farandole.memory.offload_store import measure_bandwidth
from farandole.memory.swap import THRESHOLD_BYTES
from farandole.train.engine import Engine


def memory_notes(engine: Engine, ranks: int) -> Iterator[str]:
    """A line for each; rank 0 says them for `ranks` ranks of this host.  Measures the disk for about a second."""
    parallel = engine.config.parallel
    done = engine.recomputed
    if done.modules:
        kept = ""
        if done.before is not None and done.after is not None:
            kept = f": {size(done.after)} of activations kept by each rank instead of {size(done.before)}"
        yield f"recomputing {parallel.recompute} in {counted(len(done.modules), 'module')}{kept}"
    if parallel.swap != "none":
        where = "the memory of the host" if parallel.swap == "host" else parallel.swap.removeprefix("disk:")
        yield f"activations of {size(THRESHOLD_BYTES)} and more wait for the backward pass in {where}"
    kind, _, folder = parallel.offload.partition(":")
    for update in engine.replica.offloaded:
        mine = update.state.budget()
        if kind != "disk":
            yield f"AdamW's averages in {update.state.stream.access}"
            continue
        try:
            bandwidth = measure_bandwidth(folder)
        except (
            OffloadError
        ) as error:  # the disk is full now that the averages are there: they have their room
            yield f"AdamW's averages on the disk of {folder}; its speed is not known: {error}"
            continue
        yield f"AdamW's averages on the disk: {Budget(mine.read_bytes * ranks, mine.written_bytes * ranks, bandwidth)}"
