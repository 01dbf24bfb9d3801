"""`Engine.forward_backward` and `evaluate`: means over the global count, as one process computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import farandole
from farandole import Plan
from tests.parallel.backends import STAGES_AND_BACKENDS

STEPS, CLASSES, CLIP = 4, 5, 0.3
Batch = tuple[Tensor, Tensor]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def _batches(rank: int, step: int, numbers: tuple[int, ...], fixed: bool) -> list[Batch]:
    """Return the `numbers[rank]` micro-batches of a rank, with different sizes and masks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = []
    for number in range(numbers[rank]):
        rows = 3 if fixed else 1 + (rank + 2 * number + step) % 4
        targets = torch.randint(0, CLASSES, (rows, 4), generator=generator)
        if not fixed:
            masked = torch.rand(targets.shape, generator=generator) < 0.2 + 0.6 * (rank == number % 2)
            targets = targets.masked_fill(masked, -100)
        found.append((torch.randn(rows, 4, 6, generator=generator), targets))
    return found


def _loss(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    targets = batch[1].flatten()
    return F.cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum"), (targets != -100).sum()


def _alone(numbers: tuple[int, ...], fixed: bool) -> tuple[dict[str, Tensor], list[float]]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    losses = []
    for step in range(STEPS):
        batches = [batch for rank in range(len(numbers)) for batch in _batches(rank, step, numbers, fixed)]
        sums, counts = zip(*(_loss(model(batch[0]), batch) for batch in batches), strict=True)
        mean = sum(sums) / sum(counts)
        assert isinstance(mean, Tensor)
        mean.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(mean.detach()))
    return {name: value.detach() for name, value in model.named_parameters()}, losses


def _parallel(
    rank: int, size: int, zero: int, precision: Any, numbers: tuple[int, ...], fixed: bool
) -> tuple[dict[str, Tensor], list[float], float]:
    model = _model()
    engine = farandole.parallelize(model, Plan(zero=zero, precision=precision))
    optimizer = engine.optimizer(lambda parameters: torch.optim.SGD(parameters, 0.5, momentum=0.9))
    if precision == "fp16":
        engine.scaler.scale = 2.0**10  # a scale that does not overflow
    losses = []
    for step in range(STEPS):
        found = engine.forward_backward(_batches(rank, step, numbers, fixed), _loss)
        losses.append(found.loss)
        assert not found.skipped
        engine.clip(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        assert not engine.skipped
    mean = engine.evaluate(_batches(rank, 9, numbers, fixed), _loss)
    state = engine.state_dict()
    torch.distributed.barrier()
    engine.close()
    return state, losses, mean


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("zero", "backend"), STAGES_AND_BACKENDS)
def test_a_step_matches_one_process(ranks: Any, zero: int, precision: str, backend: str) -> None:
    tolerance = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 5e-3}[precision]
    for numbers, fixed in (((1, 1), True), ((3, 3), False), ((1, 4), False), ((2, 0), False)):
        expected, losses = _alone(numbers, fixed)
        for state, found, _ in ranks(2, backend).run(_parallel, zero, precision, numbers, fixed):
            assert found == pytest.approx(losses, rel=tolerance)
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_an_evaluation_matches_one_process(ranks: Any, zero: int, backend: str) -> None:
    numbers = (1, 3, 2)
    model = _model()
    expected, _ = _alone(numbers, fixed=False)
    model.load_state_dict(expected)
    batches = [batch for rank in range(3) for batch in _batches(rank, 9, numbers, fixed=False)]
    sums, counts = zip(*(_loss(model(batch[0]), batch) for batch in batches), strict=True)
    for _, _, mean in ranks(3, backend).run(_parallel, zero, "fp32", numbers, False):
        assert mean == pytest.approx(float(sum(sums) / sum(counts)), rel=1e-4)


def _refusals(rank: int, size: int) -> None:
    model = _model()
    engine = farandole.parallelize(model, Plan(zero=3))
    batches = _batches(rank, 0, (1, 1), fixed=True)
    with pytest.raises(ValueError, match="sum to 0"):
        engine.forward_backward(batches, lambda logits, batch: (logits.sum() * 0, 0))
    engine.zero_grad()
    with pytest.raises(ValueError, match=r"a scalar sum and a count, got a sum of shape \(3, 4, 5\)"):
        engine.forward_backward(batches, lambda logits, batch: (logits, 1))
    with pytest.raises(ValueError, match="sum to 0"):
        engine.forward_backward([], _loss)
    engine.zero_grad()
    engine.forward_backward(batches, _loss)
    with pytest.raises(RuntimeError, match="pass all micro-batches of the step in one call"):
        engine.forward_backward(batches, _loss)
    engine.close()


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_invalid_steps_are_refused(ranks: Any, backend: str) -> None:
    ranks(2, backend).run(_refusals)


def _named_inputs(rank: int, size: int) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, values: Tensor, scale: float) -> Tensor:
            out: Tensor = self.layer(values) * scale
            return out

    model = Named()
    engine = farandole.parallelize(model, Plan())
    batches = [{"values": torch.ones(2, 3), "scale": 0.5}]
    step = engine.forward_backward(batches, lambda output, batch: (output.sum(), len(output)), dict)
    assert step.count == 2 * size
    pairs = [(torch.ones(2, 3), 0.5)]
    other = engine.evaluate(pairs, lambda output, batch: (output.sum(), len(output)), lambda pair: pair)
    assert other == pytest.approx(step.loss)
    engine.close()


def test_arguments_of_the_model(ranks: Any) -> None:
    ranks(2).run(_named_inputs)


def _resumed(rank: int, size: int, folder: Path) -> tuple[list[float], list[float]]:
    """Return the losses after a checkpoint, in the engine that saved it and in another engine."""

    def make() -> tuple[Any, torch.optim.Optimizer]:
        model = _model()
        engine = farandole.parallelize(model, Plan(zero=1))
        return engine, engine.optimizer(torch.optim.AdamW(model.parameters(), 0.05))

    def train(engine: Any, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            losses.append(engine.forward_backward(_batches(rank, step, (1, 3), False), _loss).loss)
            optimizer.step()
            optimizer.zero_grad()
        return losses

    engine, optimizer = make()
    train(engine, optimizer, 0, 3)
    engine.save(folder)
    after = train(engine, optimizer, 3, 6)
    other, its = make()
    other.load(folder)
    found = train(other, its, 3, 6)
    torch.distributed.barrier()
    engine.close()
    other.close()
    return after, found


def test_steps_with_varying_counts_resume_bit_for_bit(ranks: Any, tmp_path: Path) -> None:
    for after, found in ranks(2).run(_resumed, tmp_path / "state"):
        assert after == found
