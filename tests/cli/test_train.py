"""`farandole train`: everything that can be refused is refused before a rank starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from farandole.cli import train as module
from farandole.cli.main import app
from farandole.train.config import load_config
from farandole.train.start import Order


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Order, int]]:
    """Orders that would have been launched, in an empty folder."""
    orders: list[tuple[Order, int]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_launch", lambda order, ranks: orders.append((order, ranks)) or 0)
    (tmp_path / "text.txt").write_text("all work and no play makes jack a dull boy\n" * 200)
    return orders


def _train(*words: str) -> Result:
    return CliRunner().invoke(app, ["train", *words])


MINE = ("tiny", "data.path=text.txt", "data.cache=cache")


def test_a_new_run_gets_a_folder_with_its_configuration(launched: list[Any]) -> None:
    result = _train(*MINE, "steps=7", "--ranks", "4")
    assert result.exit_code == 0, result.output
    ((order, ranks),) = launched
    assert (ranks, order.config.steps, order.checkpoint) == (4, 7, None)
    assert order.run.parent == Path("runs")
    assert order.run.name.startswith("tiny-")
    assert load_config(str(order.run / "config.toml")) == order.config
    assert Order.load(order.dump()) == order


def test_runs_never_share_a_folder(launched: list[Any]) -> None:
    for _ in range(3):
        assert _train(*MINE).exit_code == 0
    assert len({order.run for order, _ in launched}) == 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("stps=3",), "did you mean steps?"),
        (("tinny",), "did you mean tiny?"),
        (("tiny", "default"), "one preset or configuration file, please, not 2: tiny, default"),
        (
            (*MINE, "--ranks", "3"),
            "batch=8 cannot be shared equally by 3 ranks; nearest that can: batch=6 or 9",
        ),
        ((*MINE, "data.path=text.text"), "did you mean text.txt?"),
        ((*MINE, "model.context=100000"), "fewer than one window"),
        ((*MINE, "out=text.txt"), "out=text.txt"),
        (("--resume",), "runs is not a folder"),
        ((".",), ". is a folder; to go on with the run in it, add --resume"),
        ((".", "--resume"), "no checkpoint and no run with one in .; it has: text.txt"),
    ],
)
def test_refusals_start_nothing_and_leave_nothing(
    launched: list[Any], words: tuple[str, ...], says: str
) -> None:
    result = _train(*words)
    assert result.exit_code == 2
    assert says in result.output
    assert "Traceback" not in result.output
    assert not launched
    assert not Path("runs").exists()


def _checkpoint(run: Path, step: int, **facts: Any) -> Path:
    folder = run / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    config = load_config("tiny", ["data.path=text.txt", "data.cache=cache"])
    values = {
        "step": step,
        "consumed": 8 * step,
        "ranks": 2,
        "precision": "bf16",
        "loss_scale": 1.0,
        "good_steps": 0,
        "elapsed_s": 1.0,
        "config": config.model_dump(),
    }
    (run / "config.toml").write_text(config.to_toml())
    (folder / "train.json").write_text(json.dumps(values | facts))
    return folder


def test_resume_finds_the_newest_checkpoint_and_its_configuration(launched: list[Any]) -> None:
    _checkpoint(Path("runs/tiny-1"), 5)
    _checkpoint(Path("runs/tiny-1"), 10)
    for words in (
        ("--resume",),
        ("--resume", "runs/tiny-1"),
        ("runs/tiny-1/checkpoints/step-000010", "--resume"),
    ):
        result = _train(*words)
        assert result.exit_code == 0, result.output
        order, _ = launched.pop()
        assert order.run == Path("runs/tiny-1")
        assert order.checkpoint == Path("runs/tiny-1/checkpoints/step-000010")
        assert order.config.steps == 20
    assert _train("--resume", "steps=50", "log.every=1").exit_code == 0
    assert launched[0][0].config.steps == 50


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--ranks", "4"), "was written by 2 ranks and this job has 4: continue with --ranks 2"),
        (("model.width=64",), "model.width was 32, is 64"),
        (("seed=1", "batch=4"), "seed was 0, is 1; batch was 8, is 4"),
        (("default",), "belongs to another configuration"),
        (("steps=10",), "at step 10 of 10: nothing is left to do; for more, say steps=20"),
    ],
)
def test_another_job_is_not_a_continuation(launched: list[Any], words: tuple[str, ...], says: str) -> None:
    _checkpoint(Path("runs/tiny-1"), 10)
    result = _train("--resume", *words)
    assert result.exit_code == 2
    assert says in result.output
    assert not launched


def test_a_damaged_checkpoint_is_named(launched: list[Any]) -> None:
    (_checkpoint(Path("runs/tiny-1"), 10) / "train.json").write_text("{")
    result = _train("--resume")
    assert result.exit_code == 2
    assert "train.json is damaged" in result.output


def test_another_launcher_has_the_word_about_ranks(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    for name, value in (placed | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    result = _train("tiny", "--ranks", "2")
    assert result.exit_code == 2
    assert "has started 4; leave --ranks away" in result.output


def test_help_teaches_by_example() -> None:
    result = _train("--help")
    assert result.exit_code == 0
    for example in ("farandole train tiny", "data.path=notes/", "farandole train --resume", "torchrun"):
        assert example in result.output
