"""Unusual loops and models: the result of one process, or an error that names the cause."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import farandole
from farandole import Plan

STEPS, ROWS = 4, 3
Parallel = Callable[[nn.Module], Any]
Inputs = Callable[[int], Tensor]


class _Alone:
    """A model in one process, with the calls of an engine that the loops use."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, x: Tensor) -> Any:
        return self._model(x)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def _update(
    engine: Any, optimizer: Any, x: Tensor, backward: Callable[[Tensor], None] = Tensor.backward
) -> None:
    backward(engine(x).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()


def _train(
    engine: Any,
    model: nn.Module,
    inputs: Inputs,
    each: Callable[[int], None] = lambda step: None,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> None:
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    for step in range(STEPS):
        each(step)
        _update(engine, optimizer, inputs(step), backward)


# ---- the result of one process ----


def _froze_later(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = _model()
    _train(parallel(model), model, inputs, lambda step: model[2].requires_grad_(step < 2) and None)
    return model


def _gradient_penalty(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = _model()
    engine = parallel(model)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    for step in range(STEPS):
        x = inputs(step).requires_grad_()
        outputs = engine(x).square().mean(1)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        (outputs.mean() + slope.square().sum(1).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _retained_graph(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = _model()
    _train(parallel(model), model, inputs, backward=_backward_twice)
    return model


def _backward_twice(loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def _some_inputs(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = _model()
    _train(
        parallel(model),
        model,
        inputs,
        backward=lambda loss: loss.backward(inputs=list(model[4].parameters())),
    )
    return model


def _new_group(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = _model()
    engine = parallel(model)
    optimizer = engine.optimizer(torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9))
    for step in range(STEPS):
        if step == 2:
            optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.2})
        engine(inputs(step)).square().mean().backward()
        optimizer.step()
        model.zero_grad()
    return model


def _new_named_group(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = _model()
    engine = parallel(model)
    optimizer = engine.optimizer(torch.optim.Adam(model[0].named_parameters(), 0.01))
    for step in range(STEPS):
        if step == 1:
            optimizer.add_param_group({"params": model[4].named_parameters("4"), "lr": 0.02})
            assert optimizer.param_groups[1]["param_names"] == ["4.weight", "4.bias"]
        _update(engine, optimizer, inputs(step))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _update(engine, optimizer, inputs(STEPS))
    return model


def _reloaded_optimizer(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = _model()
    engine = parallel(model)
    optimizer = engine.optimizer(torch.optim.Adam(model.parameters(), 0.01))
    for step in range(STEPS):
        _update(engine, optimizer, inputs(step))
        if step == 1:
            state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    _update(engine, optimizer, inputs(STEPS))
    return model


def _gradient_hooks(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = _model()
    engine = parallel(model)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    _train(engine, model, inputs)
    return model


def _hooks_before(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = _model()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_halve)
    _train(parallel(model), model, inputs)
    return model


def _functional_call(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = _model()
    engine = parallel(model)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    for step in range(STEPS):
        _update(
            lambda x: torch.func.functional_call(model, dict(model.named_parameters()), (x,)),
            optimizer,
            inputs(step),
        )
    return model


def _sparse_gradients(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 4))
    _train(parallel(model), model, lambda step: inputs(step).mul(10).long() % 20)
    return model


class _Unusual(nn.Module):
    """Parameters without elements, complex, transposed, strided, and in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.complex = nn.Parameter(torch.randn(5, 6, dtype=torch.complex64))
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.strided = nn.Parameter(torch.randn(8, 4)[::2])
        self.in_fp64 = nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x.to(torch.complex64) @ self.complex).abs() @ self.transposed @ self.strided
        return self.in_fp64(hidden.tanh().double()) + self.empty.sum()


def _unusual_parameters(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = _Unusual()
    _train(parallel(model), model, inputs)
    return model


def _normed_weights(parallel: Parallel, inputs: Inputs) -> nn.Module:
    first, second = nn.Linear(5, 7), nn.Linear(7, 3)
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(first),
        nn.Tanh(),
        nn.utils.parametrizations.spectral_norm(second),
    )
    _train(parallel(model), model, inputs)
    return model


EQUAL = (
    *(_froze_later, _gradient_penalty, _retained_graph, _some_inputs, _new_group, _new_named_group),
    *(
        _reloaded_optimizer,
        _gradient_hooks,
        _hooks_before,
        _functional_call,
        _sparse_gradients,
        _unusual_parameters,
        _normed_weights,
    ),
)


# ---- errors ----


def _unfroze_later(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = _model()
    model[2].requires_grad_(False)
    _train(parallel(model), model, inputs, lambda step: model[2].requires_grad_(step >= 2) and None)
    return model


def _added_later(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = _model()
    engine = parallel(model)
    model.append(nn.Linear(2, 2))
    _train(engine, model, inputs)
    return model


def _assigned_gradients(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = _model()
    engine = parallel(model)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(engine(inputs(0)).square().mean(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    return model


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _hooks_after(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = _model()
    engine = parallel(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_halve)
    _train(engine, model, inputs)
    return model


def _two_engines(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = _model()
    parallel(model)
    parallel(model)
    return model


def _given_twice(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = _model()
    engine = parallel(model)
    engine.optimizer(engine.optimizer(torch.optim.SGD(model.parameters(), 0.1)))
    return model


def _foreign_group(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = _model()
    optimizer = parallel(model).optimizer(torch.optim.SGD(model.parameters(), 0.1))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    return model


def _group_added_twice(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = _model()
    optimizer = parallel(model).optimizer(torch.optim.SGD(model.parameters(), 0.1))
    optimizer.add_param_group({"params": model[0].weight})
    return model


def _lazy(parallel: Parallel, inputs: Inputs) -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(4))
    parallel(model)
    return model


ERRORS = {
    _unfroze_later: "2.weight has a gradient that ranks do not average",
    _added_later: "5.weight has a gradient that ranks do not average",
    _assigned_gradients: "was assigned a gradient that ranks have not averaged",
    _hooks_after: "call register_post_accumulate_grad_hook before parallelize",
    _two_engines: "belongs to an engine already",
    _given_twice: "engine.optimizer was already called with this optimizer",
    _foreign_group: "expected parameters that the engine trains",
    _group_added_twice: "some parameters appear in more than one parameter group",
    _lazy: "0.weight is not initialized",
}


# ---- both ----


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(10 * step + rank))


@functools.cache
def _run_alone(loop: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = loop(_Alone, lambda step: torch.cat([_batch(step, 0), _batch(step, 1)]))
    return {name: value.detach() for name, value in model.named_parameters()}


def _run(rank: int, size: int, loop: Any, zero: int) -> dict[str, Tensor] | str:
    engines = []

    def parallel(model: nn.Module) -> Any:
        engines.append(farandole.parallelize(model, Plan(zero=zero)))
        return engines[-1]

    torch.manual_seed(0)
    try:
        loop(parallel, lambda step: _batch(step, rank))
        state = engines[-1].state_dict()
        dist.barrier()
        return state
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize("loop", EQUAL, ids=lambda loop: loop.__name__.strip("_"))
@pytest.mark.parametrize(
    ("zero", "backend"), [(0, "farandole"), (1, "farandole"), (2, "farandole"), (3, "gloo")]
)
def test_the_result_matches_one_process(ranks: Any, loop: Any, zero: int, backend: str) -> None:
    expected = _run_alone(loop)
    for found in ranks(2, backend).run(_run, loop, zero):
        assert not isinstance(found, str), found
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loop", ERRORS, ids=lambda loop: loop.__name__.strip("_"))
@pytest.mark.parametrize(("zero", "backend"), [(0, "farandole"), (2, "farandole"), (3, "gloo")])
def test_the_error_names_the_cause(ranks: Any, loop: Any, zero: int, backend: str) -> None:
    for found in ranks(2, backend).run(_run, loop, zero):
        assert isinstance(found, str)
        assert ERRORS[loop] in found


class _CommonMemory(nn.Module):
    """Two parameters that overlap in memory."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(6, 5)
        self.first, self.second = nn.Parameter(whole[:4]), nn.Parameter(whole[2:])


def _common_memory(rank: int, size: int) -> str:
    try:
        farandole.parallelize(_CommonMemory(), Plan(zero=1))
    except ValueError as error:
        return str(error)
    return ""


def test_parameters_in_the_same_memory(ranks: Any) -> None:
    for message in ranks(2).run(_common_memory):
        assert "first and second are different parameters that share memory" in message
