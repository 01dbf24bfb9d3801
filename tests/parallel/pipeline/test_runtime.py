"""Every schedule trains a model as one process does, on 2 and 4 stages, for 1, 4 and 7 micro-batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import farandole
from farandole.models.gpt import GPTConfig, build_gpt
from farandole.models.llama import LlamaConfig, build_llama
from farandole.plan import Plan, PlanError

WORDS, STEPS, CLIP = 29, 2, 0.3

SCHEDULES = [
    "layer", "layer-w", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "v-min", "dualpipe-v",
    "gems", "gems-master", "gems-w", "chimera",
]  # fmt: skip


class Tuples(nn.Module):
    """A block with several inputs and outputs: one is passed on, one is None, one needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, inputs: Any) -> Any:
        x, skip, _, number = (
            inputs if isinstance(inputs, tuple) else (inputs, inputs * 2, None, torch.tensor(1))
        )
        return x + torch.tanh(self.linear(x)) * number, skip + x, None, number + 1


class Last(nn.Module):
    """Returns the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, WORDS)

    def forward(self, inputs: Any) -> Tensor:
        x, skip, _, number = inputs
        return self.linear(x + skip / number)


def _gpt() -> nn.Module:
    return build_gpt(GPTConfig(WORDS, 16, 6, 4, 16, positions="learned"))


def _llama() -> nn.Module:
    return build_llama(LlamaConfig(WORDS, 6, 4, 16, 20, kv_heads=2))


def _tuples() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 6), *(Tuples() for _ in range(6)), Last())


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": _gpt, "llama": _llama, "tuples": _tuples}


def _batches(step: int, replica: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return micro-batches of different sizes and lengths, some with masked targets."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    found = []
    for number in range(count):
        shape = (1 + number % 2, 5 + number % 3)
        tokens = torch.randint(1, WORDS, shape, generator=generator)
        targets = torch.randint(0, WORDS, shape, generator=generator)
        targets[0, : number % 3] = -1
        found.append((tokens, targets))
    return found


def _loss(output: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if isinstance(output, tuple):
        return output
    logits, targets = output.flatten(0, 1), batch[1].flatten()
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum"), (targets >= 0).sum()


def _inputs(batch: tuple[Tensor, Tensor], chunked: bool) -> Any:
    return {"inputs": batch[0], "targets": batch[1]} if chunked else batch[0]


def _build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def _alone(
    name: str, micro_batches: int, replicas: int = 1
) -> tuple[dict[str, Tensor], list[float], list[float], float]:
    """Train in one process."""
    model = _build(name)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses, norms = [], []
    for step in range(STEPS):
        batches = [b for replica in range(replicas) for b in _batches(step, replica, micro_batches)]
        parts = [_loss(model(batch[0]), batch) for batch in batches]
        loss = sum(total for total, _ in parts) / sum(count for _, count in parts)  # type: ignore[union-attr]
        loss.backward()
        losses.append(float(loss))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        batches = [b for replica in range(replicas) for b in _batches(9, replica, micro_batches)]
        parts = [_loss(model(batch[0]), batch) for batch in batches]
        metric = sum(float(total) for total, _ in parts) / sum(int(count) for _, count in parts)
    return {n: p.detach().clone() for n, p in model.named_parameters()}, losses, norms, metric


def _train(
    rank: int, size: int, name: str, plan: Plan, micro_batches: int, chunked: bool, folder: Path | None = None
) -> tuple[dict[str, Tensor], list[float], list[float], float]:
    """Train under a plan; with a folder, load the state if it exists, and otherwise save the state at the end."""
    model = _build(name)
    if rank:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # the values of rank 0 count
    engine = farandole.parallelize(model, plan)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.5, momentum=0.9 if folder else 0.0))
    if folder is not None and folder.exists():
        engine.load(folder)
    replica = engine.mesh.replica_of(rank)
    losses, norms = [], []
    for step in range(STEPS):
        batches = _batches(step, replica, micro_batches)
        losses.append(engine.forward_backward(batches, _loss, lambda batch: _inputs(batch, chunked)).loss)
        norms.append(engine.clip(CLIP))
        optimizer.step()
        optimizer.zero_grad()
    metric = engine.evaluate(_batches(9, replica, micro_batches), _loss)
    if folder is not None and not folder.exists():
        engine.save(folder)
    names = {p: n for n, p in model.named_parameters()}
    weights = {names[p]: value.detach().clone() for p, value in engine.whole_parameters()}
    engine.close()
    return weights, losses, norms, metric


def _compare(results: list[Any], alone: Any, stages: int) -> None:
    expected, losses, norms, metric = alone
    seen = set()
    for weights, found, found_norms, found_metric in results:
        assert found == pytest.approx(losses, rel=1e-5)
        assert found_norms == pytest.approx(norms, rel=1e-4)
        assert found_metric == pytest.approx(metric, rel=1e-4)
        for name, value in weights.items():
            torch.testing.assert_close(
                value, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
        seen |= set(weights)
        assert len(weights) < len(expected) or stages < 4
    assert seen == set(expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 4])
def test_every_schedule_trains_as_one_process(ranks: Any, schedule: str, stages: int) -> None:
    plan = Plan(pipeline=stages, schedule=schedule)
    for micro_batches in (1, 4, 7):
        results = ranks(stages).run(_train, "gpt", plan, micro_batches, False)
        _compare(results, _alone("gpt", micro_batches), stages)


@pytest.mark.parametrize("name", ["llama", "tuples"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_other_models_train_as_one_process(ranks: Any, name: str, schedule: str) -> None:
    results = ranks(2).run(_train, name, Plan(pipeline=2, schedule=schedule), 4, False)
    _compare(results, _alone(name, 4), 2)


def test_the_chunked_loss_of_the_head_runs_on_the_last_stage(ranks: Any) -> None:
    results = ranks(2).run(_train, "gpt", Plan(pipeline=2), 4, True)
    _compare(results, _alone("gpt", 4), 2)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("schedule", ["1f1b", "v-min", "gems-w"])
def test_stages_combine_with_data_parallelism(ranks: Any, zero: int, schedule: str) -> None:
    plan = Plan(data=2, pipeline=2, schedule=schedule, zero=zero)
    results = ranks(4).run(_train, "gpt", plan, 3, False)
    _compare(results, _alone("gpt", 3, replicas=2), 2)


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
        _, losses, norms, metric = _alone(name, 3, replicas=size // 4)
        for _, found, found_norms, found_metric in ranks(size).run(_train, name, plan, 3, True):
            assert found == pytest.approx(losses, rel=1e-5)
            assert found_norms == pytest.approx(norms, rel=1e-4)
            assert found_metric == pytest.approx(metric, rel=1e-4)


def test_the_middle_rank_of_a_mirrored_pipeline_has_a_stage_twice(ranks: Any) -> None:
    for zero in (0, 1):
        results = ranks(3).run(_train, "gpt", Plan(pipeline=3, schedule="gems", zero=zero), 5, False)
        _compare(results, _alone("gpt", 5), 3)


def test_gloo_carries_the_messages_too(ranks: Any) -> None:
    results = ranks(2, "gloo").run(_train, "gpt", Plan(pipeline=2, schedule="interleaved"), 4, False)
    _compare(results, _alone("gpt", 4), 2)


def test_a_checkpoint_of_stages_loads_without_stages(ranks: Any, tmp_path: Path) -> None:
    plans = [
        (2, Plan(pipeline=2, zero=1)),
        (1, Plan()),
        (4, Plan(pipeline=4, schedule="zb-v")),
        (2, Plan(pipeline=2, schedule="gems", zero=1)),
    ]
    for number, (size, plan) in enumerate(plans):
        folder = tmp_path / f"state{number}"
        ranks(size).run(_train, "gpt", plan, 4, False, folder)
        reference = ranks(1).run(_train, "gpt", Plan(), 4, False, folder)[0]
        for other_size, other in plans:
            for _, losses, norms, metric in ranks(other_size).run(_train, "gpt", other, 4, False, folder):
                assert losses == pytest.approx(reference[1], rel=1e-5)
                assert norms == pytest.approx(reference[2], rel=1e-4)
                assert metric == pytest.approx(reference[3], rel=1e-4)


def _refused(rank: int, size: int, kind: str, plan: Plan) -> str:
    models: dict[str, Callable[[], nn.Module]] = {
        "gpt": _gpt,
        "norm": lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
        "short": lambda: nn.Sequential(nn.Linear(2, 2)),
        "linear": lambda: nn.Linear(2, 2),
    }
    with pytest.raises(PlanError) as error:
        farandole.parallelize(models[kind](), plan)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gpt", {"schedule": "1f1"}, "unknown schedule '1f1'; did you mean 1f1b"),
        ("gpt", {"precision": "fp16"}, "stages support fp32 and bf16; nearest plan: precision='bf16'"),
        ("gpt", {"schedule": "zb-h1", "recompute": "block"}, "nearest plan: schedule='1f1b'"),
        ("norm", {}, "1.running_mean is a buffer"),
        ("short", {}, "1 blocks cannot be divided into 2 stages"),
        ("linear", {}, "divides an nn.Sequential of blocks, got Linear"),
    ],
)
def test_what_stages_do_not_support_is_refused(
    ranks: Any, kind: str, options: dict[str, Any], message: str
) -> None:
    for found in ranks(2).run(_refused, kind, Plan(pipeline=2, **options)):
        assert message in found


def test_invalid_plans_are_refused() -> None:
    with pytest.raises(PlanError, match="zero=2 with pipeline=2: .* nearest plan: zero=1"):
        Plan(pipeline=2, zero=2)
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
    engine = farandole.parallelize(_build("gpt"), Plan(pipeline=2))
    with pytest.raises(RuntimeError) as error:
        engine(torch.ones(1, 4, dtype=torch.int64))
    engine.close()
    return str(error.value)


def test_a_rank_cannot_call_the_model_alone(ranks: Any) -> None:
    for message in ranks(2).run(_called_directly):
        assert "call engine.forward_backward or engine.evaluate" in message


def _uneven(rank: int, size: int) -> None:
    engine = farandole.parallelize(_build("gpt"), Plan(pipeline=2))
    with pytest.raises(ValueError, match="2 on rank 0, 3 on rank 1"):
        engine.forward_backward(_batches(0, 0, 2 + rank), _loss)
    engine.close()


def test_stages_need_the_same_micro_batches(ranks: Any) -> None:
    ranks(2).run(_uneven)


def _recomputed(rank: int, size: int) -> list[float]:
    engine = farandole.parallelize(_build("gpt"), Plan(pipeline=2, recompute="block"))
    step = engine.forward_backward(_batches(0, 0, 4), _loss)
    found = [step.loss, engine.gradient_norm()]
    engine.close()
    return found


def test_stages_recompute_their_blocks(ranks: Any) -> None:
    model = _build("gpt")
    parts = [_loss(model(batch[0]), batch) for batch in _batches(0, 0, 4)]
    loss = sum(total for total, _ in parts) / sum(count for _, count in parts)  # type: ignore[union-attr]
    loss.backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    for found in ranks(2).run(_recomputed):
        assert found == pytest.approx([float(loss), norm], rel=1e-5)
