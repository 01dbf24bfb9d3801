"""The lab that trains a BERT out of core, scaled down: it stops if memory runs out, and plans give equal losses."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import farandole
from farandole.memory.disk import Bandwidth
from farandole.memory.tracker import DeviceMemory, OutOfDeviceMemory
from farandole.models.bert import build_bert
from farandole.models.loss import next_token_loss
from farandole.plan import Plan
from farandole.planner import Estimate, Machine, estimated_plans, what_fits

LAB = Path(__file__).parents[2] / "labs" / "out_of_core_bert.py"
SMALL = [
    "--layers",
    "3",
    "--width",
    "64",
    "--heads",
    "4",
    "--vocabulary",
    "300",
    "--context",
    "32",
    "--batch",
    "2",
    "--iterations",
    "3",
    "--rate",
    "1e-3",
]
OFFLOADED = ["--zero", "3", "--precision", "bf16", "--recompute", "block"]


def _lab() -> ModuleType:
    spec = importlib.util.spec_from_file_location("out_of_core_bert", LAB)
    assert spec is not None and spec.loader is not None
    lab = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = lab
    spec.loader.exec_module(lab)
    return lab


def _train(rank: int, size: int, arguments: list[str]) -> list[float] | OutOfDeviceMemory:
    lab = _lab()
    try:
        return [one.loss for one in lab.train(lab.read_options(SMALL + arguments), farandole.init())]
    except OutOfDeviceMemory as error:
        return error


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("text")
    words = random.Random(0).choices(
        ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "one", "dog"], k=6000
    )
    (folder / "words.txt").write_text(" ".join(words))
    return ["--text", str(folder / "words.txt"), "--cache", str(folder)]


def test_the_offloaded_run_has_the_same_losses(ranks: Any, text: list[str], tmp_path: Path) -> None:
    plan = [*text, *OFFLOADED, "--log", str(tmp_path / "log")]
    in_memory = ranks(2).run(_train, plan)
    offloaded = ranks(2).run(_train, [*plan, "--offload", f"disk:{tmp_path}", "--device-memory", "4MiB"])
    assert in_memory == offloaded
    assert offloaded[0] == offloaded[1]
    assert offloaded[0][0] == pytest.approx(math.log(300), rel=0.02)  # all tokens are equally likely
    assert offloaded[0][-1] < offloaded[0][0]
    log = (tmp_path / "log").read_text()
    assert "offloaded: each step reads" in log
    assert log.count("samples/s") == 3 + 1
    assert "of 4.0 MiB" in log.splitlines()[-1]


def test_a_run_that_does_not_fit_is_refused(ranks: Any, text: list[str]) -> None:
    for error in ranks(2).run(_train, [*text, "--device-memory", "1MiB"]):
        assert isinstance(error, OutOfDeviceMemory)
        assert "before the first step: " in str(error)
        assert "requested for weights of " in str(error)
        assert error.in_use["gradients"] > error.in_use["weights"]
    for error in ranks(2).run(_train, [*text, "--zero", "3", "--device-memory", "2400KiB"]):
        assert isinstance(error, OutOfDeviceMemory)
        assert error.step == 1
        assert "masters and states" in str(error)
        assert "in the optimizer step" in str(error)


def _measured(rank: int, size: int, plan: Plan) -> tuple[dict[str, int], int, Estimate]:
    """Return the bytes by kind after a step, the peak, and the estimate."""
    lab = _lab()
    runtime = farandole.init()
    options = lab.read_options(SMALL)
    config = lab.config_of(options)
    with DeviceMemory(None, torch.device("cpu")) as memory:
        with torch.device("meta"):
            model = build_bert(config)
        engine = farandole.parallelize(model, plan, initialize=lab.fill_block)
        optimizer = engine.optimizer(torch.optim.AdamW(model.parameters()))
        tokens = torch.zeros(options.batch, options.context, dtype=torch.int64)
        for _ in range(2):
            next_token_loss(engine(tokens), tokens).backward()
            optimizer.step()
            engine.zero_grad()
        found = dict(memory.in_use)
        runtime.comm.barrier()
        engine.close()
    return found, memory.peak, lab.predicted(options, plan, runtime)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_prediction_matches_the_measurement(
    ranks: Any, zero: int, precision: Any, tmp_path: Path
) -> None:
    for offload in ("none", f"disk:{tmp_path}"):
        plan = Plan(zero=zero, precision=precision, offload=offload)
        for found, peak, expected in ranks(2).run(_measured, plan):
            parts = expected.parts
            assert found["weights"] == pytest.approx(parts["weights"], rel=0.02), plan
            gradients = parts["buffers"] + (parts["gradients"] if zero < 2 else 0)  # after the step
            assert found["gradients"] == pytest.approx(gradients, rel=0.02), plan
            if offload == "none":
                assert found["masters and states"] == pytest.approx(parts["optimizer"], rel=0.02), plan
                assert peak == pytest.approx(expected.peak, rel=0.02), plan
            else:  # the states pass through temporary buffers
                assert found["masters and states"] <= parts["optimizer"], plan
                assert peak <= expected.peak, plan


def test_the_error_names_plans_that_fit() -> None:
    """The lab runs with an eighth of its layers, and with an eighth of its memory."""
    lab = _lab()
    machine = Machine(memory=12 << 27, disk=Bandwidth(1e9, 1e9, "any"), process=0, libraries=0, host=False)
    options = lab.read_options(["--layers", "24"])
    plans = list(estimated_plans(lab.workload_of(options), 2, machine))
    parameters, largest = lab.config_of(options).parameters, 30522 * 1024
    found = {(one.plan.zero, one.plan.precision, one.plan.offload): one for one in plans}
    wanted = found[3, "bf16", "disk:FOLDER"]
    # 2 and 4 bytes of weight and gradient in halves; for the embedding a buffer of 4 and three of 12 bytes
    states = sum(wanted.parts[name] for name in ("weights", "gradients", "buffers", "optimizer"))
    assert states == pytest.approx(3 * parameters + (4 + 36 / 2) * largest, rel=0.03)
    # master weights are created while whole gradients exist, and then halves of both exist
    assert found[1, "bf16", "disk:FOLDER"].start > (1 + 4 + 2) * parameters
    said = what_fits(plans, 2, 2 << 30)
    assert "--zero 3 --precision bf16 --recompute block --offload disk:FOLDER" in said
    assert "--offload none" not in said
    assert "use more ranks" in what_fits(plans, 2, 1 << 30)
    assert what_fits(plans, 2, 100 << 30).splitlines()[1].startswith("  --zero 0 --precision fp32")
