"""The planner for servers: memory equals that of the engine, and times follow the formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import farandole
from farandole.bench.serving import plan_check, speeds
from farandole.cli.main import app
from farandole.models.llama import LlamaConfig, build_llama
from farandole.models.meta import meta_device
from farandole.plan import PlanError
from farandole.planner.serving import Mix, ServedPart, ServingMachine, estimate_serving, running_choices
from farandole.serve.runner import Runner
from tests.serve.models import models

ACCELERATOR = ServingMachine.of_accelerator(
    memory=80 << 30,
    flops=dict.fromkeys(("fp32", "bf16", "fp16"), 600e12),
    read=3e12,
    bandwidth=300e9,
    process=0,
)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_keys_and_values_are_those_of_the_engine(family: str, precision: str) -> None:
    _, model = models(family)
    runner = Runner(model)
    part = ServedPart.of(model, 1, precision)
    assert part.kv_bytes == runner.bytes_per_position // (2 if precision == "bf16" else 1)
    assert part.layers == len(runner.shapes)
    assert part.weights == sum(parameter.numel() for parameter in model.parameters())
    assert (part.messages, part.sent) == (0, 0)
    halves = ServedPart.of(model, 2, precision)
    assert part.kv_bytes / 2 <= halves.kv_bytes <= part.kv_bytes
    assert halves.messages > part.layers
    assert halves.sent > 0


def test_a_model_of_8_billion_parameters() -> None:
    config = LlamaConfig(vocabulary=128256, layers=32, width=4096, heads=32, kv_heads=8, inner=14336)
    with meta_device():
        model = build_llama(config)
    part = ServedPart.of(model, 1, "bf16")
    assert part.weights == 8_030_261_248
    assert part.kv_bytes == 128 << 10
    one = estimate_serving(part, ACCELERATOR, Mix(512, 1), 1)
    assert one.weight_bytes == 2 * part.weights
    assert one.fits == ((80 << 30) - one.weight_bytes) // (512 * part.kv_bytes)
    # a prompt of 512 tokens takes the time of its operations; a step with few tokens takes the time to read the weights
    few = estimate_serving(part, ACCELERATOR, Mix(8, 64), 1)
    read = 2 * (part.body + part.head) / 3e12
    assert read < few.tpot < 1.01 * read
    assert estimate_serving(part, ACCELERATOR, Mix(512, 64), 16).tokens_per_s > 10 * few.tokens_per_s
    with pytest.raises(PlanError, match="nearest plans"):
        ServedPart.of(model, 12, "bf16")


def test_a_product_between_and_beyond_the_measured_rows() -> None:
    machine = ServingMachine(
        memory=1 << 30, products={"fp32": [(1, 1.0), (4, 2.5), (8, 4.0)]}, read=1, flops={}, bandwidth=1
    )
    assert [machine.product_s("fp32", rows) for rows in (0.5, 1, 2, 4, 6, 8, 16)] == [
        1, 1, 1.5, 2.5, 3.25, 4, 8,
    ]  # fmt: skip
    # the roofline: below the knee, a product reads its weights, and above it computes
    assert ACCELERATOR.product_s("bf16", 1) == ACCELERATOR.product_s("bf16", 100) == 2 / 3e12
    assert ACCELERATOR.product_s("bf16", 4000) == pytest.approx(2 * 4000 / 600e12)


def test_a_token_uses_some_experts_and_a_batch_uses_all() -> None:
    _, model = models("mixtral")
    part = ServedPart.of(model, 1, "fp32")
    assert part.experts > 0
    assert part.expert_top < part.expert_count
    one, many = (estimate_serving(part, ACCELERATOR, Mix(1, 2), running) for running in (1, 64))
    assert many.tpot > one.tpot


def test_running_choices() -> None:
    assert running_choices(1) == [1]
    assert running_choices(20) == [1, 4, 16, 20]
    with pytest.raises(PlanError, match="no sequence fits in the KV cache"):
        running_choices(0)


def plan(*words: str) -> Any:
    return CliRunner().invoke(app, ["plan", "--serve", *words])


def test_the_command_plans_accelerators(tmp_path: Path) -> None:
    published = ["--accelerators", "--memory", "80GiB", "--flops", "600T", "--memory-bandwidth", "3T"]
    path = tmp_path / "plan.json"
    result = plan("tiny", "-n", "2", *published, "--bandwidth", "300G", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "2 ranks, prompts of 512 tokens, outputs of 128 tokens; 80.0 GiB per rank" in result.output
    plans = json.loads(path.read_text())["plans"]
    assert {(each["part"]["tensor"], each["replicas"]) for each in plans} == {(1, 2), (2, 1)}
    assert "Published" not in result.output
    assert "Published peaks of h100: 79.0 GiB of memory" in plan("tiny", "--accelerators").output
    small = plan("tiny", *published[:2], "1MiB", *published[3:])
    assert small.exit_code == 1
    assert "does not fit" in small.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny", "--zero", "1"], "--zero is not supported with --serve"),
        (["tiny", "--flops", "3T"], "with --serve, --flops requires --accelerators"),
        (["tiny", "--accelerators=a10"], "--accelerators a10 is unknown; nearest: a100"),
        (["tiny", "--precision", "fp16"], "expected one of fp32, bf16"),
    ],
)
def test_options_for_training_are_refused(words: list[str], message: str) -> None:
    result = plan(*words)
    assert result.exit_code == 2
    assert message in result.output
    assert "requires --serve" in CliRunner().invoke(app, ["plan", "tiny", "--prompt-tokens", "4"]).output


def measured(rank: int, size: int) -> Any:
    """Measure this machine with small models, and serve the preset `tiny` with two ranks."""
    runtime = farandole.init()
    found = speeds.measure(
        runtime, {"vocabulary": 64, "width": 64, "heads": 2, "inner": 128, "layers": 2}, turns=1
    )
    job_spec = plan_check.ServingCheckJobSpec(["tiny"], 2, "fp32", {"prompt": 9, "output": 6}, [1, 3], "")
    return found, plan_check.measure(job_spec, runtime)


def test_the_measurements(ranks: Any) -> None:
    for found, served in ranks(2).run(measured):
        machine = found.machine(memory=1 << 30)
        assert machine.read > 0
        assert machine.bandwidth > 0
        assert all(seconds >= 0 for points in machine.products.values() for _, seconds in points)
        assert [each.tokens_per_s > 0 and each.ttft > 0 and each.tpot > 0 for each in served] == [True] * 2
    assert torch.get_num_threads() == 1
