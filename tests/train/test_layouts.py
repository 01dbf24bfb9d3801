"""A checkpoint loads with any number of ranks and any ZeRO stage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from farandole.train.checkpoint import CheckpointWriter, load
from farandole.train.trainer import Trainer
from tests.train.small import make_trainer, overrides, world

Setting = tuple[int, str]
"""A ZeRO stage, and the offload of optimizer states."""
STEPS = 3


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Overrides for a small text."""
    return overrides(tmp_path)


def _make(words: list[str], setting: Setting) -> Trainer:
    zero, offload = setting
    return make_trainer([*words, f"plan.zero={zero}", f"plan.offload={offload}"])


def _contents(trainer: Trainer) -> dict[str, Tensor]:
    """Return all complete weights and moments, on every rank."""
    whole: dict[str, Tensor] = {}
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    for name, parameter in trainer.model.named_parameters():
        whole[name] = parameter.detach().clone()
        for key in ("exp_avg", "exp_avg_sq"):
            whole[f"{name}/{key}"] = torch.zeros(parameter.numel())
        whole[f"{name}/step"] = torch.zeros(())
    places = {piece: (names[id(parameter)], start) for parameter, piece, start in trainer.engine.shards()}
    for piece, state in _states(trainer):
        name, start = places[piece]
        for key in ("exp_avg", "exp_avg_sq"):
            whole[f"{name}/{key}"][start : start + piece.numel()] = state[key].flatten()
        whole[f"{name}/step"] = state["step"].clone()
    for name, value in whole.items():
        if "/" in name and trainer.engine.zero:
            world().all_reduce(value, "max" if name.endswith("/step") else "sum")
    return whole


def _states(trainer: Trainer) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    yield from trainer.optimizer.state.items()
    for update in trainer.engine.offloaded:
        yield from ((piece, kept.state) for piece, kept in update.saved())


def _save(
    rank: int, size: int, words: list[str], run: Path, setting: Setting
) -> tuple[dict[str, Tensor], list[float]]:
    """Return the saved contents, and the losses of the following steps."""
    trainer = _make(words, setting)
    for _ in range(STEPS):
        trainer.step()
    writer = CheckpointWriter(run, trainer.task.files(), 2, world())
    writer.save(trainer, 0.0)
    writer.wait()
    contents = _contents(trainer)
    return contents, [trainer.step().loss for _ in range(2)]


def _load(
    rank: int, size: int, words: list[str], run: Path, setting: Setting
) -> tuple[dict[str, Tensor], list[float]]:
    trainer = _make([*words, "seed=5"], setting)
    trainer.sampler = _make(words, setting).sampler
    load(trainer, run / "checkpoints" / f"step-{STEPS:06d}", world())
    contents = _contents(trainer)
    return contents, [trainer.step().loss for _ in range(2)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 3, ""), [(1, 0, ""), (4, 1, ""), (2, 2, "")]),
        ((1, 0, ""), [(4, 3, ""), (2, 1, "")]),
        ((4, 1, ""), [(2, 0, ""), (2, 3, "")]),
        ((2, 3, "disk"), [(1, 0, ""), (4, 1, "disk")]),
        ((4, 1, ""), [(1, 0, "disk")]),
    ],
)
def test_checkpoint_loads_into_other_layouts(
    ranks: Any,
    words: list[str],
    tmp_path: Path,
    before: tuple[int, int, str],
    after: list[tuple[int, int, str]],
) -> None:
    places = {"": "none", "disk": f"disk:{tmp_path}"}
    size, zero, place = before
    results = ranks(size).run(_save, words, tmp_path / "run", (zero, places[place]))
    expected, losses = results[0]
    metadata = json.loads((tmp_path / "run" / "checkpoints" / f"step-{STEPS:06d}" / "train.json").read_text())
    assert metadata["topology"] == {"data": size, "zero": zero, "offload": places[place]}
    for size, zero, place in after:
        for contents, following in ranks(size).run(_load, words, tmp_path / "run", (zero, places[place])):
            assert contents.keys() == expected.keys()
            for name, value in contents.items():
                assert torch.equal(value, expected[name]), f"{name} at {size} ranks, zero={zero}"
            assert following == pytest.approx(losses, rel=1e-4)
