"""Execute a complete run on one rank: prepare, train, evaluate, save and report.

Rank 0 prints and writes.  All ranks make the same decisions at the same steps.

Under farandole's launcher, each rank runs `python -m farandole.train.run JOB_SPEC` after the launching process has
checked JOB_SPEC.  Under another launcher, each rank parses the command itself and calls `join`.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import farandole
from farandole._startup import keep_freed_memory, pause_collection, resume_collection
from farandole.comm.communicator import Communicator
from farandole.comm.errors import CommunicationError
from farandole.launch.runtime import Runtime
from farandole.train import checkpoint
from farandole.train.checkpoint import CheckpointWriter
from farandole.train.config import ConfigError, TrainConfig
from farandole.train.folders import save_base, save_model
from farandole.train.hardware import PrecisionChoice, choose_precision, measured_flops
from farandole.train.memory import check_memory
from farandole.train.observer import Observer
from farandole.train.run_folder import RunLock, read_metadata
from farandole.train.start import REFUSALS, Request, TrainingJobSpec, check, job_spec, task_config
from farandole.train.tasks import make_task
from farandole.train.trainer import Trainer


def train(
    config: TrainConfig, run: Path, resume: Path | None, runtime: Runtime, is_newest: bool = False
) -> signal.Signals | None:
    """Train the configured model, and write the results to folder `run`.  Collective call.

    If `resume` is not None, training continues from this checkpoint.  If `is_newest`, this checkpoint must be the newest
    checkpoint of the run.

    Returns:
        The signal that ended the run before its last step, or None.

    Raises:
        FloatingPointError: if the training diverges.
        CheckpointError: if a checkpoint cannot be loaded or saved, or `resume` is not the newest checkpoint.
    """
    keep_freed_memory()
    # warnings were shown when the task was checked; on other hosts, the text may be tokenized now
    with _errors_only(), without_timeout(runtime.comm):
        task = make_task(task_config(config, resume))
    with StopSignals() as stop, RunLock(run, runtime.comm, resume if is_newest else None):
        choice = _precision(config, resume, runtime)
        trainer = Trainer(config, task, choice.name, runtime.comm, runtime.device, resume is not None)
        earlier_s, resumed_step = 0.0, None
        if resume is not None:
            before = checkpoint.load(trainer, resume, runtime.comm)
            earlier_s, resumed_step = before.elapsed_s, before.step
        # Create the writer after loading, so that a damaged checkpoint does not cause later ones to be moved.
        files = {**task.files(), **save_base(trainer.model, run, runtime.comm)}
        writer = CheckpointWriter(run, files, config.checkpoint.keep, runtime.comm, resumed_step)
        limit = 0.0
        if trainer.flops is not None:
            limit = measured_flops(choice.name, runtime.device, runtime.comm)
        with Observer(config, run, trainer, choice, runtime, earlier_s, limit) as observer:
            runtime.comm.barrier()  # exclude the wait for rank 0's first output from the timing
            resume_collection()
            try:
                _loop(trainer, writer, observer, stop)
            except BaseException:
                writer.abandon()
                raise
            interrupted = trainer.step_number < config.steps
            if not interrupted:
                folder = save_model(trainer.engine, trainer.model, run, runtime.comm)
                observer.finished(trainer.report(), folder)
        return stop.received or signal.SIGTERM if interrupted else None


def _loop(trainer: Trainer, writer: CheckpointWriter, observer: Observer, stop: StopSignals) -> None:
    """Train until the last step or until a rank is asked to stop, and then save a checkpoint."""
    config, profile = trainer.config, trainer.profile
    while trainer.step_number < config.steps:
        started = time.perf_counter()
        with profile.step(trainer.step_number + 1):
            result = trainer.step(stop.requested)
        step = trainer.step_number
        last = step == config.steps
        observer.stepped(result, time.perf_counter() - started)
        if result.stop and not last:
            break
        if last or _due(step, config.evaluate.every):
            with profile.phase("evaluation"):
                found = trainer.evaluate()
            observer.evaluated(found)
        if not last and _due(step, config.sample.every):
            with profile.phase("report"):
                report = trainer.report()
            observer.sampled(report)
        if not last and _due(step, config.checkpoint.every):
            with profile.phase("checkpoint"):
                writer.save(trainer, observer.elapsed_s)
        if profile.is_complete:
            observer.profiled(profile.trace())
    with profile.phase("checkpoint"):
        writer.save(trainer, observer.elapsed_s)
    writer.wait()
    observer.saved(writer.newest)
    if profile.enabled:  # the job has ended before the last step to record
        observer.profiled(profile.trace())


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _precision(config: TrainConfig, resume: Path | None, runtime: Runtime) -> PrecisionChoice:
    """Return the precision of the run.  A resumed run keeps its precision, regardless of the hardware."""
    if resume is not None:
        return PrecisionChoice(read_metadata(resume).precision, "as in the checkpoint")
    return choose_precision(config.plan.precision, runtime.comm, runtime.device)


class StopSignals:
    """Handles Ctrl-C and SIGTERM: the run finishes the step, saves a checkpoint and ends.

        with StopSignals() as stop:
            while not stop.requested: ...

    A second Ctrl-C more than `DEBOUNCE_S` seconds after the first signal ends the run at once.  Other repeated signals
    have no effect, because launchers forward the terminal's signals to their ranks.  Signals that are already ignored,
    such as SIGINT in a shell's background job, stay ignored.
    """

    DEBOUNCE_S = 0.5

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._first_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Return whether a signal was received."""
        return self.received is not None

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._first_at = signal.Signals(number), time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._first_at > self.DEBOUNCE_S:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)


EXCHANGE_S = 1.0
"""The time in seconds between two exchanges of messages while ranks wait for each other in `without_timeout`."""


@contextmanager
def without_timeout(comm: Communicator) -> Iterator[None]:
    """Return a context manager that lets ranks wait for each other longer than the timeout of `comm`.

    A thread of each rank uses `comm` to exchange messages every second, until all ranks have left the body or a rank
    has failed.  Therefore `comm` does not time out, and a dead rank is detected.  The code in the body must not use
    `comm`.  Collective call.

    Raises:
        CommunicationError: if a rank dies.
    """
    state, ended = "working", threading.Event()
    failures: list[CommunicationError] = []

    def exchange() -> None:
        try:
            while True:
                ended.wait(EXCHANGE_S)
                states = comm.all_gather_object(state)
                if "failed" in states or "working" not in states:
                    return
        except CommunicationError as error:
            failures.append(error)

    thread = threading.Thread(target=exchange, name="farandole-waiting-ranks", daemon=True)
    thread.start()
    try:
        yield
        state = "done"
    except BaseException:
        state = "failed"
        raise
    finally:
        ended.set()
        thread.join()
    if failures:
        raise failures[0]


@contextmanager
def _errors_only() -> Iterator[None]:
    """Return a context manager that suppresses this package's warnings."""
    logger = logging.getLogger("farandole")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def main(text: str) -> None:
    """Run the job specified by the JSON string `text` on this rank."""
    given = TrainingJobSpec.load(text)
    with farandole.init() as runtime:
        _run(given, runtime)


def join(request: Request) -> Path:
    """Train as one rank of a job started by another launcher, and return the run's folder.

    All ranks must be started with the same command.
    """
    with farandole.init() as runtime:
        given = _agree(request, runtime)
        _run(given, runtime)
    return given.run


def _agree(request: Request, runtime: Runtime) -> TrainingJobSpec:
    """Check the request on rank 0, and return the job specification; end all ranks if the check fails."""
    text, refused = "", ""
    with without_timeout(runtime.comm):
        if runtime.rank == 0:
            try:
                start = check(request, runtime.size)
                prepared = task_config(start.config, start.checkpoint)
                check_memory(prepared, runtime.local_size)
                make_task(prepared)
                text = job_spec(start).dump()
            except REFUSALS as refusal:
                refused = str(refusal)
    text = runtime.comm.broadcast_object(text)
    if text:
        return TrainingJobSpec.load(text)
    if runtime.rank == 0:
        raise ConfigError(refused)
    sys.exit(2)  # rank 0 prints the reason


def _run(given: TrainingJobSpec, runtime: Runtime) -> None:
    """Run a job on this rank.  If a signal ends the run early, exit with status 128 plus the signal's number."""
    pause_collection()  # resumed at the first step
    try:
        ended_by = train(given.config, given.run, given.checkpoint, runtime, given.is_newest)
    except REFUSALS as refusal:
        raise SystemExit(str(refusal)) from refusal
    finally:
        resume_collection()
    if ended_by is not None:
        sys.exit(128 + ended_by)


if __name__ == "__main__":
    main(sys.argv[1])
