"""Pipeline schedules as plain data: for each rank, an ordered list of actions.

    schedule = build("1f1b", ranks=4, micro_batches=8)
    schedule.actions[0]                # the actions of rank 0: Forward(stage=0, micro_batch=0), ...

A *stage* is a part of the model.  `schedule.placement` assigns the stages to ranks.  If a rank has several stages,
these stages are called chunks.  A *mirrored* schedule has two replicas of the model, whose stages are assigned to
ranks in opposite order.  Each micro-batch passes through one of the replicas.

`register` adds a schedule, given a function that builds it:

    @register("mine", "one line for the list")
    def mine(ranks: int, micro_batches: int) -> Schedule: ...

This module imports only the standard library.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar


class ScheduleError(ValueError):
    """Raised if a schedule is unknown or incomplete, or deadlocks.

    The message contains the nearest alternative if there is one.
    """


# ---- actions ----


@dataclass(frozen=True, slots=True)
class Action:
    """A computation of one stage on one micro-batch."""

    stage: int
    micro_batch: int
    code: ClassVar[str] = ""

    def __str__(self) -> str:
        return f"{self.code}{self.micro_batch} of stage {self.stage}"


class Forward(Action):
    """A forward pass."""

    __slots__ = ()
    code = "F"


class BackwardInput(Action):
    """The first half of a backward pass: the gradient of the stage's input."""

    __slots__ = ()
    code = "I"


class BackwardWeight(Action):
    """The second half of a backward pass: the gradients of the stage's weights."""

    __slots__ = ()
    code = "W"


class Backward(Action):
    """A complete backward pass."""

    __slots__ = ()
    code = "B"


# ---- schedules ----

Placement = tuple[tuple[int, ...], ...]
"""The rank of each stage in each replica of the model: `placement[replica][stage]`."""


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank, in the order in which the rank runs them.

    Args:
        name: the name of the schedule.
        actions: the actions of each rank.
        placement: `placement[replica][stage]` is the rank of a stage.
        replicas: the replica through which each micro-batch passes.
        reductions: in a mirrored schedule, the number of times per step that ranks with the same stage sum their
            gradients.
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]
    placement: Placement
    replicas: tuple[int, ...]
    reductions: int = 1

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """The number of stages of the model."""
        return len(self.placement[0])

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in a step."""
        return len(self.replicas)

    @property
    def chunks(self) -> int:
        """The number of stages per rank in each replica."""
        return self.stages // self.ranks

    @property
    def mirrored(self) -> bool:
        """Whether the schedule has two replicas of the model."""
        return len(self.placement) > 1

    @property
    def splits_backward(self) -> bool:
        """Whether input gradients and weight gradients are computed by separate actions."""
        return any(isinstance(action, BackwardWeight) for actions in self.actions for action in actions)

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """Return the rank that computes a stage for a micro-batch."""
        return self.placement[self.replicas[micro_batch]][stage]

    def stages_of(self, rank: int, replica: int = 0) -> list[int]:
        """Return the stages of a replica that are on a rank."""
        return [stage for stage, holder in enumerate(self.placement[replica]) if holder == rank]

    def is_second(self, action: Action) -> bool:
        """Return whether an action runs in the second replica, or in a later chunk than its rank's first."""
        replica = self.replicas[action.micro_batch]
        rank = self.placement[replica][action.stage]
        return bool(replica) or self.stages_of(rank, replica)[0] != action.stage

    def label(self, action: Action) -> str:
        """Return a short name for an action, such as F0, or f0 if `is_second` is true for the action."""
        code = action.code.lower() if self.is_second(action) else action.code
        return f"{code}{action.micro_batch}"


def linear(ranks: int, chunks: int = 1) -> Placement:
    """Return a placement with stage s on rank s modulo `ranks`."""
    return (tuple(stage % ranks for stage in range(ranks * chunks)),)


def v_shape(ranks: int) -> Placement:
    """Return a placement with two chunks per rank: stages are on ranks 0, ..., `ranks` - 1, `ranks` - 1, ..., 0."""
    return ((*range(ranks), *reversed(range(ranks))),)


def mirror(ranks: int) -> Placement:
    """Return a placement of two replicas whose stages are on the ranks in opposite order."""
    return (tuple(range(ranks)), tuple(reversed(range(ranks))))


def of_first(schedule: Schedule, micro_batches: int) -> Schedule:
    """Return `schedule` restricted to its first `micro_batches` micro-batches.

    The actions of a micro-batch do not depend on other micro-batches, so the result cannot deadlock.
    """
    kept = tuple(
        tuple(action for action in actions if action.micro_batch < micro_batches)
        for actions in schedule.actions
    )
    return Schedule(
        schedule.name, kept, schedule.placement, schedule.replicas[:micro_batches], schedule.reductions
    )


# ---- the registry ----

Builder = Callable[..., Schedule]
B = TypeVar("B", bound=Builder)


@dataclass(frozen=True)
class Named:
    """A registered schedule: its name, a one-line description, and the function that builds the schedule."""

    name: str
    summary: str
    builder: Builder

    @property
    def options(self) -> dict[str, Any]:
        """The options of `builder`, with their defaults."""
        parameters = list(inspect.signature(self.builder).parameters.values())[2:]
        return {parameter.name: parameter.default for parameter in parameters}


_REGISTRY: dict[str, Named] = {}


def register(name: str, summary: str) -> Callable[[B], B]:
    """Return a decorator that registers a schedule.

    The decorated function takes `(ranks, micro_batches)` and keyword options.

    Args:
        summary: a one-line description.
    """

    def add(builder: B) -> B:
        _REGISTRY[name] = Named(name, summary, builder)
        return builder

    return add


def registered() -> Sequence[Named]:
    """Return all registered schedules, in the order of registration."""
    return list(_named().values())


def named(name: str) -> Named:
    """Return a registered schedule.

    Raises:
        ScheduleError: for an unknown name; the message contains a similar name if there is one.
    """
    known = _named()
    if name not in known:
        near = difflib.get_close_matches(name.lower().replace("_", "-"), known, 1, 0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ScheduleError(f"unknown schedule {name!r}; {hint}known schedules: {', '.join(known)}")
    return known[name]


def build(name: str, ranks: int, micro_batches: int, **options: Any) -> Schedule:
    """Build the schedule called `name`.

    Args:
        ranks: the number of pipeline ranks, D.
        micro_batches: the number of micro-batches per step, N.
        options: the options of the schedule, such as `parts` or `chunks`.

    Raises:
        ScheduleError: for an unknown name or option, or an invalid value.
    """
    found = named(name)
    if ranks < 1 or micro_batches < 1:
        raise ScheduleError(
            f"{name}: expected at least 1 rank and 1 micro-batch, got {ranks} and {micro_batches}"
        )
    unknown = [option for option in options if option not in found.options]
    if unknown:
        known = ", ".join(found.options) or "none"
        raise ScheduleError(f"{name} has no option {unknown[0]!r}; options of {name}: {known}")
    for option, value in options.items():
        if isinstance(found.options[option], int) and value < 1:
            raise ScheduleError(f"{name}: expected {option} of at least 1, got {value}")
    return found.builder(ranks, micro_batches, **options)


def _named() -> dict[str, Named]:
    for module in ("unidirectional", "v_shaped", "mirrored"):  # they register the published schedules
        importlib.import_module(f"farandole.parallel.pipeline.{module}")
    return _REGISTRY


def freeze(actions: Iterable[Iterable[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of all ranks as tuples."""
    return tuple(map(tuple, actions))
