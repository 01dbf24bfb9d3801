"""Broadcast parameters and optimizer states, and broadcast or gather Python objects."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from farandole.horovod.basics import rank
from farandole.horovod.process_sets import ProcessSet, global_process_set
from farandole.horovod.torch.differentiable import allgather
from farandole.horovod.torch.operations import broadcast_, broadcast_async_, synchronize


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Copy tensors from rank `root_rank` to all ranks, in place.

    Args:
        params: A dict of tensors such as `model.state_dict()`, or an iterable of tensors or (name, tensor) pairs.
        root_rank: The rank to copy from.

    Raises:
        ValueError: if `params` is neither a dict nor an iterable, or contains an object that is not a tensor.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, Tensor)):
        named = [item if isinstance(item, tuple) else (None, item) for item in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}; expected a dict or an iterable of tensors")
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"expected tensors in params, but {name or 'an entry'} is of type {type(tensor).__name__}; "
                f"use hvd.broadcast_object for other objects"
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
    """Copy the optimizer's state and options (such as the learning rate) from rank `root_rank` to all ranks.

    The optimizer may have state on only some ranks.  On a rank where the optimizer has no state, trainable parameters
    without a gradient get a zero gradient, as in Horovod.

    Args:
        optimizer: The optimizer, plain or distributed.
        root_rank: The rank to copy from.
        model: Ignored.  Horovod uses the model to find sparse parameters.

    Raises:
        ValueError: if the number of parameter groups, or the number of parameters in a group, differs between ranks.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise ValueError(f"expected model to be a torch.nn.Module, got {type(model).__name__}")
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
        _load_root_state(optimizer, _filled(outline, on_host), root_rank)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _by_position(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's options and state, with parameter indices in place of parameters."""
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
    # optimizers may also store state that belongs to no parameter, under keys that are not tensors
    other = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    return {"options": options, "states": states, "other": other}


class _Placeholder(int):
    """Represents a tensor in the result of `_outline`.  The value is the tensor's index in the list `tensors`."""


def _outline(value: Any, tensors: list[Tensor]) -> Any:
    """Return a copy of `value` with placeholders instead of tensors, and append the tensors to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Placeholder(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _outline(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_outline(item, tensors) for item in value)
    return value


def _filled(outline: Any, tensors: list[Tensor]) -> Any:
    if isinstance(outline, _Placeholder):
        return tensors[outline]
    if isinstance(outline, dict):
        return {key: _filled(item, tensors) for key, item in outline.items()}
    if type(outline) in (list, tuple):
        return type(outline)(_filled(item, tensors) for item in outline)
    return outline


def _load_root_state(optimizer: torch.optim.Optimizer, found: dict[str, Any], root_rank: int) -> None:
    own = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [options.pop("count") for options in found["options"]]
    if own != theirs:
        raise ValueError(
            f"the optimizer's parameter groups differ in size: {theirs} on rank {root_rank}, "
            f"{own} on rank {rank()}; construct the same optimizer on all ranks"
        )
    for group, options in zip(optimizer.param_groups, found["options"], strict=True):
        group.update(options)
    parameters = _parameters(optimizer)
    optimizer.state.clear()
    for index, state in found["states"].items():
        parameter = parameters[index]
        optimizer.state[parameter] = {
            # optimizers keep step counts (scalars) on the host, and other tensors on the parameter's device
            key: item.to(parameter.device) if isinstance(item, Tensor) and item.dim() else item
            for key, item in state.items()
        }
    optimizer.state.update(found["other"])


def _pickler() -> Any:
    # unlike pickle, cloudpickle can serialize lambdas and local classes
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return rank `root_rank`'s object on all ranks.

    Args:
        obj: The object, which is pickled on rank `root_rank` and ignored on other ranks.
        root_rank: The rank to copy from.
        name: The name of the operation.
        process_set: The participating ranks.
    """
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
    """Return the objects from all ranks, in rank order.

    Args:
        obj: This rank's object, which is pickled.
        name: The name of the operation.
        process_set: The participating ranks.
    """
    data = _as_tensor(_pickler().dumps(obj))
    sizes = allgather(torch.tensor([len(data)]), name and f"{name}.size", process_set)
    everything = allgather(data, name and f"{name}.object", process_set)
    return [pickle.loads(part.numpy().tobytes()) for part in everything.split(sizes.tolist())]
