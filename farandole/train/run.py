"""A whole run as one rank sees it: prepare, train, evaluate, save, report.

Rank 0 is the one that prints and writes; every rank takes the same decisions at the same steps.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

from farandole._startup import resume_collection
from farandole.launch.runtime import Runtime
from farandole.train import checkpoint
from farandole.train.allocator import keep_freed_memory
from farandole.train.checkpoint import CheckpointWriter
from farandole.train.checkpoint_folder import TOKENIZER, read_facts
from farandole.train.config import TrainConfig
from farandole.train.engine import Engine
from farandole.train.lock import RunLock
from farandole.train.observer import Observer
from farandole.train.precision import Choice, choose_precision
from farandole.train.stopping import StopSignals
from farandole.train.text import open_text


def train(config: TrainConfig, run: Path, resume: Path | None, runtime: Runtime) -> signal.Signals | None:
    """Train as `config` says, keeping everything in folder `run`; go on from checkpoint `resume`, if any.

    Called by all ranks.  Returns the signal that ended the run before its last step, or None.
    Raises `FloatingPointError` when the training diverges and `CheckpointError` when it cannot be saved.
    """
    keep_freed_memory()
    text = open_text(config)
    with StopSignals() as stop, RunLock(run, runtime.comm):
        choice = _precision(config, resume, runtime)
        engine = Engine(config, text, choice.name, runtime.comm, runtime.device)
        earlier_s, resumed_step = 0.0, None
        if resume is not None:
            facts = checkpoint.load(engine, resume, runtime.comm)
            earlier_s, resumed_step = facts.elapsed_s, facts.step
        # After loading: a checkpoint that turns out to be damaged must not cost the later ones their place.
        writer = CheckpointWriter(
            run, text.folder / TOKENIZER, config.checkpoint.keep, runtime.comm, resumed_step
        )
        with Observer(config, run, engine, choice, runtime, earlier_s) as observer:
            runtime.comm.barrier()  # rank 0 has introduced the run: nobody is seen waiting for that
            resume_collection()
            try:
                _loop(engine, writer, observer, stop)
            except BaseException:
                writer.abandon()
                raise
            interrupted = engine.step_number < config.steps
            if not interrupted:
                with engine.replica.whole():  # rank 0 writes a sample by itself
                    observer.finished(text.tokenizer)
        return stop.received or signal.SIGTERM if interrupted else None


def _loop(engine: Engine, writer: CheckpointWriter, observer: Observer, stop: StopSignals) -> None:
    """Steps until the last one, or until any rank was asked to stop; what is learned is saved."""
    config = engine.config
    while engine.step_number < config.steps:
        started = time.perf_counter()
        result = engine.step(stop.requested)
        step = engine.step_number
        last = step == config.steps
        observer.stepped(result, time.perf_counter() - started)
        if result.stop and not last:
            break
        if last or _due(step, config.evaluate.every):
            observer.evaluated(engine.evaluate())
        if not last and _due(step, config.checkpoint.every):
            writer.save(engine, observer.elapsed_s)
    writer.save(engine, observer.elapsed_s)
    writer.wait()
    observer.saved(writer.newest)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _precision(config: TrainConfig, resume: Path | None, runtime: Runtime) -> Choice:
    """A run that is continued keeps its precision, on whatever hardware."""
    if resume is not None:
        return Choice(read_facts(resume).precision, "as before")
    return choose_precision(config.precision, runtime.comm, runtime.device)
