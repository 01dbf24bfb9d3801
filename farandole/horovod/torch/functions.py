"""Objects, parameters and optimizer states, made equal on all ranks."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from farandole.horovod.basics import rank
from farandole.horovod.process_sets import ProcessSet, global_process_set
from farandole.horovod.torch.gradients import allgather
from farandole.horovod.torch.operations import broadcast_, broadcast_async_, synchronize


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Copy the tensors of rank `root_rank` to all ranks, in place.

    params: `model.state_dict()` or another dict of tensors, or an iterable of tensors or (name, tensor) pairs.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, Tensor)):
        named = [item if isinstance(item, tuple) else (None, item) for item in params]
    else:
        raise ValueError(
            f"invalid params of type: {type(params)}; a dict or an iterable of tensors is expected"
        )
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{name or 'an entry of params'} is no tensor but {type(tensor).__name__}; "
                f"hvd.broadcast_object sends other objects"
            )
    handles = [
        broadcast_async_(tensor, root_rank, None if name is None else f"broadcast.{name}")
        for name, tensor in named
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Copy the state and the options (learning rates and so on) of the optimizer of rank `root_rank` to all ranks.

    The optimizer may have a state on some ranks and none on others.  As in Horovod, where an optimizer has no state,
    parameters that require a gradient and have none get a gradient of zeros.

    Args:
        optimizer: The optimizer, plain or distributed.
        root_rank: The rank that sends.
        model: Ignored; Horovod finds sparse parameters with it.

    Raises:
        ValueError: The optimizers have different numbers of groups, or of parameters in a group.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise ValueError(f"model is a torch.nn.Module, not {type(model).__name__}")
    if not optimizer.state:
        for parameter in _parameters(optimizer):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    tensors: list[Tensor] = []
    outline = None
    if rank() == root_rank:
        outline = _outline(_by_position(optimizer), tensors)
        outline = (outline, [(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
    outline, sizes = broadcast_object(outline, root_rank)
    received = tensors or [torch.empty(shape, dtype=dtype) for shape, dtype in sizes]
    on_host = [tensor.detach().cpu().contiguous() for tensor in received]
    broadcast_parameters(on_host, root_rank)
    if rank() != root_rank:
        _take_over(optimizer, _filled(outline, on_host), root_rank)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _by_position(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state by position of the parameter, and the options by group."""
    parameters = _parameters(optimizer)
    options = [
        {key: value for key, value in group.items() if key != "params"} | {"count": len(group["params"])}
        for group in optimizer.param_groups
    ]
    states = {
        index: optimizer.state[parameter]
        for index, parameter in enumerate(parameters)
        if parameter in optimizer.state
    }
    return {"options": options, "states": states}


class _Hole(int):
    """A placeholder for the tensor of this number in an outline."""


def _outline(value: Any, tensors: list[Tensor]) -> Any:
    """Return the same nest of dicts, lists and tuples with placeholders for tensors; append the tensors to a list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Hole(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _outline(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_outline(item, tensors) for item in value)
    return value


def _filled(outline: Any, tensors: list[Tensor]) -> Any:
    if isinstance(outline, _Hole):
        return tensors[outline]
    if isinstance(outline, dict):
        return {key: _filled(item, tensors) for key, item in outline.items()}
    if type(outline) in (list, tuple):
        return type(outline)(_filled(item, tensors) for item in outline)
    return outline


def _take_over(optimizer: torch.optim.Optimizer, found: dict[str, Any], root_rank: int) -> None:
    mine = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [options.pop("count") for options in found["options"]]
    if mine != theirs:
        raise ValueError(
            f"the optimizer of rank {root_rank} has groups of {theirs} parameters, that of rank {rank()} of {mine}"
        )
    for group, options in zip(optimizer.param_groups, found["options"], strict=True):
        group.update(options)
    parameters = _parameters(optimizer)
    optimizer.state.clear()
    for index, state in found["states"].items():
        parameter = parameters[index]
        optimizer.state[parameter] = {
            # a step count stays on the host, as optimizers keep it; what has a parameter's shape goes to its device
            key: item.to(parameter.device) if isinstance(item, Tensor) and item.dim() else item
            for key, item in state.items()
        }


def _pickler() -> Any:
    """Return cloudpickle if it is installed, because it serializes lambdas and local classes; otherwise pickle."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of rank `root_rank`, sent with pickle; the objects of other ranks are ignored."""
    is_root = rank() == root_rank
    data = _as_tensor(_pickler().dumps(obj)) if is_root else torch.empty(0, dtype=torch.uint8)
    size = broadcast_(torch.tensor([len(data)]), root_rank, name and f"{name}.size", process_set)
    if not is_root:
        data = torch.empty(int(size), dtype=torch.uint8)
    broadcast_(data, root_rank, name and f"{name}.object", process_set)
    return obj if is_root else pickle.loads(data.numpy().tobytes())


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order."""
    data = _as_tensor(_pickler().dumps(obj))
    sizes = allgather(torch.tensor([len(data)]), name and f"{name}.size", process_set)
    everything = allgather(data, name and f"{name}.object", process_set)
    return [pickle.loads(part.numpy().tobytes()) for part in everything.split(sizes.tolist())]
