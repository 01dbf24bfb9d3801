"""Measure the speed of each rank on this machine while all ranks are busy, and cache the results.

    python -m farandole.bench.machine FILE      # one rank of the measurement; rank 0 writes FILE

The measurement takes a few seconds, or up to about 30 seconds while other programs use the machine.  Each result is the
worst value over all ranks.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from farandole._startup import keep_freed_memory
from farandole.bench.plan_check import context_bytes, warm_up
from farandole.bench.ranks import result_of_ranks
from farandole.bench.resident import data_bytes, library_bytes
from farandole.bench.timing import measuring_rank, median_seconds, slowest
from farandole.data.cache import default_cache
from farandole.launch.cores import usable_cores
from farandole.launch.reports import notify
from farandole.launch.runtime import Runtime
from farandole.parallel.matrix_products import use_fast_products
from farandole.parallel.precision import TYPES

_ROWS, _FEWER_ROWS, _WIDTH = 1024, 64, 512
_ELEMENTS = 4 << 20
_TURNS = 4
_LIMIT_S = 5.0
"""The time limit for the calls of each of the five measurements."""

_FORMAT = 2


@dataclass(frozen=True)
class Speeds:
    """The speeds and the memory of one rank, measured while all ranks are busy; the units are as in `Machine`."""

    flops: dict[str, float]
    stream: float
    bandwidth: float
    process: int
    libraries: int


def speeds(ranks: int, *, remeasure: bool = False) -> Speeds:
    """Return the speeds of a rank while `ranks` ranks are busy on this machine.

    If there are fewer cores than ranks, the speeds are measured with one rank per core.  A cached result is returned
    if there is one, unless `remeasure` is True.

    Raises:
        BenchError, LaunchError, SystemExit: as for `measured`.
    """
    instead = "--flops" if ranks == 1 else "--flops and --bandwidth"
    return Speeds(**measured("farandole.bench.machine", ranks, _FORMAT, instead=instead, remeasure=remeasure))


def measured(module: str, ranks: int, kind: str | int, *, instead: str, remeasure: bool = False) -> Any:
    """Run `module` on `ranks` ranks, or use the cached result, and return the JSON value that the module writes.

    If there are fewer cores than ranks, the module runs on one rank per core.  A line on stderr announces the run.

    Args:
        module: the module to run; its command-line argument is the file to which it must write JSON.
        kind: the kind of measurement, as part of the cache key.
        instead: the command-line options that replace the measurement, for use in messages.
        remeasure: whether to run the module even if the cache contains a result.

    Raises:
        BenchError: if a rank fails.
        LaunchError: if the ranks cannot be started.
        SystemExit: if a signal stops the ranks.
    """
    together = min(ranks, usable_cores())
    kept = _cache_file(together, kind)
    if not remeasure and kept.is_file():
        return json.loads(kept.read_text())
    notify(f"measuring the speed of this machine (once; stored in {kept}; skip this with {instead})")
    text = result_of_ranks(
        module,
        str,
        ranks=together,
        failure="cannot measure the speed of this machine",
        advice=f", or specify the speed with {instead}",
        quiet=True,
    )
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(text)
    return json.loads(text)


def _cache_file(ranks: int, kind: str | int) -> Path:
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    about = [kind, platform.node(), platform.machine(), usable_cores(), ranks, torch.__version__, devices]
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    return default_cache() / "machines" / f"{key}.json"


def measure(runtime: Runtime) -> Speeds:
    """Measure the speeds and the memory of this rank.  This is a collective call."""
    keep_freed_memory()
    use_fast_products()
    warm_up("fp32", runtime)
    process = data_bytes() if runtime.device.type == "cpu" else context_bytes(runtime)
    libraries = library_bytes()
    flops = {name: _flops(dtype, runtime) for name, dtype in TYPES.items() if name != "fp8"}
    return Speeds(flops, _stream(runtime), _bandwidth(runtime), process, libraries)


def _flops(dtype: torch.dtype, runtime: Runtime) -> float:
    """Return the FLOP/s of this rank in the matrix products of a linear layer, forward and backward."""
    weight = torch.randn(4 * _WIDTH, _WIDTH, device=runtime.device).to(dtype)

    def seconds(rows: int) -> float:
        x = torch.randn(rows, _WIDTH, device=runtime.device).to(dtype)

        def products() -> None:
            y = x @ weight.T
            _ = y @ weight
            _ = y.T @ x

        return _seconds(products, runtime)

    rows = _FEWER_ROWS  # more rows can take too long, for example in fp16 on some processors
    found = seconds(rows)
    if slowest(found, runtime) * _ROWS / rows < _LIMIT_S / _TURNS:
        rows = _ROWS
        found = seconds(rows)
    return 3 * 2 * rows * weight.numel() / found


def _stream(runtime: Runtime) -> float:
    """Return this rank's memory bandwidth in layer normalization, GELU and addition, in bytes per second."""
    x = torch.randn(_ELEMENTS // _WIDTH, _WIDTH, device=runtime.device)

    def others() -> None:
        _ = F.layer_norm(x, (_WIDTH,))
        _ = F.gelu(x)
        _ = x + x

    return 7 * x.nbytes / _seconds(others, runtime)


def _bandwidth(runtime: Runtime) -> float:
    """Return the bus bandwidth of an all-reduce of gradients, in bytes per second."""
    ranks = runtime.size
    if ranks == 1:
        return 1e12  # nothing is sent
    # at least as large as a gradient bucket
    gradients = runtime.comm.empty(_ELEMENTS, device=runtime.device).zero_()
    seconds = _seconds(lambda: runtime.comm.all_reduce(gradients, "avg"), runtime)
    return 2 * (ranks - 1) / ranks * gradients.nbytes / seconds


def _seconds(call: Callable[[], object], runtime: Runtime) -> float:
    return median_seconds(call, runtime, _TURNS, _LIMIT_S)


def main(answer: str) -> None:
    """Run the measurement as one of the ranks; rank 0 writes the worst values as JSON to the file `answer`."""
    with measuring_rank() as runtime:
        own = measure(runtime)
        slow = torch.tensor([*own.flops.values(), own.stream, own.bandwidth], dtype=torch.float64)
        large = torch.tensor([own.process, own.libraries])
        runtime.comm.all_reduce(slow, "min")
        runtime.comm.all_reduce(large, "max")
        *flops, stream, bandwidth = slow.tolist()
        process, libraries = large.tolist()
        if runtime.rank == 0:
            found = Speeds(dict(zip(own.flops, flops, strict=True)), stream, bandwidth, process, libraries)
            Path(answer).write_text(json.dumps(asdict(found)))


if __name__ == "__main__":
    main(sys.argv[1])
