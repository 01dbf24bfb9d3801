"""`farandole tune`: the table that it writes contains the measurements, and a group can use the table."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from farandole.bench.options import BenchError
from farandole.bench.tune import TuneSetup, report, run
from farandole.cli.main import app
from farandole.comm import Options
from farandole.comm.algorithms.choice import ALL_REDUCE
from farandole.comm.algorithms.table import Table
from tests.comm.test_choice import made_up
from tests.launch import jobs

QUICK = {"min": 64, "max": 1024, "turns": 1}


def _tune(rank: int, size: int, setup: TuneSetup) -> None:
    run(setup)


def test_a_table_is_written_and_can_be_used(ranks, tmp_path):
    path = str(tmp_path / "tuned.json")
    ranks(3).run(_tune, TuneSetup(**QUICK, output=path, link="a host"))
    (link,) = Table.read(path).links
    assert link.name == "a host" and link.measured["messages"] == "the memory of one host"
    assert set(link.seconds) == {2, 3} and all(
        set(sizes) == {64, 256, 1024} for sizes in link.seconds.values()
    )
    assert all(set(times) == set(ALL_REDUCE) for sizes in link.seconds.values() for times in sizes.values())
    assert Options(table=path).measurements() == Table.read(path)


def _alone(rank: int, size: int) -> None:
    with pytest.raises(
        BenchError, match="a single rank has no other rank to communicate with; use --ranks 2"
    ):
        run(TuneSetup(**QUICK))


def test_one_rank_has_no_peer(ranks):
    ranks(1).run(_alone)


def test_the_report_predicts_from_other_numbers_of_hosts():
    lines = report(made_up([2, 4]))
    assert "fitted to the other numbers of hosts" in lines[0]
    row = next(line for line in lines if line.startswith("4 ")).split()
    for measured, model in zip(row[2:8:2], row[3:8:2], strict=True):
        assert float(measured) == pytest.approx(float(model), abs=0.2)
    assert row[8] == "doubling"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min": 3}, r"--min: expected at least 4 bytes \(one element\), got 3"),
        ({"max": 32}, "--max 32 bytes is less than --min 64 bytes"),
        ({"turns": 0}, "--turns: expected at least 1, got 0"),
        ({"output": "/no/such/t.json"}, "--output /no/such/t.json: folder /no/such does not exist"),
    ],
)
def test_invalid_options_are_refused(change, message):
    with pytest.raises(BenchError, match=message):
        TuneSetup(**{**QUICK, **change}).check()


def test_one_rank_is_refused_before_it_starts():
    result = CliRunner().invoke(app, ["tune", "-n", "1"], prog_name="farandole")
    assert result.exit_code == 2
    assert (
        result.output.strip()
        == "farandole tune: a single rank has no other rank to communicate with; use --ranks 2, or more hosts"
    )


def test_the_command(tmp_path):
    command = [
        sys.executable,
        "-m",
        "farandole",
        "tune",
        "-n",
        "2",
        "--max",
        "64",
        "--turns",
        "1",
        "-o",
        "t.json",
    ]
    status, out, err = jobs.run(command, tmp_path, fork_ranks=True)
    assert status == 0, err
    assert "which simulate 2 hosts on one host" in out and 'Options(table="t.json")' in out
    assert Table.read(str(tmp_path / "t.json")).links
