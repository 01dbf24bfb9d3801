"""`optimizer.state_dict()` and `load_state_dict()` of optimizers that update shards.

A rank's state contains the states of its shards, and a description of the shards.  A rank can load

- a state that the same rank saved with the same shards,
- a state that a single process saved; its elementwise states are cut to the rank's shards.

Other states raise an error on all ranks.  `engine.save` and `engine.load` support every change of plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farandole.comm.communicator import Communicator

_SHARDS = "farandole_shards"
"""The key in a state dict for the description of the shards."""

_INSTEAD = (
    "use engine.save(folder) and engine.load(folder) on all ranks instead; such a checkpoint restores optimizer states "
    "under any plan"
)

Tensors = Callable[[], Iterable[tuple[nn.Parameter, nn.Parameter, int]]]
"""A function that returns tuples (parameter, updated tensor, index of its first element in the parameter)."""


class StateDicts:
    """Adapts `state_dict` and `load_state_dict` of `optimizer` to this rank's shards.

    Args:
        given: the parameters of each group before they were replaced by shards.
        tensors: a function that yields the replacements for these parameters on this rank.
        names: the parameter names, by `id(parameter)`.
        comm: the communicator of all ranks if they have different shards, otherwise None.  With a communicator,
            `load_state_dict` is a collective call.
        elementwise: whether the optimizer updates each element independently.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        given: Sequence[Sequence[nn.Parameter]],
        tensors: Tensors,
        names: Mapping[int, str],
        comm: Communicator | None,
        *,
        elementwise: bool,
    ) -> None:
        self.given = [list(group) for group in given]
        """The unsharded parameters of each group."""
        self._tensors, self._names, self._comm, self._elementwise = tensors, names, comm, elementwise
        optimizer.register_state_dict_post_hook(self._describe)
        optimizer.register_load_state_dict_pre_hook(self._fit)

    def add_group(self, given: Sequence[nn.Parameter]) -> None:
        """Register a new group of parameters."""
        self.given.append(list(given))

    def _describe(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self._comm is not None:
            return {**state_dict, _SHARDS: self._description(optimizer, self._comm)}
        # as in one process, where frozen parameters have indices too
        updated = {id(parameter) for parameter, _, _ in self._tensors()}
        every = [parameter for group in self.given for parameter in group]
        numbers = [number for number, parameter in enumerate(every) if id(parameter) in updated]
        state = {numbers[k] if isinstance(k, int) else k: v for k, v in state_dict["state"].items()}
        groups: list[dict[str, Any]] = []
        first = 0
        for group, given in zip(state_dict["param_groups"], self.given, strict=True):
            groups.append({**group, "params": list(range(first, first + len(given)))})
            first += len(given)
        return {**state_dict, "state": state, "param_groups": groups}

    def _description(self, optimizer: Optimizer, comm: Communicator) -> dict[str, Any]:
        places = {id(tensor): (self._names[id(p)], start) for p, tensor, start in self._tensors()}
        shards = [[[*places[id(t)], t.numel()] for t in group["params"]] for group in optimizer.param_groups]
        return {"rank": comm.rank, "ranks": comm.size, "shards": shards}

    def _fit(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state for this rank's shards; raise an error on all ranks if any state does not fit."""
        problem, fitted = "", state_dict
        try:
            fitted = self._fitted(optimizer, state_dict)
        except ValueError as error:
            problem = str(error)
        except (LookupError, TypeError, AttributeError) as error:
            problem = f"this is not the state of an optimizer ({type(error).__name__}: {error})"
        try:
            problems = [problem] if self._comm is None else self._comm.all_gather_object(problem)
        except RuntimeError as error:
            raise RuntimeError(
                f"optimizer.load_state_dict could not communicate with the other ranks ({error}): call it on all ranks, or {_INSTEAD}"
            ) from error
        for rank, found in enumerate(problems):
            if found:
                where = "" if self._comm is None else f" on rank {rank}"
                raise RuntimeError(f"optimizer.load_state_dict{where}: {found}; {_INSTEAD}")
        return fitted

    def _fitted(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        saved = state_dict.get(_SHARDS)
        if saved is None:
            return self._cut(state_dict)
        if self._comm is not None and saved == self._description(optimizer, self._comm):
            return state_dict
        raise ValueError(
            f"this is the state of other shards, saved by rank {saved['rank']} of {saved['ranks']} ranks"
        )

    def _cut(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a state that a single process saved."""
        groups = state_dict["param_groups"]
        counts = [[len(each) for each in lists] for lists in ([g["params"] for g in groups], self.given)]
        if counts[0] != counts[1]:
            raise ValueError(
                f"expected parameter groups with {counts[1]} parameters, got groups with {counts[0]}"
            )
        parts = {id(parameter): (tensor, start) for parameter, tensor, start in self._tensors()}
        state = {key: value for key, value in state_dict["state"].items() if not isinstance(key, int)}
        fitted: list[dict[str, Any]] = []
        number = 0
        for group, given in zip(groups, self.given, strict=True):
            kept = [index for index, parameter in enumerate(given) if id(parameter) in parts]
            fitted.append({**group, "params": list(range(number, number + len(kept)))})
            for index in kept:
                found = state_dict["state"].get(group["params"][index])
                if found is not None:
                    self._check(found, given[index])
                    state[number] = state_of_shard(found, given[index], *parts[id(given[index])])
                number += 1
        return {**state_dict, "state": state, "param_groups": fitted}

    def _check(self, state: Mapping[str, Any], parameter: nn.Parameter) -> None:
        for key, value in state.items():
            by_element = isinstance(value, Tensor) and value.numel() != 1
            if self._comm is not None and self._elementwise and by_element and value.shape != parameter.shape:
                raise ValueError(
                    f"expected {key} of {self._names[id(parameter)]} with shape {tuple(parameter.shape)}, got "
                    f"{tuple(value.shape)}"
                )


def refuse_state_dicts(optimizer: Optimizer) -> None:
    """Make `state_dict` and `load_state_dict` of an optimizer with offloaded states raise an error."""

    def refuse(*_: Any) -> None:
        raise RuntimeError(
            f"state dictionaries of {type(optimizer).__name__} are not supported, because its states are "
            f"offloaded; {_INSTEAD}"
        )

    optimizer.register_state_dict_pre_hook(refuse)
    optimizer.register_load_state_dict_pre_hook(refuse)


def is_elementwise(key: str, value: Any, owner: Tensor) -> bool:
    """Return whether the state `value` has one number per element of parameter `owner`.

    `key` is the name of the state.  As in torch, the state "step" of a scalar parameter is not elementwise.
    """
    return isinstance(value, Tensor) and value.shape == owner.shape and (value.dim() > 0 or key != "step")


def state_of_shard(state: Mapping[str, Any], owner: Tensor, part: Tensor, start: int) -> dict[str, Any]:
    """Return the optimizer state for `part`, a range of parameter `owner`, given the `state` of `owner`.

    Elementwise states are cut to the elements of `part`.  Other tensors on the device of `owner` are moved to the
    device of `part`.

    Args:
        start: the index in the flattened `owner` at which `part` begins.
    """

    def cut(key: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not is_elementwise(key, value, owner):
            return value.to(part.device) if value.device == owner.device else value
        values = value.reshape(-1)[start : start + part.numel()].view(part.shape)
        kind = part.dtype if value.is_floating_point() and value.dtype == owner.dtype else value.dtype
        return torch.empty_like(part, dtype=kind, requires_grad=False).copy_(values)  # the strides of `part`

    return {key: cut(key, value) for key, value in state.items()}
