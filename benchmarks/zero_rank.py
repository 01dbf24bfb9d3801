"""One rank of an implementation in the benchmark of ZeRO stages: runs commands, and sleeps in between.

    python -m benchmarks.zero_rank ORDER    # started by benchmarks.zero, with the environment of torchrun

ORDER is JSON.  Commands are lines on the standard input, and answers are JSON lines to the descriptor that ORDER names, so
implementations with different interpreters can take turns.
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
"""Different batches, taken in turn: so few that they are soon learnt, and a wrong step shows in the losses."""


def batches_of(config: GPTConfig, samples: int, first: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and targets of samples `first` to `first + count` of each batch, independent of the division."""
    generator = torch.Generator().manual_seed(1)
    shape = (BATCHES, samples, config.context + 1)
    tokens = torch.randint(config.vocabulary, shape, generator=generator)[:, first : first + count]
    return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in tokens]


class Rank:
    """An implementation on this rank."""

    def __init__(self, setting: Setting, config: GPTConfig, samples: int) -> None:
        rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.manual_seed(0)
        self.model = build_gpt(config)
        self._step = build(setting, self.model)
        self._batches = batches_of(config, samples, rank * samples // self._size, samples // self._size)
        self._steps = 0

    def step(self) -> float:
        """Run a step; return the loss."""
        inputs, targets = self._batches[self._steps % BATCHES]
        self._steps += 1
        return self._step(inputs, targets)

    def steps(self, count: int) -> dict[str, Any]:
        """Run `count` steps; return wall-clock and processor seconds per step, and the losses."""
        start, busy = time.perf_counter(), time.process_time()
        losses = [self.step() for _ in range(count)]
        return {
            "seconds": (time.perf_counter() - start) / count,
            "processor_seconds": (time.process_time() - busy) / count,
            "losses": losses,
        }

    def track(self) -> dict[str, Any]:
        """Run a step and count the tensors; of shared weights a rank counts its share."""
        gc.collect()
        with TensorBytes(self.model.parameters()) as tracked:
            self.step()
        of_others = _common_bytes(self.model) * (self._size - 1) // self._size
        return {"between_steps": tracked.before - of_others, "peak": tracked.peak - of_others}


def _common_bytes(model: nn.Module) -> int:
    """Return the bytes of weights in shared memory."""
    storages = [storage for parameter in model.parameters() if (storage := storage_of(parameter)) is not None]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
    return sum(size for address, size in sizes.items() if in_shared_memory(address))


def warm_up(precision: str) -> None:
    """Make torch load the libraries that it loads at the first step of any model, which no implementation should be charged for."""
    config = GPTConfig(vocabulary=8, context=8, layers=1, heads=1, width=8)
    step = build(Setting("alone", 0, precision), build_gpt(config))
    step(*batches_of(config, 1, 0, 1)[0])


def main() -> None:
    """Run commands until the input ends."""
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
                raise ValueError(f"a rank that is told {line!r}")
        del rank
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
