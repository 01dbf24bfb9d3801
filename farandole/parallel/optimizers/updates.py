"""The engine's optimizers, and the collective operations before and after their steps.

    updates.add(optimizer)    # `optimizer.step()` then updates the shards of this rank

An elementwise optimizer (SGD, Adam, AdamW, Adagrad, ...) updates shards.  An optimizer that treats each parameter
separately (Adafactor, Muon, LAMB, Shampoo) updates whole parameters on the ranks that own them (`owned_parameters`).
An optimizer that combines all parameters (LBFGS, Prodigy) needs all of them on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farandole.comm.communicator import Communicator
from farandole.layout import Layout
from farandole.parallel.optimizers.offloading import OffloadedUpdate, records_at
from farandole.parallel.optimizers.owned_parameters import OwnedParameters
from farandole.parallel.optimizers.probe import why_not_by_parameter, why_not_elementwise
from farandole.parallel.optimizers.rounding import StochasticRounding
from farandole.parallel.optimizers.shards import OptimizerShards
from farandole.parallel.optimizers.state_dicts import StateDicts, refuse_state_dicts, state_of_shard
from farandole.parallel.zero.hidden_parameters import unchecked
from farandole.plan import Place

Discard = Callable[[Collection[int]], None]
"""A function that discards the gradients of an unfinished step, for the parameters with the given ids."""

_PLAIN = (bool, int, float, str, type(None))
"""The types of settings that checkpoints contain, also in tuples; a tensor with one element is saved as a number."""

_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
"""Settings that select an implementation without changing the result."""


class Updates:
    """Makes optimizers update this rank's shards.

    Args:
        shards: the shards of each bucket.
        layouts: the layouts of all parameters.
        zero: the ZeRO stage.
        place: where master weights and states are stored.
        before, after: functions called at the start and at the end of each step; `before` returns False if
            the step must be skipped.
        discard: a function that `optimizer.zero_grad` calls with the ids of its parameters.
    """

    def __init__(
        self,
        shards: Sequence[OptimizerShards],
        comm: Communicator,
        layouts: Mapping[str, Layout],
        *,
        zero: int,
        place: Place,
        rounding: StochasticRounding | None,
        before: Callable[[], bool],
        after: Callable[[], None],
        discard: Discard,
    ) -> None:
        self.optimizers: list[Optimizer] = []
        self.offloaded: list[OffloadedUpdate] = []
        self._shards, self._comm, self._layouts = shards, comm, layouts
        self._zero, self._place, self._rounding = zero, place, rounding
        self._before, self._after, self._discard = before, after, discard
        self._owned: list[OwnedParameters] = []
        plans = [each.bucket.plan for each in shards]
        self._names = {
            id(p): name for plan in plans for name, p in zip(plan.names, plan.parameters, strict=True)
        }
        # whether ranks update different elements
        self._divided = any(
            plan.layout.shards > 1 or any(layouts[name].shards for name in plan.names) for plan in plans
        )

    def add(
        self, optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer], model: nn.Module
    ) -> Optimizer:
        """Make an optimizer of `model` update this rank's shards, and return it; see `Engine.optimizer`."""
        optimizer = self._created(optimizer, model)
        owned = None
        if not self._updates_elements(optimizer):
            owned = OwnedParameters(self._shards, _members(optimizer))
            self._owned.append(owned)
        tensors = self._tensors_of_shards if owned is None else owned.tensors
        given = [group["params"] for group in optimizer.param_groups]
        use_shards(optimizer, tensors(), self._discard)
        state_dicts: StateDicts | None = None
        if self._divided:  # GradScaler then calls `step` in any case, so that all ranks raise an error
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        if self._place.kind == "none":
            if self._rounding is not None:
                self._rounding.drive(optimizer, self._shards)
            comm = self._comm if self._divided else None
            state_dicts = StateDicts(optimizer, given, tensors, self._names, comm, elementwise=owned is None)
        else:
            cuda = any(p.is_cuda for each in self._shards for p in each.parameters)
            records = records_at(self._place, self._comm, pinned=cuda)
            self.offloaded.append(OffloadedUpdate(optimizer, self._shards, records))
            refuse_state_dicts(optimizer)
        optimizer.register_step_pre_hook(partial(self._before_step, owned))
        optimizer.register_step_post_hook(lambda *_: self._end_step(owned))
        self._replace_add_param_group(optimizer, state_dicts if owned is None else None)
        self.optimizers.append(optimizer)
        return optimizer

    def _created(
        self, given: Optimizer | Callable[[list[nn.Parameter]], Optimizer], model: nn.Module
    ) -> Optimizer:
        """Return `given`, or the optimizer that the function `given` creates."""
        parameters = list(model.parameters())
        if callable(given) and not isinstance(given, type | Optimizer):
            trained = [parameter for parameter in parameters if id(parameter) in self._names]
            # the stages of a rank may have frozen parameters only, and torch's optimizers need at least one parameter
            given = given(trained or parameters)
        if not isinstance(given, Optimizer):
            found = f"{given.__name__} (a class)" if isinstance(given, type) else type(given).__name__
            raise TypeError(
                f"engine.optimizer expected an optimizer or a function that creates one, got {found}; "
                "try engine.optimizer(lambda params: torch.optim.AdamW(params))"
            )
        if any(known is given for known in self.optimizers):
            raise ValueError(
                "engine.optimizer was already called with this optimizer: call it once per optimizer"
            )
        known = {id(parameter) for parameter in parameters}
        if any(id(p) not in known for group in given.param_groups for p in group["params"]):
            raise ValueError(
                "the optimizer has parameters that do not belong to the engine's model: create it from model.parameters()"
            )
        return given

    def tensors(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, int]]:
        """Yield (parameter, tensor, start index) for each shard or whole parameter that can have optimizer states."""
        yield from self._tensors_of_shards()
        for owned in self._owned:
            yield from owned.tensors()

    def settings(self) -> list[list[dict[str, Any]]]:
        """Return the settings of each optimizer's parameter groups, for a checkpoint."""
        return [
            [
                {
                    name: value
                    for name, value in ((name, _saved(value)) for name, value in group.items())
                    if _is_plain(value) and name not in _IMPLEMENTATION
                }
                for group in optimizer.param_groups
            ]
            for optimizer in self.optimizers
        ]

    def restore_settings(self, saved: Iterable[Sequence[Mapping[str, Any]]]) -> None:
        """Restore the optimizer settings that `settings` returned."""
        for optimizer, groups in zip(self.optimizers, saved, strict=False):
            for group, settings in zip(optimizer.param_groups, groups, strict=False):
                group.update({name: _restored(group.get(name), value) for name, value in settings.items()})

    def close(self) -> None:
        """Close the offload stores."""
        for update in self.offloaded:
            update.close()

    def _replace_add_param_group(self, optimizer: Optimizer, state_dicts: StateDicts | None) -> None:
        """Make `add_param_group` shard the added parameters, or raise an error if `state_dicts` is None."""
        plain = type(optimizer).add_param_group
        trained = {id(parameter) for shards in self._shards for parameter in shards.parameters}

        def add_param_group(changed: Optimizer, param_group: dict[str, Any]) -> None:
            if state_dicts is None:
                raise RuntimeError(
                    "add_param_group is not supported for this optimizer, because its states are "
                    "offloaded or stored on ranks that own whole parameters: add all groups before "
                    "engine.optimizer(...)"
                )
            # torch checks the parameters before they are replaced by this rank's shards, and separates their names
            present = [
                {**group, "params": whole}
                for group, whole in zip(changed.param_groups, state_dicts.given, strict=True)
            ]
            added = Optimizer([*present, param_group], {}).param_groups[-1]
            given = added["params"]
            if any(id(parameter) not in trained for parameter in given):
                raise ValueError(
                    "add_param_group: expected parameters that the engine trains, got a parameter that is frozen or not in "
                    "the engine's model; set requires_grad before parallelize"
                )
            shard_of = {id(parameter): shard for parameter, shard, _ in self._tensors_of_shards()}
            plain(changed, {**added, "params": [shard_of[id(p)] for p in given if id(p) in shard_of]})
            state_dicts.add_group(given)

        optimizer.add_param_group = MethodType(add_param_group, optimizer)  # type: ignore[method-assign]

    def _tensors_of_shards(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, int]]:
        for shards in self._shards:
            yield from shards.stored()

    def _updates_elements(self, optimizer: Optimizer) -> bool:
        """Return whether `optimizer` can update shards; otherwise it must update whole parameters."""
        name, offload = type(optimizer).__name__, self._place.kind
        members = _members(optimizer)
        plans = [shards.bucket.plan for shards in self._shards]
        sharded = any(plan.layout.shards > 1 for plan in plans)
        split = [
            each
            for plan in plans
            for each, p in zip(plan.names, plan.parameters, strict=True)
            if id(p) in members and self._layouts[each].shards
        ]
        if not sharded and not split and offload == "none" and self._rounding is None:
            return True
        reason = why_not_elementwise(optimizer)
        if not reason:
            return True
        nearest = "zero=0 without offload"
        if split:
            axes = [axis for axis, _ in self._layouts[split[0]].shards]
            where = f"{split[0]}, which {' and '.join(axes)} parallelism splits"
            nearest = " and ".join(f"{axis}=1" for axis in axes)
        elif offload != "none":
            where = "offload, which updates shards of parameters"
        elif self._rounding is not None:
            where = "stochastic rounding, which updates shards of parameters"
            nearest = "rounding='nearest'"
        else:
            reason = why_not_by_parameter(optimizer)
            where = f"zero={self._zero}, where each parameter is updated by one rank"
        if reason:
            raise ValueError(
                f"{name} cannot be used with {where}: {reason}; use {nearest}, or an elementwise optimizer such as AdamW"
            )
        return False

    def _before_step(
        self,
        owned: OwnedParameters | None,
        optimizer: Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first argument is the optimizer
        if closure is None:
            self._begin_checked(optimizer, owned)
            return None

        def averaged() -> Any:
            self._end_step(owned)  # the closure computes with the updated weights
            loss = closure()
            self._begin_step(owned)
            return self._mean(loss)

        return (optimizer, averaged), {}

    def _mean(self, loss: Any) -> Tensor | None:
        """Return the mean of `loss` over all ranks, or None if `loss` is None."""
        if loss is None:
            return None
        mean = torch.as_tensor(loss).detach().double().clone()
        if self._comm.size > 1:
            self._comm.all_reduce(mean, "avg")
        return mean

    def _begin_checked(self, optimizer: Optimizer, owned: OwnedParameters | None = None) -> None:
        if self._divided and hasattr(optimizer, "found_inf"):  # set by GradScaler
            raise RuntimeError(
                "torch.amp.GradScaler is not supported with shards, because it checks only this rank's shards: use "
                'Plan(precision="fp16") instead, which scales the loss in engine.backward(loss)'
            )
        self._begin_step(owned)

    def _begin_step(self, owned: OwnedParameters | None = None) -> None:
        if self._before() and owned is not None:
            owned.receive()

    def _end_step(self, owned: OwnedParameters | None = None) -> None:
        if owned is not None:
            owned.send_back()
        self._after()


def _saved(value: Any) -> Any:
    """Convert an optimizer setting for saving in a checkpoint: one-element tensors become numbers."""
    if isinstance(value, tuple):
        return tuple(_saved(each) for each in value)
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, _PLAIN)


def _restored(current: Any, saved: Any) -> Any:
    """Return `saved`; if `current` is a one-element tensor, copy `saved` into `current` and return `current`."""
    if isinstance(saved, list | tuple):  # JSON has no tuples
        own = current if isinstance(current, tuple) and len(current) == len(saved) else [None] * len(saved)
        return tuple(_restored(*pair) for pair in zip(own, saved, strict=True))
    if isinstance(current, Tensor) and current.numel() == 1 and saved is not None:
        with torch.no_grad():
            return current.fill_(saved)  # in place, because CUDA graphs may read the tensor
    return saved


def _members(optimizer: Optimizer) -> set[int]:
    """Return the ids of the optimizer's parameters."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def use_shards(
    optimizer: Optimizer, shards: Iterable[tuple[nn.Parameter, nn.Parameter, int]], discard: Discard
) -> None:
    """Replace the optimizer's parameters with shards, and cut its existing states accordingly.

    Args:
        shards: tuples (parameter, shard, index in the flattened parameter at which the shard begins).  A whole
            parameter also counts as a shard.
        discard: called by `optimizer.zero_grad` with the ids of the parameters.
    """
    before = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known = {id(parameter) for parameter in before}
    shard_of = {id(parameter): (shard, start) for parameter, shard, start in shards}
    for group in optimizer.param_groups:
        group["params"] = [shard_of[id(p)][0] for p in group["params"] if id(p) in shard_of]
    for name, value in vars(optimizer).items():  # LBFGS has a separate list
        if isinstance(value, list) and value and all(id(each) in known for each in value):
            setattr(optimizer, name, [shard_of[id(p)][0] for p in value if id(p) in shard_of])
    for parameter in list(optimizer.state):
        shard, start = shard_of.get(id(parameter), (parameter, 0))
        if shard is not parameter or id(parameter) not in shard_of:
            state = optimizer.state.pop(parameter)
            if id(parameter) in shard_of:
                optimizer.state[shard] = state_of_shard(state, parameter, shard, start)
    _clear_parameters_too(optimizer, before, discard)


def _clear_parameters_too(optimizer: Optimizer, parameters: Sequence[Tensor], discard: Discard) -> None:
    """Make `zero_grad` also clear the gradients of `parameters`, not only of their shards."""
    plain = type(optimizer).zero_grad
    numbers = frozenset(map(id, parameters))

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        plain(self, set_to_none)
        if set_to_none:
            with unchecked():
                for parameter in parameters:
                    parameter.grad = None
        discard(numbers)

    optimizer.zero_grad = MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
