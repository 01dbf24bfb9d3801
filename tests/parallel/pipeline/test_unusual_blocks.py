"""Pipelines of blocks with unusual outputs, buffers and attributes give the results of one process, or clear errors."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import farandole
from farandole.parallel.engine import Engine
from farandole.parallel.pipeline.stage_error import StageError
from farandole.plan import Plan, PlanError
from tests.parallel.pipeline.models import Batch

WIDTH = 4


def engine_of(model: nn.Module, plan: Plan, **options: Any) -> closing[Engine]:
    return closing(farandole.parallelize(model, plan, **options))


class Detach(nn.Module):
    """Returns no gradient to the blocks before it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class First(nn.Linear):
    """Returns the input, which the other blocks pass on, and an output."""

    def forward(self, x: Tensor) -> Any:
        return x, super().forward(x)


class Branch(nn.Linear):
    """Passes its inputs on, with a third tensor that `Drop` may leave unused."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Any:
        x, hidden = inputs
        return x, hidden, super().forward(hidden)


class Drop(nn.Linear):
    """Uses the third tensor only if the first element of the first is positive."""

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, hidden, other = inputs
        return super().forward(hidden + other if x[0, 0] > 0 else hidden)


class Cut(nn.Linear):
    """Passes no gradient on unless the first element of the first tensor is positive."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, hidden = inputs
        return super().forward(hidden if x[0, 0] > 0 else hidden.detach())


class Counter(nn.Linear):
    """Returns a buffer that each forward pass changes in place."""

    def __init__(self, size: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(size))

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return super().forward(x), self.count[1:]


class Normalize(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Multiply(nn.Linear):
    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, count = inputs
        return super().forward(x) * count[:WIDTH]


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "detach": lambda: [_linear(), _linear(), Detach(), _linear(), _linear()],
    "branch": lambda: [First(WIDTH, WIDTH), Branch(WIDTH, WIDTH), Drop(WIDTH, WIDTH), _linear()],
    "cut": lambda: [First(WIDTH, WIDTH), Cut(WIDTH, WIDTH), _linear(), _linear()],
    "counter": lambda: [_linear(), Counter(30000), Multiply(WIDTH, WIDTH), _linear()],
}


def _build(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*MODELS[name]())


def _batches(step: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(5, 2, WIDTH, generator=generator)
    # in step 0, `Drop` leaves its third input unused for all micro-batches; later, only for some
    inputs[:, 0, 0] = torch.tensor([-9.0] * 5 if step == 0 else [9.0, -9, 9, 9, -9])
    return [(x, torch.randn(2, WIDTH, generator=generator)) for x in inputs]


def _loss(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return F.mse_loss(output, batch[1], reduction="sum"), output.numel()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # with weight decay and momentum, a gradient of zeros is not the same as no gradient
    return torch.optim.AdamW(model.parameters(), 0.01, weight_decay=1.0)


def _alone(name: str) -> dict[str, Tensor]:
    model = _build(name)
    optimizer = _optimizer(model)
    for step in range(3):
        batches = _batches(step)
        for batch in batches:
            total, count = _loss(model(batch[0]), batch)
            (total / (count * len(batches))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _train(rank: int, size: int, plans: list[Plan], name: str) -> list[dict[str, Tensor]]:
    found = []
    for plan in plans:
        model = _build(name)
        with engine_of(model, plan) as engine:
            optimizer = engine.optimizer(_optimizer(model))
            for step in range(3):
                engine.forward_backward(_batches(step), _loss)
                optimizer.step()
                optimizer.zero_grad()
            found.append(engine.state_dict())
    return found


@pytest.mark.parametrize("name", MODELS)
def test_blocks_with_unusual_outputs(ranks: Any, name: str) -> None:
    plans = [
        Plan(pipeline=2, schedule=schedule, zero=zero)
        for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "gems")
        for zero in (0, 1)
        if (schedule, name) != ("gems", "counter")  # each replica has its own buffers
    ]
    plans.append(Plan(pipeline=2, zero=2))
    expected = _alone(name)
    for plan, *states in zip(plans, *ranks(2).run(_train, plans, name), strict=True):
        state = states[0] | states[1]
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, msg=lambda m, k=key, p=plan: f"{p}: {k}: {m}")


def _warnings(rank: int, size: int, schedule: str, block: Callable[[], nn.Module]) -> list[str]:
    found: list[str] = []
    log = logging.getLogger("farandole.parallel.pipeline.mean")
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    model = nn.Sequential(_linear(), block(), Multiply(WIDTH, WIDTH), _linear())
    with engine_of(model, Plan(pipeline=2, schedule=schedule)) as engine:
        for step in range(2):
            engine.forward_backward(_batches(step), _loss)
            engine.zero_grad()
    log.removeHandler(handler)
    return found


def test_warning_about_buffers_with_two_replicas(ranks: Any) -> None:
    assert ranks(2).run(_warnings, "1f1b", functools.partial(Counter, 30000)) == [[], []]
    assert ranks(2).run(_warnings, "gems", functools.partial(Normalize, WIDTH)) == [[], []]
    for messages in ranks(2).run(
        _warnings, "gems", functools.partial(Counter, 30000)
    ):  # each rank has the stage in one of the replicas
        assert len(messages) == 1
        assert messages[0].startswith("forward passes changed 1.count: with two replicas")


class Scaled(nn.Sequential):
    factor = 1.0

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.factor


def _change_attributes(rank: int, size: int) -> tuple[list[float], list[str]]:
    torch.manual_seed(0)
    model = Scaled(*(_linear() for _ in range(4)))
    engine = farandole.parallelize(model, Plan(pipeline=2))
    losses = []
    for factor in (1.0, 10.0):
        model.factor = factor
        losses.append(engine.evaluate(_batches(1), lambda output, batch: (output.sum(), 1)))
    for block in model:
        block.compile(backend="eager")
    losses.append(engine.evaluate(_batches(1), lambda output, batch: (output.sum(), 1)))
    model.compile(backend="eager")
    messages = []
    for run in (engine.forward_backward, engine.evaluate):
        with pytest.raises(StageError) as caught:
            run(_batches(1), _loss)
        messages.append(str(caught.value))
    engine.close()
    return losses, messages


def test_attributes_may_change_after_the_division(ranks: Any) -> None:
    for (first, second, third), messages in ranks(2).run(_change_attributes):
        assert second == pytest.approx(10 * first)
        assert third == second
        assert all("for block in model: block.compile()" in message for message in messages)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Returns(nn.Linear):
    """Returns an output of the given kind."""

    kind = "tensor"

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return {
            "tensor": x,
            "complex": torch.complex(x, x),
            "named": Pair(x, x + 1),
            "many": tuple(x + i for i in range(60)),
        }[self.kind]


def _refused_outputs(rank: int, size: int) -> list[str]:
    model = nn.Sequential(Returns(WIDTH, WIDTH), _linear())
    with engine_of(model, Plan(pipeline=2)) as engine:
        messages = []
        for kind in ("complex", "named", "many"):
            for block in model:
                block.kind = kind  # the other rank has another class
            with pytest.raises(StageError) as caught:
                engine.forward_backward(_batches(0), _loss)
            messages.append(str(caught.value))
            for block in model:
                block.kind = "tensor"
            engine.evaluate(_batches(0), _loss)
        return messages


def test_outputs_that_cannot_be_sent_raise_an_error_on_all_ranks(ranks: Any) -> None:
    for complex_, named, many in ranks(2).run(_refused_outputs):
        assert "a stage's output has dtype torch.complex64; expected one of torch.float32" in complex_
        assert "stage 0 returned Pair; expected a tensor, or a tuple of tensors and None" in named
        assert "a stage's output has 60 tensors, whose shapes need" in many


def _refused_models(rank: int, size: int) -> list[str]:
    messages = []
    for number in range(3):
        model = nn.Sequential(*(_linear() for _ in range(4)))
        if number == 0:
            model.scale = nn.Parameter(torch.ones(1))
        elif number == 1:
            model.register_buffer("offset", torch.ones(1))
        else:
            model.compile(backend="eager")
        with pytest.raises(PlanError) as caught:
            farandole.parallelize(model, Plan(pipeline=2))
        messages.append(str(caught.value))
        assert len(list(model.parameters())) == 8 + (number == 0)  # the model is unchanged
    return messages


def test_models_that_cannot_be_divided_are_refused_before_they_are_changed(ranks: Any) -> None:
    for parameter, buffer, compiled in ranks(2).run(_refused_models):
        assert parameter.startswith(
            "scale belongs to the model itself, not to a block, so no stage contains it"
        )
        assert buffer.startswith("offset belongs to the model itself")
        assert compiled.startswith("model.compile() is not supported with pipeline parallelism")


class Keywords(nn.Sequential):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return super().forward(x * scale)


def _with_example(rank: int, size: int) -> bool:
    model = Keywords(*(nn.Sequential(_linear(), nn.Dropout(0.5)) for _ in range(4)))
    before = torch.get_rng_state()
    with engine_of(model, Plan(pipeline=2), example={"x": torch.ones(2, WIDTH), "scale": 2.0}):
        return torch.equal(torch.get_rng_state(), before)


def test_an_example_may_have_keywords_and_uses_no_random_numbers(ranks: Any) -> None:
    assert ranks(2).run(_with_example) == [True, True]
