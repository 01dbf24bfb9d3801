"""The benchmark of collectives: consistent tables, detection of wrong values, and refusal of unsupported options."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from farandole.bench.collectives import run as bench
from farandole.bench.collectives.backends import OVER_MPI, choose
from farandole.bench.collectives.operations import OPERATIONS
from farandole.bench.collectives.overlap import hidden
from farandole.bench.collectives.setup import CollectivesSetup, parse_size, short_size
from farandole.bench.collectives.table import Table
from farandole.bench.collectives.values import count_errors, expected, values
from farandole.bench.options import BenchError
from tests.launch.jobs import run
from tests.ports import free_port

SMALL = CollectivesSetup(
    operations=tuple(OPERATIONS),
    backends=("farandole", "shared", "gloo"),
    min=64,
    max=128,
    iterations=3,
    warmup=1,
    validate=True,
    full=True,
)


def _changed(**change: object) -> CollectivesSetup:
    return CollectivesSetup(**{**vars(SMALL), **change})


def _run(rank: int, size: int, setup: CollectivesSetup) -> None:
    bench.run(setup)


@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_is_correct_and_its_figures_are_consistent(ranks, tmp_path, size):
    path, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    ranks(size).run(_run, _changed(json=str(path), picture=str(picture)))
    result = json.loads(path.read_text())
    assert result["ranks"] == size and picture.read_bytes().startswith(b"\x89PNG")
    assert {row["operation"] for row in result["rows"]} == set(OPERATIONS)
    for row in result["rows"]:
        assert row.get("errors", 0) == 0 and row["iterations"] == 3
        if "algbw" in row:
            factor = {
                "all_reduce": 2 * (size - 1) / size,
                **dict.fromkeys(("broadcast", "reduce"), 1),
            }.get(row["operation"], (size - 1) / size)
            assert row["algbw"] == pytest.approx(row["size"] / row["avg_us"] / 1e3)
            assert row["busbw"] == pytest.approx(row["algbw"] * factor)
            assert row["min_us"] <= row["avg_us"] <= row["max_us"]


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16", "reduction": "avg"},
        {"dtype": "int8", "reduction": "xor"},
        {"dtype": "float16", "reduction": "product"},
    ],
)
def test_types_and_reductions(ranks, tmp_path, change):
    path = tmp_path / "figures.json"
    setup = _changed(operations=("all_reduce", "reduce_scatter", "reduce"), json=str(path), **change)
    ranks(2).run(_run, setup)
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 3 * 3 * 2 and not any(row["errors"] for row in rows)


def test_overlap(ranks, tmp_path):
    path, picture = tmp_path / "figures.json", tmp_path / "figures.svg"
    operations = tuple(name for name, each in OPERATIONS.items() if not each.messages)
    setup = _changed(overlap=True, full=False, validate=False, operations=operations)
    setup = CollectivesSetup(**{**vars(setup), "json": str(path), "picture": str(picture)})
    ranks(2).run(_run, setup)
    assert "<svg" in picture.read_text()
    for row in json.loads(path.read_text())["rows"]:
        shown = 100 - 100 * (row["overall_us"] - row["compute_us"]) / row["pure_us"]
        assert row["overlap"] == pytest.approx(max(0.0, shown))


def test_percentage_of_hidden_communication():
    assert hidden(overall=100, compute=100, pure=100) == 100
    assert hidden(overall=150, compute=100, pure=100) == 50
    assert hidden(overall=250, compute=100, pure=100) == 0


def _break_all_reduce(rank: int, size: int) -> None:
    """Make one element wrong in every fp32 all-reduce of the benchmark."""
    right = dist.all_reduce

    def wrong(tensor: torch.Tensor, *args, **kwargs):
        kept = tensor[-1].item()
        work = right(tensor, *args, **kwargs)
        if tensor.dtype == torch.float32:
            tensor[-1] = kept + 50
        return work

    dist.all_reduce = wrong
    try:
        if rank == 0:
            with pytest.raises(SystemExit, match="wrong values: all_reduce of farandole"):
                bench.run(_changed(operations=("all_reduce",), backends=("farandole",)))
        else:
            bench.run(_changed(operations=("all_reduce",), backends=("farandole",)))
    finally:
        dist.all_reduce = right


def test_a_wrong_element_is_found(ranks):
    ranks(2).run(_break_all_reduce)


@pytest.mark.parametrize("ranks_", [1, 2, 3, 5])
@pytest.mark.parametrize("name", [name for name, each in OPERATIONS.items() if not each.messages])
def test_expected_values(name, ranks_):
    """Compare with results that are computed by hand from the inputs of all ranks."""
    operation, count = OPERATIONS[name], 30 * ranks_
    if not operation.sized:
        return
    part = count // ranks_
    given = count if operation.input == "whole" else part
    reduction = "max" if operation.reduces else None
    inputs = [values(rank, given, torch.int32, reduction) for rank in range(ranks_)]
    most = torch.stack(inputs).amax(0)
    for rank in range(ranks_):
        own = slice(rank * part, (rank + 1) * part)
        wanted = {
            "all_reduce": most,
            "reduce": most if rank == 0 else None,
            "reduce_scatter": most[own],
            "all_gather": torch.cat(inputs),
            "broadcast": inputs[0],
            "gather": torch.cat(inputs) if rank == 0 else None,
            "scatter": inputs[0][own],
            "all_to_all": torch.cat([each[own] for each in inputs]),
        }[name]
        found = expected(operation, "max", rank, ranks_, count, torch.int32)
        assert (found is None) == (wanted is None)
        assert found is None or torch.equal(found, wanted)


def test_errors_are_counted():
    wanted = values(0, 5000, torch.float32, None)
    found = wanted.clone()
    found[[3, 4999]] += 1
    found[7] = torch.nan
    assert count_errors(found, wanted, 2) == 3
    assert count_errors(wanted, wanted, 2) == 0


def test_columns_match_osu():
    setup = _changed(full=True)
    head = Table(OPERATIONS["all_reduce"], setup).head(setup, 2).splitlines()[1]
    names = [name.strip() for name in head.split("  ") if name.strip()]
    assert names == [
        *("# Size", "Avg Latency(us)", "Min Latency(us)", "Max Latency(us)", "Iterations", "Validation"),
        *("algbw(GB/s)", "busbw(GB/s)", "Backend"),
    ]


def test_iterations_match_osu():
    setup = CollectivesSetup()
    assert setup.counts(OPERATIONS["all_reduce"], 8 << 10) == (1000, 100)
    assert setup.counts(OPERATIONS["all_reduce"], 16 << 10) == (100, 10)
    assert CollectivesSetup(iterations=5, warmup=0).counts(OPERATIONS["bw"], 8) == (5, 0)


def test_sizes():
    assert [parse_size("--max", text) for text in ("8", "1K", "4M", "2GiB", "1kb")] == [
        *(8, 1 << 10, 4 << 20, 2 << 30, 1 << 10)
    ]
    assert [short_size(size) for size in (8, 1024, 1536, 4 << 20)] == ["8", "1K", "1536", "4M"]
    setup = CollectivesSetup(min=8, max=100)
    assert setup.sizes(OPERATIONS["all_gather"], 3) == [12, 24, 60]
    assert setup.sizes(OPERATIONS["all_reduce"], 3) == [8, 16, 32, 64]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"operations": ("allreduce",)}, "--op allreduce is unknown; nearest: all_reduce"),
        ({"backends": ("glo",)}, "--backend glo is unknown; nearest: gloo"),
        ({"backends": ("mpi",)}, "--backend mpi: .*; available: farandole, shared, gloo"),
        (
            {"backends": ("gloo",), "dtype": "int16"},
            "gloo does not support int16; available: farandole, shared",
        ),
        ({"backends": ("gloo",), "dtype": "int8", "reduction": "avg"}, "gloo does not average integers"),
        ({"dtype": "float31"}, "--dtype float31 is unknown; nearest: float32"),
        ({"reduction": "and"}, "--reduction and requires an integer dtype: add --dtype int32"),
        ({"min": 256}, "--max 128 bytes is less than --min 256 bytes"),
        (
            {"min": 4, "max": 4, "operations": ("all_gather",)},
            "expected a size of at least 8 bytes for all_gather of float32 among 2 ranks; use --min 8 --max 8",
        ),
        ({"iterations": 0}, "--iterations: expected at least 1, got 0"),
        ({"warmup": -1}, "--warmup: expected at least 0, got -1"),
        (
            {"overlap": True, "operations": ("bw",)},
            "--overlap does not support --op bw; it supports all_reduce, ",
        ),
        (
            {"overlap": True, "operations": ("barrier",)},
            "--overlap cannot be combined with --full or --validate",
        ),
        ({"json": "/no/such/x.json"}, "--json /no/such/x.json: folder /no/such does not exist"),
        ({"picture": "x.gif"}, "--picture x.gif: expected a file name that ends in .png, .pdf, .svg"),
        ({"picture": "x.png", "operations": ("barrier",)}, "a barrier has no size"),
        ({"max": 1 << 50}, r"--max 1.0 PiB: all_reduce needs .* this host has only .*; use --max \w+"),
    ],
)
def test_unsupported_options_are_refused(change, message):
    setup = _changed(**{"operations": ("all_reduce",), "backends": (), **change})
    with pytest.raises(BenchError, match=message):
        setup.check(2), choose(setup, 2, "torchrun"), setup.check_memory(2, 2, 1)


def test_messages_need_two_ranks():
    with pytest.raises(BenchError, match="--op latency requires two ranks, got 1; use --ranks 2"):
        _changed(operations=("latency",)).check(1)


def test_the_suggested_size_is_accepted():
    setup = _changed(operations=("all_gather",), max=1 << 50)
    with pytest.raises(BenchError) as refused:
        setup.check_memory(4, 4, 3)
    fits = parse_size("--max", str(refused.value).split("--max ")[-1].split()[0])
    _changed(operations=("all_gather",), max=fits).check_memory(4, 4, 3)


COMMAND = [sys.executable, "-m", "farandole", "bench", "collectives", "--max", "16", "-i", "2", "-x", "1"]


def _command(command: list[str], folder: Path) -> str:
    status, out, err = run(command, folder, fork_ranks=True)
    assert status == 0, err
    return out


def test_the_command_starts_ranks(tmp_path):
    out = _command([*COMMAND, "--ranks", "2", "--backend", "farandole", "--pin", "-c"], tmp_path)
    lines = [line.split() for line in out.splitlines() if not line.startswith("#")]
    assert [line[0] for line in lines] == ["8", "16"]
    assert all(line[2] == "Pass" and line[-1] == "farandole" for line in lines)


def test_under_torchrun_one_rank_prints(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--master-port", str(free_port()), "-m", "--", *COMMAND[2:], "--backend", "gloo"]
    assert _command(torchrun, tmp_path).count("among 2 ranks") == 1


@pytest.mark.skipif(
    shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}") is None,
    reason="needs mpi4py and mpiexec",
)
def test_mpi_is_measured_if_installed(tmp_path):
    pytest.importorskip("mpi4py")
    operations = [word for name in OPERATIONS for word in ("--op", name)]
    out = _command([*COMMAND, *operations, "--ranks", "2", "-c", "--backend", OVER_MPI[0]], tmp_path)
    assert "Fail" not in out and out.count("Pass") == 2 * (len(OPERATIONS) - 1)
