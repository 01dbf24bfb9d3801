"""Compare loading a Hugging Face folder of 1 GB with reading its files.

    python -m benchmarks.pretrained [--rounds 5] [--save]

Each measurement runs in a new process.  A cold measurement begins with the files evicted from the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.measure import records_table, save

HIDDEN, LAYERS, VOCABULARY, SHARDS = 1024, 16, 32000, "300MB"
CHUNK = 8 << 20
LIMIT, SHARED_LIMIT = "writing new memory", "writing shared memory, rank 0 of 2"
NAMES = ("reading the files", "farandole", LIMIT, "farandole rank 0 of 2, zero=3", SHARED_LIMIT)
"""The implementations.  The limits only write as many bytes as the weights to new memory, which the kernel clears."""


def write_folder(folder: Path) -> None:
    """Write a Llama of 1 GB in fp32, with random weights, in several files."""
    from tests import torchvision_models  # noqa: F401, I001 - before transformers is imported
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2816,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=SHARDS)


def files_of(folder: Path) -> list[Path]:
    """Return the weight files of a folder."""
    return sorted(folder.glob("*.safetensors"))


def evict(folder: Path) -> None:
    """Remove the files from the page cache."""
    for path in files_of(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ---- one measurement, in a process ----


def prepare(name: str, folder: Path) -> Callable[[], object]:
    """Import what an implementation needs, and return the call to measure."""
    if name == "reading the files":

        def read() -> None:
            buffer = memoryview(bytearray(CHUNK))
            for path in files_of(folder):
                with path.open("rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass

        return read
    nbytes = sum(path.stat().st_size for path in files_of(folder))
    if name == LIMIT:
        return lambda: torch.empty(nbytes, dtype=torch.uint8).fill_(1)
    import farandole
    from farandole.models.hf import from_pretrained

    if name == "farandole":
        return lambda: from_pretrained(folder)
    runtime = farandole.init()
    import farandole.parallel.parallelize  # an import takes a second, which is not measured

    if name == SHARED_LIMIT:
        shared = runtime.comm.shared(nbytes, dtype=torch.uint8)
        assert shared is not None
        return lambda: (shared.chunk(2)[runtime.rank].fill_(1), runtime.comm.barrier())

    def sharded() -> object:
        return farandole.parallelize(from_pretrained(folder, lazy=True), farandole.Plan(zero=3))

    return sharded


def reset_peak() -> int:
    """Set the peak of this process's resident memory to its current value, and return it in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """Return the peak of this process's resident memory since the last reset, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return int(line.split()[1]) * 1024


def run(name: str, folder: Path) -> None:
    """Measure a call and print its seconds and the additional peak memory in bytes."""
    call = prepare(name, folder)
    before = reset_peak()
    started = time.perf_counter()
    kept = call()
    seconds = time.perf_counter() - started
    print(json.dumps([seconds, peak() - before]), flush=True)
    del kept
    os._exit(0)


def measure(name: str, folder: Path) -> tuple[float, int]:
    """Return the seconds and the additional peak memory in bytes of rank 0."""
    ranks = 2 if "of 2" in name else 1
    command = [sys.executable, "-m", "benchmarks.pretrained", "--run", name, str(folder)]
    if ranks > 1:
        command = [sys.executable, "-m", "farandole", "launch", "--ranks", "2", "-m", *command[2:]]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    line = next(line for line in done.stdout.splitlines() if "[" in line)
    seconds, peak = json.loads(line[line.rindex("[") :])
    return seconds, int(peak)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write docs/benchmarks/pretrained.json")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run(options.run[0], Path(options.run[1]))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_folder(folder)
        nbytes = sum(path.stat().st_size for path in files_of(folder))
        rows = []
        for state in ("cached", "cold"):
            found: dict[str, list[tuple[float, int]]] = {name: [] for name in NAMES}
            for number in range(options.rounds + (state == "cached")):
                for name in NAMES:
                    if state == "cold":
                        evict(folder)
                    result = measure(name, folder)
                    if number or state == "cold":
                        found[name].append(result)
                print(
                    state, number, {name: f"{f[-1][0]:.2f} s" for name, f in found.items() if f}, flush=True
                )
            reading = [seconds for seconds, _ in found[NAMES[0]]]
            for name, samples in found.items():
                ratios = sorted(read / seconds for read, (seconds, _) in zip(reading, samples, strict=True))
                kept = nbytes // (2 if "of 2" in name else 1)
                rows.append(
                    {
                        "files": state,
                        "implementation": name,
                        "GB/s": round(nbytes / statistics.median(s for s, _ in samples) / 1e9, 2),
                        "x reading": round(statistics.median(ratios), 2),
                        "lowest": round(ratios[0], 2),
                        "highest": round(ratios[-1], 2),
                        "peak memory / weights of the rank": round(
                            statistics.median(p for _, p in samples) / kept, 2
                        ),
                    }
                )
    print(records_table(rows))
    if options.save:
        save("pretrained", {"bytes": nbytes, "rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
