"""Keep the blocks of this rank's stages, and run one stage of a model without changes to the model's code.

A model is an `nn.Sequential` of blocks.  A stage is a range of blocks.  To run a stage, the model is called with the
micro-batch's usual arguments, but the blocks of other stages are replaced:

- The blocks before the stage are replaced by a module that returns the hidden states from the previous stage.
- The blocks after the stage are replaced by a module that ends the call; the input of this module is the output of the
  stage.

So each stage executes the model's own `forward`, including its preparation of positions and masks, and the last stage
returns the model's output.  Parameters keep the names that they have in the complete model.  This is also true of a
tied parameter whose first occurrence is on another rank, such as the token embedding that the output projection uses:
the parameter keeps the first of its names.

If the model has routers with losses, each stage also sends, in training, the sum of the router losses of this stage
and all previous stages.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from farandole.layout import Layout
from farandole.models.moe import MixtureOfExperts
from farandole.models.router_losses import RouterLosses
from farandole.models.sequence import SequenceInfo
from farandole.parallel.axes import Layouts
from farandole.parallel.pipeline.balance import Balance, balance, parameter_costs, tensors_of
from farandole.parallel.pipeline.batch_norm import tracking_layers
from farandole.parallel.pipeline.schedule import Schedule, ScheduleError
from farandole.parallel.zero.hidden_parameters import hide
from farandole.plan import PlanError

COMPILED = (
    "model.compile() is not supported with pipeline parallelism, because each rank runs only some blocks; compile the "
    "blocks instead: for block in model: block.compile()"
)
ELSEWHERE = (
    "the parameter belongs to a pipeline stage of another rank; instead of an L2 penalty in the loss, use the optimizer's "
    "weight_decay"
)


class Stage:
    """One stage of `model`: the blocks whose indices are in `blocks`.

    `run` calls `view`, a copy of the model in which all other blocks are replaced.

    Args:
        routers: the indices of the blocks that contain routers with losses.
    """

    def __init__(self, model: nn.Sequential, number: int, blocks: range, routers: Collection[int]) -> None:
        self.number, self._model = number, model
        first = min(routers, default=blocks.stop)
        self._before = _Before(with_losses=first < blocks.start)
        after = _After(with_losses=first < blocks.stop)
        children = blocks_of(model)
        self.view = shallow_copy(model)
        self.view._modules = {
            name: child if place in blocks else self._before if place < blocks.start else after
            for place, (name, child) in enumerate(children)
        }
        self.blocks = [child for place, (_, child) in enumerate(children) if place in blocks]
        self.is_first, self.is_last = blocks.start == 0, blocks.stop == len(children)

    def run(self, hidden: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Return the output of the stage.

        Args:
            hidden: the output of the previous stage; ignored by the first stage.
            arguments, named: the arguments of the complete model for the micro-batch.
        """
        self._before.received = hidden
        self._update_view()
        try:
            return self.view(*arguments, **named)
        except _StageEnd as end:
            return self._independent(end.hidden)
        finally:
            self._before.received = None

    def _update_view(self) -> None:
        """Copy the model's current attributes, such as `training`, to `view`."""
        attributes = self._model.__dict__
        if attributes.get("_compiled_call_impl") is not None:
            raise RuntimeError(COMPILED)
        self.view.__dict__ |= {k: v for k, v in attributes.items() if k not in ("_modules", "forward")}

    def _independent(self, output: Any) -> Any:
        """Return `output`, in which tensors that share memory with a buffer are replaced by clones."""
        if all(tensor.requires_grad for tensor in tensors_of(output)):
            return output
        buffers = {_memory_of(buffer) for block in self.blocks for buffer in block.buffers()}

        @functools.cache  # a tensor that occurs twice remains one tensor
        def copy(tensor: Tensor) -> Tensor:
            return tensor.clone() if _memory_of(tensor) in buffers else tensor

        return tree_map_only(Tensor, copy, output)


def _memory_of(tensor: Tensor) -> int:
    """Return a number that identifies the storage of `tensor`; fake tensors are supported."""
    return tensor.untyped_storage()._cdata


class _StageEnd(Exception):
    """Raised to end a call to the model after the last block of a stage."""

    def __init__(self, hidden: Any) -> None:
        super().__init__("the stage has ended")
        self.hidden = hidden


class _Before(nn.Module):
    """Replaces the blocks before a stage; `with_losses`: whether some of these blocks have router losses."""

    received: Any = None

    def __init__(self, *, with_losses: bool) -> None:
        super().__init__()
        self._with_losses = with_losses

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Return the hidden states of the previous stage."""
        losses = _router_losses(arguments, named) if self._with_losses else None
        if losses is None:
            return self.received
        hidden, total = self.received
        losses.continue_from(total)
        return hidden


class _After(nn.Module):
    """Replaces the blocks after a stage; `with_losses`: whether some earlier blocks have router losses."""

    def __init__(self, *, with_losses: bool) -> None:
        super().__init__()
        self._with_losses = with_losses

    def forward(self, hidden: Any, *arguments: Any, **named: Any) -> Any:
        """End the call."""
        losses = _router_losses(arguments, named) if self._with_losses else None
        if losses is None:
            raise _StageEnd(hidden)
        if not isinstance(hidden, Tensor):
            raise TypeError(
                f"router losses between stages: expected a tensor between blocks, got {type(hidden).__name__}; return "
                "one tensor from each block, or use pipeline=1"
            )
        raise _StageEnd(losses.pass_on(hidden))


def _router_losses(arguments: Iterable[Any], named: Mapping[str, Any]) -> RouterLosses | None:
    every = (*arguments, *named.values())
    return next((each.router_losses for each in every if isinstance(each, SequenceInfo)), None)


class Absent(nn.Module):
    """Replaces a block of another rank, and keeps only the tensors that the block shares with blocks of this rank."""

    def forward(self, *_: Any, **__: Any) -> Any:
        """Raise RuntimeError."""
        raise RuntimeError(
            "this rank does not have this block of the model: call engine.forward_backward or engine.evaluate, which "
            "run all stages"
        )


def shallow_copy(model: nn.Sequential) -> nn.Sequential:
    """Return a copy of `model` whose blocks can be replaced without changing `model`.

    Unlike `copy.copy`, this function keeps methods that were replaced on the instance.
    """
    view = type(model).__new__(type(model))
    view.__dict__ |= {**model.__dict__, "_modules": dict(model._modules)}
    return view


def blocks_of(model: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """Return the names and blocks of a model, with a repeated block listed at each occurrence."""
    return [(name, block) for name, block in model._modules.items() if block is not None]


def divide(
    model: nn.Sequential,
    schedule: Schedule,
    costs: Sequence[float] | None = None,
    sizes: Sequence[Sequence[float]] | None = None,
    memory: float | None = None,
) -> Balance:
    """Divide the blocks of a model into the stages of a schedule.

    Args:
        costs: the cost of each block; by default, `parameter_costs` estimates the costs.
        sizes, memory: see `balance`.

    Raises:
        PlanError: if the model has too few blocks, or no division fits.
    """
    try:
        return balance(costs or parameter_costs(model), schedule.stages, sizes=sizes, memory=memory)
    except ScheduleError as error:
        raise PlanError(f"pipeline={schedule.ranks}, schedule={schedule.name!r}: {error}") from error


def split(
    model: nn.Sequential,
    schedule: Schedule,
    rank: int,
    layouts: Layouts,
    found: Balance | None = None,
) -> tuple[dict[int, Stage], Balance]:
    """Remove the blocks of other ranks from `model`, and record the stages of each tensor in `layouts`.

    Args:
        rank: the pipeline rank.
        found: the division of the blocks; by default, blocks are divided according to `parameter_costs`.

    Returns:
        The stages of this rank by index, and the division of the blocks.

    Raises:
        PlanError: if the model has too few blocks, or a rank would get no parameters.
    """
    found = found or divide(model, schedule)
    placement = schedule.placement[0]
    children = blocks_of(model)
    for name, buffer in model.named_buffers():
        layouts[name] = Layout(name, tuple(buffer.shape))
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    _check_statistics(children, found.ranges, names)
    _check_parameters(children, found.ranges, schedule)
    for name, stages in stages_of(model, found).items():
        layouts[name] = replace(layouts[name], stages=frozenset(placement[stage] for stage in stages))
    own = {
        number: blocks
        for number, blocks in enumerate(found.ranges)
        if any(
            row[number] == rank for row in schedule.placement
        )  # a mirrored rank has a stage of each replica
    }
    kept = {place for blocks in own.values() for place in blocks}
    needed = {id(tensor) for place in kept for tensor in _tensors(children[place][1]).values()}
    routers = [place for place, (_, child) in enumerate(children) if _has_router_losses(child)]
    for place, (name, child) in enumerate(children):
        if place not in kept:
            model._modules[name] = _absent(child, needed)
            for parameter in child.parameters():
                if id(parameter) not in needed and not parameter.is_meta:  # the loss function may refer to it
                    hide(parameter, names[id(parameter)], ELSEWHERE)
    return {number: Stage(model, number, blocks, routers) for number, blocks in own.items()}, found


def stages_of(model: nn.Sequential, found: Balance) -> dict[str, frozenset[int]]:
    """Return a dict that maps each parameter or buffer name of a complete model to the tensor's stages.

    A tensor with several names is listed under its first name.
    """
    children = blocks_of(model)
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    stages: dict[str, set[int]] = {name: set() for name in names.values()}
    for number, blocks in enumerate(found.ranges):
        for place in blocks:
            for tensor in _tensors(children[place][1]).values():
                stages[names[id(tensor)]].add(number)
    return {name: frozenset(numbers) for name, numbers in stages.items()}


def _has_router_losses(block: nn.Module) -> bool:
    return any(isinstance(m, MixtureOfExperts) and m.balance.has_losses for m in block.modules())


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module under all of their names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return dict((*parameters, *module.named_buffers(remove_duplicate=False)))


def _check_statistics(
    children: Sequence[tuple[str, nn.Module]], ranges: Sequence[range], names: Mapping[int, str]
) -> None:
    """Raise PlanError if several stages share a layer with running statistics."""
    seen: dict[nn.Module, int] = {}
    for number, blocks in enumerate(ranges):
        for place in blocks:
            for layer in tracking_layers(children[place][1]):
                if seen.setdefault(layer, number) != number:
                    name = names[id(layer.running_mean)]
                    raise PlanError(
                        f"{name} belongs to stages {seen[layer]} and {number}, but each stage would record only the "
                        "statistics of its own forward passes; nearest plan: pipeline=1, or separate layers in the two "
                        "blocks"
                    )


def _check_parameters(
    children: Sequence[tuple[str, nn.Module]], ranges: Sequence[range], schedule: Schedule
) -> None:
    """Raise PlanError if a rank has no parameters, because torch optimizers require parameters."""
    ranks = {
        row[number]
        for number, blocks in enumerate(ranges)
        if any(True for place in blocks for _ in children[place][1].parameters())
        for row in schedule.placement
    }
    for rank in range(schedule.ranks):
        if rank not in ranks:
            raise PlanError(
                f"pipeline={schedule.ranks}, schedule={schedule.name!r}: the blocks of pipeline rank {rank} have no parameters; "
                f"nearest plan: pipeline={max(1, len(ranks))}, or put these blocks into an nn.Sequential with an "
                "adjacent block"
            )


def _absent(block: nn.Module, needed: Collection[int]) -> Absent:
    """Return a replacement for `block` that keeps only the tensors whose `id` is in `needed`."""
    absent = Absent()
    for path, tensor in _tensors(block).items():
        if id(tensor) not in needed:
            continue
        *folders, leaf = path.split(".")
        module: nn.Module = absent
        for folder in folders:
            if folder not in module._modules:
                module.add_module(folder, nn.Module())
            module = module._modules[folder]  # type: ignore[assignment]
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(leaf, tensor)
        else:
            module.register_buffer(leaf, tensor)
    return absent
