"""Loss scaling: torch's arithmetic, steps skipped by all ranks alike, and messages with the origin of an overflow."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import farandole
from farandole import Plan, PlanError
from farandole.parallel.engine import Engine
from farandole.parallel.loss_scaling import LossScaler
from farandole.parallel.overflow import OutputWatch
from tests.parallel.odd import SHARE, loss_of, make_odd, world
from tests.parallel.test_zero import CLIP, STAGES, _batches, _grouped, _train_alone

INF, NAN = float("inf"), float("nan")


def test_the_scale_matches_torch() -> None:
    """Compare the scales and the trained parameters over a random series of overflows."""
    chance = random.Random(0)
    ours = LossScaler(scale=2.0**16, growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], 0.1)
    skipped = 0
    for _ in range(60):
        finite = chance.random() < 0.8
        theirs.scale(torch.ones(())).item()
        parameter.grad = torch.tensor([1.0, 2.0 if finite else INF])
        theirs.step(optimizer)
        theirs.update()
        ours.update(finite)
        skipped += not finite
        assert (ours.scale, ours.good_steps) == (theirs.get_scale(), theirs._get_growth_tracker())
    assert (ours.steps, ours.skipped) == (60, skipped)


def test_the_scale_stays_at_its_minimum() -> None:
    scaler = LossScaler(scale=4.0, minimum=1.0)
    reported = []
    for _ in range(302):
        scaler.update(finite=False)
        reported.append(scaler.is_reported)
    assert scaler.scale == 1.0
    assert sum(reported) == 3 + 3  # 4 -> 2, 2 -> 1, the first at the minimum, and every hundredth
    assert "minimum 1, but 300 steps in a row have overflowed" in scaler.advice
    assert "use bf16" in scaler.advice
    scaler.update(finite=True)
    assert not scaler.advice
    scaler.scale = 0.25  # as a user may set it
    scaler.update(finite=False)
    assert scaler.scale == 0.25


def test_invalid_scalers_are_refused() -> None:
    with pytest.raises(ValueError, match="growth_interval of at least 1 step, got 0"):
        LossScaler(growth_interval=0)
    with pytest.raises(ValueError, match="scale=1 with minimum=2"):
        LossScaler(1.0, minimum=2.0)


def test_a_scaler_resumes_from_its_state() -> None:
    first = LossScaler(growth_interval=5)
    for finite in (True, False, True, True):
        first.update(finite)
    second = LossScaler(growth_interval=5)
    second.load_state_dict(first.state_dict())
    for finite in (True, True, True, False):
        first.update(finite)
        second.update(finite)
    assert second.state_dict() == first.state_dict()
    assert first.scale == 32768.0


def test_other_types_are_not_scaled() -> None:
    scaler = LossScaler(enabled=False)
    scaler.update(finite=True)
    assert scaler.scale == 1.0
    assert scaler.multiply(torch.tensor(2.0)).item() == 2.0


class Blocks(nn.Module):
    """A chain of blocks with a layer before them."""

    def __init__(self, width: int = 8, count: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def _blocks() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


def _spoil(parameter: nn.Parameter, when: list[bool], value: float) -> None:
    """Set one element of the parameter's gradient to `value` while `when[0]` is true."""

    def spoiled(gradient: Tensor) -> Tensor:
        if not when[0]:
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[-1] = value
        return gradient

    parameter.register_hook(spoiled)


def _frozen_state(engine: Engine, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return copies of everything that a step changes: the model's weights, master weights, moments and counts."""
    pieces = [piece for _, piece, _ in engine.shards()]
    states = [value for piece in pieces for value in optimizer.state[piece].values()]
    whole = [value.clone() for _, value in engine.whole_parameters()]
    return [t.detach().clone() for t in (*whole, *pieces, *states)]


def _pass(engine: Engine, rank: int, accumulate: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for part in range(accumulate):
        loss = engine(torch.randn(4, 8, generator=generator)).float().square().mean() / accumulate
        if part < accumulate - 1:
            with engine.no_sync():
                engine.backward(loss)
        else:
            engine.backward(loss)


def _skip(rank: int, size: int, zero: int, accumulate: int, clip: bool) -> list[str]:
    """Run 8 steps, of which steps 3 and 5 overflow on rank 1; return the messages of these two steps."""
    model = _blocks()
    when = [False]
    if rank == 1:
        _spoil(model.blocks[1].weight, when, INF)
        _spoil(model.blocks[2].bias, when, NAN)
    scaler = LossScaler(2.0**12, growth_interval=3)
    engine = Engine(model, world(), 300, scaler=scaler, zero=zero, dtype=torch.float16, report=False)
    optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    lines, scales = [], []
    for step in range(1, 9):
        when[0] = step in (3, 5)
        _pass(engine, rank, accumulate)
        if clip:
            engine.clip(0.1)
        before = _frozen_state(engine, optimizer)
        world().barrier()
        optimizer.step()
        world().barrier()
        after = _frozen_state(engine, optimizer)
        schedule.step()
        assert engine.skipped == (step in (3, 5))
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=False)]
        assert all(same) and len(before) == len(after) if engine.skipped else not all(same)
        if engine.skipped:
            lines.append(str(engine.overflow))
        optimizer.zero_grad()
        scales.append(scaler.scale)
    assert scales == [2.0**n for n in (12, 12, 11, 11, 10, 10, 10, 11)]
    engine.close()
    return lines


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("zero", STAGES)
def test_all_ranks_skip_and_report_the_overflow(ranks: Any, zero: int, accumulate: int) -> None:
    where = "rank 1, blocks.1.weight grad inf (and 1 more parameter)"
    expected = [
        f"OVERFLOW step 3: {where}; scale 4096 -> 2048, step skipped",
        f"OVERFLOW step 5: {where}; scale 2048 -> 1024, step skipped",
    ]
    for clip in (False, True):
        assert ranks(2).run(_skip, zero, accumulate, clip) == [expected] * 2


def _skipped_steps(rank: int, size: int, zero: int) -> list[bool]:
    """Return whether each step is skipped, as `forward_backward` reports before the update."""
    model = _blocks()
    when = [False]
    if rank == 1:
        _spoil(model.blocks[1].weight, when, INF)
    scaler = LossScaler(2.0**12)
    engine = Engine(model, world(), 300, scaler=scaler, zero=zero, dtype=torch.float16, report=False)
    optimizer = engine.optimizer(lambda parameters: torch.optim.SGD(parameters, 0.1))
    found = []
    for number in range(4):
        when[0] = number in (1, 2)
        batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))] * (1 + rank)
        step = engine.forward_backward(
            batches, lambda output, _: (output.float().square().sum(), output.numel())
        )
        norm = engine.clip(0.1)
        assert step.skipped == (not math.isfinite(norm))
        optimizer.step()
        assert step.skipped == engine.skipped
        optimizer.zero_grad()
        found.append(step.skipped)
    engine.close()
    return found


@pytest.mark.parametrize("zero", STAGES)
def test_a_step_reports_on_all_ranks_whether_it_is_skipped(ranks: Any, zero: int) -> None:
    assert ranks(2).run(_skipped_steps, zero) == [[False, True, True, False]] * 2


class _Norms(TorchDispatchMode):
    """Counts computed norms."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten.linalg_vector_norm.default and args[0].dtype == torch.float32
        return function(*args, **(kwargs or {}))


def _clip_after_change(rank: int, size: int, zero: int) -> tuple[int, list[float]]:
    model = _blocks()
    engine = Engine(
        model, world(), 300, scaler=LossScaler(2.0**4), zero=zero, dtype=torch.float16, report=False
    )
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))]
    engine.forward_backward(batches, lambda output, _: (output.float().square().sum(), output.numel()))
    with _Norms() as norms:
        found = [engine.clip(INF)]
    for gradient in engine.gradients():
        gradient.mul_(2)
    found.append(engine.gradient_norm())
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2)
    found.append(engine.gradient_norm())
    for parameter in model.parameters():
        parameter.grad = None
    found.append(engine.gradient_norm())
    engine.close()
    return norms.count, found


@pytest.mark.parametrize("zero", STAGES)
def test_clip_reads_gradients_again_only_if_they_have_changed(ranks: Any, zero: int) -> None:
    for count, (first, *others) in ranks(2).run(_clip_after_change, zero):
        assert count == 0
        assert first > 0
        assert others == pytest.approx([2 * first, 4 * first, 4 * first])


def test_overflows_with_gathered_weights(ranks: Any) -> None:
    lines = ranks(2, "gloo").run(_skip, 3, 1, True)
    assert lines[0] == lines[1]
    assert lines[0][0].startswith(
        "OVERFLOW step 3: rank 1, blocks.1.weight grad inf (and 1 more parameter); "
    )


def _several(rank: int, size: int) -> str:
    model = _blocks()
    when = [True]
    if rank != 1:
        _spoil(model.blocks[rank].bias, when, NAN if rank else INF)
    engine = Engine(model, world(), scaler=LossScaler(2.0**4), zero=2, dtype=torch.float16)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    _pass(engine, rank, 1)
    optimizer.step()
    world().barrier()
    engine.close()
    return str(engine.overflow)


def test_several_ranks_and_parameters(ranks: Any) -> None:
    expected = (
        "OVERFLOW step 1: rank 0, blocks.0.bias grad inf (and 1 more parameter, also on rank 2); scale 16 -> 8, "
        "step skipped"
    )
    assert ranks(3).run(_several) == [expected] * 3


class Growing(Blocks):
    """A model whose second block returns infinities on rank 1."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        if rank == 1:
            self.blocks[1].register_forward_hook(lambda module, inputs, output: output * INF)


def _outputs(rank: int, size: int, diagnose: bool) -> tuple[list[str], bool]:
    torch.manual_seed(0)
    model = Growing(rank)
    plan = Plan(zero=1, precision="fp16")
    engine = farandole.parallelize(model, plan, diagnose=diagnose)
    assert isinstance(engine, Engine)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    lines = []
    for _ in range(3):
        _pass(engine, rank, 1)
        optimizer.step()
        optimizer.zero_grad()
        lines.append(str(engine.overflow))
    engine.close()
    return lines, any(block._forward_hooks for block in model.blocks[2:])


def test_the_first_non_finite_output_is_named(ranks: Any) -> None:
    for diagnose in (False, True):
        for lines, hooked in ranks(2).run(_outputs, diagnose):
            assert ("first bad output" in lines[0]) == diagnose
            assert all(
                line.endswith("step skipped; first bad output: blocks.1 (inf)") or diagnose
                for line in lines[1:]
            )
            assert not hooked


def test_outputs_of_an_evaluation_do_not_count() -> None:
    model = _blocks()
    watch = OutputWatch(model)
    watch.arm()
    with torch.no_grad():
        model.eval()(torch.full((1, 8), NAN))
    assert watch.found() == (-1, 0)
    model.train()(torch.full((1, 8), NAN))
    assert watch.describe([watch.found()], 0) == "first bad output: blocks.0 (nan)"


def _train_scaled(rank: int, size: int, zero: int, accumulate: int) -> dict[str, Tensor]:
    model = make_odd(seed=rank)
    model.offset = model.offset.half()
    scaler = LossScaler(2.0**10)
    engine = Engine(model, world(), 200, scaler=scaler, zero=zero, dtype=torch.float16)
    optimizer = engine.optimizer(_grouped(model))
    for batch in _batches(size):
        *first, last = batch.split(SHARE)[rank].split(SHARE // accumulate)
        for part in first:
            with engine.no_sync():
                engine.backward(loss_of(model, part) / accumulate)
        engine.backward(loss_of(model, last) / accumulate)
        engine.clip(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        assert not engine.skipped
    world().barrier()
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine.close()
    return weights


@pytest.mark.parametrize("zero", STAGES)
def test_fp16_training_matches_one_process(ranks: Any, zero: int) -> None:
    for accumulate in (1, 2):
        expected = _train_alone(2, accumulate, None, torch.float16)
        for result in ranks(2).run(_train_scaled, zero, accumulate):
            for name, value in result.items():
                torch.testing.assert_close(value, expected[name], msg=lambda m, name=name: f"{name}: {m}")


def _next_to_torch(rank: int, size: int) -> None:
    """fp32 weights with random overflows have the same bits as with GradScaler."""
    model = _blocks()
    reference = copy.deepcopy(model)
    when = [False]
    _spoil(model.first.weight, when, INF)
    _spoil(reference.first.weight, when, INF)
    engine = Engine(model, world(), scaler=LossScaler(2.0**8, growth_interval=2), zero=1, report=False)
    ours = engine.optimizer(torch.optim.Adam(model.parameters(), 0.01))
    theirs = torch.optim.Adam(reference.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    chance = random.Random(1)
    x = torch.randn(4, 8)
    for _ in range(30):
        when[0] = chance.random() < 0.3
        engine.backward(engine(x).square().mean())
        scaler.scale(reference(x).square().mean()).backward()
        ours.step()
        scaler.step(theirs)
        scaler.update()
        ours.zero_grad()
        theirs.zero_grad()
        assert engine.scaler.scale == scaler.get_scale()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert engine.scaler.skipped > 3


def test_training_matches_torch(ranks: Any) -> None:
    ranks(1).run(_next_to_torch)


def _passes_add_up(rank: int, size: int) -> None:
    """With zero=2, a second pass without no_sync adds to gradients that were already returned and unscaled."""
    model = _blocks()
    engine = Engine(model, world(), scaler=LossScaler(2.0**6), zero=2)
    _pass(engine, rank, 1)
    once = [g.clone() for g in engine.gradients()]
    _pass(engine, rank, 1)
    for a, b in zip(once, engine.gradients(), strict=True):
        torch.testing.assert_close(2 * a, b)
    engine.close()


def _average_overflows(rank: int, size: int) -> str:
    """Every rank's gradient is finite in fp32, and their sum is not."""
    model = nn.Linear(2, 2, bias=False)
    engine = Engine(model, world(), scaler=LossScaler(1.0), report=False)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    engine.backward((engine(torch.ones(1, 2)) * 3e38).sum())
    optimizer.step()
    engine.close()
    return str(engine.overflow)


def _refusals(rank: int, size: int) -> None:
    model = _blocks()
    with pytest.raises(
        PlanError,
        match="diagnose=True requires precision='fp16', got 'bf16'",
    ):
        farandole.parallelize(model, Plan(precision="bf16"), diagnose=True)
    engine = farandole.parallelize(model, Plan(precision="fp16"))
    with pytest.raises(RuntimeError, match=r"call engine\.backward\(loss\) instead"):
        engine(torch.ones(1, 8)).float().sum().backward()
    engine.close()
    plain = farandole.parallelize(_blocks(), Plan(precision="bf16"))
    assert (plain.skipped, plain.scaler.scale) == (False, 1.0)
    plain.backward(plain(torch.ones(1, 8)).float().sum())
    with pytest.raises(RuntimeError, match="watch=True"):
        plain.locate_nonfinite()
    plain.close()


def test_passes_accumulate(ranks: Any) -> None:
    ranks(2).run(_passes_add_up)


def test_an_average_that_overflows(ranks: Any) -> None:
    expected = "OVERFLOW step 1: average over ranks, weight grad inf; scale 1 -> 0.5, step skipped"
    assert ranks(2).run(_average_overflows) == [expected] * 2


def test_unsupported_calls_are_refused(ranks: Any) -> None:
    ranks(2).run(_refusals)


def _reported(rank: int, size: int) -> list[str]:
    model = _blocks()
    _spoil(model.first.bias, [True], NAN)
    engine = Engine(model, world(), scaler=LossScaler(1.0, minimum=1.0))
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    with contextlib.redirect_stderr(io.StringIO()) as reported:
        for _ in range(3):
            _pass(engine, rank, 1)
            optimizer.step()
            optimizer.zero_grad()
    assert engine.scaler.skipped == 3
    engine.close()
    return reported.getvalue().splitlines()


def test_an_overflow_at_the_minimum_is_reported_once(ranks: Any) -> None:
    reported, other = ranks(2).run(_reported)
    assert other == []
    assert (
        reported[0]
        == "farandole: OVERFLOW step 1: rank 0, first.bias grad nan (also on rank 1); scale 1 -> 1, step skipped"
    )
    assert "lower the learning rate" in reported[1]
    assert len(reported) == 2
