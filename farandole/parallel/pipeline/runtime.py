"""Run a pipeline schedule: run this rank's stages on all micro-batches of a step.

    runtime = Pipeline(model, stages, name, comm, ...)
    runtime.run(micro_batches, present, arguments, loss, train=True)

Actions run in the order of the schedule; each action waits until its inputs have arrived.  For each stage and
micro-batch, the runtime keeps only the tensors that the remaining actions need:

- Forward keeps the received leaf tensors, and the outputs that require gradients.
- Backward, or BackwardInput, receives the gradients of these outputs, releases the outputs, and sends the gradients of
  the leaves.
- BackwardWeight releases the rest of the graph.

Between two stages on the same rank, tensors are passed without a message.

In evaluation mode, the model itself can be called on all ranks, for example to generate text (`Pipeline.forward`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from farandole.comm.communicator import Communicator
from farandole.comm.errors import CommunicationError, RankLeft
from farandole.mesh import Mesh
from farandole.parallel.axes import AxisCommunicator
from farandole.parallel.lora.description import Adapter
from farandole.parallel.pipeline.backward import SavedTensors, SplitBackward, alias
from farandole.parallel.pipeline.balance import tensors_of
from farandole.parallel.pipeline.batch_norm import BatchNormStatistics
from farandole.parallel.pipeline.schedule import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Schedule,
    build,
)
from farandole.parallel.pipeline.simulate import Span, simulate
from farandole.parallel.pipeline.stage import Stage
from farandole.parallel.pipeline.stage_error import StageError, StageFailure, raise_on_all
from farandole.parallel.pipeline.stage_peers import StagePeers
from farandole.parallel.pipeline.transfers import OutputShape, Transfers

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""The positional and the named arguments of the model for a micro-batch."""

Result = TypeVar("Result")

Completing = Callable[[Collection[int]], AbstractContextManager[None]]
"""A function that returns a context for the action that completes the gradients of the given parameters (by `id`)."""


@dataclass
class _Pass:
    """The state that a stage keeps for the backward pass of one micro-batch."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    saved: SavedTensors | None = None
    split: SplitBackward | None = None


class Pipeline:
    """Runs this rank's stages of a pipeline.

    Args:
        model: the model that was divided; until `close`, a call to the model runs all stages.
        stages: this rank's stages by index.
        name: the name of the schedule.
        comm: the communicator of the pipeline's ranks.
        places: the rank in `comm` of each pipeline rank.
        rank: the index of this rank in the pipeline.
        statistics: the BatchNorm statistics of this rank's stages.
        peers: the ranks that compute these stages together with this rank.
        replica: the communicator of all ranks that compute the same samples: the pipeline's ranks and their peers.
        number: the rank number that identifies this rank in error messages.
    """

    def __init__(
        self,
        model: nn.Sequential,
        stages: Mapping[int, Stage],
        name: str,
        comm: AxisCommunicator,
        places: Sequence[int],
        rank: int,
        statistics: BatchNormStatistics,
        peers: StagePeers,
        replica: Communicator,
        number: int,
    ) -> None:
        self._model, self._stages, self._name, self._rank = model, stages, name, rank
        self._comm, self._places = comm, places
        self._peers, self._replica, self._number = peers, replica, number
        model.forward = self.forward  # type: ignore[method-assign]
        self.statistics = statistics
        self.stages_of: dict[str, frozenset[int]] = {}
        """For each parameter of the model, by name, the stages that contain the parameter."""
        self.complete: nn.Module | None = None
        """The undivided model, if it is on the meta device; None once its parameters are initialized."""
        self.experts: dict[str, int] = {}
        """The number of experts of each router of the complete model."""
        self.adapter: Adapter | None = None
        """The LoRA adapter of the complete model."""
        self.spans: list[Span] = []
        """The actions of this rank in the last step, with times in seconds of `time.perf_counter`.

        Waiting for messages is idle time.
        """
        self.waited_s = 0.0
        """The total time in seconds that this rank has waited for messages."""
        schedule = build(name, len(places), 1)
        self.mirrored = schedule.mirrored
        """Whether the schedule has two replicas of the model."""
        self.has_loss = any(row[-1] == rank for row in schedule.placement)
        """Whether this rank has the last stage of a replica."""

    @functools.lru_cache(maxsize=16)  # noqa: B019 - an engine has one pipeline
    def schedule(self, micro_batches: int) -> Schedule:
        """Return the schedule for a number of micro-batches, after checking it with `simulate`."""
        return simulate(build(self._name, len(self._places), micro_batches)).schedule

    def run(
        self,
        micro_batches: int,
        present: int,
        arguments: Callable[[int], Arguments],
        loss: Callable[[Any, int], Tensor | None],
        *,
        train: bool,
        completing: Completing = lambda parameters: nullcontext(),
        every_pass: frozenset[int] = frozenset(),
    ) -> StageFailure | None:
        """Run all micro-batches of a step, and return this rank's failure, or None.

        Args:
            micro_batches: the number of micro-batches in the schedule, which is the same for all replicas.
            present: the number of micro-batches that this replica has; the actions of missing micro-batches are
                skipped.
            arguments: a function that returns the model's arguments for the micro-batch with a given index.
            loss: a function that returns the loss, given the output and the index of a micro-batch; called only on
                the rank with the last stage.
            train: whether to run backward passes.
            completing: a function that returns the context manager in which an action runs, given the `id`s of the
                parameters whose gradients the action completes.
            every_pass: the parameters, by `id`, whose gradients are complete after each micro-batch, instead of after
                the last micro-batch.
        """
        planned, schedule = self.schedule(micro_batches), self._present(micro_batches, present, train)
        transfers = Transfers(self._comm, self._places, schedule, self._rank, self._device)
        step = _Step(
            schedule, self._stages, self._rank, arguments, loss, transfers, self.statistics, self._peers
        )
        completed = self._completed(micro_batches, every_pass) if train else {}
        spans = []
        for action in planned.actions[self._rank] if train else schedule.actions[self._rank]:
            completes = completing(completed[action]) if action in completed else nullcontext()
            if action.micro_batch >= present:
                with completes:
                    continue
            transfers.poll()
            waited_s = transfers.waited_s
            begun = time.perf_counter()
            with completes:
                step.run(action)
            begun += transfers.waited_s - waited_s  # an action waits before it computes
            spans.append(Span(action, begun, time.perf_counter()))
        if train and (idle := self._idle(micro_batches)):
            with completing(idle):
                pass
        transfers.finish()
        self.waited_s += transfers.waited_s
        if train:
            self.spans = spans
        return step.failure

    def raise_on_all(self, comm: Communicator, failure: StageFailure | None) -> None:
        """Raise `StageError` on all ranks of `comm` if an action failed on any of them.

        This is a collective call.

        Args:
            comm: a communicator of this pipeline's ranks and their peers, and possibly of other replicas.
            failure: the failure of this rank, if an action failed.
        """
        try:
            raise_on_all(comm, self._number, failure)
        except StageError:
            self._peers.reconnect()
            raise

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's output on all ranks, in evaluation mode.

        This is a collective call of the pipeline's ranks and their peers.

        Raises:
            RuntimeError: in training mode, or if gradients are enabled.
            StageError: on all ranks, if a stage raises an exception.
        """
        if self._model.training or torch.is_grad_enabled():
            raise RuntimeError(
                "a pipeline-parallel model can be called only in evaluation mode and without gradients (model.eval(), "
                "torch.no_grad()); to train, call engine.forward_backward, which runs all stages"
            )
        outputs: list[Any] = []
        failure = self.run(
            1, 1, lambda _: (inputs, named), lambda output, _: outputs.append(output), train=False
        )
        self.raise_on_all(self._replica, failure)
        schedule = self.schedule(1)
        last = self._places[schedule.rank_of(schedule.stages - 1, 0)]
        output = tree_map_only(Tensor, lambda tensor: tensor.cpu(), outputs[0]) if outputs else None
        output = self._comm.broadcast_object(output, last)
        return tree_map_only(Tensor, lambda tensor: tensor.to(self._device), output)

    @property
    def views(self) -> list[nn.Module]:
        """The modules that run the forward passes of this rank's stages, one per stage."""
        return [stage.view for stage in self._stages.values()]

    def roles(self, mesh: Mesh) -> list[str]:
        """Return the stages of each rank of the mesh as text, such as `stage 3` or `stages 0 and 7`."""
        schedule = self.schedule(1)
        found = []
        for rank in range(mesh.size):
            place = mesh.pipeline_rank(rank)
            replicas = range(len(schedule.placement))
            stages = sorted({stage for replica in replicas for stage in schedule.stages_of(place, replica)})
            found.append(("stage " if len(stages) == 1 else "stages ") + " and ".join(map(str, stages)))
        return found

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device  # each rank has parameters

    @functools.lru_cache(maxsize=16)  # noqa: B019 - an engine has one pipeline
    def _present(self, micro_batches: int, present: int, train: bool) -> Schedule:
        """Return the schedule of the first `present` micro-batches; if not `train`, only the forward passes."""
        schedule, kind = self.schedule(micro_batches), Action if train else Forward
        actions = (
            tuple(each for each in row if each.micro_batch < present and isinstance(each, kind))
            for row in schedule.actions
        )
        return replace(schedule, actions=tuple(actions))

    @functools.lru_cache(maxsize=16)  # noqa: B019
    def _completed(self, micro_batches: int, every_pass: frozenset[int]) -> dict[Action, set[int]]:
        """Return a dict that maps actions to the `id`s of the parameters whose gradients they complete."""
        stages = {
            number: {id(p) for block in stage.blocks for p in block.parameters()}
            for number, stage in self._stages.items()
        }
        later: set[int] = set()
        found: dict[Action, set[int]] = {}
        for action in reversed(self.schedule(micro_batches).actions[self._rank]):
            if isinstance(action, Backward | BackwardWeight):
                own = stages[action.stage]
                if complete := {each for each in own if each not in later or each in every_pass}:
                    found[action] = complete
                later |= own
        return found

    @functools.lru_cache(maxsize=16)  # noqa: B019
    def _idle(self, micro_batches: int) -> set[int]:
        """Return the `id`s of the parameters for which no action of this rank computes gradients."""
        # in a mirrored schedule, a replica without micro-batches runs no action, but its gradients are reduced with
        # the gradients of the other replica
        parameters = {id(p) for stage in self._stages.values() for b in stage.blocks for p in b.parameters()}
        return parameters.difference(*self._completed(micro_batches, frozenset()).values())

    def close(self) -> None:
        """Remove the hooks from the model, and restore the model's own `forward`."""
        self.statistics.close()
        del self._model.forward


class _Step:
    """One step of one rank.  After a failure, the remaining actions only exchange their messages."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        rank: int,
        arguments: Callable[[int], Arguments],
        loss: Callable[[Any, int], Tensor | None],
        transfers: Transfers,
        statistics: BatchNormStatistics,
        peers: StagePeers,
    ) -> None:
        self._statistics, self._peers = statistics, peers
        self._schedule, self._stages, self._rank = schedule, stages, rank
        self._arguments, self._loss, self._transfers = arguments, loss, transfers
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._local: dict[tuple[str, int, int], Any] = {}  # results for other stages of this rank
        self.failure: StageFailure | None = None
        """The exception of this rank that ended the step."""

    def run(self, action: Action) -> None:
        """Run an action."""
        if isinstance(action, Forward):
            self._forward(action)
        elif isinstance(action, Backward):
            self._backward(action)
        elif isinstance(action, BackwardInput):
            self._backward_input(action)
        else:
            found = self._passes.pop((action.stage, action.micro_batch))
            if found.split is not None:
                self._compute(action, found.split.weight_gradients, None)

    @property
    def _failed(self) -> bool:
        """Whether this rank has failed, or has received a message from a failed rank."""
        return self.failure is not None or self._transfers.failed

    # ---- computation ----

    def _compute(self, action: Action, compute: Callable[[], Result], otherwise: Result) -> Result:
        """Return the result of `compute`; if it fails, record the failure and return `otherwise`."""
        if self._failed:
            return otherwise
        try:
            return compute()
        except CommunicationError as error:
            if not (self._peers and isinstance(error, RankLeft)):
                raise  # other ranks detect it too
            self.failure = StageFailure(action, error)  # probably because the other rank has failed
        except Exception as error:
            self.failure = StageFailure(action, error)
        self._peers.leave(str(self.failure))
        return otherwise

    def _forward(self, action: Action) -> None:
        stage, m = action.stage, action.micro_batch
        hidden = self._receive("F", stage, m, stage - 1) if stage else None
        found = _Pass([tensor for tensor in tensors_of(hidden) if tensor.requires_grad])
        output = self._compute(action, lambda: self._output(found, stage, m, hidden), ())
        if torch.is_grad_enabled():
            self._passes[stage, m] = found
        if stage < self._schedule.stages - 1:
            self._send_output(stage, m, output)

    def _output(self, found: _Pass, stage: int, m: int, hidden: Any) -> Any:
        """Run a stage, save the tensors for the backward pass in `found`, and return the output or the loss."""
        split = self._schedule.splits_backward and torch.is_grad_enabled()
        saved = SavedTensors() if split else None
        with nullcontext() if saved is None else saved.hooks():
            with self._statistics.of(m):
                inputs = tree_map_only(Tensor, functools.cache(alias), hidden)
                output = self._stages[stage].run(inputs, *self._arguments(m))
            if stage == self._schedule.stages - 1:
                output = self._loss(output, m)
            else:
                _check_output(output, stage)
        found.saved = saved
        found.outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        return output

    def _backward(self, action: Action) -> None:
        stage, m = action.stage, action.micro_batch
        found = self._passes.pop((stage, m))
        outputs, gradients = self._output_gradients(stage, m, found.outputs)
        if outputs:
            self._compute(action, lambda: torch.autograd.backward(outputs, gradients), None)
        self._send_gradients(stage, m, found.inputs, [each.grad for each in found.inputs])

    def _backward_input(self, action: Action) -> None:
        stage, m = action.stage, action.micro_batch
        found = self._passes[stage, m]
        outputs, gradients = self._output_gradients(stage, m, found.outputs)
        inputs, found.outputs, found.inputs = found.inputs, [], []
        own: list[Tensor | None] = [None] * len(inputs)
        if outputs:
            split = found.split = SplitBackward(outputs, inputs, found.saved)
            own = self._compute(action, lambda: split.input_gradients(gradients), own)
        self._send_gradients(stage, m, inputs, own)

    def _output_gradients(
        self, stage: int, m: int, outputs: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs that have gradients, and their gradients."""
        if stage == self._schedule.stages - 1:
            return list(outputs), [torch.ones_like(output) for output in outputs]
        received = self._receive("I", stage, m, stage + 1)
        # parameters that affect only an output that the next stage has not used get no gradient, as in one process
        pairs = [pair for pair in zip(outputs, received, strict=False) if pair[1] is not None]
        return [output for output, _ in pairs], [gradient for _, gradient in pairs]

    # ---- messages ----

    def _is_local(self, stage: int, m: int) -> bool:
        return self._schedule.rank_of(stage, m) == self._rank

    def _receive(self, code: str, stage: int, m: int, source: int) -> Any:
        if self._is_local(source, m):
            return self._local.pop((code, stage, m))
        received = self._transfers.receive(code, stage, m)
        if self._transfers.failed:
            self._peers.leave("another stage of the pipeline failed")
        return received

    def _send_output(self, stage: int, m: int, output: Any) -> None:
        if self._is_local(stage + 1, m):
            self._local["F", stage + 1, m] = _leaves(output)
        else:
            self._transfers.send_output(stage, m, output)

    def _send_gradients(
        self, stage: int, m: int, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> None:
        if not stage:
            return
        if self._is_local(stage - 1, m):
            self._local["I", stage - 1, m] = gradients
        else:
            self._transfers.send_gradients(stage, m, inputs, gradients, valid=not self._failed)


def _check_output(output: Any, stage: int) -> None:
    """Raise TypeError if the output cannot be sent."""
    parts = (
        list(output) if type(output) is tuple else [output]
    )  # the receiver does not know the fields of a named tuple
    if not parts or not all(part is None or isinstance(part, Tensor) for part in parts):
        kinds = ", ".join(type(part).__name__ for part in parts) or "an empty tuple"
        raise TypeError(
            f"stage {stage} returned {kinds}; expected a tensor, or a tuple of tensors and None, between blocks"
        )
    OutputShape.of(output).numbers()


def _leaves(output: Any) -> Any:
    """Return `output` with its tensors replaced by new leaves, so that the next stage has a separate graph."""

    @functools.cache  # a tensor that occurs twice remains one tensor
    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    return tree_map_only(Tensor, leaf, output)
