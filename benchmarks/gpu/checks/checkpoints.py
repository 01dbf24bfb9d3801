"""Checks of checkpoints that are saved on one device and loaded on another device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.reference import expect
from benchmarks.gpu.registry import Context, Figures, check

_NEEDS = ("pydantic", "tokenizers", "safetensors")
_STEPS = 3


def _make(context: Context, device: torch.device, zero: int, offload: str) -> Any:
    from farandole.bench.plan_check import make_trainer
    from farandole.train.config import load_config

    words = [
        f"plan.zero={zero}",
        f"plan.offload={offload}",
        "batch=4",
        "model.context=64",
        "model.vocabulary=512",
    ]
    return make_trainer(load_config("tiny", words), "fp32", context.comm, device)


def _contents(trainer: Any) -> dict[str, Tensor]:
    """Return the weights by name, on the CPU."""
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    found = {names[id(p)]: value.detach().cpu().clone() for p, value in trainer.engine.whole_parameters()}
    return found


def _save(context: Context, trainer: Any, run: Path) -> Path:
    from farandole.train.checkpoint import CheckpointWriter

    tokenizer = run / "tokenizer.json"
    if context.comm.rank == 0:
        run.mkdir(parents=True, exist_ok=True)
        tokenizer.write_text("{}")
    context.comm.barrier()
    writer = CheckpointWriter(run, {"tokenizer.json": tokenizer}, keep=2, comm=context.comm)
    writer.save(trainer, 0.0)
    writer.wait()
    return run / "checkpoints" / f"step-{_STEPS:06d}"


def _across(
    context: Context, name: str, before: tuple[torch.device, int, str], after: tuple[torch.device, int, str]
) -> float:
    """Save a checkpoint in one layout, load it in another, and return the difference between the next losses."""
    from farandole.train.checkpoint import load

    saved = _make(context, *before)
    for _ in range(_STEPS):
        saved.step()
    folder = _save(context, saved, context.folder / name)
    contents = _contents(saved)
    losses = [saved.step().loss for _ in range(2)]
    saved.engine.close()
    loaded = _make(context, *after)
    load(loaded, folder, context.comm)
    for key, value in _contents(loaded).items():
        expect(
            bool(value.isfinite().all()),
            f"{name}: expected finite values in {key} after loading, got infinities or NaN",
        )
        expect(
            torch.equal(value, contents[key]),
            f"{name}: expected the saved values of {key} after loading, got other values",
        )
    found = [loaded.step().loss for _ in range(2)]
    loaded.engine.close()
    difference = max(abs(a - b) for a, b in zip(found, losses, strict=True))
    expect(difference < 5e-3, f"{name}: expected losses {losses}, got {found}")
    return difference


def _layouts(
    context: Context,
) -> dict[str, tuple[tuple[torch.device, int, str], tuple[torch.device, int, str]]]:
    cpu, device = torch.device("cpu"), context.device
    return {
        "device to CPU": ((device, 0, "none"), (cpu, 0, "none")),
        "CPU to device": ((cpu, 0, "none"), (device, 0, "none")),
        "device to device": ((device, 0, "none"), (device, 0, "none")),
        "offloaded to device": ((device, 1, "host"), (device, 0, "none")),
        "device to offloaded": ((device, 0, "none"), (device, 1, "host")),
        "offloaded to CPU": ((device, 0, "host"), (cpu, 0, "none")),
        "stage 3 to stage 0": ((device, 3, "none"), (device, 0, "none")),
        "stage 0 to stage 3": ((device, 0, "none"), (device, 3, "none")),
    }


@check(needs=_NEEDS, deadline_s=90.0)
def random_numbers(context: Context) -> Figures:
    """Check that loading restores the device's random generator, and that a CPU run can load the checkpoint."""
    from farandole.train.checkpoint import load

    saved = _make(context, context.device, 0, "none")
    for _ in range(_STEPS):
        saved.step()
    folder = _save(context, saved, context.folder / "random-numbers")
    expected = torch.rand(8, device=context.device)
    load(_make(context, context.device, 0, "none"), folder, context.comm)
    expect(
        torch.equal(torch.rand(8, device=context.device), expected),
        "expected the same random numbers after loading, got others",
    )
    load(
        _make(context, torch.device("cpu"), 0, "none"), folder, context.comm
    )  # the CPU run has no device generator
    return {}


@check(needs=_NEEDS, deadline_s=90.0)
def one_rank(context: Context) -> Figures:
    """Compare weights and later losses after loading, between devices, stages and offloaded states."""
    return {
        name: (_across(context, name.replace(" ", "-"), *layout), "")
        for name, layout in _layouts(context).items()
    }


@check(ranks=2, needs=_NEEDS, deadline_s=90.0)
def two_ranks(context: Context) -> Figures:
    """Compare weights and later losses after loading, on two ranks that share a device."""
    return {
        name: (_across(context, name.replace(" ", "-"), *layout), "")
        for name, layout in _layouts(context).items()
    }
