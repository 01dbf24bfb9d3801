"""Automatic precision, the learning-rate schedule and weight decay."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.comm.communicator import Communicator
from farandole.parallel import processor
from farandole.train import hardware
from farandole.train.config import load_config
from farandole.train.hardware import choose_precision
from farandole.train.trainer import build_optimizer, learning_rate

CPU = torch.device("cpu")
INTEL = "processor : 0\nvendor_id : GenuineIntel\nflags\t\t: fpu sse avx512f avx512_bf16 amx_bf16\n\nprocessor : 1\nflags : fpu\n"
INTEL_AVX512 = "vendor_id\t: GenuineIntel\nflags\t\t: fpu sse avx512f avx512_bf16\n"
AMD = "vendor_id\t: AuthenticAMD\nflags\t\t: fpu sse avx512f avx512_bf16\n"
OLD = "processor : 0\nflags\t\t: fpu sse avx2\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\n"


def _choose(rank: int, size: int, configured: str, processors: list[str], folder: Path) -> tuple[str, str]:
    assert dist.group.WORLD is not None
    file = folder / f"cpuinfo-{rank}"
    file.write_text(processors[rank])
    with mock.patch.object(processor, "_CPUINFO", file):
        choice = choose_precision(configured, Communicator(dist.group.WORLD), CPU)
    return choice.name, choice.reason


@pytest.mark.parametrize(
    ("processors", "expected"),
    [
        ([INTEL, INTEL], ("bf16", "the hardware multiplies bf16: amx_bf16")),
        ([INTEL, ARM], ("bf16", "the hardware multiplies bf16: amx_bf16, bf16")),
        ([AMD, ARM], ("bf16", "the hardware multiplies bf16: avx512_bf16, bf16")),
        ([AMD, INTEL_AVX512], ("fp32", "the CPU of rank 1 does not multiply bf16 faster than fp32")),
        ([INTEL, OLD], ("fp32", "the CPU of rank 1 does not multiply bf16 faster than fp32")),
        (["", OLD], ("fp32", "the CPU of rank 0 does not multiply bf16 faster than fp32")),
    ],
)
def test_auto_precision_depends_on_all_ranks(
    ranks: Any, tmp_path: Path, processors: list[str], expected: tuple[str, str]
) -> None:
    assert ranks(2).run(_choose, "auto", processors, tmp_path) == [expected] * 2


def test_configured_precision_is_used(ranks: Any, tmp_path: Path) -> None:
    assert ranks(1).run(_choose, "fp16", [OLD], tmp_path) == [("fp16", "configured")]


def test_reads_this_machines_processor() -> None:
    assert hardware.bf16_unit(CPU) in ("", "amx_bf16", "avx512_bf16", "bf16")
    with mock.patch.object(processor, "_CPUINFO", Path("/nowhere")):
        assert hardware.bf16_unit(CPU) == ""


def test_learning_rate_warms_up_and_decays_as_a_cosine() -> None:
    config = load_config("tiny", ["optimizer.warmup_steps=10", "optimizer.learning_rate=1.0"]).optimizer
    rates = [learning_rate(step, 110, config) for step in range(110)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[60] == pytest.approx((1 + config.final_share) / 2)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(config.final_share, rel=0.01)


def test_weight_decay_applies_to_matrices_only() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    matrices, vectors = build_optimizer(model, load_config("tiny").optimizer).param_groups
    assert [p.dim() for p in matrices["params"]] == [2]
    assert {p.dim() for p in vectors["params"]} == {1}
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
