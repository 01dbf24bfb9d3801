"""From the words of a command to a run that can start: what can be refused is refused here.

It happens once for all ranks, in the process that launches them or on rank 0, and touches nothing that
exists.  Nothing here imports torch: a typing mistake is answered at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from farandole.data.errors import DataError
from farandole.data.sources import find_source
from farandole.data.wording import counted
from farandole.memory.disk import OffloadError
from farandole.plan import PlanError
from farandole.train.config import (
    ConfigError,
    TrainConfig,
    known_keys,
    load_config,
    parse_config,
    plan_mistake,
    presets,
    saved_config,
    with_overrides,
)
from farandole.train.run_folder import (
    CheckpointError,
    DiskError,
    check_whole,
    checkpoint_to_resume,
    new_run,
    read_metadata,
)
from farandole.train.tasks import task_path

REFUSALS = (ConfigError, DataError, CheckpointError, DiskError, OffloadError, FloatingPointError)
"""What is the user's to mend, and said without a stack trace."""

DEFAULT_RANKS = 2

CHANGEABLE = (
    "name",
    "out",
    "steps",
    "checkpoint.",
    "evaluate.",
    "log.",
    "sample.",
    "data.cache",
    "plan.data",
    "plan.zero",
    "plan.hybrid",
    "plan.recompute",
    "plan.activation_bytes",
    "plan.swap",
    "plan.offload",
)
"""What may differ when a run is continued; the rest decides what it computes."""


@dataclass(frozen=True)
class Request:
    """What a person wrote: at most one preset or file, at most one folder, and `key=value`s."""

    source: str | None
    folder: Path | None
    overrides: list[str]
    resume: bool


@dataclass(frozen=True)
class Start:
    """A run that can start: what to do, on how many ranks, and, to continue one, from which checkpoint."""

    config: TrainConfig
    ranks: int
    checkpoint: Path | None = None


@dataclass(frozen=True)
class Order:
    """What every rank is told: to do `config` in folder `run`, from `checkpoint` if there is one."""

    config: TrainConfig
    run: Path
    checkpoint: Path | None = None

    def dump(self) -> str:
        """As JSON."""
        checkpoint = None if self.checkpoint is None else str(self.checkpoint)
        return json.dumps(
            {"config": self.config.model_dump(), "run": str(self.run), "checkpoint": checkpoint}
        )

    @staticmethod
    def load(text: str) -> Order:
        """From JSON."""
        values = json.loads(text)
        checkpoint = None if values["checkpoint"] is None else Path(values["checkpoint"])
        return Order(parse_config(values["config"]), Path(values["run"]), checkpoint)


def read_request(words: Sequence[str], resume: bool) -> Request:
    """Sort the words of a command.  Raises `ConfigError`."""
    overrides = [word for word in words if "=" in word]
    rest = [word for word in words if "=" not in word]
    folders = [word for word in rest if _is_folder(word, resume)]
    sources = [word for word in rest if word not in folders]
    if keys := [word for word in sources if word in known_keys()]:
        raise ConfigError(f"{keys[0]} is a key: write it with its value, {keys[0]}=VALUE")
    if len(sources) > 1:
        raise ConfigError(
            f"one preset or configuration file, please, not {len(sources)}: {', '.join(sources)}"
        )
    if len(folders) > 1:
        raise ConfigError(f"one run to continue, please, not {len(folders)}: {', '.join(folders)}")
    if folders and not resume:
        raise ConfigError(
            f"{folders[0]} is a folder; to train on the text in it, write data.path={folders[0]}; "
            f"to go on with the run in it, add --resume"
        )
    folder = Path(folders[0]) if folders else None
    return Request(sources[0] if sources else None, folder, overrides, resume)


def _is_folder(word: str, resume: bool) -> bool:
    """Whether a word means a folder; where a run is to be continued, also one that is not there."""
    path = Path(word).expanduser()
    return path.is_dir() or (resume and not path.is_file() and word not in presets())


def check(request: Request, ranks: int | None = None) -> Start:
    """Check everything against everything, and write nothing.

    Without a number of `ranks` a new run gets 2, and one that is continued as many as it had.

    Raises `ConfigError`, `DataError` where there is no text, or `CheckpointError` where the continued job would
    not be the same job.
    """
    start = _again(request, ranks) if request.resume else _anew(request, ranks or DEFAULT_RANKS)
    task_path(start.config.task)
    if start.config.task in ("text", "masked-text"):
        find_source(start.config.data.path, start.config.data.field)
    return start


def order(start: Start) -> Order:
    """Give a new run its folder.  Raises `ConfigError` where that cannot be made."""
    if start.checkpoint is not None:
        return Order(start.config, start.checkpoint.parent.parent, start.checkpoint)
    return Order(start.config, new_run(start.config))


def _anew(request: Request, ranks: int) -> Start:
    config = load_config(request.source, request.overrides)
    _check_ranks(config, ranks)
    return Start(config, ranks)


def _again(request: Request, ranks: int | None) -> Start:
    checkpoint = checkpoint_to_resume(request.folder or _folder_of_runs(request))
    run = checkpoint.parent.parent
    if checkpoint.parent.name != "checkpoints" or not (run / "config.toml").is_file():
        raise CheckpointError(
            f"checkpoint {checkpoint} does not lie in a run (RUN/checkpoints/{checkpoint.name}), and a run goes on in "
            f"its own folder; name it where training put it"
        )
    check_whole(checkpoint)
    saved = read_metadata(checkpoint)
    before = saved_config(saved.config)
    if request.source is None:
        config = with_overrides(before, request.overrides)
    else:
        config = load_config(request.source, request.overrides)
    ranks = ranks or saved.ranks
    if ranks != saved.ranks and before.plan.compression != "none":
        raise CheckpointError(
            f"checkpoint {checkpoint} was written by {counted(saved.ranks, 'rank')}, each of which remembers what "
            f"plan.compression={before.plan.compression} has left out, and this job has {ranks}: "
            f"continue with --ranks {saved.ranks}"
        )
    _check_ranks(config, ranks)
    if changed := _changes(before, config):
        raise CheckpointError(
            f"checkpoint {checkpoint} belongs to another configuration: {'; '.join(changed)}. "
            f"Leave that as it was, or start a new run; {', '.join(CHANGEABLE)} may change"
        )
    if saved.step >= config.steps:
        raise CheckpointError(
            f"checkpoint {checkpoint} is at step {saved.step} of {config.steps}: nothing is left to do; "
            f"for more, say steps={2 * saved.step}"
        )
    return Start(config, ranks, checkpoint)


def _check_ranks(config: TrainConfig, ranks: int) -> None:
    """Raise `ConfigError` unless `ranks` ranks can share the batch, and the plan is for as many."""
    config.micro_batches(ranks)
    try:
        config.plan.plan("fp32" if config.plan.precision == "auto" else config.plan.precision).check(ranks)
    except PlanError as error:
        raise plan_mistake(error) from None


def _folder_of_runs(request: Request) -> Path:
    """Where the runs are: the other keys may only make sense together with the checkpoint's."""
    words = [override for override in request.overrides if override.partition("=")[0].strip() == "out"]
    out = load_config(request.source, words).out
    if not Path(out).expanduser().exists():
        raise CheckpointError(
            f"there is no run to go on with: no folder {out} here; without --resume a new one starts, "
            f"and --resume RUN names one that is elsewhere"
        )
    return Path(out)


def _changes(before: TrainConfig, now: TrainConfig) -> list[str]:
    """`key was A, is B` for what decides what the run computes."""
    old, new = before.flat(), now.flat()
    return [
        f"{key} was {old.get(key)!r}, is {new.get(key)!r}"
        for key in {**old, **new}
        if old.get(key) != new.get(key) and not key.startswith(CHANGEABLE)
    ]
