"""Every schedule trains a model as one process does, on 2 and 4 stages, for 1, 4 and 7 micro-batches."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole
from farandole.plan import Plan, PlanError
from tests.parallel.pipeline.models import MODELS, Result, alone, batches, build, compare, loss, train

SCHEDULES = [
    "layer", "layer-w", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "v-min", "dualpipe-v",
    "gems", "gems-master", "gems-w", "chimera",
]  # fmt: skip


CASES = (("gpt", 1), ("gpt", 4), ("gpt", 7), ("resnet", 4), ("unet", 7))
"""Models and numbers of micro-batches; a slow test trains all combinations."""
PRODUCT = tuple(itertools.product(("gpt", "resnet", "unet"), (1, 4, 7)))


def _train_all(
    rank: int, size: int, plan: Plan, cases: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], Result]:
    return {(name, number): train(rank, size, name, plan, number, 1) for name, number in cases}


@pytest.mark.parametrize("cases", [CASES, pytest.param(PRODUCT, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 4])
def test_every_schedule_trains_as_one_process(
    ranks: Any, schedule: str, stages: int, cases: Sequence[tuple[str, int]]
) -> None:
    results = ranks(stages).run(_train_all, Plan(pipeline=stages, schedule=schedule), cases)
    for name, number in results[0]:
        found = [each[name, number] for each in results]
        expected = alone(name, number, steps=1)
        compare(found, expected)
        assert stages == 2 or all(len(state) < len(expected[0]) for state, *_ in found)


@pytest.mark.parametrize("name", ["llama", "tuples"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_other_models_train_as_one_process(ranks: Any, name: str, schedule: str) -> None:
    results = ranks(2).run(train, name, Plan(pipeline=2, schedule=schedule), 4)
    compare(results, alone(name, 4))


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_all_stages_mask_padding(ranks: Any, name: str) -> None:
    for schedule in ("1f1b", "zb-v"):
        results = ranks(2).run(train, name, Plan(pipeline=2, schedule=schedule), 4)
        compare(results, alone(name, 4))


@pytest.mark.parametrize("name", ["in_place", "twice"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_stages_may_modify_their_inputs_in_place(ranks: Any, name: str, schedule: str) -> None:
    measured = partial(train, example=batches(name, 0, 0, 1)[0][0])
    results = ranks(2).run(measured, name, Plan(pipeline=2, schedule=schedule), 4)
    compare(results, alone(name, 4))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_the_blocks_of_some_stages_are_frozen(ranks: Any, schedule: str) -> None:
    results = ranks(2).run(train, "frozen", Plan(pipeline=2, schedule=schedule), 4)
    compare(results, alone("frozen", 4))


def test_the_chunked_loss_of_the_head_runs_on_the_last_stage(ranks: Any) -> None:
    results = ranks(2).run(partial(train, chunked=True), "gpt", Plan(pipeline=2), 4)
    compare(results, alone("gpt", 4))


@pytest.mark.parametrize(
    ("schedule", "zero"),
    [(schedule, zero) for schedule in ("1f1b", "v-min", "gems-w") for zero in (0, 1)]
    + [(schedule, 2) for schedule in ("1f1b", "gpipe", "interleaved", "zb-h1", "v-min")],
)
def test_stages_combine_with_data_parallelism(ranks: Any, schedule: str, zero: int) -> None:
    """The embedding is tied to the output projection, which is in another stage."""
    plan = Plan(data=2, pipeline=2, schedule=schedule, zero=zero)
    results = ranks(4).run(train, "gpt", plan, 3)
    compare(results, alone("gpt", 3, replicas=2))


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (4, {"schedule": "zb-v"}),
        (8, {"data": 2, "zero": 1}),
    ],
    ids=["zb-v", "data"],
)
def test_stages_combine_with_tensor_parallelism(ranks: Any, size: int, options: dict[str, Any]) -> None:
    plan = Plan(pipeline=2, tensor=2, **options)
    for name in ("gpt", "llama"):
        results = ranks(size).run(partial(train, chunked=True), name, plan, 3)
        compare(results, alone(name, 3, replicas=size // 4))


def test_the_middle_rank_of_a_mirrored_pipeline_has_a_stage_twice(ranks: Any) -> None:
    for zero in (0, 1):
        results = ranks(3).run(train, "gpt", Plan(pipeline=3, schedule="gems", zero=zero), 5)
        compare(results, alone("gpt", 5))


def test_gloo_carries_the_messages_too(ranks: Any) -> None:
    results = ranks(2, "gloo").run(train, "gpt", Plan(pipeline=2, schedule="interleaved"), 4)
    compare(results, alone("gpt", 4))


def test_a_checkpoint_of_stages_loads_without_stages(ranks: Any, tmp_path: Path) -> None:
    plans = [
        (2, Plan(pipeline=2, zero=1)),
        (1, Plan()),
        (4, Plan(pipeline=4, schedule="zb-v")),
        (2, Plan(pipeline=2, schedule="gems", zero=1)),
    ]
    for number, (size, plan) in enumerate(plans):
        folder = tmp_path / f"state{number}"
        resume = partial(train, folder=folder)
        ranks(size).run(resume, "gpt", plan, 4)
        reference = ranks(1).run(resume, "gpt", Plan(), 4)[0]
        for other_size, other in plans:
            if other == Plan():  # the reference
                continue
            for _, losses, norms, metric in ranks(other_size).run(resume, "gpt", other, 4):
                assert losses == pytest.approx(reference[1], rel=1e-5)
                assert norms == pytest.approx(reference[2], rel=1e-4)
                assert metric == pytest.approx(reference[3], rel=1e-4)


def _refused(rank: int, size: int, kind: str, plan: Plan) -> str:
    norm = nn.BatchNorm1d(2)
    models: dict[str, Callable[[], nn.Module]] = {
        "gpt": MODELS["gpt"],
        "norm": lambda: nn.Sequential(*(nn.Sequential(norm, nn.Linear(2, 2)) for _ in range(2))),
        "short": lambda: nn.Sequential(nn.Linear(2, 2)),
        "linear": lambda: nn.Linear(2, 2),
        "tanh": lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh()),
    }
    with pytest.raises(PlanError) as error:
        farandole.parallelize(models[kind](), plan)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("tanh", {}, "the blocks of pipeline rank 1 have no parameters; nearest plan: pipeline=1"),
        ("gpt", {"schedule": "gems", "zero": 2}, "over these ranks, or schedule='1f1b'"),
        ("gpt", {"schedule": "1f1"}, "unknown schedule '1f1'; did you mean 1f1b"),
        ("gpt", {"recompute": "attention"}, "recompute='attention' requires an example"),
        ("gpt", {"schedule": "zb-h1", "recompute": "block"}, "nearest plan: schedule='1f1b'"),
        (
            "gpt",
            {"deferred_batch_norm": True},
            "no BatchNorm with running statistics; nearest plan: deferred_batch_norm=False",
        ),
        ("norm", {}, "0.0.running_mean belongs to stages 0 and 1"),
        ("short", {}, "1 blocks cannot be divided into 2 stages"),
        ("linear", {}, "expected an nn.Sequential of blocks for pipeline parallelism, got Linear"),
    ],
)
def test_what_stages_do_not_support_is_refused(
    ranks: Any, kind: str, options: dict[str, Any], message: str
) -> None:
    for found in ranks(2).run(_refused, kind, Plan(pipeline=2, **options)):
        assert message in found


def test_invalid_plans_are_refused() -> None:
    with pytest.raises(PlanError, match="zero=3 with pipeline=2: .* nearest plan: zero=2"):
        Plan(pipeline=2, zero=3)
    with pytest.raises(PlanError, match="stage_bytes=9 with pipeline=1: .* nearest plan: stage_bytes=None"):
        Plan(stage_bytes=9)
    with pytest.raises(PlanError, match="stage_bytes=9 is not supported with recompute='auto', which takes"):
        Plan(pipeline=2, recompute="auto", activation_bytes=9, stage_bytes=9)
    with pytest.raises(PlanError, match="schedule='gpipe' with pipeline=1"):
        Plan(schedule="gpipe")
    with pytest.raises(PlanError, match="pipeline=0: expected at least 1 rank"):
        Plan(pipeline=0)
    with pytest.raises(PlanError, match="pipeline=4: expected a multiple of 4 ranks, got 6"):
        Plan(pipeline=4).sizes(6)


class Slow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.03)
        return super().forward(x)


def _measured(rank: int, size: int) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 99), nn.Linear(99, 4), Slow(4, 4), Slow(4, 4))
    engine = farandole.parallelize(model, Plan(pipeline=2), example=torch.randn(2, 4))
    names = [name for name, _ in model.named_parameters()]
    engine.close()
    return names


def test_blocks_are_divided_by_measured_time(ranks: Any) -> None:
    first, last = ranks(2).run(_measured)
    assert first == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    assert last == ["3.weight", "3.bias"]


def _called_directly(rank: int, size: int) -> str:
    engine = farandole.parallelize(build("gpt"), Plan(pipeline=2))
    with pytest.raises(RuntimeError) as error:
        engine(torch.ones(1, 4, dtype=torch.int64))
    engine.close()
    return str(error.value)


def test_a_model_in_stages_cannot_be_called_to_train(ranks: Any) -> None:
    for message in ranks(2).run(_called_directly):
        assert "to train, call engine.forward_backward" in message


def _uneven(rank: int, size: int) -> None:
    engine = farandole.parallelize(build("gpt"), Plan(pipeline=2))
    with pytest.raises(ValueError, match="2 on rank 0, 3 on rank 1"):
        engine.forward_backward(batches("gpt", 0, 0, 2 + rank), loss)
    engine.close()


def test_stages_need_the_same_micro_batches(ranks: Any) -> None:
    ranks(2).run(_uneven)
