"""Published models on meshes like those of their papers: what fits, and why (docs/guides/planning.md)."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farandole.bench.planning import PlanSetup, plan
from farandole.models.hf.pretrained import FolderError, read_config
from farandole.models.meta import meta_device
from farandole.plan import Plan
from farandole.planner import Machine, estimate_workload
from farandole.train.config import load_config
from farandole.train.workload import workload_of
from tests.planner.published import CONFIGS, PARAMETERS, published_folder

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "planning.md"
GIB = 1 << 30

_BLOCK: dict[str, Any] = {"precision": "bf16", "recompute": "block"}
CASES = [
    ("llama-3-8b", 8192, 8, [Plan(zero=1, **_BLOCK), Plan(zero=3, **_BLOCK)]),
    ("llama-3-70b", 8192, 64, [Plan(zero=3, **_BLOCK)]),
    ("llama-3-70b", 8192, 64, [Plan(tensor=8, sequence=True, zero=1, **_BLOCK)]),
    ("mixtral-8x7b", 8192, 64, [Plan(expert=8, zero=0, **_BLOCK), Plan(expert=8, zero=1, **_BLOCK)]),
    ("deepseek-v3", 4096, 2048, [Plan(expert=64, zero=1, **_BLOCK), Plan(expert=64, zero=3, **_BLOCK)]),
    ("deepseek-v3", 4096, 2048, [Plan(pipeline=16, expert=64, zero=1, **_BLOCK)]),
]
"""A model, the length of its sequences, the number of ranks, and plans with equal passes, which are traced once."""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_configuration_has_the_published_parameters(name: str, tmp_path: Path) -> None:
    folder = published_folder(tmp_path, name)
    origin = read_config(folder, with_weights=False)
    with meta_device():
        model = origin.architecture.build(origin.config)
    # the published number includes the routers' biases, which are buffers, but not the layers that predict further
    # tokens
    biases = [(path, buffer) for path, buffer in model.named_buffers() if path.endswith("router.bias")]
    counted = [each for path, each in (*model.named_parameters(), *biases) if ".predictions." not in path]
    assert sum(each.numel() for each in counted) == PARAMETERS[name]
    if "quantization_config" in CONFIGS[name]:
        assert "quantization_config" not in origin.values
        with pytest.raises(FolderError, match="quantized weights are not supported"):
            read_config(folder)


def lines_of(folder: Path, name: str, length: int, ranks: int, plans: list[Plan]) -> Iterator[str]:
    """Yield the lines of the guide's table for a case."""
    words = [f"model={published_folder(folder, name)}", "model.pretrained=false", f"model.context={length}"]
    words += [f"batch={ranks}", "micro_batch=1", f"plan.pipeline={plans[0].pipeline}"]
    config = load_config("pretrain", words)
    machine = Machine(
        memory=80 * GIB,
        flops={"bf16": 4e14},
        process=600 << 20,
        libraries=0,
        hosts=ranks // 8,
        host=False,
        shared=False,
    )
    workload = replace(workload_of(config, ranks), block_by_block=True)
    traced = None
    for wanted in plans:
        if wanted.pipeline == 1:
            workload = workload if workload.applied else workload.split(wanted, ranks, machine.hosts)
            traced = traced or workload.trace(wanted)
        found = estimate_workload(workload, wanted, ranks, machine, traced)
        parts = {
            "weights": found.parts["weights"],
            "gradients": found.parts["gradients"],
            "optimizer": found.parts["optimizer"],
            "buffers": found.parts["buffers"],
            "activations": found.parts["activations"] + found.parts["backward"],
        }
        names = ("pipeline", "tensor", "expert")
        axes = [f"{axis}={getattr(wanted, axis)}" for axis in names if getattr(wanted, axis) > 1]
        cells = [name, f"{length:,}", f"{ranks:,}", " ".join([*axes, f"zero={wanted.zero}"])]
        cells += [f"{nbytes / GIB:.1f}" for nbytes in (*parts.values(), found.peak)]
        yield f"| {' | '.join([*cells, 'yes' if found.fits(machine.memory) else 'no'])} |"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2]}-{case[3][0].pipeline}")
def test_the_table_of_published_models(case: tuple[str, int, int, list[Plan]], tmp_path: Path) -> None:
    guide = GUIDE.read_text()
    for line in lines_of(tmp_path, *case):
        assert line in guide


def test_a_mesh_for_70_billion_parameters_is_proposed_in_seconds(tmp_path: Path) -> None:
    folder = published_folder(tmp_path, "llama-3-70b")
    started = time.process_time()
    found = plan(
        PlanSetup(
            (f"hf:{folder}", "model.context=8192"),
            ranks=64,
            nodes=8,
            memory=80 * GIB,
            flops=4e14,
            bandwidth=300e9,
            host_bandwidth=50e9,
            accelerators="h100",
            choices={"zero": [3]},
        )
    )
    assert time.process_time() - started < 60
    first = found.estimates[0]
    assert first.fits(80 * GIB)
    assert {one.plan.tensor for one in found.estimates} == {1, 2, 4, 8}
    least = found.estimates[-1].outcome(80 * GIB)
    assert re.fullmatch(r"fits|does not fit \(needs (at least )?[\d.,]+ GiB more; most for \w+\)", least)
