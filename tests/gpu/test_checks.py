"""The checks of `make gpu` run on a CPU here, so that a mistake in a check is found before it costs time on a GPU."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu.registry import AREAS, Context, Skip, checks, select
from farandole.comm.communicator import Communicator

FAST = [
    "collectives.two_ranks",
    "collectives.four_ranks",
    "routing.one_rank",
    "routing.mixed_groups",
    "routing.batch_of_two",
    "routing.message_between_two_of_three",
    "zero.stage_1",
    "zero.stage_3",
    "zero.deferred",
    "zero.locates_infinity",
    "offload.host_bf16",
    "precision.stochastic_rounding",
    "memory.limits_of_ranks",
]
"""The other checks take seconds each; `python -m benchmarks.gpu --device cpu` runs them."""
NUMBERS = itertools.count()


def _run(rank: int, size: int, name: str, folder: Path) -> dict[str, tuple[float, str]] | str:
    assert dist.group.WORLD is not None
    runtime = SimpleNamespace(comm=Communicator(dist.group.WORLD), rank=rank, size=size, local_size=size)
    torch.manual_seed(0)
    try:
        found = checks([name.partition(".")[0]])[name].run(Context(runtime, torch.device("cpu"), folder))
    except Skip as reason:
        return str(reason)
    return found


@pytest.mark.parametrize("name", FAST)
def test_a_check_passes_on_a_cpu(ranks: Any, tmp_path: Path, name: str) -> None:
    chosen = select([name])[0]
    if chosen.missing():
        pytest.skip(f"needs {chosen.missing()}")
    figures = ranks(chosen.ranks).run(_run, name, tmp_path)[0]
    assert isinstance(figures, dict), figures
    for value, unit in figures.values():
        assert isinstance(value, float) and isinstance(unit, str)


def test_every_area_has_checks_with_a_description() -> None:
    found = checks()
    assert {each.area for each in found.values()} == set(AREAS)
    for each in found.values():
        assert each.what.endswith("."), each.name
        assert all(importlib.util.find_spec(name) or name == "torchao" for name in each.needs), each.name


def test_select_takes_names_and_areas() -> None:
    assert [each.name for each in select(["zero.stage_1"])] == ["zero.stage_1"]
    assert {each.area for each in select(["zero", "memory"])} == {"zero", "memory"}
    with pytest.raises(ValueError, match=r"--only: expected one of routing, .*zero\.stage_1.*, got nothing"):
        select(["nothing"])
