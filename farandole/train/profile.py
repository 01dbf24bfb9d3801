"""Record the first steps of a job as one trace of all ranks, for https://ui.perfetto.dev.

Each rank appears as a process in the trace.  The process's threads show the phases of the steps and, in a pipeline, the
measured and the simulated actions.  The simulation of a step uses the median durations of the actions measured in this
step.

Times are measured on the host: an accelerator may still be running the kernels of a phase that has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from farandole.mesh import Mesh
from farandole.parallel.engine import Engine
from farandole.parallel.pipeline.measured import clock_shift, shifted, step_timeline
from farandole.parallel.pipeline.runtime import Pipeline
from farandole.parallel.pipeline.simulate import Span, simulate
from farandole.parallel.pipeline.trace import Event, action_events, duration, rank_name, thread_name

STEPS = 4
"""The number of recorded steps.  The first step of a job is not recorded, because it also allocates memory."""

THREADS = ("phases", "actions (measured)", "actions (simulated)")
"""The names of a rank's threads in the trace; ranks without a pipeline have only the first."""

PHASES, MEASURED, SIMULATED = range(len(THREADS))


@dataclass(frozen=True)
class Phase:
    """A named time interval in a step.  `start` and `end` are in seconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Recording:
    """The phases and pipeline actions of one rank.  Times are in seconds on rank 0's clock."""

    phases: Sequence[Phase]
    steps: Sequence[Sequence[Span]]


class Profile:
    """Records this rank's phases and pipeline actions in the first steps.

    The recording starts at the second step of the job, and contains `STEPS` steps.

    Args:
        enabled: whether to record.  `trace` sets this attribute to False.
    """

    def __init__(self, engine: Engine, *, enabled: bool) -> None:
        self.enabled = enabled
        self._engine = engine
        self._begun = 0
        self._phases: list[Phase] = []
        self._steps: list[Sequence[Span]] = []

    @property
    def is_complete(self) -> bool:
        """Return whether the last step to be recorded has begun."""
        return self.enabled and self._begun > STEPS

    @property
    def _records(self) -> bool:
        return self.enabled and self._begun > 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Return a context manager that records the duration of its body as phase `name`."""
        start = time.perf_counter()
        yield
        if self._records:
            self._phases.append(Phase(name, start, time.perf_counter()))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Return a context manager that records its body as training step `number`."""
        self._begun += 1
        with self.phase(f"step {number}"):
            yield
        if self._records:
            self._phases += [Phase("wait for gradients", *wait) for wait in self._engine.waits]
            if self._engine.pipeline is not None:
                self._steps.append(self._engine.pipeline.spans)

    def trace(self) -> list[Event]:
        """Stop recording, and gather the recordings of all ranks.  Collective call.

        Returns:
            The events of all ranks on rank 0, and an empty list on the other ranks.  If fewer than two steps have
            begun, the list is empty on all ranks.
        """
        self.enabled = False
        comm = self._engine.comm
        shift = clock_shift(comm)
        phases = [Phase(each.name, each.start + shift, each.end + shift) for each in self._phases]
        own = Recording(phases, [shifted(spans, shift) for spans in self._steps])
        recordings: list[Recording] = comm.all_gather_object(own)
        if comm.rank or not phases:
            return []
        return trace_of(recordings, self._engine.mesh, self._engine.pipeline)


def trace_of(recordings: Sequence[Recording], mesh: Mesh, pipeline: Pipeline | None) -> list[Event]:
    """Return the trace events for the recordings of all ranks, with times that start at 0."""
    begun = min(phase.start for each in recordings for phase in each.phases)
    events: list[Event] = []
    for rank, each in enumerate(recordings):
        events += rank_name(rank, len(recordings))
        for thread, name in enumerate(THREADS if pipeline is not None else THREADS[:1]):
            events += thread_name(rank, thread, name)
        # if phases start at the same time, the first event must enclose the others
        for phase in sorted(each.phases, key=lambda phase: (phase.start, -phase.end)):
            events.append(duration(phase.name, rank, PHASES, phase.start - begun, phase.end - begun))
    if pipeline is not None:
        for ranks in pipelines(mesh):
            for step in zip(*(recordings[rank].steps for rank in ranks), strict=True):
                events += _step_events(step, ranks, pipeline, begun)
    return events


def pipelines(mesh: Mesh) -> list[tuple[int, ...]]:
    """Return the ranks of each pipeline, in the order of its stages."""
    first = [cell for cell in mesh.cells if cell.pipeline == cell.mirror == 0]
    return [tuple(cell.rank for cell in mesh.peers(each, "pipeline")) for each in first]


def _step_events(
    rows: Sequence[Sequence[Span]], ranks: Sequence[int], pipeline: Pipeline, begun: float
) -> Iterator[Event]:
    """Yield the measured and the simulated actions of one step of the pipeline on `ranks`."""
    measured = step_timeline(pipeline, rows)
    simulated = simulate(measured.schedule, measured.costs)
    offset_s = min(span.start for row in rows for span in row) - begun
    for thread, timeline in ((MEASURED, measured), (SIMULATED, simulated)):
        for rank, spans in zip(ranks, timeline.spans, strict=True):
            yield from action_events(timeline.schedule, spans, rank, thread, offset_s=offset_s)
