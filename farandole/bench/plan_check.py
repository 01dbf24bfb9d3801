"""One rank of `farandole plan --check`: train for a few steps on random text, and measure memory.

    python -m farandole.bench.plan_check JOB_SPEC

JOB_SPEC is a `PlanCheckJobSpec` in JSON.  Rank 0 writes a list with the `Seen` of each rank as JSON to the file
`answer` of the job specification.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor

import farandole
from farandole._startup import keep_freed_memory
from farandole.bench.resident import data_bytes, library_bytes, peak_bytes, start_peak
from farandole.comm.communicator import Communicator
from farandole.data.text import Text, Windows
from farandole.launch.runtime import Runtime
from farandole.memory.tracker import MemoryTracker
from farandole.models.hf.pretrained import read_config
from farandole.plan import Precision
from farandole.train.config import TrainConfig, load_config, parse_config
from farandole.train.text import TextTask
from farandole.train.trainer import Trainer


@dataclass(frozen=True)
class Seen:
    """The measured memory of a rank in bytes, and its time per step.

    Args:
        process: the memory of the process before the model exists.
        libraries: the memory of library pages; the other fields do not include these pages.
        parts: the sizes of the weights, the gradients and the optimizer states, which exist between steps.
        tensors: the peak size of the other tensors during a step.
        start: the peak memory of the process before the first step.
        peak: the peak memory of the process up to the end of the last step.
        seconds: the mean time of a step in seconds.
    """

    process: int
    libraries: int
    parts: dict[str, int]
    tensors: int
    start: int
    peak: int
    seconds: float


@dataclass(frozen=True)
class PlanCheckJobSpec:
    """The job of the ranks: train with `config` for `steps` steps, and write the measurements to the file `answer`."""

    config: TrainConfig
    precision: Precision
    steps: int
    answer: Path

    def dump(self) -> str:
        """Return the job specification as JSON."""
        return json.dumps({**vars(self), "config": self.config.model_dump(), "answer": str(self.answer)})

    @staticmethod
    def load(text: str) -> PlanCheckJobSpec:
        """Convert the result of `dump` back to a job specification."""
        values = json.loads(text)
        return PlanCheckJobSpec(
            **{**values, "config": parse_config(values["config"]), "answer": Path(values["answer"])}
        )


def random_text(vocabulary: int, context: int, samples: int) -> Text:
    """Return `samples` random sequences of `context` tokens, as both training and validation text."""
    tokens = np.random.default_rng(0).integers(vocabulary, size=samples * context + 1, dtype=np.uint32)
    windows = Windows(tokens, context)
    return Text(Path(), Tokenizer(BPE()), windows, windows)


def make_trainer(
    config: TrainConfig, precision: Precision, comm: Communicator, device: torch.device
) -> Trainer:
    """Return a trainer for `config` that trains on random text instead of the configured data."""
    folder, vocabulary = config.model.folder, config.model.vocabulary
    if folder:
        vocabulary = read_config(folder, with_weights=False).config.vocabulary
    text = random_text(vocabulary, config.model.context, 2 * config.batch)
    return Trainer(config, TextTask(config, text=text), precision, comm, device)


def warm_up(precision: Precision, runtime: Runtime) -> None:
    """Train a small model for one step, so that torch loads the libraries that every model needs."""
    config = load_config("tiny", [f"batch={runtime.size}"])
    make_trainer(config, precision, runtime.comm, runtime.device).step()
    gc.collect()


class HostMemory:
    """Measures the host memory of this process, and its peak since this object was created."""

    def __init__(self) -> None:
        self.process, self.libraries = data_bytes(), library_bytes
        start_peak()

    def peak(self) -> int:
        """Return the peak memory since this object was created, in bytes, without library pages."""
        return peak_bytes()


class CudaMemory:
    """Measures the CUDA memory of this process, and its peak since this object was created."""

    def __init__(self, runtime: Runtime) -> None:
        self.process = context_bytes(runtime)
        self._device = runtime.device
        torch.cuda.reset_peak_memory_stats(self._device)

    def libraries(self) -> int:
        """Return 0, because `process` includes the CUDA libraries as part of the CUDA context."""
        return 0

    def peak(self) -> int:
        """Return the peak memory since this object was created, in bytes, including the CUDA context."""
        return self.process + torch.cuda.max_memory_allocated(self._device)


def context_bytes(runtime: Runtime) -> int:
    """Return the CUDA memory of this process in bytes, excluding tensors.  This is a collective call.

    The device reports only the total memory of all processes.  The total is divided equally among the ranks that share
    the device.
    """
    torch.cuda.synchronize(runtime.device)
    torch.cuda.empty_cache()
    runtime.comm.barrier()
    free, total = torch.cuda.mem_get_info(runtime.device)
    runtime.comm.barrier()  # no rank allocates before all have read the counter
    sharing = -(-runtime.local_size // torch.cuda.device_count())
    return int(total - free) // sharing - torch.cuda.memory_allocated(runtime.device)


def measure(job_spec: PlanCheckJobSpec, runtime: Runtime) -> Seen:
    """Train as specified by `job_spec`, and return the measurements of this rank.  This is a collective call."""
    keep_freed_memory()
    warm_up(job_spec.precision, runtime)
    memory = HostMemory() if runtime.device.type == "cpu" else CudaMemory(runtime)
    trainer = make_trainer(job_spec.config, job_spec.precision, runtime.comm, runtime.device)
    started_with = memory.peak()
    trainer.step()  # the optimizer allocates its states
    began = time.perf_counter()
    for _ in range(job_spec.steps - 1):
        trainer.step()
    if runtime.device.type == "cuda":
        torch.cuda.synchronize(runtime.device)
    seconds = (time.perf_counter() - began) / max(1, job_spec.steps - 1)
    peak, parts = memory.peak(), _parts(trainer)
    return Seen(
        memory.process, memory.libraries(), parts, _peak_of_step(trainer), started_with, peak, seconds
    )


def _parts(trainer: Trainer) -> dict[str, int]:
    """Return the bytes of the weights, gradients and optimizer states that this rank holds between steps."""
    shards = trainer.engine.shards_of_buckets
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    return {
        "weights": _weights(trainer),
        "gradients": _storages(each.bucket.reduced for each in shards if not each.bucket.is_offloaded),
        "optimizer": _storages(value for value in states if isinstance(value, Tensor))
        + _storages(
            tensor for parameter, tensor, _ in trainer.engine.shards() if tensor.dtype != parameter.dtype
        )
        + sum(update.state.stream.memory_bytes for update in trainer.engine.offloaded),
    }


def _weights(trainer: Trainer) -> int:
    """Return the size of this rank's weights in bytes; weights in shared memory are divided among the ranks."""
    sharing = {
        id(p): each.comm.size
        for each in trainer.engine.weights
        if each.shared and each.comm is not None
        for p in each.parameters
    }
    storages = {p.untyped_storage()._cdata: p for p in trainer.model.parameters()}
    return sum(p.untyped_storage().nbytes() // sharing.get(id(p), 1) for p in storages.values())


def _storages(tensors: Any) -> int:
    """Return the total size in bytes of the storages of `tensors`, each counted once."""
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(found.values())


def _peak_of_step(trainer: Trainer) -> int:
    """Train for one step, and return the peak size in bytes of the tensors that exist only within the step."""
    gc.collect()
    longer = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    with MemoryTracker([*longer, *trainer.model.parameters()]) as alive:
        trainer.step()
    return alive.peak


def main(text: str) -> None:
    """Run the job specified by the JSON `text` as one of the launched ranks."""
    job_spec = PlanCheckJobSpec.load(text)
    with farandole.init() as runtime:
        found: list[Any] = [None] * runtime.size
        dist.all_gather_object(found, asdict(measure(job_spec, runtime)))
        if runtime.rank == 0:
            job_spec.answer.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
