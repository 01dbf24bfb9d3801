"""A checkpoint of any number of ranks and any stage of ZeRO is one of every other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm.communicator import Communicator
from farandole.data.text import Text
from farandole.train.checkpoint import CheckpointWriter, load
from farandole.train.config import load_config
from farandole.train.engine import Engine
from farandole.train.text import open_text

CPU = torch.device("cpu")
STEPS = 3


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Overrides that name a small text."""
    lines = (f"{n} bottles of beer on the wall, {n} bottles of beer\n" for n in range(2000))
    (tmp_path / "text.txt").write_text("".join(lines))
    return [f"data.path={tmp_path / 'text.txt'}", f"data.cache={tmp_path / 'cache'}"]


def _world() -> Communicator:
    assert dist.group.WORLD is not None
    return Communicator(dist.group.WORLD)


def _make(words: list[str], zero: int) -> tuple[Text, Engine]:
    config = load_config("tiny", [*words, f"parallel.zero={zero}"])
    text = open_text(config)
    return text, Engine(config, text, "fp32", _world(), CPU)


def _contents(engine: Engine) -> dict[str, Tensor]:
    """All weights and moments, whole, on every rank."""
    whole: dict[str, Tensor] = {}
    names = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    for name, parameter in engine.model.named_parameters():
        whole[name] = parameter.detach().clone()
        for key in ("exp_avg", "exp_avg_sq"):
            whole[f"{name}/{key}"] = torch.zeros(parameter.numel())
        whole[f"{name}/step"] = torch.zeros(())
    for parameter, piece, start in engine.replica.pieces():
        name, part = names[id(parameter)], slice(start, start + piece.numel())
        for key in ("exp_avg", "exp_avg_sq"):
            whole[f"{name}/{key}"][part] = engine.optimizer.state[piece][key].flatten()
        whole[f"{name}/step"] = engine.optimizer.state[piece]["step"].clone()
    for name, value in whole.items():
        if "/" in name and engine.replica.zero:
            _world().all_reduce(value, "max" if name.endswith("/step") else "sum")
    return whole


def _save(
    rank: int, size: int, words: list[str], run: Path, zero: int
) -> tuple[dict[str, Tensor], list[float]]:
    """What was saved after some steps, and the losses that follow."""
    text, engine = _make(words, zero)
    for _ in range(STEPS):
        engine.step()
    writer = CheckpointWriter(run, text.folder / "tokenizer.json", keep=2, comm=_world())
    writer.save(engine, 0.0)
    writer.wait()
    contents = _contents(engine)
    return contents, [engine.step().loss for _ in range(2)]


def _load(
    rank: int, size: int, words: list[str], run: Path, zero: int
) -> tuple[dict[str, Tensor], list[float]]:
    _, engine = _make([*words, "seed=5"], zero)
    engine.sampler = _make(words, zero)[1].sampler
    load(engine, run / "checkpoints" / f"step-{STEPS:06d}", _world())
    contents = _contents(engine)
    return contents, [engine.step().loss for _ in range(2)]


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 3), [(1, 0), (4, 1), (2, 2)]), ((1, 0), [(4, 3), (2, 1)]), ((4, 1), [(2, 0), (2, 3)])],
)
def test_from_any_layout_to_any_other(
    ranks: Any,
    words: list[str],
    tmp_path: Path,
    before: tuple[int, int],
    after: list[tuple[int, int]],
) -> None:
    size, zero = before
    results = ranks(size).run(_save, words, tmp_path / "run", zero)
    expected, losses = results[0]
    for size, zero in after:
        for contents, following in ranks(size).run(_load, words, tmp_path / "run", zero):
            assert contents.keys() == expected.keys()
            for name, value in contents.items():
                assert torch.equal(value, expected[name]), f"{name} at {size} ranks, zero={zero}"
            assert following == pytest.approx(losses, rel=1e-4)
