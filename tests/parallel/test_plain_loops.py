"""Plain PyTorch idioms under `parallelize`: the result of one process, or an error that names the call to use."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole
from farandole import Plan
from farandole.comm.communicator import Communicator
from farandole.parallel.engine import Engine
from tests.parallel.backends import STAGES_AND_BACKENDS

STEPS, SHARE, RATE, CLIP = 3, 4, 0.2, 0.05


class Net(nn.Module):
    """A channels_last convolution for images, and a block of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.layers(torch.tanh(self.convolution(images)).mean((2, 3)))
        return out


@dataclass
class Loop:
    """The objects that a training loop uses."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    engine: Engine | None  # None in one process
    step: int = 0

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


def _make(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), RATE, momentum=0.9, weight_decay=0.01)


def _nothing(loop: Loop) -> None:
    pass


def _clear(loop: Loop) -> None:
    loop.optimizer.zero_grad()


@dataclass(frozen=True)
class Idiom:
    """Parts of a training loop, each with a default.  `refused(zero, low, gathered)`: whether an error is expected."""

    before_forward: Callable[[Loop], object] = _nothing
    loss: Callable[[Loop, Tensor], Tensor] = lambda loop, loss: loss
    before_backward: Callable[[Loop], object] = _nothing
    after_backward: Callable[[Loop], object] = _nothing
    update: Callable[[Loop], object] = lambda loop: loop.optimizer.step()
    after_update: Callable[[Loop], object] = _clear
    passes: int = 1
    at_the_end: Callable[[Loop], list[Tensor]] | None = None
    refused: Callable[[int, bool, bool], bool] = lambda zero, low, gathered: False


def _is_stored_elsewhere(zero: int, low: bool, gathered: bool) -> bool:
    """Return whether the optimizer updates tensors other than the model's parameters."""
    return zero > 0 or low


def _is_gathered(zero: int, low: bool, gathered: bool) -> bool:
    """Return whether this rank lacks the values of parameters outside of forward and backward passes."""
    return gathered


def _each(do: Callable[[nn.Parameter], object]) -> Callable[[Loop], object]:
    def run(loop: Loop) -> None:
        with torch.no_grad():
            for parameter in loop.parameters:
                do(parameter)

    return run


def _drop(parameter: nn.Parameter) -> None:
    parameter.grad = None


def _halve_gradient(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _decay_gradient(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.add_(parameter * 0.5)


def _smallest(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    assert torch.linalg.vector_norm(parameter.grad, -float("inf")) < 1


def _record_extremes(loop: Loop) -> None:
    for parameter in loop.parameters:
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0


def _check_norms(loop: Loop) -> None:
    """Log the norm of every gradient, on all ranks."""
    norms = [float(p.grad.norm()) for p in loop.parameters if p.grad is not None]
    total = torch.tensor(norms).norm()
    loop.__dict__.setdefault("norms", []).append(total)


def _logged_norms(loop: Loop) -> list[Tensor]:
    return [*_values(loop), *loop.__dict__["norms"]]


def _load(loop: Loop) -> None:
    if loop.step == 1:
        torch.manual_seed(5)
        loop.model.load_state_dict({k: torch.randn(v.shape) / 4 for k, v in _make().state_dict().items()})


def _load_a_block(loop: Loop) -> None:
    if loop.step == 1:
        loop.model.layers.load_state_dict(_make(3).layers.state_dict())  # type: ignore[union-attr, operator]


def _shrink(parameter: nn.Parameter) -> None:
    parameter.mul_(0.9)


def _edit(loop: Loop) -> None:
    if loop.engine is None:
        _each(_shrink)(loop)
    else:
        with loop.engine.edit_parameters():
            _each(_shrink)(loop)


def _manual_update(parameter: nn.Parameter) -> None:
    parameter.add_(parameter.grad, alpha=-RATE)  # type: ignore[arg-type]


def _state(loop: Loop) -> list[Tensor]:
    return [value.float() for value in loop.model.state_dict().values()]


def _engine_state(loop: Loop) -> list[Tensor]:
    state = loop.model.state_dict() if loop.engine is None else loop.engine.state_dict()
    assert list(state) == list(_make().state_dict())
    return [value.float() for value in state.values()]


def _deep_copy(loop: Loop) -> list[Tensor]:
    twin = copy.deepcopy(loop.model)
    return [parameter.detach().float() for parameter in twin.parameters()]


def _values(loop: Loop) -> list[Tensor]:
    if loop.engine is None:
        return [parameter.detach().clone() for parameter in loop.parameters]
    values = {id(p): value.float().clone() for p, value in loop.engine.whole_parameters()}
    return [values[id(parameter)] for parameter in loop.parameters]


def _is_sharded(zero: int, low: bool, gathered: bool) -> bool:
    """Return whether ranks update different elements."""
    return zero > 0


def _load_own_state(loop: Loop) -> None:
    if loop.step == 1:
        loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))


def _load_state_of_first(loop: Loop) -> None:
    """Save on rank 0, and load the file on all ranks."""
    if loop.step == 1:
        state = [copy.deepcopy(loop.optimizer.state_dict())]
        if loop.engine is not None:
            torch.distributed.broadcast_object_list(state, 0)
        loop.optimizer.load_state_dict(state[0])


def _load_state_of_one_process(loop: Loop) -> None:
    if loop.step == 1:
        alone = _make(7)
        optimizer = _optimizer(alone)
        sum(parameter.square().sum() for parameter in alone.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        loop.optimizer.load_state_dict(optimizer.state_dict())


def _scaler(loop: Loop) -> torch.amp.GradScaler:
    scaler: torch.amp.GradScaler = loop.__dict__.setdefault("scaler", torch.amp.GradScaler("cpu", 4.0))
    return scaler


def _scaled(loop: Loop, loss: Tensor) -> Tensor:
    """Scale the loss; in step 1, a gradient overflows on the last rank."""
    rank, size = (0, 1) if loop.engine is None else (loop.engine.rank, loop.engine.comm.size)
    if loop.step == 1 and rank == size - 1:
        loss = loss * float("inf")
    return _scaler(loop).scale(loss)


def _step_scaled(loop: Loop) -> None:
    _scaler(loop).step(loop.optimizer)
    _scaler(loop).update()


def _clip_unscaled(loop: Loop) -> None:
    _scaler(loop).unscale_(loop.optimizer)
    nn.utils.clip_grad_norm_(loop.model.parameters(), CLIP)


def _values_and_scale(loop: Loop) -> list[Tensor]:
    return [*_values(loop), torch.tensor(_scaler(loop).get_scale())]


def _penalized(loop: Loop, loss: Tensor) -> Tensor:
    penalty: Tensor = loss + 0.01 * sum(parameter.square().sum() for parameter in loop.parameters)
    return penalty


def _average(loop: Loop) -> None:
    """Update an exponential moving average of the parameters."""
    means = loop.__dict__.setdefault("means", [value.float() for value in _start()])
    with torch.no_grad():
        for mean, parameter in zip(means, loop.parameters, strict=True):
            mean.lerp_(parameter.float(), 0.5)


def _average_of_data(loop: Loop) -> None:
    means = loop.__dict__.setdefault("means", [value.float() for value in _start()])
    for mean, parameter in zip(means, loop.parameters, strict=True):
        mean.mul_(0.5).add_(parameter.data, alpha=0.5)


def _averages(loop: Loop) -> list[Tensor]:
    means: list[Tensor] = loop.__dict__["means"]
    return means


def _start() -> list[Tensor]:
    return [parameter.detach().clone() for parameter in _make().parameters()]


def _vector(loop: Loop) -> list[Tensor]:
    return [nn.utils.parameters_to_vector(loop.model.layers.parameters()).detach().float()]  # type: ignore[union-attr, operator]


IDIOMS = {
    "optimizer.zero_grad()": Idiom(),
    "optimizer.zero_grad() before backward": Idiom(before_backward=_clear, after_update=_nothing),
    "optimizer.zero_grad(set_to_none=False)": Idiom(
        after_update=lambda loop: loop.optimizer.zero_grad(set_to_none=False)
    ),
    "optimizer.zero_grad(set_to_none=False) before backward": Idiom(
        before_backward=lambda loop: loop.optimizer.zero_grad(set_to_none=False), after_update=_nothing
    ),
    "model.zero_grad()": Idiom(after_update=lambda loop: loop.model.zero_grad()),
    "model.zero_grad(set_to_none=False)": Idiom(
        after_update=lambda loop: loop.model.zero_grad(set_to_none=False)
    ),
    "model.zero_grad() before backward": Idiom(
        before_backward=lambda loop: loop.model.zero_grad(), after_update=_nothing
    ),
    "model.zero_grad(set_to_none=False) before backward": Idiom(
        before_backward=lambda loop: loop.model.zero_grad(set_to_none=False), after_update=_nothing
    ),
    "grad = None": Idiom(after_update=_each(_drop)),
    "grad = None and a step": Idiom(after_update=lambda loop: (_each(_drop)(loop), loop.optimizer.step())),
    "no zero_grad": Idiom(after_update=_nothing),
    "several backward passes": Idiom(passes=3),
    "clip_grad_norm_": Idiom(
        after_backward=lambda loop: nn.utils.clip_grad_norm_(loop.model.parameters(), CLIP)
    ),
    "clip_grad_norm_(inf)": Idiom(
        after_backward=lambda loop: nn.utils.clip_grad_norm_(loop.model.parameters(), CLIP, float("inf"))
    ),
    "clip_grad_norm_(foreach=False)": Idiom(
        passes=2,
        after_backward=lambda loop: nn.utils.clip_grad_norm_(loop.model.parameters(), CLIP, foreach=False),
    ),
    "clip_grad_value_": Idiom(
        after_backward=lambda loop: nn.utils.clip_grad_value_(loop.model.parameters(), 0.01)
    ),
    "grad.mul_": Idiom(after_backward=_each(_halve_gradient)),
    "grad.add_": Idiom(after_backward=_each(_decay_gradient), refused=_is_stored_elsewhere),
    "grad.norm(-inf)": Idiom(after_backward=_each(_smallest), refused=_is_stored_elsewhere),
    "grad.norm()": Idiom(after_backward=_check_norms, at_the_end=_logged_norms),
    "grad.abs()": Idiom(after_backward=_record_extremes, refused=_is_stored_elsewhere),
    "update by hand": Idiom(update=_each(_manual_update), refused=_is_stored_elsewhere),
    "parameter.mul_": Idiom(after_update=_each(_shrink), refused=_is_stored_elsewhere),
    "engine.edit_parameters": Idiom(after_update=lambda loop: (_clear(loop), _edit(loop))),
    "load_state_dict": Idiom(before_forward=_load),
    "load_state_dict of a block": Idiom(before_forward=_load_a_block),
    "optimizer.load_state_dict of the rank's state": Idiom(before_forward=_load_own_state),
    "optimizer.load_state_dict of rank 0's state": Idiom(
        before_forward=_load_state_of_first, refused=_is_sharded
    ),
    "optimizer.load_state_dict of one process": Idiom(before_forward=_load_state_of_one_process),
    "state_dict": Idiom(at_the_end=_state, refused=_is_gathered),
    "engine.state_dict": Idiom(at_the_end=_engine_state),
    "deepcopy": Idiom(at_the_end=_deep_copy, refused=_is_gathered),
    "GradScaler": Idiom(loss=_scaled, update=_step_scaled, at_the_end=_values_and_scale, refused=_is_sharded),
    "GradScaler.unscale_": Idiom(
        loss=_scaled,
        after_backward=_clip_unscaled,
        update=_step_scaled,
        at_the_end=_values_and_scale,
        refused=_is_sharded,
    ),
    "penalty": Idiom(loss=_penalized, refused=_is_gathered),
    "average": Idiom(
        after_update=lambda loop: (_clear(loop), _average(loop)), at_the_end=_averages, refused=_is_gathered
    ),
    "average of .data": Idiom(
        after_update=lambda loop: (_clear(loop), _average_of_data(loop)),
        at_the_end=_averages,
        refused=_is_gathered,
    ),
    "parameters_to_vector": Idiom(at_the_end=_vector, refused=_is_gathered),
    "half": Idiom(
        after_update=lambda loop: loop.model.double().float(),
        refused=_is_stored_elsewhere,
    ),
}


CHANGES_OF_MASTERS = ("engine.edit_parameters", "load_state_dict", "load_state_dict of a block")
"""The idioms that are refused if master weights of another dtype are offloaded."""

STATES_OF_OPTIMIZERS = tuple(name for name in IDIOMS if name.startswith("optimizer.load_state_dict"))
"""The idioms that are refused if optimizer states are offloaded."""


def _batches(size: int) -> Tensor:
    return torch.randn(STEPS, 3, SHARE * size, 3, 4, 4, generator=torch.Generator().manual_seed(size))


def _train(idiom: Idiom, loop: Loop, batches: Tensor, rank: int, low: bool) -> list[Tensor]:
    for loop.step, batch in enumerate(batches):
        for part in batch[: idiom.passes]:
            share = part if loop.engine is None else part[rank * SHARE : (rank + 1) * SHARE]
            idiom.before_forward(loop)
            output = (loop.engine or loop.model)(share).float()
            loss = idiom.loss(loop, output.square().mean())
            idiom.before_backward(loop)
            loss.backward()
        idiom.after_backward(loop)
        idiom.update(loop)
        idiom.after_update(loop)
    return (idiom.at_the_end or _values)(loop)


def _parallel(rank: int, size: int, name: str, plan: Plan) -> list[Tensor] | str:
    model = _make(rank)  # the parameters of rank 0 are used
    engine = farandole.parallelize(model, plan)
    loop = Loop(model, engine.optimizer(_optimizer(model)), engine)
    try:
        result = [
            value.clone()
            for value in _train(IDIOMS[name], loop, _batches(size), rank, plan.precision != "fp32")
        ]
        torch.distributed.barrier()
        return result
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        engine.close()


JOBS = [
    *(("fp32", zero, "farandole") for zero in range(4)),
    *(("bf16", zero, "farandole") for zero in (0, 3)),
    *((precision, 3, "gloo") for precision in ("fp32", "bf16")),
    *(pytest.param("bf16", zero, "farandole", marks=pytest.mark.slow) for zero in (1, 2)),
    *(
        pytest.param(precision, zero, "gloo", marks=pytest.mark.slow)
        for precision in ("fp32", "bf16")
        for zero in range(3)
    ),
]
"""The test of offloaded gradients covers stage 2 in bf16."""


@pytest.mark.parametrize("name", IDIOMS)
@pytest.mark.parametrize(("precision", "zero", "backend"), JOBS)
def test_an_idiom_gives_the_result_of_one_process_or_an_error(
    ranks: Any, name: str, zero: int, precision: str, backend: str
) -> None:
    refused = IDIOMS[name].refused(zero, precision == "bf16", zero == 3 and backend == "gloo")
    _compare(
        ranks(2, backend).run(_parallel, name, Plan(zero=zero, precision=precision)),
        name,
        precision,
        refused,
    )  # type: ignore[arg-type]


def _parallel_all(rank: int, size: int, plan: Plan) -> dict[str, list[Tensor] | str]:
    return {name: _parallel(rank, size, name, plan) for name in IDIOMS}


@pytest.mark.parametrize(("zero", "backend"), STAGES_AND_BACKENDS)
def test_an_idiom_with_an_unscaled_loss_in_fp16_is_refused(ranks: Any, zero: int, backend: str) -> None:
    for results in ranks(2, backend).run(_parallel_all, Plan(zero=zero, precision="fp16")):
        for name, result in results.items():
            before = name == "penalty" and zero == 3 and backend == "gloo"  # it reads parameters
            call = "engine.whole_parameters()" if before else "engine.backward(loss)"
            assert isinstance(result, str) and call in result, (name, result)


@pytest.mark.parametrize(("zero", "offloaded"), [(2, "gradients"), (3, "parameters")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", IDIOMS)
def test_an_idiom_with_gradients_and_weights_that_are_offloaded(
    ranks: Any, name: str, precision: Any, zero: int, offloaded: Any, tmp_path: Path
) -> None:
    plan = Plan(
        zero=zero,
        precision=precision,
        offload=f"disk:{tmp_path}" if precision == "fp32" else "host",
        offloaded=offloaded,
    )
    low = precision == "bf16"
    refused = (
        IDIOMS[name].refused(zero, low, zero == 3)
        or (low and name in CHANGES_OF_MASTERS)
        or name in STATES_OF_OPTIMIZERS
    )
    _compare(ranks(2).run(_parallel, name, plan), name, precision, refused)


@functools.cache
def _alone(name: str, size: int, low: bool) -> list[Tensor]:
    """Return the result of one process."""
    model = _make()
    values = _train(IDIOMS[name], Loop(model, _optimizer(model), None), _batches(size), 0, low)
    return [value.detach().float() for value in values]


def _compare(results: list[list[Tensor] | str], name: str, precision: str, refused: bool) -> None:
    """Compare the results of ranks with one process."""
    low = precision == "bf16"
    expected = [] if refused else _alone(name, len(results), low)
    for result in results:
        if refused:
            assert isinstance(result, str) and "engine." in result, result
            continue
        assert not isinstance(result, str), result
        for value, wanted in zip(result, expected, strict=True):
            tolerance = {"atol": 4e-3, "rtol": 3e-2} if low else {}
            torch.testing.assert_close(value, wanted, **tolerance)


def _load_differently(rank: int, size: int, what: str) -> list[str]:
    comm = Communicator(torch.distributed.group.WORLD).create_group(range(size))  # this group breaks
    model = _make()
    engine = farandole.parallelize(model, Plan(zero=1), comm=comm)
    optimizer = engine.optimizer(_optimizer(model))
    errors: list[str] = []
    try:
        if rank == 0:
            model.load_state_dict(_make(3).state_dict())
        elif what == "a block":
            model.layers.load_state_dict(_make(3).layers.state_dict())
        engine(_batches(1)[0][0]).square().mean().backward()
        optimizer.step()
    except RuntimeError as error:
        errors.append(str(error))
    torch.distributed.barrier()
    return errors


@pytest.mark.parametrize("what", ["a block", "nothing"])
def test_ranks_that_load_different_states(ranks: Any, what: str) -> None:
    errors = ranks(2).run(_load_differently, what)
    assert all(len(found) == 1 for found in errors), errors
    for (error,) in errors if what == "a block" else errors[:1]:
        assert "engine.load_weights(path) on all ranks" in error
