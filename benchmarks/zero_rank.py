"""Run one rank of an implementation in the ZeRO benchmark; the rank sleeps between commands.

    python -m benchmarks.zero_rank ORDER    # started by benchmarks.zero, with torchrun's environment variables

ORDER is JSON.  Commands are lines on standard input.  Answers are lines of JSON, written to the file descriptor that
ORDER specifies, so implementations with different interpreters can alternate.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.resident import in_shared_memory
from benchmarks.tracked import TensorBytes, storage_of
from benchmarks.zero_implementations import Setting, build, join, missing
from farandole._startup import keep_freed_memory
from farandole.models.gpt import GPTConfig, build_gpt

BATCHES = 2
"""The number of batches, which repeat.  A few batches are learned quickly, so the losses reveal a wrong step."""


def batches_of(config: GPTConfig, samples: int, first: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return each batch's inputs and targets for `count` samples, starting at sample `first` of the full batch."""
    generator = torch.Generator().manual_seed(1)
    shape = (BATCHES, samples, config.context + 1)
    tokens = torch.randint(config.vocabulary, shape, generator=generator)[:, first : first + count]
    return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in tokens]


class Rank:
    """Runs the training steps of an implementation on this rank."""

    def __init__(self, setting: Setting, config: GPTConfig, samples: int) -> None:
        rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.manual_seed(0)
        self.model = build_gpt(config)
        self._step = build(setting, self.model)
        self._batches = batches_of(config, samples, rank * samples // self._size, samples // self._size)
        self._steps = 0

    def step(self) -> float:
        """Run a training step and return the loss."""
        inputs, targets = self._batches[self._steps % BATCHES]
        self._steps += 1
        return self._step(inputs, targets)

    def steps(self, count: int) -> dict[str, Any]:
        """Run `count` steps, and return the wall-clock and processor seconds per step and the losses."""
        start, busy = time.perf_counter(), time.process_time()
        losses = [self.step() for _ in range(count)]
        return {
            "seconds": (time.perf_counter() - start) / count,
            "processor_seconds": (time.process_time() - busy) / count,
            "losses": losses,
        }

    def track(self) -> dict[str, Any]:
        """Run a step, and return the tensor memory in bytes; shared weights count in part."""
        gc.collect()
        with TensorBytes(self.model.parameters()) as tracked:
            self.step()
        of_others = _common_bytes(self.model) * (self._size - 1) // self._size
        return {"between_steps": tracked.before - of_others, "peak": tracked.peak - of_others}


def _common_bytes(model: nn.Module) -> int:
    """Return the size in bytes of the weights in shared memory."""
    storages = [storage for parameter in model.parameters() if (storage := storage_of(parameter)) is not None]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
    return sum(size for address, size in sizes.items() if in_shared_memory(address))


def warm_up(precision: str) -> None:
    """Run a small step, so that torch loads its libraries before memory is measured."""
    config = GPTConfig(vocabulary=8, context=8, layers=1, heads=1, width=8)
    step = build(Setting("alone", 0, precision), build_gpt(config))
    step(*batches_of(config, 1, 0, 1)[0])


def main() -> None:
    """Run commands from standard input until it ends."""
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if order["keep_freed_memory"]:
        keep_freed_memory()
    setting = Setting(**order["setting"])
    with os.fdopen(order["answers"], "w") as answers:

        def answer(what: dict[str, Any]) -> None:
            print(json.dumps(what), file=answers, flush=True)

        lacking = missing(setting)
        if lacking:
            answer({"missing": lacking})
            return
        join(setting)
        warm_up(setting.precision)
        answer({"torch": torch.__version__})
        rank: Rank | None = None
        for line in sys.stdin:
            command, *words = line.split()
            if command == "build":
                start = time.perf_counter()
                rank = Rank(setting, GPTConfig(**order["model"]), order["samples"])
                answer({"seconds": time.perf_counter() - start})
            elif rank is not None and command == "steps":
                answer(rank.steps(int(words[0])))
            elif rank is not None and command == "track":
                answer(rank.track())
            else:
                raise ValueError(f"expected the command build, and then steps N or track, got {line!r}")
        del rank
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
