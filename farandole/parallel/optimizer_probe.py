"""Whether an optimizer may update shards: from two steps on tensors of a few elements, not from a list of names.

A rank of ZeRO has an optimizer of its own for its shard of the parameters.  SGD, Adam, AdamW, Adagrad and others update each
element by itself, so that this makes no difference.  It does for those that look at a whole matrix (Adafactor, Muon, LAMB,
Shampoo) or at all parameters (LBFGS, Prodigy).
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_SHAPES = ((4, 6), (5, 3))
_CUT = 10
"""One shard has so many elements of the first matrix, the other one the rest and the second matrix."""
_STEPS = 3


def why_not_elementwise(optimizer: Optimizer) -> str:
    """Return why `optimizer` would give other results for shards of its parameters, or "" if it would not."""
    for group in optimizer.param_groups:
        reason = _try_group(optimizer, group)
        if reason:
            return reason
    return ""


def _try_group(optimizer: Optimizer, group: dict[str, Any]) -> str:
    if not group["params"]:
        return ""
    example = group["params"][0]
    generator = torch.Generator().manual_seed(0)
    kind = example.dtype if example.dtype.is_floating_point else torch.float32
    values = [torch.randn(shape, generator=generator).to(example.device, kind) for shape in _SHAPES]
    gradients = [
        [torch.randn(shape, generator=generator).to(example.device, kind) for shape in _SHAPES]
        for _ in range(_STEPS)
    ]
    whole = [nn.Parameter(value.clone()) for value in values]
    shards = [[nn.Parameter(part) for part in _cut(values, number)] for number in range(2)]
    try:
        _run(optimizer, group, whole, gradients)
        for number, shard in enumerate(shards):
            _run(optimizer, group, shard, [_cut(each, number) for each in gradients])
    except Exception as error:  # whatever an optimizer of somebody else's raises
        return f"it does not update shards ({type(error).__name__}: {error})"
    for number, shard in enumerate(shards):
        for part, expected in zip(shard, _cut([p.detach() for p in whole], number), strict=True):
            if not torch.allclose(part.detach().float(), expected.float(), rtol=1e-4, atol=1e-6):
                return "it does not update each element by itself"
    return ""


def _cut(tensors: list[Tensor], number: int) -> list[Tensor]:
    """Shard `number` of two, as flat tensors."""
    first, second = (tensor.reshape(-1) for tensor in tensors)
    return [first[:_CUT].clone()] if number == 0 else [first[_CUT:].clone(), second.clone()]


def _run(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameters: list[nn.Parameter],
    gradients: list[list[Tensor]],
) -> None:
    twin = _twin_of(optimizer, group, parameters)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        type(twin).step(twin)  # some want a closure, which is what is to be found out


def _twin_of(optimizer: Optimizer, group: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """An optimizer of the same kind and settings for other parameters."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler's, bound to the optimizer itself
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[hooks] = OrderedDict()
    settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    if "param_names" in settings:
        settings["param_names"] = [str(number) for number in range(len(parameters))]
    twin.param_groups = [{**settings, "params": parameters}]
    twin.state = defaultdict(dict)
    with_state = next((p for p in group["params"] if optimizer.state.get(p)), None)
    if with_state is not None:  # made at construction, as Adagrad does, or loaded
        for parameter in parameters:
            twin.state[parameter] = _state_like(optimizer.state[with_state], with_state, parameter)
    return twin


def _state_like(state: dict[str, Any], owner: Tensor, other: Tensor) -> dict[str, Any]:
    def alike(value: Any) -> Any:
        if isinstance(value, Tensor) and value.shape == owner.shape and value.numel():
            first = value.reshape(-1)[0].item()
            return torch.full(other.shape, first, dtype=value.dtype, device=value.device)
        return copy.deepcopy(value)

    return {key: alike(value) for key, value in state.items()}


def state_of_part(state: dict[str, Any], owner: Tensor, part: Tensor, start: int) -> dict[str, Any]:
    """The state of an elementwise optimizer for `part`, which begins at element `start` of the flattened `owner`."""

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != owner.shape or (not value.dim() and part.dim()):
            return value
        values = value.reshape(-1)[start : start + part.numel()].view(part.shape)
        kind = part.dtype if value.is_floating_point() and value.dtype == owner.dtype else value.dtype
        return values.to(part.device, kind, copy=True)

    return {key: cut(value) for key, value in state.items()}
