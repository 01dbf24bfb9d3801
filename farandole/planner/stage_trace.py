"""Trace the memory and the work of each action of a pipeline stage on fake tensors.

    tracer = StageTracer()
    # `shape` describes the stage's input, and then its output
    found, shape = tracer.trace(workload, plan, stage, shape, splits=True)
    found.forward.kept, found.input.peak, found.weight.flops

The trace runs the same code as `pipeline.runtime`: a forward pass, and a backward pass, whole or in two halves.  The
input of a stage and the gradient of its output count as memory from the start of the action that uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from farandole.memory.dry_run import call_arguments, device_of, fake_model
from farandole.memory.recompute import apply_recompute, recompute_modules
from farandole.memory.swap import THRESHOLD_BYTES
from farandole.memory.tracker import MAPPED_FROM_BYTES, MemoryTracker
from farandole.parallel.pipeline.apply import MEASURED
from farandole.parallel.pipeline.backward import SavedTensors, SplitBackward
from farandole.parallel.pipeline.balance import tensors_of
from farandole.parallel.pipeline.stage import Stage
from farandole.parallel.pipeline.transfers import OutputShape, TensorShape
from farandole.plan import MODEL_AXES, Plan, PlanError
from farandole.planner.repeats import Run, extrapolated, find_runs, signature
from farandole.planner.trace import clear_gradient, note, note_gradient
from farandole.planner.workload import Workload, weight_type

FORWARD, BACKWARD, INPUT, WEIGHT = "forward", "backward", "input", "weight"


@dataclass(frozen=True)
class Memory:
    """An amount of memory, split into heap blocks and memory-mapped blocks.

    Args:
        heap: the size in bytes of blocks that the C library keeps when they are freed.
        mapped: the size in bytes of blocks that the C library returns to the kernel when they are freed.
    """

    heap: float = 0
    mapped: float = 0

    @classmethod
    def of(cls, shapes: Sequence[TensorShape]) -> Memory:
        """Return the memory of tensors with these shapes."""
        sizes = [shape.nbytes for shape in shapes]
        heap = sum(size for size in sizes if size < MAPPED_FROM_BYTES)
        return cls(heap, sum(sizes) - heap)

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.heap + other.heap, self.mapped + other.mapped)

    def __sub__(self, other: Memory) -> Memory:
        return Memory(self.heap - other.heap, self.mapped - other.mapped)

    def largest(self, other: Memory) -> Memory:
        """Return the elementwise maximum of two amounts."""
        return Memory(max(self.heap, other.heap), max(self.mapped, other.mapped))

    @property
    def total(self) -> float:
        """Return the total number of bytes."""
        return self.heap + self.mapped


@dataclass(frozen=True)
class ActionTrace:
    """The memory and the work of one action of a stage on one micro-batch.

    Args:
        kept: the memory that the action allocates and keeps; negative if the action releases memory.
        peak: the peak memory during the action, minus the memory at the start of the action.
        resident: the peaks of the heap and of mapped memory, which may occur at different times.
        flops: floating-point operations of matrix products and attention.
        moved: bytes that all other operations read and write.
        sent: a dict that maps each group of ranks to the bytes that this rank sends in the model's collectives.
        swappable: bytes of `kept` that `Plan.swap` can swap out; 0 except for a forward pass.
    """

    kept: Memory = field(default_factory=Memory)
    peak: float = 0
    resident: Memory = field(default_factory=Memory)
    flops: float = 0
    moved: float = 0
    sent: Mapping[tuple[int, ...], float] = field(default_factory=dict)
    swappable: float = 0


@dataclass(frozen=True)
class StageTrace:
    """The traces of a stage's actions.

    `input` and `weight` are the two halves of `backward`; both are empty if the halves are not traced.
    """

    forward: ActionTrace
    backward: ActionTrace
    input: ActionTrace
    weight: ActionTrace


class StageTracer:
    """Traces the stages of models with the same loss.

    A stage with the same blocks as an earlier stage is not traced again.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[dict[Any, float], OutputShape]] = {}

    def trace(
        self,
        workload: Workload,
        plan: Plan,
        stage: Stage,
        received: OutputShape | None,
        *,
        splits: bool,
        recomputed: Mapping[str, str] | None = None,
    ) -> tuple[StageTrace, OutputShape]:
        """Return the trace of a stage, and the shape of its output.

        Args:
            workload: a workload whose model contains all blocks, sharded along the plan's other axes.
            received: the shape of the previous stage's output; None for the first stage.
            splits: whether to trace the halves of the backward pass, too.
            recomputed: a dict that maps module names to recomputation modes, if a dry run has chosen the modules.
        """
        runs = [] if plan.recompute == "auto" else find_runs(stage.view)
        after: list[OutputShape] = []
        own = set(stage.blocks)
        names = {name: block for name, block in stage.view._modules.items() if block in own}
        places = {name: place for place, name in enumerate(names)}
        modes = {name: mode for name, mode in (recomputed or {}).items() if name.partition(".")[0] in names}
        chosen = sorted(
            (places[name.partition(".")[0]], name.partition(".")[2], m) for name, m in modes.items()
        )
        around = (*_conditions(workload, plan), stage.is_first, stage.is_last, received, splits, chosen)

        def measure() -> dict[Any, float]:
            present = [signature(block) for block in names.values()]
            key = repr((present, around))
            if key not in self._known:
                self._known[key] = _measure(workload, plan, stage, received, splits, runs)
            numbers, output = self._known[key]
            after.append(output)
            return numbers

        with _recomputing(stage, plan, modes):
            found = extrapolated(runs, measure)
        actions = {name: _action(found, name, len(runs)) for name in (FORWARD, BACKWARD, INPUT, WEIGHT)}
        return StageTrace(**actions), after[0]


def _conditions(workload: Workload, plan: Plan) -> tuple[object, ...]:
    """Return the values that determine a stage's trace, besides its blocks and its input."""
    axes = (*(getattr(plan, axis) for axis in MODEL_AXES), plan.sequence, plan.ring)
    example = [tuple(each.shape) for each in tree_leaves(workload.example) if isinstance(each, Tensor)]
    return axes, plan.recompute, plan.precision, example, _is_scaled(workload, plan)


def _is_scaled(workload: Workload, plan: Plan) -> bool:
    """Return whether the loss is multiplied by a factor before the backward pass."""
    return workload.micro_batches > 1 or plan.precision == "fp16"


def _measure(
    workload: Workload,
    plan: Plan,
    stage: Stage,
    received: OutputShape | None,
    splits: bool,
    runs: Sequence[Run],
) -> tuple[dict[Any, float], OutputShape]:
    model, numbers = stage.view, dict[Any, float]()
    with ExitStack() as stack:
        where = device_of(model)
        dtype = weight_type(plan)
        fake = stack.enter_context(fake_model(model, workload.example, where, dtype))
        stack.enter_context(torch.enable_grad())
        for parameter in model.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(clear_gradient).remove)
        living = (*model.parameters(), *model.buffers(), *tree_leaves(fake))
        arguments = call_arguments(fake)
        for halves in (False, True) if splits else (False,):
            passed = _Pass(workload, plan, stage, received, runs, living, where)
            output = passed.run(arguments, numbers, halves)
    return numbers, output


class _Pass:
    """A forward and a backward pass of one micro-batch through a stage."""

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        stage: Stage,
        received: OutputShape | None,
        runs: Sequence[Run],
        living: Sequence[Any],
        device: torch.device,
    ) -> None:
        self._workload, self._stage, self._scaled = workload, stage, _is_scaled(workload, plan)
        self._received, self._runs, self._living = received, runs, living
        self._device = device

    def run(
        self, arguments: tuple[Any, dict[str, Any]], numbers: dict[Any, float], halves: bool
    ) -> OutputShape:
        """Run the pass, record its actions in `numbers`, and return the shape of the stage's output."""
        stage, sent, scaled = self._stage, self._workload.sent, self._scaled
        with ExitStack() as stack:
            tracker = stack.enter_context(MemoryTracker(self._living))
            ends: dict[int, int] = {}
            for number, run in enumerate(self._runs):
                hook = partial(note_gradient, partial(note, ends, number, tracker))
                stack.callback(run.first.register_forward_pre_hook(hook, with_kwargs=True).remove)
            recorder = _Recorder(tracker, ends, len(self._runs), numbers, [] if sent is None else sent)
            with recorder.action(FORWARD):
                hidden = None if self._received is None else self._input(self._received)
                saved = SavedTensors()
                with saved.hooks() if halves else nullcontext():
                    output = stage.run(hidden, *arguments)
                    # the runtime keeps the input and the output of a stage in memory
                    swappable = tracker.live(
                        THRESHOLD_BYTES, without=[*tensors_of(hidden), *tensors_of(output)]
                    )
                    numbers[FORWARD, "swappable"] = sum(swappable.values())
                    if stage.is_last:
                        output = _loss(self._workload.loss, output)
                result = OutputShape.of(output)
                outputs = [each for each in tensors_of(output) if each.requires_grad]
                inputs = [each for each in tensors_of(hidden) if each.requires_grad]
                del output, hidden

            def gradients() -> list[Tensor]:
                if stage.is_last:  # a constant, because a loss function may read its gradient (`models.loss`)
                    return [
                        torch.tensor(0.5 if scaled else 1.0, dtype=o.dtype, device=self._device)
                        for o in outputs
                    ]
                return [shape.empty(self._device) for shape in result.gradients]

            if not halves:
                with recorder.action(BACKWARD):
                    given = gradients()
                    if outputs:
                        torch.autograd.backward(outputs, given)
                    del outputs, inputs, given
            else:
                with recorder.action(INPUT):
                    split = None
                    given = gradients()
                    if outputs:
                        split = SplitBackward(outputs, inputs, saved)
                        outputs = []
                        split.input_gradients(given)
                    del outputs, inputs, given
                with recorder.action(WEIGHT):
                    if split is not None:
                        split.weight_gradients()
                    del split
        return result

    def _input(self, shape: OutputShape) -> Any:
        return shape.filled(
            [each.empty(self._device).requires_grad_(each.requires_grad) for each in shape.tensors]
        )


class _Recorder:
    """Records the memory and the work of actions, as values that can be extrapolated (`planner.repeats`)."""

    def __init__(
        self,
        tracker: MemoryTracker,
        ends: Mapping[int, int],
        runs: int,
        numbers: dict[Any, float],
        sent: list[tuple[tuple[int, ...], float]],
    ) -> None:
        self._tracker, self._ends, self._runs, self._numbers, self._sent = tracker, ends, runs, numbers, sent

    @contextmanager
    def action(self, name: str) -> Iterator[None]:
        tracker, numbers = self._tracker, self._numbers
        flops, moved, sent, start = tracker.flops, tracker.moved, len(self._sent), len(tracker.history)
        heap, mapped = tracker.history[-1] if tracker.history else (0, 0)
        yield
        numbers[name, "flops"], numbers[name, "moved"] = tracker.flops - flops, tracker.moved - moved
        for ranks, nbytes in self._sent[sent:]:
            numbers[name, ranks] = numbers.get((name, ranks), 0.0) + nbytes
        history = tracker.history
        now = history[-1] if history else (0, 0)
        numbers[name, "heap"], numbers[name, "mapped"] = now[0] - heap, now[1] - mapped
        begun = start
        for part in range(self._runs + 1):
            end = self._ends.get(self._runs - 1 - part, begun) if part < self._runs else len(history)
            changes = history[begun : max(begun, end)]
            numbers[name, "peak", part] = max(map(sum, changes), default=0) - heap - mapped
            numbers[name, "peak heap", part] = max((size for size, _ in changes), default=0) - heap
            numbers[name, "peak mapped", part] = max((size for _, size in changes), default=0) - mapped
            begun = max(begun, end)


def _action(found: Mapping[Any, float], name: str, runs: int) -> ActionTrace:
    if (name, "flops") not in found:
        return ActionTrace()
    peak, heap, mapped = (
        max(0.0, *(found[name, kind, part] for part in range(runs + 1)))
        for kind in ("peak", "peak heap", "peak mapped")
    )
    sent = {key[1]: nbytes for key, nbytes in found.items() if key[0] == name and isinstance(key[1], tuple)}
    kept = Memory(found[name, "heap"], found[name, "mapped"])
    return ActionTrace(
        kept,
        peak,
        Memory(heap, mapped),
        found[name, "flops"],
        found[name, "moved"],
        sent,
        found.get((name, "swappable"), 0.0),
    )


def _loss(loss: Callable[[Any], Tensor] | None, output: Any) -> Tensor:
    if loss is not None:
        return loss(output)
    return torch.stack([each.sum() for each in tensors_of(output) if each.is_floating_point()]).sum()


@contextmanager
def _recomputing(stage: Stage, plan: Plan, modes: Mapping[str, str]) -> Iterator[None]:
    """Return a context manager that enables recomputation as specified by `modes`, or by `plan` if `modes` is empty."""
    blocks = nn.Sequential(*stage.blocks)
    try:
        if modes:
            recompute_modules(stage.view, modes)
        elif plan.recompute not in MEASURED:
            apply_recompute(blocks, plan.recompute, dtype=weight_type(plan))
        yield
    except ValueError as error:
        raise PlanError(str(error)) from error
    finally:
        apply_recompute(blocks, "none")
