"""Test whether an optimizer can update each element or each parameter independently.

One copy of the optimizer updates two small matrices for a few steps.  Two other copies each update one part of these
matrices.  If the results are equal, the optimizer can update the parts on different ranks.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farandole.parallel.optimizers.state_dicts import is_elementwise

_SHAPES = ((4, 6), (5, 3))
_CUT = 10
"""The number of elements of the first matrix that belong to the first shard.

The second shard has the other elements of the first matrix, and the second matrix.
"""
_STEPS = 3
_LEARNING_RATE = 0.1


def why_not_elementwise(optimizer: Optimizer) -> str:
    """Return why `optimizer` cannot update shards of parameters, or "" if it can."""
    return _try_parts(optimizer, _cut, "update each element independently")


def why_not_by_parameter(optimizer: Optimizer) -> str:
    """Return why `optimizer` cannot update each parameter separately, or "" if it can."""
    return _try_parts(
        optimizer, lambda tensors, number: [tensors[number].clone()], "update each parameter independently"
    )


def _try_parts(optimizer: Optimizer, part: Callable[[list[Tensor], int], list[Tensor]], what: str) -> str:
    """Return why `optimizer` cannot update parts of two matrices separately, or "" if it can."""
    for group in optimizer.param_groups:
        if group["params"] and (reason := _try_group(optimizer, group, part, what)):
            return reason
    return ""


def _try_group(
    optimizer: Optimizer, group: dict[str, Any], part: Callable[[list[Tensor], int], list[Tensor]], what: str
) -> str:
    example = group["params"][0]
    generator = torch.Generator().manual_seed(0)
    kind = example.dtype if example.dtype.is_floating_point else torch.float32

    def matrices() -> list[Tensor]:
        return [torch.randn(shape, generator=generator).to(example.device, kind) for shape in _SHAPES]

    values, gradients = matrices(), [matrices() for _ in range(_STEPS)]
    whole = [nn.Parameter(value.clone()) for value in values]
    parts = [[nn.Parameter(each) for each in part(values, number)] for number in range(2)]
    try:
        _run(optimizer, group, whole, gradients)
        for number, own in enumerate(parts):
            _run(optimizer, group, own, [part(each, number) for each in gradients])
    except Exception as error:  # optimizers of other packages may raise any exception
        return f"it does not {what} ({type(error).__name__}: {error})"
    for number, own in enumerate(parts):
        for found, expected in zip(own, part([p.detach() for p in whole], number), strict=True):
            if not torch.allclose(found.detach().float(), expected.float(), rtol=1e-4, atol=1e-6):
                return f"it does not {what}"
    return ""


def _cut(tensors: list[Tensor], number: int) -> list[Tensor]:
    """Return shard `number` (0 or 1) of two matrices, as flat tensors."""
    first, second = (tensor.reshape(-1) for tensor in tensors)
    return [first[:_CUT].clone()] if number == 0 else [first[_CUT:].clone(), second.clone()]


def _run(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameters: list[nn.Parameter],
    gradients: list[list[Tensor]],
) -> None:
    copied = _optimizer_like(optimizer, group, parameters)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        # an optimizer that requires a closure raises an error, which becomes the reason
        type(copied).step(copied)


def _optimizer_like(optimizer: Optimizer, group: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """Return a copy of `optimizer` that updates `parameters` with the settings of `group`, except the learning rate."""
    copied = object.__new__(type(optimizer))
    copied.__dict__.update(optimizer.__dict__)
    copied.__dict__.pop("step", None)  # the method of a scheduler, bound to the optimizer itself
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        copied.__dict__[hooks] = OrderedDict()
    settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    if "param_names" in settings:
        settings["param_names"] = [str(number) for number in range(len(parameters))]
    rate = settings.get("lr")  # may be too small for a visible update, for example 0 at the start of a warmup
    if isinstance(rate, Tensor):
        settings["lr"] = torch.full_like(rate, _LEARNING_RATE)
    elif rate is not None:
        settings["lr"] = _LEARNING_RATE
    copied.param_groups = [{**settings, "params": parameters}]
    copied.state = defaultdict(dict)
    with_state = next((p for p in group["params"] if optimizer.state.get(p)), None)
    # Adagrad creates its state in its constructor; factored states are created in the first step
    if with_state is not None and _is_per_element(optimizer.state[with_state], with_state):
        for parameter in parameters:
            copied.state[parameter] = _state_like(optimizer.state[with_state], with_state, parameter)
    return copied


def _is_per_element(state: dict[str, Any], owner: Tensor) -> bool:
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    return all(value.shape == owner.shape or value.numel() == 1 for value in tensors)


def _state_like(state: dict[str, Any], owner: Tensor, other: Tensor) -> dict[str, Any]:
    def alike(key: str, value: Any) -> Any:
        if is_elementwise(key, value, owner) and value.numel():
            first = value.reshape(-1)[0].item()
            return torch.full(other.shape, first, dtype=value.dtype, device=value.device)
        return copy.deepcopy(value)

    return {key: alike(key, value) for key, value in state.items()}
