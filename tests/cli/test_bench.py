"""`farandole bench`: help and error messages, before any rank starts."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from farandole.cli.main import app


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["bench", *arguments], prog_name="farandole")


def test_help_shows_examples():
    assert "training" in invoke("--help").output
    result = invoke("training", "--help")
    assert result.exit_code == 0
    assert "farandole bench training --model resnet50 --micro-batch 64" in result.output
    assert "mpirun -n 4 farandole bench training" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "resnt50"), "nearest: resnet50"),
        (("--micro-batch", "0"), "--micro-batch: expected at least 1, got 0"),
        (("--framework", "mxnet"), "--framework mxnet is not supported; use pytorch or tensorflow"),
    ],
)
def test_bad_input_is_refused_before_a_rank_starts(arguments, message):
    result = invoke("training", *arguments)
    assert result.exit_code == 2
    assert "farandole bench training: " in result.output and message in result.output


@pytest.mark.parametrize("rank", [0, 1])
def test_under_another_launcher_one_rank_refuses_for_all(monkeypatch, rank):
    for name, value in {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29511,
    }.items():
        monkeypatch.setenv(name, str(value))
    result = invoke("training", "--ranks", "3")
    assert result.exit_code == 2
    assert ("one of 2 ranks (" in result.output) == (rank == 0)
