"""Run one rank of an implementation for `benchmarks.language`: one training step per line of input.

python -m benchmarks.language_worker IMPLEMENTATION FOLDER ROWS CONTEXT PRECISION
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import torchvision_models  # noqa: F401 - before transformers is imported

# isort: split
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

RATE, CLIP = 1e-4, 1.0


class Batches:
    """Random tokens, which are the same for all implementations and different for each rank."""

    def __init__(self, rows: int, context: int, vocabulary: int) -> None:
        self._shape, self._vocabulary, self._step = (rows, context + 1), vocabulary, 0

    def next(self) -> Tensor:
        """Return the tokens of the next step."""
        self._step += 1
        rank = int(os.environ.get("RANK", 0))
        generator = torch.Generator().manual_seed(1000 * self._step + rank)
        return torch.randint(0, self._vocabulary, self._shape, generator=generator)


def theirs(folder: Path) -> Any:
    """Return the `transformers` model in `folder`, without dropout."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()


def cross_entropy(model: Any, tokens: Tensor) -> Tensor:
    """Return the loss of a `transformers` model."""
    logits = model(tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def farandole_step(folder: Path, batches: Batches, precision: str, zero: int) -> Callable[[], float]:
    """Return a step with farandole."""
    import farandole
    from farandole.models.hf import from_pretrained

    farandole.init()
    model = from_pretrained(folder, lazy=True)
    engine = farandole.parallelize(model, farandole.Plan(zero=zero, precision=precision))
    optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), RATE, fused=True))

    def step() -> float:
        result = engine.forward_backward(
            [batches.next()], lambda output, _: output, inputs=lambda t: (t[:, :-1], None, t[:, 1:])
        )
        engine.clip(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(result.loss)

    return step


def plain_step(folder: Path, batches: Batches, precision: str) -> Callable[[], float]:
    """Return a step of a loop as in nanoGPT: forward pass, cross-entropy, clipping, fused AdamW."""
    model = theirs(folder)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = cross_entropy(model, batches.next())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def accelerate_step(folder: Path, batches: Batches, precision: str, fsdp: bool) -> Callable[[], float]:
    """Return a step with Accelerate and DDP or FSDP2 over Gloo."""
    import accelerate
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = None
    if fsdp:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
        )
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision="bf16" if precision == "bf16" else "no", fsdp_plugin=plugin
    )
    model = theirs(folder)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=not fsdp)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> float:
        with accelerator.autocast():
            loss = cross_entropy(model, batches.next())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def run_trainer(folder: Path, batches: Batches, precision: str) -> None:
    """Train with the `transformers` Trainer, which waits for a line of input before each step."""
    import transformers

    class Gate(transformers.TrainerCallback):
        started = 0.0

        def on_step_begin(self, *args: Any, **options: Any) -> None:
            if self.started:
                answer(time.perf_counter() - self.started, 0.0)
            wait()
            self.started = time.perf_counter()

    class Endless(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 1 << 20

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            tokens = rows.pop() if rows else refill()
            return {"input_ids": tokens[:-1], "labels": tokens[1:], "shift_labels": tokens[1:]}

    rows: list[Tensor] = []

    def refill() -> Tensor:
        rows.extend(batches.next())
        return rows.pop()

    with tempfile.TemporaryDirectory() as out:
        options = transformers.TrainingArguments(
            out,
            per_device_train_batch_size=batches._shape[0],
            max_steps=1 << 20,
            learning_rate=RATE,
            max_grad_norm=CLIP,
            optim="adamw_torch_fused",
            bf16=precision == "bf16",
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
        )
        answer(0.0, 0.0)  # ready
        transformers.Trainer(theirs(folder), options, train_dataset=Endless(), callbacks=[Gate()]).train()


def wait() -> None:
    """Wait for a line of input, and end the process if the input has ended."""
    if not sys.stdin.readline():
        os._exit(0)


def answer(seconds: float, loss: float) -> None:
    """Write the duration of a step in seconds, its loss, and the peak memory so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps([seconds, loss, peak]), flush=True, file=OUT)


OUT = os.fdopen(os.dup(1), "w")


def main(name: str, folder: str, rows: str, context: str, precision: str) -> None:
    """Serve steps until the input ends."""
    os.dup2(2, 1)  # libraries print to the standard output
    torch.manual_seed(0)
    vocabulary = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    batches = Batches(int(rows), int(context), vocabulary)
    path = Path(folder)
    if name == "trainer":
        run_trainer(path, batches, precision)
        return
    steps: dict[str, Callable[[], Callable[[], float]]] = {
        "farandole": lambda: farandole_step(path, batches, precision, 0),
        "farandole without communication": lambda: farandole_step(path, batches, precision, 0),
        "farandole zero=2": lambda: farandole_step(path, batches, precision, 2),
        "farandole zero=3": lambda: farandole_step(path, batches, precision, 3),
        "plain loop": lambda: plain_step(path, batches, precision),
        "accelerate ddp": lambda: accelerate_step(path, batches, precision, fsdp=False),
        "accelerate fsdp2": lambda: accelerate_step(path, batches, precision, fsdp=True),
    }
    step = steps[name]()
    answer(0.0, 0.0)  # ready
    while True:
        wait()
        if dist.is_initialized():
            dist.barrier()
        started = time.perf_counter()
        loss = step()
        answer(time.perf_counter() - started, loss)


if __name__ == "__main__":
    main(*sys.argv[1:])
